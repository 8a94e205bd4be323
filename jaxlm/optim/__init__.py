"""Optax transforms and schedules. This package imports jax and optax only."""

from jaxlm.optim.accumulation import AccumulateTokensState, accumulate_tokens, add_gradients
from jaxlm.optim.adafactor import (
    FactoredRmsState,
    adafactor,
    decay_of_half_life,
    scale_by_factored_rms,
    scale_by_param_rms,
)
from jaxlm.optim.adamw_8bit import Adam8bitState, adamw_8bit, scale_by_adam_8bit
from jaxlm.optim.clipping import (
    ClipByGlobalNormState,
    clip_by_global_norm,
    clip_scale,
    global_norm,
)
from jaxlm.optim.ema import Ema8bitState, ema_8bit
from jaxlm.optim.float32 import in_float32, to_float32
from jaxlm.optim.guard import SkipNonfiniteState, skip_nonfinite
from jaxlm.optim.muon import muon
from jaxlm.optim.rounding import (
    KahanRoundingState,
    ResidualRoundingState,
    StochasticRoundingState,
    apply_updates,
    kahan_rounding,
    leaf_key,
    residual_rounding,
    stochastic_round,
    stochastic_rounding,
    update_key,
)
from jaxlm.optim.rules import match_rules
from jaxlm.optim.schedules import warmup_constant, warmup_cosine, warmup_stable_decay

__all__ = [
    "AccumulateTokensState",
    "Adam8bitState",
    "ClipByGlobalNormState",
    "Ema8bitState",
    "FactoredRmsState",
    "KahanRoundingState",
    "ResidualRoundingState",
    "SkipNonfiniteState",
    "StochasticRoundingState",
    "accumulate_tokens",
    "adafactor",
    "adamw_8bit",
    "add_gradients",
    "apply_updates",
    "clip_by_global_norm",
    "clip_scale",
    "decay_of_half_life",
    "ema_8bit",
    "global_norm",
    "in_float32",
    "kahan_rounding",
    "leaf_key",
    "match_rules",
    "muon",
    "residual_rounding",
    "scale_by_adam_8bit",
    "scale_by_factored_rms",
    "scale_by_param_rms",
    "skip_nonfinite",
    "stochastic_round",
    "stochastic_rounding",
    "to_float32",
    "update_key",
    "warmup_constant",
    "warmup_cosine",
    "warmup_stable_decay",
]
