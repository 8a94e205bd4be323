import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.optim import (
    apply_updates,
    kahan_rounding,
    leaf_key,
    residual_rounding,
    stochastic_round,
    stochastic_rounding,
    update_key,
)
from jaxlm.optim.rounding import join_residual, nested_bits, split_residual

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
        key = update_key(5, "stochastic_rounding", i)
        expected = apply_updates(params, jax.tree.map(lambda g: -g, grads), key)
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(wide(a), wide(b)), params, expected)
        assert params["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, state)


def run(rounding, rate, updates, size=4000):
    """Weights of 1.0 after so many updates of -rate, with the state of the rounding."""
    tx = optax.chain(optax.sgd(rate), rounding)
    params = jnp.ones(size, jnp.bfloat16)

    def step(_, carry):
        changes, state = tx.update(jnp.ones(size), carry[1], carry[0])
        return optax.apply_updates(carry[0], changes), state

    params, state = jax.jit(lambda c: jax.lax.fori_loop(0, updates, step, c))(
        (params, tx.init(params))
    )
    return wide(params).astype(np.float64), state[1]


@pytest.mark.parametrize(("rate", "updates"), [(1e-4, 1000), (3e-6, 6000)])
def test_small_updates_by_rounding(rate, updates):
    """Where weights of 1 end, and how far apart.

    Noise grows like the root of the distance gone times the step: 2^-8 below 1 in bf16, 1/256 of
    that in 24 bits. Kahan has none, but the compensation has eight bits too, so that small updates
    are rounded and the smallest lost.
    """
    gone = updates * round(rate * 2**24) / 2**24  # float32 itself has steps of 2^-24 below 1
    noise = np.sqrt(gone * 2**-8)
    end, _ = run(stochastic_rounding(0), rate, updates)
    assert end.std() == pytest.approx(noise, rel=0.1)
    assert end.mean() == pytest.approx(1 - gone, abs=4 * noise / np.sqrt(4000))

    end, state = run(residual_rounding(0), rate, updates)
    exact = np.asarray(join_residual(jnp.asarray(end, jnp.bfloat16), state.residual), np.float64)
    assert 0 < exact.std() < 1.1 * noise / 16
    assert exact.mean() == pytest.approx(1 - gone, abs=4 * noise / 16 / np.sqrt(4000))
    assert np.abs(end - exact).max() <= 2**-9  # the model's weight is the nearest bf16

    end, state = run(kahan_rounding(), rate, updates)
    lost = np.abs(end + wide(state.compensation) - (1 - gone)).max() / gone
    assert lost < 0.01 if rate == 1e-4 else 0.5 < lost < 1


def test_24_bits_are_split_and_joined_exactly():
    """Every exponent, both signs: the nearest bf16, and the number rounded to 24 bits."""
    rng = np.random.default_rng(0)
    x = (rng.uniform(1, 2, 50_000) * 2.0 ** rng.integers(-120, 127, 50_000)).astype(np.float32)
    x *= rng.choice([-1, 1], x.size).astype(np.float32)
    down, up = (split_residual(jnp.asarray(x), jnp.full(x.shape, n, jnp.uint8)) for n in (0, 255))
    low, high = np.asarray(join_residual(*down)), np.asarray(join_residual(*up))
    assert np.all(np.abs(low) <= np.abs(x))
    assert np.all(np.abs(high) >= np.abs(x))
    step = 2.0 ** (np.floor(np.log2(np.abs(x.astype(np.float64)))) - 15)
    assert np.all(np.abs(high.astype(np.float64) - low) <= step)
    assert np.array_equal(
        low, np.asarray(join_residual(*split_residual(low, np.full(x.size, 255, np.uint8))))
    )
    half = 2.0 ** (np.floor(np.log2(np.abs(low.astype(np.float64)))) - 8)
    assert np.all(np.abs(wide(down[0]).astype(np.float64) - low) <= half)


def test_24_bits_at_the_ends():
    x = jnp.array([0.0, -0.0, 3.4e38, -3.4e38, jnp.inf, -jnp.inf, jnp.nan, 1e-40])
    weight, residual = split_residual(x, jnp.full(x.shape, 255, jnp.uint8))
    back = np.asarray(join_residual(weight, residual))
    assert np.array_equal(np.signbit(back[:2]), [False, True])
    assert np.all(np.abs(back[:2]) < 1e-43)  # stochastic rounding may leave zero by one step
    assert np.all(np.isfinite(wide(weight)[2:4]))
    assert np.array_equal(back[4:7], wide(x)[4:7], equal_nan=True)


@pytest.mark.parametrize("rounding", [kahan_rounding(), residual_rounding(3)])
def test_plain_apply_updates_lands_on_the_rounded_weight(rounding):
    """Weights over many exponents; what is not bfloat16 passes through."""
    params = {
        "w": (jax.random.normal(KEY, (40, 30)) * 10.0 ** jnp.arange(-15, 15)).astype(jnp.bfloat16),
        "scale": jnp.ones(30),
    }
    state = rounding.init(params)
    updates = jax.tree.map(lambda p: (0.7 * p).astype(jnp.float32), params)
    changes, state = jax.jit(rounding.update)(updates, state, params)
    end = optax.apply_updates(params, changes)
    assert np.array_equal(changes["scale"], updates["scale"])
    expected = (wide(params["w"]) + wide(updates["w"])).astype(np.float64)
    assert np.abs(wide(end["w"]) / expected - 1).max() <= 2**-8
    kept = state.compensation["w"] if hasattr(state, "compensation") else None
    whole = (
        wide(end["w"]) + wide(kept)
        if kept is not None
        else join_residual(end["w"], state.residual["w"])
    )
    assert np.abs(np.asarray(whole, np.float64) / expected - 1).max() <= 2**-15
    with pytest.raises(ValueError, match="needs the parameters"):
        rounding.update(updates, state)


def test_any_residual_of_any_finite_weight_is_finite():
    """Also a negative one of zero, which plain addition of a difference can leave."""
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    weight = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    finite = np.isfinite(wide(weight))
    for residual in (-128, -1, 0, 127):
        joined = np.asarray(join_residual(weight, jnp.full(bits.shape, residual, jnp.int8)))
        assert np.all(np.isfinite(joined[finite]))
        assert np.array_equal(joined[~finite], wide(weight)[~finite], equal_nan=True)


@pytest.mark.parametrize(
    ("rounding", "limit"),
    [(stochastic_rounding(0), 0.5), (residual_rounding(0), 2**-6), (kahan_rounding(), 2**-6)],
)
def test_weights_that_cross_zero_stay_right(rounding, limit):
    """Steps of 0.01 up and down for 2,000 updates: the end is the sum of all of them.

    Weights end up to 1.8 from zero, where bf16 has steps of 2^-7: one at most is lost, or with
    stochastic rounding the root of some hundred of them.
    """
    params = jnp.zeros(4096, jnp.bfloat16)

    def step(i, carry):
        params, state, exact = carry
        u = 0.01 * jax.random.normal(jax.random.fold_in(KEY, i), params.shape)
        changes, state = rounding.update(u, state, params)
        return optax.apply_updates(params, changes), state, exact + u

    start = (params, rounding.init(params), jnp.zeros(4096))
    end, _, exact = jax.jit(lambda c: jax.lax.fori_loop(0, 2000, step, c))(start)
    error = wide(end) - np.asarray(exact)
    assert np.all(np.isfinite(error))
    assert np.abs(error).max() <= limit
    assert abs(error.mean()) <= 4 * max(error.std(), 2**-10) / 64
