"""Cross-entropy and distillation that never hold the logits of more than a chunk of tokens.

Shape legend: N tokens (rows and positions flattened), C tokens of a chunk, D width, V vocabulary,
k tokens that a teacher names at each position.

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
    # Sum of KL(teacher || student) over tempered buckets, in nats; None without a teacher.
    distillation: Array | None = None


class TeacherRecords(NamedTuple):
    """What a teacher predicts: k tokens by name, and one bucket for all others.

    The k + 1 masses are those at temperature 1 and sum to 1, up to the rounding of their storage:
    they are normalised where they are read.
    """

    # [N, k] int, k different token ids.
    ids: Array
    # [N, k] float, log-probability of each, nats.
    log_probs: Array
    # [N] float, log of the mass of all other tokens; -inf where there are none.
    log_tail: Array


class LossWeights(NamedTuple):
    """Weights of the sums whose total is differentiated."""

    cross_entropy: float | Array
    squared_log_partition: float | Array
    distillation: float | Array = 0.0


def zero_sums(dtype: Any, distilled: bool = False) -> LossSums:
    """Sums over no tokens, scalars of the dtype; `distilled` has a sum for a teacher."""
    zero = jnp.zeros((), dtype)
    return LossSums(*[zero] * 5, distillation=zero if distilled else None)


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


class _Chunk(NamedTuple):
    """Arrays of a chunk of tokens, or of all chunks with one axis more in front."""

    hidden: Array
    targets: Array
    mask: Array
    teacher: TeacherRecords | None


def _scanned(
    hidden_ND: Array, targets_N: Array, mask_N: Array, teacher: TeacherRecords | None, chunk: int
) -> _Chunk:
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    tokens = _Chunk(hidden_ND, targets_N, mask_N.astype(wide), teacher)
    return jax.tree.map(lambda x: _chunks(x, chunk), tokens)


def _logits(hidden_CD: Array, head_VD: Array) -> Array:
    """Logits [C, V], products in the inputs' dtype, sums and result in at least float32."""
    wide = jnp.promote_types(hidden_CD.dtype, jnp.float32)
    head_VD = head_VD.astype(hidden_CD.dtype)
    return jnp.einsum("cd,vd->cv", hidden_CD, head_VD, preferred_element_type=wide)


class _Buckets(NamedTuple):
    """Tempered log-masses of teacher and student over k + 1 buckets, and the student's rest."""

    # [C, k] token ids, all different also where the mask is 0.
    ids: Array
    # [C, k + 1], each row's masses sum to 1; the last bucket holds all other tokens.
    teacher: Array
    student: Array
    # [C, V]: how the student's mass outside of the k tokens is divided; 0 at those tokens.
    shares: Array


def _split_off(logits_CV: Array, ids_Ck: Array) -> tuple[Array, Array]:
    """Logits with -inf at the tokens named, [C, V], and the log-sum-exp of those left, [C].

    Summing what is left, rather than taking the named masses from 1, keeps every digit of a small
    rest.
    """
    rows = jnp.arange(logits_CV.shape[0])[:, None]
    rest_CV = logits_CV.at[rows, ids_Ck].set(-jnp.inf, unique_indices=True)
    return rest_CV, jax.nn.logsumexp(rest_CV, axis=-1)


def _buckets(
    logits_CV: Array, mask_C: Array, teacher: TeacherRecords, temperature: float
) -> _Buckets:
    # Where nothing counts there may be no record.
    known_C1 = mask_C[:, None] > 0
    k = teacher.ids.shape[-1]
    ids_Ck = jnp.where(known_C1, teacher.ids.astype(jnp.int32), jnp.arange(k))
    rest_CV, rest_C = _split_off(logits_CV, ids_Ck)
    chosen_Ck = jnp.take_along_axis(logits_CV, ids_Ck, axis=-1)
    recorded = jnp.concatenate([teacher.log_probs, teacher.log_tail[:, None]], axis=-1)
    recorded = jnp.where(known_C1, recorded.astype(logits_CV.dtype), 0.0)
    # Both are normalised here: the student's log-partition cancels, and so does what rounding the
    # teacher's masses for storage took from their sum.
    own = jnp.concatenate([chosen_Ck, rest_C[:, None]], axis=-1)
    # k = V leaves no rest, whose shares are then exp(-inf) = 0.
    finite_C1 = jnp.where(jnp.isfinite(rest_C), rest_C, 0.0)[:, None]
    return _Buckets(
        ids_Ck,
        jax.nn.log_softmax(recorded / temperature, axis=-1),
        jax.nn.log_softmax(own / temperature, axis=-1),
        jnp.exp(rest_CV - finite_C1),
    )


