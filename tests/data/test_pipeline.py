import jax
import numpy as np
import pytest
from helpers import write_documents

from jaxlm.config import DataConfig
from jaxlm.data.pipeline import (
    PackedRows,
    PaddedRows,
    device_iterator,
    rows_of,
    stack_rows,
    training_windows,
)
from jaxlm.data.shards import DataDirectory
from jaxlm.losses import target_mask

# Lengths with their end token: 1,102 tokens in all.
LENGTHS = (2, 32, 33, 34, 1001)


def stream_of(tmp_path, lengths=LENGTHS):
    documents = [[*range(1, length), 0] for length in lengths]
    return DataDirectory(
        write_documents(tmp_path / "d", documents, [[1, 0]], 2048, shard_tokens=40)
    ).stream("train")


def ids(iterator):
    return [np.asarray(window["block"]).reshape(-1).tolist() for window in iterator]


def test_packing_loses_nothing(tmp_path):
    """1,102 tokens in rows of 32: 34 full rows and a padded one; each token is a target once."""
    stream = stream_of(tmp_path)
    rows = PackedRows(stream, 32)
    assert len(rows) == 35  # ceil(1101 / 32)
    flat = stream.read(0, 1102).tolist()
    targets, inputs = [], []
    for i in range(len(rows)):
        row = rows[i]
        used = int((row["segment_ids"] > 0).sum())
        assert used == (33 if i < 34 else 14)
        assert row["tokens"].shape == row["segment_ids"].shape == row["positions"].shape == (33,)
        inputs += row["tokens"][: used - 1].tolist()
        targets += row["tokens"][1:used].tolist()
    assert inputs == flat[:-1]
    assert targets == flat[1:]
    # Every token carries loss but the first of each of the 5 documents.
    assert sum(target_mask(rows[i]["segment_ids"]).sum() for i in range(35)) == 1102 - 5


def test_segments_and_positions_restart_with_each_document(tmp_path):
    rows = PackedRows(stream_of(tmp_path, (3, 1, 4, 5)), 7)
    first, second = rows[0], rows[1]
    assert first["segment_ids"].tolist() == [1, 1, 1, 2, 3, 3, 3, 3]
    assert first["positions"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    # The row after it begins with the same token as its input: the end of document 3.
    assert second["segment_ids"].tolist() == [1, 2, 2, 2, 2, 2, 0, 0]
    assert second["positions"].tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert target_mask(second["segment_ids"]).tolist() == [False] + [True] * 4 + [False] * 2


def test_padded_layout_gives_each_document_its_rows(tmp_path):
    rows = PaddedRows(stream_of(tmp_path, (2, 5, 9)), 4)
    used = [int((rows[i]["segment_ids"] > 0).sum()) for i in range(len(rows))]
    assert used == [2, 5, 5, 5]  # 9 tokens are pieces of 5 and 5 that share one
    assert rows[2]["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert rows[3]["tokens"].tolist() == [5, 6, 7, 8, 0]
    targets = sum(target_mask(rows[i]["segment_ids"]).sum() for i in range(len(rows)))
    assert targets == (2 - 1) + (5 - 1) + (9 - 1)


def test_a_single_pass_reads_every_row_once(tmp_path):
    rows = PackedRows(stream_of(tmp_path), 32)
    windows = training_windows(rows, DataConfig(seed=3), 2, 4)
    got = [window["block"] for window in windows]
    assert len(got) == 5  # ceil(35 / 8)
    assert all(block.shape == (2, 4) for block in got)
    flat = np.concatenate([block.reshape(-1) for block in got])
    assert sorted(flat) == [-1] * 5 + list(range(35))
    assert flat.tolist() != sorted(flat.tolist())
    # Rows that fill up the last window are padding and carry no loss.
    last = windows[4]
    assert target_mask(last["segment_ids"])[last["block"] == -1].sum() == 0


def test_epochs_are_counted_and_each_has_its_own_order(tmp_path):
    rows = PackedRows(stream_of(tmp_path), 32)
    windows = training_windows(rows, DataConfig(epochs=3), 1, 10)
    flat = np.concatenate([window["block"].reshape(-1) for window in windows])
    assert len(windows) == 11  # ceil(105 / 10): windows cross from one epoch to the next
    passes = [flat[i * 35 : (i + 1) * 35].tolist() for i in range(3)]
    assert all(sorted(order) == list(range(35)) for order in passes)
    assert passes[0] != passes[1] != passes[2]


def test_order_is_that_of_the_seed_not_of_the_micro_batch(tmp_path):
    rows = PackedRows(stream_of(tmp_path), 32)

    def order(seed, micro_batches, micro_batch_rows):
        windows = training_windows(rows, DataConfig(seed=seed), micro_batches, micro_batch_rows)
        return np.concatenate([window["block"].reshape(-1) for window in windows])[:35].tolist()

    assert order(1, 1, 8) == order(1, 2, 4) == order(1, 8, 1) == order(1, 1, 5)
    assert order(1, 1, 8) != order(2, 1, 8)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_any_chain_of_restarts_gives_the_unbroken_order(tmp_path, layout):
    config = DataConfig(layout=layout, sequence_length=9, epochs=2)
    windows = training_windows(rows_of(stream_of(tmp_path), config), config, 1, 4)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    unbroken = device_iterator(windows, 2, device)
    expected = ids(unbroken)
    unbroken.close()
    assert len(expected) == len(windows)
    got, state = [], None
    for length in (1, 5, 0, 7, 1000):
        iterator = device_iterator(windows, 2, device)
        if state is not None:
            iterator.set_state(state)
            iterator.set_state(iterator.get_state())
        for _ in range(length):
            window = next(iterator, None)
            got += ids([window]) if window is not None else []
        state = iterator.get_state()
        iterator.close()
    assert got == expected


def test_state_counts_windows_handed_out_not_those_prefetched(tmp_path):
    config = DataConfig(sequence_length=9)
    windows = training_windows(rows_of(stream_of(tmp_path), config), config, 1, 4)
    iterator = device_iterator(windows, 3, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for count in range(1, 4):
        next(iterator)
        assert iterator.get_state() == {"next_index": count}
    iterator.close()


def test_stacking_fills_up_with_padding():
    row = {
        "tokens": np.ones(3, np.uint16),
        "segment_ids": np.ones(3, np.int32),
        "positions": np.arange(3, dtype=np.int32),
        "block": np.asarray(7, np.int32),
    }
    window = stack_rows([row], 2, 2)
    assert window["block"].tolist() == [[7, -1], [-1, -1]]
    assert window["tokens"].shape == (2, 2, 3)
    assert window["segment_ids"].sum() == 3
