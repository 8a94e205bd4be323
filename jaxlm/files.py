"""Files that are either whole or absent."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxlm.errors import UserError


class Lock:
    """An exclusive lock on a file that the kernel releases however the process ends.

    Args:
        path: the lock file; created and left in place.
        busy: message for the :class:`UserError` where another process holds the lock.
    """

    def __init__(self, path: Path, busy: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(busy) from None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def sync_file(path: Path) -> None:
    """Make a written file's contents survive a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, sync it, and rename it into place."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON atomically. Non-finite numbers are a ValueError: JSON has none."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text + "\n")
