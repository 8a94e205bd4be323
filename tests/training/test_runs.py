"""Whole runs through `train`, in this process unless a test says otherwise."""

import concurrent.futures
import errno
import json
import logging
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import long, tiny_model, write_documents

from jaxlm.config import (
    CheckpointConfig,
    Config,
    ControlConfig,
    CurriculumConfig,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PlateauConfig,
    RecurrentConfig,
    RunConfig,
    TrainingConfig,
    TransformerConfig,
    to_tree,
    to_yaml,
)
from jaxlm.errors import Failure, UserError
from jaxlm.memory.devices import RTX3090
from jaxlm.training import checkpoint, diagnosis, loop, out_of_memory
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.compilation import CompileOnce, RecompilationError
from jaxlm.training.loading import load_resolved, load_run
from jaxlm.training.manifest import updates_in
from jaxlm.training.metrics import read_records
from jaxlm.training.out_of_memory import memory_line
from jaxlm.training.resume import config_changes
from jaxlm.training.step import init_state

ROOT = Path(__file__).parents[2]


def config_for(directory: Path, name: str = "run", /, **sections) -> Config:
    """A tiny recurrent model with every kind of randomness on."""
    defaults = {
        "run": RunConfig(name=name, directory=str(directory.parent / "runs"), seed=11),
        "data": DataConfig(directory=str(directory), sequence_length=8, epochs=2),
        "model": tiny_model(dropout=0.1, width=16, heads=2, feed_forward=32),
        "depth": DepthConfig(mean=3.0, maximum=6, backprop=2),
        "loss": LossConfig(chunk_tokens=16),
        "optim": OptimConfig(name="adamw", learning_rate=1e-2, warmup_updates=4),
        "training": TrainingConfig(updates=40, micro_batch_rows=2, micro_batches=2),
        "evaluation": EvaluationConfig(every=0, depths=(1, 2), batch_rows=4, rows=8),
        "checkpoint": CheckpointConfig(every=9, keep=2),
        "logging": LoggingConfig(every=10, tensorboard=False),
    }
    return Config(**{**defaults, **sections})


def directory_of(config: Config) -> Path:
    return Path(config.run.directory) / config.run.name


def until(monkeypatch, updates: int) -> None:
    """Interrupt the next run after so many updates: a shorter horizon would compile anew."""
    signal_at(monkeypatch, {updates - 1: signal.SIGTERM})


def signal_at(monkeypatch, signals: dict[int, signal.Signals]):
    """Raise each signal once, while the given update is being dispatched."""
    pending = dict(signals)
    draw = loop.draw_depth

    def draw_and_signal(config, seed, update, mean):
        if update in pending:
            signal.raise_signal(pending.pop(update))
        return draw(config, seed, update, mean)

    monkeypatch.setattr(loop, "draw_depth", draw_and_signal)


def signal_at_read(monkeypatch, update: int) -> None:
    """Raise SIGTERM once, while the record of an update is read: the next one is the last."""
    pending, read = [update], loop.Run.read

    def read_and_signal(self, outcome):
        if outcome.update in pending:
            pending.remove(outcome.update)
            signal.raise_signal(signal.SIGTERM)
        return read(self, outcome)

    monkeypatch.setattr(loop.Run, "read", read_and_signal)


