"""A finished or interrupted run's weights, for evaluation and generation."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxlm.config import Config, load
from jaxlm.data.pipeline import fingerprint_of
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import UserError
from jaxlm.models.build import Params
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.resume import data_changes
from jaxlm.training.spec import step_spec
from jaxlm.training.step import init_state


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """What :func:`load_weights` reads."""

    # The run's resolved configuration.
    config: Config
    # Updates behind the weights.
    update: int
    # Parameters on the default device.
    params: Params
    # The fingerprint of the data they were trained on.
    data_fingerprint: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LoadedRun(LoadedWeights):
    """What :func:`load_run` reads."""

    # The data it was trained on, compared by fingerprint.
    data: DataDirectory


def load_resolved(directory: Path) -> Config:
    """The resolved configuration that a run wrote into its directory."""
    if not (directory / "config.yaml").is_file():
        raise UserError(f"{directory}: not a run (it has no config.yaml)")
    return load([directory / "config.yaml"])


def load_weights(directory: Path, update: int | None = None) -> LoadedWeights:
    """Read the configuration and the weights of a run; its data need not be there.

    Args:
        directory: the run, such as ``runs/quickstart``.
        update: which checkpoint; None takes the newest that is whole.

    Raises:
        UserError: no run there, or no such checkpoint.
        Failure: damaged checkpoints.
    """
    config = load_resolved(directory)
    assert config.training.updates is not None
    spec = step_spec(config, config.model.vocabulary, config.training.updates)
    abstract = jax.eval_shape(lambda: init_state(spec)).params
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        found = checkpoints.find(update, params_only=True)
        params = checkpoints.restore_params(found, abstract, sharding)
        fingerprint = checkpoints.metadata(found)["data_fingerprint"]
    return LoadedWeights(config, found, params, fingerprint)


def read_fingerprint(directory: Path) -> dict[str, Any]:
    """The fingerprint of the data that a run's newest whole checkpoint was trained on.

    Raises:
        UserError, Failure: as :func:`load_weights`.
    """
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        found = checkpoints.find(None, params_only=True)
        return checkpoints.metadata(found)["data_fingerprint"]


def load_run(directory: Path, update: int | None = None) -> LoadedRun:
    """Read the configuration and the weights of a run, and open its data.

    Args:
        directory: the run.
        update: as for :func:`load_weights`.

    Raises:
        UserError: as :func:`load_weights`, or data that is not the run's.
        Failure: damaged checkpoints.
    """
    loaded = load_weights(directory, update)
    config, fingerprint = loaded.config, loaded.data_fingerprint
    data = DataDirectory(Path(config.data.directory))
    # Sources that only training read may be gone.
    now = fingerprint_of(data, config.data)
    stored = {field: fingerprint[field] for field in now}
    changes = data_changes(stored, now, config.data.tokens is not None)
    if changes:
        raise UserError(
            f"{data.directory}: is not the data that {directory} was trained on:\n"
            + "\n".join(changes)
        )
    return LoadedRun(config, loaded.update, loaded.params, fingerprint, data)
