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


THREADS = """
import ctypes, os, threading
from jaxlm.cli import run_script

def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()

def main():
    threads = [threading.Thread(target=allocate) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(os.environ.get("MALLOC_ARENA_MAX"), flush=True)
    libc.fdopen.restype = ctypes.c_void_p
    libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(2, b"w")))
    libc.fflush(None)
    return 0

libc = ctypes.CDLL(None)
together = threading.Barrier(12)
run_script(main)
"""


def arenas(**variables: str) -> tuple[str, int]:
    """The variable that child processes see, and glibc's own count after 12 threads allocate."""
    base = {"PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=base | variables, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.count("<heap nr=")


def test_memory_is_divided_into_two_arenas_unless_told_otherwise():
    assert arenas() == ("2", 2)
    assert arenas(MALLOC_ARENA_MAX="3") == ("3", 3)
    assert arenas(GLIBC_TUNABLES="glibc.malloc.hugetlb=1") == ("2", 2)
    assert arenas(GLIBC_TUNABLES="glibc.malloc.arena_max=4") == ("None", 4)


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
