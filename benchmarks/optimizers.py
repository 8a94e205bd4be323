"""Optimizer strategies side by side: what each needs of one RTX 3090, and how fast it can be.

    python benchmarks/optimizers.py --json optimizers.json  # several minutes, on a CPU
    python benchmarks/optimizers.py --quick                 # what must be equal, and no plans
    python benchmarks/optimizers.py --only Adafactor

Needs the extra `plan`, but for --quick; no GPU. Exit code 0: all ran, and what should be equal was;
1: not so; 2: a mistake in the arguments.

What the figures mean. The first table is of a small Transformer that really trains here, on a CPU.
AdamW with bf16 weights and float32 state is one algorithm wherever its state lies, so its losses
must be those of the state on the device (TOLERANCE). Speeds are medians of rounds in which all
strategies take turns; they show the cost of the arithmetic and of the copies within main memory,
not of PCIe or of a disk, whose files stay in the page cache at this size.

The second table is of configs/transformer_3b_rtx3090.yaml, one micro-batch of 2,048 tokens. Memory
is XLA's plan, see docs/memory.md; larger windows need accumulators on top of it. Traffic is
arithmetic: PCIe is counted per direction, since it carries both at once; reads and writes of a disk
are added. Tokens a second are the update's tokens over the sum of computing at the card's peak and
of moving at PCIE or DISK bytes a second. Nothing is taken to be hidden behind the backward pass:
clipping by the global norm needs the last gradient before the first weight changes. ZeRO's figures
are those of each of several cards, with a micro-batch of its own; it reduces gradients within the
backward pass and may hide part of that, so that its speed here is an estimate and not a limit.

State on the host or on disk is that of one layer at a time on the device, and of the embedding in
one piece. These two runs have no guard against gradients that are not finite.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA complains of what does not fit; the table says so

import argparse
import functools
import multiprocessing
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxlm.cli import run_script
from jaxlm.config import Config, load
from jaxlm.console import console, tracked
from jaxlm.data.shards import token_dtype
from jaxlm.files import write_json
from jaxlm.memory.devices import RTX3090
from jaxlm.memory.plan import abstract_arguments, buffer_assignment
from jaxlm.models.flops import flops_per_token
from jaxlm.optim import clip_scale, global_norm, to_float32
from jaxlm.training.layerwise import LayerOptimizer
from jaxlm.training.optimizer import build_optimizer
from jaxlm.training.planning import default_budget, plan_training
from jaxlm.training.spec import ROUNDING, StepSpec, step_spec
from jaxlm.training.state import TrainState
from jaxlm.training.step import init_state, train_step, window_gradients

DEVICE, HOST_BUDGET = RTX3090, 12e9  # WSL2 hands out half of a machine's memory
PCIE, DISK = 25e9, 3e9  # bytes a second: PCIe 4.0 x16 in one direction, NVMe reading or writing
WINDOWS = (2048, 32_768)  # tokens an update of the speed limits
UPDATES = 8  # with losses that are compared
# Of a loss. XLA sums in another order in another program, so that some of the stochastic roundings
# go the other way, each moving one weight by 1/256 of itself without bias: 2e-5 of the loss. State
# of a single layer that is not written back, or of two layers exchanged, shows as 3e-2 or more.
TOLERANCE = 1e-3
NO_DEPTH: Any = np.int32(0)  # a Transformer has none

LARGE = Path(__file__).parents[1] / "configs" / "transformer_3b_rtx3090.yaml"
PLAIN = (
    "training.micro_batches=1",
    "training.update=after_backward",
    "training.block_inputs=device",
    "training.updates=1000",
    "optim.clip=global",
)
SMALL = (
    "model.kind=transformer",
    "model.vocabulary_size=1024",
    "model.width=256",
    "model.heads=4",
    "model.feed_forward=768",
    "model.transformer.layers=4",
    "data.sequence_length=64",
    "training.micro_batch_rows=4",
    "training.updates=1000",
    "optim.schedule=constant",
)
ADAMW = ("optim.half_life_tokens=null", "optim.learning_rate=1e-3")
BF16 = "model.param_dtype=bfloat16"


@dataclass(frozen=True)
class Strategy:
    """A way to run an optimizer, as changes of the configuration and a place for its state."""

    name: str
    settings: tuple[str, ...]
    # device: all on one. sharded: the state over `devices`. host, disk: one layer at a time.
    state: str = "device"
    devices: int = 1

    @property
    def equal(self) -> bool:
        """Whether its losses must be BASELINE's, of which only the state lies elsewhere."""
        return self.state != "device"

    def config(self, files: tuple[Path, ...], base: tuple[str, ...]) -> Config:
        """The small or the large run."""
        return load(files, (*base, *self.settings))


