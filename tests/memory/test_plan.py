"""The memory planner: figures from shapes by hand, parts that add up, exit codes."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_model

from jaxlm.config import (
    Config,
    DataConfig,
    DepthConfig,
    LossConfig,
    OptimConfig,
    TrainingConfig,
    TransformerConfig,
    load,
)
from jaxlm.errors import UserError
from jaxlm.memory.assignment import read_assignment
from jaxlm.memory.devices import DEVICES, RTX3090, peak_flops, read_device
from jaxlm.memory.plan import abstract_arguments, buffer_assignment, compile_for, planned_bytes
from jaxlm.training.planning import alternatives, default_budget, plan_training
from jaxlm.training.spec import step_spec
from jaxlm.training.step import init_state, train_step

ROWS, LENGTH, LAYERS, WIDTH, VOCABULARY = 2, 96, 5, 48, 1000


def config_of(kind="transformer", *, training=None, optim=None, loss=None, **model) -> Config:
    settings = {
        "vocabulary_size": VOCABULARY,
        "width": WIDTH,
        "heads": 4,
        "feed_forward": 80,
        "qk_norm": False,
        "attention": "xla",
        **model,
    }
    tiny = tiny_model(kind, **settings)
    return Config(
        model=dataclasses.replace(tiny, transformer=TransformerConfig(layers=LAYERS)),
        data=DataConfig(sequence_length=LENGTH),
        depth=DepthConfig(distribution="fixed", mean=6, maximum=8, backprop=3),
        optim=OptimConfig(**{"name": "adamw", **(optim or {})}),
        loss=LossConfig(**{"chunk_tokens": 64, **(loss or {})}),
        training=TrainingConfig(**{"micro_batch_rows": ROWS, **(training or {})}),
    )


# One layer: four square projections, the gated MLP, two norms; the tied table and the final norm.
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 80 + 2 * WIDTH
PARAMETERS = LAYERS * LAYER + VOCABULARY * WIDTH + WIDTH
BLOCKS = LAYERS * LAYER


def xla_total(config: Config) -> int:
    """The same figure through XLA's own summary of the program instead of its dump."""
    spec = step_spec(config, VOCABULARY, 1000)
    state = jax.eval_shape(lambda: init_state(spec))
    rows = (config.training.micro_batches, config.training.micro_batch_rows)
    window = {
        "tokens": jax.ShapeDtypeStruct((*rows, LENGTH + 1), jnp.uint16),
        "segment_ids": jax.ShapeDtypeStruct((*rows, LENGTH + 1), jnp.int32),
        "positions": jax.ShapeDtypeStruct((*rows, LENGTH + 1), jnp.int32),
        "block": jax.ShapeDtypeStruct(rows, jnp.int32),
    }
    number = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = abstract_arguments(RTX3090, (state, window, number, number))
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    return planned_bytes(train_step.lower(spec, *arguments).compile(options))[0]


def test_adamw_in_float32_and_the_sum_of_the_parts():
    config = config_of()
    plan = plan_training(config, RTX3090)
    assert plan.parameters == PARAMETERS
    assert plan.parts["weights"] == 4 * PARAMETERS
    # Two moments in float32, and scalars.
    assert 0 < plan.parts["optimizer_state"] - 8 * PARAMETERS < 64
    assert min(plan.parts.values()) >= 0
    assert plan.host == 0
    # XLA's summary leaves out the program's constants.
    assert sum(plan.parts.values()) == plan.peak
    assert 0 <= plan.peak - xla_total(config) < 2048
    assert plan.parts["remainder"] < 0.02 * plan.peak
    # Everything in the window: 2 bytes a token id, and 4 each for document and position.
    assert 10 * ROWS * (LENGTH + 1) < plan.parts["inputs_outputs"] < 10 * ROWS * (LENGTH + 1) + 4096


def test_bf16_weights_and_factored_statistics():
    """Each matrix keeps one float32 per row and column; the vectors keep all of theirs."""
    plan = plan_training(
        config_of(param_dtype="bfloat16", optim={"name": "adafactor", "rounding": "nearest"}),
        RTX3090,
    )
    assert plan.parts["weights"] == 2 * PARAMETERS
    per_layer = 4 * (WIDTH + WIDTH) + 3 * (WIDTH + 80) + 2 * WIDTH
    state = 4 * (LAYERS * per_layer + VOCABULARY + WIDTH + WIDTH)
    assert plan.parts["optimizer_state"] == pytest.approx(state, rel=0.02)  # and scalars


# Activations that are large beside the weights put the peak into the backward pass of a
# micro-batch, where its gradients and the sums of those before it exist.
WIDE_ROWS = {"micro_batch_rows": 24, "micro_batches": 3}


