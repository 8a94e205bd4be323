"""Checkpoints through Orbax: asynchronous, atomic, checked, parameters apart from optimizer state.

Checkpoint N holds the state after N updates, in `checkpoints/N/`: `params` and `optimizer` as
arrays, as metadata everything that is not an array (the position in the data, the token count, the
resolved configuration and the data's fingerprint), and `manifest.json` with the size and checksum
of every file. Orbax writes `N.saving/`; when that is complete the manifest is added, all is put on
disk, and one rename makes it `N/`. So whatever has a number for its name was written to the end.
To be removed, a checkpoint is first renamed `N.deleting`. A damaged one that training found at its
start is `N.damaged`, which nothing removes.
"""

import contextlib
import json
import logging
import re
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import jax
from orbax.checkpoint import v1 as ocp

from jaxlm.errors import Failure, UserError
from jaxlm.files import append_line, size_text, sync_directory
from jaxlm.models.build import Params
from jaxlm.training.manifest import (
    MANIFEST,
    damage_text,
    inspect,
    leftovers,
    removable,
    remove,
    updates_in,
    write_manifest,
)
from jaxlm.training.metrics import read_records
from jaxlm.training.state import TrainState

# Room for Orbax's metadata beside the arrays.
_OVERHEAD_BYTES = 2**20


def _raised_again(record: logging.LogRecord) -> bool:
    """False for the tracebacks that Orbax's threads log before we get the error itself."""
    return "_SignalingThread.run() raised" not in record.getMessage()


logging.getLogger("absl").addFilter(_raised_again)


def _abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _system_error(error: Exception) -> str | None:
    """What the operating system said, or None: TensorStore wraps that in a ValueError."""
    if isinstance(error, OSError):
        return error.strerror
    found = re.search(r"([^:]+) \[os_error_code=", str(error))
    return found[1].strip() if found else None


def checkpoint_bytes(state: TrainState) -> int:
    """Bytes on disk that a checkpoint of this state, or of one of these shapes, needs at most."""
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return arrays + arrays // 100 + _OVERHEAD_BYTES


