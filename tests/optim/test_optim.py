import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.optim import (
    clip_by_global_norm,
    global_norm,
    match_rules,
    warmup_constant,
    warmup_cosine,
    warmup_stable_decay,
)


@pytest.mark.parametrize(
    "module",
    [
        "accumulation",
        "adafactor",
        "adamw_8bit",
        "clipping",
        "ema",
        "float32",
        "guard",
        "muon",
        "quantization",
        "rounding",
        "rules",
    ],
)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"jaxlm.optim.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def clip(tree, max_norm=1.0):
    tx = clip_by_global_norm(max_norm)
    return tx.update(tree, tx.init(tree))


def test_clipping_by_hand():
    updates, state = clip({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])})
    assert float(state.norm) == 5.0
    assert float(updates["a"][0]) == pytest.approx(0.6)
    assert float(updates["b"][0, 0]) == pytest.approx(0.8)


def test_below_the_limit_passes_bit_for_bit():
    tree = {"a": jnp.array([0.1, 0.2, 0.3])}
    assert np.array_equal(clip(tree)[0]["a"], tree["a"])
    assert float(clip(tree, float("inf"))[1].norm) == pytest.approx(np.sqrt(0.14))


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_zero_stays_zero(max_norm):
    updates, state = clip({"a": jnp.zeros(3)}, max_norm)
    assert np.array_equal(updates["a"], np.zeros(3))
    assert float(state.norm) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_reported_and_never_clipped(bad):
    tree = {"a": jnp.array([bad, 1.0]), "b": jnp.array([1.0, 1.0])}
    updates, state = clip(tree)
    assert not np.isfinite(state.norm)
    assert np.array_equal(updates["b"], tree["b"])
    assert np.array_equal(updates["a"], tree["a"], equal_nan=True)


def test_norm_of_bfloat16_is_computed_in_float32():
    # 10,001 ones: a bf16 sum of squares would stall at 256.
    tree = [jnp.ones(10_001, jnp.bfloat16)]
    assert float(global_norm(tree)) == pytest.approx(np.sqrt(10_001), rel=1e-6)
    assert clip(tree)[0][0].dtype == jnp.bfloat16


def test_cosine_by_hand():
    rate = warmup_cosine(1.0, updates=100, warmup_updates=10, end=0.1)
    assert [float(rate(i)) for i in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert float(rate(55)) == pytest.approx((1.0 + 0.1) / 2)  # the middle of 10..100
    assert [float(rate(i)) for i in (100, 150)] == pytest.approx([0.1, 0.1])
    # A quarter of the way: 0.1 + 0.9 (1 + cos(pi / 4)) / 2.
    assert float(rate(32.5)) == pytest.approx(0.868198, rel=1e-5)


def test_no_warm_up():
    assert float(warmup_cosine(1.0, updates=10)(0)) == 1.0
    assert float(warmup_constant(0.3)(0)) == pytest.approx(0.3)


def test_warm_up_longer_than_the_run():
    with pytest.raises(ValueError, match=r"warmup_updates \(10\) must be below updates \(10\)"):
        warmup_cosine(1.0, updates=10, warmup_updates=10)
    with pytest.raises(ValueError, match=r"warmup_updates \(6\) \+ decay_updates \(5"):
        warmup_stable_decay(1.0, updates=10, warmup_updates=6, decay_updates=5)


def test_warm_up_stable_decay_by_hand():
    rate = warmup_stable_decay(2.0, updates=100, warmup_updates=4, decay_updates=20, end=0.4)
    expected = {0: 0.5, 3: 2.0, 4: 2.0, 80: 2.0, 85: 1.6, 90: 1.2, 100: 0.4, 120: 0.4}
    assert {i: round(float(rate(i)), 6) for i in expected} == expected


def test_schedules_run_under_jit():
    rate = warmup_cosine(1e-3, updates=100, warmup_updates=10)
    compiled = jax.jit(rate)
    assert all(float(compiled(i)) == pytest.approx(float(rate(i))) for i in (0, 9, 10, 99))


def test_rules_take_the_first_match_and_must_cover_everything():
    params = {"norm": {"scale": 0}, "mlp": {"kernel": 0}, "odd": 0}
    rules = [("norm/scale$", False), ("kernel$", True)]
    with pytest.raises(ValueError, match="no rule covers the parameters odd"):
        match_rules(params, rules)
    values = match_rules(params, [*rules, ("", None), ("odd", True)])
    assert values == {"norm": {"scale": False}, "mlp": {"kernel": True}, "odd": None}
