"""Memory of a program on a GPU that is not there: XLA's own buffer assignment."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxlm.errors import UserError
from jaxlm.memory.assignment import Assignment, read_assignment
from jaxlm.memory.devices import Device


def abstract_arguments(device: Device, arguments: Any) -> Any:
    """Shapes of a tree of arrays or shapes, placed on a device that need not be there.

    Raises:
        UserError: the extra `plan` is not installed, or XLA cannot read the device's description.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError("compiling for an absent GPU needs the extra: pip install 'jaxlm[plan]'")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=device.target_config, topology="1x1x1"
        )
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"{device.kind}: XLA cannot use this description ({error}); the line above that starts "
            "with E names the field"
        ) from None
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )


def compile_for(
    device: Device, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile a function for a device without having it.

    Needs the extra `plan` (`jax-cuda12-plugin` and `jax-cuda12-pjrt`) and `JAX_PLATFORMS=cpu`.

    Args:
        device: the target.
        function: what to compile.
        arguments: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes matter.
        donate: positions of arguments that are donated.

    Returns:
        The compiled program; `memory_analysis()` gives its sizes in bytes: arguments, outputs,
        temporaries, and what aliases.

    Raises:
        UserError: see :func:`abstract_arguments`.
    """
    abstract = abstract_arguments(device, arguments)
    return jax.jit(function, donate_argnums=donate).lower(*abstract).compile()


def buffer_assignment(lowered: jax.stages.Lowered) -> Assignment:
    """Compile a program that was lowered for an absent GPU, and read where its memory goes.

    Args:
        lowered: lowered with arguments from :func:`abstract_arguments`.
    """
    with tempfile.TemporaryDirectory(prefix="jaxlm-plan-") as directory:
        lowered.compile(
            compiler_options={
                "xla_dump_to": directory,
                "xla_dump_hlo_as_text": True,
                "xla_gpu_autotune_level": "0",  # there is no GPU to time kernels on
                # Without timing, XLA takes one fixed tile size for its own matrix products and
                # fails where it does not fit (float32, 192 x 48); cuBLAS takes any shape.
                "xla_gpu_enable_triton_gemm": False,
            }
        )
        return read_assignment(Path(directory))


def planned_bytes(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """XLA's peak of a compiled program on the device and in pinned host memory, in bytes.

    Arguments + outputs - what aliases + temporaries.
    """
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA's CPU and GPU compilers give it"

    def size(prefix: str) -> int:
        part = lambda name: getattr(analysis, f"{prefix}{name}_size_in_bytes")  # noqa: E731
        return part("argument") + part("output") - part("alias") + part("temp")

    return size(""), size("host_")
