"""Spikes that last, and what going back does."""

import dataclasses
import re
import signal
import types

import jax
import pytest
from test_runs import config_for, directory_of, final_state, signal_at

from jaxlm.config import CheckpointConfig, RewindConfig
from jaxlm.errors import Failure, UserError
from jaxlm.training import loop
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.manifest import remove, updates_in
from jaxlm.training.metrics import read_records
from jaxlm.training.replay import replay
from jaxlm.training.rewind import Rewind, Rewinds, SpikeError, SpikeWatch, spike_limit

SETTINGS = RewindConfig(response="skip_data", window=5, deviations=3.0, patience=2)


def record(update: int, loss: float | None) -> dict:
    return {"update": update, "loss": loss}


def test_the_limit_is_median_plus_deviations():
    # Median 3; absolute deviations 1, 0, 1, 0, 1 have the median 1.
    assert spike_limit([2.0, 3.0, 4.0, 3.0, 2.0], 5, 3.0) == 6.0
    assert spike_limit([2.0, 3.0], 5, 3.0) is None


def test_a_spike_that_passes_is_none_and_one_that_lasts_is():
    watch = SpikeWatch(SETTINGS)
    for update, loss in enumerate([2.0, 3.0, 4.0, 3.0, 2.0]):
        assert watch.read(record(update, loss)) is None
    assert watch.read(record(5, 9.0)) is None  # passes
    assert watch.read(record(6, 3.0)) is None
    assert watch.read(record(7, 9.0)) is None
    spike = watch.read(record(8, None))
    assert (spike.update, spike.since) == (8, 7)
    # The losses beyond are no part of the median: 3, 4, 3, 2, 3.
    assert spike.why == (
        "the loss is not finite, above 3.0000 (the median of before, and deviation), for 2 updates "
        "in a row"
    )


def test_nothing_is_a_spike_before_the_window_is_full_but_what_is_not_finite():
    watch = SpikeWatch(SETTINGS)
    assert all(watch.read(record(u, 99.0 if u == 2 else 1.0)) is None for u in range(4))
    assert watch.read(record(4, None)) is None
    assert watch.read(record(5, None)).since == 4


def test_the_answer_is_what_the_settings_and_the_data_allow(tmp_path):
    """Back from update 12 to 8 of 30: windows 8 to 12 are passed over if there are 35."""
    spike, rewinds = SpikeError(update=12, since=10, why="why"), Rewinds(tmp_path)
    skip = rewinds.answer(SETTINGS, spike, to=8, updates=30, windows=35)
    assert (skip.skipped_windows, skip.rate_factor, skip.rate_updates) == (5, 1.0, 0)
    none = rewinds.answer(SETTINGS, spike, to=8, updates=30, windows=34)
    assert (none.skipped_windows, none.rate_factor, none.rate_updates) == (0, 0.5, 200)
    assert none.why.endswith(
        "there are no 5 windows of data to spare, so that the rate is lowered instead"
    )
    lower = dataclasses.replace(SETTINGS, response="lower_rate", rate_factor=0.25, rate_updates=7)
    assert rewinds.answer(lower, spike, 8, 30, 99).rate_updates == 7


def test_going_back_beyond_a_rewind_passes_over_what_that_one_did(tmp_path):
    """Update 10 read window 10 + 5; after going back to 4 the next one is 16, not 11."""
    rewinds = Rewinds(tmp_path)
    rewinds.append(rewind(8, skipped=5))
    spike = SpikeError(update=10, since=9, why="why")
    again = rewinds.answer(SETTINGS, spike, to=4, updates=30, windows=42)
    assert again.skipped_windows == 12  # windows 4 to 15
    none = rewinds.answer(SETTINGS, spike, to=4, updates=30, windows=41)
    assert none.skipped_windows == 0
    assert none.why.endswith("instead, and 5 windows that were passed over come again")
    rewinds.append(again)
    assert [rewinds.windows_before(u) for u in (3, 4, 8)] == [3, 16, 20]
    assert rewinds.passed_over() == 12
    for update, jumps in ((0, []), (3, []), (4, [{"next_index": 16}]), (5, []), (8, []), (9, [])):
        made = []
        rewinds.pass_over(types.SimpleNamespace(set_state=made.append), update)
        assert made == jumps
    # A second one to the same checkpoint goes on from there.
    spike = SpikeError(update=6, since=5, why="why")
    assert rewinds.answer(SETTINGS, spike, to=4, updates=30, windows=99).skipped_windows == 3


