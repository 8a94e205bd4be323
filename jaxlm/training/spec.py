"""What a training step is compiled for, what it reads, and what it reports.

Shape legend: M micro-batches, B rows of a micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import Array

from jaxlm.config import Config, LossConfig, ModelConfig, OptimConfig
from jaxlm.losses import LossSums, LossWeights, TeacherRecords
from jaxlm.models.build import Params

# Purposes that the run's seed is folded with; depth draws have their own generator.
INIT, NOISE, ROUNDING, ACCUMULATION = 0, 1, 2, 3

# A window's arrays, see data/pipeline.py.
Window = dict[str, Array]


class Distillation(NamedTuple):
    """How the divergence from a teacher enters the loss."""

    # Share of the divergence in the loss; the cross-entropy has the rest.
    alpha: float
    # Temperature T of teacher and student.
    temperature: float


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
    # None: windows hold no teacher.
    distillation: Distillation | None = None

    @property
    def temperature(self) -> float:
        """Temperature of the divergence; 1 where there is none."""
        return 1.0 if self.distillation is None else self.distillation.temperature

    @property
    def loss_weights(self) -> LossWeights:
        """Weights of the sums that add up to the optimised loss."""
        if self.distillation is None:
            return LossWeights(1.0, self.loss.z_loss)
        alpha, temperature = self.distillation
        return LossWeights(1.0 - alpha, self.loss.z_loss, alpha * temperature**2)


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
        distillation=(
            None
            if config.distillation.cache is None
            else Distillation(config.distillation.alpha, config.distillation.temperature)
        ),
    )


def teacher_of(window: Window) -> TeacherRecords | None:
    """The teacher's records for the targets of a window, or of a micro-batch of it, if any."""
    if "teacher_ids" not in window:
        return None
    return TeacherRecords(
        window["teacher_ids"], window["teacher_log_probs"], window["teacher_log_tail"]
    )


def optimised_loss(spec: StepSpec, sums: LossSums) -> Array:
    """The sum that is differentiated, from its parts."""
    weights = spec.loss_weights
    if sums.distillation is None:
        return sums.cross_entropy + weights.squared_log_partition * sums.squared_log_partition
    return (
        weights.cross_entropy * sums.cross_entropy
        + weights.squared_log_partition * sums.squared_log_partition
        + weights.distillation * sums.distillation
    )


class StepMetrics(NamedTuple):
    """What a step reports; device scalars that the loop reads one update later."""

    # Optimised loss per target token, in nats: cross-entropy plus weighted z-loss, mixed with the
    # divergence from a teacher where there is one.
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
    # KL(teacher || student) of the tempered buckets per target token, in nats, without T^2.
    distillation: Array | None = None


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
