"""What is known of GPUs: peak speed, and descriptions that XLA compiles for without the card.

Sources: NVIDIA GA102 whitepaper v2 (RTX 3090: dense bf16 with float32 accumulation 71 TFLOP/s, 82
multiprocessors, 936 GB/s, 6 MB L2); CUDA programming guide, compute capability 8.6 (100 KB shared
memory a multiprocessor, 99 KB a block, 1,536 threads).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU model."""

    # Name that JAX reports as `device_kind`.
    kind: str
    # Dense bf16 operations per second with float32 accumulation, at boost clock.
    peak_flops: float
    # Description in the text format of XLA's GpuTargetConfigProto.
    target_config: str


RTX3090 = Device(
    kind="NVIDIA GeForce RTX 3090",
    peak_flops=71e12,
    target_config="""
gpu_device_info {
  cuda_compute_capability { major: 8 minor: 6 }
  core_count: 82
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 1536
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 102400
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 101376
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 936096000000
  l2_cache_size: 6291456
  clock_rate_ghz: 1.695
  device_memory_size: 25438126080
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
""",
)

DEVICES = {"rtx3090": RTX3090}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of a device by JAX's `device_kind`; None where it is not known."""
    for device in DEVICES.values():
        if device.kind == device_kind:
            return device.peak_flops
    return None
