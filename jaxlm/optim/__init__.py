"""Optax transforms and schedules. This package imports jax and optax only."""

from jaxlm.optim.clipping import ClipByGlobalNormState, clip_by_global_norm, global_norm
from jaxlm.optim.rules import match_rules
from jaxlm.optim.schedules import warmup_constant, warmup_cosine, warmup_stable_decay

__all__ = [
    "ClipByGlobalNormState",
    "clip_by_global_norm",
    "global_norm",
    "match_rules",
    "warmup_constant",
    "warmup_cosine",
    "warmup_stable_decay",
]
