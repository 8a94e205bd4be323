import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.optim import apply_updates, leaf_key, stochastic_round, stochastic_rounding
from jaxlm.optim.rounding import nested_bits

KEY = jax.random.key(0)


def wide(x):
    return np.asarray(x, np.float32)


@pytest.mark.parametrize(
    ("weights", "tolerance"),
    [(50_000, 4e-4), pytest.param(1_000_000, 1e-4, marks=pytest.mark.long)],
)
def test_weights_keep_their_small_updates(weights, tolerance):
    """1,000 updates of -1e-4 on 1.0 have mean 0.9; to nearest they stay at 1.0.

    A step moves a weight by 2^-8 with probability 0.0256: after 1,000 of them it has a standard
    deviation of 0.0195, and the mean of 50,000 weights one of 9e-5. (In float32, -1e-4 near 1 is
    1,678 steps of 2^-24, which takes 2e-5 off the mean.)
    """

    def step(i, params):
        return apply_updates(
            {"w": params}, {"w": jnp.full(params.shape, -1e-4)}, jax.random.fold_in(KEY, i)
        )["w"]

    def nearest(i, params):
        return optax.apply_updates(params, jnp.full(params.shape, -1e-4))

    start = jnp.ones((weights,), jnp.bfloat16)
    end = jax.jit(lambda p: jax.lax.fori_loop(0, 1000, step, p))(start)
    assert wide(end).astype(np.float64).mean() == pytest.approx(0.9, abs=tolerance)
    assert np.all(wide(jax.lax.fori_loop(0, 1000, nearest, start)) == 1.0)


def test_each_step_lands_on_one_of_the_two_neighbours():
    x = jax.random.normal(KEY, (10_000,)) * 3
    down = wide(
        jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32
        )
    )
    up = wide(
        jnp.nextafter(
            jnp.asarray(down, jnp.bfloat16), jnp.asarray(np.sign(down) * np.inf, jnp.bfloat16)
        )
    )
    y = wide(stochastic_round(x, KEY))
    assert np.all((y == down) | (y == up))
    assert 0.4 < np.mean(y == up) < 0.6


def test_the_expected_value_is_the_number_itself_over_all_exponents():
    """Mean over 4,000 keys within 4 standard errors, for normal numbers of every exponent."""
    rng = np.random.default_rng(1)
    exponents = np.arange(-120, 120)
    x = rng.uniform(1, 2, exponents.size) * 2.0**exponents * rng.choice([-1, 1], exponents.size)
    x = x.astype(np.float32)
    keys = jax.random.split(KEY, 4000)
    y = np.asarray(jax.vmap(lambda k: stochastic_round(jnp.asarray(x), k))(keys), np.float64)
    gap = 2.0 ** (exponents - 7)
    fraction = (np.abs(x) / gap) % 1
    error = np.sqrt(np.maximum(fraction * (1 - fraction), 1e-12) / 4000) * gap
    assert np.all(np.abs(y.mean(axis=0) - x) <= 4 * error)


def test_what_bfloat16_has_stays_and_what_is_not_finite_passes():
    x = jnp.array([0.0, -0.0, 1.0, -2.5, 3.3895314e38, jnp.inf, -jnp.inf, jnp.nan, 1e-40])
    for i in range(50):
        y = wide(stochastic_round(x, jax.random.fold_in(KEY, i)))
        assert np.array_equal(y[:7], wide(x)[:7])
        assert np.isnan(y[7])
    largest = jnp.full((1000,), 3.4e38)  # beyond the largest bfloat16, and finite
    assert np.all(np.isfinite(wide(stochastic_round(largest, KEY))))


def test_a_stacked_leaf_is_rounded_as_its_layers_are():
    x = jax.random.normal(KEY, (3, 4, 5))
    key = leaf_key(KEY, "blocks/kernel")
    stacked = stochastic_round(x, key)
    for layer in range(3):
        alone = stochastic_round(x[layer], jax.random.fold_in(key, layer))
        assert np.array_equal(wide(stacked[layer]), wide(alone))
    bits = nested_bits(key, (3, 2000))
    assert not np.array_equal(bits[0], bits[1])
    assert np.mean(wide(bits)) == pytest.approx(2**15, rel=0.02)


def test_leaves_and_updates_draw_their_own_bits():
    params = {"a": jnp.ones(1000, jnp.bfloat16), "b": jnp.ones(1000, jnp.bfloat16)}
    updates = {"a": jnp.full(1000, 2e-3), "b": jnp.full(1000, 2e-3)}
    one = apply_updates(params, updates, KEY)
    assert not np.array_equal(wide(one["a"]), wide(one["b"]))
    assert np.array_equal(
        wide(one["a"]), wide(apply_updates({"a": params["a"]}, {"a": updates["a"]}, KEY)["a"])
    )
    assert not np.array_equal(
        wide(one["a"]), wide(apply_updates(params, updates, jax.random.key(1))["a"])
    )


def test_the_chain_form_lands_where_apply_updates_lands():
    tx = optax.chain(optax.sgd(1.0), stochastic_rounding(seed=5))
    params = {
        "w": jax.random.normal(KEY, (40, 30)).astype(jnp.bfloat16),
        "scale": jnp.ones(30),
    }
    state = tx.init(params)
    for i in range(3):
        grads = jax.tree.map(
            lambda p, i=i: jax.random.normal(jax.random.fold_in(KEY, i), p.shape) * 1e-3, params
        )
        key = jax.random.fold_in(jax.random.key(5), i)
        expected = apply_updates(params, jax.tree.map(lambda g: -g, grads), key)
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(wide(a), wide(b)), params, expected)
        assert params["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, state)
