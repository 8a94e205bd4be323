"""Finding where numbers stop being finite."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_runs import config_for, directory_of

from jaxlm.config import CheckpointConfig, OptimConfig, TrainingConfig
from jaxlm.errors import Failure, UserError
from jaxlm.training import loop
from jaxlm.training.finite import first_not_finite
from jaxlm.training.manifest import remove
from jaxlm.training.metrics import read_records
from jaxlm.training.replay import replay

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("function", "where", "operation", "nan", "infinite"),
    [
        (lambda x: jnp.sum(jnp.log(x - 1)), (), "log", 0, 1),  # log 0
        (lambda x: jnp.sum(jnp.sqrt(x - 2.5)), (), "sqrt", 2, 0),
        (lambda x: jnp.sum(jnp.exp(100 * x)), (), "exp", 0, 3),
        # 0 + 2e38 + 3e38 in one place: an operation that holds a jaxpr of its own.
        (lambda x: jnp.zeros(2).at[jnp.zeros(3, int)].add(1e38 * x).sum(), (), "scatter-add", 0, 1),
        (lambda x: jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)).sum(), None, None, 0, 0),
    ],
)
def test_the_operation_is_named_and_masks_are_no_fault(function, where, operation, nan, infinite):
    found = first_not_finite(function, jnp.asarray([1.0, 2.0, 3.0]))
    if operation is None:
        assert found is None
        return
    assert (found.where, found.operation) == (where, operation)
    assert (found.nan, found.infinite) == (nan, infinite)


def test_loops_branches_and_calls_are_opened():
    """2 ** (2 ** i) overflows float32 at i = 7: the squarings of 2 are 4, 16, 256, 65536, ..."""

    @jax.named_scope("layer")
    def square(x, weight):
        return x * x * weight, x

    def scanned(x):
        with jax.named_scope("core"):
            return jax.lax.scan(square, x, jnp.ones(9))[0]

    found = first_not_finite(scanned, jnp.float32(2))
    assert found.where == ("core", "layer 7 of 9")
    assert (found.operation, found.infinite, found.largest_input) == ("mul", 1, 2.0**64)

    def looped(x, n):
        @jax.named_scope("step")
        def step(i, x):
            return jax.lax.cond(i % 2 == 0, lambda x: x * x, jax.jit(lambda x: x * x), x)

        return jax.lax.fori_loop(0, n, step, x)

    assert first_not_finite(looped, jnp.float32(2), jnp.int32(6)) is None
    assert first_not_finite(looped, jnp.float32(2), jnp.int32(9)).where == ("step 7",)


def test_a_backward_pass_is_told_apart():
    def root(x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.sqrt(x))  # its slope at 0 is infinite

    zero = jnp.zeros(2)
    assert first_not_finite(root, zero) is None
    found = first_not_finite(jax.grad(root), zero)
    assert found.backward
    assert found.where == ("head",)
    assert "backward pass, head: " in found.line()


@pytest.fixture
def run(random_data):
    """12 updates with checkpoints after 4 and 8 updates, of which the last stays untouched."""
    config = config_for(
        random_data,
        training=TrainingConfig(updates=12, micro_batch_rows=2, micro_batches=2),
        checkpoint=CheckpointConfig(every=4, keep=9),
    )
    assert loop.train(config) == 0
    return config


def tree_of(directory: Path) -> dict:
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_healthy_update_is_finite_and_made_from_the_right_weights(run):
    before = tree_of(directory_of(run))
    found = replay(directory_of(run), 10)
    assert (found.update, found.checkpoint) == (10, 8)
    assert found.differs_from is None  # updates 8 and 9 are the bits on record
    assert found.culprit is None
    assert found.bad_parameters == []
    records = read_records(directory_of(run) / "metrics.jsonl")
    blocks = read_records(directory_of(run) / "blocks.jsonl")
    assert [one.blocks for one in found.micro_batches] == [
        b["blocks"] for b in blocks if b["update"] == 10
    ]
    # Both micro-batches have nearly as many target tokens; the loss on record is their mean.
    mean = np.mean([one.loss for one in found.micro_batches])
    assert mean == pytest.approx(records[10]["loss"], abs=0.15)
    assert tree_of(directory_of(run)) == before


def test_the_layer_that_overflows_is_named(run, monkeypatch):
    """Weights of 1e37 in the coda's last layer, put there when the update's turn comes."""
    from jaxlm.training import replay as module

    make = module._make

    def poisoned(run, state, window, record):
        state, loss = make(run, state, window, record)
        if record["update"] == 9:
            mlp = state.params["coda"]["blocks"]["mlp"]
            for name in ("gate", "up"):
                mlp[name]["kernel"] = mlp[name]["kernel"].at[-1].mul(1e38)
        return state, loss

    monkeypatch.setattr(module, "_make", poisoned)
    found = replay(directory_of(run), 10)
    layers = jax.tree.leaves(module._Run(directory_of(run)).state_of(0)[0].params["coda"])[0]
    last = len(layers)
    assert not any(one.finite for one in found.micro_batches)
    assert found.culprit.where[:2] == ("coda", f"layer {last} of {last}")
    assert found.culprit.where[2] == "mlp"
    assert not found.culprit.backward
    assert "jaxlm/models/layers.py:" in found.culprit.line()


def test_what_came_before_the_first_save_is_made_from_the_beginning(random_data):
    """Rate 1e30 breaks the weights within a few updates, and no save comes before the stop."""
    config = config_for(
        random_data,
        optim=OptimConfig(name="adamw", learning_rate=1e30, warmup_updates=0),
        training=TrainingConfig(
            updates=12, micro_batch_rows=2, micro_batches=2, max_nonfinite_updates=2
        ),
        checkpoint=CheckpointConfig(every=500),
    )
    with pytest.raises(Failure, match=r"2 updates in a row .*; no checkpoint had been saved"):
        loop.train(config)
    records = read_records(directory_of(config) / "metrics.jsonl")
    last = len(records) - 1
    assert [r["applied"] for r in records[-2:]] == [False, False]
    found = replay(directory_of(config), last)
    assert (found.update, found.checkpoint, found.differs_from) == (last, 0, None)
    assert found.culprit is not None


def test_updates_are_made_again_under_the_settings_of_then(random_data):
    """Half the rate and twice the warm-up from update 6 on; all made again from the beginning."""
    config = config_for(
        random_data,
        training=TrainingConfig(updates=12, micro_batch_rows=2, micro_batches=2),
        checkpoint=CheckpointConfig(every=100, keep=9),
    )
    assert loop.train(config, until_update=6) == 0
    optim = dataclasses.replace(config.optim, learning_rate=5e-3, warmup_updates=8)
    changed = dataclasses.replace(config, optim=optim)
    assert loop.train(changed, {"rate", "horizon"}) == 0
    for checkpoint in (6, 0):
        for update in (5, 6, 9):
            found = replay(directory_of(config), update)
            assert found.checkpoint == (checkpoint if update >= 6 else 0)
            assert found.differs_from is None, (checkpoint, update)
        if checkpoint:
            remove(directory_of(config) / "checkpoints", checkpoint)
    # Settings that are not those of then are noticed, in the update itself as well.
    (directory_of(config) / "changes.jsonl").unlink()
    assert replay(directory_of(config), 1).differs_from == 1


def test_an_update_that_is_not_there(run):
    for update in (12, -1):
        message = rf"records of 12 updates; --update {update} is not among them"
        with pytest.raises(UserError, match=message):
            replay(directory_of(run), update)
    with pytest.raises(UserError, match=r"not a run"):
        replay(directory_of(run).parent, 1)


def test_the_script_prints_a_table_and_json(run, tmp_path):
    command = [sys.executable, "scripts/replay.py", str(directory_of(run)), "--update", "4"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Update 4, from the checkpoint of update 4" in done.stdout
    assert "All losses and gradients are finite here" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert math.isfinite(found["micro_batches"][1]["loss"])


def test_a_skipped_update_says_how_to_look_at_it(random_data, monkeypatch, capsys):
    """A loss that is not finite at update 5 is skipped, said, and recorded with its blocks."""
    config = config_for(
        random_data, training=TrainingConfig(updates=8, micro_batch_rows=2, micro_batches=2)
    )
    step = loop.CompileOnce.__call__

    def poisoned(self, state, *arguments, variant=None):
        good, state = state, jax.tree.map(jnp.copy, state)
        if int(state.update) == 5:
            bad = jax.tree.map(lambda x: x * jnp.nan, good.params)
            poison = loop.dataclasses.replace(good, params=bad)
            _, metrics = step(self, poison, *arguments, variant=variant)
            after = loop.dataclasses.replace(state, update=state.update + 1)
            return jax.device_put(after, jax.devices()[0]), metrics
        return step(self, good, *arguments, variant=variant)

    monkeypatch.setattr(loop.CompileOnce, "__call__", poisoned)
    assert loop.train(config) == 0
    output = capsys.readouterr().out
    assert "Update 5: loss or gradient was not finite; skipped, 1 so far. Find out where:" in output
    assert f"python scripts/replay.py {directory_of(config)} --update 5" in output
    events = read_records(directory_of(config) / "events.jsonl")
    (event,) = [event for event in events if event["kind"] == "not_finite"]
    blocks = read_records(directory_of(config) / "blocks.jsonl")
    assert event["blocks"] == [b["blocks"] for b in blocks if b["update"] == 5]
