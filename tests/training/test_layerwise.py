"""The layer-wise engine against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_model

from jaxlm.config import LossConfig, OptimConfig
from jaxlm.training.spec import StepSpec
from jaxlm.training.step import init_state, train_step

T = 8
LENGTHS = [8, 3, 0, 5, 1, 7, 8, 2]


def spec_of(model, micro_batches=1, max_backprop=2, **optim):
    optim = {"name": "adafactor", "learning_rate": 1e-2, "clip": "rms", **optim}
    return StepSpec(
        model=model,
        loss=LossConfig(chunk_tokens=8, z_loss=1e-3),
        optim=OptimConfig(warmup_updates=3, **optim),
        updates=100,
        micro_batches=micro_batches,
        window_tokens=len(LENGTHS) * T,
        expected_depth=3.0,
        max_backprop_depth=max_backprop,
        seed=0,
    )


def window_of(micro_batches, update):
    rng = np.random.default_rng(update)
    segments = np.array([[1] * (n + 1 if n else 0) + [0] * (T - n + (n == 0)) for n in LENGTHS])
    rows = len(LENGTHS)
    window = {
        "tokens": rng.integers(1, 64, (rows, T + 1)).astype(np.uint16),
        "segment_ids": segments.astype(np.int32),
        "positions": np.tile(np.arange(T + 1, dtype=np.int32), (rows, 1)),
        "block": np.arange(rows, dtype=np.int32),
    }
    return jax.tree.map(lambda x: jnp.asarray(x.reshape(micro_batches, -1, *x.shape[1:])), window)


def in_backward(spec, **changes):
    return dataclasses.replace(spec, update="in_backward", **changes)


def run(spec, updates=10, depths=(3, 1, 4, 2, 6, 3, 5, 1, 2, 4)):
    """States and metrics; the plain engine differentiates with nothing recomputed."""
    remat = "full" if spec.update == "in_backward" else "none"
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, remat=remat))
    state, metrics = init_state(spec), []
    for i in range(updates):
        depth = depths[i % len(depths)]
        k = min(depth, spec.max_backprop_depth)
        state, m = train_step(
            spec, state, window_of(spec.micro_batches, i), jnp.int32(depth), jnp.int32(k)
        )
        metrics.append(jax.device_get(m))
    return state, metrics


def assert_equal(one, two, tolerance):
    """Per leaf: the largest difference at most `tolerance` of the leaf's largest value."""
    leaves = jax.tree_util.tree_leaves_with_path((one.params, one.opt_state))
    for (path, a), b in zip(leaves, jax.tree.leaves((two.params, two.opt_state)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if "norm" in jax.tree_util.keystr(path)[-6:]:  # the last gradient's, compared below
            continue
        largest = max(np.abs(a).max(initial=0), 1e-30)
        name = jax.tree_util.keystr(path)
        assert np.abs(a - b).max(initial=0) <= tolerance * largest, name


CASES = {
    "transformer": (tiny_model("transformer"), 1, 2),
    "transformer, 4": (tiny_model("transformer", tie_embeddings=False), 4, 2),
    "recurrent, k = 2": (tiny_model(), 4, 2),
    "recurrent, full": (tiny_model(injection="diagonal", initial_state="prelude"), 1, 6),
    "recurrent, sandwich": (tiny_model(norm="sandwich", injection="add"), 4, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_engine(case):
    """Ten updates with dropout, noise, sampled depth and unequal target tokens, in float64."""
    model, micro_batches, k = CASES[case]
    with jax.enable_x64(True):
        model = dataclasses.replace(
            model, dropout=0.1, param_dtype="float64", compute_dtype="float64"
        )
        spec = spec_of(model, micro_batches, k)
        plain, expected = run(spec)
        layerwise, got = run(in_backward(spec))
        assert_equal(plain, layerwise, 1e-9)
    for a, b in zip(expected, got, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-9)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        assert b.update_norm == pytest.approx(a.update_norm, rel=1e-5)
        assert b.learning_rate == pytest.approx(a.learning_rate, rel=1e-6)
        assert (b.target_tokens, b.applied, b.kept_layers) == (a.target_tokens, True, 0)


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_equals_the_plain_engine_in_float32(kind):
    spec = spec_of(tiny_model(kind), 4, 6)
    assert_equal(run(spec)[0], run(in_backward(spec))[0], 1e-5)
