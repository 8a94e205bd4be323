"""What a checkpoint's folder should hold: the manifest, checks against it, and retention.

The manifest is written before the checkpoint gets its final name, so a checkpoint without one is
older than manifests, or lost it: its files cannot be checked, and it is called unverified.
"""

import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from jaxlm.files import (
    FileSum,
    differences,
    files_under,
    is_inside,
    sum_files,
    sync_directory,
    sync_tree,
    write_atomically,
)

MANIFEST = "manifest.json"
# What a killed process leaves: its own saves and removals.
_LEFTOVER = re.compile(r"[0-9]+(\.saving.*|\.deleting|\.orbax-checkpoint-tmp.*)")


class DamagedManifestError(Exception):
    """A manifest that does not hold what was written."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint without opening it."""

    # Updates behind the state.
    update: int
    # Target tokens behind the state.
    tokens: int
    # Validation cross-entropy of the state, where it was measured and finite.
    validation_cross_entropy: float | None
    # When it was saved, in seconds since 1970.
    saved_at: float
    # Size and checksum of each file by its path below the checkpoint.
    files: dict[str, FileSum]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files.values())


def _render(tree: dict[str, Any]) -> bytes:
    """The text of a manifest: its contents and their own checksum."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"manifest": tree, "sha256": digest}, indent=1) + "\n").encode()


def write_manifest(
    checkpoint: Path, update: int, tokens: int, validation: float | None, saved_at: float
) -> None:
    """Describe a checkpoint that has just been written, and put all of it on disk.

    Args:
        checkpoint: its folder; every file in it is read.
        update: updates behind the state.
        tokens: target tokens behind the state.
        validation: validation cross-entropy; a value that is not finite counts as not measured.
        saved_at: now, in seconds since 1970.
    """
    finite = validation is not None and math.isfinite(validation)
    files = sum_files(checkpoint, files_under(checkpoint))
    manifest = Manifest(update, tokens, validation if finite else None, saved_at, files)
    write_atomically(checkpoint / MANIFEST, _render(dataclasses.asdict(manifest)))
    sync_tree(checkpoint)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """A checkpoint's manifest; None if it has none.

    Raises:
        DamagedManifestError: it cannot be read, is not, byte for byte, what :func:`write_manifest`
            wrote, or is another checkpoint's.
    """
    try:
        written = (checkpoint / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:  # a bad sector in one checkpoint is no reason to lose the others
        raise DamagedManifestError(f"{MANIFEST}: cannot be read ({error.strerror})") from error
    try:
        tree = json.loads(written)["manifest"]
        if _render(tree) != written:
            raise ValueError
        files = {name: FileSum(**entry) for name, entry in tree.pop("files").items()}
        manifest = Manifest(files=files, **tree)
        if not _is_sound(manifest):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamagedManifestError(f"{MANIFEST}: is not what was written") from None
    if str(manifest.update) != checkpoint.name:
        raise DamagedManifestError(
            f"{MANIFEST}: is of update {manifest.update}, not of the folder that it is in"
        )
    return manifest


def _is_sound(manifest: Manifest) -> bool:
    """Whether all values are of their kinds: a checksum that anybody can make vouches for none."""
    counts = [manifest.update, manifest.tokens, *(entry.bytes for entry in manifest.files.values())]
    loss = manifest.validation_cross_entropy
    numbers = [manifest.saved_at, *([] if loss is None else [loss])]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        and all(isinstance(entry.sha256, str) for entry in manifest.files.values())
        and all(map(is_inside, manifest.files))
    )


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a look at a checkpoint found."""

    # None: there is none, or it is damaged.
    manifest: Manifest | None
    # A line for each file that is missing, cut, changed or in excess.
    damage: list[str]

    @property
    def whole(self) -> bool:
        """Everything is as it was written."""
        return self.manifest is not None and not self.damage

    @property
    def unverified(self) -> bool:
        """There is no manifest to compare with."""
        return self.manifest is None and not self.damage


def inspect(checkpoint: Path, contents: bool = True, without: str | None = None) -> Inspection:
    """Compare a checkpoint's files with its manifest.

    Args:
        checkpoint: its folder.
        contents: False compares names and sizes alone.
        without: leave out the files in this folder of the checkpoint.
    """
    try:
        manifest = read_manifest(checkpoint)
    except DamagedManifestError as error:
        return Inspection(None, [str(error)])
    if manifest is None:
        return Inspection(None, [])
    expected = {
        name: entry
        for name, entry in manifest.files.items()
        if without is None or not name.startswith(f"{without}/")
    }
    damage = differences(checkpoint, expected, contents)
    excess = [n for n in files_under(checkpoint) if n not in manifest.files and n != MANIFEST]
    return Inspection(manifest, damage + [f"{name}: does not belong here" for name in excess])


def damage_text(damage: list[str]) -> str:
    """Damaged files in one line; the first few of many."""
    more = f"; and {len(damage) - 4} files more" if len(damage) > 4 else ""
    return "; ".join(damage[:4]) + more


def updates_in(directory: Path) -> list[int]:
    """The updates of the checkpoints in a folder, ascending."""
    # A link is not ours: nothing behind it is read or removed.
    names = (p.name for p in directory.iterdir() if p.is_dir() and not p.is_symlink())
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]*", name))


def leftovers(directory: Path) -> list[Path]:
    """What saves and removals left that were killed; of a process that lives, what it works on."""
    found = (path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
    return sorted(path for path in found if not path.is_symlink())


def best_of(manifests: Iterable[Manifest]) -> int | None:
    """The update with the lowest validation cross-entropy, of equal ones the newest."""
    measured = [m for m in manifests if m.validation_cross_entropy is not None]
    if not measured:
        return None
    return min(measured, key=lambda m: (m.validation_cross_entropy, -m.update)).update


def retained(manifests: Iterable[Manifest], keep: int, every_tokens: int | None) -> set[int]:
    """Which checkpoints stay: the newest, the best, and those kept for good.

    Args:
        manifests: of the checkpoints that are there.
        keep: how many of the newest stay.
        every_tokens: the first checkpoint at or after each multiple of so many tokens stays.

    Returns:
        Their updates.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.update)
    result = {manifest.update for manifest in ordered[-keep:]}
    best = best_of(ordered)
    if best is not None:
        result.add(best)
    if every_tokens is not None:
        reached = 0
        for manifest in ordered:
            multiple = manifest.tokens // every_tokens
            if multiple > reached:
                result.add(manifest.update)
                reached = multiple
    return result


def removable(
    directory: Path, keep: int, every_tokens: int | None, damaged: Container[int] = ()
) -> list[int]:
    """The updates of the checkpoints that retention does not keep, ascending.

    One without a readable manifest, or that is known to be damaged, is left for a person to judge,
    and is none of those kept.
    """
    manifests = []
    for update in updates_in(directory):
        if update in damaged:
            continue
        try:
            manifest = read_manifest(directory / str(update))
        except DamagedManifestError:
            continue
        if manifest is not None:
            manifests.append(manifest)
    kept = retained(manifests, keep, every_tokens)
    return [manifest.update for manifest in manifests if manifest.update not in kept]


def remove(directory: Path, update: int) -> None:
    """Remove a checkpoint so that a kill half-way leaves nothing that looks like one."""
    path = directory / f"{update}.deleting"
    (directory / str(update)).rename(path)
    sync_directory(directory)
    shutil.rmtree(path)
