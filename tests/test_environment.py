"""Variables are set before jax starts, and written down."""

import json
import subprocess
import sys

from jaxlm import environment


def run(code: str, **variables: str) -> str:
    base = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    return subprocess.check_output([sys.executable, "-c", code], env=base | variables, text=True)


SCRIPT = """
import os, sys
from jaxlm.cli import run_script
assert "jax" not in sys.modules
def main():
    print(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    return 0
run_script(main)
"""


def test_a_script_leaves_jax_the_card_unless_told_otherwise():
    assert run(SCRIPT).strip() == "0.95"
    assert run(SCRIPT, XLA_PYTHON_CLIENT_MEM_FRACTION="0.6").strip() == "0.6"


def test_what_is_written_down_is_plain_and_complete():
    code = "import json; from jaxlm import environment as e; print(json.dumps(e.describe()))"
    found = json.loads(run(code, OMP_NUM_THREADS="2"))
    assert set(environment.PACKAGES) < set(found["versions"])
    assert found["device"] == "cpu"
    assert found["variables"] == {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2"}
    versions, machine, variables = environment.lines(found)
    assert f"jax {found['versions']['jax']}" in versions
    assert machine.startswith(f"Machine: cpu; {found['threads']} CPU threads, ")
    assert variables == "Environment: JAX_PLATFORMS=cpu OMP_NUM_THREADS=2"