def _divergence(buckets: _Buckets, mask_C: Array) -> Array:
    """KL(teacher || student) over the buckets, summed over masked tokens; never below 0.

    Each bucket gives p log(p / q) - p + q, which is not negative, and both masses sum to 1. For
    masses that are nearly equal its series in log(p / q) loses no digits.
    """
    p, q = jnp.exp(buckets.teacher), jnp.exp(buckets.student)
    real = p > 0  # an empty bucket of the teacher gives q
    d = jnp.where(real, buckets.teacher - buckets.student, 0.0)
    near = jnp.abs(d) < 0.1
    x = jnp.where(near, d, 0.0)
    series = p * jnp.square(x) * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x / 720))))
    each_C = jnp.sum(jnp.where(near & real, series, p * d - p + q), axis=-1)
    # Without a record it may be infinite, which no factor of 0 would take back.
    return jnp.sum(jnp.where(mask_C > 0, mask_C * each_C, 0.0))


def chunked_cross_entropy(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    *,
    chunk_tokens: int,
    hits: bool = False,
    teacher: TeacherRecords | None = None,
    temperature: float = 1.0,
) -> LossSums:
    """Cross-entropy of `softmax(hidden @ head.T)` against the targets, summed over masked tokens.

    Logits exist for `chunk_tokens` tokens at a time, in float32, in the forward and again in the
    backward pass; the head's gradient is accumulated over chunks in float32. Gradient flows to
    `hidden_ND` and `head_VD` from `cross_entropy`, `squared_log_partition` and `distillation`.

    With a teacher also the divergence KL(teacher || student), after Hinton et al. 2015, "Distilling
    the Knowledge in a Neural Network", over k + 1 buckets: the k tokens that the teacher names, and
    one for the remaining mass of each model at temperature 1. A bucket's tempered mass is
    p_i^(1/T) / sum_j p_j^(1/T) over the k + 1 buckets, for teacher and student alike; with k = V
    that is the softmax of logits / T. The factor T^2, which makes gradients comparable to the
    cross-entropy's, is left to whoever weights the sums.

    Args:
        hidden_ND: [N, D], any float dtype.
        head_VD: [V, D]; used in the dtype of `hidden_ND`.
        targets_N: [N] int, token ids.
        mask_N: [N] bool or float, 1 where the token counts. Masked tokens cost and give nothing.
        chunk_tokens: static; tokens whose logits exist together.
        hits: static; also count top-1 and top-5 hits (otherwise they are 0).
        teacher: what a teacher predicts at the N positions; records of masked tokens are not read.
        temperature: static; T of the divergence.

    Returns:
        LossSums. Any number of tokens is allowed; the last chunk is padded with masked tokens.
    """
    sums = _sums(hidden_ND, head_VD, targets_N, mask_N, teacher, chunk_tokens, hits, temperature)
    return cast(LossSums, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _sums(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    teacher: TeacherRecords | None,
    chunk_tokens: int,
    hits: bool,
    temperature: float,
) -> LossSums:
    return _scan_chunks(
        hidden_ND, head_VD, targets_N, mask_N, teacher, chunk_tokens, hits, temperature
    )[0]


def _scan_chunks(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    mask_N: Array,
    teacher: TeacherRecords | None,
    chunk_tokens: int,
    hits: bool,
    temperature: float,
    by_token: bool = False,
) -> tuple[LossSums, Array | None]:
    """Sums; and each token's cross-entropy [N], 0 where the mask is 0, if asked for."""
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def add_chunk(sums: LossSums, chunk: _Chunk) -> tuple[LossSums, Array | None]:
        hidden_CD, targets_C, mask_C, teacher = chunk
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
        if teacher is not None:
            buckets = _buckets(logits_CV, mask_C, teacher, temperature)
            chunk_sums = chunk_sums._replace(distillation=_divergence(buckets, mask_C))
        return jax.tree.map(jnp.add, sums, chunk_sums), losses_C if by_token else None

    zeros = zero_sums(wide, teacher is not None)
    scanned = _scanned(hidden_ND, targets_N, mask_N, teacher, chunk_tokens)
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
        hidden_ND, head_VD, targets_N, mask_N, None, chunk_tokens, True, 1.0, by_token=True
    )
    assert losses_N is not None
    return sums, losses_N


def _forward(hidden_ND, head_VD, targets_N, mask_N, teacher, chunk_tokens, hits, temperature):
    sums = _sums(hidden_ND, head_VD, targets_N, mask_N, teacher, chunk_tokens, hits, temperature)
    return sums, (hidden_ND, head_VD, targets_N, mask_N, teacher)


