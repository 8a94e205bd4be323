"""What a study has done: one JSON object a line, appended, synced, and chained by checksums.

A line holds its event, when it was written, the checksum of the line before it and its own. What a
crash leaves of a line that was being written is cut off at the next start: what it was to say was
not yet relied upon. Any other line that does not fit was changed by someone, and nothing is built
on a journal that was.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from jaxlm.errors import Failure
from jaxlm.files import append_line, sync_directory

Event = dict[str, Any]


def _checksum(event: Event) -> str:
    text = json.dumps({k: v for k, v in event.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _parsed(line: bytes, previous: str) -> Event | None:
    """The event of a line; None where it is not what was written after `previous`."""
    try:
        event = json.loads(line)
        whole = event["sha256"] == _checksum(event) and event["previous"] == previous
        return event if whole and isinstance(event["event"], str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Journal:
    """The events of a study, oldest first.

    Args:
        path: the file; made by the first event.
        read_only: look only; a torn last line is left where it is.

    Raises:
        Failure: a line that is not what was written.
    """

    def __init__(self, path: Path, read_only: bool = False):
        self.path = path
        self.events: list[Event] = []
        written = path.read_bytes() if path.exists() else b""
        lines = written.split(b"\n")
        kept = 0
        for number, line in enumerate(lines[:-1], 1):
            event = _parsed(line, self._last)
            if event is None:
                # A crash tears the last line; one that ends with a line feed was written whole.
                raise Failure(
                    f"{path}:{number}: is not what was written there; bring the journal back from "
                    f"a copy, or start over under another study.name"
                )
            self.events.append(event)
            kept += len(line) + 1
        if lines[-1] and not read_only:
            os.truncate(path, kept)

    @property
    def _last(self) -> str:
        return self.events[-1]["sha256"] if self.events else ""

    def append(self, kind: str, **values: Any) -> Event:
        """Write an event, and sync it."""
        event = {"event": kind, "time": time.time(), **values, "previous": self._last}
        event = json.loads(json.dumps(event, allow_nan=False))
        event["sha256"] = _checksum(event)
        new = not self.path.exists()
        append_line(self.path, json.dumps(event))
        if new:
            sync_directory(self.path.parent)
        self.events.append(event)
        return event

    def find(self, kind: str, **values: Any) -> Event | None:
        """The last event of a kind with these values, or None."""
        return next(
            (
                event
                for event in reversed(self.events)
                if event["event"] == kind and all(event.get(k) == v for k, v in values.items())
            ),
            None,
        )

    def all(self, kind: str, **values: Any) -> list[Event]:
        """Every event of a kind with these values, oldest first."""
        return [
            event
            for event in self.events
            if event["event"] == kind and all(event.get(k) == v for k, v in values.items())
        ]