def test_accumulators_are_four_bytes_a_parameter():
    plan = plan_training(
        config_of(training=WIDE_ROWS, param_dtype="bfloat16", optim={"rounding": "nearest"}),
        RTX3090,
    )
    assert plan.parts["accumulators"] == pytest.approx(4 * PARAMETERS, rel=0.02)
    # The layers' gradients in the weights' dtype; the head's are summed over chunks in float32.
    table = VOCABULARY * WIDTH
    assert plan.parts["gradients"] >= 0.98 * 2 * BLOCKS
    assert plan.parts["gradients"] <= 1.02 * (2 * BLOCKS + 2 * 4 * table)
    assert plan.parts["remainder"] < 0.02 * plan.peak


def test_multisteps_keeps_its_accumulators_in_the_state():
    plan = plan_training(
        config_of(training={"micro_batches": 2}, optim={"accumulation": "optax_multisteps"}),
        RTX3090,
    )
    assert plan.parts["accumulators"] >= 4 * PARAMETERS
    assert 0 < plan.parts["optimizer_state"] - 8 * PARAMETERS < 96


def test_activations_with_and_without_rematerialisation():
    """Full keeps one float32 stream a layer; none also keeps at least both MLP products."""
    training = {"micro_batch_rows": 24}
    stream, hidden = (4 * 24 * LENGTH * size for size in (WIDTH, 80))
    full = plan_training(config_of(training=training, remat="full"), RTX3090)
    assert full.parts["accumulators"] == 0  # with one micro-batch
    none = plan_training(config_of(training=training, remat="none"), RTX3090)
    assert full.parts["activations"] >= LAYERS * stream
    assert none.parts["activations"] >= LAYERS * (stream + 2 * hidden)
    # Attention's float32 scores of every layer, which full has for one layer at a time.
    scores = 4 * 24 * 4 * LENGTH * LENGTH
    assert none.parts["activations"] - full.parts["activations"] > (LAYERS - 1) * scores


def test_a_chunk_of_logits():
    """All tokens in one chunk: float32 logits, and at most their gradient beside them."""
    tokens, vocabulary = 24 * LENGTH, 4 * VOCABULARY  # or attention's scores would be the peak
    training, loss = {"micro_batch_rows": 24}, {"chunk_tokens": tokens}
    plan = plan_training(
        config_of(training=training, loss=loss, remat="full", vocabulary_size=vocabulary), RTX3090
    )
    logits = 4 * tokens * vocabulary
    assert logits <= plan.parts["logits"] <= 2.01 * logits


def test_recurrent_models_are_planned_at_their_depths():
    plan = plan_training(config_of("recurrent", remat="full"), RTX3090)
    assert (plan.depth, plan.backprop_depth) == (6, 3)
    assert plan.parts["remainder"] < 0.02 * plan.peak
    assert plan.tokens_per_second() == 71e12 / (plan.flops.training + plan.flops.recomputed)
    assert plan.tokens_per_second(0.8, recomputation=False) == 0.8 * 71e12 / plan.flops.training


def test_pinned_host_memory_is_counted_apart():
    """A scan whose inputs, 16 times 4,096 x 256 in bf16, wait on the host for the way back."""

    def function(x, weights):
        def forward(h, w):
            return jnp.tanh(h @ w), jax.device_put(h, jax.memory.Space.Host)

        def backward(g, scanned):
            w, h = scanned
            return g @ w.T * jax.device_put(h, jax.memory.Space.Device), None

        x, saved = jax.lax.scan(forward, x, weights)
        return jax.lax.scan(backward, x, (weights, saved), reverse=True)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 256), (16, 256, 256))]
    assignment = buffer_assignment(jax.jit(function).lower(*abstract_arguments(RTX3090, shapes)))
    assert assignment.host == 2 * 16 * 4096 * 256
    assert assignment.peak < assignment.host


ALLOCATIONS = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 40, output shape is |(f32[10])|, maybe-live-out:
allocation 2: size 4, constant:
allocation 3: size 4, thread-local:
allocation 4: size 1000, color 5, preallocated-temp:
 value: <2 far @0> (size=1000,offset=0): f32[250]{0}
allocation 5: size 900, preallocated-temp:
 value: <3 zeros @0> (size=400,offset=0): f32[100]{0}
 value: <4 big @0> (size=300,offset=500): f32[5,15]{1,0}
 value: <5 alias @0> (size=300,offset=500): f32[75]{0}
 value: <6 loop{1} (phi) @0> (size=400,offset=0): f32[100]{0}
 value: <7 late @0> (size=200,offset=500): f32[50]{0}