def _chunk_gradients(
    chunk: _Chunk, head_VD: Array, weights: LossWeights, temperature: float
) -> tuple[LossSums, Array, Array]:
    """Sums of a chunk, and the gradients [C, D] and [V, D] of their weighted total."""
    hidden_CD, targets_C, mask_C, teacher = chunk
    cross_entropy, squared_log_partition, distillation = weights
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
    if teacher is not None:
        buckets = _buckets(logits_CV, mask_C, teacher, temperature)
        sums = sums._replace(distillation=_divergence(buckets, mask_C))
        # d(divergence) / d(log-mass of a bucket) = (q - p) / T, and the last bucket's log-mass is
        # a log-sum-exp: each of its tokens has its share of that.
        pull = (jnp.exp(buckets.student) - jnp.exp(buckets.teacher)) * (distillation / temperature)
        rows = jnp.arange(grad_CV.shape[0])[:, None]
        grad_CV += buckets.shares * pull[:, -1:]
        grad_CV = grad_CV.at[rows, buckets.ids].add(pull[:, :-1], unique_indices=True)
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
    weights: LossWeights,
    teacher: TeacherRecords | None = None,
    temperature: float = 1.0,
) -> tuple[LossSums, Array, Array]:
    """Sums of the loss and their gradients, from logits that are computed once.

    The gradients are those of the weighted total of `cross_entropy`, `squared_log_partition` and,
    with a teacher, `distillation`.

    Args:
        hidden_ND: [N, D], any float dtype.
        head_VD: [V, D]; used in the dtype of `hidden_ND`.
        targets_N: [N] int, token ids.
        mask_N: [N] bool or float, 1 where the token counts.
        head_grad_VD: [V, D] float32, what the head's gradient is added to.
        chunk_tokens: static; tokens whose logits exist together.
        weights: of the sums.
        teacher: as for :func:`chunked_cross_entropy`.
        temperature: static; T of the divergence.

    Returns:
        LossSums without hits, the gradient [N, D] of `hidden_ND`, and the new `head_grad_VD`.
    """
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def add_chunk(carry: tuple[LossSums, Array], chunk: _Chunk):
        sums, head_grad_VD = carry
        chunk_sums, hidden_grad_CD, product_VD = _chunk_gradients(
            chunk, head_VD, weights, temperature
        )
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        return (sums, head_grad_VD + product_VD), hidden_grad_CD

    zeros = zero_sums(wide, teacher is not None)
    scanned = _scanned(hidden_ND, targets_N, mask_N, teacher, chunk_tokens)
    (sums, head_grad_VD), hidden_grad = jax.lax.scan(add_chunk, (zeros, head_grad_VD), scanned)
    return sums, hidden_grad.reshape(-1, hidden_ND.shape[-1])[: hidden_ND.shape[0]], head_grad_VD


def _backward(chunk_tokens, hits, temperature, residuals, cotangents: LossSums):
    del hits
    hidden_ND, head_VD, targets_N, mask_N, teacher = residuals
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    weights = LossWeights(*cotangents[:2])
    if teacher is not None:
        assert cotangents.distillation is not None
        weights = weights._replace(distillation=cotangents.distillation)

    def add_chunk(head_grad_VD: Array, chunk: _Chunk) -> tuple[Array, Array]:
        _, hidden_grad_CD, product_VD = _chunk_gradients(chunk, head_VD, weights, temperature)
        return head_grad_VD + product_VD, hidden_grad_CD

    scanned = _scanned(hidden_ND, targets_N, mask_N, teacher, chunk_tokens)
    head_grad_VD, hidden_grad = jax.lax.scan(add_chunk, jnp.zeros(head_VD.shape, wide), scanned)
    hidden_grad_ND = hidden_grad.reshape(-1, hidden_ND.shape[-1])[: hidden_ND.shape[0]]
    # Through one barrier, so that XLA rounds the head's gradient before it goes on with the layers;
    # else its float32 sum stays until the optimizer reads it. Nothing else has a gradient.
    gradients = (hidden_grad_ND, head_grad_VD.astype(head_VD.dtype))
    return *jax.lax.optimization_barrier(gradients), None, None, None


_sums.defvjp(_forward, _backward)


def top_log_probabilities(
    hidden_ND: Array, head_VD: Array, *, k: int, chunk_tokens: int
) -> TeacherRecords:
    """The k most likely next tokens at each position, and the mass of all others.

    Args:
        hidden_ND: [N, D], any float dtype.
        head_VD: [V, D]; used in the dtype of `hidden_ND`. Rows that are left out are no tokens.
        k: static, at most V.
        chunk_tokens: static; tokens whose logits exist together.

    Returns:
        Records in at least float32, tokens by falling probability; k = V has a tail of -inf.
    """

    def of_chunk(hidden_CD: Array) -> TeacherRecords:
        logits_CV = _logits(hidden_CD, head_VD)
        log_partition_C1 = jax.nn.logsumexp(logits_CV, axis=-1, keepdims=True)
        chosen_Ck, ids_Ck = jax.lax.top_k(logits_CV, k)
        _, rest_C = _split_off(logits_CV, ids_Ck)
        return TeacherRecords(ids_Ck, chosen_Ck - log_partition_C1, rest_C - log_partition_C1[:, 0])

    chunks = jax.lax.map(of_chunk, _chunks(hidden_ND, chunk_tokens))
    tokens = hidden_ND.shape[0]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], chunks)