def final_state(config: Config):
    """Every leaf of the last checkpoint, the position in the data, and the logged values."""
    spec_config = load_resolved(directory_of(config))
    spec = loop.step_spec(spec_config, spec_config.model.vocabulary, 40)
    abstract = jax.eval_shape(lambda: init_state(spec))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(directory_of(config) / "checkpoints") as checkpoints:
        state = checkpoints.restore(checkpoints.find(40), abstract, place)
        metadata = checkpoints.metadata(40)
    leaves = {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    keys = ("update", "tokens", "loss", "grad_norm", "update_norm", "learning_rate", "depth")
    records = read_records(directory_of(config) / "metrics.jsonl")
    return {
        "leaves": leaves,
        "data_position": metadata["data_position"],
        "progress": metadata["progress"],
        "metrics": [[record[key] for key in keys] for record in records],
        "blocks": (directory_of(config) / "blocks.jsonl").read_text(),
    }


ENGINES = {
    "after_backward": {},
    # The layer-wise engine with the weights and the rounding that it is made for.
    "in_backward": {
        "model": tiny_model(
            dropout=0.1,
            width=16,
            heads=2,
            feed_forward=32,
            remat="full",
            param_dtype="bfloat16",
            compute_dtype="bfloat16",
        ),
        "optim": OptimConfig(learning_rate=1e-2, warmup_updates=4, clip="previous_norm"),
        "training": TrainingConfig(
            updates=40, micro_batch_rows=2, micro_batches=2, update="in_backward"
        ),
    },
}


def run_in_three_parts(monkeypatch, config):
    signal_at(monkeypatch, {12: signal.SIGTERM, 26: signal.SIGINT})
    assert loop.train(config) == 0
    assert len(read_records(directory_of(config) / "metrics.jsonl")) == 13
    assert loop.train(config) == 130
    assert len(read_records(directory_of(config) / "metrics.jsonl")) == 27
    assert loop.train(config) == 0


@pytest.fixture
def unbroken(random_data):
    config = config_for(random_data, "unbroken")
    assert loop.train(config) == 0
    return final_state(config)


@pytest.mark.parametrize("engine", [long("after_backward"), "in_backward"])
def test_three_parts_equal_one_run_bit_for_bit(random_data, monkeypatch, engine):
    """40 updates = 13 + SIGTERM + 14 + Ctrl-C + the rest, with dropout, depth draws and noise."""
    config = config_for(random_data, "unbroken", **ENGINES[engine])
    assert loop.train(config) == 0
    unbroken = final_state(config)
    config = config_for(random_data, "broken", **ENGINES[engine])
    run_in_three_parts(monkeypatch, config)
    broken = final_state(config)
    assert len(unbroken["metrics"]) == 40
    assert len({record[-1] for record in unbroken["metrics"]}) > 2  # depths did vary
    for name in unbroken:
        assert broken[name] == unbroken[name], name


@pytest.mark.parametrize("left_out", ["data position", "optimizer state", "update counter"])
def test_the_comparison_notices_what_is_left_out(random_data, unbroken, monkeypatch, left_out):
    """The same test fails when one piece of the state is not restored."""
    restore = loop.Run.restore

    def forgetful(self, update, allow_changes=False):
        state = restore(self, update, allow_changes)
        fresh = jax.device_put(init_state(self.spec), self.sharding)
        if left_out == "data position":
            self.iterator.set_state({"next_index": 0})
        elif left_out == "optimizer state":
            state = loop.dataclasses.replace(state, opt_state=fresh.opt_state)
        else:
            state = loop.dataclasses.replace(state, update=fresh.update)
        return state

    monkeypatch.setattr(loop.Run, "restore", forgetful)
    config = config_for(random_data, "forgetful")
    run_in_three_parts(monkeypatch, config)
    broken = final_state(config)
    assert broken["leaves"] != unbroken["leaves"]
    assert broken["metrics"] != unbroken["metrics"]


def test_one_compilation_for_depths_evaluation_save_and_resume(random_data, monkeypatch, caplog):
    config = config_for(
        random_data,
        "compiled",
        run=RunConfig(name="compiled", directory=str(random_data.parent / "runs"), seed=77),
        training=TrainingConfig(updates=30, micro_batch_rows=2, micro_batches=2),
        evaluation=EvaluationConfig(every=10, depths=(1, 2, 3, 6), batch_rows=5),
    )
    signal_at(monkeypatch, {14: signal.SIGTERM})
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        assert loop.train(config) == 0
        assert loop.train(config) == 0
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train_step") == 1
    assert compiled.count("eval_step") == 1
    depths = {r["depth"] for r in read_records(directory_of(config) / "metrics.jsonl")}
    assert len(depths) >= 4
    report = json.loads((directory_of(config) / "report.json").read_text())
    assert [e["depth"] for e in report["evaluations"]] == [1, 2, 3, 6]


def test_a_changed_shape_is_an_error_that_says_what_changed(random_data):
    config = config_for(random_data)
    run = loop.Run(config)
    try:
        run.dispatch()
        iterator = run.iterator
        run.iterator = iter([jax.tree.map(lambda x: x[:, :1], next(run.iterator))])
        with pytest.raises(RecompilationError) as error:
            run.dispatch()
    finally:
        run.iterator = iterator
        run.close()
    assert "uint16[2,2,9]" in str(error.value)
    assert "uint16[2,1,9]" in str(error.value)


def test_compile_once_names_dtype_weak_type_and_structure():
    total = jax.jit(lambda scale, tree: scale * sum(jax.tree.leaves(tree)), static_argnums=0)
    once = CompileOnce(total, 2)
    assert once({"a": np.ones(3, np.float32), "b": np.int32(1)}).tolist() == [4, 4, 4]
    assert once({"a": np.zeros(3, np.float32), "b": np.int32(2)}).tolist() == [4, 4, 4]
    with pytest.raises(RecompilationError, match=r"a: was float32\[3\], is int32\[3\]"):
        once({"a": np.zeros(3, np.int32), "b": np.int32(1)})
    with pytest.raises(
        RecompilationError, match=r"b: was int32\[\], is int32\[\] \(weakly typed\)"
    ):
        once({"a": np.zeros(3, np.float32), "b": 1})
    with pytest.raises(RecompilationError, match=r"b: was int32.*, is absent"):
        once({"a": np.zeros(3, np.float32)})
    # Another static setting is another program, of the same arguments.
    assert (
        CompileOnce(total, 3)({"a": np.ones(3, np.float32), "b": np.int32(1)}).tolist() == [6] * 3
    )


def test_planned_memory_of_a_program():
    """A million floats in, a million out, nothing aliased."""
    once = CompileOnce(jax.jit(lambda _, x: x + 1, static_argnums=0), None)
    assert once.planned == (0, 0)
    once(np.zeros(10**6, np.float32))
    assert once.planned == (8 * 10**6, 0)


def test_planned_beside_measured_memory():
    assert memory_line((11_920_000_000, 0), 12_345_000_000) == (
        "Memory: XLA planned 11.92 GB for the training step; measured peak 12.35 GB"
    )
    assert "and 8.05 GB of pinned host memory;" in memory_line((1, 8_050_000_000), 2)


@pytest.mark.parametrize("kind", ["recurrent", long("transformer")])
def test_two_tiny_documents_are_learnt(tmp_path, kind):
    """Ids [11,12,13,14] and [21,22], one row each, 2 micro-batches: 60 epochs are 60 updates."""
    documents = [[11, 12, 13, 14], [21, 22]]
    data = write_documents(tmp_path / "data", documents, documents, 32)
    config = Config(
        run=RunConfig(name=kind, directory=str(tmp_path / "runs")),
        data=DataConfig(directory=str(data), sequence_length=4, layout="padded", epochs=60),
        model=ModelConfig(
            kind=kind,
            width=32,
            heads=4,
            feed_forward=64,
            recurrent=RecurrentConfig(prelude_layers=1, core_layers=1, coda_layers=1),
            transformer=TransformerConfig(layers=1),
        ),
        depth=DepthConfig(distribution="fixed", mean=4.0, maximum=4),
        optim=OptimConfig(name="adamw", learning_rate=1e-2, warmup_updates=5, weight_decay=0.0),
        training=TrainingConfig(micro_batch_rows=1, micro_batches=2),
        evaluation=EvaluationConfig(every=0, depths=(4,), batch_rows=2),
        logging=LoggingConfig(tensorboard=False),
    )
    assert loop.train(config) == 0
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert len(records) == 60
    assert records[-1]["tokens"] == 60 * 4  # 3 + 1 target tokens an epoch
    assert records[0]["loss"] == pytest.approx(np.log(32), abs=0.5)
    assert records[-1]["loss"] < 0.1
    report = json.loads((directory_of(config) / "report.json").read_text())
    assert report["evaluations"][0]["cross_entropy"] < 0.1
    assert report["evaluations"][0]["top1"] == 1.0
    assert report["evaluations"][0]["target_tokens"] == 4


def test_records_have_the_fields_that_programs_read(random_data):
    config = config_for(
        random_data,
        evaluation=EvaluationConfig(every=20, depths=(1, 3), batch_rows=4),
        logging=LoggingConfig(every=10, tensorboard=True),
    )
    assert loop.train(config) == 0
    directory = directory_of(config)
    records = read_records(directory / "metrics.jsonl")
    assert [r["update"] for r in records] == list(range(40))
    fields = {"update", "tokens", "loss", "grad_norm", "update_norm", "learning_rate", "depth"}
    fields |= {"backprop_depth", "tokens_per_second", "mfu", "data_wait_fraction"}
    assert all(fields <= set(record) for record in records)
    assert all(record["mfu"] is None for record in records)
    assert all(r["backprop_depth"] == min(r["depth"], 2) for r in records)
    # Warm-up 4 to the peak of 1e-2.
    assert [r["learning_rate"] for r in records[:5]] == pytest.approx(
        [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2], rel=1e-5
    )
    blocks = read_records(directory / "blocks.jsonl")
    assert [(b["update"], b["micro_batch"]) for b in blocks] == [
        (u, m) for u in range(40) for m in range(2)
    ]
    seen = [i for b in blocks for i in b["blocks"]]
    assert len(seen) == 160
    assert set(seen) == set(range(max(seen) + 1))  # 40 windows reach into the second pass
    evaluations = read_records(directory / "evaluations.jsonl")
    assert [(e["update"], e["depth"]) for e in evaluations] == [(20, 3), (40, 3)]
    report = json.loads((directory / "report.json").read_text())
    assert report["unigram_cross_entropy"] == pytest.approx(np.log(64), abs=0.3)
    assert {"depth", "cross_entropy", "perplexity", "top1", "top5", "bits_per_byte"} | {
        "tokens_per_second",
        "target_tokens",
    } == set(report["evaluations"][0])
    assert "cross-entropy" in (directory / "report.md").read_text()
    assert (directory / "curves.png").stat().st_size > 10_000
    assert (directory / "config.yaml").is_file()
    assert list((directory / "tensorboard").iterdir())


def test_a_finished_run_is_reported_again_not_trained_again(random_data):
    config = config_for(
        random_data, evaluation=EvaluationConfig(every=0, depths=(2,), batch_rows=4, rows=8)
    )
    assert loop.train(config) == 0
    before = (directory_of(config) / "metrics.jsonl").read_text()
    (directory_of(config) / "report.json").unlink()
    assert loop.train(config) == 0
    assert (directory_of(config) / "metrics.jsonl").read_text() == before
    assert (directory_of(config) / "report.json").is_file()


def test_the_last_window_of_the_data_is_applied_with_its_true_weight(tmp_path):
    """11 rows in windows of 4: the third window holds 3 rows, and their tokens alone count."""
    documents = [[*range(1, 6)] for _ in range(11)]
    data = write_documents(tmp_path / "data", documents, documents[:2], 64)
    config = config_for(
        data,
        model=tiny_model("transformer", width=16, heads=2, feed_forward=32),
        data=DataConfig(directory=str(data), sequence_length=8, layout="padded"),
        training=TrainingConfig(micro_batch_rows=2, micro_batches=2),
        optim=OptimConfig(name="adamw", learning_rate=1e-3),
    )
    assert loop.train(config) == 0
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [record["tokens"] for record in records] == [16, 32, 44]
    assert all(record["applied"] for record in records)
    blocks = read_records(directory_of(config) / "blocks.jsonl")
    assert [len(b["blocks"]) for b in blocks] == [2, 2, 2, 2, 2, 1]


def test_a_run_that_learns_how_common_tokens_are_alone_is_told_so(tmp_path, monkeypatch):
    """Tokens drawn one by one, half of them the same: there is nothing else to learn."""
    monkeypatch.setattr(diagnosis, "WINDOW", 10)
    monkeypatch.setattr(diagnosis, "UNIGRAM_UPDATES", 30)
    rng = np.random.default_rng(0)
    documents = np.where(rng.random((500, 9)) < 0.5, 1, rng.integers(2, 64, (500, 9))).tolist()
    data = write_documents(tmp_path / "data", documents, documents, 64)
    config = config_for(data, model=tiny_model("transformer", width=16, heads=2, feed_forward=32))
    assert loop.train(config) == 0
    report = json.loads((directory_of(config) / "report.json").read_text())
    unigram = report["unigram_cross_entropy"]
    # ln 2 + ln(62) / 2 = 2.76: far below ln 64 = 4.16, to which a first loss is compared.
    assert unigram == pytest.approx(2.76, abs=0.1)
    (event,) = [e for e in report["events"] if e.get("finding") == "loss_flat"]
    assert 30 + 4 <= event["update"] < 40
    assert f"how common each token is gives {unigram:.3f}: it does not fall" in event["text"]


def test_windows_without_targets_are_counted(tmp_path):
    """Documents of one token have no target."""
    documents = [[1], [2], [3, 4, 5], [6, 7]]
    data = write_documents(tmp_path / "data", documents, documents, 64)
    config = config_for(
        data,
        model=tiny_model("transformer", width=16, heads=2, feed_forward=32),
        data=DataConfig(directory=str(data), sequence_length=4, layout="padded"),
        training=TrainingConfig(micro_batch_rows=1),
        optim=OptimConfig(name="adamw", learning_rate=1e-3, warmup_updates=3),
    )
    assert loop.train(config) == 0
    records = read_records(directory_of(config) / "metrics.jsonl")
    applied = [r for r in records if r["applied"]]
    assert len(records) == 4
    assert len(applied) == 2
    assert [r["learning_rate"] for r in applied] == pytest.approx([1e-3 / 3, 2e-3 / 3])
    report = json.loads((directory_of(config) / "report.json").read_text())
    assert (report["empty_windows"], report["nonfinite_updates"]) == (2, 0)
    assert report["events"] == []  # two are not worth a line


def test_a_save_that_failed_stops_the_run_before_the_next_one(random_data, monkeypatch):
    """The save after update 9 fails; the run must not go on to 18 without a word."""
    config = config_for(random_data, checkpoint=CheckpointConfig(every=9))
    dispatch = loop.Run.dispatch

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def wait_at_12(self):
        if self.progress.update == 12:
            concurrent.futures.wait([self.checkpoints._pending])
        return dispatch(self)

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    monkeypatch.setattr(loop.Run, "dispatch", wait_at_12)
    with pytest.raises(Failure, match="checkpoints/9: not saved: No space left on device"):
        loop.train(config)
    assert len(read_records(directory_of(config) / "metrics.jsonl")) <= 13


def test_a_run_that_stays_not_finite_stops_with_good_weights_on_disk(random_data, monkeypatch):
    config = config_for(
        random_data,
        checkpoint=CheckpointConfig(every=5),
        training=TrainingConfig(
            updates=40, micro_batch_rows=2, micro_batches=2, max_nonfinite_updates=3
        ),
    )
    dispatch = loop.Run.dispatch

    def poisoned(self):
        if self.progress.update == 7:
            table = self.state.params["embedding"]["table"]
            self.state.params["embedding"]["table"] = jax.device_put(table * np.nan, self.sharding)
        return dispatch(self)

    monkeypatch.setattr(loop.Run, "dispatch", poisoned)
    with pytest.raises(Failure, match=r"3 updates in a row .*checkpoints/5 holds finite"):
        loop.train(config)
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [r["applied"] for r in records] == [True] * 7 + [False] * 3
    assert records[-1]["loss"] is None
    monkeypatch.setattr(loop.Run, "dispatch", dispatch)
    assert loop.train(config) == 0  # goes on from update 5, whose weights are finite
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [r["update"] for r in records] == list(range(40))
    assert all(r["applied"] for r in records)


FREE = {
    "micro-batches": {"training": TrainingConfig(updates=40, micro_batch_rows=4, micro_batches=1)},
    "remat": {"model": tiny_model(dropout=0.1, width=16, heads=2, feed_forward=32, remat="full")},
    "evaluation": {"evaluation": EvaluationConfig(every=2, depths=(3,), batch_rows=2)},
    "checkpoints": {"checkpoint": CheckpointConfig(every=1, keep=5)},
}
REFUSED = {
    "width": (
        {"model": tiny_model(dropout=0.1, width=32, heads=2, feed_forward=32)},
        "model.width: was 16, is 32",
    ),
    "dropout": (
        {"model": tiny_model(width=16, heads=2, feed_forward=32)},
        "model.dropout: was 0.1, is 0.0",
    ),
    "rows an update": (
        {"training": TrainingConfig(updates=40, micro_batch_rows=2, micro_batches=1)},
        "training.micro_batch_rows * training.micro_batches: was 4 rows an update, is 2",
    ),
    "optimizer": (
        {"optim": OptimConfig(name="adafactor", learning_rate=1e-2, warmup_updates=4)},
        "optim.name: was 'adamw', is 'adafactor'",
    ),
    "rate": (
        {"optim": OptimConfig(name="adamw", learning_rate=2e-2, warmup_updates=4)},
        "optim.learning_rate: was 0.01, is 0.02 (--allow-changes rate allows it)",
    ),
    "depth": (
        {"depth": DepthConfig(mean=2.0, maximum=6, backprop=2)},
        "depth.mean: was 3.0, is 2.0 (--allow-changes depth allows it)",
    ),
}


@pytest.fixture
def started(random_data, monkeypatch):
    """A run that was interrupted after 3 updates."""
    until(monkeypatch, 3)
    assert loop.train(config_for(random_data)) == 0


@pytest.mark.parametrize("case", FREE)
def test_what_may_differ_at_resume(random_data, started, monkeypatch, case):
    config = config_for(random_data, **FREE[case])
    until(monkeypatch, 6)
    assert loop.train(config) == 0
    assert len(read_records(directory_of(config) / "metrics.jsonl")) == 6


def test_what_may_not_differ_is_named(random_data, started):
    for case, (sections, line) in REFUSED.items():
        with pytest.raises(UserError) as error:
            loop.train(config_for(random_data, **sections))
        assert line in str(error.value).splitlines(), case
        assert str(error.value).splitlines()[0].count("cannot continue from update 3") == 1


def test_records_without_their_checkpoints_are_not_wiped(random_data, started, monkeypatch):
    """Checkpoints on a disk that is not mounted are no reason to start over."""
    config = config_for(random_data, checkpoint=CheckpointConfig(every=1))
    checkpoints = directory_of(config) / "checkpoints"
    checkpoints.rename(directory_of(config) / "elsewhere")
    with pytest.raises(UserError, match="has the records of 3 updates but no checkpoint"):
        loop.train(config)
    assert len(read_records(directory_of(config) / "metrics.jsonl")) == 3
    # Two checkpoints' worth of records may be all that a run wrote before its first save was done.
    config = config_for(random_data, checkpoint=CheckpointConfig(every=2))
    until(monkeypatch, 2)
    assert loop.train(config) == 0


def test_a_validation_that_is_not_finite_is_recorded_as_null(random_data, started, monkeypatch):
    config = config_for(
        random_data, evaluation=EvaluationConfig(every=2, depths=(1,), batch_rows=4)
    )
    until(monkeypatch, 6)
    run = loop.Run(config)
    table = run.state.params["embedding"]["table"]
    run.state.params["embedding"]["table"] = jax.device_put(table * np.nan, run.sharding)
    assert run._periodic_validation() is None
    run.close()
    record = read_records(directory_of(config) / "evaluations.jsonl")[-1]
    assert record["cross_entropy"] is None


def test_two_processes_cannot_train_one_run(random_data, started):
    run = loop.Run(config_for(random_data))
    with pytest.raises(UserError, match="another process is training this run"):
        loop.Run(config_for(random_data))
    run.close()


def test_other_data_is_no_longer_evaluated(random_data, started):
    config = config_for(random_data)
    assert load_run(directory_of(config)).update == 3
    shutil.rmtree(random_data)
    write_documents(random_data, [[1, 2, 3, 0]] * 400, [[1, 2, 0]], 64)
    with pytest.raises(UserError, match=r"is not the data that .* was trained on:\ndata: train"):
        load_run(directory_of(config))


def test_seed_and_sequence_length_are_frozen(random_data, started):
    data = DataConfig(directory=str(random_data), sequence_length=16, epochs=9, seed=1)
    run = RunConfig(name="run", directory=str(random_data.parent / "runs"), seed=12)
    with pytest.raises(UserError) as error:
        loop.train(config_for(random_data, data=data, run=run))
    lines = str(error.value).splitlines()[1:]
    assert lines == [
        "run.seed: was 11, is 12",
        "data.sequence_length: was 8, is 16",
        "data.epochs: was 2, is 9 (--allow-changes horizon allows it)",
        "data.seed: was 42, is 1",
    ]


def test_other_data_is_refused_by_field(random_data, started, tmp_path):
    other = write_documents(tmp_path / "other", [[1, 2, 3, 0]] * 400, [[1, 2, 0]], 64)
    config = config_for(random_data)
    config = loop.dataclasses.replace(
        config, data=loop.dataclasses.replace(config.data, directory=str(other), epochs=2)
    )
    with pytest.raises(
        UserError, match="data: train tokens changed\ndata: validation tokens changed"
    ):
        loop.train(config)


def test_allowed_changes_are_recorded(random_data, started, monkeypatch):
    optim = OptimConfig(name="adamw", learning_rate=2e-2, warmup_updates=4)
    config = config_for(random_data, optim=optim)
    until(monkeypatch, 6)
    with pytest.raises(UserError, match=r"was 0.01, is 0.02 \(--allow-changes rate allows it"):
        loop.train(config, allow_changes=["horizon", "depth"])
    assert loop.train(config, allow_changes=["rate"]) == 0
    changes = read_records(directory_of(config) / "changes.jsonl")
    expected = {"change": "rate", "key": "optim.learning_rate", "was": 0.01, "is": 0.02}
    assert changes == [{"update": 3, **expected}]
    rates = [r["learning_rate"] for r in read_records(directory_of(config) / "metrics.jsonl")]
    # Warm-up of 4: the fourth update reaches the new peak.
    assert rates[2:4] == pytest.approx([7.5e-3, 2e-2])


def test_a_change_that_no_checkpoint_has_is_not_on_record(random_data, started, monkeypatch):
    """A life with another rate that dies before its first save leaves no trace of it."""

    class KilledError(Exception):
        pass

    def killed(*_):
        raise KilledError

    optim = OptimConfig(name="adamw", learning_rate=2e-2, warmup_updates=4)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", killed)
            with pytest.raises(KilledError):
                loop.train(config_for(random_data, optim=optim), allow_changes=["rate"])
    config = config_for(random_data)
    changes = directory_of(config) / "changes.jsonl"
    assert read_records(changes) != []
    assert loop.train(config) == 0
    assert read_records(changes) == []


def test_what_ended_a_run_is_said_and_not_what_closing_then_meets(random_data, monkeypatch, capsys):
    """As where the folder is gone: the save says what happened, and the last record fails too."""

    def fails(*_):
        raise Failure("the folder is gone")

    def cannot(*_):
        raise FileNotFoundError(2, "No such file or directory", "goodput.jsonl")

    monkeypatch.setattr(loop.Run, "save", fails)
    monkeypatch.setattr(loop.Goodput, "close", cannot)
    with pytest.raises(Failure, match="the folder is gone"):
        loop.train(config_for(random_data))
    assert re.search(r"warning: while closing: .*goodput\.jsonl", capsys.readouterr().err)
    monkeypatch.setattr(loop.Run, "save", lambda *_: None)
    with pytest.raises(FileNotFoundError):
        loop.train(config_for(random_data, "second"))


def test_validation_passes_that_a_controller_reads_change_by_name_alone(random_data):
    def config(controllers, **evaluation):
        return config_for(
            random_data,
            control=ControlConfig(controllers=controllers),
            evaluation=EvaluationConfig(**{"every": 5, "depths": (1,), "rows": 8, **evaluation}),
        )

    for controllers, refused in (
        ((PlateauConfig(),), True),
        ((CurriculumConfig(updates=9),), False),
    ):
        stored = to_tree(config(controllers))
        for change in ({"every": 10}, {"rows": 4}):
            lines, _ = config_changes(stored, config(controllers, **change))
            assert bool(lines) == refused
            assert all("--allow-changes control allows it" in line for line in lines)
            assert config_changes(stored, config(controllers, **change), ["control"])[0] == []
        assert config_changes(stored, config(controllers, depths=(2,))) == ([], [])


def test_a_longer_horizon_is_a_named_change_of_schedule(random_data):
    """10 updates of a cosine, then on to 20: update 10 is the middle of the longer one."""
    optim = OptimConfig(name="adamw", learning_rate=1e-2)
    short = TrainingConfig(updates=10, micro_batch_rows=2, micro_batches=2)
    common = {"model": tiny_model("transformer", width=16, heads=2, feed_forward=32)}
    assert loop.train(config_for(random_data, training=short, optim=optim, **common)) == 0
    longer = loop.dataclasses.replace(short, updates=20)
    config = config_for(random_data, training=longer, optim=optim, **common)
    with pytest.raises(
        UserError, match=r"updates: was 10, is 20 \(--allow-changes horizon allows it"
    ):
        loop.train(config)
    assert loop.train(config, allow_changes=["horizon"]) == 0
    (change,) = read_records(directory_of(config) / "changes.jsonl")
    assert change == {
        "update": 10,
        "change": "horizon",
        "key": "training.updates",
        "was": 10,
        "is": 20,
    }
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert [r["update"] for r in records] == list(range(20))
    rates = [r["learning_rate"] for r in records]
    assert rates[5] == pytest.approx(0.5e-2)  # the middle of the short one
    assert rates[10] == pytest.approx(0.5e-2)
    assert rates[15] == pytest.approx(1e-2 * (1 + np.cos(0.75 * np.pi)) / 2)


def test_a_switched_engine_is_asked_for_recorded_and_goes_on(random_data, monkeypatch):
    """3 updates of the plain engine and 3 layer by layer are 6 of the plain one, up to rounding."""
    common = {
        "model": tiny_model("transformer", width=16, heads=2, feed_forward=32, remat="full"),
        "optim": OptimConfig(learning_rate=1e-2, warmup_updates=4, clip="rms"),
    }
    training = TrainingConfig(updates=6, micro_batch_rows=2, micro_batches=2)
    layerwise = loop.dataclasses.replace(training, update="in_backward")
    plain = config_for(random_data, "plain", training=training, **common)
    assert loop.train(plain) == 0
    switched = config_for(random_data, "switched", training=training, **common)
    signal_at_read(monkeypatch, 1)  # read while the third update runs
    assert loop.train(switched) == 0
    switched = config_for(random_data, "switched", training=layerwise, **common)
    with pytest.raises(
        UserError, match=r"update: was 'after_backward', is 'in_backward' \(--allow-changes engine"
    ):
        loop.train(switched)
    assert loop.train(switched, allow_changes=["engine"]) == 0
    (change,) = read_records(directory_of(switched) / "changes.jsonl")
    assert change == {
        "update": 3,
        "change": "engine",
        "key": "training.update",
        "was": "after_backward",
        "is": "in_backward",
    }
    losses = [
        [r["loss"] for r in read_records(directory_of(c) / "metrics.jsonl")]
        for c in (plain, switched)
    ]
    assert len(losses[1]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] != pytest.approx(losses[0][:3] * 2, rel=1e-3)  # they did learn something


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": TrainingConfig(updates=9999)}, r"training.updates \(9999\) needs"),
        (
            {
                "training": TrainingConfig(updates=None, micro_batch_rows=32),
                "optim": OptimConfig(name="adamw", warmup_updates=500),
            },
            r"optim.warmup_updates \(500\) must be below training.updates \(\d+\); the data gives",
        ),
        ({"model": tiny_model(vocabulary_size=63)}, r"model.vocabulary_size \(63\) is below"),
    ],
)
def test_settings_that_the_data_contradicts(random_data, sections, message):
    config = config_for(random_data, **sections)
    with pytest.raises(UserError, match=message):
        loop.train(config)
    assert not directory_of(config).exists()


