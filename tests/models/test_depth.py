import math

import numpy as np
import pytest

from jaxlm.config import Config, ControlConfig, CurriculumConfig, DepthConfig
from jaxlm.models.depth import curriculum, draw_depth, draw_uncapped
from jaxlm.models.match import mean_depths


def draws(config, count, seed=5):
    return np.array([draw_uncapped(config, seed, update) for update in range(count)])


def test_the_mean_is_what_was_asked_for():
    assert draws(DepthConfig(mean=6.0), 100_000).mean() == pytest.approx(6.0, abs=0.05)


def test_lognormal_poisson_has_the_variance_of_its_definition():
    # n = 1 + Poisson(L), E[L] = 5, Var[L] = 25 (e^0.25 - 1): Var[n] = 5 + 7.1006 = 12.1006.
    values = draws(DepthConfig(mean=6.0, sigma=0.5), 50_000)
    assert values.var() == pytest.approx(12.1006, rel=0.04)
    # Without spread it is a Poisson: P(n = 1) = exp(-5).
    values = draws(DepthConfig(mean=6.0, sigma=0.0), 50_000)
    assert values.var() == pytest.approx(5.0, rel=0.03)
    assert (values == 1).mean() == pytest.approx(math.exp(-5), abs=0.002)


@pytest.mark.parametrize("mean", [6.0, 3.5])
def test_uniform(mean):
    config = DepthConfig(distribution="uniform", mean=mean, minimum=2)
    values = draws(config, 30_000)
    upper = int(2 * mean - 2)
    assert (values.min(), values.max()) == (2, upper)
    assert values.mean() == pytest.approx(mean, abs=0.05)
    counts = np.bincount(values)[2:]
    assert counts.min() / counts.max() > 0.9


def test_fixed():
    config = DepthConfig(distribution="fixed", mean=4.0)
    assert set(draws(config, 100)) == {4}


def test_draws_are_a_pure_function_of_seed_and_update():
    config = DepthConfig()
    forwards = [draw_depth(config, 1, u) for u in range(50)]
    backwards = [draw_depth(config, 1, u) for u in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [draw_depth(config, 2, u) for u in range(50)]


def test_limits():
    config = DepthConfig(mean=6.0, minimum=4, maximum=8)
    values = {draw_depth(config, 0, update) for update in range(500)}
    assert values == {4, 5, 6, 7, 8}


def test_gradient_depth_never_exceeds_depth():
    config = DepthConfig(backprop=4)
    assert [config.backprop_depth(n) for n in (1, 3, 4, 9)] == [1, 3, 4, 4]
    assert DepthConfig(backprop="full", maximum=12).backprop_depth(9) == 9


def test_curricula_grow_to_their_ends_and_stay():
    config = DepthConfig(mean=6.0, backprop=4)

    def curve(*updates, **settings):
        settings = CurriculumConfig(updates=100, **settings)
        return [curriculum(settings, config, update) for update in updates]

    assert curve(0, 50, 100, 999) == [1.0, 3.5, 6.0, 6.0]
    # 1 - sqrt(1 - 0.75) is 1/2, 1 - sqrt(1 - 0.36) is 1/5.
    assert curve(0, 36, 75, 100, shape="one_minus_sqrt") == pytest.approx([1.0, 2.0, 3.5, 6.0])
    assert curve(0, 50, 100, quantity="backprop_depth") == [1.0, 2.5, 4.0]


def test_draws_follow_another_mean():
    assert draw_depth(DepthConfig(mean=6.0), 0, 0, 1.0) == 1
    for kind in ("lognormal_poisson", "uniform"):
        config = DepthConfig(distribution=kind, mean=6.0)
        halfway = [draw_uncapped(config, seed, 1, 3.5) for seed in range(5000)]
        assert np.mean(halfway) == pytest.approx(3.5, abs=0.15)


def test_depths_that_are_planned_count_the_curricula():
    control = ControlConfig(
        controllers=(
            CurriculumConfig(updates=20),
            CurriculumConfig(updates=10, quantity="backprop_depth"),
        )
    )
    depth = DepthConfig(distribution="fixed", mean=5.0, backprop=3)
    config = Config(depth=depth, control=control)
    # Means 1, 1.2, ... 4.8, 5; bounds 1, 1.2, ... 3: each rounded.
    depths = [min(5, round(1 + 0.2 * u)) for u in range(40)]
    bounds = [min(3, round(1 + 0.2 * u)) for u in range(40)]
    gradient = [min(n, k) for n, k in zip(depths, bounds, strict=True)]
    assert mean_depths(config, 40) == (sum(depths) / 40, sum(gradient) / 40)
