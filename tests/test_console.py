"""Output that nobody takes ends no work."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from jaxlm.cli import run_script

def main():
    for number in range(3):
        print("line", number, flush=True)
    print("to the error output", file=sys.stderr, flush=True)
    return int(sys.argv[1])

run_script(main)
"""


def run(code: int, stdout: int, before: str = "") -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", before + SCRIPT, str(code)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    # Without the remarks of JAX's plugins about a GPU that is not there.
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("WARNING:", "I0"))]
    return done.returncode, lines


def test_a_reader_that_has_gone_changes_nothing():
    read, write = os.pipe()
    os.close(read)
    assert run(0, write) == (0, ["to the error output"])
    os.close(write)


def test_a_full_disk_under_the_output_is_told_of_at_the_end():
    with open("/dev/full", "w") as full:
        told = "error: part of the output could not be written: No space left on device"
        assert run(0, full.fileno()) == (1, ["to the error output", told])
        assert run(2, full.fileno())[0] == 2


def test_without_any_output_a_script_still_runs():
    closed = "import os, sys; os.close(1); sys.stdout = None"
    assert run(0, subprocess.DEVNULL, closed) == (0, ["to the error output"])