def test_a_line_that_a_crash_tore_is_cut_off(tmp_path):
    whole = rewind(8, skipped=5)
    Rewinds(tmp_path).append(whole)
    path = tmp_path / "rewinds.jsonl"
    path.write_bytes(path.read_bytes() + b'{"update": 9')
    rewinds = Rewinds(tmp_path)
    assert rewinds.made == [whole]
    rewinds.append(rewind(20, skipped=1))
    assert Rewinds(tmp_path).made == [whole, rewind(20, skipped=1)]


def rewind(to: int, skipped: int = 0, factor: float = 1.0, updates: int = 0) -> Rewind:
    return Rewind(99, 98, to, skipped, factor, updates, "why")


@pytest.mark.parametrize("line", ["\0\0", "5", '{"update": 3}'])
def test_a_damaged_line_is_named(tmp_path, line):
    """What was passed over decides which data the run reads."""
    (tmp_path / "rewinds.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match=r"rewinds\.jsonl:1: cannot be read as the record"):
        Rewinds(tmp_path)


def test_position_and_rate_follow_from_the_lines(tmp_path):
    rewinds = Rewinds(tmp_path)
    rewinds.append(rewind(8, skipped=5))
    rewinds.append(rewind(20, factor=0.5, updates=10))
    rewinds.append(rewind(20, factor=0.5, updates=4))
    again = Rewinds(tmp_path)
    assert again.made == rewinds.made
    assert [again.windows_before(u) for u in (0, 7, 8, 30)] == [0, 7, 13, 35]
    assert [again.rate(u) for u in (19, 20, 23, 24, 29, 30)] == [1, 0.25, 0.25, 0.5, 0.5, 1]
    # A rewind to before others leaves them behind.
    again.append(rewind(15, skipped=2))
    assert [again.rate(u) for u in (20, 25)] == [1, 1]
    assert again.windows_before(15) == 15 + 5 + 2


def spiky(data, name: str, response: str, **settings):
    """40 updates with a checkpoint after every fourth; three losses beyond are a spike."""
    settings = {"window": 5, "patience": 3, "rate_updates": 6, **settings}
    return config_for(
        data,
        name,
        rewind=RewindConfig(response=response, **settings),
        checkpoint=CheckpointConfig(every=4, keep=2),
    )


def spike_where(monkeypatch, config, bad) -> None:
    """Let the losses of some updates look as if they were not finite.

    Args:
        monkeypatch: of the test.
        config: of the run.
        bad: of the number of an update's window of data, and of its record.
    """
    read = SpikeWatch.read

    def watched(self, record):
        window = Rewinds(directory_of(config)).windows_before(record["update"])
        return read(self, record | ({"loss": None} if bad(window, record) else {}))

    monkeypatch.setattr(SpikeWatch, "read", watched)


def blocks_of(config) -> list[list[int]]:
    """Block ids of each update."""
    result: list[list[int]] = []
    for entry in read_records(directory_of(config) / "blocks.jsonl"):
        if entry["micro_batch"] == 0:
            result.append([])
        result[-1] += entry["blocks"]
    return result


def test_data_is_passed_over_after_a_spike(random_data, monkeypatch, capsys):
    calm = spiky(random_data, "calm", "off")
    assert loop.train(calm) == 0
    config = spiky(random_data, "spiky", "skip_data")
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=4, keep=99))
    spike_where(monkeypatch, config, lambda window, record: 10 <= window < 13)
    assert loop.train(config) == 0
    (made,) = Rewinds(directory_of(config)).made
    # Updates 10, 11 and 12 are beyond; update 8 is the last checkpoint before; 8 to 12 are read.
    assert (made.since, made.update, made.to, made.skipped_windows) == (10, 12, 8, 5)
    assert "Going back from update 12 to 8: the loss is not finite" in capsys.readouterr().out
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [r["update"] for r in records] == list(range(40))
    assert all(r["applied"] for r in records)
    windows = blocks_of(calm)
    assert blocks_of(config)[:35] == windows[:8] + windows[13:]
    assert records[7]["loss"] == read_records(directory_of(calm) / "metrics.jsonl")[7]["loss"]
    # Also by a run that falls back to before it, and by a replay from there.
    read = blocks_of(config)
    for update in updates_in(directory_of(config) / "checkpoints"):
        if update > 4:
            remove(directory_of(config) / "checkpoints", update)
    assert replay(directory_of(config), 10).differs_from is None
    assert loop.train(config) == 0
    assert blocks_of(config) == read
    # What was passed over is no room for a longer horizon.
    room = []
    for one in (calm, config):
        longer = dataclasses.replace(one.training, updates=1000)
        with pytest.raises(UserError, match=r"training.updates \(1000\) needs") as error:
            loop.train(dataclasses.replace(one, training=longer), ["horizon"])
        room.append(int(re.search(r"the data gives (\d+)", str(error.value)).group(1)))
    assert room[1] == room[0] - 5
    assert " less 5 that rewinds passed over" in str(error.value)


