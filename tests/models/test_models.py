import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    largest_difference,
    layers_one_by_one,
    logits_of,
    long,
    params_of,
    row_keys_of,
    tiny_model,
)

from jaxlm.losses import chunked_cross_entropy
from jaxlm.models import layers
from jaxlm.models.build import apply
from jaxlm.models.layers import (
    RMSNorm,
    attention_mask,
    float64_attention,
    look_up,
    rotary_angles,
    rotate,
    truncated_normal,
)

T = 12
MODELS = {
    "recurrent concat": tiny_model(),
    "recurrent add sandwich": tiny_model(injection="add", norm="sandwich"),
    "recurrent diagonal": tiny_model(injection="diagonal", initial_state="zero"),
    "recurrent grouped untied": tiny_model(
        kv_heads=2, tie_embeddings=False, qk_norm=False, initial_state="prelude"
    ),
    "transformer": tiny_model("transformer"),
    "transformer sandwich": tiny_model("transformer", norm="sandwich", kv_heads=1),
}


@pytest.fixture(params=MODELS)
def config(request):
    return MODELS[request.param]


@pytest.fixture
def tokens():
    return np.random.default_rng(3).integers(1, 64, (3, T))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_causality(config, tokens, depth):
    """Changing token t changes no output before t, exactly, and does change the one at t."""
    params = params_of(config)
    before = np.asarray(logits_of(config, params, tokens, depth=depth))
    for t in (0, 5, T - 1):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % 64
        after = np.asarray(logits_of(config, params, changed, depth=depth))
        assert np.array_equal(before[:, :t], after[:, :t])
        assert np.all(np.any(before[:, t] != after[:, t], axis=-1))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_packed_documents_never_see_each_other(config, tokens, depth):
    """Documents of 5, 1 and 6 tokens packed in one row."""
    params = params_of(config)
    segments = np.array([[1] * 5 + [2] + [3] * 6] * 3)
    positions = np.array([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]] * 3)
    packed = np.asarray(logits_of(config, params, tokens, segments, positions, depth))
    changed = tokens.copy()
    changed[:, :5] = changed[:, :5] % 63 + 1
    other = np.asarray(logits_of(config, params, changed, segments, positions, depth))
    assert np.all(packed[:, 5:] == other[:, 5:])
    assert np.any(packed[:, :5] != other[:, :5])


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("kind", ["zero", "prelude"])
def test_packed_equals_separate(tokens, depth, kind):
    """The third document alone gives the logits that it has packed (noise would be its own)."""
    for config in (tiny_model(initial_state=kind), tiny_model("transformer")):
        params = params_of(config)
        segments = np.array([[1] * 5 + [2] + [3] * 6] * 3)
        positions = np.array([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]] * 3)
        packed = np.asarray(logits_of(config, params, tokens, segments, positions, depth))
        alone = np.asarray(logits_of(config, params, tokens[:, 6:], depth=depth))
        assert np.abs(packed[:, 6:] - alone).max() <= 1e-5


def test_right_padding_changes_nothing(config, tokens):
    params = params_of(config)
    short = np.asarray(logits_of(config, params, tokens[:, :7]))
    segments = np.array([[1] * 7 + [0] * 5] * 3)
    padded = np.asarray(logits_of(config, params, tokens, segments))
    assert np.abs(padded[:, :7] - short).max() <= 1e-5


@pytest.mark.parametrize(
    "name", ["recurrent concat", long("recurrent add sandwich"), "transformer"]
)
def test_an_all_padding_row_is_harmless(name, tokens):
    """It changes no other row, gives no gradient, and everything stays finite."""
    config = MODELS[name]
    params = params_of(config)
    segments = np.ones((3, T), int)
    segments[2] = 0

    def loss(params, tokens, segments):
        model = apply(config, params)
        rows = tokens.shape[0]
        positions = jnp.broadcast_to(jnp.arange(T), (rows, T))
        hidden = model(
            jnp.asarray(tokens),
            jnp.asarray(segments),
            positions,
            row_keys_of(3)[:rows],
            train=True,
            depth=3,
            backprop_depth=2,
            max_backprop_depth=2,
        )
        mask = jnp.asarray(segments).reshape(-1) > 0
        targets = jnp.asarray(tokens).reshape(-1)
        sums = chunked_cross_entropy(
            hidden.reshape(-1, 32), model.head(), targets, mask, chunk_tokens=16
        )
        return sums.cross_entropy

    compute = jax.jit(jax.value_and_grad(loss))
    with_padding, grads = compute(params, tokens, segments)
    without, expected = compute(params, tokens[:2], segments[:2])
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
    assert float(with_padding) == pytest.approx(float(without), rel=1e-6)
    assert largest_difference(expected, grads) <= 1e-5
    logits = np.asarray(logits_of(config, params, tokens, segments))
    assert np.all(np.isfinite(logits))
    # The rows beside it do not notice what it holds.
    tokens = tokens.copy()
    tokens[2] = 5
    assert np.array_equal(logits[:2], np.asarray(logits_of(config, params, tokens, segments))[:2])


