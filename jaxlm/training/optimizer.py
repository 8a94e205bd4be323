"""From the configuration to an optax transform."""

import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.config import OptimConfig
from jaxlm.optim import (
    adafactor,
    clip_by_global_norm,
    match_rules,
    warmup_constant,
    warmup_cosine,
    warmup_stable_decay,
)

# Which parameters weight decay pulls towards zero: matrices and embeddings do, scales and the
# rates of the diagonal injection do not, nor does its input map, which starts at the identity.
DECAY_RULES = (
    (r"norm/scale$", False),
    (r"injection/(step_size|log_rate)$", False),
    (r"injection/input/kernel$", False),
    (r"kernel$", True),
    (r"table$", True),
)

# Parameters of stacked layers, whose first axis is the layer.
LAYER_RULES = ((r"/blocks/", 1),)


def build_schedule(config: OptimConfig, updates: int) -> optax.Schedule:
    """The learning rate of each applied update, from 0 to `updates` - 1."""
    peak, warmup, end = config.learning_rate, config.warmup_updates, config.end_learning_rate
    if config.schedule == "cosine":
        return warmup_cosine(peak, updates=updates, warmup_updates=warmup, end=end)
    if config.schedule == "warmup_stable_decay":
        return warmup_stable_decay(
            peak,
            updates=updates,
            decay_updates=config.decay_updates,
            warmup_updates=warmup,
            end=end,
        )
    return warmup_constant(peak, warmup_updates=warmup)


def build_optimizer(
    config: OptimConfig, updates: int, micro_batches: int
) -> optax.GradientTransformationExtraArgs:
    """Clip, optimizer, decay and rate as one chain; around it MultiSteps, if asked for.

    Args:
        config: the optimizer's settings.
        updates: horizon of the schedule.
        micro_batches: micro-batches an update, for MultiSteps.

    Returns:
        A transform for float32 gradients and parameters. The rate it applied is in its state, see
        :func:`applied_learning_rate`; so is the norm before clipping.
    """

    def chain(learning_rate: Array) -> optax.GradientTransformation:
        def decay_mask(params: optax.Params) -> optax.Params:
            return match_rules(params, DECAY_RULES)

        clip = clip_by_global_norm(config.max_norm if config.clip == "global" else float("inf"))
        if config.name == "adamw":
            return optax.chain(
                clip,
                optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
                optax.add_decayed_weights(config.weight_decay, decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            )
        if config.name == "adafactor":
            return optax.chain(
                clip,
                adafactor(
                    learning_rate,
                    weight_decay=config.weight_decay,
                    mask=decay_mask,
                    layer_rules=LAYER_RULES,
                ),
            )
        # optax.adafactor's own weight decay is not multiplied by the learning rate; this one is.
        return optax.chain(
            clip,
            optax.adafactor(learning_rate),
            optax.add_decayed_weights(-learning_rate * config.weight_decay, decay_mask),
        )

    inject = optax.inject_hyperparams(chain, hyperparam_dtype=jnp.dtype(jnp.float32))
    optimizer = inject(learning_rate=build_schedule(config, updates))
    if config.accumulation == "optax_multisteps":
        optimizer = optax.MultiSteps(optimizer, micro_batches).gradient_transformation()
    return optax.with_extra_args_support(optimizer)


def applied_learning_rate(opt_state: optax.OptState) -> Array:
    """The rate that the last applied update used."""
    return _only(opt_state, "learning_rate")


def norm_before_clipping(opt_state: optax.OptState) -> Array:
    """Global norm of the last gradient that reached the chain, before clipping."""
    return _only(opt_state, "norm")


def _only(opt_state: optax.OptState, name: str) -> Array:
    def is_scalar(path: object, value: object) -> bool:
        del path
        return hasattr(value, "shape")

    return optax.tree_utils.tree_get(opt_state, name, filtering=is_scalar)
