"""Preflight: a healthy run passes; of each broken one the true cause is named first or second."""

import dataclasses
import doctest
import importlib.util
import itertools
import json
import os
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
    GradientNormConfig,
    LoggingConfig,
    ModelConfig,
    MonitorsConfig,
    OptimConfig,
    PlateauConfig,
    PreflightConfig,
    PrepareConfig,
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
from jaxlm.evaluation.evaluate import Evaluation
from jaxlm.evaluation.report import write_report
from jaxlm.files import sha256_of, write_json
from jaxlm.losses import chunked_cross_entropy
from jaxlm.memory.devices import DEVICES
from jaxlm.models import layers, recurrent
from jaxlm.models.layers import GatedMLP
from jaxlm.models.match import stored_parameters
from jaxlm.models.recurrent import RecurrentDepthLM
from jaxlm.models.stack import Stack
from jaxlm.training import compilation, finished, loop, preflight_memory, step
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.checks import Cause, Result, ranked, result
from jaxlm.training.control import Plateau
from jaxlm.training.monitors import TEXTS, not_judged
from jaxlm.training.preflight import CHECKS, Preflight
from jaxlm.training.preflight_control import check_control
from jaxlm.training.reach import reached
from jaxlm.training.scaling import scaled, update_flops
from jaxlm.training.trials import fall

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "a",
    "old",
    "young",
    "king",
    "queen",
    "fool",
    "sees",
    "hears",
    "follows",
    "loves",
    "fears",
    "and",
    "never",
    "often",
    "with",
]


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
    # 11 parameters in each of 1 + 2 + 1 layers; the injection, two norms, embedding, final norm.
    assert healthy["updated"].figure.startswith("49 of 49")
    assert healthy["causality"].numbers["later_tokens"] == 0.0


KINDS = {
    "transformer": {"model": {"kind": "transformer"}},
    # What the presets train with.
    "in_backward": {
        "model": {"remat": "full", "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
        "optim": {"name": "adafactor", "clip": "rms"},
        "training": {"update": "in_backward", "block_inputs": "host"},
    },
    "best_fit with dropout": {"data": {"layout": "best_fit"}, "model": {"dropout": 0.1}},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_run_pass_too(kind, data):
    config = config_for(data)
    for section, changes in KINDS[kind].items():
        changed = dataclasses.replace(getattr(config, section), **changes)
        config = dataclasses.replace(config, **{section: changed})
    of = Preflight(config)
    found = [of.result(check.name) for check in CHECKS]
    failed = [(one.name, one.figure, one.causes) for one in found if one.passed is False]
    assert not failed


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

    def forgetful(self, update, allow_changes=()):
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
            for start, end in itertools.pairwise(ends):
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


# ---------------------------------------------------------------- ranking


def test_causes_of_several_checks_are_ranked_by_their_strongest_evidence():
    found = [
        result("one", False, "", "", [Cause("a", "weak a", 0.3), Cause("b", "b", 0.6)]),
        result("two", False, "", "", [Cause("a", "strong a", 0.9), Cause("c", "c", 0.6)]),
        result("three", False, "", "", [Cause("c", "c", 0.2)]),
        result("four", True, "", "", [Cause("d", "of a pass", 1.0)]),
    ]
    assert [cause.key for cause in found[0].causes] == ["b", "a"]
    assert [(cause.text, names) for cause, names in ranked(found)] == [
        ("strong a", ["one", "two"]),
        ("c", ["two", "three"]),  # as strong as b, and named twice
        ("b", ["one"]),
    ]


def test_fall_is_from_the_first_loss_to_the_mean_of_the_last_quarter():
    assert fall([5.0, 4.0, 3.5, 3.0, 2.0, 2.0, 1.0, 3.0]) == 5.0 - 2.0
    assert fall([5.0, None, 3.5, 3.0, 2.0, 2.0, 1.0, 3.0]) == 3.0
    assert fall([5.0, 4.0, 3.5, 3.0, 2.0, 2.0, None, 3.0]) == -np.inf


# ---------------------------------------------------------------- traced programs


def test_reached_tells_unused_blocked_and_single_layers_apart():
    def of(p, x):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, p["stack"][:2])
        y = jax.lax.cond(x[0] > 0, lambda: y, lambda: y + p["branch"])
        y = jax.jit(lambda y: y + jax.lax.stop_gradient(p["frozen"]))(y)
        y = jax.checkpoint(lambda y: y * p["gain"])(y)
        return jnp.sum(y) + jnp.argmax(p["integer"]), p["unused"]

    def loss(p, x):
        return of(p, x)[0]

    p = {
        "stack": jnp.ones((3, 2, 2)),
        **{name: jnp.ones(2) for name in ("branch", "frozen", "gain", "integer", "unused")},
    }
    used = reached(loss, p, jnp.ones(2))[0]
    assert used["stack"].tolist() == [True, True, False]
    assert {n for n in p if used[n].all()} == {"branch", "frozen", "gain", "integer"}
    differentiated = reached(loss, p, jnp.ones(2), gradient=True)[0]
    assert differentiated["stack"].tolist() == [True, True, False]
    assert {n for n in p if differentiated[n].all()} == {"branch", "gain"}


def test_reached_follows_what_a_loop_passes_on_between_iterations():
    def by_scan(a, b, c):
        # b reaches the first place after one iteration, c never.
        shift = lambda s, _: ((s[0] + s[1], s[1], s[2] * 2), None)  # noqa: E731
        return jax.lax.scan(shift, (a, b, c), None, length=3)[0][0]

    def by_while(a, b, c):
        body = lambda s: (s[0] + 1.0, s[1], s[2] * 2)  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < s[1], body, (a, b, c))[0]

    for function in (by_scan, by_while):
        live = [x.tolist() for x in reached(function, 1.0, 2.0, 3.0)]
        assert live == [[True], [True], [False]], function


