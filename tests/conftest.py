"""Settings that must stand before JAX starts, and small data that tests share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation dominates these tests; LLVM's optimiser and the MLIR fusion emitters are most of it,
# and change no rule that they check. And compiling for a GPU that is not there cannot time kernels.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_gpu_autotune_level=0",
    ]
)

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import write_documents


@pytest.fixture(scope="module", autouse=True)
def _no_programs_of_other_modules():
    """Forget compiled programs after each module.

    Each takes memory maps, of which Linux allows a process 65,530: the whole suite in two processes
    comes near that, and XLA aborts where it gets no more.
    """
    yield
    import jax

    from jaxlm.training import compilation

    compilation._PROGRAMS.clear()
    jax.clear_caches()


@pytest.fixture
def hangup_heeded():
    """SIGHUP ends what the test starts, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def random_data(tmp_path: Path) -> Path:
    """A data directory of 40 + 6 random documents, vocabulary 64."""
    rng = np.random.default_rng(0)

    def documents(count):
        return [[*rng.integers(1, 64, rng.integers(3, 60)), 0] for _ in range(count)]

    return write_documents(tmp_path / "data", documents(40), documents(6), 64)
