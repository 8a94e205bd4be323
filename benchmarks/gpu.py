"""Speed and memory of a run's training step on the GPU at hand, measured in a few minutes.

    python benchmarks/gpu.py --config configs/recurrent_3b_rtx3090.yaml
    python benchmarks/gpu.py --config configs/transformer_3b_rtx3090.yaml --cap 24GB --json a.json

Takes any run configuration whose model.vocabulary_size is set, and reads no data: windows are
random tokens, one document a row, and a recurrent model runs at its mean depth. Beside jaxlm's
modules it needs jax, flax, optax, numpy, pydantic and pyyaml alone. Exit code 0: measured; 1: out
of memory; 2: a mistake in the settings.

What the figures mean. MFU counts forward and backward with causal attention's need and nothing
twice; hardware utilisation adds what rematerialisation computes again (but not the second backward
pass of optim.clip: two_pass). Both are of the card's dense bf16 peak (jaxlm/memory/devices.py).
Planned memory is XLA's, of the very program that is measured here. The forward pass is timed by
itself, micro-batch by micro-batch; shares are differences of such times, and recomputation counts
as backward. Sizes are in GB of 10^9 bytes.
"""

import argparse
import functools
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.cli import config_from, parser, run_script
from jaxlm.config import Config
from jaxlm.data.shards import token_dtype
from jaxlm.errors import UserError
from jaxlm.files import write_json
from jaxlm.memory.devices import peak_flops
from jaxlm.memory.plan import planned_bytes
from jaxlm.models.flops import FlopsPerToken, flops_per_token
from jaxlm.models.layers import attention_implementation
from jaxlm.training.spec import StepSpec, row_keys, step_spec
from jaxlm.training.state import TrainState
from jaxlm.training.step import init_state, loss_sums, train_step, window_gradients

WARM_UP = 2  # updates before those that count
UPDATES = 1000  # horizon of the schedule where training.updates is null; changes no speed
SHARE_LIMIT = 0.95  # of a card, the rest goes to the CUDA context and to kernels
SIZES, PRODUCT_SECONDS = (4096, 8192), 1.0  # of square matrices, and of each series of products
CPU_SIZES, CPU_PRODUCT_SECONDS = (128, 256), 0.05
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
QUERY = "--query-gpu=memory.total,name,clocks.max.sm,power.limit,driver_version"


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__)
    result.add_argument(
        "--updates", type=int, default=5, metavar="N", help="updates to measure; default: 5"
    )
    result.add_argument(
        "--cap", metavar="SIZE", help="memory that a larger card may offer, such as 24GB or 22GiB"
    )
    result.add_argument(
        "--seconds",
        type=float,
        default=240,
        metavar="S",
        help="start no new measurement after this time; default: 240",
    )
    result.add_argument("--json", metavar="FILE", help="also write the result there")
    options = result.parse_intermixed_args()
    if options.updates < 1:
        raise UserError(f"--updates {options.updates}: at least 1")
    return options


# ---------------------------------------------------------------- the card and its memory


def nvidia_smi() -> list[str]:
    """What the driver says of each card, memory first; nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", QUERY, "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    return found.stdout.strip().splitlines()


def bytes_of(cap: str) -> int:
    """Bytes of a size such as 24GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", cap)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--cap {cap}: expected a size such as 24GB or 22GiB")
    return round(float(match[1]) * (10**9 if match[2] == "GB" else 2**30))


def memory_fraction(cap: int, cards: list[str]) -> float:
    """Share of a card that is no more than `cap` bytes, by the largest of the cards."""
    totals = [re.match(r"(\d+) MiB", card) for card in cards]
    sizes = [int(total[1]) * 2**20 for total in totals if total]
    if not sizes or len(sizes) < len(cards):
        raise UserError(
            f"--cap: nvidia-smi does not say how much memory the card has; set {FRACTION} instead"
        )
    return min(math.floor(1e4 * cap / max(sizes)) / 1e4, SHARE_LIMIT)


