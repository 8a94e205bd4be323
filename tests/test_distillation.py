"""Distillation: the divergence over buckets, and both engines with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model

from jaxlm.config import Config, LossConfig, OptimConfig
from jaxlm.losses import (
    LossWeights,
    TeacherRecords,
    chunked_cross_entropy,
    cross_entropy_gradients,
    top_log_probabilities,
)
from jaxlm.memory.devices import RTX3090
from jaxlm.memory.plan import compile_for
from jaxlm.training.spec import Distillation, StepSpec, step_spec
from jaxlm.training.step import init_state, train_step

ALPHA = 0.7


def log_softmax(x):
    top = x.max(axis=-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True))


def bucketed(log_p, ids):
    """Log-masses [N, k + 1] of the tokens named and of all others, from those of all, [N, V]."""
    chosen = np.take_along_axis(log_p, ids, -1)
    rest = np.exp(log_p)
    np.put_along_axis(rest, ids, 0.0, -1)
    with np.errstate(divide="ignore"):
        return np.concatenate([chosen, np.log(rest.sum(-1, keepdims=True))], -1)


def reference(student, teacher, temperature):
    """KL of tempered buckets [N], plain NumPy in float64; both are log-masses [N, k + 1]."""
    p, q = (np.exp(x) ** (1 / temperature) for x in (teacher, student))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0.0).sum(-1)


def plain_loss(hidden, head, targets, mask, ids, teacher, temperature, alpha):
    """The mixture by plain jax, differentiated by jax: the independent form of the gradient."""
    log_q = jax.nn.log_softmax(hidden @ head.T)
    rows = jnp.arange(len(targets))
    named = jnp.zeros(log_q.shape, bool).at[rows[:, None], ids].set(True)
    tail = jnp.log(jnp.where(named, 0.0, jnp.exp(log_q)).sum(-1, keepdims=True))
    student = jnp.concatenate([jnp.take_along_axis(log_q, ids, -1), tail], -1)
    p = jax.nn.softmax(teacher / temperature)
    log_p, log_student = (jax.nn.log_softmax(x / temperature) for x in (teacher, student))
    divergence = (p * (log_p - log_student)).sum(-1)
    loss = alpha * temperature**2 * divergence - (1 - alpha) * log_q[rows, targets]
    return (loss * mask).sum()


def problem(tokens=20, width=12, vocabulary=40, k=5, dtype=np.float64, seed=0):
    """Student, teacher's log-masses, and what the loss reads, with masked tokens among them."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, width))
    head = rng.normal(size=(vocabulary, width))
    log_p = log_softmax(2 * rng.normal(size=(tokens, vocabulary)))
    ids = np.argsort(-log_p, -1)[:, :k].astype(np.uint16)
    masses = bucketed(log_p, ids)
    mask = np.arange(tokens) % 4 != 3
    targets = rng.integers(0, vocabulary, tokens)
    records = TeacherRecords(
        jnp.asarray(ids), jnp.asarray(masses[:, :-1], dtype), jnp.asarray(masses[:, -1], dtype)
    )
    arrays = [jnp.asarray(x, dtype) for x in (hidden, head)]
    return (*arrays, jnp.asarray(targets), jnp.asarray(mask)), records, masses


def value_and_grads(arrays, records, temperature, weights, chunk=7):
    def loss(hidden, head):
        sums = chunked_cross_entropy(
            hidden, head, *arrays[2:], chunk_tokens=chunk, teacher=records, temperature=temperature
        )
        parts = (sums.cross_entropy, sums.squared_log_partition, sums.distillation)
        return sum(w * s for w, s in zip(weights, parts, strict=True)), sums

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arrays[:2])


def test_the_worked_example():
    """p = (.6, .3, .1), q = (.9, .05, .05): .3636 nats, and .3112 with k = 1 and the rest."""
    q, p = np.log([[0.9, 0.05, 0.05]]), np.log([[0.6, 0.3, 0.1]])
    for k, tail, expected in ((3, -np.inf, 0.3636), (1, np.log(0.4), 0.3112)):
        records = TeacherRecords(jnp.arange(k)[None], jnp.asarray(p[:, :k]), jnp.array([tail]))
        sums = chunked_cross_entropy(
            jnp.ones((1, 1)), jnp.asarray(q).T, jnp.zeros(1, int), jnp.ones(1), chunk_tokens=1,
            teacher=records,
        )  # fmt: skip
        assert float(sums.distillation) == pytest.approx(expected, abs=5e-5)
    by_hand = 0.6 * np.log(0.6 / 0.9) + 0.4 * np.log(0.4 / 0.1)
    assert float(sums.distillation) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.5), (5, 1.0), (7, 3.0), (40, 2.0)])
