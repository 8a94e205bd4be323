import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.memory.devices import RTX3090
from jaxlm.memory.plan import compile_for
from jaxlm.optim import accumulate_tokens, adafactor, add_gradients, apply_updates


def feed(tx, grads, tokens, final=None, params=None):
    """Updates of each micro-batch, and the state after the last, compiled as users would."""
    params = jnp.zeros_like(jnp.asarray(grads[0])) if params is None else params
    state = tx.init(params)
    update = jax.jit(tx.update)
    out = []
    for i, (g, n) in enumerate(zip(grads, tokens, strict=True)):
        last = jnp.array(final is not None and i == final)
        updates, state = update(jnp.asarray(g), state, params, target_tokens=n, final=last)
        out.append(float(updates))
    return out, state


def test_losses_of_2_over_100_and_4_over_300_tokens_are_3_5_together():
    updates, _ = feed(accumulate_tokens(optax.sgd(1.0), 2), [200.0, 1200.0], [100, 300])
    assert updates == [0.0, -3.5]


def test_ten_micro_batches_in_windows_of_four():
    """Three updates: means of 4, 4 and, ended early, the true mean of 2."""
    sums = [float(i) for i in range(1, 11)]
    tx = accumulate_tokens(optax.sgd(1.0), 4)
    updates, state = feed(tx, sums, [2] * 10, final=9)
    assert updates == [0, 0, 0, -10 / 8, 0, 0, 0, -26 / 8, 0, -19 / 4]
    assert int(state.updates) == 3
    assert int(state.micro_batches) == 0


def test_the_inner_state_and_schedule_advance_once_per_window():
    tx = accumulate_tokens(optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})), 2)
    updates, state = feed(tx, [1.0] * 6, [1] * 6)
    assert updates == [0, -1.0, 0, -0.5, 0, -0.25]
    assert int(state.inner[1].count) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_bad_micro_batch_costs_its_window(bad, dtype):
    tx = accumulate_tokens(optax.sgd(1.0), 2, accumulator_dtype=dtype)
    updates, state = feed(tx, [bad, 1, 1, 1, 1, 1], [1] * 6)
    assert updates == [0, 0, 0, -1.0, 0, -1.0]
    assert (int(state.updates), int(state.nonfinite_windows)) == (2, 1)


def test_a_sum_that_overflows_costs_its_window_too():
    updates, state = feed(accumulate_tokens(optax.sgd(1.0), 2), [3e38, 3e38, 1, 1], [1] * 4)
    assert updates == [0, 0, 0, -1.0]
    assert int(state.nonfinite_windows) == 1


def test_a_bad_token_count_costs_its_window():
    updates, _ = feed(accumulate_tokens(optax.sgd(1.0), 1), [1.0, 1.0], [np.nan, 1])
    assert updates == [0, -1.0]


def test_a_window_without_target_tokens_makes_no_update_and_is_counted():
    tx = accumulate_tokens(optax.adam(1.0), 2)
    updates, state = feed(tx, [0.0, 0.0, 1.0, 0.0], [0, 0, 5, 0])
    assert updates[:3] == [0, 0, 0]
    assert updates[3] == pytest.approx(-1.0, rel=1e-4)  # Adam's first step
    assert (int(state.empty_windows), int(state.updates), int(state.inner[0].count)) == (1, 1, 1)


def test_equals_one_big_batch():
    """Micro-batches of 1, 17, 0 and 46 tokens through Adafactor, against their sum."""
    params = jax.random.normal(jax.random.key(0), (40, 50))
    parts = [jax.random.normal(jax.random.key(i), (40, 50)) * n for i, n in enumerate([1, 17, 46])]
    grads = [parts[0], parts[1], jnp.zeros_like(params), parts[2]]
    inner = adafactor(1e-2, weight_decay=0.1)
    tx = accumulate_tokens(inner, 4)
    state = tx.init(params)
    for g, n in zip(grads, [1, 17, 0, 46], strict=True):
        updates, state = jax.jit(tx.update)(g, state, params, target_tokens=n)
    expected, _ = inner.update(sum(parts) / 64, inner.init(params), params)
    assert np.abs(updates - expected).max() <= 1e-6 * np.abs(expected).max()