# ---------------------------------------------------------------- controllers


def controlled(*controllers, updates: int = 3000) -> Config:
    return Config(
        depth=DepthConfig(mean=6.0, maximum=12, backprop=4),
        training=TrainingConfig(updates=updates),
        evaluation=EvaluationConfig(every=100),
        control=ControlConfig(controllers=controllers),
    )


def test_every_kind_of_controller_passes_with_its_defaults():
    found = check_control(
        controlled(
            PlateauConfig(),
            SpikeConfig(),
            CurriculumConfig(),
            CurriculumConfig(quantity="backprop_depth", shape="one_minus_sqrt"),
            RateByDepthConfig(),
            GradientNormConfig(),
        )
    )
    assert found.passed, found.causes
    # (6 / 12) ** 0.5
    assert "0.707 at depth 12" in found.figure


@pytest.mark.parametrize(
    ("settings", "multiplier"),
    [
        # The best, `patience` passes that lower the rate, and one more that does so once again.
        (PlateauConfig(patience=1, cooldown=0), 0.25),
        (PlateauConfig(patience=1, cooldown=0, factor=0.5, minimum=0.3), 0.3),
        (PlateauConfig(patience=1, cooldown=1), 0.5),
        (PlateauConfig(patience=2, cooldown=0), 0.5),
    ],
)
def test_a_plateau_may_fall_as_often_as_its_settings_have_it(settings, multiplier, monkeypatch):
    found = check_control(controlled(settings))
    assert found.passed, found.causes
    # Any other value is wrong.
    monkeypatch.setattr(Plateau, "decide", lambda self, *_: (self.state["multiplier"] ** 1.1, ""))
    found = check_control(controlled(settings))
    assert found.causes[0].text.endswith(f"falls to {multiplier**1.1:g} instead of {multiplier:g}")


def test_a_rate_by_depth_is_judged_at_depths_that_can_be_drawn():
    # Uniform from 1 to 2 * 6 - 1 = 11, whatever the maximum.
    config = controlled(RateByDepthConfig())
    config = dataclasses.replace(config, depth=DepthConfig("uniform", mean=6.0, maximum=16))
    found = check_control(config)
    assert found.passed
    assert f"{(6 / 11) ** 0.5:.3g} at depth 11" in found.figure


