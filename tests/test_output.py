"""Output that nobody takes ends no work."""

import os
import subprocess
import sys
import time

SCRIPT = """
import sys
from jaxlm.cli import run_script
from jaxlm.console import progress

def main():
    with progress("Counting", 3) as advance:
        for number in range(3):
            print("line", number, flush=True)
            advance(1, "")
    print("to the error output", file=sys.stderr, flush=True)
    return int(sys.argv[1])

run_script(main)
"""


MANY = """
from jaxlm.cli import run_script

def main():
    for number in range(20_000):
        print("x" * 99)
    return 0

run_script(main)
"""

WAITING = """
import time
from jaxlm.cli import run_script

def main():
    print("here")
    time.sleep(600)
    return 0

run_script(main)
"""


def run(code: int, stdout: int, script: str = SCRIPT) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(code)],
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
        # A worker's success is success: the study that waits for it shares its output.
        worker = SCRIPT.replace("run_script(main)", "run_script(main, judge_output=False)")
        assert run(0, full.fileno(), script=worker) == (0, ["to the error output"])


def test_without_any_output_a_script_still_runs():
    closed = "import os, sys; os.close(1); sys.stdout = None"
    assert run(0, subprocess.DEVNULL, closed + SCRIPT) == (0, ["to the error output"])


def test_a_slow_reader_is_waited_for():
    """2 MB through a pipe that holds 64 kB and does not wait."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([sys.executable, "-c", MANY], stdout=write)
    os.close(write)
    time.sleep(1)
    with open(read, "rb") as pipe:
        assert len(pipe.read()) == 20_000 * 100
    assert process.wait(60) == 0


def test_lines_come_at_once_where_output_is_not_buffered():
    process = subprocess.Popen([sys.executable, "-u", "-c", WAITING], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    process.kill()
    process.communicate()
