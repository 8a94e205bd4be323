"""Cross-entropy that never holds the logits of more than a chunk of tokens.

Shape legend: N tokens (rows and positions flattened), C tokens of a chunk, D width, V vocabulary.

Everything here returns sums and counts, never means: whoever sums over micro-batches divides once.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array


class LossSums(NamedTuple):
    """Sums over the tokens whose mask is 1; scalars in at least float32."""

    # Sum of -log p(target), in nats.
    cross_entropy: Array
    # Sum of the squared log-partition, log(sum(exp(logits)))^2: z-loss without its weight.
    squared_log_partition: Array
    # Number of tokens with mask 1.
    target_tokens: Array
    # Targets with the largest logit. Ties go to the lower token id, as in argmax.
    top1: Array
    # Targets among the five largest logits.
    top5: Array


def target_mask(segment_ids: Any) -> Any:
    """Which of T positions carry loss: bool [..., T] from segment ids [..., T + 1].

    A position's target is the next token, if that is of the same document and not padding. Works
    on JAX and on NumPy arrays.
    """
    return (segment_ids[..., 1:] == segment_ids[..., :-1]) & (segment_ids[..., 1:] > 0)


def _chunks(x: Array, chunk: int) -> Array:
    """[N, ...] -> [ceil(N / chunk), chunk, ...], zero-padded at the end."""
    padding = [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape((-1, chunk, *x.shape[1:]))


def _scanned(
    hidden_ND: Array, targets_N: Array, mask_N: Array, chunk: int
) -> tuple[Array, Array, Array]:
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    return _chunks(hidden_ND, chunk), _chunks(targets_N, chunk), _chunks(mask_N.astype(wide), chunk)


def _logits(hidden_CD: Array, head_VD: Array) -> Array:
    """Logits [C, V], products in the inputs' dtype, sums and result in at least float32."""
    wide = jnp.promote_types(hidden_CD.dtype, jnp.float32)
    head_VD = head_VD.astype(hidden_CD.dtype)
    return jnp.einsum("cd,vd->cv", hidden_CD, head_VD, preferred_element_type=wide)


def chunked_cross_entropy(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    *,
    chunk_tokens: int,
    hits: bool = False,
) -> LossSums:
    """Cross-entropy of `softmax(hidden @ head.T)` against the targets, summed over masked tokens.

    Logits exist for `chunk_tokens` tokens at a time, in float32, in the forward and again in the
    backward pass; the head's gradient is accumulated over chunks in float32. Gradient flows to
    `hidden_ND` and `head_VD` from `cross_entropy` and `squared_log_partition`.

    Args:
        hidden_ND: [N, D], any float dtype.
        head_VD: [V, D]; used in the dtype of `hidden_ND`.
        targets_N: [N] int, token ids.
        mask_N: [N] bool or float, 1 where the token counts. Masked tokens cost and give nothing.
        chunk_tokens: static; tokens whose logits exist together.
        hits: static; also count top-1 and top-5 hits (otherwise they are 0).

    Returns:
        LossSums. Any number of tokens is allowed; the last chunk is padded with masked tokens.
    """
    return cast(LossSums, _sums(hidden_ND, head_VD, targets_N, mask_N, chunk_tokens, hits))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    chunk_tokens: int,
    hits: bool,
) -> LossSums:
    return _scan_chunks(hidden_ND, head_VD, targets_N, mask_N, chunk_tokens, hits, False)[0]


def _scan_chunks(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    chunk_tokens: int,
    hits: bool,
    by_token: bool,
) -> tuple[LossSums, Array | None]:
    """Sums; and each token's cross-entropy [N], 0 where the mask is 0, if asked for."""
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def add_chunk(
        sums: LossSums, chunk: tuple[Array, Array, Array]
    ) -> tuple[LossSums, Array | None]:
        hidden_CD, targets_C, mask_C = chunk
        logits_CV = _logits(hidden_CD, head_VD)
        log_partition_C = jax.nn.logsumexp(logits_CV, axis=-1)
        target_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)
        top1 = top5 = jnp.zeros((), wide)
        if hits:
            ids_V = jnp.arange(logits_CV.shape[-1])
            ahead_CV = (logits_CV > target_C) | (
                (logits_CV == target_C) & (ids_V < targets_C[:, None])
            )
            rank_C = jnp.sum(ahead_CV, axis=-1)
            top1, top5 = jnp.sum(mask_C * (rank_C < 1)), jnp.sum(mask_C * (rank_C < 5))
        losses_C = mask_C * (log_partition_C - target_C[:, 0])
        chunk_sums = LossSums(
            jnp.sum(losses_C),
            jnp.sum(mask_C * jnp.square(log_partition_C)),
            jnp.sum(mask_C),
            top1,
            top5,
        )
        return jax.tree.map(jnp.add, sums, chunk_sums), losses_C if by_token else None

    zeros = LossSums(*[jnp.zeros((), wide)] * 5)
    scanned = _scanned(hidden_ND, targets_N, mask_N, chunk_tokens)
    sums, losses = jax.lax.scan(add_chunk, zeros, scanned)
    return sums, None if losses is None else losses.reshape(-1)[: hidden_ND.shape[0]]


