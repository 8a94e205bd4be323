"""The presets' memory on an RTX 3090, by XLA's plan: a limit for each, in GB of 10^9 bytes."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import long, write_documents

from jaxlm.config import load
from jaxlm.memory.devices import RTX3090
from jaxlm.models.match import stored_parameters
from jaxlm.training import loop
from jaxlm.training.metrics import read_records
from jaxlm.training.planning import default_budget, lower_step

ROOT = Path(__file__).parents[2]

ONE = ["training.micro_batches=1", "training.block_inputs=device"]
PLAIN = [
    "training.micro_batches=1",
    "training.block_inputs=device",
    "training.update=after_backward",
]
FULL = ["depth.distribution=fixed", "depth.maximum=12", "depth.backprop=full"]
LARGE = ["training.micro_batches=64"]  # 131,072 tokens an update

# Preset, changes, most GB on the device, most GB of pinned host memory.
CASES = [
    ("transformer_3b_rtx3090", PLAIN, 16.5, 0),
    ("recurrent_3b_rtx3090", [*PLAIN, *FULL], 16.5, 0),
    ("transformer_3b_rtx3090", ONE, 10.5, 0),
    ("recurrent_3b_rtx3090", [*ONE, *FULL], 11.8, 0),
    ("transformer_3b_rtx3090", LARGE, 13.0, 24.0),
    ("recurrent_3b_rtx3090", [], 13.0, 12.0),
    ("transformer_7b_rtx3090", ONE, 19.0, 0),
    ("transformer_7b_rtx3090", [], 19.5, 12.0),
    ("recurrent_7b_rtx3090", ONE, 20.5, 0),
    ("recurrent_7b_rtx3090", [], 22.0, 12.0),
    ("recurrent_3b_rtx3090_chain", FULL, 22.6, 0),
    # Exact clipping, whose first pass over the layers must not copy a stack.
    ("transformer_3b_rtx3090", [*ONE, "optim.clip=two_pass"], 10.5, 0),
]


@pytest.fixture
def plan_memory(monkeypatch):
    """Run scripts/plan_memory.py in this process."""
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "scripts/plan_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["plan_memory.py", *map(str, words)])
        return module.main()

    return run


# One of each engine in every test run; half a minute each for the others.
QUICK = (0, 7)


@pytest.mark.parametrize(
    ("name", "changes", "device", "host"),
    [
        pytest.param(
            *case,
            id=" ".join([case[0], *case[1]]),
            marks=[] if i in QUICK else [pytest.mark.long],
        )
        for i, case in enumerate(CASES)
    ],
)
def test_planned_peak(plan_memory, tmp_path, name, changes, device, host):
    """The planner itself: it exits with 0, and its figures are those of the arithmetic."""
    file = tmp_path / "plan.json"
    words = ["--host-budget", f"{max(host, 12)}GB", "--json", file, "training.updates=10000"]
    assert plan_memory("--config", ROOT / f"configs/{name}.yaml", *words, *changes) == 0
    plan = json.loads(file.read_text())
    peak, pinned = plan["peak_bytes"], plan["host_peak_bytes"]
    print(
        f"{peak / 1e9:.2f} GB, host {pinned / 1e9:.2f} GB, n {plan['mean_depth']:.4g}, "
        f"k {plan['mean_backprop_depth']:.4g}, {plan['tokens_per_second_bound']:.0f} tok/s, "
        f"{plan['days_per_billion_tokens_bound']:.2f} days"
    )
    assert peak <= device * 1e9
    assert peak <= default_budget(RTX3090)
    assert pinned <= host * 1e9
    assert sum(plan["parts"].values()) == peak
    assert plan["parts"]["remainder"] < 0.15 * peak
    assert plan["parts"]["weights"] == 2 * plan["parameters"]
    config = load([f"configs/{name}.yaml"], changes)
    if config.training.block_inputs == "host":
        # The input of each layer of a stack; of the core, of each step and of each layer in it.
        # The prelude's output, which one norm needs again, XLA leaves on the device.
        model, k = config.model, config.depth.max_backprop
        inputs = model.transformer.layers
        if model.kind == "recurrent":
            parts = model.recurrent
            inputs = parts.prelude_layers + parts.coda_layers + k * (1 + parts.core_layers)
        tokens = config.training.window_rows * config.data.sequence_length
        assert pinned == 2 * inputs * tokens * model.width


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [["optim.accumulation=optax_multisteps"], ["optim.name=adamw", "model.param_dtype=float32"]],
)
def test_what_does_not_fit(plan_memory, change):
    """Float32 sums by optax.MultiSteps, and float32 AdamW, of 3.3 billion parameters."""
    words = ["training.update=after_backward", "training.block_inputs=device", "optim.clip=global"]
    words.append("optim.half_life_tokens=null")
    path = ROOT / "configs/transformer_3b_rtx3090.yaml"
    assert plan_memory("--config", path, *words, *change) == 1


# The shape of a result and what makes it, in XLA's text.
COPY = re.compile(r"= (?:bf16|f32)\[([\d,]+)\][^ ]* copy\(")


@pytest.mark.parametrize("size", ["small", pytest.param("full", marks=pytest.mark.long)])
def test_no_stacked_weight_is_copied(size):
    files = ["configs/transformer_7b_rtx3090.yaml"]
    # 30 layers as in the preset: no other array has this axis.
    words = ["model.attention=xla", "model.transformer.layers=30"]
    if size == "small":
        files.append("configs/small.yaml")
    lowered, _, state = lower_step(load(files, words), RTX3090)
    weights = {x.shape for x in jax.tree.leaves(state.params["stack"])}
    assert all(shape[0] == 30 for shape in weights)
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    text = lowered.compile(options).as_text()
    assert text is not None
    assert "while(" in text  # the layers' loop, and so the text is the program's
    copied = {tuple(map(int, shape.split(","))) for shape in COPY.findall(text)}
    assert copied  # the pattern does find copies
    assert not {shape for shape in copied if sorted(shape) in [sorted(w) for w in weights]}


PRESETS = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*_rtx3090*.yaml")
    if not path.stem.startswith("study_")
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("recurrent_3b_rtx3090", "transformer_3b_rtx3090") else long(name)
        for name in PRESETS
    ],
)
def test_presets_made_small_train(counting_data, name):
    """The preset's engine, dtypes and optimizer, with the inputs of layers on the device."""
    assert len(PRESETS) == 5
    config = small_preset(counting_data, name, "training.block_inputs=device")
    assert loop.train(config) == 0
    assert_learns(config)


