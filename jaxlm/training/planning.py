"""What a run's training step needs on a GPU, found out without the GPU.

The step of the configuration is compiled for the device as it would be for training, from shapes
alone; XLA's own buffer assignment says what it takes and for what.
"""

import dataclasses
import math
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import rich.table

from jaxlm.config import Config
from jaxlm.console import new_table
from jaxlm.data.shards import token_dtype
from jaxlm.data.teacher import CacheFormat, format_of, read_manifest
from jaxlm.errors import UserError
from jaxlm.memory.assignment import Buffer
from jaxlm.memory.devices import Device
from jaxlm.memory.plan import abstract_arguments, buffer_assignment
from jaxlm.models.flops import FlopsPerToken, flops_per_token
from jaxlm.models.match import mean_depths
from jaxlm.training.spec import StepSpec, step_spec
from jaxlm.training.state import TrainState
from jaxlm.training.step import init_state, train_step

# JAX can have about 95 % of the memory that the driver reports: the rest goes to the CUDA context,
# to loaded kernels and to the handles of cuBLAS and cuDNN. Of JAX's own share, 6.5 % is left to
# what is no buffer of the step: windows that are prefetched, workspaces of cuBLAS, fragmentation
# of the allocator. On an RTX 3090 this gives 22.6 GB.
BUDGET_SHARE = 0.95 * 0.935
# Bytes of pinned host memory that a run may take where nobody says more: WSL2 hands out half of a
# machine's memory.
HOST_BUDGET = 12 * 10**9

# Horizon where training.updates is null. The number does not change the program's memory.
_UPDATES = 1000

# Parts of the device memory in the order of a table, and what they are.
PARTS = {
    "weights": "weights",
    "optimizer_state": "optimizer state",
    "accumulators": "accumulators of micro-batches",
    "gradients": "gradients",
    "update": "update: new weights, rounding bits",
    "activations": "activations",
    "copies": "copies of weights, one layer's gradients",
    "logits": "logits of a chunk",
    "inputs_outputs": "window, metrics, constants",
    "gaps": "gaps between buffers",
    "remainder": "not classified",
}


@dataclass(frozen=True)
class Plan:
    """Memory and speed limits of one training step on one device. Sizes are in bytes."""

    # The configuration that was compiled: attention resolved, vocabulary size set.
    config: Config
    device: Device
    # Number of weights.
    parameters: int
    # Device memory by the keys of PARTS; adds up to the peak.
    parts: dict[str, int]
    # Pinned host memory.
    host: int
    # The largest temporaries that are live at the peak, each with its part.
    largest: tuple[tuple[str, Buffer], ...]
    # Mean depth n and gradient depth k of the run's draws; 0 for a Transformer.
    depth: float
    backprop_depth: float
    # Operations per token with causal attention's need, at those depths.
    flops: FlopsPerToken

    @property
    def peak(self) -> int:
        """XLA's peak on the device: arguments + outputs - aliased + temporaries, and constants.

        All temporaries of a program are one allocation, and the runtime takes the whole of it; so
        this counts, and not the somewhat smaller sum of what is live at one time.
        """
        return sum(self.parts.values())

    def tokens_per_second(self, share: float = 1.0, recomputation: bool = True) -> float:
        """Upper bound of the training speed at a share of the device's dense bf16 peak."""
        flops = self.flops.executed if recomputation else self.flops.training
        return share * self.device.peak_flops / flops


def default_budget(device: Device) -> int:
    """Bytes of a device that a training step may take, see BUDGET_SHARE."""
    return math.floor(BUDGET_SHARE * device.memory_bytes)