def test_a_rate_by_depth_that_never_differs_is_found():
    fixed = DepthConfig("fixed", mean=6.0, maximum=16)
    found = check_control(dataclasses.replace(controlled(RateByDepthConfig()), depth=fixed))
    assert not found.passed
    assert [cause.key for cause in found.causes] == ["control_dull:rate_by_depth[0]"]
    assert "depth.distribution is fixed" in found.causes[0].text
    # On the way of a curriculum, the mean and the depth that it is rounded to do differ.
    growing = controlled(RateByDepthConfig(power=1.0), CurriculumConfig(updates=1000))
    assert check_control(dataclasses.replace(growing, depth=fixed)).passed


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        (SpikeConfig(deviations=1e6), "control_dull:spike[0]", "a jump of 1 nats"),
        (SpikeConfig(deviations=2.0), "control_keen:spike[0]", "noise of 0.1 nats"),
        (PlateauConfig(patience=40), "control_dull:plateau[0]", "before update 4,100"),
        (GradientNormConfig(begin=1.01, end=1.0), "control_keen:gradient_norm[0]", "in the norm"),
        (GradientNormConfig(usual=4000), "control_dull:gradient_norm[0]", "after 4,020 updates"),
        (CurriculumConfig(updates=4000), "control_dull:curriculum[0]", "the run has 3,000"),
    ],
)
def test_thresholds_that_never_or_always_act_are_found(settings, key, text):
    found = check_control(controlled(settings))
    assert not found.passed
    assert found.causes[0].key == key
    assert text in found.causes[0].text


