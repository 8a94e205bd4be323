"""What a training step is compiled for, what it reads, and what it reports.

Shape legend: M micro-batches, B rows of a micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import Array

from jaxlm.config import Config, LossConfig, ModelConfig, OptimConfig
from jaxlm.losses import LossSums
from jaxlm.models.build import Params

# Purposes that the run's seed is folded with; depth draws have their own generator.
INIT, NOISE, ROUNDING, ACCUMULATION = 0, 1, 2, 3

# A window's arrays, see data/pipeline.py.
Window = dict[str, Array]


@dataclass(frozen=True)
class StepSpec:
    """The settings that are compiled into a training step: equal specs share one compilation."""

    model: ModelConfig
    loss: LossConfig
    optim: OptimConfig
    # Horizon of the learning-rate schedule.
    updates: int
    # Micro-batches an update.
    micro_batches: int
    # Tokens an update.
    window_tokens: int
    # Mean training depth; scales the init.
    expected_depth: float
    # Static bound of the gradient depth.
    max_backprop_depth: int
    # The run's seed.
    seed: int
    # Engine: after_backward or in_backward.
    update: str = "after_backward"
    # Where in_backward keeps the inputs of layers: device or host.
    block_inputs: str = "device"


def step_spec(config: Config, vocabulary_size: int, updates: int) -> StepSpec:
    """The spec of a run whose data has `vocabulary_size` entries and which takes `updates`."""
    return StepSpec(
        model=replace(config.model, vocabulary_size=vocabulary_size),
        loss=config.loss,
        optim=config.optim,
        updates=updates,
        micro_batches=config.training.micro_batches,
        window_tokens=config.training.window_rows * config.data.sequence_length,
        expected_depth=config.depth.mean,
        max_backprop_depth=config.depth.max_backprop,
        seed=config.run.seed,
        update=config.training.update,
        block_inputs=config.training.block_inputs,
    )


class StepMetrics(NamedTuple):
    """What a step reports; device scalars that the loop reads one update later."""

    # Optimised loss per target token: cross-entropy plus weighted z-loss, in nats.
    loss: Array
    # Cross-entropy per target token, in nats.
    cross_entropy: Array
    # Positions that carried loss.
    target_tokens: Array
    # Norm of the averaged gradient before clipping.
    grad_norm: Array
    # Norm of the change made to the weights; 0 for a skipped update.
    update_norm: Array
    # The same of the recurrent core's weights alone; 0 for a model without one.
    core_update_norm: Array
    # Learning rate applied, multiplier included; 0 for a skipped update.
    learning_rate: Array
    # Whether the weights changed.
    applied: Array
    # Whether loss and gradient were all finite.
    finite: Array
    # Layers that kept their weights because their own gradient was not finite (in_backward), int32.
    kept_layers: Array
    # Block ids the step consumed, [M, B].
    blocks: Array


class Outcome(NamedTuple):
    """What an engine makes of a window."""

    # New parameters and optimizer state, or the old ones.
    params: Params
    opt_state: Any
    # Optimised loss summed over target tokens, and its parts.
    total: Array
    sums: LossSums
    # See StepMetrics.
    grad_norm: Array
    update_norm: Array
    core_update_norm: Array
    finite: Array
    applied: Array
    kept_layers: Array


def row_keys(seed: int, update: int | Array, rows: Array) -> Array:
    """One random key per row: a function of (seed, update, the row's index in its window)."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), NOISE), update)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows.reshape(-1))