def test_a_run_without_validation_documents_does_not_begin(random_data, tmp_path):
    """Its report would fail at the very end."""
    settings = DataConfig(directory=str(random_data), sequence_length=8, validation_tokens=1)
    config = config_for(random_data, data=settings)
    with pytest.raises(UserError, match=r"lies within data\.validation_tokens \(1\); raise it"):
        loop.train(config)
    bare = write_documents(tmp_path / "bare", [[5, 6, 7, 0]] * 40, [], 64)
    with pytest.raises(UserError, match=r"bare: no validation document .* lies there; prepare"):
        loop.train(config_for(bare))
    assert not directory_of(config).exists()


def endless(data: Path, folder: Path) -> tuple[Config, Path]:
    """A run that takes long, and the file of its settings."""
    config = config_for(
        data,
        data=DataConfig(directory=str(data), sequence_length=8, epochs=500),
        training=TrainingConfig(updates=8000, micro_batch_rows=2, micro_batches=2),
        evaluation=EvaluationConfig(every=0, depths=(1,), batch_rows=4),
        checkpoint=CheckpointConfig(every=100_000),
    )
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return config, path


def train_script(config: Path) -> list[str]:
    return [str(ROOT / "scripts/train.py"), "--config", str(config)]


def metrics_of(config: Config) -> Path:
    return directory_of(config) / "metrics.jsonl"