def test_equals_a_float64_reference(k, temperature):
    """Value and gradient, k = V with its empty rest included."""
    with jax.enable_x64(True):
        arrays, records, masses = problem(k=k)
        hidden, head, targets, mask = arrays
        weights = (1 - ALPHA, 0.0, ALPHA * temperature**2)
        (loss, sums), grads = value_and_grads(arrays, records, temperature, weights)
        student = bucketed(log_softmax(np.asarray(hidden @ head.T)), np.asarray(records.ids))
        expected = (reference(student, masses, temperature) * np.asarray(mask)).sum()
        assert float(sums.distillation) == pytest.approx(expected, rel=1e-10)
        if k == 40:
            return  # log(0) has no gradient in the plain form; the next test has this case
        ids = np.asarray(records.ids).astype(int)
        plain = jax.value_and_grad(plain_loss, argnums=(0, 1))
        value, plain_grads = plain(
            hidden, head, targets, mask, ids, jnp.asarray(masses), temperature, ALPHA
        )
        assert float(loss) == pytest.approx(float(value), rel=1e-10)
        for got, wanted in zip(grads, plain_grads, strict=True):
            assert np.abs(got - wanted).max() <= 1e-10 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_naming_every_token_is_the_full_divergence(dtype):
    """KL of softmax(z / T) per token to 1e-6, and T^2 times its gradient, which is T (q - p)."""
    temperature = 2.0
    with jax.enable_x64(dtype == np.float64):
        (hidden, head, targets, mask), records, _ = problem(k=40, dtype=dtype)
        rng = np.random.default_rng(5)
        teacher = rng.normal(size=(20, 40))
        log_p = log_softmax(teacher)
        ids = np.tile(np.arange(40), (20, 1))
        records = TeacherRecords(ids, jnp.asarray(log_p, dtype), jnp.full(20, -jnp.inf, dtype))
        weights = (0.0, 0.0, temperature**2)
        arrays = (hidden, head, targets, mask)
        (_, sums), (hidden_grad, _) = value_and_grads(arrays, records, temperature, weights)
        z = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
        p, q = (np.exp(log_softmax(x / temperature)) for x in (teacher, z))
        each = (p * np.log(p / q)).sum(-1)
        mean = float(sums.distillation) / 15
        assert mean == pytest.approx(each[np.asarray(mask)].mean(), abs=1e-6)
        expected = temperature * (q - p) @ np.asarray(head, np.float64) * np.asarray(mask)[:, None]
        assert np.abs(hidden_grad - expected).max() <= 1e-5 * np.abs(expected).max()


def test_gradients_keep_their_size_when_the_temperature_rises():
    """Student (1, 2, .5), teacher (2, 1, 0): |T^2 gradient| at T = 1, 2, 4, 8, from 0.5816 on."""
    z, p = np.array([1.0, 2.0, 0.5]), log_softmax(np.array([[2.0, 1.0, 0.0]]))
    records = TeacherRecords(jnp.arange(3)[None], jnp.asarray(p), jnp.array([-jnp.inf]))

    def gradient(temperature):
        def loss(hidden):
            return chunked_cross_entropy(
                hidden, jnp.eye(3), jnp.zeros(1, int), jnp.ones(1), chunk_tokens=1,
                teacher=records, temperature=temperature,
            ).distillation  # fmt: skip

        return float(temperature**2 * jnp.linalg.norm(jax.grad(loss)(jnp.asarray(z)[None])))

    expected = [0.5816, 0.5586, 0.5297, 0.5113]
    assert [gradient(t) for t in (1.0, 2.0, 4.0, 8.0)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("k", "temperature"), [(1, 4.0), (6, 0.5), (6, 1.0), (40, 3.0)])
def test_a_teacher_that_is_the_student_asks_for_nothing(k, temperature):
    arrays, _, _ = problem(dtype=np.float32)
    hidden, head, *_ = arrays
    records = top_log_probabilities(hidden, head, k=k, chunk_tokens=8)
    (loss, _), grads = value_and_grads(arrays, records, temperature, (0.0, 0.0, temperature**2))
    assert 0 <= float(loss) < 1e-10
    for grad in grads:
        assert np.abs(grad).max() < 2e-5
    with jax.enable_x64(True):
        hidden, head = (jnp.asarray(np.asarray(x), jnp.float64) for x in arrays[:2])
        wide = (hidden, head, *arrays[2:])
        records = top_log_probabilities(hidden, head, k=k, chunk_tokens=8)
        (loss, _), grads = value_and_grads(wide, records, temperature, (0.0, 0.0, temperature**2))
        assert 0 <= float(loss) < 1e-25
        assert all(np.abs(grad).max() < 1e-13 for grad in grads)