# Kinds that somebody adds: the example of docs/control.md, and three that go wrong.
ADDED = '''

class Forgetful(ShallowStart):
    """Remembers where no save finds it."""

    def read_update(self, record):
        if not hasattr(self, "low_at"):
            self.low_at = None
        self.state = {"low_at": self.low_at}
        super().read_update(record)
        self.low_at = self.state.pop("low_at")

    def decide(self, update, drawn):
        low_at = getattr(self, "low_at", None)
        return (1, "high") if low_at is None else (4, "low")


class Infinite(Controller):
    """Divides by the loss."""

    def read_update(self, record):
        self.state["rate"] = 1.0 if record["loss"] is not None else float("inf")

    def decide(self, update, drawn):
        return self.state.get("rate", 1.0), "1 / loss"


class Hasty(Controller):
    """Does not think of a loss that is not finite."""

    def read_update(self, record):
        self.state["low"] = record["loss"] < 4.0

    def decide(self, update, drawn):
        return 1.0, "always"
'''
KINDS_ADDED = ("ShallowStart", "Forgetful", "Infinite", "Hasty")


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """The package with controllers added in the three places that docs/control.md names."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "jaxlm", root / "jaxlm", ignore=shutil.ignore_patterns("__pycache__"))
    examples = doctest.DocTestParser().get_examples((ROOT / "docs/control.md").read_text())
    example = next(e.source for e in examples if e.source.startswith("class ShallowStart(C"))
    names = [f"{name}Config" for name in KINDS_ADDED]
    settings = "".join(
        f"@dataclass(frozen=True, config=_STRICT)\nclass {name}Config:\n"
        f'    kind: Literal["{name.lower()}"] = "{name.lower()}"\n    loss: float = 4.0\n\n\n'
        for name in KINDS_ADDED
    )

    def put(file: str, mark: str, text: str) -> None:
        path = root / "jaxlm" / file
        before, found, after = path.read_text().partition(mark)
        assert found
        path.write_text(before + text + found + after)

    put("config.py", "ControllerConfig = Annotated[", settings)
    put("config.py", "    CurriculumConfig | RateByDepthConfig", f"    {' | '.join(names)} | ")
    control = "training/control.py"
    put(control, "def build(", f"{example}{ADDED}\n\n")
    put(control, "    CurriculumConfig,\n", "".join(f"    {name},\n" for name in names))
    branches = "".join(
        f"        if isinstance(settings, {name}Config):\n"
        f"            controllers.append({name}(settings))\n            continue\n"
        for name in KINDS_ADDED
    )
    put(control, "        if isinstance(settings, CurriculumConfig):\n", branches)
    return root


def preflight_of_added(extended: Path, data: Path, controllers: str):
    path = extended / "config.yaml"
    path.write_text(to_yaml(config_for(data)))
    words = ["--config", str(path), "--only", "control", "--json", str(extended / "found.json")]
    return subprocess.run(
        [
            *[sys.executable, str(ROOT / "scripts/preflight.py"), *words],
            f"control.controllers={controllers}",
        ],
        capture_output=True,
        text=True,
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended)},
        timeout=300,
    )


def test_a_controller_that_somebody_adds_is_held_to_what_holds_for_all(extended, data):
    done = preflight_of_added(extended, data, "[{kind: shallowstart}]")
    assert done.returncode == 0, done.stderr
    found = json.loads((extended / "found.json").read_text())["checks"][0]
    # One step at the beginning and four when the loss is low, where the configuration has two.
    assert found["figure"] == (
        "shallowstart[0] makes 2 decisions in 1,200 updates, the same across saves; no curve is "
        "known for it"
    )
    kinds = ", ".join(f"{{kind: {name.lower()}}}" for name in KINDS_ADDED[1:])
    done = preflight_of_added(extended, data, f"[{kinds}]")
    assert done.returncode == 1, done.stderr
    found = json.loads((extended / "found.json").read_text())["checks"][0]
    texts = {cause["key"]: cause["text"] for cause in found["causes"]}
    assert "decides otherwise at update" in texts["control_broken:forgetful[0]"]
    # The loss of update 400 is not finite, and counts two updates later.
    assert "its value at update 402 is inf" in texts["control_broken:infinite[1]"]
    assert "TypeError: '<' not supported" in texts["control_broken:hasty[2]"]


def test_two_controllers_of_one_depth_end_preflight_with_one_line(extended, data):
    both = "[{kind: shallowstart}, {kind: curriculum, quantity: backprop_depth}]"
    done = preflight_of_added(extended, data, both)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (
        "error: control.controllers: shallowstart[0] and curriculum[1] set backprop_depth"
        in done.stderr
    )


# ---------------------------------------------------------------- scale and memory


def test_presets_are_made_small_enough_and_say_how():
    given = load([ROOT / "configs/recurrent_3b_rtx3090.yaml"])
    config, notes = scaled(given, 5e10)
    assert update_flops(config) <= 5e10 < update_flops(given)
    assert config.model.width == 128
    assert config.model.recurrent.core_layers == given.model.recurrent.core_layers
    assert config.training.micro_batches == 2
    assert config.optim == given.optim  # adafactor's rate is relative to the weights
    assert f"{stored_parameters(given.model):,} -> {stored_parameters(config.model):,}" in notes[0]
    assert "16 x 1 x 2,048 -> 2 x 1 x 128" in notes[1]
    # With a GPU's speed the model stays, and fewer micro-batches of it are tried.
    config, notes = scaled(given, 2e14)
    assert config.model == given.model
    assert len(notes) == 1


def test_rates_of_adam_go_with_the_width():
    given = load(
        [ROOT / "configs/recurrent_3b_rtx3090_chain.yaml"],
        ["optim.name=adamw_8bit", "optim.learning_rate=3e-4", "optim.half_life_tokens=null"],
    )
    config, notes = scaled(given, 5e10)
    assert config.optim.learning_rate == pytest.approx(3e-4 * 3072 / 128)
    assert any("learning rate: 0.0003 -> 0.0072" in note for note in notes)


@pytest.mark.long
def test_memory_is_planned_for_a_named_device_and_pinned_memory_taken(data, monkeypatch):
    pytest.importorskip("jax_cuda12_plugin")
    of = Preflight(config_for(data), DEVICES["rtx3090"])
    found = of.result("memory")
    assert found.passed, found.causes
    assert 0 < found.numbers["peak_bytes"] < found.numbers["budget_bytes"]
    monkeypatch.setattr(preflight_memory, "default_budget", lambda device: 1000)
    found = preflight_memory.memory(of)
    assert not found.passed
    assert found.causes[0].key == "memory"
    assert "weights" in found.causes[0].text or "most of it is" in found.causes[0].text


def test_pinned_memory_that_cannot_be_had_is_said(monkeypatch):
    assert preflight_memory._pin(0, 10) == []
    assert preflight_memory._pin(10**6, 10**7) == []
    assert "over the host budget" in preflight_memory._pin(10**7, 10**6)[0].text
    monkeypatch.setattr(preflight_memory, "_free_host_memory", lambda: 10**6)
    assert "are free" in preflight_memory._pin(10**6, 10**7)[0].text


_PEAK = """
import resource, sys
import jax
from jaxlm.training.preflight_memory import _pin