ADAMW_BF16 = (BF16, "optim.name=adamw", *ADAMW)
BASELINE = Strategy("AdamW, bf16 weights", ADAMW_BF16)
OURS = Strategy("Adafactor, bf16 (default)", (BF16,))
STRATEGIES = (
    Strategy("AdamW, fp32", ("model.param_dtype=float32", "optim.name=adamw", *ADAMW)),
    BASELINE,
    Strategy("AdamW, bf16, state on the host", ADAMW_BF16, "host"),
    Strategy("AdamW, bf16, state on disk", ADAMW_BF16, "disk"),
    Strategy("AdamW, bf16, ZeRO-1 over 1 GPU", ADAMW_BF16, "sharded", 1),
    Strategy("AdamW, bf16, ZeRO-1 over 4 GPUs", ADAMW_BF16, "sharded", 4),
    Strategy("8-bit AdamW, bf16", (BF16, "optim.name=adamw_8bit", *ADAMW)),
    Strategy(
        "optax.adafactor, bf16",
        (BF16, "optim.name=optax_adafactor", "optim.half_life_tokens=null"),
    ),
    OURS,
    Strategy(
        "Adafactor, bf16, layer by layer",
        (BF16, "training.update=in_backward", "optim.clip=rms"),
    ),
)

Flat = dict[Any, Any]  # arrays by the path of their leaf


# ---------------------------------------------------------------- state that visits layer by layer


class Mean(NamedTuple):
    """What turns a gradient sum into the clipped mean."""

    tokens: Any
    scale: Any


def layer_optimizer(spec: StepSpec) -> LayerOptimizer:
    """The chain of `train_step` for some parameters at a time, which cannot clip by itself."""
    key = jax.random.fold_in(jax.random.key(spec.seed), ROUNDING)
    return LayerOptimizer(
        build_optimizer(
            replace(spec.optim, clip="off"),
            updates=spec.updates,
            micro_batches=spec.micro_batches,
            window_tokens=spec.window_tokens,
            key=key,
        )
    )


@functools.partial(jax.jit, static_argnums=0)
def gradients(spec: StepSpec, state: TrainState, window: Flat) -> tuple[Flat, Mean, jax.Array]:
    """Gradient sums of all parameters, and the loss."""
    grads, total, sums = window_gradients(spec, state, window, NO_DEPTH, NO_DEPTH)
    tokens = jnp.maximum(sums.target_tokens, 1.0)
    norm = global_norm(jax.tree.map(lambda g: g / tokens, to_float32(grads)))
    return flatten_dict(grads), Mean(tokens, clip_scale(norm, spec.optim.max_norm)), total / tokens


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def update_group(
    spec: StepSpec, params: Flat, state: Flat, grads: Flat, mean: Mean, layer: Any
) -> tuple[Flat, Flat]:
    """Update one layer of stacked parameters (None: whole leaves) with the state of that group."""

    def cut(leaf: jax.Array) -> jax.Array:
        return leaf if layer is None else jax.lax.dynamic_slice_in_dim(leaf, layer, 1)

    def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
        if layer is None:
            return part
        return jax.lax.dynamic_update_slice_in_dim(leaf, part, layer, 0)

    averaged = {path: cut(g).astype(jnp.float32) / mean.tokens for path, g in grads.items()}
    new, state = layer_optimizer(spec).update(
        unflatten_dict({path: cut(p) for path, p in params.items()}),
        state,
        unflatten_dict({path: g * mean.scale for path, g in averaged.items()}),
        first_layer=0 if layer is None else layer,
    )
    return jax.tree.map(put, params, flatten_dict(new)), state


def stacked(path: tuple[str, ...]) -> bool:
    """Whether a parameter's first axis is the layer."""
    return "blocks" in path


def groups(params: Flat) -> list[tuple[int | None, list[Any]]]:
    """Parameters that are updated together: each layer, then those outside of the stack."""
    stack = [path for path in params if stacked(path)]
    layers = params[stack[0]].shape[0]
    rest = (None, [path for path in params if not stacked(path)])
    return [*((layer, stack) for layer in range(layers)), rest]


