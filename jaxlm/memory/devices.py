"""What is known of GPUs: peak speed, and descriptions that XLA compiles for without the card.

Sources. Dense bf16 peaks with float32 accumulation, multiprocessors, boost clocks, bandwidths and
caches: NVIDIA's whitepapers on GA102 (RTX 3090, RTX A6000), AD102 (RTX 4090), GB202 (RTX 5090),
GA100 (A100) and H100, and the H200 datasheet. Threads, registers and shared memory of a
multiprocessor: CUDA programming guide, table of technical specifications per compute capability.
Memory sizes: what the driver reports (`cudaDeviceProp.totalGlobalMem`). For RTX A6000, A100, H100
and H200 the values are those of XLA's own descriptions (xla/backends/gpu/target_config/specs).
"""

import re
from dataclasses import dataclass
from pathlib import Path

from jaxlm.errors import UserError


@dataclass(frozen=True)
class Device:
    """A GPU model."""

    # Name that JAX reports as `device_kind`.
    kind: str
    # Dense bf16 operations per second with float32 accumulation, at boost clock.
    peak_flops: float
    # Description in the text format of XLA's GpuTargetConfigProto.
    target_config: str

    @property
    def memory_bytes(self) -> int:
        """Memory of the card in bytes, as the driver reports it."""
        found = re.search(r"^\s*device_memory_size:\s*(\d+)", self.target_config, re.MULTILINE)
        if found is None:
            raise ValueError(f"{self.kind}: the description has no device_memory_size")
        return int(found[1])


def _target_config(
    *,
    capability: tuple[int, int],
    cores: int,
    clock_ghz: float,
    bandwidth: int,
    l2_cache: int,
    memory: int,
    fpus_per_core: int = 128,
    threads_per_core: int = 1536,
    shared_memory_kib: int = 100,
) -> str:
    """XLA's text description of an NVIDIA GPU; sizes in bytes, bandwidth in bytes a second.

    A block may use all but 1 KiB of a multiprocessor's shared memory.
    """
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads_per_core}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: {shared_memory_kib * 1024}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {(shared_memory_kib - 1) * 1024}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
"""


RTX3090 = Device(
    kind="NVIDIA GeForce RTX 3090",
    peak_flops=71e12,
    target_config=_target_config(
        capability=(8, 6),
        cores=82,
        clock_ghz=1.695,
        bandwidth=936_096_000_000,
        l2_cache=6 * 2**20,
        memory=25_438_126_080,
    ),
)
RTX4090 = Device(
    kind="NVIDIA GeForce RTX 4090",
    peak_flops=165.2e12,
    target_config=_target_config(
        capability=(8, 9),
        cores=128,
        clock_ghz=2.52,
        bandwidth=1_008_096_000_000,
        l2_cache=72 * 2**20,
        memory=25_393_692_672,
    ),
)
RTX5090 = Device(
    kind="NVIDIA GeForce RTX 5090",
    peak_flops=209.5e12,
    target_config=_target_config(
        capability=(12, 0),
        cores=170,
        clock_ghz=2.407,
        bandwidth=1_792_000_000_000,
        l2_cache=96 * 2**20,
        memory=33_677_180_928,
    ),
)
A6000 = Device(
    kind="NVIDIA RTX A6000",
    peak_flops=154.8e12,
    target_config=_target_config(
        capability=(8, 6),
        cores=84,
        clock_ghz=1.8,
        bandwidth=768_096_000_000,
        l2_cache=6 * 2**20,
        memory=51_041_271_808,
    ),
)
A100_40 = Device(
    kind="NVIDIA A100-SXM4-40GB",
    peak_flops=312e12,
    target_config=_target_config(
        capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        bandwidth=1_555_200_000_000,
        l2_cache=40 * 2**20,
        memory=42_331_013_120,
        fpus_per_core=64,
        threads_per_core=2048,
        shared_memory_kib=164,
    ),
)
A100_80 = Device(
    kind="NVIDIA A100-SXM4-80GB",
    peak_flops=312e12,
    target_config=_target_config(
        capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        bandwidth=2_039_040_000_000,
        l2_cache=40 * 2**20,
        memory=85_100_068_864,
        fpus_per_core=64,
        threads_per_core=2048,
        shared_memory_kib=164,
    ),
)
H100 = Device(
    kind="NVIDIA H100 80GB HBM3",
    peak_flops=989.4e12,
    target_config=_target_config(
        capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        bandwidth=3_352_320_000_000,
        l2_cache=50 * 2**20,
        memory=84_942_979_072,
        threads_per_core=2048,
        shared_memory_kib=228,
    ),
)
H200 = Device(
    kind="NVIDIA H200",
    peak_flops=989.4e12,
    target_config=_target_config(
        capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        bandwidth=4_800_000_000_000,
        l2_cache=50 * 2**20,
        memory=151_397_597_184,
        threads_per_core=2048,
        shared_memory_kib=228,
    ),
)

DEVICES = {
    "rtx3090": RTX3090,
    "rtx4090": RTX4090,
    "rtx5090": RTX5090,
    "a6000": A6000,
    "a100-40": A100_40,
    "a100-80": A100_80,
    "h100": H100,
    "h200": H200,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of a device by JAX's `device_kind`; None where it is not known."""
    for device in DEVICES.values():
        if device.kind == device_kind:
            return device.peak_flops
    return None


def read_device(path: str | Path) -> Device:
    """Read a device's description from a file.

    The file is what XLA reads, a GpuTargetConfigProto in text format (the body of
    :func:`_target_config`, or one of XLA's own `.txtpb` files), with two comment lines more::

        # kind: NVIDIA RTX A5000
        # peak_flops: 111.1e12

    Raises:
        UserError: the file cannot be read, or lacks one of the two or the memory size.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the device ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    kind = re.search(r"^#\s*kind:[ \t]*(\S.*)$", text, re.MULTILINE)
    peak = re.search(
        r"^#\s*peak_flops:[ \t]*([0-9.]+(?:[eE]\+?[0-9]+)?)[ \t]*$", text, re.MULTILINE
    )
    if kind is None:
        raise UserError(f"{path}: needs a line such as '# kind: NVIDIA RTX A5000'")
    if peak is None:
        raise UserError(
            f"{path}: needs a line such as '# peak_flops: 111.1e12', the dense bf16 peak"
        )
    device = Device(kind[1].strip(), float(peak[1]), text)
    try:
        _ = device.memory_bytes
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return device