def memory_stat(name: str) -> int | None:
    """One of the device's memory statistics in bytes; None on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def describe_machine(cap: int | None, cards: list[str]) -> dict[str, Any]:
    """Device, driver, version and environment.

    Raises:
        UserError: the cap did not take.
    """
    device, limit = jax.devices()[0], memory_stat("bytes_limit")
    if cap and device.platform != "cpu" and (limit is None or limit > cap):
        raise UserError(
            f"--cap: JAX offers {gigabytes(limit)} of this card all the same; does the environment "
            "choose another allocator (XLA_PYTHON_CLIENT_ALLOCATOR)?"
        )
    known = ("XLA_", "JAX_", "CUDA_VISIBLE_DEVICES", "TF_GPU_ALLOCATOR")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "nvidia_smi": cards,
        "jax": jax.__version__,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(known)},
        "cap_bytes": cap,
        "limit_bytes": limit,
    }


# ---------------------------------------------------------------- arithmetic of the figures


def speeds(seconds: float, tokens: int, flops: FlopsPerToken, peak: float | None) -> dict[str, Any]:
    """Rates of an update that takes `seconds`; shares of the peak are None where it is unknown."""
    rate = tokens / seconds
    training, executed = rate * flops.training, rate * flops.executed
    return {
        "tokens_per_second": rate,
        "training_flops_per_second": training,
        "executed_flops_per_second": executed,
        "mfu": training / peak if peak else None,
        "hardware_utilisation": executed / peak if peak else None,
    }


def shares(step: float, forward: float, gradients: float | None) -> dict[str, float]:
    """Shares of an update's time; without the gradients' own time the rest is one."""
    if gradients is None:
        return {"forward": forward / step, "backward_and_optimizer": (step - forward) / step}
    return {
        "forward": forward / step,
        "backward": (gradients - forward) / step,
        "optimizer": (step - gradients) / step,
    }


# ---------------------------------------------------------------- measurements


def random_window(config: Config) -> dict[str, jax.Array]:
    """A window as data/pipeline.py gives it, full of random tokens."""
    rows = (config.training.micro_batches, config.training.micro_batch_rows)
    row = (*rows, config.data.sequence_length + 1)
    vocabulary = config.model.vocabulary
    window = {
        "tokens": np.random.default_rng(0).integers(0, vocabulary, row, token_dtype(vocabulary)),
        "segment_ids": np.ones(row, np.int32),
        "positions": np.broadcast_to(np.arange(row[-1], dtype=np.int32), row),
        "block": np.arange(config.training.window_rows, dtype=np.int32).reshape(rows),
    }
    return jax.device_put(window)


def seconds_of(
    run: Callable[[], Any], repeats: int, deadline: float, warm_up: int = 1
) -> list[float]:
    """Seconds of each run after the warm-up; fewer, or none, where the deadline comes first."""
    seconds = []
    for _ in range(warm_up + repeats):
        began = time.perf_counter()
        if began > deadline:
            break
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return seconds[warm_up:]


def forward_pass(
    spec: StepSpec, state: TrainState, window: Any, depth: jax.Array, backprop: jax.Array
) -> jax.Array:
    """The window's summed loss, and nothing that a backward pass would need."""
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))

    def micro_batch(scanned: Any) -> jax.Array:
        return loss_sums(spec, state.params, *scanned, depth, backprop)[0]

    return jnp.sum(jax.lax.map(micro_batch, (window, keys.reshape(micro_batches, rows))))


def measure_compilation(spec: StepSpec, inputs: tuple, result: dict) -> jax.stages.Compiled:
    """Compile the step from shapes, before anything is in memory, and note what XLA plans."""
    state = jax.eval_shape(lambda: init_state(spec))
    result["parameters"] = sum(x.size for x in jax.tree.leaves(state.params))
    began = time.perf_counter()
    step = train_step.lower(spec, state, *inputs).compile()
    result["compile_seconds"] = time.perf_counter() - began
    result["planned_bytes"], result["planned_host_bytes"] = planned_bytes(step)
    return step


def measure_updates(
    spec: StepSpec, step: Any, inputs: tuple, updates: int, deadline: float, result: dict
) -> None:
    """Time updates, each waited for, and note the memory that they took."""
    state, metrics = jax.block_until_ready(init_state(spec)), None
    # The statistics know a peak since the start only: the first state's own may be the higher one.
    result["init_peak_bytes"] = memory_stat("peak_bytes_in_use")

    def update() -> Any:
        nonlocal state, metrics
        state, metrics = step(state, *inputs)
        return state, metrics

    seconds = seconds_of(update, updates, deadline, WARM_UP)
    result["peak_bytes"] = memory_stat("peak_bytes_in_use")
    result["seconds"] = seconds
    if metrics is not None and math.isfinite(metrics.loss):
        result["loss"] = float(metrics.loss)
    if len(seconds) < updates:
        result["left_out"].append(f"{updates - len(seconds)} of {updates} updates")


