"""Files that are either whole or absent."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

from jaxlm.errors import UserError


class Lock:
    """An exclusive lock on a file that the kernel releases however the process ends.

    Args:
        path: the lock file; created and left in place. Never followed where it is a link.
        busy: message for the :class:`UserError` where another process holds the lock.
    """

    def __init__(self, path: Path, busy: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UserError(f"{path}: is a symbolic link; remove it") from None
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
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


def is_inside(name: object) -> bool:
    """Whether a name that a file gives is a plain relative path that stays where it begins."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    return not name.startswith("/") and ".." not in name.split("/")


def refuse_links(directory: Path, what: str) -> None:
    """Refuse to write into a folder that is, or holds, a symbolic link.

    A folder may come from someone else, and a link in it leads whatever is written or removed by
    its name to elsewhere.

    Args:
        directory: need not be there.
        what: whose folder it is, such as "a run".

    Raises:
        UserError: naming the link.
    """
    links = [directory] if directory.is_symlink() else []
    for place, folders, files in [] if links else os.walk(directory):
        links += [path for name in (*folders, *files) if (path := Path(place, name)).is_symlink()]
    if links:
        raise UserError(
            f"{links[0]}: is a symbolic link; the folder of {what} is a folder and holds none, so "
            f"that nothing outside of it is written or removed. Put what it leads to in its place, "
            f"or choose a folder elsewhere"
        )


@dataclasses.dataclass(frozen=True)
class FileSum:
    """What a file held when it was written."""

    # Size.
    bytes: int
    # Hex digest of the contents.
    sha256: str


def files_under(directory: Path) -> list[str]:
    """Paths of all files below a directory, relative to it, in order of their names."""
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def sum_files(directory: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Sizes and checksums of files below a directory, several of them read at a time."""

    def of(name: str) -> tuple[str, FileSum]:
        path = directory / name
        return name, FileSum(path.stat().st_size, sha256_of(path))

    with ThreadPoolExecutor() as threads:
        return dict(threads.map(of, names))


def differences(directory: Path, expected: dict[str, FileSum], contents: bool = True) -> list[str]:
    """Compare files with what they should hold.

    Args:
        directory: where they are.
        expected: sizes and checksums by path below the directory.
        contents: False compares names and sizes alone, which takes no time.

    Returns:
        A line ``PATH: what is wrong`` for each file that is missing, cut, changed or unreadable.
    """

    def difference(name: str) -> str | None:
        path, entry = directory / name, expected[name]
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{name}: {size:,} bytes, expected {entry.bytes:,}"
            if contents and sha256_of(path) != entry.sha256:
                return f"{name}: checksum differs"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            if error.errno != errno.EIO:  # a failing disk; permissions and the like are no damage
                raise
            return f"{name}: {error.strerror}"
        return None

    with ThreadPoolExecutor() as threads:
        return [line for line in threads.map(difference, expected) if line is not None]


def sync_tree(directory: Path) -> None:
    """Make all files below a directory, and their names, survive a power failure."""
    for path in directory.rglob("*"):
        (sync_directory if path.is_dir() else sync_file)(path)
    sync_directory(directory)


def size_text(count: float) -> str:
    """A number of bytes for people, with three digits: 1.23 GB, 45.6 MB, 789 kB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:#.3g} {unit}".replace(". ", " ")
    return f"{count / 1e3:.0f} kB"


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError in the block name this file where it names none, as a failed write does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_all(file: FileIO, data: bytes) -> None:
    """Write to the end: a disk that fills up takes a part, and says so at the next write."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, sync it, and rename it into place."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        with temporary.open("wb", buffering=0) as file:  # a failed write is not tried again
            write_all(file, data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, and sync it.

    What a power failure left of a line, without its end, is cut off first.
    """
    with naming(path), path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        write_all(file, (line + "\n").encode())
        os.fsync(file.fileno())


def finite(tree: Any) -> Any:
    """Plain values with None for each number that is not finite: JSON has none of these."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON atomically. Non-finite numbers are a ValueError: JSON has none."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text + "\n")