@pytest.mark.parametrize("distance", [0.0, 1e-7, 1e-4, 0.1, 3.0, 60.0])
def test_the_divergence_is_never_negative(distance):
    """From teachers that differ by less than a rounding error to ones that exclude each other."""
    arrays, records, _ = problem(tokens=512, dtype=np.float32)
    hidden, head, targets, _ = arrays
    records = top_log_probabilities(hidden, head, k=5, chunk_tokens=64)
    other = hidden + distance * jax.random.normal(jax.random.key(1), hidden.shape)
    one = jax.jit(
        lambda h, t, r: chunked_cross_entropy(
            h[None], head, t[None], jnp.ones(1), chunk_tokens=1, temperature=0.7,
            teacher=jax.tree.map(lambda x: x[None], r),
        ).distillation
    )  # fmt: skip
    each = np.asarray(jax.vmap(one)(other, targets, records))
    assert np.all(np.isfinite(each))
    assert each.min() >= 0
    assert distance < 0.1 or each.mean() > 1e-4


def test_the_rest_keeps_its_digits_where_little_is_left():
    """A tail of 1e-9, which 1 minus the other masses in float32 would lose."""
    masses = np.log([0.75, 0.25 - 1e-9, 0.6e-9, 0.4e-9])
    records = top_log_probabilities(
        jnp.ones((1, 1)), jnp.asarray(masses)[:, None], k=2, chunk_tokens=1
    )
    assert records.ids.tolist() == [[0, 1]]
    assert np.exp(float(records.log_tail[0])) == pytest.approx(1e-9, rel=1e-5)
    everything = top_log_probabilities(
        jnp.ones((1, 1)), jnp.asarray(masses)[:, None], k=4, chunk_tokens=1
    )
    assert float(everything.log_tail[0]) == -np.inf


def test_masked_tokens_need_no_record():
    """Records of zeros, or of garbage, where nothing is predicted."""
    arrays, records, _ = problem(dtype=np.float32)
    mask = np.asarray(arrays[3])
    blank = jax.tree.map(
        lambda x: (
            jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else jnp.where(mask[:, None], x, 0)
        ),
        records,
    )
    weights = (0.3, 0.0, 0.7)
    one, two = (value_and_grads(arrays, r, 2.0, weights) for r in (records, blank))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_both_forms_of_the_gradient_are_one():
    """The one that layerwise.py takes, and that of differentiating the sums."""
    with jax.enable_x64(True):
        arrays, records, _ = problem()
        weights = LossWeights(0.3, 1e-3, 0.7 * 4)
        (_, sums), (hidden_grad, head_grad) = value_and_grads(arrays, records, 2.0, weights)
        got, hidden, head = cross_entropy_gradients(
            *arrays, jnp.zeros(arrays[1].shape), chunk_tokens=7, weights=weights,
            teacher=records, temperature=2.0,
        )  # fmt: skip
        assert float(got.distillation) == pytest.approx(float(sums.distillation), rel=1e-12)
        assert float(got.cross_entropy) == pytest.approx(float(sums.cross_entropy), rel=1e-12)
        np.testing.assert_allclose(hidden, hidden_grad, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(head, head_grad, rtol=1e-10, atol=1e-12)


def test_memory_on_an_rtx_3090():
    """8,192 tokens, width 3,072, vocabulary 100,352, k = 32: all logits in float32 were 3.3 GB."""
    tokens, width, vocabulary, k = 8192, 3072, 100_352, 32
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((tokens, width), jnp.bfloat16),
        shape((vocabulary, width), jnp.bfloat16),
        shape((tokens,), jnp.int32),
        shape((tokens,), jnp.bool_),
        TeacherRecords(
            shape((tokens, k), jnp.uint32),
            shape((tokens, k), jnp.float16),
            shape((tokens,), jnp.float16),
        ),
    )

    def loss(hidden, head, targets, mask, teacher):
        sums = chunked_cross_entropy(
            hidden, head, targets, mask, chunk_tokens=512, teacher=teacher, temperature=2.0
        )
        return 0.5 * sums.cross_entropy + 2.0 * sums.distillation

    compiled = compile_for(RTX3090, jax.value_and_grad(loss, argnums=(0, 1)), *arguments)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    # Beside the head's gradient, which is accumulated in float32.
    assert analysis.temp_size_in_bytes - 4 * vocabulary * width < 0.9e9