def training_loss(config, params, tokens, depth, backprop, max_backprop):
    model = apply(config, params)
    rows = tokens.shape[0]
    hidden = model(
        jnp.asarray(tokens),
        jnp.ones((rows, T), int),
        jnp.broadcast_to(jnp.arange(T), (rows, T)),
        row_keys_of(rows),
        train=True,
        depth=depth,
        backprop_depth=backprop,
        max_backprop_depth=max_backprop,
    )
    targets = jnp.asarray(tokens).reshape(-1)
    return chunked_cross_entropy(
        hidden.reshape(-1, 32), model.head(), targets, jnp.ones(rows * T), chunk_tokens=16
    ).cross_entropy


@pytest.mark.parametrize("kind", ["recurrent", long("transformer")])
@pytest.mark.parametrize("scores_at_once", [0, layers.SCORES_AT_ONCE])
def test_rematerialisation_changes_no_gradient(tokens, kind, scores_at_once, monkeypatch):
    monkeypatch.setattr(layers, "SCORES_AT_ONCE", scores_at_once)

    def grads(remat):
        config = tiny_model(kind, dropout=0.1, remat=remat)
        loss = jax.value_and_grad(lambda p, n, k: training_loss(config, p, tokens, n, k, 3))
        return jax.jit(loss)(params_of(config), 5, 3)

    plain = grads("none")
    for remat in ("full", "dots"):
        assert largest_difference(plain, grads(remat)) <= 1e-6


def test_attention_takes_one_group_at_a_time_where_scores_are_large():
    """Eight heads of 1,024 positions: float32 scores of all of them never exist together."""
    length, heads = 1024, 8
    x = jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)

    def total(q, k, v):
        mask = jnp.ones((1, 1, length, length), bool)
        return jnp.sum(layers.attention_by_groups(q, k, v, mask) ** 2)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * heads * length**2


def unrolled(config, params, tokens, depth, backprop):
    """The same loss in plain Python: no scan, no loop primitive, no traced count."""
    model = apply(config, params)
    rows = tokens.shape[0]
    keys = row_keys_of(rows)
    mask = attention_mask(jnp.ones((rows, T), int))
    positions = jnp.broadcast_to(jnp.arange(T), (rows, T))
    angles = rotary_angles(positions, config.head_size, config.rope_base)

    def stack(stack, x):
        return layers_one_by_one(stack, x, mask, angles)

    x = stack(model.prelude, model.embedding(jnp.asarray(tokens)))
    e = model.prelude_norm(x)
    s = model.initial_state(e, keys)
    for step in range(depth):
        if step == depth - backprop:
            s = jax.lax.stop_gradient(s) if step > 0 else s
        s = model.core.state_norm(stack(model.core.stack, model.core.injection(s, e)))
        if step < depth - backprop:
            s = jax.lax.stop_gradient(s)
    hidden = model.final_norm(stack(model.coda, s))
    logits = hidden @ model.head().T
    targets = jnp.asarray(tokens)[..., None]
    target = jnp.take_along_axis(logits, targets, axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - target)


@pytest.mark.parametrize("initial_state", ["normal", long("prelude")])
def test_one_compilation_equals_plain_python_at_every_depth(tokens, initial_state):
    config = tiny_model(initial_state=initial_state)
    params = params_of(config)
    compiled = jax.jit(
        jax.value_and_grad(lambda p, n, k: training_loss(config, p, tokens, n, k, 4))
    )
    for depth, backprop in [(1, 1), (3, 3), (4, 1), (7, 4)]:
        got = compiled(params, jnp.int32(depth), jnp.int32(backprop))
        plain = jax.value_and_grad(lambda p, n=depth, k=backprop: unrolled(config, p, tokens, n, k))
        reference = jax.jit(plain)(params)
        assert largest_difference(reference, got) <= 2e-5, (depth, backprop)
    assert compiled._cache_size() == 1


def test_dropout_noise_belongs_to_row_and_position(tokens):
    """Neither the other rows nor padding change it; other layers and steps draw their own."""
    config = tiny_model(dropout=0.5)
    params = params_of(config)

    @jax.jit
    def compute(tokens, segments, keys):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return apply(config, params)(tokens, segments, positions, keys, train=True, depth=2)

    def hidden(tokens, segments, keys):
        return np.asarray(compute(tokens, segments, keys))

    keys = row_keys_of(3)
    whole = hidden(tokens, np.ones((3, T), int), keys)
    one = hidden(tokens[1:2], np.ones((1, T), int), keys[1:2])
    assert np.abs(whole[1] - one[0]).max() <= 1e-5
    short = hidden(tokens[:, :8], np.ones((3, 8), int), keys)
    assert np.abs(whole[:, :8] - short).max() <= 1e-5
    other = hidden(tokens, np.ones((3, T), int), jax.random.split(jax.random.key(8), 3))
    assert np.abs(whole - other).max() > 0.1