def test_a_rewind_lets_go_of_the_state_before_it_restores_one(random_data, monkeypatch):
    config = spiky(random_data, "memory", "lower_rate")
    spike_where(
        monkeypatch, config, lambda window, r: 10 <= window < 13 and r["rate_multiplier"] == 1
    )
    held, sizes = [], []
    restore = Checkpoints.restore

    def watched(self, *arguments):
        held.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        state = restore(self, *arguments)
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(state)))
        return state

    monkeypatch.setattr(Checkpoints, "restore", watched)
    before = sum(x.nbytes for x in jax.live_arrays())
    assert loop.train(config) == 0
    assert len(held) == 1
    assert held[0] < sizes[0] / 2


def test_the_rate_is_lower_after_a_spike(random_data, monkeypatch):
    config = spiky(random_data, "slow", "lower_rate", rate_factor=0.25)
    spike_where(
        monkeypatch, config, lambda window, r: 10 <= window < 13 and r["rate_multiplier"] == 1
    )
    assert loop.train(config) == 0
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [r["rate_multiplier"] for r in records] == [1.0] * 8 + [0.25] * 6 + [1.0] * 26


@pytest.mark.long
def test_an_interruption_after_going_back_changes_nothing(random_data, monkeypatch):
    """Interrupted right before the spike is noticed, and twice after it."""
    config = spiky(random_data, "whole", "skip_data")
    spike_where(monkeypatch, config, lambda window, record: 10 <= window < 13)
    assert loop.train(config) == 0
    whole = final_state(config)
    with monkeypatch.context() as patch:
        config = spiky(random_data, "broken", "skip_data")
        spike_where(patch, config, lambda window, record: 10 <= window < 13)
        signal_at(patch, {11: signal.SIGTERM})
        assert loop.train(config) == 0
        assert Rewinds(directory_of(config)).made == []
        signal_at(patch, {9: signal.SIGTERM})  # update 9 of the new course
        assert loop.train(config) == 0
        assert len(Rewinds(directory_of(config)).made) == 1
        assert loop.train(config) == 0
    assert final_state(config) == whole


@pytest.mark.parametrize("update", [12, 13])
def test_a_signal_that_comes_with_the_spike_is_obeyed(random_data, monkeypatch, capsys, update):
    """Update 12 makes the spike; it is read while update 13 runs."""
    config = spiky(random_data, "signalled", "lower_rate")
    spike_where(
        monkeypatch, config, lambda window, r: 10 <= window < 13 and r["rate_multiplier"] == 1
    )
    with monkeypatch.context() as patch:
        signal_at(patch, {update: signal.SIGINT})
        assert loop.train(config) == loop.INTERRUPTED
    assert "saved there; the same command continues" in capsys.readouterr().out
    assert updates_in(directory_of(config) / "checkpoints") == [8]
    assert loop.train(config) == 0
    assert len(read_records(directory_of(config) / "metrics.jsonl")) == 40


def test_a_run_that_goes_back_too_often_stops(random_data, monkeypatch):
    config = spiky(random_data, "often", "lower_rate", maximum=2)
    spike_where(monkeypatch, config, lambda window, record: window >= 10)
    with pytest.raises(Failure, match=r"not finite.* the run has gone back 2 times already"):
        loop.train(config)
    assert [r.to for r in Rewinds(directory_of(config)).made] == [8, 8]
    assert updates_in(directory_of(config) / "checkpoints") == [8, 12]  # as they were


def test_without_a_checkpoint_of_before_the_run_stops(random_data, monkeypatch):
    config = spiky(random_data, "early", "lower_rate")
    spike_where(monkeypatch, config, lambda window, record: window >= 1)
    with pytest.raises(Failure, match="no checkpoint of before update 1 to go back to"):
        loop.train(config)
