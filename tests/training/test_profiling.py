"""Phases of an update: what is reported, and that measuring changes nothing."""

import json
import time

import pytest
from helpers import long, tiny_model
from test_runs import ENGINES, config_for, directory_of, final_state, until

from jaxlm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    ProfileConfig,
    TrainingConfig,
)
from jaxlm.training import loop, profiling
from jaxlm.training.goodput import read_accounts, summary
from jaxlm.training.metrics import read_records
from jaxlm.training.profiling import predicted_ratio, ratio_line, summarise
from jaxlm.training.spec import step_spec


def test_medians_and_differences():
    """Forward 10, with loss 14, all gradients 50, optimizer 6, in a step of 60."""
    records = [
        {
            "forward": 10.0 + noise,
            "loss": 14.0 + noise,
            "gradients": 50.0 + noise,
            "optimizer": 6.0,
            "step": 60.0,
            "data": 1.0,
            "host": 2.0,
            "tokens": 100.0,
            "predicted": 2.5,
        }
        for noise in (0.0, 0.0, 7.0)
    ]
    profile = summarise(records)
    assert (profile.forward, profile.loss, profile.backward, profile.optimizer) == (10, 4, 36, 6)
    assert profile.phases_over_step == pytest.approx(56 / 60)
    assert profile.backward_over_forward == pytest.approx(36 / 14)
    assert ratio_line(profile) == (
        "Phases add up to 93.3% of the step. The backward pass takes 2.57 times the forward pass; "
        "operations predict 2.50."
    )


def test_the_predicted_ratio_counts_depth_gradient_depth_and_recomputation():
    """By hand: width 8, one head pair of size 4, hidden 16, vocabulary 64, rows of 8."""
    model = tiny_model(
        "recurrent", width=8, heads=2, feed_forward=16, vocabulary_size=64, attention="xla"
    )
    config = Config(
        model=model,
        data=DataConfig(sequence_length=8),
        depth=DepthConfig(mean=3.0, maximum=6, backprop=2),
        training=TrainingConfig(updates=4),
    )
    parts = model.recurrent
    size, kv = model.head_size, model.key_value_heads
    projections = 8 * size * (2 * 2 + 2 * kv)
    attention = 2 * 2 * 2 * size * 8
    layer = 2 * (projections + 3 * 8 * 16) + attention
    injection = 2 * {"add": 0, "concat": 2, "diagonal": 1}[parts.injection] * 64
    core = parts.core_layers * layer + injection
    once = (parts.prelude_layers + parts.coda_layers) * layer
    head = 2 * 8 * 64
    forward = once + 5 * core + head
    backward = 2 * (once + 2 * core + head)
    again = layer - 2 * 8 * 16 + attention / 2 if model.remat == "full" else 0
    count = parts.prelude_layers + parts.coda_layers + 2 * parts.core_layers
    expected = (backward + count * again + head) / forward
    spec = step_spec(config, 64, 4)
    assert predicted_ratio(spec, 8, depth=5, backprop=2) == pytest.approx(expected)


@pytest.mark.parametrize("engine", ["after_backward", long("in_backward")])
def test_the_first_updates_are_timed_and_nothing_changes(random_data, engine, capsys):
    plain = config_for(random_data, "plain", **ENGINES[engine])
    assert loop.train(plain) == 0
    capsys.readouterr()
    timed = config_for(
        random_data, "timed", profile=ProfileConfig(updates=3, trace=(6, 8)), **ENGINES[engine]
    )
    assert loop.train(timed) == 0
    assert final_state(timed) == final_state(plain)
    directory = directory_of(timed)
    profile = json.loads((directory / "profile.json").read_text())
    assert profile["updates"] == 3
    assert profile["tokens"] == 4 * 8
    assert profile["forward"] > 0
    assert profile["step"] > profile["forward"]
    assert profile["host"] > 0
    separate = engine == "after_backward"
    assert (profile["backward"] is not None) == separate
    assert profile["backward_and_optimizer"] > 0
    assert profile["predicted_backward_over_forward"] > 0
    output = capsys.readouterr().out
    assert "phases of an update (3 timed)" in output
    assert f"Trace written to {directory / 'trace'}" in output
    assert list((directory / "trace").rglob("*.xplane.pb"))
    # What is timed beside an update is no part of its speed.
    assert summary(read_accounts(directory))["shares"]["profile"] > 0
    seconds = [r["seconds"] for r in read_records(directory / "metrics.jsonl")]
    assert max(seconds[1:4]) < 1.0
    # A restart does not measure again.
    written = (directory / "profile.json").stat().st_mtime_ns
    assert loop.train(timed) == 0
    assert (directory / "profile.json").stat().st_mtime_ns == written


