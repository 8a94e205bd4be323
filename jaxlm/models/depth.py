"""How many core steps an update takes: a pure function of (seed, update)."""

import math
from statistics import NormalDist

import numpy as np

from jaxlm.config import Config, CurriculumConfig, DepthConfig

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


def curriculum(settings: CurriculumConfig, config: DepthConfig, update: int) -> float:
    """What a curriculum asks for at an update; the gradient depth is still to be rounded."""
    progress = min(update / settings.updates, 1.0)
    share = progress if settings.shape == "linear" else 1.0 - math.sqrt(1.0 - progress)
    if settings.quantity == "mean_depth":
        return config.minimum + (config.mean - config.minimum) * share
    return 1.0 + (config.max_backprop - 1) * share


def planned_depths(config: Config, update: int) -> tuple[float, int]:
    """Mean depth, and bound of the gradient depth, of an update as the curricula have it."""
    planned = {"mean_depth": config.depth.mean, "backprop_depth": config.depth.max_backprop}
    for settings in config.control.controllers:
        if isinstance(settings, CurriculumConfig):
            planned[settings.quantity] = curriculum(settings, config.depth, update)
    return planned["mean_depth"], round(planned["backprop_depth"])


def draw_uncapped(config: DepthConfig, seed: int, update: int, mean: float | None = None) -> int:
    """Draw the depth of an update before it is limited to [minimum, maximum].

    fixed: the mean, rounded. uniform: integers from minimum to 2 * mean - minimum. Huginn's
    log-normal Poisson: 1 + Poisson(exp(tau)) with tau ~ Normal(log(mean - 1) - sigma^2 / 2,
    sigma), whose mean is exactly `mean`: the +1 is taken from the rate.

    Args:
        config: the distribution.
        seed: of the run.
        update: number of the update, from 0.
        mean: the mean at this update, at least `minimum`; None is `config.mean`.
    """
    mean = config.mean if mean is None else mean
    if config.distribution == "fixed":
        return round(mean)
    first, second = _uniforms(seed, update)
    if config.distribution == "uniform":
        # Under control the upper end moves between integers; its fraction is dithered.
        span = 2 * (mean - config.minimum)
        whole = math.floor(span)
        upper = whole + (1 if second < span - whole else 0)
        return config.minimum + min(upper, int(first * (upper + 1)))
    if mean <= 1.0:
        return 1
    normal = NormalDist(math.log(mean - 1.0) - config.sigma**2 / 2, config.sigma or 1e-300)
    return 1 + _poisson(math.exp(normal.inv_cdf(first)), second)


def draw_depth(config: DepthConfig, seed: int, update: int, mean: float | None = None) -> int:
    """Depth of an update, within [minimum, maximum]; one for all its micro-batches."""
    return min(max(draw_uncapped(config, seed, update, mean), config.minimum), config.maximum)