def sums_and_token_losses(
    hidden_ND: Array, head_VD: Array, targets_N: Array, mask_N: Array, *, chunk_tokens: int
) -> tuple[LossSums, Array]:
    """As :func:`chunked_cross_entropy` with hits, and what each token loses; for evaluation.

    Returns:
        LossSums; and -log p(target) in nats, [N] in at least float32, 0 for masked tokens.
    """
    sums, losses_N = _scan_chunks(
        hidden_ND, head_VD, targets_N, mask_N, chunk_tokens, hits=True, by_token=True
    )
    assert losses_N is not None
    return sums, losses_N


def _forward(hidden_ND, head_VD, targets_N, mask_N, chunk_tokens, hits):
    sums = _sums(hidden_ND, head_VD, targets_N, mask_N, chunk_tokens, hits)
    return sums, (hidden_ND, head_VD, targets_N, mask_N)


def _chunk_gradients(
    chunk: tuple[Array, Array, Array],
    head_VD: Array,
    cross_entropy: float | Array,
    squared_log_partition: float | Array,
) -> tuple[LossSums, Array, Array]:
    """Sums of a chunk, and the gradients [C, D] and [V, D] of their weighted total."""
    hidden_CD, targets_C, mask_C = chunk
    wide = jnp.promote_types(hidden_CD.dtype, jnp.float32)
    logits_CV = _logits(hidden_CD, head_VD)
    log_partition_C = jax.nn.logsumexp(logits_CV, axis=-1)
    target_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
    zero = jnp.zeros((), wide)
    sums = LossSums(
        jnp.sum(mask_C * (log_partition_C - target_C)),
        jnp.sum(mask_C * jnp.square(log_partition_C)),
        jnp.sum(mask_C),
        zero,
        zero,
    )
    probability_CV = jnp.exp(logits_CV - log_partition_C[:, None])
    hit_CV = jnp.arange(logits_CV.shape[-1]) == targets_C[:, None]
    # d(cross entropy) = p - onehot; d(log_partition^2) = 2 log_partition p.
    z_C = cross_entropy + 2 * squared_log_partition * log_partition_C
    grad_CV = probability_CV * z_C[:, None] - hit_CV * cross_entropy
    grad_CV = (grad_CV * mask_C[:, None]).astype(hidden_CD.dtype)
    hidden_grad_CD = jnp.einsum(
        "cv,vd->cd", grad_CV, head_VD.astype(hidden_CD.dtype), preferred_element_type=wide
    )
    head_grad_VD = jnp.einsum("cv,cd->vd", grad_CV, hidden_CD, preferred_element_type=wide)
    return sums, hidden_grad_CD.astype(hidden_CD.dtype), head_grad_VD


def cross_entropy_gradients(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    head_grad_VD: Array,
    *,
    chunk_tokens: int,
    z_loss: float,
) -> tuple[LossSums, Array, Array]:
    """Sums of the loss and their gradients, from logits that are computed once.

    The gradients are those of `cross_entropy + z_loss * squared_log_partition`.

    Args:
        hidden_ND: [N, D], any float dtype.
        head_VD: [V, D]; used in the dtype of `hidden_ND`.
        targets_N: [N] int, token ids.
        mask_N: [N] bool or float, 1 where the token counts.
        head_grad_VD: [V, D] float32, what the head's gradient is added to.
        chunk_tokens: static; tokens whose logits exist together.
        z_loss: weight of the squared log-partition.

    Returns:
        LossSums without hits, the gradient [N, D] of `hidden_ND`, and the new `head_grad_VD`.
    """
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def add_chunk(carry: tuple[LossSums, Array], chunk: tuple[Array, Array, Array]):
        sums, head_grad_VD = carry
        chunk_sums, hidden_grad_CD, product_VD = _chunk_gradients(chunk, head_VD, 1.0, z_loss)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        return (sums, head_grad_VD + product_VD), hidden_grad_CD

    zeros = LossSums(*[jnp.zeros((), wide)] * 5)
    scanned = _scanned(hidden_ND, targets_N, mask_N, chunk_tokens)
    (sums, head_grad_VD), hidden_grad = jax.lax.scan(add_chunk, (zeros, head_grad_VD), scanned)
    return sums, hidden_grad.reshape(-1, hidden_ND.shape[-1])[: hidden_ND.shape[0]], head_grad_VD


def _backward(chunk_tokens, hits, residuals, cotangents: LossSums):
    del hits
    hidden_ND, head_VD, targets_N, mask_N = residuals
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def add_chunk(head_grad_VD: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        _, hidden_grad_CD, product_VD = _chunk_gradients(chunk, head_VD, *cotangents[:2])
        return head_grad_VD + product_VD, hidden_grad_CD

    scanned = _scanned(hidden_ND, targets_N, mask_N, chunk_tokens)
    head_grad_VD, hidden_grad = jax.lax.scan(add_chunk, jnp.zeros(head_VD.shape, wide), scanned)
    hidden_grad_ND = hidden_grad.reshape(-1, hidden_ND.shape[-1])[: hidden_ND.shape[0]]
    # Through one barrier, so that XLA rounds the head's gradient before it goes on with the layers;
    # else its float32 sum stays until the optimizer reads it. Targets and mask have no gradient.
    gradients = (hidden_grad_ND, head_grad_VD.astype(head_VD.dtype))
    return *jax.lax.optimization_barrier(gradients), None, None


_sums.defvjp(_forward, _backward)
