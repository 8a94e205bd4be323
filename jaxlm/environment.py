"""What decides speed, memory and reproducibility beside the settings: set early, and written down.

This module must not import jax at its top: the variables have to be set before jax makes its
backend.
"""

import ctypes
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

# Share of a GPU's memory for jax, unless the variable is set; jax's own default is 0.75, which
# leaves 6 GB of an RTX 3090 unused. See memory planning for what the rest is needed for.
MEMORY_FRACTION = "0.95"
# Parts that glibc divides the heap into, each of which keeps what its threads once needed. Its
# default is 8 for each core: the many threads of a save then leave 0.4 MB behind each time; with
# two arenas it is less than half, and updates take as long (docs/LOG.md, 2026-12-01).
ARENAS = 2
_M_ARENA_MAX = -8  # of malloc.h
# Recorded as they are at the start of a run; absent ones are defaults.
VARIABLES = (
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "CUDA_VISIBLE_DEVICES",
)
PACKAGES = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def prepare() -> None:
    """Set what is not set; to be called before jax is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    told = "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] == "glibc" and not told and "MALLOC_ARENA_MAX" not in os.environ:
        # glibc has read the variable long ago: it is for the record and for child processes.
        os.environ["MALLOC_ARENA_MAX"] = str(ARENAS)
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def describe() -> dict[str, Any]:
    """The environment of this process, as plain values; makes jax choose its backend."""
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "device": device.device_kind,
        "device_memory_limit_bytes": limit,
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def lines(described: dict[str, Any]) -> list[str]:
    """The same for people."""
    versions = described["versions"]
    limit = described["device_memory_limit_bytes"]
    memory = "" if limit is None else f", {limit / 1e9:.2f} GB of it for jax"
    variables = " ".join(f"{name}={value}" for name, value in described["variables"].items())
    return [
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"Machine: {described['device']}{memory}; {described['threads']} CPU threads, "
        f"{described['host_memory_bytes'] / 1e9:.1f} GB of memory; {described['system']}",
        f"Environment: {variables or 'defaults'}",
    ]


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is there: its device node, or the one of WSL2."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))
