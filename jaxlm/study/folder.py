"""A study's folder: nothing outside of it is written, and only the study's own shards are removed.

A folder may come from someone else. So it holds no symbolic link, names in the journal are compared
with the few forms that the study writes, and removal walks down by directory descriptors that
follow no link.
"""

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

from jaxlm.errors import Failure
from jaxlm.files import FileSum, sha256_of

# What may ever be removed: shards of training tokens that the study prepared itself, and of what
# its teacher predicts for them.
_SHARD = re.compile(
    r"data/train/tokens-\d{5,}\.npy"
    r"|(data/)?teacher-[A-Za-z0-9][A-Za-z0-9._-]*/(ids|log_probs|log_tail)-\d{5,}\.npy"
)


def bytes_in(directory: Path) -> int:
    """Bytes on disk of all files below a directory."""
    total = 0
    for place, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(place) / name).lstat().st_blocks * 512
            except FileNotFoundError:  # a run removes what it replaced
                continue
    return total


def free_bytes(directory: Path) -> int:
    """Bytes free where a directory is or will be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def check_removable(study: Path, files: dict[str, Any]) -> dict[str, FileSum]:
    """Read the files of a journal's event as what may be removed.

    Args:
        study: the study's folder.
        files: size and checksum by path below it.

    Raises:
        Failure: anything but a shard of the study's own training tokens or of its teacher's cache,
            or a file that is there and is not what was recorded.
    """
    checked = {}
    for name, entry in files.items():
        if not _SHARD.fullmatch(name):
            raise Failure(f"{study}: '{name}' is no shard that a study removes")
        try:
            checked[name] = FileSum(int(entry["bytes"]), str(entry["sha256"]))
        except (KeyError, TypeError, ValueError):
            raise Failure(f"{study}: the journal has no size and checksum of {name}") from None
    for name, entry in checked.items():
        path = study / name
        if not path.exists():
            continue
        if path.stat().st_size != entry.bytes or sha256_of(path) != entry.sha256:
            raise Failure(f"{path}: is not what the study wrote there; it is not removed")
    return checked


def remove(study: Path, files: dict[str, FileSum]) -> None:
    """Remove shards that :func:`check_removable` passed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    for name in files:
        descriptors = [os.open(study, flags)]
        try:
            *folders, leaf = name.split("/")
            for folder in folders:
                descriptors.append(os.open(folder, flags, dir_fd=descriptors[-1]))
            found = os.stat(leaf, dir_fd=descriptors[-1], follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise Failure(f"{study / name}: is no ordinary file; it is not removed")
            os.unlink(leaf, dir_fd=descriptors[-1])
            os.fsync(descriptors[-1])
        except FileNotFoundError:
            continue  # removed before a restart
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
