"""Memory of a program on a GPU that is not there: XLA's own buffer assignment."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from jaxlm.memory.devices import Device


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
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=device.target_config, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    return jax.jit(function, donate_argnums=donate).lower(*abstract).compile()