def measure_products(deadline: float, result: dict) -> None:
    """The best rate of a few square products in bf16, which no model can exceed."""
    on_cpu = jax.devices()[0].platform == "cpu"
    sizes, length = (CPU_SIZES, CPU_PRODUCT_SECONDS) if on_cpu else (SIZES, PRODUCT_SECONDS)
    # As in the model: bf16 in, bf16 out; XLA's kernels for GPUs sum such products in float32.
    product = jax.jit(jnp.matmul)
    for size in sizes:
        if time.perf_counter() > deadline:
            result["left_out"].append(f"products of size {size}")
            continue
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
        once = min(seconds_of(functools.partial(product, a, b), 3, math.inf))
        repeats = max(1, round(length / once))
        began = time.perf_counter()
        for _ in range(repeats):  # the device works through them without waiting for the host
            last = product(a, b)
        jax.block_until_ready(last)
        rate = 2 * size**3 * repeats / (time.perf_counter() - began)
        result["product_flops_per_second"][str(size)] = rate


def measure_parts(
    spec: StepSpec, inputs: tuple, updates: int, deadline: float, result: dict
) -> None:
    """Time the forward pass alone and, where the optimizer waits for them, all gradients."""
    parts = [("forward_seconds", "forward pass by itself", forward_pass)]
    # in_backward and MultiSteps run the optimizer between the gradients of a window.
    if spec.update == "after_backward" and spec.optim.accumulation == "token_weighted":
        parts.append(("gradients_seconds", "gradients by themselves", window_gradients))
    state = None
    for key, name, function in parts:
        result["measuring"] = name
        seconds = []
        if time.perf_counter() < deadline:
            state = state or init_state(spec)
            run = functools.partial(jax.jit(function, static_argnums=0), spec, state, *inputs)
            seconds = seconds_of(run, min(updates, 3), deadline)
        if not seconds:
            result["left_out"].append(name)
            continue
        result[key] = statistics.median(seconds)
        times = (result["seconds_median"], result["forward_seconds"], result["gradients_seconds"])
        if times[0] and times[1]:
            result["shares"] = shares(*times)


def measure(config: Config, updates: int, deadline: float, result: dict) -> None:
    """Take all measurements, most important first, and add them to the result."""
    optim, training = config.optim, config.training
    horizon = training.updates or UPDATES + optim.warmup_updates + optim.decay_updates
    spec = step_spec(config, config.model.vocabulary, horizon)
    depth = round(config.depth.mean) if config.model.kind == "recurrent" else 0
    backprop = config.depth.backprop_depth(depth)
    tokens = spec.window_tokens
    flops = flops_per_token(config.model, (config.data.sequence_length + 1) / 2, depth, backprop)
    peak = peak_flops(jax.devices()[0].device_kind)
    result |= {
        "model": config.model.kind,
        "update": training.update,
        "attention": attention_implementation(config.model, config.data.sequence_length),
        "micro_batches": training.micro_batches,
        "micro_batch_rows": training.micro_batch_rows,
        "sequence_length": config.data.sequence_length,
        "tokens": tokens,
        "depth": depth,
        "backprop_depth": backprop,
        "flops_per_token": flops.training,
        "executed_flops_per_token": flops.executed,
        "peak_flops": peak,
    }
    inputs = (random_window(config), jnp.int32(depth), jnp.int32(backprop))
    result["measuring"] = "compilation"
    step = measure_compilation(spec, inputs, result)
    result["measuring"] = "updates"
    measure_updates(spec, step, inputs, updates, deadline, result)
    seconds = result["seconds"]
    if seconds:
        result["seconds_median"] = statistics.median(seconds)
        result["seconds_min"], result["seconds_max"] = min(seconds), max(seconds)
        result |= speeds(result["seconds_median"], tokens, flops, peak)
    result["measuring"] = "matrix products"
    measure_products(deadline, result)
    measure_parts(spec, inputs, updates, deadline, result)
    result["measuring"] = None


# ---------------------------------------------------------------- output


def gigabytes(count: int | None) -> str:
    """Bytes in GB, three decimals."""
    return "-" if count is None else f"{count / 1e9:,.3f} GB"


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number with its unit, or a dash."""
    return "-" if value is None else f"{value:{form}}{unit}"


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Two columns."""
    for name, value in rows:
        print(f"{name:<32}{value}", flush=True)


def print_machine(result: dict) -> None:
    """The first lines: what the figures hold for."""
    cap = ", ".join(
        f"{name} {gigabytes(result[key])}"
        for name, key in (("--cap", "cap_bytes"), ("JAX's limit", "limit_bytes"))
        if result[key] is not None
    )
    print_rows(
        [
            ("device", f"{result['device']} ({result['platform']})"),
            *[("nvidia-smi", card) for card in result["nvidia_smi"]],
            ("jax", result["jax"]),
            *[("environment", f"{k}={v}") for k, v in result["environment"].items()],
            ("memory", cap or "-"),
        ]
    )


