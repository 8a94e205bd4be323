import itertools
import json
import random
from fractions import Fraction

import jax
import numpy as np
import pytest
from helpers import long, tiny_model, write_documents

from jaxlm.config import (
    Config,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainingConfig,
)
from jaxlm.data.pipeline import (
    PackedRows,
    device_iterator,
    fingerprint_of,
    open_sources,
    rows_by_length,
    rows_of,
    training_windows,
)
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import UserError
from jaxlm.losses import target_mask
from jaxlm.training import loop
from jaxlm.training.compilation import CompileOnce, RecompilationError
from jaxlm.training.resume import config_changes

# Lengths with their end token: 1,102 tokens in all.
LENGTHS = (2, 32, 33, 34, 1001)
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ARRAYS = ("tokens", "segment_ids", "positions")


def documents_of(lengths, first=1):
    """Documents whose tokens tell where they are: `first`, `first` + 1, ..., each ended by 0."""
    documents = []
    for length in lengths:
        documents.append([*range(first, first + length - 1), 0])
        first += length - 1
    return documents


def directory_of(tmp_path, lengths=LENGTHS, name="d", shard_tokens=40, first=1, vocabulary=65_000):
    return write_documents(
        tmp_path / name,
        documents_of(lengths, first),
        [[1, 0]],
        vocabulary,
        shard_tokens=shard_tokens,
    )


def stream_of(tmp_path, lengths=LENGTHS, **kwargs):
    return DataDirectory(directory_of(tmp_path, lengths, **kwargs)).stream("train")


def windows_of(directory, micro_batches=1, micro_batch_rows=1, **settings):
    config = DataConfig(directory=str(directory), **settings)
    sources = open_sources(config, DataDirectory(directory))
    return training_windows(sources, config, micro_batches, micro_batch_rows)


def blocks_of(windows):
    """Block ids in order, without those of rows that fill up."""
    ids = np.concatenate([windows[i]["block"].reshape(-1) for i in range(len(windows))])
    return ids[ids >= 0].tolist()


def row(rows, i):
    return {name: values[0] for name, values in rows.read(np.array([i])).items()}


def row_by_hand(lengths, start, stop, width):
    """Tokens [start, stop) of the documents of :func:`documents_of`, token by token."""
    tokens, documents, places = [], [], []
    for number, document in enumerate(documents_of(lengths)):
        tokens += document
        documents += [number] * len(document)
        places += range(len(document))
    kept = range(start, min(stop, len(tokens)))
    padding = [0] * (width - len(kept))
    first = places[start] if documents else 0
    return {
        "tokens": [tokens[t] for t in kept] + padding,
        "segment_ids": [documents[t] - documents[start] + 1 for t in kept] + padding,
        "positions": [places[t] - (first if documents[t] == documents[start] else 0) for t in kept]
        + padding,
    }


@pytest.mark.parametrize("layout", ["packed", "padded", "best_fit"])
def test_every_token_knows_its_document(tmp_path, layout):
    """By the tokens' values, which tell where they are; rows begin and end with documents too."""
    lengths = (8, 16, 1, 7, 9, 23, 1, 1, 5)
    of_value = {
        token: number
        for number, document in enumerate(documents_of(lengths))
        for token in document[:-1]
    }
    rows = rows_of(stream_of(tmp_path, lengths), DataConfig(sequence_length=8, layout=layout))
    numbers = np.array([-1, *range(len(rows))[::-1], -1])
    arrays = rows.read(numbers)
    documents = rows.documents(numbers, arrays["segment_ids"])
    assert ((documents == -1) == (arrays["segment_ids"] == 0)).all()
    inside = arrays["tokens"] > 0
    assert documents[inside].tolist() == [of_value[token] for token in arrays["tokens"][inside]]
    # End tokens are all alike: each belongs to the document of the token before it in its row.
    ends = (arrays["tokens"] == 0) & (arrays["segment_ids"] > 0)
    after = ends[:, 1:] & (arrays["positions"][:, 1:] > 0)
    assert after.any()
    assert (documents[:, 1:][after] == documents[:, :-1][after]).all()


# ---------------------------------------------------------------- packed


def test_packing_loses_nothing(tmp_path):
    """1,102 tokens in rows of 32: 34 full rows and a padded one; each token is a target once."""
    stream = stream_of(tmp_path)
    rows = PackedRows(stream, 32)
    assert len(rows) == 35  # ceil(1101 / 32)
    flat = stream.read(0, 1102).tolist()
    targets, inputs = [], []
    for i in range(len(rows)):
        arrays = row(rows, i)
        used = int((arrays["segment_ids"] > 0).sum())
        assert used == (33 if i < 34 else 14)
        assert {arrays[name].shape for name in ARRAYS} == {(33,)}
        inputs += arrays["tokens"][: used - 1].tolist()
        targets += arrays["tokens"][1:used].tolist()
    assert inputs == flat[:-1]
    assert targets == flat[1:]
    # Every token carries loss but the first of each of the 5 documents.
    segments = rows.read(np.arange(35))["segment_ids"]
    assert target_mask(segments).sum() == 1102 - 5