def group_state(spec: StepSpec, params: Flat, layer: int | None) -> Flat:
    """The state before the first update that belongs to a group, as shapes.

    AdamW's starts as zeros; a state of 26 GB is never built on the device to be moved away.
    """
    if layer is not None:
        params = {k: jax.ShapeDtypeStruct((1, *p.shape[1:]), p.dtype) for k, p in params.items()}
    optimizer, nested = layer_optimizer(spec), unflatten_dict(params)
    state = by_path(jax.eval_shape(optimizer.transform.init, nested))
    return {path: state[path] for path in optimizer.owned(nested)}


def shared_state(spec: StepSpec, opt_state: Any) -> Flat:
    """The state that belongs to no parameter: counts, the rate, the norm."""
    state = by_path(opt_state)
    return {path: state[path] for path in layer_optimizer(spec).shared}


def by_path(opt_state: Any) -> Flat:
    """Leaves of an optimizer's state under the names of LayerOptimizer."""
    leaves = jax.tree.leaves_with_path(opt_state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


class HostStore:
    """Optimizer state in pinned host memory."""

    def __init__(self):
        device = jax.devices()[0]
        self.host = SingleDeviceSharding(device, memory_kind="pinned_host")
        self.device = SingleDeviceSharding(device, memory_kind="device")
        self.arrays: dict[Any, Flat] = {}

    def create(self, group: Any, shapes: Flat) -> None:
        """Zeros."""
        self.write(group, {k: np.zeros(s.shape, s.dtype) for k, s in shapes.items()})

    def read(self, group: Any) -> Flat:
        """Move a group's state to the device."""
        return jax.device_put(self.arrays.pop(group), self.device)

    def write(self, group: Any, state: Flat) -> None:
        """Move it back, and wait: further layers must not queue up on the device."""
        self.arrays[group] = jax.block_until_ready(jax.device_put(state, self.host))


class DiskStore:
    """Optimizer state in memory-mapped files."""

    def __init__(self):
        self.directory = tempfile.TemporaryDirectory(prefix="jaxlm-optimizer-")
        self.files: dict[Any, dict[Any, np.memmap]] = {}

    def create(self, group: Any, shapes: Flat) -> None:
        """Zeros: files without blocks."""
        self.files[group] = {
            path: np.memmap(
                Path(self.directory.name) / f"{group}-{i}.bin", shape.dtype, "w+", shape=shape.shape
            )
            for i, (path, shape) in enumerate(shapes.items())
        }

    def read(self, group: Any) -> Flat:
        """Copy a group's state to the device; by way of an array, which JAX may keep as it is."""
        state = {path: np.array(file) for path, file in self.files[group].items()}
        return jax.device_put(state, jax.devices()[0])

    def write(self, group: Any, state: Flat) -> None:
        """Copy it back."""
        for path, file in self.files[group].items():
            file[...] = np.asarray(state[path])
            file.flush()


# ---------------------------------------------------------------- runs of a few updates


class OnDevice:
    """A run as scripts/train.py makes it."""

    def __init__(self, spec: StepSpec):
        self.step = functools.partial(train_step, spec)
        self.state = init_state(spec)

    def update(self, window: Flat) -> float:
        """Take one update and return its loss."""
        self.state, metrics = self.step(self.state, window, NO_DEPTH, NO_DEPTH)
        jax.block_until_ready(self.state)
        return float(metrics.loss)


class Sharded(OnDevice):
    """The same step with its optimizer state, and the rows of the window, over several devices."""

    def __init__(self, spec: StepSpec, devices: int):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("device",))
        state = init_state(spec)
        self.step, shardings = sharded_step(spec, mesh, state)
        self.state = jax.device_put(state, shardings)