class Checkpoints:
    """The checkpoints of a run. Use as a context manager: leaving it waits for a pending save.

    Args:
        directory: where they are; created if absent.
        keep: how many of the newest are kept, beside the one with the best validation loss.
        keep_every_tokens: keep for good the first checkpoint at or after each multiple of so many
            target tokens.
        read_only: look only. Nothing is created, moved or removed, and what another process is
            just writing is left alone; a writer removes what a killed one left unfinished.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 1,
        keep_every_tokens: int | None = None,
        read_only: bool = False,
    ):
        if read_only and not directory.is_dir():
            raise UserError(f"{directory}: no checkpoint has been saved yet")
        self.directory = directory
        self._keep, self._keep_every_tokens = keep, keep_every_tokens
        if not read_only:
            directory.mkdir(parents=True, exist_ok=True)
            for path in leftovers(directory):
                shutil.rmtree(path)
        self._identity = self._identify()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    @property
    def updates(self) -> list[int]:
        """The updates of the checkpoints that are there, ascending."""
        return updates_in(self.directory)

    @property
    def latest(self) -> int | None:
        """The update of the newest checkpoint; None if there is none."""
        return max(self.updates, default=None)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        update: int,
        state: TrainState,
        metadata: dict[str, Any],
        tokens: int,
        validation: float | None,
    ) -> None:
        """Copy the state off the device and write it in the background.

        Args:
            update: number of updates the state has seen; nothing happens if it is saved already.
            state: may be donated as soon as this returns.
            metadata: plain values to store beside it.
            tokens: target tokens the state has seen.
            validation: validation cross-entropy of this state, if it was measured.

        Raises:
            Failure: no room, or the folder cannot be written to; also for the save before this
                one, whose background work raises here, in :meth:`wait`, in :meth:`raise_failed`
                or on leaving.
        """
        self.wait()
        self._check_identity(update)
        if update in self.updates:
            return
        needed = checkpoint_bytes(state)
        free = self.check_space(state)
        if free < needed:
            raise Failure(self._not_saved(update, "no room", needed))
        saving = self._saving(update)
        try:
            # A folder that cannot be written to would be noticed in the background, with a warning
            # of asyncio's beside the error.
            saving.mkdir()
            saving.rmdir()
            response = ocp.save_checkpointables_async(
                str(saving.absolute()),
                {
                    "params": state.params,
                    "optimizer": {"update": state.update, "opt_state": state.opt_state},
                },
                custom_metadata=metadata,
            )
        except (OSError, ValueError) as error:
            self._give_up(update, error, needed)
        self._pending = self._thread.submit(
            self._complete, response, update, tokens, validation, needed
        )

    def check_space(self, state: TrainState) -> int:
        """Warn when the disk has room for less than two more checkpoints. Returns bytes free."""
        needed, free = checkpoint_bytes(state), shutil.disk_usage(self.directory).free
        if free < 2 * needed:
            print(
                f"warning: {self.directory}: {size_text(free)} free; a checkpoint needs up to "
                f"{size_text(needed)}, and is written before an older one is removed",
                file=sys.stderr,
                flush=True,
            )
        return free

    def wait(self) -> None:
        """Wait until pending saves are on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def raise_failed(self) -> None:
        """Raise what went wrong in a pending save, if something has; does not wait for one."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _identify(self) -> tuple[int, int] | None:
        try:
            found = self.directory.stat()
        except OSError:  # gone, or on a disk that no longer answers
            return None
        return found.st_dev, found.st_ino

    def _check_identity(self, update: int) -> None:
        """Refuse to save into another folder of this name: under a mount point lies one."""
        if self._identify() != self._identity:
            raise Failure(
                f"{self.directory}: is no longer the folder that it was when the run started (was "
                f"a disk unmounted?), so that update {update} is not saved; bring it back, and the "
                f"same command continues"
            )

    def _saving(self, update: int) -> Path:
        return self.directory / f"{update}.saving"

    def _complete(
        self,
        response: ocp.AsyncResponse[None],
        update: int,
        tokens: int,
        validation: float | None,
        needed: int,
    ) -> None:
        """What follows when Orbax has written everything; runs in the background."""
        saving = self._saving(update)
        try:
            response.result()
            self._check_identity(update)
            write_manifest(saving, update, tokens, validation, time.time())
            saving.rename(self.directory / str(update))
            sync_directory(self.directory)
        except (OSError, ValueError) as error:
            self._give_up(update, error, needed)
        except Failure:
            self._remove_misplaced(update)
            raise
        self._remove_old()

    def _remove_misplaced(self, update: int) -> None:
        """Remove what Orbax, which makes folders that are missing, wrote to where no disk is."""
        shutil.rmtree(self._saving(update), ignore_errors=True)
        for folder in (self.directory, self.directory.parent):
            with contextlib.suppress(OSError):  # it holds something, or is not there
                folder.rmdir()

    def _remove_old(self) -> None:
        for update in removable(self.directory, self._keep, self._keep_every_tokens):
            remove(self.directory, update)

    def _give_up(self, update: int, error: Exception, needed: int) -> NoReturn:
        """Free the room that a failed save took, and raise what went wrong as one line."""
        reason = _system_error(error)
        if reason is None:
            raise error
        for path in self.directory.glob(f"{update}.saving*"):
            shutil.rmtree(path, ignore_errors=True)  # what stays is removed at the next start
        raise Failure(self._not_saved(update, reason, needed)) from error

    def _not_saved(self, update: int, reason: str, needed: int) -> str:
        try:
            free = f"{size_text(shutil.disk_usage(self.directory).free)} free"
            latest = self.latest
        except OSError:
            free, latest = "the folder cannot be read", None
        there = "" if latest is None else f" from update {latest}, whose checkpoint is untouched"
        return (
            f"{self.directory / str(update)}: not saved: {reason}; needs up to "
            f"{size_text(needed)}, {free}; repair that, and the same command continues{there}"
        )

    # ------------------------------------------------------------------ reading

    def metadata(self, update: int) -> dict[str, Any]:
        """The plain values stored with a checkpoint."""
        path = str((self.directory / str(update)).absolute())
        metadata = ocp.checkpointables_metadata(path).custom_metadata
        assert isinstance(metadata, dict), f"checkpoint {update} was not written by jaxlm"
        return metadata

    def recover(self, record: Path) -> int | None:
        """The newest whole checkpoint; damaged ones that are newer are moved aside.

        Args:
            record: JSON-lines file that says what was moved.

        Returns:
            Its update; None if there are no checkpoints at all.

        Raises:
            Failure: there are checkpoints, and all are damaged.
        """
        update, damaged = self._newest_whole()
        for number, damage in damaged.items():
            aside = self._aside(number)
            print(f"{self._fallback(number, damage, update)}; moved to {aside}", file=sys.stderr)
            entry = {
                "damaged": number,
                "damage": damage,
                "moved_to": aside.name,
                "continued_from": update,
            }
            # A kill before the move leaves the line: it is true now.
            if not any(entry.items() <= made.items() for made in read_records(record)):
                append_line(record, json.dumps({"time": time.time(), **entry}))
            (self.directory / str(number)).rename(aside)
            sync_directory(self.directory)
        return update

    def find(
        self, update: int | None, params_only: bool = False, at_most: int | None = None
    ) -> int:
        """The update asked for, or the newest that is whole.

        Args:
            update: None for the newest.
            params_only: do not look at the optimizer's state.
            at_most: of the newest: no later one than this.

        Raises:
            UserError: there is no such checkpoint.
            Failure: it is damaged, or all are.
        """
        without = "optimizer" if params_only else None
        if update is None and self.updates:
            found, damaged = self._newest_whole(without, at_most)
            for number, damage in damaged.items():
                print(self._fallback(number, damage, found), file=sys.stderr)
            if found is not None:
                return found
        if update is None or update not in self.updates:
            there = ", ".join(map(str, self.updates)) or "none"
            wanted = "no checkpoint" if update is None else f"no checkpoint of update {update}"
            raise UserError(f"{self.directory}: {wanted}; there: {there}")
        inspection = inspect(self.directory / str(update), without=without)
        if inspection.unverified:
            self._warn_unverified(update)
        damage = inspection.damage
        if damage:
            others = ", ".join(str(other) for other in self.updates if other != update)
            raise Failure(
                f"{self.directory / str(update)}: damaged ({damage_text(damage)}); other "
                f"checkpoints: {others or 'none'}"
            )
        return update

    def _newest_whole(
        self, without: str | None = None, at_most: int | None = None
    ) -> tuple[int | None, dict[int, list[str]]]:
        """The newest checkpoint that is whole, and the damage of those that are newer.

        One that has lost its manifest cannot be compared with anything. It counts as damaged, but
        where no other is whole the newest of these is taken, with a warning.
        """
        damaged: dict[int, list[str]] = {}
        unverified: int | None = None
        for update in reversed(self.updates):
            if at_most is not None and update > at_most:
                continue
            path = self.directory / str(update)
            found = inspect(path, without=without)
            if not path.is_dir():
                # The process that trains has removed it meanwhile: there is a newer one.
                return self._newest_whole(without, at_most)
            if found.whole:
                return update, damaged
            if found.unverified and unverified is None:
                unverified = update
            damaged[update] = found.damage or [f"{MANIFEST}: missing"]
        if unverified is not None:
            self._warn_unverified(unverified)
            return unverified, {u: lines for u, lines in damaged.items() if u > unverified}
        if damaged:
            lines = [f"{update} ({damage_text(damage)})" for update, damage in damaged.items()]
            raise Failure(
                f"{self.directory}: no checkpoint is whole: {', '.join(lines)}; bring one back "
                f"from a copy, or remove {self.directory.parent} to start over"
            )
        return None, {}

    def _warn_unverified(self, update: int) -> None:
        print(
            f"warning: {self.directory / str(update)}: has no {MANIFEST}, so that damage would go "
            f"unnoticed",
            file=sys.stderr,
        )

    def _fallback(self, update: int, damage: list[str], whole: int | None) -> str:
        return (
            f"warning: {self.directory / str(update)}: damaged ({damage_text(damage)}); using "
            f"update {whole} instead"
        )

    def _aside(self, update: int) -> Path:
        path, number = self.directory / f"{update}.damaged", 1
        while path.exists():
            number += 1
            path = self.directory / f"{update}.damaged-{number}"
        return path

    def restore(
        self, update: int, abstract: TrainState, sharding: jax.sharding.Sharding
    ) -> TrainState:
        """Read a whole training state.

        Args:
            update: which checkpoint.
            abstract: shapes and dtypes of the state, from `jax.eval_shape`.
            sharding: where to place every array.
        """
        target = _abstract(abstract, sharding)
        loaded = self._load(
            update,
            {
                "params": target.params,
                "optimizer": {"update": target.update, "opt_state": target.opt_state},
            },
        )
        return TrainState(
            update=loaded["optimizer"]["update"],
            params=loaded["params"],
            opt_state=loaded["optimizer"]["opt_state"],
        )

    def restore_params(
        self, update: int, abstract: Params, sharding: jax.sharding.Sharding
    ) -> Params:
        """Read the parameters alone; the optimizer's state is not touched."""
        return self._load(update, {"params": _abstract(abstract, sharding)})["params"]

    def _load(self, update: int, target: dict[str, Any]) -> dict[str, Any]:
        path = self.directory / str(update)
        try:
            return ocp.load_checkpointables(str(path.absolute()), target)
        except (KeyError, ValueError, OSError) as error:  # KeyError: Orbax's NoEntryError
            if not path.is_dir():
                raise Failure(
                    f"{path}: was removed while it was read; does another process train this run? "
                    f"Try again"
                ) from error
            if isinstance(error, OSError):
                raise
            reason = " ".join(str(error.__cause__ or error).split())  # TensorStore's has many lines
            raise Failure(
                f"{path}: cannot be read as the state of this configuration "
                f"({reason if len(reason) <= 400 else reason[:400] + ' ...'})"
            ) from error