def print_result(result: dict) -> None:
    """The table."""
    depths = f"depth {result['depth']}, {result['backprop_depth']} of it with gradient"
    median, peak = result["seconds_median"], result["peak_flops"]
    ceiling = max(result["product_flops_per_second"].values(), default=None)
    executed = result["executed_flops_per_second"]
    of_ceiling = executed / ceiling if executed and ceiling else None
    print_rows(
        [
            ("configuration", " ".join([*result["config"], *result["overrides"]])),
            ("model", f"{result['model']}, {number(result['parameters'], ',')} weights"),
            *[("", depths)] * (result["model"] == "recurrent"),
            ("engine", f"{result['update']}, attention {result['attention']}"),
            (
                "one update",
                f"{result['micro_batches']} x {result['micro_batch_rows']} rows of "
                f"{result['sequence_length']:,} tokens",
            ),
            ("compilation", number(result["compile_seconds"], ".1f", " s")),
            (
                "seconds an update",
                f"{number(median, ',.4f')} (median of {len(result['seconds'])}; "
                f"{number(result['seconds_min'], ',.4f')} to "
                f"{number(result['seconds_max'], ',.4f')})",
            ),
            ("loss of the last update", number(result["loss"], ".4f")),
            ("tokens a second", number(result["tokens_per_second"], ",.1f")),
            ("dense bf16 peak", number(peak and peak / 1e12, ".1f", " TFLOP/s")),
            ("MFU", number(result["mfu"], ".1%")),
            ("hardware utilisation", number(result["hardware_utilisation"], ".1%")),
            ("executed", number(executed and executed / 1e12, ".4g", " TFLOP/s")),
            *[
                (f"bf16 product of size {size}", number(rate / 1e12, ".4g", " TFLOP/s"))
                for size, rate in result["product_flops_per_second"].items()
            ],
            ("executed, of the best product", number(of_ceiling, ".1%")),
            ("planned by XLA", gigabytes(result["planned_bytes"])),
            ("peak in use", gigabytes(result["peak_bytes"])),
            ("  before the first update", gigabytes(result["init_peak_bytes"])),
            ("planned, pinned host memory", gigabytes(result["planned_host_bytes"])),
            *[
                (f"share of {name.replace('_', ' ')}", number(share, ".1%"))
                for name, share in (result["shares"] or {"forward": None}).items()
            ],
            *[("left out, time is over", name) for name in result["left_out"]],
        ]
    )


def out_of_memory(result: dict, cap: str | None) -> str:
    """One line that says what did not fit."""
    return (
        f"error: out of memory ({result['measuring']}): "
        f"{' '.join([*result['config'], *result['overrides']])}, cap {cap or 'none'}, "
        f"step planned at {gigabytes(result['planned_bytes'])} on the device and "
        f"{gigabytes(result['planned_host_bytes'])} of pinned host memory"
    )


def main() -> int:
    """Measure and print; what was measured before the memory ran out is printed too."""
    began = time.perf_counter()
    options = arguments()
    config, cards = config_from(options), nvidia_smi()
    if config.model.vocabulary_size is None:
        raise UserError(
            "model.vocabulary_size is null: set it, this benchmark does not read data "
            "(such as model.vocabulary_size=50304)"
        )
    cap = bytes_of(options.cap) if options.cap else None
    if cap:
        # JAX reads it when it first looks for devices, and refuses it beside its newer name.
        os.environ[FRACTION] = str(memory_fraction(cap, cards))
        os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
    result: dict[str, Any] = dict.fromkeys(
        (
            "parameters",
            "compile_seconds",
            "planned_bytes",
            "planned_host_bytes",
            "init_peak_bytes",
            "peak_bytes",
            "seconds_median",
            "seconds_min",
            "seconds_max",
            "loss",
            "tokens_per_second",
            "training_flops_per_second",
            "executed_flops_per_second",
            "mfu",
            "hardware_utilisation",
            "forward_seconds",
            "gradients_seconds",
            "shares",
        )
    )
    result |= {"config": options.config, "overrides": options.overrides, "seconds": []}
    result |= {"product_flops_per_second": {}, "left_out": []}
    result |= describe_machine(cap, cards)
    print_machine(result)
    code = 0
    try:
        measure(config, options.updates, began + options.seconds, result)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        code = 1
    print_result(result)
    if options.json:
        write_json(Path(options.json), result)
    if code:
        print(out_of_memory(result, options.cap), file=sys.stderr)
    return code


if __name__ == "__main__":
    run_script(main)