class Streamed:
    """Gradients on the device, then the optimizer layer by layer with state from elsewhere."""

    def __init__(self, spec: StepSpec, store: HostStore | DiskStore):
        self.spec, self.store = spec, store
        # Committed to the device as what the store gives, or each function would be compiled twice.
        state = jax.device_put(init_state(spec), jax.devices()[0])
        self.number, self.params = 0, flatten_dict(state.params)
        self.shared = shared_state(spec, state.opt_state)
        for layer, paths in groups(self.params):
            store.create(layer, group_state(spec, {k: self.params[k] for k in paths}, layer))

    def update(self, window: Flat) -> float:
        """Take one update and return its loss."""
        state = TrainState(jnp.int32(self.number), unflatten_dict(self.params), None)
        grads, mean, loss = gradients(self.spec, state, window)
        shared = self.shared
        for layer, paths in groups(self.params):
            # Counts and rates advance once: each group starts from those before the update, and
            # gets them anew since update_group writes its results over them.
            own = {**self.store.read(layer), **jax.tree.map(jnp.copy, shared)}
            params, grads_of = ({k: tree[k] for k in paths} for tree in (self.params, grads))
            new, own = update_group(self.spec, params, own, grads_of, mean, layer)
            self.params |= new
            self.store.write(layer, {k: leaf for k, leaf in own.items() if k not in shared})
            self.shared = {k: own[k] for k in shared}
        jax.block_until_ready(self.params)
        self.number += 1
        return float(loss)


def sharded_step(spec: StepSpec, mesh: Mesh, state: TrainState) -> tuple[Any, TrainState]:
    """`train_step` with optimizer state over the mesh, and where the parts of a state go.

    ZeRO stage 1: weights are on every device; each updates those whose state it holds.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> NamedSharding:
        axes = [i for i, n in enumerate(leaf.shape) if n % mesh.size == 0]
        return NamedSharding(mesh, PartitionSpec(*[None] * axes[0], "device")) if axes else whole

    shardings = replace(
        jax.tree.map(lambda _: whole, state), opt_state=jax.tree.map(place, state.opt_state)
    )
    rows = NamedSharding(mesh, PartitionSpec(None, "device"))
    step = jax.jit(
        functools.partial(train_step, spec),
        in_shardings=(shardings, rows, whole, whole),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    return step, shardings


def start(strategy: Strategy) -> OnDevice | Streamed:
    """A run of the small Transformer."""
    config = strategy.config((), SMALL)
    spec = step_spec(config, config.model.vocabulary, 1000)
    if strategy.state == "sharded":
        return Sharded(spec, strategy.devices)
    if strategy.state == "device":
        return OnDevice(spec)
    return Streamed(spec, HostStore() if strategy.state == "host" else DiskStore())


def window_of(config: Config, number: int) -> Flat:
    """Rows that count up from a random token: only an eighth of the vocabulary ever comes."""
    rows, length = config.training.micro_batch_rows, config.data.sequence_length
    first = np.random.default_rng(number).integers(0, 64, (1, rows, 1))
    positions = np.broadcast_to(np.arange(length + 1, dtype=np.int32), (1, rows, length + 1))
    return {
        "tokens": (first + positions).astype(np.uint16),
        "segment_ids": np.ones_like(positions),
        "positions": positions,
        "block": np.arange(rows, dtype=np.int32)[None],
    }


def measure(strategies: list[Strategy], rounds: int) -> dict[str, dict[str, Any]]:
    """Losses of each strategy, and its speed relative to OURS, which must be among them."""
    windows = [window_of(OURS.config((), SMALL), i) for i in range(UPDATES)]
    runs = {}
    results: dict[str, dict[str, Any]] = {}
    for strategy in tracked(strategies, "compiling and training", len(strategies)):
        run = runs[strategy.name] = start(strategy)
        results[strategy.name] = {"losses": [run.update(window) for window in windows]}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in tracked(range(rounds), "timing", rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            for window in windows[:2]:
                run.update(window)
            seconds[name].append(time.perf_counter() - began)
    for name, times in seconds.items():
        pairs = zip(seconds[OURS.name], times, strict=True)
        results[name]["speed"] = statistics.median(ours / own for ours, own in pairs)
    return results


def measure_on_several(strategies: list[Strategy], rounds: int) -> dict[str, dict[str, Any]]:
    """The same in a process that cuts the CPU into several devices."""
    jax.config.update("jax_num_cpu_devices", max(s.devices for s in strategies))
    return measure(strategies, rounds)


def measure_all(chosen: list[Strategy], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure strategies, OURS, and BASELINE where something must equal it."""
    needed = [s for s in STRATEGIES if s in chosen or s == OURS]
    if any(s.equal for s in chosen) and BASELINE not in needed:
        needed.insert(0, BASELINE)
    several = [s for s in needed if s.state == "sharded"]
    results = measure([s for s in needed if s not in several], rounds)
    if several:
        # Forced devices share the CPU's threads: they would slow the others down.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure_on_several, [*several, OURS], rounds).result()
        results |= {s.name: found[s.name] for s in several}
    for strategy in needed:
        if strategy.equal:
            result, baseline = results[strategy.name], results[BASELINE.name]["losses"]
            result["difference"] = float(np.abs(np.subtract(result["losses"], baseline)).max())
    return results


