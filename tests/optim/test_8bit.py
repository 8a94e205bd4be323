import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.optim import adamw_8bit, ema_8bit, scale_by_adam_8bit
from jaxlm.optim.quantization import dequantize, quantize, spread

KEY = jax.random.key(0)
kinds = pytest.mark.parametrize("largest", [127, 255], ids=["int8", "uint8"])


def numbers(shape, largest):
    """Of very different scale from block to block; none below zero for uint8."""
    x = jax.random.normal(KEY, shape) * 10.0 ** jnp.linspace(-20, 20, shape[-1])
    return jnp.abs(x) if largest == 255 else x


@kinds
@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_error_is_at_most_half_a_step(largest, size):
    """Also where the size is not divisible by the block."""
    x = numbers((3, size), largest)
    codes, scale = quantize(x, 128, largest=largest)
    assert codes.shape == x.shape
    assert scale.shape == (3, -(-size // 128))
    step = np.asarray(spread(scale, 128, size), np.float64) / largest
    error = np.abs(np.asarray(dequantize(codes, scale, 128), np.float64) - np.asarray(x))
    assert np.all(error <= 0.5 * step * (1 + 1e-4))


@kinds
def test_rounded_stochastically_it_is_right_on_average(largest):
    x = numbers((64,), largest)
    keys = jax.random.split(KEY, 20_000)

    def back(key):
        return dequantize(
            *quantize(x, 16, largest=largest, noise=jax.random.uniform(key, (64,))), 16
        )

    got = np.asarray(jax.vmap(back)(keys), np.float64)
    step = np.asarray(spread(quantize(x, 16, largest=largest)[1], 16, 64)) / largest
    assert np.all(np.abs(got - np.asarray(x)) <= step * (1 + 1e-4))
    assert np.all(np.abs(got.mean(axis=0) - np.asarray(x)) <= 4 * 0.5 / np.sqrt(20_000) * step)


@kinds
def test_zero_is_code_zero_and_codes_are_kept(largest):
    zeros = jnp.zeros((2, 200))
    codes, scale = quantize(zeros, 128, largest=largest)
    assert not np.any(codes)
    assert not np.any(dequantize(codes, scale, 128))
    x = numbers((2, 200), largest).at[0, 5].set(0)
    noise = jax.random.uniform(KEY, x.shape, minval=1 / 512, maxval=511 / 512)
    codes, scale = quantize(x, 128, largest=largest, noise=noise)
    assert codes[0, 5] == 0
    # Coded again, with any noise that the transforms draw, numbers that have codes keep them.
    again, _ = quantize(dequantize(codes, scale, 128), 128, largest=largest, noise=noise)
    assert np.array_equal(again, codes)


def test_numbers_too_small_for_a_scale_are_zero():
    codes, scale = quantize(jnp.full((1, 4), 1e-38), 4)
    assert np.all(np.isfinite(dequantize(codes, scale, 4)))
    assert np.all(np.isfinite(np.asarray(scale)))


def test_a_coordinate_without_gradient_does_not_move_in_500_steps():
    params = {"w": jnp.ones((64, 256)), "zero_block": jnp.ones((64, 128))}
    tx = adamw_8bit(1e-2, weight_decay=0.0)

    def step(i, carry):
        params, state = carry
        g = jax.random.normal(jax.random.fold_in(KEY, i), (64, 256)).at[:, 7].set(0)
        grads = {"w": g, "zero_block": jnp.zeros((64, 128))}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    end, state = jax.jit(lambda c: jax.lax.fori_loop(0, 500, step, c))((params, tx.init(params)))
    assert state[0].mu["w"].dtype == jnp.int8
    assert np.all(np.asarray(end["w"])[:, 7] == 1.0)
    assert np.all(np.asarray(end["zero_block"]) == 1.0)
    assert np.all(np.asarray(end["w"])[:, 8] != 1.0)


def test_the_first_update_is_adams():
    params = jax.random.normal(KEY, (64, 200))
    grads = jax.random.normal(jax.random.key(1), (64, 200))
    ours, theirs = scale_by_adam_8bit(), optax.scale_by_adam()
    expected, _ = theirs.update(grads, theirs.init(params))
    updates, _ = ours.update(grads, ours.init(params))
    np.testing.assert_allclose(updates, expected, rtol=1e-4)


def test_a_second_moment_can_fall():
    """Gradients of scale 1, then 0.1 in one half of each block, at b2 = 0.999 for 4,000 steps each.

    0.999^4000 = 1.8 % of the old squares are left. Rounded to nearest, a root of any code stays:
    half a thousandth of it is less than half a step.
    """
    params = jnp.zeros((32, 128))

    def run(seed):
        tx = scale_by_adam_8bit(b2=0.999, seed=seed)

        def step(state, i):
            scale = jnp.where((i < 4000) | (jnp.arange(128) < 64), 1.0, 0.1)
            g = scale * jax.random.normal(jax.random.fold_in(KEY, i), (32, 128))
            return tx.update(g, state)[1], None

        state, _ = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(8000)))(tx.init(params))
        root = dequantize(state.root_nu, state.root_nu_scale, 128)
        return float(jnp.sqrt(jnp.mean(jnp.square(root[:, 64:]))))

    exact = np.sqrt(0.01 + 0.99 * 0.999**4000)
    assert run(seed=0) == pytest.approx(exact, rel=0.1)
    assert run(seed=None) > 2 * exact