# In the long suite: beside another process, XLA's CPU runtime was once seen to wait for ever in it.
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("chain")])
def test_inputs_of_layers_on_the_host_change_nothing(counting_data, name):
    """The preset's own engine: losses are those with the inputs on the device."""
    losses = []
    for place in ("host", "device"):
        config = small_preset(counting_data, name, f"training.block_inputs={place}")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=place))
        assert loop.train(config) == 0
        losses.append([record["loss"] for record in records_of(config)])
    assert losses[0] == losses[1]


@pytest.fixture
def counting_data(tmp_path):
    """Documents that count upwards from any token: the next one is always known."""
    documents = [[1 + (start + i) % 63 for i in range(40)] for start in range(63)]
    return write_documents(tmp_path / "data", documents, documents[:5], 64)


def small_preset(data, name, *words):
    files = [ROOT / f"configs/{name}.yaml", ROOT / "configs/small.yaml"]
    settings = {
        "data.directory": data,
        "run.directory": data.parent / "runs",
        "run.name": "small",
        "model.vocabulary_size": 64,
        "model.width": 32,
        "model.feed_forward": 64,
        "data.sequence_length": 8,
        "data.epochs": 40,
        "training.micro_batch_rows": 4,
        "optim.warmup_updates": 3,
        "training.updates": 30,
        "training.micro_batches": 4,
        "loss.chunk_tokens": 16,
        "evaluation.every": 0,
        "evaluation.depths": "[2]",
        "evaluation.rows": 8,
        "logging.tensorboard": "false",
    }
    return load(list(map(str, files)), [*(f"{k}={v}" for k, v in settings.items()), *words])


def records_of(config):
    return read_records(Path(config.run.directory) / config.run.name / "metrics.jsonl")


def assert_learns(config):
    losses = [record["loss"] for record in records_of(config)]
    assert len(losses) == config.training.updates
    assert losses[0] == pytest.approx(np.log(64), abs=0.3)
    assert np.mean(losses[-5:]) < losses[0] - 0.5


def test_sizes():
    """3B: equal within 1 %. 7B: 6.8 to 7.2 billion stored, core of at most two layers."""
    sizes = {
        name: stored_parameters(load([f"configs/{name}_rtx3090.yaml"], []).model)
        for name in ("transformer_3b", "recurrent_3b", "transformer_7b", "recurrent_7b")
    }
    assert sizes["recurrent_3b"] == pytest.approx(3.3e9, rel=0.01)
    assert sizes["transformer_3b"] == pytest.approx(sizes["recurrent_3b"], rel=0.01)
    assert 6.8e9 <= sizes["transformer_7b"] <= 7.2e9
    assert 6.8e9 <= sizes["recurrent_7b"] <= 7.2e9
    config = load(["configs/recurrent_7b_rtx3090.yaml"], [])
    assert config.model.recurrent.core_layers <= 2