def wait_for_records(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(read_records(path)) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def test_signals_end_the_script_with_their_codes(random_data, tmp_path):
    """The real script in a process of its own: SIGTERM exits 0, Ctrl-C 130, and both resume."""
    config, path = endless(random_data, tmp_path)
    metrics = metrics_of(config)
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        before = len(read_records(metrics))
        process = subprocess.Popen(
            [sys.executable, *train_script(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for_records(metrics, before + 20)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code, output
        saved = int(re.search(r"Saved after update (\d+) of 8000", output).group(1))
        records = read_records(metrics)
        assert [r["update"] for r in records] == list(range(saved))
        assert (directory_of(config) / "checkpoints" / str(saved)).is_dir()
        assert f"{signal.Signals(number).name}: finishing this update" in output
        assert "Traceback" not in output
        assert "Exception ignored" not in output
    assert f"Continuing {directory_of(config)} after update {before}" in output


@pytest.mark.usefixtures("hangup_heeded")
def test_a_terminal_that_is_closed_ends_the_script_with_a_save(random_data, tmp_path):
    """Its SIGHUP comes when nothing can be printed any more."""
    config, path = endless(random_data, tmp_path)
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *train_script(path)], stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    while len(read_records(metrics_of(config))) < 20 and process.poll() is None:
        if select.select([terminal], [], [], 0.05)[0]:  # as a terminal does
            os.read(terminal, 65536)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    records = read_records(metrics_of(config))
    assert len(records) >= 20
    assert updates_in(directory_of(config) / "checkpoints") == [len(records)]


@pytest.mark.long
def test_ctrl_c_that_also_ends_the_reader_of_the_output_still_saves(random_data, tmp_path):
    """As in `train.py | tee log`, where both get it."""
    config, path = endless(random_data, tmp_path)
    process = subprocess.Popen(
        [sys.executable, *train_script(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_records(metrics_of(config), 20)
    process.stdout.close()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, process.stderr.read()
    made = len(read_records(metrics_of(config)))
    assert updates_in(directory_of(config) / "checkpoints") == [made]


@pytest.mark.long
@pytest.mark.parametrize("where", ["start", "update", "end"])
def test_out_of_memory_names_settings_and_the_planner(random_data, monkeypatch, capsys, where):
    config = config_for(random_data, training=TrainingConfig(updates=5, micro_batch_rows=2))
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    def fail(*_, **__):
        raise error

    owner, name = {
        "start": (loop, "init_state"),
        "update": (CompileOnce, "__call__"),
        "end": (loop, "evaluate"),
    }[where]
    monkeypatch.setattr(owner, name, fail)
    # On a card that the planner knows, its table comes first.
    monkeypatch.setattr(out_of_memory, "present_device", lambda _: RTX3090)
    with pytest.raises(Failure) as failure:
        loop.train(config)
    assert "memory at the fullest point of an update" in capsys.readouterr().out
    text = str(failure.value)
    assert len(text.splitlines()) == 1
    assert "ran out of memory. Settings that take less: training.micro_batch_rows=1" in text
    assert "in an evaluation, evaluation.batch_rows. " in text
    assert f"plan_memory.py --config {directory_of(config) / 'config.yaml'} --suggest" in text
    assert load_resolved(directory_of(config)).model.vocabulary == 64


def test_other_errors_of_the_runtime_stay_what_they_are(random_data, monkeypatch):
    def fail(self, *_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(CompileOnce, "__call__", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        loop.train(config_for(random_data))


def test_each_start_and_its_environment_are_written_down(random_data, monkeypatch):
    config = config_for(random_data)
    until(monkeypatch, 6)
    assert loop.train(config) == 0
    assert loop.train(config) == 0
    starts = read_records(directory_of(config) / "starts.jsonl")
    assert [start["update"] for start in starts] == [0, 6]
    assert starts[0]["environment"]["versions"]["jax"] == jax.__version__
    report = json.loads((directory_of(config) / "report.json").read_text())
    assert report["goodput"]["starts"] == 2
    shares = [report["goodput"]["goodput"], *report["goodput"]["shares"].values()]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