def test_a_root_below_its_resolution_does_not_explode():
    """A coordinate 1/1,000 of its block's largest moves no more than Adam may, 3.2."""
    scale = jnp.ones(128).at[3].set(1e-3)
    tx = scale_by_adam_8bit()
    state = tx.init(jnp.zeros((64, 128)))
    update = jax.jit(tx.update)
    largest = 0.0
    for i in range(100):
        g = scale * jax.random.normal(jax.random.fold_in(KEY, i), (64, 128))
        updates, state = update(g, state)
        if i >= 20:
            largest = max(largest, float(jnp.abs(updates[:, 3]).max()))
    assert largest < 3.2


@pytest.mark.parametrize(
    ("name", "shape", "rules", "coded"),
    [
        ("kernel", (64, 64), (), True),
        ("kernel", (64, 63), (), False),  # below 4,096 elements
        ("scale", (5000,), (), False),
        ("embedding/table", (64, 64), (), False),
        ("blocks/kernel", (8, 64, 64), (), True),
        ("blocks/kernel", (8, 64, 63), (), False),  # one layer is what counts
        ("blocks/scale", (64, 64), (("blocks", 1),), False),
    ],
)
def test_which_leaves_are_coded(name, shape, rules, coded):
    params = {name: jnp.zeros(shape, jnp.bfloat16)}
    dtype = jnp.int8 if coded else jnp.float32
    assert scale_by_adam_8bit(layer_rules=rules).init(params).mu[name].dtype == dtype
    assert ema_8bit(0.9, layer_rules=rules).init(params).mean[name].dtype == dtype


def test_bytes_per_parameter():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    size = lambda tx: sum(  # noqa: E731
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, params))
    )
    assert size(adamw_8bit(1e-3)) / 2**20 == pytest.approx(2 + 8 / 128, abs=1e-4)
    assert size(ema_8bit(0.9)) / 2**20 == pytest.approx(1 + 4 / 128, abs=1e-4)


def test_a_running_mean_is_optax_ema_within_its_steps():
    ours, theirs = ema_8bit(0.9), optax.ema(0.9, debias=False)
    params = jnp.zeros((64, 128))
    state, reference = ours.init(params), theirs.init(params)
    update = jax.jit(ours.update)
    for i in range(50):
        u = jax.random.normal(jax.random.fold_in(KEY, i), (64, 128))
        mean, state = update(u, state)
        expected, reference = theirs.update(u, reference)
    # A step is 1/127 of about 0.7; errors of past steps fade by 0.9 each.
    error = np.asarray(mean - expected)
    assert np.sqrt(np.mean(error**2)) < 0.7 / 127
    assert abs(error.mean()) < 1e-4
    for _ in range(200):  # and what no longer gets updates fades away
        mean, state = update(jnp.zeros_like(params), state)
    assert np.abs(np.asarray(mean)).max() < 1e-6