def test_known_ends_run_the_inner_transform_once():
    """Inside one jit: a scan over all but the last micro-batch, then one call, both donated."""
    calls = []

    def count(updates, state, params=None):
        calls.append(1)  # at trace time
        return jax.tree.map(jnp.negative, updates), state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), count)
    tx = accumulate_tokens(inner, accumulator_dtype=jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def window(params, state, grads, tokens):
        def add(state, micro_batch):
            g, n = micro_batch
            return tx.update(g, state, params, target_tokens=n, final=False)[1], None

        state, _ = jax.lax.scan(add, state, (grads[:-1], tokens[:-1]))
        updates, state = tx.update(grads[-1], state, params, target_tokens=tokens[-1], final=True)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(3)
    state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, state = window(params, state, jnp.ones((4, 3)), jnp.array([1, 2, 3, 2]))
    np.testing.assert_allclose(params, -0.5)
    # Its shapes are asked for where it is not run, which traces it but compiles nothing.
    text = jax.jit(lambda g, s, p: tx.update(g, s, p, target_tokens=1, final=False)[0]).lower(
        jnp.ones(3), state, params
    )
    assert "negate" not in text.as_text()


def test_every_and_tokens_are_checked():
    with pytest.raises(ValueError, match=r"every \(0\) must be at least 1"):
        accumulate_tokens(optax.sgd(1.0), 0)
    tx = accumulate_tokens(optax.sgd(1.0))
    with pytest.raises(ValueError, match="target_tokens="):
        tx.update(jnp.ones(()), tx.init(jnp.ones(())))


def test_a_bfloat16_sum_of_512_micro_batches_is_unbiased():
    """Gradients with a common part a tenth of their noise, 200,000 numbers.

    The projection of the bf16 sum on the float32 sum is within 0.05 % of 1; rounding to nearest
    loses more, because late gradients are small beside the sum. The error is about 3 %.
    """
    size, count = 200_000, 512
    common = jax.random.normal(jax.random.key(0), (size,)) * 0.1

    def gradient(i):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (size,))
        return (common + noise).astype(jnp.bfloat16)

    def add(sums, i):
        g, key = gradient(i), jax.random.fold_in(jax.random.key(2), i)
        exact, stochastic, nearest = sums
        nearest = (nearest + g).astype(jnp.bfloat16)
        return (exact + g, add_gradients(stochastic, g, key), nearest), None

    zeros = [jnp.zeros(size, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.bfloat16)]
    sums = jax.jit(lambda s: jax.lax.scan(add, s, jnp.arange(count))[0])(tuple(zeros))
    exact, stochastic, nearest = (np.asarray(s, np.float64) for s in sums)

    def projection(x):
        return x @ exact / (exact @ exact)

    assert abs(projection(stochastic) - 1) < 5e-4
    assert abs(projection(nearest) - 1) > abs(projection(stochastic) - 1)
    assert 0.01 < np.linalg.norm(stochastic - exact) / np.linalg.norm(exact) < 0.05


def test_memory_at_3_48_billion_parameters_on_an_rtx_3090():
    """bf16 weights, accumulator and gradients, Adafactor: three times 2 bytes and 0.3 GiB.

    `optax.MultiSteps` around the same transform, beside it, needs over 10 GiB more.
    """
    shapes = {
        "embedding": (100_352, 3072),
        "attention": (28, 3072, 12_288),
        "gate": (28, 3072, 8192),
        "up": (28, 3072, 8192),
        "down": (28, 8192, 3072),
    }
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    count = sum(p.size for p in params.values())
    tx = accumulate_tokens(adafactor(1e-3, weight_decay=0.1), 64, accumulator_dtype=jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)

    def update(params, state, grads, tokens, number):
        updates, state = tx.update(grads, state, params, target_tokens=tokens)
        key = jax.random.fold_in(jax.random.key(0), number)
        return apply_updates(params, updates, key), state

    tokens = jax.ShapeDtypeStruct((), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for(RTX3090, update, params, state, params, tokens, number, donate=(0, 1))
    assert peak(compiled) <= 3 * 2 * count + 0.3 * 2**30

    stock = optax.MultiSteps(optax.adafactor(1e-3), 64)

    def reference(params, state, grads):
        updates, state = stock.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(stock.init, params)
    compiled = compile_for(RTX3090, reference, params, state, params, donate=(0, 1))
    assert peak(compiled) > 29 * 2**30


def peak(compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