def test_the_tail_is_reported(tmp_path):
    windows = windows_of(directory_of(tmp_path), sequence_length=32)
    assert windows.padding == pytest.approx(19 / (35 * 33))  # the last row has 14 tokens
    assert windows.describe() == "35 rows of 32 tokens (packed, 1.65% padding, 1 pass(es))"


@pytest.mark.parametrize("shard_tokens", [1, 40, 300, 5000])
def test_rows_equal_those_made_token_by_token(tmp_path, shard_tokens):
    """Whatever the shards, in any order, with rows of padding between."""
    lengths = [*LENGTHS, 1, 1, 7, 31, 64]
    stream = stream_of(tmp_path, lengths, shard_tokens=shard_tokens)
    rows = PackedRows(stream, 31)
    wanted = np.array([3, -1, 0, len(rows) - 1, 20, 1, -1, 34, 2, 35])
    arrays = rows.read(wanted)
    assert arrays["block"].tolist() == wanted.tolist()
    for i, number in enumerate(wanted.tolist()):
        if number < 0:
            assert not any(arrays[name][i].any() for name in ARRAYS)
            continue
        expected = row_by_hand(lengths, number * 31, number * 31 + 32, 32)
        for name in ARRAYS:
            assert arrays[name][i].tolist() == expected[name], (number, name)
    assert arrays["tokens"].dtype == np.uint16
    assert arrays["segment_ids"].dtype == arrays["positions"].dtype == np.int32


