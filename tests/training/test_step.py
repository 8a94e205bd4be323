import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_difference, long, tiny_model

from jaxlm.config import Config, LossConfig, OptimConfig, TrainingConfig
from jaxlm.losses import LossSums
from jaxlm.training import step as step_module
from jaxlm.training.optimizer import (
    applied_learning_rate,
    build_optimizer,
    describe_optimizer,
    norm_before_clipping,
)
from jaxlm.training.spec import StepSpec
from jaxlm.training.step import init_state, train_step, window_gradients

T = 8


def spec_of(model=None, optim=None, **settings):
    return StepSpec(
        **{
            "model": model or tiny_model("transformer"),
            "loss": LossConfig(chunk_tokens=8),
            "optim": optim or OptimConfig(name="adamw", learning_rate=1e-2),
            "updates": 100,
            "micro_batches": 1,
            "window_tokens": 64,
            "expected_depth": 3.0,
            "max_backprop_depth": 2,
            "seed": 0,
            **settings,
        }
    )


def window_of(micro_batches, lengths, dtype=np.uint16, seed=0):
    """Rows whose target tokens number `lengths`, in micro-batches."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    segments = np.array([[1] * (n + 1 if n else 0) + [0] * (T - n + (n == 0)) for n in lengths])
    window = {
        "tokens": rng.integers(1, 64, (rows, T + 1)).astype(dtype),
        "segment_ids": segments.astype(np.int32),
        "positions": np.tile(np.arange(T + 1, dtype=np.int32), (rows, 1)),
        "block": np.arange(rows, dtype=np.int32),
    }
    return jax.tree.map(lambda x: jnp.asarray(x.reshape(micro_batches, -1, *x.shape[1:])), window)


DEPTH, BACKPROP = jnp.int32(3), jnp.int32(2)


def gradients(spec, window):
    state = init_state(spec)
    compute = jax.jit(lambda s, w: window_gradients(spec, s, w, DEPTH, BACKPROP))
    grads, total, sums = compute(state, window)
    tokens = float(sums.target_tokens)
    return jax.tree.map(lambda g: np.asarray(g) / tokens, grads), float(total) / tokens, tokens


@pytest.mark.long
@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_gradients_do_not_depend_on_the_split(kind):
    """Rows of 1 to 8 target tokens in 1, 2, 4, 8 micro-batches, dropout and noise included.

    Float32 sums in another order differ by about 1e-6; the test below holds the rule to 1e-10.
    """
    lengths = list(range(1, 9))
    spec = spec_of(tiny_model(kind, dropout=0.1))
    expected, loss, tokens = gradients(spec, window_of(1, lengths))
    assert tokens == 36
    for micro_batches in (2, 4, 8):
        got, other_loss, _ = gradients(spec, window_of(micro_batches, lengths))
        assert largest_difference(expected, got) <= 2e-6
        assert other_loss == pytest.approx(loss, rel=1e-6)


def test_gradients_do_not_depend_on_the_split_in_float64():
    """Also with a micro-batch that is all padding among them."""
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    with jax.enable_x64(True):
        model = tiny_model(dropout=0.1, param_dtype="float64", compute_dtype="float64")
        spec = spec_of(model)
        expected, loss, tokens = gradients(spec, window_of(1, lengths))
        assert tokens == 36
        # In 5 micro-batches of 2 rows the last one is all padding.
        for micro_batches in (2, 5):
            got, other_loss, _ = gradients(spec, window_of(micro_batches, lengths))
            assert largest_difference(expected, got) <= 1e-10
            assert other_loss == pytest.approx(loss, rel=1e-12)


def test_an_all_padding_micro_batch_changes_nothing():
    expected, loss, _ = gradients(spec_of(), window_of(1, [3, 5]))
    got, other, tokens = gradients(spec_of(), window_of(3, [3, 5, 0, 0, 0, 0]))
    assert tokens == 8
    assert largest_difference(expected, got) <= 1e-6
    assert other == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("accumulation", ["token_weighted", "optax_multisteps"])
def test_losses_are_weighted_by_target_tokens(monkeypatch, accumulation):
    """2.0 over 100 tokens and 4.0 over 300 are 3.5 together, and so is the gradient."""
    means, counts = jnp.array([2.0, 4.0]), jnp.array([100.0, 300.0])

    def losses(spec, params, batch, keys, depth, backprop):
        i = batch["block"][0]
        total = means[i] * counts[i] * params["w"]
        zero = jnp.zeros(())
        return total, LossSums(total, zero, counts[i], zero, zero)

    monkeypatch.setattr(step_module, "loss_sums", losses)
    # One row of 100 targets and one of 300, for whoever counts them beforehand.
    segments = (np.arange(301) < np.array([[101], [301]])).astype(np.int32)
    window = {
        "block": jnp.array([[0], [1]]),
        "segment_ids": jnp.asarray(segments)[:, None],
        "tokens": jnp.zeros((2, 1, 301), jnp.uint16),
        "positions": jnp.zeros((2, 1, 301), jnp.int32),
    }
    optim = OptimConfig(
        name="adamw", learning_rate=1.0, schedule="constant", accumulation=accumulation, clip="off"
    )
    spec = spec_of(optim=optim, micro_batches=2)
    monkeypatch.setattr(step_module, "build_optimizer", plain_sgd)
    params = {"w": jnp.ones(())}
    state = step_module.TrainState(
        jnp.int32(0), params, plain_sgd(optim, micro_batches=2).init(params)
    )
    after, metrics = step_module.train_step.__wrapped__(spec, state, window, DEPTH, BACKPROP)
    assert float(metrics.loss) == pytest.approx(3.5)
    assert int(metrics.target_tokens) == 400
    assert float(metrics.grad_norm) == pytest.approx(3.5)
    assert float(after.params["w"]) == pytest.approx(1.0 - 3.5)


def plain_sgd(config, *, micro_batches, **settings):
    from jaxlm.optim import clip_by_global_norm

    def chain(learning_rate):
        return optax.chain(clip_by_global_norm(float("inf")), optax.sgd(learning_rate))

    tx = optax.inject_hyperparams(chain)(learning_rate=lambda count: 1.0)
    if config.accumulation == "optax_multisteps":
        tx = optax.MultiSteps(tx, micro_batches).gradient_transformation()
    return tx


def test_multisteps_makes_the_same_update():
    """The stock accumulator and our sum agree, with unequal lengths and padding rows."""
    results = []
    for accumulation in ("token_weighted", "optax_multisteps"):
        optim = OptimConfig(
            name="adamw", learning_rate=1e-2, accumulation=accumulation, warmup_updates=3
        )
        spec = spec_of(optim=optim, micro_batches=4)
        state = init_state(spec)
        for seed in range(3):
            window = window_of(4, [1, 2, 3, 8, 5, 0, 7, 0], seed=seed)
            state, metrics = train_step(spec, state, window, DEPTH, BACKPROP)
        results.append((state.params, metrics.loss, metrics.grad_norm, metrics.learning_rate))
    assert largest_difference(*results) <= 1e-4  # AdamW divides by roots: 1e-6 grows a little


def test_one_update_is_adamw_by_hand():
    """Against an independent AdamW in NumPy, from the gradient of the same window."""
    optim = OptimConfig(
        name="adamw",
        learning_rate=1e-2,
        schedule="constant",
        beta2=0.9,
        weight_decay=0.5,
        max_norm=0.1,
        epsilon=1e-3,
    )
    spec = spec_of(optim=optim)
    window = window_of(1, [3, 8, 5, 6])
    grads, loss, _ = gradients(spec, window)
    before = jax.tree.map(np.asarray, init_state(spec).params)
    after, metrics = train_step(spec, init_state(spec), window, DEPTH, BACKPROP)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert norm > 0.1
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.loss) == pytest.approx(loss, rel=1e-6)
    assert float(metrics.learning_rate) == pytest.approx(1e-2)

    def adamw(path, p, g):
        g = g * (0.1 / norm)
        # After one step the bias-corrected moments are g and g^2.
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.5
        return p - 1e-2 * (g / (np.sqrt(g**2) + 1e-3) + decay * p)

    expected = jax.tree_util.tree_map_with_path(adamw, before, grads)
    assert largest_difference(expected, jax.tree.map(np.asarray, after.params)) <= 1e-5
    change = np.sqrt(
        sum(
            ((a.astype(np.float64) - b) ** 2).sum()
            for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(before), strict=True)
        )
    )
    assert float(metrics.update_norm) == pytest.approx(change, rel=1e-4)


def optimizer(config):
    return build_optimizer(
        config, updates=100, micro_batches=1, window_tokens=64, key=jax.random.key(0)
    )


@pytest.mark.parametrize(
    "name", ["adamw", "adamw_8bit", long("adafactor"), long("muon"), "optax_adafactor"]
)
def test_decay_pulls_matrices_and_embeddings_alone_and_scales_with_the_rate(name):
    spec = spec_of(tiny_model(injection="diagonal"))
    params = init_state(spec).params
    zeros = jax.tree.map(jnp.zeros_like, params)

    def change(rate):
        config = OptimConfig(name=name, learning_rate=rate, schedule="constant", weight_decay=0.1)
        tx = optimizer(config)
        return tx.update(zeros, tx.init(params), params)[0]

    for rate in (1e-2, 1e-4):
        decayed = set()
        for path, update in jax.tree_util.tree_leaves_with_path(change(rate)):
            param = params
            for key in path:
                param = param[key.key]
            if np.any(np.asarray(update)):
                np.testing.assert_allclose(update, -rate * 0.1 * param, rtol=1e-5)
                decayed.add(path[-1].key if path[-1].key == "table" else path[-2].key)
        attention, mlp = {"query", "key", "value", "out"}, {"gate", "up", "down"}
        assert decayed == {"table"} | attention | mlp


def test_logged_rate_and_norm_are_those_in_the_state():
    config = OptimConfig(name="adamw", learning_rate=1.0, warmup_updates=10)
    tx = optimizer(config)
    params = {"kernel": jnp.ones((2, 2))}
    state, rates = tx.init(params), []
    for _ in range(11):
        updates, state = tx.update({"kernel": jnp.full((2, 2), 2.0)}, state, params)
        rates.append(float(applied_learning_rate(state)))
    assert [rates[0], rates[9], rates[10]] == pytest.approx([0.1, 1.0, 1.0])
    assert float(norm_before_clipping(state)) == 4.0
    assert updates["kernel"].shape == (2, 2)


def test_a_window_without_targets_makes_no_update_and_does_not_advance_the_rate():
    optim = OptimConfig(name="adamw", learning_rate=1e-2, warmup_updates=10)
    spec = spec_of(optim=optim)
    full, empty = window_of(1, [3, 8]), window_of(1, [0, 0])
    state, first = train_step(spec, init_state(spec), full, DEPTH, BACKPROP)
    kept = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, nothing = train_step(spec, state, empty, DEPTH, BACKPROP)
    assert int(state.update) == 2
    assert (int(nothing.target_tokens), bool(nothing.applied), bool(nothing.finite)) == (
        0,
        False,
        True,
    )
    assert float(nothing.loss) == 0
    jax.tree.map(np.testing.assert_array_equal, kept, (state.params, state.opt_state))
    _, third = train_step(spec, state, full, DEPTH, BACKPROP)
    assert [float(m.learning_rate) for m in (first, nothing, third)] == pytest.approx(
        [1e-3, 0.0, 2e-3]
    )


@pytest.mark.parametrize("accumulation", ["token_weighted", "optax_multisteps"])
def test_a_gradient_that_is_not_finite_costs_its_window_alone(accumulation):
    """Also where optax.MultiSteps would keep the NaN for ever."""
    optim = OptimConfig(name="adamw", learning_rate=1e-2, accumulation=accumulation)
    spec = spec_of(optim=optim, micro_batches=2)
    clean = window_of(2, [3, 8])
    state = init_state(spec)
    table = state.params["embedding"]["table"]
    poisoned_token = int(clean["tokens"][0, 0, 0])
    bad = dataclasses.replace(
        state,
        params={
            **state.params,
            "embedding": {"table": table.at[poisoned_token].set(jnp.nan)},
        },
    )
    before = jax.tree.map(np.asarray, (bad.params, bad.opt_state))
    after, metrics = train_step(spec, bad, clean, DEPTH, BACKPROP)
    assert (bool(metrics.finite), bool(metrics.applied)) == (False, False)
    jax.tree.map(np.testing.assert_array_equal, before, (after.params, after.opt_state))
    healed = dataclasses.replace(after, params=init_state(spec).params)
    healed, metrics = train_step(spec, healed, clean, DEPTH, BACKPROP)
    assert bool(metrics.applied)
    expected, _ = train_step(spec, init_state(spec), clean, DEPTH, BACKPROP)
    # The skipped window still counted as an update, so noise differs; all is finite and moved.
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(healed.params))
    assert int(healed.update) == 2
    assert int(expected.update) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "adamw"},
        {"name": "muon", "accumulator_dtype": "bfloat16"},
        long({"name": "adafactor", "half_life_tokens": 100}),
        long({"name": "adamw", "accumulation": "optax_multisteps"}),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_state_is_stable_and_float32_under_bfloat16_weights(settings):
    model = tiny_model(param_dtype="bfloat16", compute_dtype="bfloat16")
    optim = OptimConfig(learning_rate=1e-2, **settings)
    spec = spec_of(model, optim, micro_batches=2)
    state = init_state(spec)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for leaf in jax.tree.leaves(state.opt_state):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    state, metrics = train_step(spec, state, window_of(2, [3, 8]), DEPTH, BACKPROP)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == kinds
    assert bool(metrics.applied)


@pytest.mark.long
def test_small_updates_of_bfloat16_weights_are_kept_on_average():
    """A rate far below half a step of the weights: nearest changes almost nothing."""
    model = tiny_model("transformer", param_dtype="bfloat16", compute_dtype="bfloat16")
    moved = {}
    for rounding in ("stochastic", "nearest"):
        optim = OptimConfig(
            name="adamw", learning_rate=1e-5, schedule="constant", rounding=rounding
        )
        spec = spec_of(model, optim)
        before = jax.tree.map(lambda x: np.asarray(x, np.float32), init_state(spec).params)
        state, _ = train_step(spec, init_state(spec), window_of(1, [3, 8]), DEPTH, BACKPROP)
        again, _ = train_step(spec, init_state(spec), window_of(1, [3, 8]), DEPTH, BACKPROP)
        jax.tree.map(np.testing.assert_array_equal, state.params, again.params)
        change = jax.tree.map(
            lambda new, old: np.asarray(new, np.float32) - old, state.params, before
        )
        kernel = change["stack"]["blocks"]["mlp"]["gate"]["kernel"]
        # Adam's first step moves each weight by the rate, up or down.
        moved[rounding] = np.abs(kernel).mean() / 1e-5
    # About 150 of 4,096 weights move by a whole step each: 8 % of noise.
    assert moved["stochastic"] == pytest.approx(1.0, abs=0.3)
    assert moved["nearest"] < 0.5


def test_z_loss_is_the_mean_squared_log_partition():
    plain, weighted = (spec_of(loss=LossConfig(chunk_tokens=8, z_loss=z)) for z in (0.0, 0.5))
    window = window_of(1, [3, 8])
    compute = jax.jit(lambda s, w: window_gradients(plain, s, w, DEPTH, BACKPROP)[2])
    sums = compute(init_state(plain), window)
    _, metrics = train_step(weighted, init_state(weighted), window, DEPTH, BACKPROP)
    mean_square = float(sums.squared_log_partition) / 11
    assert mean_square > np.log(64) ** 2  # uniform logits of zero have the least
    assert float(metrics.loss - metrics.cross_entropy) == pytest.approx(0.5 * mean_square, rel=1e-4)


def test_a_bfloat16_sum_over_micro_batches_is_right_on_average():
    """The gradient of eight micro-batches against the float32 sum: unbiased, a few per cent off."""
    lengths = list(range(1, 9))
    narrow = OptimConfig(name="adamw", learning_rate=1e-2, accumulator_dtype="bfloat16")
    exact, _, _ = gradients(spec_of(), window_of(8, lengths))
    got, _, _ = gradients(spec_of(optim=narrow), window_of(8, lengths))
    one = np.concatenate([np.ravel(x) for x in jax.tree.leaves(exact)]).astype(np.float64)
    two = np.concatenate([np.ravel(x) for x in jax.tree.leaves(got)]).astype(np.float64)
    assert two @ one / (one @ one) == pytest.approx(1, abs=2e-3)
    assert 1e-3 < np.linalg.norm(two - one) / np.linalg.norm(one) < 2e-2


def test_what_a_run_says_of_its_optimizer():
    optim = {"accumulator_dtype": "bfloat16", "half_life_tokens": 10_000_000}
    config = Config(
        optim=OptimConfig(learning_rate=1e-2, warmup_updates=10, **optim),
        model=tiny_model(param_dtype="bfloat16"),
        training=TrainingConfig(updates=100, micro_batches=4),
    )
    assert describe_optimizer(config) == (
        "sum of 4 micro-batches in bfloat16, divided by target tokens -> clip to global norm 1 -> "
        "adafactor(half-life 10,000,000 tokens) -> decay 0.1 of matrices and embeddings -> "
        "cosine rate, peak 0.01, warm-up 10 of 100 updates -> stochastic rounding to bfloat16"
    )