Total bytes used: 2348 (2.3KiB)
"""
LIVE_RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    zeros{}:1-3
    big{}:2-3
    alias{}:2-3
    loop{1}:4-9
    late{}:5-6
"""
PROGRAM = """HloModule m

FileNames
1 "/somewhere/jaxlm/losses.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (arg: (s32[], f32[100])) -> (s32[], f32[100]) {
  %arg = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[100]{0} get-tuple-element(%arg), index=1
  %sum = f32[100]{0} add(%x, %x), metadata={op_name="jit(f)/sum" stack_frame_id=1}
  ROOT %out = (s32[], f32[100]{0}) tuple(%i, %sum)
}

%fill () -> f32[100] {
  %zero = f32[] constant(0)
  ROOT %filled = f32[100]{0} broadcast(%zero), dimensions={}
}

ENTRY %main (p: f32[100]) -> f32[10] {
  %p = f32[100]{0} parameter(0)
  %zeros = f32[100]{0} fusion(), kind=kLoop, calls=%fill, metadata={op_name="jit(f)/while"}
  %big = f32[5,15]{1,0} exponential(%p), metadata={op_name="jit(f)/exp"}
  %tuple = (s32[], f32[100]{0}) tuple(%n, %zeros)
  %loop = (s32[], f32[100]{0}) while(%tuple), condition=%while_condition, body=%body
}
"""


def test_reading_a_dump_written_by_hand(tmp_path):
    """At points 2 and 3, 400 + 300 of 900 bytes are taken; at 5 and 6 only 400 + 200."""
    (tmp_path / "m-buffer-assignment.txt").write_text(ALLOCATIONS)
    (tmp_path / "m-live-range.txt").write_text(LIVE_RANGES)
    (tmp_path / "m.gpu_after_optimizations.txt").write_text(PROGRAM)
    assignment = read_assignment(tmp_path)
    assert assignment.peak == 400 + 40 + 4 + 900
    assert (assignment.host, assignment.gaps) == (1000, 200)
    zeros, big = assignment.buffers
    # Zeros belong to the sum that the loop makes of them.
    assert (zeros.size, zeros.operation, zeros.source[-9:]) == (400, "jit(f)/sum", "losses.py")
    assert (big.size, big.dtype, big.shape) == (300, "f32", (5, 15))
    assert (big.operation, big.source) == ("jit(f)/exp", "")
    (tmp_path / "m-live-range.txt").unlink()
    with pytest.raises(RuntimeError, match=r"expected one \*-live-range.txt"):
        read_assignment(tmp_path)


