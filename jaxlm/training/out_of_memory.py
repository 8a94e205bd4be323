"""Memory of a running step: planned beside measured, and what to do when there is not enough."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxlm.config import Config
from jaxlm.console import console
from jaxlm.errors import Failure, UserError
from jaxlm.memory.devices import DEVICES, Device
from jaxlm.training.planning import alternatives, default_budget, memory_table, plan_training


def memory_line(planned: tuple[int, int], peak: int) -> str:
    """Planned beside measured memory, in GB.

    Args:
        planned: bytes that XLA plans for the step, on the device and in pinned host memory.
        peak: most bytes that were in use on the device since the process began; what the run holds
            beside the step, such as prefetched windows, is in it.
    """
    device, host = planned
    pinned = f" and {host / 1e9:.2f} GB of pinned host memory" if host else ""
    return (
        f"Memory: XLA planned {device / 1e9:.2f} GB for the training step{pinned}; "
        f"measured peak {peak / 1e9:.2f} GB"
    )


def present_device(kind: str) -> Device | None:
    """The description of the device that is here; None if it is not one of those known."""
    return next((device for device in DEVICES.values() if device.kind == kind), None)


@contextlib.contextmanager
def explaining_out_of_memory(config: Config, directory: Path) -> Iterator[None]:
    """Let the device's lack of memory in the block become one line that says what to do.

    Args:
        config: of the run, with its vocabulary size.
        directory: the run, which holds these settings.

    Raises:
        Failure: in place of the error of JAX's runtime; before it, the planner's table is printed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Failure(_explanation(config, directory)) from error


def _explanation(config: Config, directory: Path) -> str:
    device = present_device(jax.devices()[0].device_kind)
    if device is not None:
        try:
            plan = plan_training(config, device)
        except UserError as error:  # such as the extra `plan` missing
            print(f"(the memory of this step cannot be planned here: {error})")
        else:
            console().print(memory_table(plan, default_budget(device)))
    words = "; ".join(words for words, _ in alternatives(config)) or "a smaller model"
    return (
        f"{directory}: the device ran out of memory. Settings that take less: {words}; "
        f"in an evaluation, evaluation.batch_rows. "
        f"`python scripts/plan_memory.py --config {directory / 'config.yaml'} --suggest` measures "
        f"each. Does another process use the device (nvidia-smi)? Checkpoints are as they were"
    )
