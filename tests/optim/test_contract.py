"""What every transform and alias of jaxlm.optim promises, tried on each of them.

The list covers what optax's own contract for its optimizers covers (extra arguments, no second
compilation, dtypes, hyperparameters by injection, MultiSteps, convergence) and what bf16 weights in
stacked layers need besides.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxlm.optim import (
    accumulate_tokens,
    adafactor,
    adamw_8bit,
    clip_by_global_norm,
    ema_8bit,
    in_float32,
    kahan_rounding,
    match_rules,
    muon,
    residual_rounding,
    scale_by_adam_8bit,
    scale_by_factored_rms,
    scale_by_param_rms,
    skip_nonfinite,
    stochastic_rounding,
)

Rate = optax.ScalarOrSchedule
# Stacked norms are vectors per layer; everything else follows its shape.
LAYERS = ((r"blocks", 1),)


def are_matrices(params: optax.Params) -> optax.Params:
    return match_rules(params, [(r"kernel", True), (r"", False)])


# Aliases: from a rate to updates that can be added.
ALIASES: dict[str, Callable[[Rate], optax.GradientTransformation]] = {
    "adafactor": lambda rate: adafactor(rate, weight_decay=0.1, layer_rules=LAYERS),
    "adafactor, momentum bf16": lambda rate: adafactor(rate, momentum=0.9, layer_rules=LAYERS),
    "adafactor, momentum int8": lambda rate: adafactor(
        rate, momentum=0.9, momentum_dtype=jnp.int8, fixed_decay=0.99, layer_rules=LAYERS
    ),
    "adamw_8bit": lambda rate: adamw_8bit(rate, weight_decay=0.1, layer_rules=LAYERS),
    "muon": lambda rate: in_float32(muon(rate, are_matrices, weight_decay=0.1)),
    "in_float32": lambda rate: in_float32(optax.adamw(rate)),
    "skip_nonfinite": lambda rate: skip_nonfinite(adafactor(rate, layer_rules=LAYERS)),
    "stochastic_rounding": lambda rate: optax.chain(
        adafactor(rate, layer_rules=LAYERS), stochastic_rounding(0)
    ),
    "residual_rounding": lambda rate: optax.chain(
        adafactor(rate, layer_rules=LAYERS), residual_rounding(0)
    ),
    "kahan_rounding": lambda rate: optax.chain(
        adafactor(rate, layer_rules=LAYERS), kahan_rounding()
    ),
}
# Parts of chains, whose updates have no rate yet.
PARTS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip_by_global_norm": lambda: clip_by_global_norm(1.0),
    "ema_8bit": lambda: ema_8bit(0.9, layer_rules=LAYERS),
    "scale_by_adam_8bit": lambda: scale_by_adam_8bit(layer_rules=LAYERS),
    "scale_by_factored_rms": lambda: scale_by_factored_rms(layer_rules=LAYERS),
    "scale_by_param_rms": lambda: scale_by_param_rms(layer_rules=LAYERS),
}
ALL: dict[str, Callable[[], optax.GradientTransformation]] = {
    **{name: functools.partial(make, 1e-2) for name, make in ALIASES.items()},
    **PARTS,
    "accumulate_tokens": lambda: with_tokens(
        accumulate_tokens(adafactor(1e-2, layer_rules=LAYERS), every=2)
    ),
    "accumulate_tokens bf16": lambda: with_tokens(
        accumulate_tokens(adafactor(1e-2, layer_rules=LAYERS), 2, accumulator_dtype=jnp.bfloat16)
    ),
}


def with_tokens(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformation:
    """Accumulation that is told of one target token at every call."""

    def update(updates, state, params=None, **extra):
        return tx.update(updates, state, params, target_tokens=1, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def tree(dtype: Any, seed: int = 0) -> dict[str, Any]:
    """A scalar, a vector, a matrix, an embedding, stacked vectors and stacked matrices."""
    shapes = {
        "gain": (),
        "bias": (5,),
        "kernel": (64, 80),
        "embedding": (40, 33),
        "blocks": {"scale": (3, 64), "kernel": (3, 64, 96)},
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: type(x) is tuple)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, bool(x.weak_type)), tree)


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


every_transform = pytest.mark.parametrize("name", ALL)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])


@every_transform
@every_dtype
def test_state_keeps_its_kind_under_jit_with_donation(name, dtype):
    tx, params = ALL[name](), tree(dtype)
    state = tx.init(params)
    own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size}
    assert len(own) == sum(x.size > 0 for x in jax.tree.leaves(state)), "state holds a buffer twice"
    assert not own & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    before = kinds(state)
    floats = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not any(word in name for word in ("momentum", "kahan", "accumulate")):
        assert all(d == jnp.float32 for d in floats), "statistics follow the weights' dtype"

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, unexpected_extra_argument=1)
        return optax.apply_updates(params, updates), state

    tx = optax.with_extra_args_support(tx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a donated buffer that no output takes is a warning
        for i in range(4):
            params, state = step(params, state, tree(dtype, seed=i + 1))
            assert kinds(state) == before
    assert step._cache_size() == 1
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree(dtype)
    )
    assert all(np.isfinite(bits(x)).all() for x in jax.tree.leaves(params))


@every_transform
def test_empty_trees_and_zero_gradients(name):
    tx = optax.with_extra_args_support(ALL[name]())
    assert tx.update({}, tx.init({}), {})[0] == {}
    params = jax.tree.map(jnp.zeros_like, tree(jnp.bfloat16))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(3):  # zero gradients of zero weights move nothing
        updates, state = update(params, state, params)
        assert all(np.all(bits(u) == 0) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", [n for n in ALL if n != "clip_by_global_norm"])
@every_dtype
def test_a_stack_is_its_layers(name, dtype):
    """Stacked leaves and separate ones: updates within 1e-6, and the same bits where rounded.

    All but clipping, whose purpose is one norm over all leaves.
    """
    stacked = {"blocks": tree(dtype)["blocks"]}
    layer = lambda tree, i: jax.tree.map(lambda x: x[i : i + 1], tree)  # noqa: E731
    alone = [layer(stacked, i) for i in range(3)]
    tx = optax.with_extra_args_support(ALL[name]())
    state, states = tx.init(stacked), [tx.init(p) for p in alone]
    step = jax.jit(tx.update)
    for seed in range(1, 5):
        grads = {"blocks": tree(dtype, seed)["blocks"]}
        updates, state = step(grads, state, stacked)
        stacked = optax.apply_updates(stacked, updates)
        for i in range(3):
            changes, states[i] = step(layer(grads, i), states[i], alone[i], first_layer=i)
            alone[i] = optax.apply_updates(alone[i], changes)
            for whole, part in zip(
                jax.tree.leaves(layer(stacked, i)), jax.tree.leaves(alone[i]), strict=True
            ):
                if dtype == jnp.bfloat16:
                    assert np.mean(bits(whole) != bits(part)) <= 1e-4
                else:
                    difference = np.abs(bits(whole) - bits(part)).max()
                    assert difference <= 1e-6 * np.abs(bits(whole)).max()


@every_transform
def test_save_and_restore_is_bit_exact(name, tmp_path):
    tx, params = optax.with_extra_args_support(ALL[name]()), tree(jnp.bfloat16)
    state = tx.init(params)
    step = jax.jit(tx.update)
    for seed in (1, 2, 3):
        updates, state = step(tree(jnp.bfloat16, seed), state, params)
        params = optax.apply_updates(params, updates)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"state": state})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(lambda: {"state": tx.init(params)})
        )["state"]
    assert kinds(restored) == kinds(state)
    assert same(restored, state)
    grads = tree(jnp.bfloat16, 4)
    assert same(step(grads, restored, params)[0], step(grads, state, params)[0])


@every_transform
def test_masked_and_partitioned(name):
    params, grads = tree(jnp.float32), tree(jnp.float32, 1)
    label = match_rules(params, [("kernel", "a"), ("", "b")])
    masked = optax.masked(ALL[name](), jax.tree.map(lambda x: x == "a", label))
    parted = optax.partition({"a": ALL[name](), "b": optax.sgd(0.1)}, label)
    for tx in (masked, parted):
        tx = optax.with_extra_args_support(tx)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        other = grads["bias"] if tx.init is masked.init else -0.1 * grads["bias"]
        np.testing.assert_allclose(updates["bias"], other, rtol=1e-6)


# Arguments that decide shapes or types, or are functions but no schedules.
STATIC = {
    adafactor: ("min_factored", "momentum_dtype"),
    adamw_8bit: ("block", "min_size"),
    muon: ("matrices", "momentum_dtype"),
}


@pytest.mark.parametrize("alias", STATIC)
def test_schedules_and_injected_rates(alias):
    """A schedule, and the same rates injected, give the same weights; the rate is in the state."""
    schedule = optax.linear_schedule(1e-2, 1e-3, 4)
    arguments = {"matrices": are_matrices} if alias is muon else {}
    by_schedule = alias(schedule, **arguments)
    injected = optax.inject_hyperparams(alias, static_args=STATIC[alias])(schedule, **arguments)
    weights = []
    for tx in (by_schedule, injected):
        params = tree(jnp.float32)
        state = tx.init(params)
        for seed in range(3):
            updates, state = jax.jit(tx.update)(tree(jnp.float32, seed + 1), state, params)
            params = optax.apply_updates(params, updates)
        weights.append(params)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.0055)
    for one, two in zip(*map(jax.tree.leaves, weights), strict=True):
        assert np.abs(bits(one) - bits(two)).max() <= 1e-6 * np.abs(bits(one)).max()


@pytest.mark.parametrize("name", ALIASES)
def test_inside_multisteps(name):
    """Two equal halves make the update of the whole."""
    params, grads = tree(jnp.float32), tree(jnp.float32, 1)
    alone, pair = ALIASES[name](1e-2), optax.MultiSteps(ALIASES[name](1e-2), 2)
    expected, _ = jax.jit(alone.update)(grads, alone.init(params), params)
    state = pair.init(params)
    update = jax.jit(pair.update)
    updates, state = update(grads, state, params)
    assert all(np.all(bits(u) == 0) for u in jax.tree.leaves(updates))
    updates, state = update(grads, state, params)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "alias",
    [
        adafactor,
        functools.partial(adafactor, momentum=0.9),
        functools.partial(adafactor, momentum=0.9, momentum_dtype=jnp.int8),
        adamw_8bit,
        functools.partial(muon, matrices=are_matrices),
        lambda rate, **k: in_float32(optax.adamw(rate, **k)),
        lambda rate, **k: skip_nonfinite(adafactor(rate, **k)),
    ],
    ids=["adafactor", "bf16", "int8", "adamw_8bit", "muon", "in_float32", "skip_nonfinite"],
)
def test_decay_of_one_at_rate_1e_2_and_decay_0_1(alias):
    """Exactly -1e-3 (the float32 nearest to it) for a matrix; nothing for norms, stacked or not."""
    ones = jax.tree.map(jnp.ones_like, tree(jnp.float32))
    rules = [("kernel|embedding", True), ("", False)]
    tx = alias(1e-2, weight_decay=0.1, mask=lambda params: match_rules(params, rules))
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, ones), tx.init(ones), ones)
    for leaf in (updates["kernel"], updates["embedding"], updates["blocks"]["kernel"]):
        np.testing.assert_allclose(leaf, -1e-3, rtol=2e-7)
    for leaf in (updates["blocks"]["scale"], updates["bias"], updates["gain"]):
        assert np.all(np.asarray(leaf) == 0)


@pytest.mark.parametrize("name", ALIASES)
@every_dtype
def test_a_quadratic_is_minimised(name, dtype):
    """Of matrices and vectors, from far away: the rate falls to zero over 400 updates."""
    goal, params = tree(jnp.float32, 1), tree(dtype)
    tx = ALIASES[name](optax.cosine_decay_schedule(0.1, 400))

    def loss(params):
        squares = [
            jnp.sum(jnp.square(p.astype(jnp.float32) - g))
            for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)
        ]
        return sum(squares)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=400)[0])
    end, _ = run((params, tx.init(params)))
    # Decay of 0.1 pulls the end away from the goal a little, bf16 rounds it.
    assert float(loss(end)) < 0.02 * float(loss(params))
