"""Where the time of a run goes, over all its starts.

Goodput is the share of the time that processes of the run were alive in which they made updates
that the run still has. The rest is named: starting (imports, data, restoring), compilation of the
training step, waiting for data, evaluation (its compilation and the monitors included), the part of
saving that training waits for, and updates that were made again after a kill.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from jaxlm.files import append_line, naming, write_all

GOODPUT = "goodput.jsonl"
Kind = Literal["start", "training", "compile", "data", "evaluation", "checkpoint", "profile"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_EVERY_SECONDS = 60.0  # between records
# What a record has, beside its time.
_FIELDS = {
    *("start", "update", "seconds"),
    *("made_again_updates", "made_again_seconds", "unrecorded_seconds"),
}


def _process_age() -> float:
    """Seconds since this process began, from the kernel's clock; it counts imports."""
    with open("/proc/self/stat") as file:
        # The name in parentheses may hold spaces; the start is field 22 of all, 20 behind it.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    began = ticks / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)


class Goodput:
    """Accounts for the wall-clock time of one process of a run.

    At any moment the time belongs to one kind. A record of the sums is appended now and then, so
    that a kill loses a minute of the account at most.

    Args:
        directory: the run.
        update: updates that the run has behind it.
        lost: records of updates that have to be made again.
        first: whether this is the first run of this process, to which its start belongs.
    """

    def __init__(
        self, directory: Path, update: int, lost: Iterable[dict[str, Any]], first: bool = True
    ):
        self._path = directory / GOODPUT
        self._start = _starts(read_accounts(directory)) + 1
        self._lost = _lost(read_accounts(directory), list(lost))
        self._kind: Kind = "start"
        self._seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._seconds["start"] = _process_age() if first else 0.0
        self._switched = self._recorded = time.perf_counter()
        # Kept open: where the disk of the run has been unmounted, its name leads to another one.
        append_line(self._path, self._entry(update))
        self._file = self._path.open("ab", buffering=0)

    def switch(self, kind: Kind) -> Kind:
        """From now on the time belongs to `kind`; returns what it belonged to."""
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._switched
        self._switched, before, self._kind = now, self._kind, kind
        return before

    def spent(self, *kinds: Kind) -> float:
        """Seconds of these kinds so far."""
        self.switch(self._kind)
        return sum(self._seconds[kind] for kind in kinds)

    def move(self, kind: Kind, seconds: float) -> None:
        """Seconds that were counted as the present kind belong to another."""
        self._seconds[self._kind] -= seconds
        self._seconds[kind] += seconds

    def record(self, update: int, due_only: bool = False) -> None:
        """Write the sums so far; with `due_only` once a minute."""
        if due_only and time.perf_counter() - self._recorded < _EVERY_SECONDS:
            return
        with naming(self._path):
            write_all(self._file, (self._entry(update) + "\n").encode())
            os.fsync(self._file.fileno())

    def close(self, update: int) -> None:
        """Write the sums once more, and close the file."""
        try:
            self.record(update)
        finally:
            self._file.close()

    def _entry(self, update: int) -> str:
        self.switch(self._kind)
        self._recorded = self._switched
        entry = {
            "start": self._start,
            "time": time.time(),
            "update": update,
            "seconds": {kind: round(value, 3) for kind, value in self._seconds.items()},
            **self._lost,
        }
        return json.dumps(entry)


def read_accounts(directory: Path) -> list[dict[str, Any]]:
    """The records of goodput.jsonl; a line that a crash tore is left out."""
    path = directory / GOODPUT
    entries = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.keys() >= _FIELDS:
            entries.append(entry)
    return entries


def _starts(accounts: list[dict[str, Any]]) -> int:
    return max((entry["start"] for entry in accounts), default=0)


def _lost(accounts: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, float]:
    """What a new start knows of the process before it.

    `made_again_seconds`: training time of updates that come again. `unrecorded_seconds`: the part
    of it that came after the last record of that process.
    """
    counted = accounts[-1]["update"] if accounts else 0
    unrecorded = sum(r["seconds"] for r in lost if r["update"] >= counted)
    # Of the others, what they waited for data is in the account of that.
    training = sum(
        r["seconds"] * (1 - r["data_wait_fraction"]) for r in lost if r["update"] < counted
    )
    return {
        "made_again_updates": len(lost),
        "made_again_seconds": round(training + unrecorded, 3),
        "unrecorded_seconds": round(unrecorded, 3),
    }


def summary(accounts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Shares of the time of all starts; None without records.

    Returns:
        `seconds` in all, `starts`, `made_again_updates`, `goodput` and, by name, the share of each
        kind; the shares and goodput add up to 1.
    """
    last = {entry["start"]: entry for entry in accounts}  # of each start
    if not last:
        return None
    seconds: dict[str, float] = {
        kind: sum(entry["seconds"][kind] for entry in last.values()) for kind in KINDS
    }
    seconds["training"] += sum(entry["unrecorded_seconds"] for entry in last.values())
    again = sum(entry["made_again_seconds"] for entry in last.values())
    total = sum(seconds.values())
    shares = {kind: seconds[kind] / total for kind in KINDS if kind != "training"}
    return {
        "seconds": total,
        "starts": len(last),
        "made_again_updates": sum(entry["made_again_updates"] for entry in last.values()),
        "goodput": (seconds["training"] - again) / total,
        "shares": {**shares, "made_again": again / total},
    }


def goodput_line(found: dict[str, Any]) -> str:
    """One line for the terminal and the report."""
    names = {"start": "starting", "compile": "compiling", "data": "waiting for data"}
    names |= {"checkpoint": "saving", "made_again": "updates made again"}
    parts = ", ".join(
        f"{names.get(kind, kind)} {share:.1%}"
        for kind, share in found["shares"].items()
        if share >= 5e-4
    )
    hours, rest = divmod(round(found["seconds"]), 3600)
    starts = "1 start" if found["starts"] == 1 else f"{found['starts']} starts"
    return (
        f"Goodput {found['goodput']:.1%} of {hours}:{rest // 60:02d}:{rest % 60:02d} h in {starts}"
        + (f" ({parts})" if parts else "")
    )
