"""From the configuration to an optax transform."""

from typing import Any, cast

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxlm.config import Config, OptimConfig
from jaxlm.optim import (
    adafactor,
    adamw_8bit,
    clip_by_global_norm,
    decay_of_half_life,
    in_float32,
    kahan_rounding,
    match_rules,
    muon,
    residual_rounding,
    stochastic_rounding,
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

# Which parameters Muon orthogonalises: the matrices of layers and injections. The embedding and the
# output head map between the vocabulary and the model, where single rows are what is learnt.
MATRIX_RULES = (
    (r"(embedding|head)/", False),
    (r"kernel$", True),
    (r"", False),
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


class _ControlledSchedule(optax.WrappedSchedule):
    """A schedule times the multiplier that an update is called with."""

    def __call__(self, state: Any, *, rate_multiplier: ArrayLike = 1.0, **extra_args: Any) -> Array:
        return jnp.asarray(super().__call__(state, **extra_args)) * rate_multiplier


def build_optimizer(
    config: OptimConfig, *, updates: int, micro_batches: int, window_tokens: int, key: Array
) -> optax.GradientTransformationExtraArgs:
    """Clip, optimizer, decay, rate and rounding as one chain; around it MultiSteps, if asked for.

    Args:
        config: the optimizer's settings.
        updates: horizon of the schedule.
        micro_batches: micro-batches an update, for MultiSteps.
        window_tokens: tokens an update, for a half-life in tokens.
        key: typed random key of the rounding.

    Returns:
        A transform whose state is float32 whatever the weights are (but for what the configuration
        stores in fewer bits). Its `update` takes `rate_multiplier`, which scales the rate and with
        it the weight decay. The rate it applied is in its state, see
        :func:`applied_learning_rate`; so is the norm before clipping.
    """

    def decay_mask(params: optax.Params) -> optax.Params:
        return match_rules(params, DECAY_RULES)

    def matrices(params: optax.Params) -> optax.Params:
        return match_rules(params, MATRIX_RULES)

    def chain(learning_rate: Array) -> optax.GradientTransformation:
        decay = {"weight_decay": config.weight_decay, "mask": decay_mask}
        moments = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
        clip = clip_by_global_norm(config.max_norm if config.clip == "global" else float("inf"))
        if config.name == "adamw":
            return optax.chain(clip, optax.adamw(learning_rate, **moments, **decay))
        if config.name == "adamw_8bit":
            return optax.chain(
                clip, adamw_8bit(learning_rate, **moments, **decay, layer_rules=LAYER_RULES)
            )
        if config.name == "muon":
            return optax.chain(clip, muon(learning_rate, matrices, **moments, **decay))
        if config.name == "adafactor":
            half_life = config.half_life_tokens
            return optax.chain(
                clip,
                adafactor(
                    learning_rate,
                    fixed_decay=half_life and decay_of_half_life(half_life, window_tokens),
                    momentum=config.momentum or None,
                    momentum_dtype=config.momentum_dtype,
                    layer_rules=LAYER_RULES,
                    **decay,
                ),
            )
        # optax.adafactor's own weight decay is not multiplied by the learning rate; this one is.
        return optax.chain(
            clip,
            optax.adafactor(learning_rate),
            optax.add_decayed_weights(-learning_rate * config.weight_decay, decay_mask),
        )

    inject = optax.inject_hyperparams(chain, hyperparam_dtype=jnp.dtype(jnp.float32))
    optimizer = optax.chain(
        in_float32(inject(learning_rate=_ControlledSchedule(build_schedule(config, updates)))),
        {
            "stochastic": lambda: stochastic_rounding(key),
            "residual": lambda: residual_rounding(key),
            "kahan": kahan_rounding,
            "nearest": optax.identity,
        }[config.rounding](),
    )
    if config.accumulation == "optax_multisteps":
        steps = optax.MultiSteps(optimizer, micro_batches)
        # Not its gradient_transformation(), which would lose the multiplier on the way.
        optimizer = optax.GradientTransformationExtraArgs(steps.init, cast(Any, steps.update))
    return optax.with_extra_args_support(optimizer)


def describe_optimizer(config: Config) -> str:
    """What a run does to its gradients, in the order in which it does it, in one line."""
    optim, training = config.optim, config.training
    name = optim.name
    if optim.name.startswith("adamw"):
        name += f"(beta1 {optim.beta1:g}, beta2 {optim.beta2:g}, epsilon {optim.epsilon:g})"
    elif optim.name == "muon":
        name += f"(Adam's beta1 {optim.beta1:g}, beta2 {optim.beta2:g})"
    elif optim.name == "adafactor":
        life = optim.half_life_tokens
        name += f"(half-life {life:,} tokens" if life else "(growing beta2"
        name += (
            f", momentum {optim.momentum:g} in {optim.momentum_dtype})" if optim.momentum else ")"
        )
    rate = f"{optim.schedule} rate, peak {optim.learning_rate:g}, warm-up {optim.warmup_updates}"
    parts = [
        {
            "global": f"clip to global norm {optim.max_norm:g}",
            "two_pass": f"clip to global norm {optim.max_norm:g} in a second backward pass",
            "previous_norm": f"scale by {optim.max_norm:g} / the last update's norm above that",
            "rms": "no clipping but each layer's update to a root mean square of 1",
            "off": "no clipping",
        }[optim.clip],
        name,
        f"decay {optim.weight_decay:g} of matrices and embeddings",
        f"{rate} of {training.updates} updates",
    ]
    if training.micro_batches > 1:
        dtype = "float32" if optim.accumulation == "optax_multisteps" else optim.accumulator_dtype
        how = f"sum of {training.micro_batches} micro-batches in {dtype}"
        if optim.accumulation == "optax_multisteps":
            how += " by optax.MultiSteps"
        if training.update == "in_backward":
            how += ", one layer at a time"
        parts.insert(0, f"{how}, divided by target tokens")
    if config.model.param_dtype == "bfloat16":
        parts.append(f"{optim.rounding} rounding to bfloat16")
    return " -> ".join(parts)


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
