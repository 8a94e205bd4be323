import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.losses import chunked_cross_entropy, target_mask
from jaxlm.memory.devices import RTX3090
from jaxlm.memory.plan import compile_for


def oracle(hidden, head, targets, mask, z_weight):
    """Sums and gradients in float64 with plain NumPy."""
    hidden, head, mask = (np.asarray(x, np.float64) for x in (hidden, head, mask))
    logits = hidden @ head.T
    top = logits.max(axis=1, keepdims=True)
    log_partition = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    target = logits[np.arange(len(targets)), targets]
    p = np.exp(logits - log_partition[:, None])
    onehot = np.zeros_like(p)
    onehot[np.arange(len(targets)), targets] = 1
    grad = (p - onehot + 2 * z_weight * log_partition[:, None] * p) * mask[:, None]
    rank = (logits > target[:, None]).sum(axis=1)
    return {
        "cross_entropy": (mask * (log_partition - target)).sum(),
        "squared_log_partition": (mask * log_partition**2).sum(),
        "target_tokens": mask.sum(),
        "top1": (mask * (rank < 1)).sum(),
        "top5": (mask * (rank < 5)).sum(),
    }, (grad @ head, grad.T @ hidden)


def problem(tokens, width, vocabulary, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    head = jnp.asarray(rng.normal(size=(vocabulary, width)) / np.sqrt(width), dtype)
    targets = rng.integers(0, vocabulary, tokens)
    targets[0], targets[-1] = 0, vocabulary - 1
    return hidden, head, jnp.asarray(targets), jnp.asarray(rng.random(tokens) < 0.7)


def value_and_grads(hidden, head, targets, mask, chunk, z_weight):
    def loss(hidden, head):
        sums = chunked_cross_entropy(hidden, head, targets, mask, chunk_tokens=chunk, hits=True)
        return sums.cross_entropy + z_weight * sums.squared_log_partition, sums

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)


@pytest.mark.parametrize("chunk", [16, 50, 64])
def test_equals_a_float64_oracle_at_a_vocabulary_of_99574(chunk):
    arrays = problem(50, 24, 99_574)
    (_, sums), grads = value_and_grads(*arrays, chunk, 1e-3)
    expected, expected_grads = oracle(*map(np.asarray, arrays), 1e-3)
    for name, value in expected.items():
        assert float(getattr(sums, name)) == pytest.approx(value, rel=1e-5), name
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        scale = np.abs(expected_grad).max()
        assert np.abs(np.asarray(grad, np.float64) - expected_grad).max() <= 1e-5 * scale


def test_uniform_logits_cost_log_vocabulary_even_from_bfloat16():
    # log(99574) = 11.50866 rounds to 11.5 in bfloat16.
    hidden, head = jnp.zeros((8, 16), jnp.bfloat16), jnp.ones((99_574, 16), jnp.bfloat16)
    sums = chunked_cross_entropy(hidden, head, jnp.arange(8), jnp.ones(8), chunk_tokens=4)
    assert float(sums.cross_entropy) / 8 == pytest.approx(np.log(99_574), rel=1e-6)


def test_ties_go_to_the_lower_id():
    hidden, head = jnp.zeros((4, 8)), jnp.ones((10, 8))
    sums = chunked_cross_entropy(
        hidden, head, jnp.array([0, 1, 4, 5]), jnp.ones(4), chunk_tokens=4, hits=True
    )
    assert (float(sums.top1), float(sums.top5)) == (1, 3)


def test_masked_tokens_cost_and_give_nothing():
    hidden, head, targets, _ = problem(20, 8, 30)
    mask = jnp.arange(20) < 12
    (loss, sums), (hidden_grad, _) = value_and_grads(hidden, head, targets, mask, 7, 0.0)
    (short, _), _ = value_and_grads(hidden[:12], head, targets[:12], mask[:12], 7, 0.0)
    assert float(sums.target_tokens) == 12
    assert float(loss) == pytest.approx(float(short), rel=1e-6)
    assert np.all(np.asarray(hidden_grad[12:]) == 0)
    (nothing, _), grads = value_and_grads(hidden, head, targets, jnp.zeros(20), 7, 1e-3)
    assert float(nothing) == 0
    assert all(np.all(np.asarray(g) == 0) for g in grads)


def test_targets_stay_inside_documents_and_off_padding():
    segments = np.array([[1, 1, 2, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    expected = [[True, False, True, True, False, False], [False] * 6]
    assert target_mask(segments).tolist() == expected


def test_memory_on_an_rtx_3090():
    """8,192 tokens, width 3,072, vocabulary 100,352, bf16: XLA's own figures for the card."""
    tokens, width, vocabulary = 8192, 3072, 100_352
    arguments = (
        jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.bool_),
    )

    def chunked(hidden, head, targets, mask):
        return chunked_cross_entropy(hidden, head, targets, mask, chunk_tokens=512).cross_entropy

    def plain(hidden, head, targets, mask):
        logits = jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)
        losses = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(tokens), targets]
        return jnp.sum(losses * mask)

    def temporaries(loss):
        compiled = compile_for(RTX3090, jax.value_and_grad(loss, argnums=(0, 1)), *arguments)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    # The head's gradient is accumulated in float32 before it is rounded into its bf16 output.
    accumulator = 4 * vocabulary * width
    beyond = temporaries(chunked) - accumulator
    assert beyond < 0.9e9
    assert temporaries(plain) > 6e9
