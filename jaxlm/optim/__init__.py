"""Optax transforms and schedules. This package imports jax and optax only."""

from jaxlm.optim.adafactor import (
    FactoredRmsState,
    adafactor,
    scale_by_factored_rms,
    scale_by_param_rms,
)
from jaxlm.optim.clipping import ClipByGlobalNormState, clip_by_global_norm, global_norm
from jaxlm.optim.rounding import (
    StochasticRoundingState,
    apply_updates,
    leaf_key,
    stochastic_round,
    stochastic_rounding,
)
from jaxlm.optim.rules import match_rules
from jaxlm.optim.schedules import warmup_constant, warmup_cosine, warmup_stable_decay

__all__ = [
    "ClipByGlobalNormState",
    "FactoredRmsState",
    "StochasticRoundingState",
    "adafactor",
    "apply_updates",
    "clip_by_global_norm",
    "global_norm",
    "leaf_key",
    "match_rules",
    "scale_by_factored_rms",
    "scale_by_param_rms",
    "stochastic_round",
    "stochastic_rounding",
    "warmup_constant",
    "warmup_cosine",
    "warmup_stable_decay",
]
