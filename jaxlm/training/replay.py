"""Make one update of a run once more, and look closely at its numbers.

The weights of the update are those of the newest checkpoint at or before it, or the initial ones,
and of the updates in between, made again as the run's records say and under the settings of then.
Nothing of the run is written or moved.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import Config
from jaxlm.console import progress
from jaxlm.data.pipeline import device_iterator, open_sources, training_windows
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import UserError
from jaxlm.models.build import Params
from jaxlm.optim import global_norm
from jaxlm.optim.rules import path_name
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.finite import Culprit, first_not_finite
from jaxlm.training.loading import load_resolved
from jaxlm.training.metrics import CHANGES, METRICS, read_records
from jaxlm.training.resume import config_at
from jaxlm.training.rewind import Rewinds
from jaxlm.training.spec import StepSpec, Window, row_keys, step_spec
from jaxlm.training.state import TrainState
from jaxlm.training.step import init_state, loss_sums, train_step


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch of the update gives."""

    number: int
    blocks: list[int]
    # Loss per target token and norm of the summed gradient; NaN or infinite where they are.
    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        """Whether both are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What was found."""

    update: int
    # Updates behind the checkpoint that the weights come from; 0 are the initial ones.
    checkpoint: int
    # Updates made again, the one asked for too, whose loss was not, to the bit, the one on record;
    # first of them.
    differs_from: int | None
    # Parameters that are not finite themselves, by path.
    bad_parameters: list[str]
    micro_batches: list[MicroBatch]
    # In the first micro-batch that is not finite.
    culprit: Culprit | None


class _Run:
    """What a replay needs of a run."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config: Config = load_resolved(directory)
        training = self.config.training
        assert training.updates is not None
        self.changes = read_records(directory / CHANGES)
        data = DataDirectory(Path(self.config.data.directory))
        self.records = read_records(directory / METRICS)
        self.rewinds = Rewinds(directory)
        until = self.rewinds.windows_before(len(self.records))
        sources = open_sources(self.config.data, data, self.config.distillation.cache, until)
        self.windows = training_windows(
            sources,
            self.config.data,
            training.micro_batches,
            training.micro_batch_rows,
            until,
        )
        self.sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def spec_of(self, update: int) -> StepSpec:
        """The step of an update, under the settings of then."""
        config = config_at(self.config, self.changes, update)
        assert config.training.updates is not None
        return step_spec(config, config.model.vocabulary, config.training.updates)

    def state_of(self, update: int) -> tuple[TrainState, int]:
        """The newest whole checkpoint at or before an update, or the state that the run began with.

        That is a function of the settings, so that what came before the first save can be seen.
        """
        with Checkpoints(self.directory / "checkpoints", read_only=True) as checkpoints:
            before = [u for u in checkpoints.updates if u <= update]
            if not before:
                return jax.device_put(init_state(self.spec_of(0)), self.sharding), 0
            found = checkpoints.find(None, at_most=update)
            abstract = jax.eval_shape(lambda: init_state(self.spec_of(found)))
            return checkpoints.restore(found, abstract, self.sharding), found


def replay(directory: Path, update: int) -> Replay:
    """Look at an update of a run.

    Args:
        directory: the run, such as ``runs/quickstart``.
        update: its number, from 0.

    Raises:
        UserError: no run there, or no record of that update.
        Failure: the checkpoints of before are damaged.
    """
    run = _Run(directory)
    if not 0 <= update < len(run.records):
        raise UserError(
            f"{directory}: has the records of {len(run.records)} updates; --update {update} is "
            f"not among them (they count from 0)"
        )
    state, checkpoint = run.state_of(update)
    iterator = device_iterator(run.windows, 1, run.sharding)
    iterator.set_state({"next_index": run.rewinds.windows_before(checkpoint)})
    differs = None
    try:
        with progress(f"Updates from {checkpoint}", update - checkpoint) as advance:
            for number in range(checkpoint, update):
                record = run.records[number]
                run.rewinds.pass_over(iterator, number)
                state, loss = _make(run.spec_of(number), state, next(iterator), record)
                if differs is None and loss != record["loss"]:
                    differs = number
                advance(1, f"update {number}")
        run.rewinds.pass_over(iterator, update)
        window = next(iterator)
    finally:
        iterator.close()
    bad = [
        path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if not bool(jnp.all(jnp.isfinite(leaf)))
    ]
    spec, record = run.spec_of(update), run.records[update]
    micro_batches, culprit = _examine(spec, state, window, record)
    _, loss = _make(spec, state, window, record)
    if differs is None and loss != record["loss"]:
        differs = update
    return Replay(update, checkpoint, differs, bad, micro_batches, culprit)


def _depths(record: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Depth and gradient depth on record, 0 for a Transformer."""
    depth, backprop = record["depth"] or 0, record["backprop_depth"] or 0
    return jnp.asarray(depth, jnp.int32), jnp.asarray(backprop, jnp.int32)


def _make(
    spec: StepSpec, state: TrainState, window: Window, record: dict[str, Any]
) -> tuple[TrainState, float | None]:
    rate = jnp.asarray(record["rate_multiplier"], jnp.float32)
    state, metrics = train_step(spec, state, window, *_depths(record), rate)
    loss = float(metrics.loss)
    return state, loss if math.isfinite(loss) else None


def _examine(
    spec: StepSpec, state: TrainState, window: Window, record: dict[str, Any]
) -> tuple[list[MicroBatch], Culprit | None]:
    """Loss and gradient of each micro-batch, and where the first bad one stops being finite."""
    count, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(count * rows)).reshape(count, rows)
    depth, backprop = _depths(record)

    def loss(params: Params, batch: Window, keys_B: jax.Array) -> jax.Array:
        total, sums = loss_sums(spec, params, batch, keys_B, depth, backprop)
        return total / jnp.maximum(sums.target_tokens, 1.0)

    @jax.jit
    def figures(params: Params, batch: Window, keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch, keys_B)
        return value, global_norm(grads)

    found: list[MicroBatch] = []
    culprit = None
    for number in range(count):
        batch = jax.tree.map(lambda x, number=number: x[number], window)
        value, norm = map(float, figures(state.params, batch, keys[number]))
        blocks = [i for i in np.asarray(batch["block"]).tolist() if i >= 0]
        found.append(MicroBatch(number, blocks, value, norm))
        if culprit is None and not found[-1].finite:
            arguments = (state.params, batch, keys[number])
            culprit = first_not_finite(loss, *arguments) or first_not_finite(
                jax.grad(loss), *arguments
            )
    return found, culprit
