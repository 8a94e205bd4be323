"""How many core steps an update takes: a pure function of (seed, update)."""

import math
from statistics import NormalDist

import numpy as np

from jaxlm.config import DepthConfig

_PURPOSE = 0x6465707468  # "depth": keeps this stream apart from any other use of the same seed


def _uniforms(seed: int, update: int) -> tuple[float, float]:
    """Two independent numbers in (0, 1) that belong to (seed, update).

    Philox is counter-based and its raw stream is frozen by NumPy, unlike the streams of
    Generator's distributions; the distributions below are inverted by hand for that reason.
    """
    words = np.random.Philox(key=np.array([seed, _PURPOSE], np.uint64), counter=update).random_raw(
        2
    )
    first, second = ((int(word) >> 11) + 0.5 for word in words)
    return first / 2**53, second / 2**53


def _poisson(rate: float, uniform: float) -> int:
    """The smallest n with P(Poisson(rate) <= n) >= uniform."""
    n, log_probability, total = 0, -rate, math.exp(-rate)
    while total < uniform and n < rate + 40 * math.sqrt(rate + 1):
        n += 1
        log_probability += math.log(rate / n)
        total += math.exp(log_probability)
    return n


def curriculum_mean(config: DepthConfig, update: int) -> float:
    """Mean depth asked for at an update: grows linearly from the minimum, then stays."""
    if update >= config.curriculum_updates:
        return config.mean
    progress = update / config.curriculum_updates
    return config.minimum + (config.mean - config.minimum) * progress


def draw_uncapped(config: DepthConfig, seed: int, update: int) -> int:
    """Draw the depth of an update before it is limited to [minimum, maximum].

    fixed: the mean, rounded. uniform: integers from minimum to 2 * mean - minimum. Huginn's
    log-normal Poisson: 1 + Poisson(exp(tau)) with tau ~ Normal(log(mean - 1) - sigma^2 / 2,
    sigma), whose mean is exactly `mean`: the +1 is taken from the rate.
    """
    mean = curriculum_mean(config, update)
    if config.distribution == "fixed":
        return round(mean)
    first, second = _uniforms(seed, update)
    if config.distribution == "uniform":
        # During a curriculum the upper end moves between integers; its fraction is dithered.
        span = 2 * (mean - config.minimum)
        whole = math.floor(span)
        upper = whole + (1 if second < span - whole else 0)
        return config.minimum + min(upper, int(first * (upper + 1)))
    if mean <= 1.0:
        return 1
    normal = NormalDist(math.log(mean - 1.0) - config.sigma**2 / 2, config.sigma or 1e-300)
    return 1 + _poisson(math.exp(normal.inv_cdf(first)), second)


def draw_depth(config: DepthConfig, seed: int, update: int) -> int:
    """Depth of an update, within [minimum, maximum]; one for all its micro-batches."""
    return min(max(draw_uncapped(config, seed, update), config.minimum), config.maximum)