def slowed(monkeypatch, name, seconds):
    """A method of the run that takes so long."""
    method = getattr(loop.Run, name)

    def slow(self, *args, **kwargs):
        time.sleep(seconds)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(loop.Run, name, slow)


def test_validation_and_saves_are_no_work_of_the_host_and_the_last_update_ends_the_profile(
    random_data, monkeypatch, capsys
):
    """Between updates: 0.1 s of reading, which is the host's, and 0.6 s which is not."""
    for name, seconds in (("read", 0.1), ("validate", 0.3), ("save", 0.3)):
        slowed(monkeypatch, name, seconds)
    config = config_for(
        random_data,
        training=TrainingConfig(updates=11, micro_batch_rows=2, micro_batches=2),
        evaluation=EvaluationConfig(every=1, depths=(1, 2), batch_rows=4, rows=8),
        checkpoint=CheckpointConfig(every=1, keep=2),
        profile=ProfileConfig(updates=5),
    )
    assert loop.train(config) == 0
    profile = json.loads((directory_of(config) / "profile.json").read_text())
    # Update 0 compiles; of 1 to 10, which are all that follow, every second one is timed.
    assert profile["updates"] == 5
    assert 0.1 <= profile["host"] < 0.3
    assert "phases of an update (5 timed)" in capsys.readouterr().out


def test_an_update_that_is_waited_for_is_read_before_the_next_one_begins(random_data, monkeypatch):
    """Its seconds are its own then: read later, they would be those of the one after it."""
    compiled = profiling._gradients._cache_size()
    order: list[str] = []
    for name in ("dispatch", "read"):
        method = getattr(loop.Run, name)

        def noted(self, *args, name=name, method=method):
            order.append(name)
            return method(self, *args)

        monkeypatch.setattr(loop.Run, name, noted)
    config = config_for(
        random_data,
        training=TrainingConfig(updates=8, micro_batch_rows=2, micro_batches=2),
        evaluation=EvaluationConfig(every=0, depths=(1,), batch_rows=4, rows=8),
        profile=ProfileConfig(updates=2),
    )
    assert loop.train(config) == 0
    assert profiling._gradients._cache_size() == compiled + 1
    # The first update compiles, two are timed, each after one that is not. Then two are under way.
    assert order == ["dispatch", "read"] * 5 + ["dispatch"] + ["dispatch", "read"] * 2 + ["read"]


def test_a_run_that_ends_before_its_profile_says_so(random_data, monkeypatch, capsys):
    config = config_for(random_data, profile=ProfileConfig(updates=5))
    until(monkeypatch, 3)
    assert loop.train(config) == 0
    assert "No profile.json: 1 of 5 updates were profiled" in capsys.readouterr().out
    assert not (directory_of(config) / "profile.json").exists()


def test_a_run_that_ends_within_a_trace_writes_it_and_the_next_one_can_begin(random_data):
    """As after a spike, which goes back by opening the run once more in the same process."""
    config = config_for(random_data, "cut", profile=ProfileConfig(trace=(0, 9)))
    for _ in range(2):
        run = loop.Run(config)
        run.dispatch()
        run.close()
    assert len(list((directory_of(config) / "trace").rglob("*.xplane.pb"))) == 2
