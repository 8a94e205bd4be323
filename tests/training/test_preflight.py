"""Preflight: a healthy run passes; of each broken one the true cause is named first or second."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.config import (
    CheckpointConfig,
    Config,
    ControlConfig,
    CurriculumConfig,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    MonitorsConfig,
    OptimConfig,
    PlateauConfig,
    PrepareConfig,
    PreflightConfig,
    RateByDepthConfig,
    RecurrentConfig,
    RunConfig,
    SpikeConfig,
    TrainingConfig,
    load,
    to_yaml,
)
from jaxlm.data import pipeline
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.errors import UserError
from jaxlm.files import sha256_of, write_json
from jaxlm.losses import chunked_cross_entropy
from jaxlm.memory.devices import DEVICES
from jaxlm.models import layers, recurrent
from jaxlm.models.layers import GatedMLP
from jaxlm.models.match import stored_parameters
from jaxlm.models.recurrent import RecurrentDepthLM
from jaxlm.models.stack import Stack
from jaxlm.training import compilation, finished, loop, preflight, step
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.checks import Cause, Result, ranked, result
from jaxlm.training.preflight import CHECKS, Preflight, fall
from jaxlm.training.preflight_control import check_control
from jaxlm.training.reach import reached
from jaxlm.training.scaling import scaled, update_flops

ROOT = Path(__file__).parents[2]
WORDS = "the a old young king queen fool sees hears follows loves fears and never often with".split()


def document(seed: int) -> str:
    """Sentences of a few words, so that the next token can be learnt."""
    rng = np.random.default_rng(seed)
    words = [
        "".join([WORDS[i], " " if rng.random() < 0.9 else f" {seed} "])
        for i in rng.integers(0, len(WORDS), 60)
    ]
    return "".join(words)


def prepared(directory: Path, texts: list[str], **settings) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    source = directory / "texts.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(lines) + "\n")
    config = PrepareConfig(
        inputs=(str(source),),
        vocabulary_size=300,
        validation_fraction=0.1,
        processes=1,
        **settings,
    )
    prepare(Config(prepare=config, data=DataConfig(directory=str(directory / "data"))))
    return directory / "data"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("healthy"), [document(i) for i in range(150)])


def config_for(data: Path, **sections) -> Config:
    defaults = {
        "run": RunConfig(name="run", directory=str(data.parent / "runs"), seed=5),
        "data": DataConfig(directory=str(data), sequence_length=32),
        "model": ModelConfig(
            width=32,
            heads=2,
            feed_forward=64,
            remat="none",
            recurrent=RecurrentConfig(prelude_layers=1, core_layers=2, coda_layers=1),
        ),
        "depth": DepthConfig(mean=3.0, maximum=6, backprop=2),
        "optim": OptimConfig(name="adamw", learning_rate=1e-2, warmup_updates=3),
        "training": TrainingConfig(updates=40, micro_batch_rows=4, micro_batches=2),
        "evaluation": EvaluationConfig(every=10, depths=(1, 3), batch_rows=8, rows=16),
        "checkpoint": CheckpointConfig(every=20),
        "logging": LoggingConfig(every=20, tensorboard=False),
        "preflight": PreflightConfig(updates=16, data_wait=0.5),
    }
    return Config(**{**defaults, **sections})


def forget_programs() -> None:
    """What was compiled from code that a test has replaced must not be used again."""
    compilation._PROGRAMS.clear()
    jax.clear_caches()


@pytest.fixture
def broken_code():
    forget_programs()
    yield
    forget_programs()


@pytest.fixture(scope="module")
def healthy(data) -> dict[str, Result]:
    of = Preflight(config_for(data))
    return {check.name: of.result(check.name) for check in CHECKS}


# ---------------------------------------------------------------- a healthy run


def test_a_healthy_run_passes_every_check(healthy):
    failed = {name: found for name, found in healthy.items() if found.passed is False}
    assert not failed
    skipped = [name for name, found in healthy.items() if found.passed is None]
    assert skipped == ["memory", "control"]
    assert "no GPU is here" in healthy["memory"].figure


def test_figures_are_the_known_ones(healthy, data):
    vocabulary = json.loads((data / "manifest.json").read_text())["vocabulary_size"]
    assert healthy["initial_loss"].numbers["expected"] == np.log(vocabulary)
    assert abs(healthy["overfit"].numbers["start"] - np.log(vocabulary)) < 0.25
    # Rows of 65 tokens: one document; two of 21 and 44; one of 32: 64 + 63 + 31 targets.
    assert healthy["loss_value"].numbers["expected_targets"] == 158
    assert healthy["gradients"].numbers == {"nonfinite": [], "zero": []}
    assert healthy["connected"].figure.startswith("38 of 38")
    assert healthy["causality"].numbers["later_tokens"] == 0.0


def test_nothing_is_left_behind(healthy, data):
    del healthy
    assert not list((data.parent / "runs").glob(".preflight-*"))


# ---------------------------------------------------------------- broken ones


def shift_labels(monkeypatch, config):
    def shifted(hidden, head, targets, mask, **settings):
        return chunked_cross_entropy(hidden, head, jnp.roll(targets, -1), mask, **settings)

    monkeypatch.setattr(step, "chunked_cross_entropy", shifted)
    return config


def ignore_mask(monkeypatch, config):
    monkeypatch.setattr(step, "target_mask", lambda ids: jnp.ones_like(ids[..., 1:], bool))
    return config


def detach_layer(monkeypatch, config):
    def without_last(self, x, mask, angles, keys):
        graph, params = nnx.split(self.blocks)
        used = max(self.layers - 1, 1)

        def layer(x, params):
            return nnx.merge(graph, params)(x, mask, angles, None), None

        return jax.lax.scan(layer, x, jax.tree.map(lambda p: p[:used], params))[0]

    monkeypatch.setattr(Stack, "__call__", without_last)
    return config


def remove_causal_mask(monkeypatch, config):
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        layers.jax.nn,
        "dot_product_attention",
        lambda *args, **kwargs: attend(*args, **{**kwargs, "is_causal": False}),
    )
    return config


def mix_documents(monkeypatch, config):
    def everything(segment_ids):
        rows, length = segment_ids.shape
        return jnp.ones((rows, 1, length, length), bool)

    monkeypatch.setattr(recurrent, "attention_mask", everything)
    return config


def freeze_core(monkeypatch, config):
    """The optimizer never gets to the core."""
    dispatch = loop.Run.dispatch

    def held(self):
        core = jax.device_get(self.state.params["core"])
        pending = dispatch(self)
        params = {**self.state.params, "core": jax.device_put(core, self.sharding)}
        self.state = dataclasses.replace(self.state, params=params)
        return pending

    monkeypatch.setattr(loop.Run, "dispatch", held)
    return config


def stop_gradient_of_core(monkeypatch, config):
    forward = recurrent.Core.__call__

    def stopped(self, *args):
        graph, params = nnx.split(self)
        return forward(nnx.merge(graph, jax.lax.stop_gradient(params)), *args)

    monkeypatch.setattr(recurrent.Core, "__call__", stopped)
    return config


def ignore_depth(monkeypatch, config):
    forward = RecurrentDepthLM.__call__

    def fixed(self, *args, **kwargs):
        return forward(self, *args, **{**kwargs, "depth": 2, "backprop_depth": 2})

    # Evaluation calls without gradient depth: it keeps its two steps as well.
    def both(self, *args, **kwargs):
        return fixed(self, *args, **{**kwargs, "max_backprop_depth": 2})

    monkeypatch.setattr(RecurrentDepthLM, "__call__", both)
    return config


def spoil_gradient(monkeypatch, config):
    """sqrt(0) is 0; its derivative times 0 is not a number."""
    forward = GatedMLP.__call__

    def spoilt(self, x):
        y = forward(self, x)
        return y + jnp.sqrt(jnp.zeros_like(y) * y)

    monkeypatch.setattr(GatedMLP, "__call__", spoilt)
    return config


def enlarge_output(monkeypatch, config):
    head = RecurrentDepthLM.head
    monkeypatch.setattr(RecurrentDepthLM, "head", lambda self: 20.0 * head(self))
    return config


def drop_leaf(monkeypatch, config):
    restore = Checkpoints.restore

    def forgetful(self, update, abstract, sharding):
        state = restore(self, update, abstract, sharding)
        leaves, structure = jax.tree.flatten(state.opt_state)
        largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[largest] = jnp.zeros_like(leaves[largest])
        return dataclasses.replace(state, opt_state=jax.tree.unflatten(structure, leaves))

    monkeypatch.setattr(Checkpoints, "restore", forgetful)
    return config


def lose_data_position(monkeypatch, config):
    restore = loop.Run.restore

    def forgetful(self, update, allow_changes=False):
        state = restore(self, update, allow_changes)
        self.iterator.set_state({"next_index": 0})
        return state

    monkeypatch.setattr(loop.Run, "restore", forgetful)
    return config


def slow_loader(monkeypatch, config):
    read = pipeline.Windows.__getitem__

    def slow(self, index):
        time.sleep(0.3)
        return read(self, index)

    monkeypatch.setattr(pipeline.Windows, "__getitem__", slow)
    return dataclasses.replace(
        config, preflight=PreflightConfig(updates=16), data=dataclasses.replace(config.data)
    )


def with_rate(factor: float):
    def change(monkeypatch, config):
        rate = factor * config.optim.learning_rate
        return dataclasses.replace(
            config, optim=dataclasses.replace(config.optim, learning_rate=rate)
        )

    return change


def shift_rows(monkeypatch, config):
    """The pipeline hands out targets that are two tokens ahead."""
    read = pipeline.PackedRows.read

    def shifted(self, rows):
        batch = read(self, rows)
        return {**batch, "tokens": np.roll(batch["tokens"], -1, axis=-1)}

    monkeypatch.setattr(pipeline.PackedRows, "read", shifted)
    return config


def merge_documents(monkeypatch, config):
    """The pipeline does not tell documents apart."""
    read = pipeline.PackedRows.read

    def merged(self, rows):
        batch = read(self, rows)
        return {**batch, "segment_ids": np.minimum(batch["segment_ids"], 1)}

    monkeypatch.setattr(pipeline.PackedRows, "read", merged)
    return config


def copied(config, name: str) -> tuple[Config, Path]:
    source = Path(config.data.directory)
    target = source.parent / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    data = dataclasses.replace(config.data, directory=str(target))
    return dataclasses.replace(config, data=data), target


def manifest_with(directory: Path, **changes) -> None:
    path = directory / "manifest.json"
    write_json(path, {**json.loads(path.read_text()), **changes})


def ids_out_of_range(monkeypatch, config):
    config, directory = copied(config, "small_vocabulary")
    manifest_with(directory, vocabulary_size=280)
    return config


def replaced_tokenizer(config, name: str) -> tuple[Config, Path, Path]:
    """Another tokenizer of the same size, trained on other text."""
    config, directory = copied(config, name)
    other = train_tokenizer([f"{i * i} zebra quartz" for i in range(400)], 300)
    path = directory / "tokenizer.json"
    path.write_bytes(other.content)
    return config, directory, path


def wrong_tokenizer(monkeypatch, config):
    config, directory, path = replaced_tokenizer(config, "other_tokenizer")
    entry = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest_with(directory, tokenizer=entry)
    return config


def foreign_tokenizer(monkeypatch, config):
    return replaced_tokenizer(config, "foreign_tokenizer")[0]


def repeated_documents(monkeypatch, config):
    source, target = DataDirectory(Path(config.data.directory)), Path(config.data.directory)
    target = target.parent / "repeated"
    shutil.rmtree(target, ignore_errors=True)
    vocabulary = source.vocabulary_size
    with ShardWriter(target, vocabulary_size=vocabulary, end_id=source.end_id) as writer:
        for split in ("train", "validation"):
            stream = source.stream(split)
            ends = [0, *stream.document_ends.tolist()]
            for start, end in zip(ends[:-1], ends[1:], strict=True):
                for _ in range(3 if split == "train" else 1):
                    writer.add(split, stream.read(start, end))
    data = dataclasses.replace(config.data, directory=str(target))
    return dataclasses.replace(config, data=data)


def jumpy_controller(monkeypatch, config):
    control = ControlConfig(controllers=(SpikeConfig(window=10, deviations=1.0),))
    return dataclasses.replace(config, control=control)


Breakage = Callable[[pytest.MonkeyPatch, Config], Config]

# Of the data and the configuration: seen without compiling anything. Cause, and the check that
# must fail.
CHEAP: dict[str, tuple[Breakage, str, str]] = {
    "ids out of range": (ids_out_of_range, "ids", "ids"),
    "tokens made by another tokenizer": (wrong_tokenizer, "wrong_tokenizer", "tokenizer"),
    "a tokenizer file of another run": (foreign_tokenizer, "wrong_tokenizer", "tokenizer"),
    "documents three times": (repeated_documents, "duplicates", "duplicates"),
    "rows shifted": (shift_rows, "labels_shifted", "targets"),
    "documents merged": (merge_documents, "mask_ignored", "targets"),
    "a jumpy controller": (jumpy_controller, "control_keen:spike[0]", "control"),
}
# Of code: the whole of preflight runs on each.
CODE: dict[str, tuple[Breakage, str, str]] = {
    "labels shifted twice": (shift_labels, "labels_shifted", "loss_value"),
    "loss mask ignored": (ignore_mask, "mask_ignored", "loss_value"),
    "a layer detached": (detach_layer, "detached", "connected"),
    "gradient of the core stopped": (stop_gradient_of_core, "frozen", "connected"),
    "core not updated": (freeze_core, "frozen", "updated"),
    "depth ignored": (ignore_depth, "depth_ignored", "connected"),
    "causal mask removed": (remove_causal_mask, "leak", "causality"),
    "documents see one another": (mix_documents, "segments", "causality"),
    "gradient not a number": (spoil_gradient, "nonfinite", "gradients"),
    "output too large": (enlarge_output, "output_scale", "initial_loss"),
    "rate 100 times too high": (with_rate(100.0), "rate_high", "learning_rate"),
    "rate 100 times too low": (with_rate(0.01), "rate_low", "learning_rate"),
    "a leaf lost in the checkpoint": (drop_leaf, "checkpoint_leaf", "checkpoint"),
    "data position lost at resume": (lose_data_position, "data_position", "resume"),
    "slow loader": (slow_loader, "slow_data", "data_wait"),
}
DATA_CHECKS = ("ids", "targets", "duplicates", "tokenizer", "control")


def judge(config: Config, names, cause: str, check: str) -> None:
    of = Preflight(config)
    found = {name: of.result(name) for name in names}
    told = {name: [(c.key, round(c.weight, 2)) for c in r.causes] for name, r in found.items()}
    assert found[check].passed is False, found[check]
    assert found[check].look_at
    first = [one.key for one, _ in ranked(found.values())][:2]
    assert cause in first, (first, {name: keys for name, keys in told.items() if keys})


@pytest.mark.parametrize("name", CHEAP)
def test_broken_data_is_named(name, data, monkeypatch):
    breakage, cause, check = CHEAP[name]
    judge(breakage(monkeypatch, config_for(data)), DATA_CHECKS, cause, check)


@pytest.mark.long
@pytest.mark.parametrize("name", CODE)
def test_broken_code_is_named(name, data, monkeypatch, broken_code):
    breakage, cause, check = CODE[name]
    config = breakage(monkeypatch, config_for(data))
    judge(config, [check.name for check in CHECKS], cause, check)