# ---------------------------------------------------------------- plans for the card


def size_of(tree: Any) -> int:
    """Bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract_window(config: Config, rows: int) -> Flat:
    """Shapes of a window of one micro-batch."""
    shape = (1, rows, config.data.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, token_dtype(config.model.vocabulary))
    numbers = jax.ShapeDtypeStruct(shape, jnp.int32)
    block = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    return {"tokens": tokens, "segment_ids": numbers, "positions": numbers, "block": block}


@functools.lru_cache  # the same programs for each place of the state
def plan_streamed(config: Config, spec: StepSpec) -> int:
    """Device peak of the gradients and of the update of each kind of group.

    Beside the one program that runs there are the weights and gradients that it does not take.
    """
    state = jax.eval_shape(lambda: init_state(spec))
    params = flatten_dict(state.params)
    bare = TrainState(state.update, state.params, None)
    window = abstract_window(config, 1)
    mean = Mean(*[jax.ShapeDtypeStruct((), jnp.float32)] * 2)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = gradients.lower(spec, *abstract_arguments(DEVICE, (bare, window)))
    peaks = [buffer_assignment(lowered).peak]
    shared = shared_state(spec, state.opt_state)
    for layer, paths in groups(params)[-2:]:
        own = {k: params[k] for k in paths}
        held = {**group_state(spec, own, layer), **shared}
        at = None if layer is None else number
        lowered = update_group.lower(spec, *abstract_arguments(DEVICE, (own, held, own, mean, at)))
        others = [leaf for path, leaf in params.items() if path not in own]
        peaks.append(buffer_assignment(lowered).peak + 2 * size_of(others))
    return max(peaks)


def plan_sharded(config: Config, spec: StepSpec, state: TrainState, devices: int) -> int:
    """Peak of each of several devices."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICE.target_config, topology=f"1x1x{devices}"
    )
    mesh = topologies.make_mesh(topology, (devices,), ("device",))
    step, _ = sharded_step(spec, mesh, state)
    depth = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = step.lower(state, abstract_window(config, devices), depth, depth)
    return buffer_assignment(lowered).peak


def plan(strategy: Strategy) -> dict[str, Any]:
    """Memory, traffic and limits of speed at 3.3 billion weights."""
    config = strategy.config((LARGE,), PLAIN)
    config = replace(config, model=replace(config.model, attention="xla"))
    spec = step_spec(config, config.model.vocabulary, 1000)
    state = jax.eval_shape(lambda: init_state(spec))
    moved, host, pcie, disk = size_of(state.opt_state), 0, 0, 0
    try:
        if strategy.state in ("host", "disk"):
            peak = plan_streamed(config, spec)
            pcie = moved  # there and back
            host, disk = (moved, 0) if strategy.state == "host" else (0, 2 * moved)
        elif strategy.state == "sharded":
            peak = plan_sharded(config, spec, state, strategy.devices)
            # In a ring of N devices an all-gather takes each (N - 1)/N of all bytes, an all-reduce
            # twice that. XLA reduces whole gradients, then gathers the weights.
            share = (strategy.devices - 1) / strategy.devices
            pcie = round(3 * share * size_of(state.params))
        else:
            found = plan_training(config, DEVICE)
            peak, host = found.peak, found.host
    except jax.errors.JaxRuntimeError as error:
        return {"fails": str(error).splitlines()[0]}
    flops = flops_per_token(config.model, (config.data.sequence_length + 1) / 2)
    moving = max(pcie / PCIE, disk / DISK)  # a layer's file is read while another is on the bus
    return {
        "device_peak_bytes": peak,
        "host_peak_bytes": host,
        "fits_device": peak <= default_budget(DEVICE),
        "fits_host": host <= HOST_BUDGET,
        "pcie_bytes_per_direction": pcie,
        "disk_bytes": disk,
        "seconds_moving": moving,
        "tokens_per_second": {
            tokens: tokens / (tokens * flops.executed / DEVICE.peak_flops + moving)
            for tokens in WINDOWS
        },
    }


# ---------------------------------------------------------------- output


