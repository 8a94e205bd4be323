"""Whether a run's step fits its device, and whether the host gives the memory that is planned."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.shards import token_dtype
from jaxlm.files import size_text
from jaxlm.memory.devices import DEVICES
from jaxlm.memory.plan import planned_bytes
from jaxlm.training import step
from jaxlm.training.checks import Cause, Result, result, skipped
from jaxlm.training.planning import default_budget
from jaxlm.training.spec import step_spec
from jaxlm.training.trials import (
    Trials,
)

# Share of free host memory that pinned memory may take.
_HOST_SHARE = 0.9
# Bytes of pinned memory that are taken at a time: what fills them is host memory too.
_PIECE = 2**27

_BY_KIND = {device.kind: device for device in DEVICES.values()}


def memory(of: Trials) -> Result:
    """The step fits the device, and pinned host memory can be had."""
    name = "memory"
    present = _BY_KIND.get(jax.devices()[0].device_kind)
    if of.device is None and jax.default_backend() == "cpu":
        return skipped(name, "no GPU is here, and --device names none")
    if of.plan is not None:
        peak, host, budget = of.plan.peak, of.plan.host, default_budget(of.plan.device)
        what = f"planned for {of.plan.device.kind}"
    else:
        peak, host = _compiled_here(of)
        budget = default_budget(present) if present else _memory_here()
        what = f"planned for {jax.devices()[0].device_kind}"
    causes = []
    if peak > budget:
        parts = {} if of.plan is None else of.plan.parts
        largest = sorted(parts, key=lambda part: -parts[part])[:2]
        most = ", ".join(f"{part} {size_text(parts[part])}" for part in largest)
        causes.append(
            Cause(
                "memory",
                f"the step needs {size_text(peak - budget)} more than the device gives; most of it "
                f"is {most or 'in temporaries'}",
                0.95,
            )
        )
    causes += _pin(host, of.host_budget)
    return result(
        name,
        not causes,
        f"{size_text(peak)}, pinned host memory {size_text(host)}; {what}",
        f"<= {size_text(budget)}, <= {size_text(of.host_budget)}",
        causes,
        "scripts/plan_memory.py --suggest with the same configuration",
        peak_bytes=peak,
        host_bytes=host,
        budget_bytes=budget,
    )


def _compiled_here(of: Trials) -> tuple[int, int]:
    """Bytes of the run's own step on the GPU that is here: device, pinned host."""
    updates, data, training = of.config.training.updates, of.config.data, of.config.training
    assert updates is not None
    spec = step_spec(of.config, of.vocabulary, updates)
    state = jax.eval_shape(lambda: step.init_state(spec))
    rows = (training.micro_batches, training.micro_batch_rows)
    row = (*rows, data.sequence_length + 1)
    window = {
        "tokens": jax.ShapeDtypeStruct(row, token_dtype(of.vocabulary)),
        "segment_ids": jax.ShapeDtypeStruct(row, jnp.int32),
        "positions": jax.ShapeDtypeStruct(row, jnp.int32),
        "block": jax.ShapeDtypeStruct(rows, jnp.int32),
    }
    depth = jax.ShapeDtypeStruct((), jnp.int32)
    return planned_bytes(step.train_step.lower(spec, state, window, depth, depth).compile())


def _memory_here() -> int:
    return (jax.devices()[0].memory_stats() or {})["bytes_limit"]


def _pin(size: int, budget: int) -> list[Cause]:
    """Take pinned host memory once, and give it back; what is wrong with that."""
    if size == 0:
        return []
    if size > budget:
        text = f"{size_text(size)} of pinned host memory are over the host budget"
        return [Cause("host_memory", text, 0.95)]
    free = _free_host_memory()
    if size > _HOST_SHARE * free:
        text = f"{size_text(size)} of pinned host memory are needed, {size_text(free)} are free"
        return [Cause("host_memory", text, 0.95)]
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    kind = "pinned_host" if "pinned_host" in kinds else None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    source, held = np.ones(min(size, _PIECE), np.uint8), []
    try:
        for taken in range(0, size, _PIECE):
            piece = source[: min(_PIECE, size - taken)]
            held.append(jax.device_put(piece, place))
            held[-1].block_until_ready()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        text = f"{size_text(size)} of pinned host memory were refused: {str(error).splitlines()[0]}"
        return [Cause("host_memory", text, 0.95)]
    finally:
        for piece in held:
            piece.delete()
    return []


def _free_host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux has MemAvailable")
