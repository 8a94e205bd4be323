"""The benchmark that puts optimizer strategies side by side, in a small form."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_adamw_learns_the_same_wherever_its_state_lies():
    """The benchmark compares the losses itself, and exits with 1 where they part."""
    command = [sys.executable, str(ROOT / "benchmarks/optimizers.py"), "--quick"]
    done = subprocess.run(
        [*command, "--only", "bf16, state"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "state on the host" in done.stdout
    assert "state on disk" in done.stdout