def plan_training(config: Config, device: Device, cache: CacheFormat | None = None) -> Plan:
    """Compile the training step of a configuration for a device, and account for its memory.

    Nothing is computed and no array exists. `model.attention: auto` is planned as xla: cuDNN's
    attention cannot be compiled without cuDNN, and needs less memory.

    Args:
        config: of the run.
        device: the target.
        cache: what the records of its teacher will be like; None looks at `distillation.cache`.

    Raises:
        UserError: the vocabulary size is not set, the step cannot be compiled for the device, or
            the extra `plan` is missing.
    """
    if config.model.vocabulary_size is None:
        raise UserError(
            "model.vocabulary_size is null: set it, the planner does not read data "
            "(such as model.vocabulary_size=50304)"
        )
    if config.model.attention == "auto":
        config = replace(config, model=replace(config.model, attention="xla"))
    lowered, spec, state = lower_step(config, device, cache)
    assignment = buffer_assignment(lowered)

    parts = dict.fromkeys(PARTS, 0)
    parts["weights"] = _bytes(state.params)
    # MultiSteps keeps its accumulators in the optimizer state.
    paths = jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
    parts["accumulators"] = _bytes([x for path, x in paths if "acc_grads" in map(_name, path)])
    parts["optimizer_state"] = _bytes(state.opt_state) - parts["accumulators"]
    held = sum(parts.values())
    parts["inputs_outputs"] = (
        assignment.arguments + assignment.outputs + assignment.constants - held
    )
    parts["gaps"] = assignment.gaps
    classifier = _Classifier(config, state)
    classified = [(classifier.part(buffer), buffer) for buffer in assignment.buffers]
    for part, buffer in classified:
        parts[part] += buffer.size

    depth = backprop = 0.0
    if config.model.kind == "recurrent":
        depth, backprop = mean_depths(config, spec.updates)
    attended = (config.data.sequence_length + 1) / 2
    return Plan(
        config,
        device,
        sum(x.size for x in jax.tree.leaves(state.params)),
        parts,
        assignment.host,
        tuple(sorted(classified, key=lambda item: -item[1].size)[:12]),
        depth,
        backprop,
        flops_per_token(config.model, attended, depth, backprop),
    )


def gigabytes(count: int) -> str:
    """Bytes in GB, three decimals."""
    return f"{count / 1e9:,.3f}"


def memory_table(plan: Plan, budget: int, host_budget: int | None = None) -> rich.table.Table:
    """The parts of the peak, and the budgets in bytes."""
    table = new_table("memory at the fullest point of an update", "GB", "share")
    for key, title in PARTS.items():
        table.add_row(title, gigabytes(plan.parts[key]), f"{plan.parts[key] / plan.peak:.1%}")
    table.add_section()
    table.add_row("XLA's peak", gigabytes(plan.peak), "100.0%")
    table.add_row("budget", gigabytes(budget), "")
    table.add_section()
    table.add_row("pinned host memory", gigabytes(plan.host), "")
    if host_budget is not None:
        table.add_row("host budget", gigabytes(host_budget), "")
    return table


def lower_step(
    config: Config, device: Device, cache: CacheFormat | None = None
) -> tuple[jax.stages.Lowered, StepSpec, TrainState]:
    """The training step of a configuration, lowered for a device; its settings; its state's shapes.

    Args:
        config: with a vocabulary size, and with attention that the device's compiler has here.
        device: the target.
        cache: what the records of its teacher will be like; None looks at `distillation.cache`.
    """
    optim = config.optim
    updates = config.training.updates or _UPDATES + optim.warmup_updates + optim.decay_updates
    spec = step_spec(config, config.model.vocabulary, updates)
    state = jax.eval_shape(lambda: init_state(spec))
    rows = (config.training.micro_batches, config.training.micro_batch_rows)
    row = (*rows, config.data.sequence_length + 1)
    window = {  # as data/pipeline.py gives it
        "tokens": jax.ShapeDtypeStruct(row, token_dtype(config.model.vocabulary)),
        "segment_ids": jax.ShapeDtypeStruct(row, jnp.int32),
        "positions": jax.ShapeDtypeStruct(row, jnp.int32),
        "block": jax.ShapeDtypeStruct(rows, jnp.int32),
    }
    if config.distillation.cache is not None:
        form = cache or cache_format(config)
        targets = (*rows, config.data.sequence_length)
        for name, dtype in form.dtypes.items():
            shape = targets if name == "log_tail" else (*targets, form.k)
            window[f"teacher_{name}"] = jax.ShapeDtypeStruct(shape, dtype)
    depth, rate = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    arguments = abstract_arguments(device, (state, window, depth, depth, rate))
    if config.model.attention != "cudnn":
        return train_step.lower(spec, *arguments), spec, state
    try:
        return train_step.lower(spec, *arguments), spec, state
    except RuntimeError as error:
        raise UserError(
            f"model.attention=cudnn cannot be planned here ({error}); xla takes at least as much "
            "memory, plan with model.attention=xla"
        ) from None


def cache_format(config: Config) -> CacheFormat:
    """What the records of a run's teacher are like; the default's where they are still to be made.

    Raises:
        UserError: a damaged cache.
    """
    assert config.distillation.cache is not None
    directory = Path(config.distillation.cache)
    if directory.exists():
        return format_of(read_manifest(directory))
    return CacheFormat(vocabulary_size=config.model.vocabulary)