jax.device_put(1.0).block_until_ready()
before = 1024 * int(next(x for x in open("/proc/self/status") if x.startswith("VmRSS")).split()[1])
assert _pin(10**9, 10**9) == []
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_pinned_memory_is_taken_once_and_not_twice():
    """A gigabyte, and the piece of 2**27 bytes that it is filled from."""
    if preflight_memory._free_host_memory() < 2 * 10**9:
        pytest.skip("too little memory is free")
    words = [sys.executable, "-c", _PEAK]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert 10**9 <= int(done.stdout) < 1.3e9


# ---------------------------------------------------------------- finished runs


@pytest.fixture(scope="module")
def finished_run(data) -> Path:
    """A run with every kind of controller, monitors, and two passes over part of the data."""
    config = config_for(
        data,
        run=RunConfig(name="finished", directory=str(data.parent / "runs"), seed=5),
        monitors=MonitorsConfig(
            after_updates=10, window=10, depth_gain=None, idle_residual=None, core_ratio=None
        ),
        control=ControlConfig(
            controllers=(
                CurriculumConfig(updates=20),
                RateByDepthConfig(),
                PlateauConfig(patience=1, cooldown=0, improvement=0.5),
                SpikeConfig(window=5, deviations=2.0, updates=3),
            )
        ),
        preflight=PreflightConfig(data_wait=0.5),
    )
    assert loop.train(config) == 0
    return data.parent / "runs" / "finished"


def checks_of(directory: Path) -> dict[str, Result]:
    names = [check.name for check in finished.CHECKS]
    found = finished.run_checks(directory, names, lambda units, text: None)
    return {one.name: one for one in found}


def test_a_finished_run_passes(finished_run):
    found = checks_of(finished_run)
    failed = [one for one in found.values() if one.passed is False]
    assert not failed
    assert found["controllers"].numbers["decisions"] > 20
    assert found["records"].numbers["updates"] == 40


def edit(directory: Path, name: str, change: Callable[[list[dict]], list[dict] | None]) -> None:
    path = directory / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = change(records) or records
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def set_in(name: str, number: int, **values):
    return lambda directory: edit(directory, name, lambda rs: rs[number].update(values))


def damage_checkpoint(directory: Path) -> None:
    files = (directory / "checkpoints" / "40").rglob("*")
    path = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop(name: str, number: int):
    return lambda directory: edit(directory, name, lambda rs: rs[:number] + rs[number + 1 :])


def raise_loss(directory: Path) -> None:
    def change(records):
        for record in records[30:]:
            record["cross_entropy"] += 3.0

    edit(directory, "metrics.jsonl", change)