@pytest.mark.parametrize("name", DEVICES)
def test_xla_compiles_for_every_device(name):
    device = DEVICES[name]
    vector = jax.ShapeDtypeStruct((1024,), jnp.float32)
    analysis = compile_for(device, lambda x: x + 1, vector).memory_analysis()
    assert analysis is not None
    assert analysis.argument_size_in_bytes == analysis.output_size_in_bytes == 4096
    assert peak_flops(device.kind) == device.peak_flops
    gib = {"a6000": 48, "a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "rtx5090": 32}
    assert 0.95 * gib.get(name, 24) < device.memory_bytes / 2**30 <= gib.get(name, 24)


def test_default_budget_of_an_rtx_3090_is_22_6_gb():
    assert default_budget(RTX3090) == pytest.approx(22.6e9, rel=1e-3)


def test_alternatives_change_something_and_keep_the_window():
    base = config_of(
        training={"micro_batch_rows": 4, "micro_batches": 3}, loss={"chunk_tokens": 512}
    )
    changes = dict(alternatives(base))
    rows = changes["training.micro_batch_rows=1 training.micro_batches=12"]
    assert rows.training.window_rows == base.training.window_rows
    assert changes["model.remat=full"].model.remat == "full"
    assert changes["optim.name=adafactor"].optim.name == "adafactor"
    assert {"loss.chunk_tokens=256", "optim.accumulator_dtype=bfloat16"} <= set(changes)
    everything = list(changes.values())[-1]
    assert everything.model.param_dtype == everything.model.compute_dtype == "bfloat16"
    assert alternatives(everything) == []


# ---------------------------------------------------------------- the script


@pytest.fixture
def plan_memory(monkeypatch):
    """Run scripts/plan_memory.py in this process."""
    path = Path(__file__).parents[2] / "scripts" / "plan_memory.py"
    spec = importlib.util.spec_from_file_location("plan_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["plan_memory.py", *map(str, words)])
        return module.main()

    return run


@pytest.fixture
def tiny_yaml(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: {kind: transformer, vocabulary_size: 64, width: 32, heads: 4, feed_forward: 64,\n"
        "  param_dtype: bfloat16, compute_dtype: bfloat16}\n"
        "data: {sequence_length: 32}\ntraining: {micro_batch_rows: 1}\n"
        "loss: {chunk_tokens: 32}\n"
        "optim: {name: adamw, rounding: nearest}\n"  # its random bits take long to compile
    )
    return path


def test_float32_adamw_of_3_3_billion_parameters_does_not_fit(plan_memory, tmp_path, capsys):
    """Weights, two moments and gradients take 16 bytes a parameter: 52.9 GB."""
    result = tmp_path / "plan.json"
    path = tmp_path / "large.yaml"
    path.write_text(
        "model:\n  kind: transformer\n  vocabulary_size: 99584\n  width: 3072\n  heads: 24\n"
        "  kv_heads: 8\n  feed_forward: 8896\n  transformer: {layers: 28}\n"
        "data: {sequence_length: 2048}\ntraining: {micro_batch_rows: 1}\noptim: {name: adamw}\n"
    )
    assert plan_memory("--config", path, "--json", result) == 1
    plan = json.loads(result.read_text())
    size, layers = 128, 28
    layer = 3072 * size * (2 * 24 + 2 * 8) + 3 * 3072 * 8896 + 2 * 3072 + 2 * size
    parameters = layers * layer + 99_584 * 3072 + 3072
    assert plan["parameters"] == parameters == pytest.approx(3.3e9, rel=0.01)
    assert plan["parts"]["weights"] == 4 * parameters
    assert plan["peak_bytes"] >= 16 * parameters
    assert plan["peak_bytes"] == sum(plan["parts"].values())
    assert plan["parts"]["remainder"] < 0.15 * plan["peak_bytes"]
    assert plan["fits"] is False
    assert plan["budget_bytes"] == default_budget(RTX3090)
    printed = capsys.readouterr().out
    assert "It does not fit" in printed
    assert "optim.name=adafactor" in printed


def test_budgets_decide_the_exit_code(plan_memory, tiny_yaml, tmp_path, capsys):
    result = tmp_path / "plan.json"
    common = ("--config", tiny_yaml, "--json", result)
    assert plan_memory(*common, "--host-budget", "1MB") == 0
    plan = json.loads(result.read_text())
    assert plan["fits"] is True
    assert (plan["host_peak_bytes"], plan["host_budget_bytes"]) == (0, 10**6)
    assert plan["tokens_per_second_bound"] == pytest.approx(
        71e12 / (plan["flops_per_token"] + plan["recomputed_flops_per_token"])
    )
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert plan_memory(*common, "--budget", plan["peak_bytes"] - 1, "--suggest") == 1
    (suggestion,) = json.loads(result.read_text())["suggestions"]
    assert suggestion["settings"] == "optim.name=adafactor"
    assert suggestion["peak_bytes"] < plan["peak_bytes"]
    assert suggestion["fits"] is True


def test_a_device_file(plan_memory, tiny_yaml, tmp_path):
    path = tmp_path / "card.txtpb"
    path.write_text(f"# kind: My card\n# peak_flops: 1.5e12\n{RTX3090.target_config}")
    device = read_device(path)
    assert (device.kind, device.peak_flops) == ("My card", 1.5e12)
    assert device.memory_bytes == 25_438_126_080
    path.write_text(path.read_text().replace("core_count", "cor_count"))
    with pytest.raises(UserError, match=r"My card: XLA cannot use this description"):
        plan_memory("--config", tiny_yaml, "--device-file", path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.vocabulary_size=null",), r"model.vocabulary_size is null: set it"),
        (("--device", "rtx9000"), r"--device rtx9000: not known; one of rtx3090, rtx4090,"),
        (("--budget", "lots"), r"--budget lots: expected a size such as 22.6GB or 21GiB"),
        (("--host-budget", "3 barrels"), r"--host-budget 3 barrels: expected a size"),
        (("--device-file", "no/such"), r"no/such: cannot read the device \(No such file"),
    ],
)
def test_mistakes_are_one_line(plan_memory, tiny_yaml, words, message):
    with pytest.raises(UserError, match=message) as error:
        plan_memory("--config", tiny_yaml, *words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# peak_flops: 1e12\n", "needs a line such as '# kind"),
        ("# kind: X\n", "needs a line such as '# peak_flops"),
        ("# kind: X\n# peak_flops: 1e12\n", "X: the description has no device_memory_size"),
    ],
)
def test_incomplete_device_files(tmp_path, text, message):
    path = tmp_path / "card.txtpb"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_device(path)


def test_a_layer_wise_preset_has_valid_alternatives():
    """One layer's sum is float32 there, whatever the accumulator's setting."""
    config = load(["configs/transformer_3b_rtx3090.yaml"], [])
    assert not any("accumulator" in words for words, _ in alternatives(config))
