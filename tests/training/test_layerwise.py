"""The layer-wise engine against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import long, tiny_model

from jaxlm.config import LossConfig, OptimConfig
from jaxlm.optim import adafactor, adamw_8bit, stochastic_rounding
from jaxlm.training.layerwise import refuse_unless_layer_local
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


@pytest.mark.parametrize(
    "case", [case if case in ("transformer", "recurrent, k = 2") else long(case) for case in CASES]
)
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


@pytest.mark.parametrize("kind", [long("transformer"), "recurrent"])
def test_equals_the_plain_engine_in_float32(kind):
    spec = spec_of(tiny_model(kind), 4, 6)
    assert_equal(run(spec)[0], run(in_backward(spec))[0], 1e-5)


@pytest.mark.parametrize("name", ["adafactor", long("adamw_8bit"), long("muon")])
def test_two_passes_clip_exactly(name):
    """As the plain engine by the global norm, at a limit that every gradient is above."""
    with jax.enable_x64(True):
        model = tiny_model("transformer", param_dtype="float64", compute_dtype="float64")
        settings = {"name": name, "max_norm": 0.05, "weight_decay": 0.0}
        plain, expected = run(spec_of(model, 2, clip="global", **settings), updates=4)
        spec = in_backward(spec_of(model, 2, clip="two_pass", **settings))
        layerwise, got = run(spec, updates=4)
        # The 8-bit state rounds at random where sums in another order fall on another side.
        assert_equal(plain, layerwise, 1e-6 if name == "adamw_8bit" else 1e-9)
    assert all(m.grad_norm > 0.05 for m in expected)
    for a, b in zip(expected, got, strict=True):
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)


def test_previous_norm_scales_by_the_update_before():
    """The second gradient times max_norm / the first norm, by plain Adam's first moment."""
    model = tiny_model("transformer")
    settings = {"name": "adamw", "weight_decay": 0.0, "max_norm": 0.01}
    state, (first, second) = run(in_backward(spec_of(model, clip="previous_norm", **settings)), 2)
    free, norms = run(in_backward(spec_of(model, clip="off", **settings)), 1)
    assert first.grad_norm == pytest.approx(norms[0].grad_norm, rel=1e-6)
    # mu = 0.1 (0.9 g1 + scale g2), so that of mu the part of g2 can be told.
    mu = lambda state: optax.tree_utils.tree_get(state.opt_state, "mu")  # noqa: E731
    part = jax.tree.map(lambda a, b: (a - 0.9 * b) / 0.1, mu(state), mu(free))
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(part)))
    scale = 0.01 / first.grad_norm
    assert norm == pytest.approx(scale * second.grad_norm, rel=1e-3)


# In the long suite: beside another process, XLA's CPU runtime was once seen to wait for ever in it.
@pytest.mark.long
@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
def test_inputs_of_layers_on_the_host_change_nothing(kind):
    spec = in_backward(spec_of(tiny_model(kind), 2))
    one, two = run(spec, 3), run(dataclasses.replace(spec, block_inputs="host"), 3)
    assert_equal(one[0], two[0], 1e-6)


def poisoned(state, path, index):
    leaves = dict(jax.tree_util.tree_leaves_with_path(state.params))
    (key,) = [
        key for key in leaves if jax.tree_util.keystr(key, simple=True, separator="/") == path
    ]
    params = jax.tree_util.tree_map_with_path(
        lambda p, x: x.at[index].set(jnp.nan) if p == key else x, state.params
    )
    return dataclasses.replace(state, params=params)


def test_a_loss_that_is_not_finite_changes_nothing():
    spec = in_backward(spec_of(tiny_model("transformer", remat="full")))
    state = poisoned(init_state(spec), "final_norm/scale", 0)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    after, metrics = train_step(spec, state, window_of(1, 0), jnp.int32(0), jnp.int32(0))
    assert (bool(metrics.finite), bool(metrics.applied)) == (False, False)
    jax.tree.map(np.testing.assert_array_equal, before, (after.params, after.opt_state))


def test_a_layers_gradient_that_is_not_finite_keeps_that_layer(monkeypatch):
    """The head is fine, one layer's gradient is not: the others learn, and it is counted."""
    from jaxlm.training import layerwise

    spec = in_backward(spec_of(tiny_model("transformer", remat="full"), learning_rate=2e-2))
    real = layerwise.apply_layer

    @jax.custom_vjp
    def spoil(x, number):
        return x

    spoil.defvjp(
        lambda x, number: (x, number),
        # Infinite weight gradients in layer 1 alone: what flows on is cut to zero before layer 0.
        lambda number, g: (jnp.where(number == 1, jnp.full_like(g, jnp.inf), g), None),
    )

    def apply_layer(block, config, params, x_BTD, rows, purpose, number):
        kernel = params["mlp"]["down"]["kernel"]
        params = {**params, "mlp": {**params["mlp"], "down": {"kernel": spoil(kernel, number)}}}
        return real(block, config, params, x_BTD, rows, purpose, number)

    monkeypatch.setattr(layerwise, "apply_layer", apply_layer)
    state = init_state(spec)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = train_step.__wrapped__(
        spec, state, window_of(1, 0), jnp.int32(0), jnp.int32(0)
    )
    assert (bool(metrics.applied), int(metrics.kept_layers)) == (True, 1)
    for old, new in zip(
        jax.tree.leaves(before["stack"]), jax.tree.leaves(after.params["stack"]), strict=True
    ):
        assert np.array_equal(old[1], new[1])
        assert not np.array_equal(old[0], new[0])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((after.params, after.opt_state)))


PARAMS = {
    "embedding": {"table": jnp.zeros((64, 32))},
    "stack": {"blocks": {"kernel": jnp.zeros((4, 64, 64)), "scale": jnp.zeros((4, 64))}},
}


def test_which_transforms_can_run_layer_by_layer():
    rules = [("blocks", 1)]
    for tx in (
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-3),
        adafactor(1e-2, layer_rules=rules, momentum=0.9),
        adamw_8bit(1e-3, layer_rules=rules),
        optax.chain(adafactor(1e-2, layer_rules=rules), stochastic_rounding(0)),
    ):
        refuse_unless_layer_local(tx, PARAMS, "it")
    with pytest.raises(ValueError, match=r"LAMB lets the update of stack/blocks.* depend"):
        refuse_unless_layer_local(optax.lamb(1e-3), PARAMS, "LAMB")
    with pytest.raises(ValueError, match=r"clipping lets the update of .* depend on the gradient"):
        refuse_unless_layer_local(
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), PARAMS, "clipping"
        )
    with pytest.raises(ValueError, match=r"optax.adafactor .*cannot be cut into layers"):
        refuse_unless_layer_local(optax.adafactor(1e-2), PARAMS, "optax.adafactor")