def _name(key: object) -> str:
    return str(getattr(key, "name", ""))


def _bytes(tree: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class _Classifier:
    """Tells what a temporary is for, by its shape and the operation that it comes from.

    A buffer of a parameter's shape is a gradient if differentiation made it (`jvp` in the name of
    its operation) or if it is the quotient by the target tokens; an accumulator if the loop over
    micro-batches carries it; and else part of the update. One of a single layer's shape is that
    layer's weight, cut out of the stack, or its gradient; and one of a parameter's shape with one
    axis more is what a loop keeps of that parameter at each iteration. One with the vocabulary as
    an axis is a chunk's logits. What differentiation made besides is activations.
    """

    def __init__(self, config: Config, state: TrainState):
        shapes = [x.shape for x in jax.tree.leaves(state.params)]
        # Vectors and matrices of one layer, as slices [1, ...] or without their first axis.
        self._stacked = {tuple(sorted(s)) for s in shapes if math.prod(s) > 1}
        layers = [s[1:] for s in shapes if len(s) > 1]
        self._layer = {tuple(sorted(_squeezed(s))) for s in layers} - self._stacked
        dtypes = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}
        self._weights = dtypes[config.model.param_dtype]
        self._sums = dtypes[config.optim.accumulator_dtype]
        self._vocabulary = config.model.vocabulary
        self._positions = {config.data.sequence_length, config.data.sequence_length + 1}
        self._tokens = config.training.micro_batch_rows * config.data.sequence_length

    def part(self, buffer: Buffer) -> str:
        shape, operation = buffer.shape, buffer.operation
        differentiated = "jvp(" in operation
        optimizer = "/optax/" in buffer.source or "/jaxlm/optim/" in buffer.source
        if tuple(sorted(shape)) in self._stacked:
            if differentiated:
                return "gradients"
            if buffer.dtype == self._weights != self._sums:
                return "copies" if "/while" in operation else "update"
            if "/while" in operation and (not optimizer or "accumulation" in buffer.source):
                return "accumulators"
            if operation.endswith("/div") and not optimizer:
                return "gradients"
            return "update" if operation else "remainder"
        if self._vocabulary in shape:
            return "logits" if differentiated or not optimizer else "update"
        one_layer = tuple(sorted(_squeezed(shape))) in self._layer and self._tokens not in shape
        repeated = tuple(sorted(shape[1:])) in self._stacked and len(shape) > 2
        if one_layer or repeated:
            return "copies" if differentiated else "update"
        if differentiated or self._positions & set(shape) or self._tokens in shape:
            return "activations"
        return "update" if optimizer else "remainder"


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def alternatives(config: Config) -> list[tuple[str, Config]]:
    """Settings that usually take less memory than a configuration's, one at a time, then all.

    Returns:
        Pairs of `key=value` words and the changed configuration; only what differs from it.
    """
    model, optim, training = config.model, config.optim, config.training
    single: list[dict[str, object]] = []
    if training.micro_batch_rows > 1:
        # The window, and so the update, stays what it is.
        single.append(
            {"training.micro_batch_rows": 1, "training.micro_batches": training.window_rows}
        )
    if model.remat != "full":
        single.append({"model.remat": "full"})
    if config.loss.chunk_tokens > 256:
        single.append({"loss.chunk_tokens": 256})
    if optim.name != "adafactor":
        single.append({"optim.name": "adafactor"})
    if training.micro_batches > 1 and training.update == "after_backward":
        if optim.accumulation == "optax_multisteps":
            single.append({"optim.accumulation": "token_weighted"})
        elif optim.accumulator_dtype == "float32":
            single.append({"optim.accumulator_dtype": "bfloat16"})
    narrow: dict[str, object] = {}
    if model.param_dtype != "bfloat16":
        narrow["model.param_dtype"] = "bfloat16"
    if model.compute_dtype != "bfloat16":
        narrow["model.compute_dtype"] = "bfloat16"
    if narrow:
        single.append(narrow)
    if len(single) > 1:
        single.append({key: value for change in single for key, value in change.items()})
    return [
        (" ".join(f"{key}={value}" for key, value in change.items()), _changed(config, change))
        for change in single
    ]


def _changed(config: Config, change: dict[str, object]) -> Config:
    for key, value in change.items():
        section, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
