"""Checkpoints through Orbax: asynchronous, atomic, parameters apart from optimizer state.

Checkpoint N holds the state after N updates, in `checkpoints/N/`: `params` and `optimizer` as
arrays, and as metadata everything that is not an array: the position in the data, the token
count, the resolved configuration and the data's fingerprint.
"""

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxlm.errors import UserError
from jaxlm.models.build import Params
from jaxlm.training.state import TrainState

_VALIDATION = "validation_cross_entropy"


def _abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


class Checkpoints:
    """The checkpoints of a run. Use as a context manager: leaving it waits for a pending save.

    Args:
        directory: where they are; created if absent.
        keep: how many of the newest are kept, beside the one with the best validation loss.
        read_only: look only. Nothing is created, and what another process is just writing is left
            alone; a writer removes what a killed one left unfinished.
    """

    def __init__(self, directory: Path, keep: int = 1, read_only: bool = False):
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[_VALIDATION],
            reverse=True,  # the policy keeps the end of the order: the lowest loss
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self.directory = directory
        if read_only and not directory.is_dir():
            raise UserError(f"{directory}: no checkpoint has been saved yet")
        # Orbax annotates its policies with a class that its own policies do not accept.
        every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
        kept: Any = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        self._checkpointer = ocp.training.Checkpointer(
            str(directory.absolute()),
            save_decision_policy=every,
            preservation_policy=kept,
            cleanup_tmp_directories=not read_only,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    @property
    def updates(self) -> list[int]:
        """The updates of the checkpoints that are there, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    @property
    def latest(self) -> int | None:
        """The update of the newest checkpoint; None if there is none."""
        return max(self.updates, default=None)

    def save(
        self, update: int, state: TrainState, metadata: dict[str, Any], validation: float | None
    ) -> None:
        """Copy the state off the device and write it in the background.

        A save that failed in the background raises here, at the next save, or on leaving.

        Args:
            update: number of updates the state has seen; nothing happens if it is saved already.
            state: may be donated as soon as this returns.
            metadata: plain values to store beside it.
            validation: validation cross-entropy of this state, if it was measured.
        """
        if update in self.updates:
            return
        self._checkpointer.save_checkpointables_async(
            update,
            {
                "params": state.params,
                "optimizer": {"update": state.update, "opt_state": state.opt_state},
            },
            force=True,
            metrics=None if validation is None else {_VALIDATION: validation},
            custom_metadata=metadata,
        )

    def wait(self) -> None:
        """Wait until pending saves are on disk."""
        self._checkpointer.wait()

    def metadata(self, update: int) -> dict[str, Any]:
        """The plain values stored with a checkpoint."""
        metadata = self._checkpointer.metadata(update).custom_metadata
        assert isinstance(metadata, dict), f"checkpoint {update} was not written by jaxlm"
        return metadata

    def find(self, update: int | None) -> int:
        """The update asked for, or the newest.

        Raises:
            UserError: there is no such checkpoint.
        """
        found = self.latest if update is None else update
        if found is None or found not in self.updates:
            there = ", ".join(map(str, self.updates)) or "none"
            wanted = "no checkpoint" if update is None else f"no checkpoint of update {update}"
            raise UserError(f"{self.directory}: {wanted}; there: {there}")
        return found

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
        try:
            return self._checkpointer.load_checkpointables(update, target)
        except KeyError as error:  # Orbax's NoEntryError, whatever went wrong
            raise RuntimeError(
                f"{self.directory / str(update)}: cannot be read as the state of this "
                f"configuration; if it is damaged, move it away and the same command continues "
                f"from the checkpoint before it ({error.__cause__ or error})"
            ) from error