def table(title: str, *columns: str) -> rich.table.Table:
    """A table whose first column is text and whose others are numbers."""
    result = rich.table.Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        result.add_column(name, justify="right" if i else "left", no_wrap=not i)
    return result


def run_table(chosen: list[Strategy], results: dict[str, dict[str, Any]]) -> rich.table.Table:
    """What the small Transformer did."""
    result = table(
        f"A small Transformer, {UPDATES} updates on this CPU",
        "strategy",
        "first loss",
        "last loss",
        "difference to AdamW, bf16 weights",
        "updates/s relative to the default",
    )
    for strategy in chosen:
        found = results[strategy.name]
        losses, difference = found["losses"], found.get("difference")
        equal = "" if difference is None else f"{difference:.1e}"
        result.add_row(
            strategy.name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", equal, f"{found['speed']:.2f}"
        )
    return result


def plan_table(chosen: list[Strategy], plans: dict[str, dict[str, Any]]) -> rich.table.Table:
    """What 3.3 billion weights need."""
    budgets = f"{default_budget(DEVICE) / 1e9:.1f} GB, host {HOST_BUDGET / 1e9:.0f} GB"
    result = table(
        f"3.3 billion weights on an {DEVICE.kind}, budget {budgets}; traffic per update",
        "strategy",
        "device GB",
        "host GB",
        "over budget",
        "PCIe GB each way",
        "disk GB",
        "moving s",
        *[f"tok/s at {tokens:,}" for tokens in WINDOWS],
    )
    for strategy in chosen:
        found = plans[strategy.name]
        if "fails" in found:
            result.add_row(strategy.name, "fails")
            continue
        over = [place for place in ("device", "host") if not found[f"fits_{place}"]]
        # Where the device lacks memory there is no update, and no speed to limit.
        speeds = [] if "device" in over else found["tokens_per_second"].values()
        result.add_row(
            strategy.name,
            f"{found['device_peak_bytes'] / 1e9:.2f}",
            f"{found['host_peak_bytes'] / 1e9:.2f}",
            " and ".join(over) or "no",
            f"{found['pcie_bytes_per_direction'] / 1e9:.1f}",
            f"{found['disk_bytes'] / 1e9:.1f}",
            f"{found['seconds_moving']:.2f}",
            *[f"{speed:,.0f}" for speed in speeds],
        )
    return result


def main() -> int:
    """Measure, plan, print, and tell by the exit code whether all was as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="what must be equal; no plans")
    parser.add_argument("--only", default="", metavar="PATTERN", help="strategies to search for")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers there")
    options = parser.parse_args()
    chosen = [s for s in STRATEGIES if re.search(options.only, s.name)]
    if options.quick:
        chosen = [s for s in chosen if s in (BASELINE, OURS) or s.equal]
    if not chosen:
        parser.error(f"--only {options.only}: none of {', '.join(s.name for s in STRATEGIES)}")
    if not options.quick:
        abstract_arguments(DEVICE, ())  # complains of a missing extra before work is done
    results = measure_all(chosen, 3 if options.quick else 15)
    plans = {}
    if not options.quick:
        plans = {s.name: plan(s) for s in tracked(chosen, "planning", len(chosen))}
    out = console()
    out.print(run_table(chosen, results))
    if plans:
        out.print(plan_table(chosen, plans))
        for name in (name for name in plans if "fails" in plans[name]):
            out.print(f"{name}: cannot be compiled for the card: {plans[name]['fails']}")
    learnt = {s: results[s.name]["losses"][-1] < results[s.name]["losses"][0] for s in chosen}
    equal = {s: results[s.name]["difference"] <= TOLERANCE for s in chosen if s.equal}
    for strategy in (s for s, good in learnt.items() if not good):
        out.print(f"{strategy.name}: its loss does not fall")
    for strategy in (s for s, good in equal.items() if not good):
        out.print(f"{strategy.name}: its losses are not those of the state on the device")
    if all(equal.values()) and equal:
        out.print(f"Losses agree to {TOLERANCE} wherever AdamW keeps its state.")
    if options.json:
        rows = [asdict(s) | results[s.name] | plans.get(s.name, {}) for s in chosen]
        write_json(Path(options.json), {"device": DEVICE.kind, "strategies": rows})
    return 0 if all(learnt.values()) and all(equal.values()) else 1


if __name__ == "__main__":
    run_script(main)