def test_bfloat16_computes_close_to_float32(config, tokens):
    import dataclasses

    low = dataclasses.replace(config, param_dtype="bfloat16", compute_dtype="bfloat16")
    params = params_of(low)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected = np.asarray(logits_of(config, wide, tokens))
    got = logits_of(low, params, tokens)
    assert got.dtype == jnp.float32
    assert np.abs(np.asarray(got) - expected).max() < 0.15


def test_init_has_the_standard_deviation_asked_for():
    draws = np.asarray(truncated_normal(0.02)(jax.random.key(0), (1000, 1000)))
    assert draws.std() == pytest.approx(0.02, rel=2e-3)
    assert np.abs(draws).max() <= 3 * 0.02 / 0.98657717 * 1.0001
    params = params_of(tiny_model(width=128, feed_forward=256))
    blocks = params["core"]["stack"]["blocks"]
    # sqrt(2 / (5 * 128)) = 0.0559; out-projections / sqrt(2 * (1 + 2 * 6 + 1)) = 0.01056.
    assert np.std(blocks["mlp"]["gate"]["kernel"]) == pytest.approx(0.0559, rel=0.03)
    assert np.std(blocks["mlp"]["down"]["kernel"]) == pytest.approx(0.01056, rel=0.03)
    assert not np.array_equal(*blocks["mlp"]["gate"]["kernel"])  # layers differ


def test_diagonal_injection_starts_contractive_at_the_root_of_a_fifth():
    config = tiny_model(injection="diagonal")
    injection = apply(config, params_of(config)).core.injection
    one, zero = jnp.ones((1, 1, 32)), jnp.zeros((1, 1, 32))
    assert np.asarray(injection(one, zero)) == pytest.approx(0.2**0.5, rel=1e-5)
    # softplus(dt) = -log(sqrt(1/5)) = 0.80472
    assert np.asarray(injection(zero, one)) == pytest.approx(0.8047190, rel=1e-5)


def test_rotation_depends_on_distance_alone():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i, j):
        at = [rotary_angles(jnp.array([[p]]), 8, 10000.0) for p in (i, j)]
        return float(jnp.sum(rotate(x, at[0]) * rotate(y, at[1])))

    assert product(3, 5) == pytest.approx(product(13, 15), rel=1e-4)
    assert product(0, 0) == pytest.approx(float(jnp.sum(x * y)), rel=1e-6)
    assert product(3, 5) != pytest.approx(product(3, 9), rel=1e-3)


def test_rms_norm_by_hand():
    norm = RMSNorm(tiny_model(norm_epsilon=1e-12), 2, nnx.Rngs(0))
    # sqrt((3^2 + 4^2) / 2) = 3.5355
    assert np.asarray(norm(jnp.array([3.0, 4.0]))) == pytest.approx([0.848528, 1.131371], rel=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_its_definition(kv_heads):
    """XLA's attention against a plain softmax, with packed documents and padding."""
    q = jax.random.normal(jax.random.key(0), (2, T, 4, 8))
    k, v = jax.random.normal(jax.random.key(1), (2, 2, T, kv_heads, 8))
    mask = attention_mask(jnp.array([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4]))
    got = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")
    assert np.abs(np.asarray(got - float64_attention(q, k, v, mask))).max() < 1e-5


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
@pytest.mark.parametrize("injection", ["add", "concat", "diagonal"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_starts_near_log_vocabulary_at_a_large_width(kind, injection, tied):
    """A tied head must not start by predicting its own input (sqrt(2 * 512 / 5) = 14 nats)."""
    config = tiny_model(kind, width=512, heads=8, injection=injection, tie_embeddings=tied)
    tokens = np.random.default_rng(0).integers(0, 64, (8, T))
    logits = np.asarray(logits_of(config, params_of(config), tokens), np.float64)
    targets = np.roll(tokens, -1, axis=1)[..., None]
    log_partition = np.log(np.exp(logits).sum(axis=-1))
    loss = log_partition - np.take_along_axis(logits, targets, -1)[..., 0]
    assert loss.mean() == pytest.approx(np.log(64) + 0.05, abs=0.1)


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    """2,000 occurrences with gradient 1 are 2000; a bfloat16 sum stops at 256."""
    table = jnp.zeros((4, 8), jnp.bfloat16)
    tokens = jnp.full((2000,), 3)
    grad = jax.grad(lambda t: jnp.sum(look_up(t, tokens).astype(jnp.float32)))(table)
    assert grad.dtype == jnp.bfloat16
    assert np.all(np.asarray(grad[3], np.float32) == 2000)
    assert np.all(np.asarray(grad[:3], np.float32) == 0)