def test_segments_and_positions_restart_with_each_document(tmp_path):
    rows = PackedRows(stream_of(tmp_path, (3, 1, 4, 5)), 7)
    first, second = row(rows, 0), row(rows, 1)
    assert first["segment_ids"].tolist() == [1, 1, 1, 2, 3, 3, 3, 3]
    assert first["positions"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    # The row after it begins with the same token as its input: the end of document 3.
    assert second["segment_ids"].tolist() == [1, 2, 2, 2, 2, 2, 0, 0]
    assert second["positions"].tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert target_mask(second["segment_ids"]).tolist() == [False] + [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("documents", "mask"),
    [
        # One document that also has the end token's id inside: a->end, end->b, b->end count.
        ([[7, 0, 8, 0]], [1, 1, 1, 0, 0]),
        # Two documents: both end tokens are targets; the second's first token is not.
        ([[7, 0], [8, 0]], [1, 0, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("layout", ["packed", "best_fit"])
def test_loss_is_masked_by_place_not_by_the_id_of_padding(tmp_path, documents, mask, layout):
    """The end token has the id that fills up rows: [a, end, b, end, padding, padding]."""
    data = DataDirectory(write_documents(tmp_path / "d", documents, [[1, 0]], 16))
    rows = rows_of(data.stream("train"), DataConfig(sequence_length=5, layout=layout))
    arrays = row(rows, 0)
    assert arrays["tokens"].tolist() == [7, 0, 8, 0, 0, 0]
    assert target_mask(arrays["segment_ids"]).tolist() == [bool(m) for m in mask]


# ---------------------------------------------------------------- order


def test_a_single_pass_reads_every_row_once(tmp_path):
    windows = windows_of(directory_of(tmp_path), 2, 4, sequence_length=32, seed=3)
    got = [windows[i]["block"] for i in range(len(windows))]
    assert len(got) == 5  # ceil(35 / 8)
    assert all(block.shape == (2, 4) for block in got)
    flat = np.concatenate([block.reshape(-1) for block in got])
    assert sorted(flat) == [-1] * 5 + list(range(35))
    # The order is that of a counter-based generator's raw numbers.
    raw = np.random.Philox(np.random.SeedSequence((3, 0, 0, 0))).random_raw(35).tolist()
    assert flat.tolist() == sorted(range(35), key=raw.__getitem__) + [-1] * 5
    # Rows that fill up the last window are padding and carry no loss.
    last = windows[4]
    assert target_mask(last["segment_ids"])[last["block"] == -1].sum() == 0


def test_epochs_are_counted_and_each_has_its_own_order(tmp_path):
    windows = windows_of(directory_of(tmp_path), 1, 10, sequence_length=32, epochs=3)
    flat = blocks_of(windows)
    assert len(windows) == 11  # ceil(105 / 10): windows cross from one epoch to the next
    passes = [flat[i * 35 : (i + 1) * 35] for i in range(3)]
    assert all(sorted(order) == list(range(35)) for order in passes)
    assert passes[0] != passes[1] != passes[2]


def test_order_is_that_of_the_seed_not_of_the_micro_batch(tmp_path):
    directory = directory_of(tmp_path)

    def order(seed, *shape):
        return blocks_of(windows_of(directory, *shape, seed=seed, sequence_length=32))

    assert order(1, 1, 8) == order(1, 2, 4) == order(1, 4, 2) == order(1, 8, 1) == order(1, 1, 5)
    assert order(1, 1, 8) != order(2, 1, 8)


@pytest.mark.parametrize(("group", "tokens"), [(5, 50), (7, 73)])
def test_rows_are_shuffled_within_groups_of_the_stream(tmp_path, group, tokens):
    """Rows of 10 tokens; groups of 73 begin at rows 0, 8 (token 80), 15 (150), 22 (220), ..."""
    directory = directory_of(tmp_path, (300,))
    order = blocks_of(windows_of(directory, 1, 3, sequence_length=10, shuffle_tokens=tokens))
    groups = [[r for r in range(30) if r * 10 // tokens == g] for g in range(7)]
    assert len(groups[1]) == group
    start = 0
    for rows in groups:
        assert sorted(order[start : start + len(rows)]) == rows
        start += len(rows)
    assert order != sorted(order)
    # Groups of equal size do not share one permutation.
    patterns = {tuple(r - 5 * g for r in order[5 * g : 5 * g + 5]) for g in range(6)}
    assert group != 5 or len(patterns) > 1


def test_order_does_not_depend_on_prefetch(tmp_path):
    windows = windows_of(directory_of(tmp_path), 1, 4, sequence_length=32, epochs=2)
    for prefetch in (1, 2, 7):
        iterator = device_iterator(windows, prefetch, DEVICE)
        flat = np.concatenate([np.asarray(window["block"]).reshape(-1) for window in iterator])
        iterator.close()
        assert flat[flat >= 0].tolist() == blocks_of(windows)


# ---------------------------------------------------------------- resume


def read_in_parts(windows, stops, prefetch=2):
    """Block ids through a new iterator after each of `stops` windows; its last state restored."""
    got, state = [], None
    for start, stop in itertools.pairwise([0, *stops, 10**9]):
        iterator = device_iterator(windows, prefetch, DEVICE)
        if state is not None:
            iterator.set_state(state)
            state = iterator.get_state()
            iterator.set_state(state)
        for _ in range(stop - start):
            window = next(iterator, None)
            if window is None:
                break
            got.append(np.asarray(window["block"]).reshape(-1).tolist())
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
    return got


# 117 documents of 1 to 60 tokens, 3,636 tokens in all.
AWKWARD = tuple(1 + i * i * 7 % 61 for i in range(117))


@pytest.mark.parametrize("stride", [10, long(1)])
def test_any_chain_of_restarts_gives_the_unbroken_order(tmp_path, stride):
    """Every single restart, every pair, 200 chains of three; the epoch's edge and the end too.

    Of pairs and chains of three, every tenth in the short run.
    """
    windows = windows_of(directory_of(tmp_path, AWKWARD), 1, 4, sequence_length=32)
    rows = -(-(sum(AWKWARD) - 1) // 32)
    assert len(windows) == -(-rows // 4)
    unbroken = read_in_parts(windows, [])
    assert sorted(b for window in unbroken for b in window if b >= 0) == list(range(rows))
    places = range(len(windows) + 1)
    more = list(itertools.combinations_with_replacement(places, 2))
    draw = random.Random(0)
    more += [sorted(draw.choices(places, k=3)) for _ in range(200)]
    for chain in [*((k,) for k in places), *more[::stride]]:
        assert read_in_parts(windows, chain) == unbroken, chain


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "packed", "shuffle_tokens": 100},
        {"layout": "padded"},
        {"layout": "padded", "buckets": (3, 5)},
        {"layout": "best_fit"},
        {"layout": "packed", "tokens": (90, 900)},
    ],
)
def test_restarts_of_every_layout_and_over_epochs(tmp_path, settings):
    directory = directory_of(tmp_path)
    windows = windows_of(directory, 1, 4, sequence_length=9, epochs=2, **settings)
    unbroken = read_in_parts(windows, [])
    assert len(unbroken) == len(windows)
    half = len(windows) // 2
    for chain in [(0,), (1, 6), (half - 1, half, half + 1), (5, 5, len(windows))]:
        assert read_in_parts(windows, chain) == unbroken


def test_state_counts_windows_handed_out_not_those_prefetched(tmp_path):
    windows = windows_of(directory_of(tmp_path), 1, 4, sequence_length=9)
    iterator = device_iterator(windows, 3, DEVICE)
    for count in range(1, 4):
        next(iterator)
        assert iterator.get_state() == {"next_index": count}
    iterator.close()


def test_what_decides_the_order_is_frozen_at_resume():
    """A micro-batch may be cut differently as long as windows have the same rows of each length."""

    def config(micro_batch_rows=4, micro_batches=2, **data):
        training = TrainingConfig(micro_batch_rows=micro_batch_rows, micro_batches=micro_batches)
        return Config(data=DataConfig(**data), training=training)

    stored = json.loads(json.dumps(loop.to_tree(config())))
    assert config_changes(stored, config(2, 4, directory="elsewhere", prefetch=7)) == ([], [])
    for key, value in {
        "sources": (SourceConfig("a", 1.0),),
        "tokens": (0, 1024),
        "sequence_length": 8,
        "layout": "best_fit",
        "shuffle_tokens": 2048,
        "seed": 7,
    }.items():
        refused, on_request = config_changes(stored, config(**{key: value}))
        assert [line.split(":")[0] for line in refused + on_request] == [f"data.{key}"]
    assert config_changes(stored, config(3, 3))[0] == [
        "training.micro_batch_rows * training.micro_batches: was 8 rows an update, is 9"
    ]
    buckets = {"layout": "padded", "buckets": (300,)}
    stored = json.loads(json.dumps(loop.to_tree(config(4, 2, **buckets))))
    # 4 x 1024 / 300 is 14 rows, twice; 2 x 1024 / 300 is 7, four times; 8 x 1024 / 300 is 27.
    assert config_changes(stored, config(2, 4, **buckets)) == ([], [])
    assert config_changes(stored, config(8, 1, **buckets))[0] == [
        "training.micro_batch_rows * training.micro_batches: was 28/8 rows an update, is 27/8 "
        "(by row length, see data.buckets)"
    ]


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize("shuffle_tokens", [500, None])
def test_two_ranges_are_the_rows_of_one(tmp_path, shuffle_tokens):
    """[0, 1000) and [1000, 2000) of 2,345 tokens, rows of 10."""
    lengths = (345, 1, 654, 333, 1012)
    directory = directory_of(tmp_path, lengths)

    def read(*tokens):
        windows = windows_of(
            directory, 1, 1, sequence_length=10, tokens=tokens, shuffle_tokens=shuffle_tokens
        )
        return [windows[i] for i in range(len(windows))]

    first, second, both = read(0, 1000), read(1000, 2000), read(0, 2000)
    assert len(first) == len(second) == 100
    separate = {int(w["block"][0, 0]): w for w in first + second}
    together = {int(w["block"][0, 0]): w for w in both}
    assert set(together) == set(range(200))
    if shuffle_tokens is not None:  # both ends are multiples of it: the order is the same
        assert list(separate) == list(together)
    for block, window in together.items():
        expected = row_by_hand(lengths, block * 10, block * 10 + 11, 11)  # with token 10 i + 10
        for name in ARRAYS:
            assert separate[block][name][0, 0].tolist() == expected[name]
            assert window[name][0, 0].tolist() == expected[name]


def test_a_range_may_end_where_the_stream_does(tmp_path):
    directory = directory_of(tmp_path)  # 1,102 tokens
    assert sorted(blocks_of(windows_of(directory, sequence_length=32, tokens=(1024, 1102)))) == [
        32,
        33,
        34,
    ]
    assert len(windows_of(directory, sequence_length=32, tokens=(0, 1088))) == 34


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokens": (0, 1000)},
            r"data.tokens: 1,000 is not a multiple of data.sequence_length \(32\); the nearest are "
            r"992 and 1,024",
        ),
        ({"tokens": (33, 64)}, r"data.tokens: 33 is .* the nearest are 32 and 64"),
        ({"tokens": (0, 1120)}, r"data.tokens: asks for tokens up to 1,120, but .* only 1,102;"),
        ({"tokens": (0, 1103), "layout": "padded"}, r"up to 1,103, but .* has only 1,102;"),
        (
            {"tokens": (150, 1102), "layout": "best_fit"},
            r"no row to train on in tokens \[150, 1102\] of",
        ),
    ],
)
def test_ranges_that_are_not_there(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        windows_of(directory_of(tmp_path), **{"sequence_length": 32, **settings})


@pytest.mark.parametrize("layout", ["padded", "best_fit"])
def test_a_range_of_documents_is_those_that_begin_in_it(tmp_path, layout):
    """Documents begin at 0, 2, 34, 67, 101: of [2, 100) the second, third and fourth, whole."""
    settings = {"sequence_length": 40, "layout": layout, "tokens": (2, 100)}
    windows = windows_of(directory_of(tmp_path), **settings)
    read = [windows[i] for i in range(len(windows))]
    tokens = [t for w in read for t in w["tokens"][w["segment_ids"] > 0].tolist()]
    expected = [t for document in documents_of(LENGTHS)[1:4] for t in document]
    assert sorted(tokens) == sorted(expected)
    assert sorted(blocks_of(windows)) == [1, 2, 3]  # as in the whole stream


# ---------------------------------------------------------------- padded and best_fit


def test_padded_layout_gives_each_document_its_rows(tmp_path):
    config = DataConfig(sequence_length=4, layout="padded")
    rows = rows_of(stream_of(tmp_path, (2, 5, 9)), config)
    arrays = rows.read(np.arange(4))
    used = (arrays["segment_ids"] > 0).sum(axis=1)
    assert used.tolist() == [2, 5, 5, 5]  # 9 tokens are pieces of 5 and 5 that share one
    assert arrays["tokens"].tolist() == [
        [1, 0, 0, 0, 0],
        [2, 3, 4, 5, 0],
        [6, 7, 8, 9, 10],
        [10, 11, 12, 13, 0],
    ]
    assert arrays["positions"].tolist() == [[0, 1, 0, 0, 0]] + [[0, 1, 2, 3, 4]] * 3
    assert target_mask(arrays["segment_ids"]).sum() == (2 - 1) + (5 - 1) + (9 - 1)
    assert arrays["block"].tolist() == [0, 1, 2, 3]


def targets_of(windows):
    """The targets of all windows, and the window's (rows, length) shapes."""
    targets, shapes = [], set()
    for i in range(len(windows)):
        window = windows[i]
        mask = target_mask(window["segment_ids"])
        targets += window["tokens"][..., 1:][mask].tolist()
        shapes.add(window["tokens"].shape)
    return sorted(targets), shapes


def targets_by_hand(lengths):
    return sorted(t for document in documents_of(lengths) for t in document[1:])


def lognormal_lengths(count, median, sigma):
    draws = np.exp(np.random.default_rng(1).normal(np.log(median), sigma, count))
    return np.clip(draws, 2, 5000).astype(int).tolist()


def test_buckets_have_few_shapes_and_less_padding(tmp_path):
    """Rows of 16, 32, 64 and 128 tokens; every target once an epoch; 4 shapes."""
    lengths = lognormal_lengths(400, 40, 1.0)
    directory = directory_of(tmp_path, lengths, shard_tokens=999)
    settings = {"sequence_length": 128, "layout": "padded", "epochs": 2}
    plain = windows_of(directory, 2, 3, **settings)
    windows = windows_of(directory, 2, 3, buckets=(16, 32, 64), **settings)
    targets, shapes = targets_of(windows)
    assert targets == sorted(targets_by_hand(lengths) * 2)
    # 3 rows of 128 tokens a micro-batch, and as many tokens in shorter rows.
    assert shapes == {(2, 3, 129), (2, 6, 65), (2, 12, 33), (2, 24, 17)}
    # A document of n tokens is pieces of 129 that share a token: n, or the rest of n - 128 k.
    pieces = []
    for n in lengths:
        while n > 129:
            pieces.append(129)
            n -= 128
        pieces.append(n)
    widths = [min(w for w in (17, 33, 65, 129) if w >= piece) for piece in pieces]
    assert windows.padding == pytest.approx(1 - sum(pieces) / sum(widths))
    assert plain.padding == pytest.approx(1 - sum(pieces) / (129 * len(pieces)))
    assert windows.padding < plain.padding / 2
    # Each piece once an epoch, in an order of lengths that is shuffled and another one each epoch.
    count = len(windows) // 2
    for epoch in (0, 1):
        ids = np.concatenate(
            [windows[epoch * count + i]["block"].reshape(-1) for i in range(count)]
        )
        assert sorted(ids[ids >= 0]) == list(range(len(pieces)))
    order = [windows[i]["tokens"].shape[-1] for i in range(len(windows))]
    assert order[:count] != order[count:]
    assert sorted(order[:count]) == sorted(order[count:])
    assert order[:count] != sorted(order[:count])
    # More epochs later do not change those that were.
    longer = windows_of(directory, 2, 3, buckets=(16, 32, 64), **{**settings, "epochs": 3})
    assert blocks_of(longer)[: 2 * len(pieces)] == blocks_of(windows)


def test_micro_batches_of_shorter_rows_hold_about_as_many_tokens():
    assert rows_by_length(1024, (100, 512), 8) == {100: 82, 512: 16, 1024: 8}


def test_each_announced_length_is_compiled_for_once():
    once = CompileOnce(jax.jit(lambda _, x: x + 1, static_argnums=0), None, (8, 16))
    for _ in range(2):
        assert once(np.zeros((4, 8)), variant=8).shape == (4, 8)
        assert once(np.zeros((2, 16)), variant=16).shape == (2, 16)
    with pytest.raises(RecompilationError, match=r"was float32\[4,8\], is float32\[3,8\]"):
        once(np.zeros((3, 8)), variant=8)
    with pytest.raises(RecompilationError, match="once more, for 9; expected 8, 16"):
        once(np.zeros((4, 9)), variant=9)


def test_an_empty_bucket_has_no_shape(tmp_path):
    windows = windows_of(
        directory_of(tmp_path, (20, 18)), sequence_length=32, layout="padded", buckets=(8, 19)
    )
    assert windows.lengths == [19]


def test_best_fit_by_hand(tmp_path):
    """Rows hold 9 tokens: [6, 3] and [5, 4] fit, 2 begins a third; a row is in stream order."""
    stream = stream_of(tmp_path, (3, 5, 2, 6, 4))
    rows = rows_of(stream, DataConfig(sequence_length=8, layout="best_fit"))
    arrays = rows.read(np.array([0, 1, 2, -1]))
    assert arrays["segment_ids"].tolist() == [
        [1, 1, 1, 2, 2, 2, 2, 2, 2],
        [1, 1, 1, 1, 1, 2, 2, 2, 2],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0] * 9,
    ]
    assert arrays["positions"].tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 0, 1, 2, 3],
        [0, 1, 0, 0, 0, 0, 0, 0, 0],
        [0] * 9,
    ]
    assert arrays["tokens"][0].tolist() == [1, 2, 0, 8, 9, 10, 11, 12, 0]
    assert arrays["tokens"][2].tolist() == [7, 0, 0, 0, 0, 0, 0, 0, 0]
    assert arrays["block"].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("shuffle_tokens", [None, 5000])
def test_best_fit_keeps_documents_whole_with_little_padding(tmp_path, shuffle_tokens):
    """Log-normal lengths, median 60, rows of 256: padding below 3 %, and below 1 % ungrouped."""
    lengths = lognormal_lengths(600, 60, 1.0)
    directory = directory_of(tmp_path, lengths, shard_tokens=4000)
    settings = {"sequence_length": 256, "shuffle_tokens": shuffle_tokens}
    windows = windows_of(directory, 1, 4, layout="best_fit", **settings)
    targets, shapes = targets_of(windows)
    assert targets == targets_by_hand(lengths)
    assert shapes == {(1, 4, 257)}
    # Tokens tell which document they are of; a document that fits a row is in one.
    document_of = {}
    for number, document in enumerate(documents_of(lengths)):
        document_of |= dict.fromkeys(document[:-1], number)
    rows_of_document = {}
    for i in range(len(windows)):
        window = windows[i]
        for block, tokens, segments in zip(
            window["block"][0], window["tokens"][0], window["segment_ids"][0], strict=True
        ):
            for token, segment in zip(tokens.tolist(), segments.tolist(), strict=True):
                if segment and token:
                    place = (int(block), segment)
                    rows_of_document.setdefault(document_of[token], set()).add(place)
    for number, places in rows_of_document.items():
        assert len(places) == max(1, -(-(lengths[number] - 1) // 256))
    pieces = sum(n + max(0, -(-(n - 1) // 256) - 1) for n in lengths)
    rows = len({block for places in rows_of_document.values() for block, _ in places})
    assert windows.padding == pytest.approx(1 - pieces / (257 * rows))
    assert windows.padding < (0.01 if shuffle_tokens is None else 0.03)


# ---------------------------------------------------------------- sources


def mixed(tmp_path, sizes, weights, sequence_length=10, shape=(1, 4), **settings):
    """Windows of sources of so many rows of one-document streams, and the data of the first."""
    directories = [
        directory_of(tmp_path, (rows * sequence_length + 1,), name=f"s{i}", first=1 + i)
        for i, rows in enumerate(sizes)
    ]
    config = DataConfig(
        sources=tuple(SourceConfig(str(d), w) for d, w in zip(directories, weights, strict=True)),
        sequence_length=sequence_length,
        **settings,
    )
    data = DataDirectory(directories[0])
    sources = open_sources(config, data)
    return training_windows(sources, config, *shape), data, sources


WEIGHTS = [
    (0.7, 0.3),
    (1.0, 1.0, 1.0),
    (0.9, *[0.01] * 10),  # where sorting by (i + 1/2) / weight is 4.5 rows off
    (0.333333, 0.123457, 0.271828, 0.6),  # a period beyond the data
    (2.0, 1, 1, 20, 20, 1, 100, 5, 8, 100, 100),  # where the largest deficit first is 1.3 off
    (5.0, 3.0, 2.0, 0.5, 0.01),
    (1e-3, 1.0),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_share_is_within_one_row_of_its_weight_at_every_prefix(tmp_path, weights):
    sizes = [400] + [150] * (len(weights) - 1)
    windows, *_ = mixed(tmp_path, sizes, weights)
    order = blocks_of(windows)
    edges = np.cumsum([0, *sizes])
    sources = np.searchsorted(edges, order, side="right") - 1
    shares = [Fraction(str(w)) / sum(Fraction(str(w)) for w in weights) for w in weights]
    counts = [0] * len(weights)
    for n, source in enumerate(sources.tolist(), 1):
        counts[source] += 1
        assert all(abs(c - n * s) < 1 for c, s in zip(counts, shares, strict=True)), n
    # Each row at most once, each source's in an order of its own; one of them is used up.
    assert len(set(order)) == len(order) == windows.rows
    used_up = [s for s, size in enumerate(sizes) if counts[s] == size]
    assert used_up
    # One more row would be beyond: no source could give it and keep every share.
    n = len(order) + 1
    assert any(counts[s] + 1 > sizes[s] and n * shares[s] - counts[s] > 0 for s in used_up)
    names = windows.describe().split("; ends with ")[1]
    assert names in {str(tmp_path / f"s{s}") for s in used_up}


def test_rows_of_sources_are_theirs_and_ids_tell_which(tmp_path):
    """30 rows of the first source have ids 0 to 29, 20 of the second 30 to 49."""
    windows, *_ = mixed(tmp_path, (30, 20), (2.0, 1.0), epochs=1, shape=(2, 3))
    seen = []
    for i in range(len(windows)):
        window = windows[i]
        for block, tokens in zip(
            window["block"].reshape(-1), window["tokens"].reshape(-1, 11), strict=True
        ):
            if block < 0:
                assert not tokens.any()
                continue
            number, first = (block, 1) if block < 30 else (block - 30, 2)
            assert tokens[:10].tolist() == list(
                range(first + number * 10, first + number * 10 + 10)
            )
            seen.append(int(block))
    # 2 : 1, the first of equal deadlines first, until the first source's 31st row is due.
    assert [b >= 30 for b in seen] == [False, False, True] * 15
    assert windows[7]["block"].reshape(-1)[3:].tolist() == [-1] * 3  # 45 rows are 7 windows and 3
    assert sum(b < 30 for b in seen) == 30
    assert sum(b >= 30 for b in seen) == 15
    assert windows.describe() == (
        f"45 rows of 10 tokens (packed, 0.00% padding, 1 pass(es)): 30 from the 30 of "
        f"{tmp_path / 's0'}, 15 from the 20 of {tmp_path / 's1'}; ends with {tmp_path / 's0'}"
    )


def test_passes_over_a_mixture_read_what_is_left_before_they_repeat(tmp_path):
    """Equal weights, 10 and 20 rows, 2 passes: the small one twice, the large one once."""
    windows, *_ = mixed(tmp_path, (10, 20), (1.0, 1.0), epochs=2)
    order = blocks_of(windows)
    counts = np.bincount(order)
    assert counts[:10].tolist() == [2] * 10
    assert counts[10:].tolist() == [1] * 20


def test_ranges_of_a_mixture_add_up(tmp_path):
    def order(*tokens):
        return blocks_of(mixed(tmp_path / str(tokens), (60, 40), (0.6, 0.4), tokens=tokens)[0])

    for name in ((0, 300), (300, 700), (0, 700), (0, 1000)):
        (tmp_path / str(name)).mkdir()
    first, second, both = order(0, 300), order(300, 700), order(0, 700)
    assert sorted(first + second) == sorted(both) == [*range(42), *range(60, 60 + 28)]
    assert sum(b < 60 for b in first) == 18
    assert len(order(0, 1000)) == 100
    (tmp_path / "(0, 1010)").mkdir()
    with pytest.raises(UserError, match=r"the mixture, which ends with .*s\d, has only 1,000;"):
        order(0, 1010)


@pytest.mark.parametrize("layout", ["packed", "padded", "best_fit"])
def test_a_mixture_resumes_in_every_layout(tmp_path, layout):
    windows, *_ = mixed(tmp_path, (30, 20), (0.7, 0.3), layout=layout, epochs=2)
    unbroken = read_in_parts(windows, [])
    assert len(unbroken) == len(windows)
    for chain in [(1,), (3, 9, 10)]:
        assert read_in_parts(windows, chain) == unbroken
    again, *_ = mixed(
        tmp_path / "micro", (30, 20), (0.7, 0.3), layout=layout, epochs=2, shape=(4, 1)
    )
    assert blocks_of(again) == blocks_of(windows)


def test_sources_must_be_of_one_tokenizer_vocabulary_and_normalization(tmp_path):
    directory = directory_of(tmp_path)
    data = DataDirectory(directory)

    def opened(*names):
        return open_sources(
            DataConfig(sources=tuple(SourceConfig(str(tmp_path / n), 1.0) for n in names)), data
        )

    directory_of(tmp_path, (5, 6), name="more", vocabulary=64_999)
    directory_of(tmp_path, (5, 6), name="text", vocabulary=65_000)
    directory_of(tmp_path, (5, 6), name="copy", vocabulary=65_000)
    assert [source.name for source in opened("d", "text")] == [
        str(tmp_path / "d"),
        str(tmp_path / "text"),
    ]
    with pytest.raises(UserError, match=r"more differs from .*d in its vocabulary; prepare"):
        opened("d", "more")
    with pytest.raises(UserError, match=r"copy holds the same tokens as .*text; name each once"):
        opened("text", "copy")
    manifest = json.loads((tmp_path / "text" / "manifest.json").read_text())
    for field, value in (("normalization", "NFKC"), ("tokenizer", {"file": "x"})):
        changed = json.dumps({**manifest, field: value})
        (tmp_path / "text" / "manifest.json").write_text(changed)
        with pytest.raises(UserError, match=f"text differs from .*d in its {field}; prepare"):
            opened("text")


def test_the_fingerprint_covers_every_source(tmp_path):
    _, data, sources = mixed(tmp_path, (3, 4), (1.0, 1.0))
    config = DataConfig(
        directory=str(data.directory),
        sources=tuple(SourceConfig(directory=s.name, weight=1.0) for s in sources),
    )
    assert fingerprint_of(data, config, sources) == {
        **data.fingerprint(),
        "sources[1] train tokens": sources[1].fingerprint["train tokens"],
    }
    assert fingerprint_of(data, config, sources[:1]) == data.fingerprint()


@pytest.mark.parametrize("key", ["tokens", "buckets"])
def test_what_several_sources_cannot_have(tmp_path, key):
    value = {"tokens": (0, 40), "buckets": (4,)}[key]
    with pytest.raises(
        UserError, match=rf"data.{key}: with data.layout padded .* one source; remove"
    ):
        mixed(tmp_path, (5, 6), (1.0, 1.0), layout="padded", **{key: value})


# ---------------------------------------------------------------- runs


def run_config(tmp_path, data, **training):
    return Config(
        run=RunConfig(name="run", directory=str(tmp_path / "runs")),
        data=data,
        model=tiny_model("transformer", width=8, heads=2, feed_forward=8),
        depth=DepthConfig(mean=2.0, maximum=2, backprop=2),
        loss=LossConfig(chunk_tokens=16),
        optim=OptimConfig(name="adamw"),
        training=TrainingConfig(micro_batch_rows=2, **training),
        evaluation=EvaluationConfig(every=0, depths=(1,), rows=2),
        logging=LoggingConfig(tensorboard=False),
    )


def test_a_run_with_buckets_and_one_with_sources(random_data, tmp_path, capsys):
    """Every window has its update, in their order; the horizon is known before the first."""
    rng = np.random.default_rng(5)
    documents = [[*rng.integers(1, 64, 20), 0] for _ in range(20)]
    other = write_documents(tmp_path / "other", documents, [[1, 0]], 64)
    sources = (SourceConfig(str(random_data), 3.0), SourceConfig(str(other), 1.0))
    for name, settings in {
        "buckets": {"layout": "padded", "buckets": (8, 20), "sequence_length": 40},
        "sources": {"sources": sources, "sequence_length": 20},
    }.items():
        data = DataConfig(directory=str(random_data), **settings)
        config = run_config(tmp_path / name, data)
        windows = training_windows(open_sources(data, DataDirectory(random_data)), data, 1, 2)
        too_many = run_config(tmp_path / name, data, updates=len(windows) + 1)
        with pytest.raises(UserError, match=rf"the data gives {len(windows)}: .* lower training"):
            loop.Run(too_many)
        assert loop.train(config) == 0
        records = (tmp_path / name / "runs" / "run" / "blocks.jsonl").read_text().splitlines()
        expected = [windows[i]["block"].reshape(-1).tolist() for i in range(len(windows))]
        expected = [[block for block in blocks if block >= 0] for blocks in expected]
        assert [json.loads(record)["blocks"] for record in records] == expected
        assert f"Data: {windows.describe()}" in capsys.readouterr().out
        assert len(windows.lengths) == (3 if name == "buckets" else 1)
    changed = run_config(
        tmp_path / "sources",
        DataConfig(directory=str(random_data), sequence_length=20, sources=sources[::-1]),
    )
    with pytest.raises(UserError, match=r"data.sources: was .*, is (.|\n)*data: sources\[1\]"):
        loop.train(changed)