def raise_alarm(directory: Path) -> None:
    """State growth beyond its threshold at the last passes, as an alarm that nobody cleared."""
    edit(
        directory,
        "monitors.jsonl",
        lambda rs: [
            {**r, "state_growth": 9.0, "beyond": ["state_growth"]} if i > 1 else {**r, "beyond": []}
            for i, r in enumerate(rs)
        ],
    )
    alarm = {"event": "raised", "update": 40, "since": 30, "monitor": "state_growth"}
    alarm |= {"value": 9.0, "threshold": 4.0, "action": "warn", "text": "the state grows"}
    (directory / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")


FINISHED = {
    "a record is missing": (drop("metrics.jsonl", 7), "records", "records"),
    "tokens fall": (set_in("metrics.jsonl", 20, tokens=3), "records", "tokens"),
    "a block comes twice": (
        lambda d: edit(d, "blocks.jsonl", lambda rs: rs[9].update(blocks=rs[3]["blocks"])),
        "blocks",
        "repeated_blocks",
    ),
    "a micro-batch is missing": (drop("blocks.jsonl", 9), "records", "blocks_missing"),
    "another rate": (set_in("metrics.jsonl", 25, learning_rate=1e-3), "rates", "schedule"),
    "a decision is missing": (drop("decisions.jsonl", 3), "controllers", "decisions"),
    "another depth": (set_in("metrics.jsonl", 12, depth=1000), "controllers", "decisions"),
    "a damaged checkpoint": (damage_checkpoint, "checkpoint", "checkpoint_damaged"),
    "the loss rose": (raise_loss, "loss_falls", "rate_high"),
    "an alarm stands": (raise_alarm, "monitors", "alarm:state_growth"),
    "a verdict is not what the figure says": (
        set_in("monitors.jsonl", 2, state_growth=4.1, beyond=[]),
        "monitors",
        "beyond",
    ),
    "a verdict without a figure for it": (
        set_in("monitors.jsonl", 3, state_growth=3.9, beyond=["state_growth"]),
        "monitors",
        "beyond",
    ),
    "depth is ignored": (
        set_in("monitors.jsonl", -1, loss_1=3.25, loss_mean=3.25),
        "depth_order",
        "depth_ignored",
    ),
    "depth does harm": (
        set_in("monitors.jsonl", -1, loss_1=3.0, loss_mean=3.0625),
        "depth_order",
        "depth_order",
    ),
    "skipped updates": (
        set_in("metrics.jsonl", 5, loss=None, applied=False),
        "skipped_updates",
        "nonfinite",
    ),
}


@pytest.mark.parametrize("name", FINISHED)
def test_what_is_wrong_with_a_finished_run_is_named(name, finished_run, tmp_path):
    breakage, check, cause = FINISHED[name]
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    breakage(directory)
    of = finished.FinishedRun(directory)
    found = next(c for c in finished.CHECKS if c.name == check).run(of)
    assert found.passed is False
    assert found.causes[0].key == cause, found.causes


def test_a_figure_that_is_not_finite_keeps_its_verdict(finished_run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    overflow = {"state_growth": None, "beyond": ["state_growth"]}
    set_in("monitors.jsonl", -1, **overflow)(directory)
    assert finished.monitors(finished.FinishedRun(directory)).passed
    # Ten updates later it is an alarm, which alarms.jsonl lacks.
    set_in("monitors.jsonl", -2, **overflow)(directory)
    found = finished.monitors(finished.FinishedRun(directory))
    assert found.numbers["standing"] == ["state_growth"]
    assert [cause.key for cause in found.causes] == ["alarms"]


def test_monitors_that_never_judged_are_no_pass(finished_run, tmp_path):
    """Passes after 10, 20, 30 and 40 updates."""
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)
    path = directory / "config.yaml"
    text = path.read_text()

    def found(after: int) -> Result:
        path.write_text(text.replace("after_updates: 10", f"after_updates: {after}"))
        return finished.monitors(finished.FinishedRun(directory))

    assert "after_updates: 10" in text
    edit(directory, "monitors.jsonl", lambda rs: [{**r, "beyond": []} for r in rs[:-1]])
    edit(directory, "monitors.jsonl", lambda rs: [{**r, **dict.fromkeys(TEXTS, 0.0)} for r in rs])
    assert found(10).passed
    assert found(30).passed  # the last pass is the one that is judged
    assert found(31).passed is None
    assert found(31).figure == "nothing is judged before update 31 (monitors.after_updates)"
    set_in("monitors.jsonl", -1, state_growth=9.0, beyond=["state_growth"])(directory)
    assert found(30).passed
    assert found(31).passed is False  # judged all the same
    assert found(31).causes[0].key == "beyond"


def test_a_report_says_that_nothing_was_judged(finished_run, tmp_path):
    report = json.loads((finished_run / "report.json").read_text())
    evaluations = [Evaluation(**figures) for figures in report["evaluations"]]
    passes = [{"update": update} for update in (10, 20, 30, 40)]
    config = Config()

    def words(after: int) -> str:
        monitors = dataclasses.replace(config.monitors, after_updates=after)
        why = not_judged(dataclasses.replace(config, monitors=monitors), passes)
        write_report(
            tmp_path, {**report, "alarms": [], "not_judged": why}, evaluations, [], [], passes
        )
        return (tmp_path / "report.md").read_text()

    assert "No alarm was raised.\n" in words(40)
    line = "No alarm was raised: nothing is judged before update 41 (monitors.after_updates).\n"
    assert line in words(41)


def with_losses(run: Path, directory: Path, losses: list[float]) -> finished.FinishedRun:
    """A run whose updates had these losses."""
    shutil.copytree(run, directory)
    edit(
        directory,
        "metrics.jsonl",
        lambda rs: [
            {**rs[-1], "update": update, "cross_entropy": loss}
            for update, loss in enumerate(losses)
        ],
    )
    return finished.FinishedRun(directory)


@pytest.mark.parametrize("count", [301, 1001, 15, 7])
def test_the_last_tenth_is_no_shorter_than_the_others(count, finished_run, tmp_path):
    """From 6 to 4 in the first half, and 0.4 higher in the last update alone."""
    half = count // 2
    losses = [6.0 - 2.0 * u / half if u < half else 4.0 for u in range(count)]
    losses[-1] = 4.4
    found = finished.loss_falls(with_losses(finished_run, tmp_path / "run", losses))
    # Lengths of numpy's ten parts of 301 are 31 and nine times 30, of 1001 101 and 100, of 15 five
    # times 2 and five times 1, of 7 seven times 1.
    last = {301: 30, 1001: 100, 15: 1, 7: 1}[count]
    assert found.numbers["rise"] == pytest.approx(0.4 / last)
    assert found.passed == (0.4 / last < 0.2)


def test_windows_may_be_cut_into_other_micro_batches_at_a_restart(finished_run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished_run, directory)

    def halves(records):
        for record in records:
            ids, number = record["blocks"], 2 * record["micro_batch"]
            if record["update"] >= 20:
                yield record
                continue
            yield {**record, "micro_batch": number, "blocks": ids[: len(ids) // 2]}
            yield {**record, "micro_batch": number + 1, "blocks": ids[len(ids) // 2 :]}

    edit(directory, "blocks.jsonl", lambda records: list(halves(records)))
    assert not finished.records(finished.FinishedRun(directory)).passed
    edit(directory, "starts.jsonl", lambda records: [*records, {**records[0], "update": 20}])
    of = finished.FinishedRun(directory)
    assert finished.records(of).passed
    assert finished.blocks(of).passed


def test_a_directory_that_is_no_run_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        finished.FinishedRun(tmp_path)


# ---------------------------------------------------------------- the command


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/preflight.py"), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def test_the_command_writes_a_table_and_json_and_its_exit_code(data, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(repeated_documents(None, config_for(data))))
    out = tmp_path / "result.json"
    done = command(
        "--config", str(path), "--only", "ids,duplicates", "--json", str(out), "run.name=x"
    )
    assert done.returncode == 1, done.stderr
    assert "Look first at: prepare.deduplicate" in done.stdout
    assert "1 passed, 1 failed" in done.stdout
    stored = json.loads(out.read_text())
    assert [check["name"] for check in stored["checks"]] == ["ids", "duplicates"]
    assert stored["causes"][0]["key"] == "duplicates"
    # Each document comes three times: two of three repeat an earlier one.
    assert stored["checks"][1]["numbers"]["documents"] == pytest.approx(2 / 3)


def test_the_command_passes_the_host_budget_on(monkeypatch):
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "scripts/preflight.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    given = []

    def stop(config, device, host_budget):
        given.append(host_budget)
        raise UserError("enough")

    monkeypatch.setattr(script.preflight, "Preflight", stop)
    words = ["preflight.py", "--config", str(ROOT / "configs/quickstart.yaml")]
    for more in ([], ["--host-budget", "40GB"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(UserError, match="enough"):
            script.main()
    assert given == [12 * 10**9, 40 * 10**9]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected either --config FILE or --run DIR"),
        (["--run", "runs/none"], "runs/none: not a run"),
        (["--run", "runs/none", "--host-budget", "8GB"], "leave out key=value, --device and"),
        (["--config", "x.yaml", "--host-budget", "many"], "--host-budget many: expected a size"),
        (["--run", "runs/none", "--only", "speling"], "no check speling; one of records, blocks"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, message):
    done = command(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