# ---------------------------------------------------------------- in training

T, ROWS, K = 8, 4, 6


def spec_of(update="after_backward", micro_batches=2, alpha=ALPHA, dtype="float64", **optim):
    remat = "full" if update == "in_backward" else "none"
    return StepSpec(
        model=tiny_model("transformer", remat=remat, param_dtype=dtype, compute_dtype=dtype),
        loss=LossConfig(chunk_tokens=8, z_loss=1e-3),
        optim=OptimConfig(name="adafactor", learning_rate=1e-2, clip="rms", **optim),
        updates=10,
        micro_batches=micro_batches,
        window_tokens=ROWS * T,
        expected_depth=1.0,
        max_backprop_depth=1,
        seed=0,
        update=update,
        distillation=None if alpha is None else Distillation(alpha, 2.0),
    )


def window_of(micro_batches, teacher=True):
    rng = np.random.default_rng(3)
    segments = np.repeat([[1] * (T + 1), [1] * 4 + [2] * (T - 3)], ROWS // 2, 0)
    log_p = log_softmax(rng.normal(size=(ROWS * T, 64)))
    ids = np.argsort(-log_p, -1)[:, :K]
    masses = bucketed(log_p, ids)
    window = {
        "tokens": rng.integers(1, 64, (ROWS, T + 1)).astype(np.uint16),
        "segment_ids": segments.astype(np.int32),
        "positions": np.tile(np.arange(T + 1, dtype=np.int32), (ROWS, 1)),
        "block": np.arange(ROWS, dtype=np.int32),
    }
    if teacher:
        window["teacher_ids"] = ids.reshape(ROWS, T, K).astype(np.uint16)
        window["teacher_log_probs"] = masses[:, :-1].reshape(ROWS, T, K).astype(np.float16)
        window["teacher_log_tail"] = masses[:, -1].reshape(ROWS, T).astype(np.float16)
    return jax.tree.map(lambda x: jnp.asarray(x.reshape(micro_batches, -1, *x.shape[1:])), window)


def steps(spec, updates=3):
    state = init_state(spec)
    for _ in range(updates):
        window = window_of(spec.micro_batches, spec.distillation is not None)
        state, metrics = train_step(spec, state, window, jnp.int32(0), jnp.int32(0))
    return state.params, jax.device_get(metrics)


def assert_alike(one, two, tolerance):
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(two[0]), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(a).max()
    for name in ("loss", "cross_entropy", "distillation"):
        assert getattr(two[1], name) == pytest.approx(getattr(one[1], name), rel=tolerance)


@pytest.mark.long
def test_both_engines_and_any_split_learn_alike():
    with jax.enable_x64(True):
        plain = steps(spec_of())
        assert_alike(plain, steps(spec_of("in_backward")), 1e-9)
        assert_alike(plain, steps(spec_of(micro_batches=1)), 1e-9)
    single = steps(spec_of(dtype="float32"))
    multisteps = steps(spec_of(dtype="float32", accumulation="optax_multisteps"))
    assert_alike(single, multisteps, 1e-4)


def test_what_a_step_reports():
    """`loss` is the mixture, `cross_entropy` is plain, `distillation` the divergence alone."""
    with jax.enable_x64(True):
        _, metrics = steps(spec_of(), 1)
        _, without = steps(spec_of(alpha=None), 1)
    assert without.distillation is None
    assert float(metrics.cross_entropy) == pytest.approx(float(without.cross_entropy), rel=1e-9)
    z = float(without.loss - without.cross_entropy)
    mixture = 0.3 * metrics.cross_entropy + 0.7 * 2.0**2 * metrics.distillation + z
    assert float(metrics.loss) == pytest.approx(float(mixture), rel=1e-9)


def test_only_a_cache_turns_it_on():
    config = Config(model=tiny_model())
    assert step_spec(config, 64, 10).distillation is None
    on = dataclasses.replace(config.distillation, cache="a/teacher-b", temperature=2.0)
    spec = step_spec(dataclasses.replace(config, distillation=on), 64, 10)
    assert spec.distillation == Distillation(0.5, 2.0)
    # Paths are no part of what is compiled.
    assert "teacher" not in repr(spec)
