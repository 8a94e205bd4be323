"""Validation at any depth from one compiled program, every figure weighted by target tokens."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.data.pipeline import Batch, Rows
from jaxlm.data.shards import DataDirectory, TokenStream
from jaxlm.losses import LossSums, sums_and_token_losses, target_mask
from jaxlm.models.build import Params, apply
from jaxlm.models.recurrent import RecurrentDepthLM, Trace
from jaxlm.optim import global_norm

# Noise of initial states in evaluation belongs to the row alone: the same at every visit.
_NOISE_SEED = 0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Figures of one validation pass; means are over target tokens."""

    # Core steps; None for a transformer.
    depth: int | None
    # Mean -log p(target), nats.
    cross_entropy: float
    # exp(cross_entropy).
    perplexity: float
    # Share of targets with the largest logit.
    top1: float
    # Share of targets among the five largest logits.
    top5: float
    # Bits per UTF-8 byte of the target tokens' text; None where token lengths are unknown.
    bits_per_byte: float | None
    # Target tokens per second, compilation excluded.
    tokens_per_second: float
    # Number of target tokens.
    target_tokens: int


@dataclasses.dataclass(frozen=True)
class DocumentLosses:
    """What each document of the validation stream costs, by its number in the stream.

    The number depends on the data alone: it is the same for every model, depth and layout.
    """

    # [depths, documents] float64: sum of -log p over the document's target tokens, nats.
    loss: np.ndarray
    # [documents] int64: target tokens; 0 for documents of one token, and beyond the rows read.
    tokens: np.ndarray


@functools.partial(jax.jit, static_argnums=(0, 1))
def eval_step(
    model: ModelConfig, chunk_tokens: int, params: Params, batch: Batch, depth: Array
) -> tuple[LossSums, Array]:
    """Sums over one batch of rows, arrays [B, T + 1], and token losses; `depth` is traced.

    Returns:
        The sums; and [B, T] float32, what each target costs in nats, 0 where there is none.
    """
    tokens, segments, positions, keys_B = model_inputs(batch)
    lm = apply(model, params)
    hidden_BTD = lm(
        tokens[:, :-1], segments[:, :-1], positions[:, :-1], keys_B, train=False, depth=depth
    )
    sums, losses_N = sums_and_token_losses(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
        lm.head(),
        tokens[:, 1:].reshape(-1),
        target_mask(segments).reshape(-1),
        chunk_tokens=chunk_tokens,
    )
    return sums, losses_N.reshape(tokens[:, 1:].shape)


def model_inputs(batch: Batch) -> tuple[Array, Array, Array, Array]:
    """Tokens, segment ids and positions, [B, T + 1], and a random key per row."""
    seed = jax.random.key(_NOISE_SEED)
    keys_B = jax.vmap(lambda block: jax.random.fold_in(seed, block))(jnp.asarray(batch["block"]))
    tokens = jnp.asarray(batch["tokens"]).astype(jnp.int32)
    return tokens, jnp.asarray(batch["segment_ids"]), jnp.asarray(batch["positions"]), keys_B


class WeightFigures(NamedTuple):
    """What weights alone tell of a recurrent model, float32 scalars."""

    # Spectral norms of the injection's maps from the state and from the prelude's output.
    state_gain: Array
    input_gain: Array
    # Norms of the core's weights and of all others.
    core_norm: Array
    other_norm: Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def trace_step(
    model: ModelConfig, max_steps: int, params: Params, batch: Batch, depth: Array, steps: Array
) -> tuple[Trace, WeightFigures]:
    """Follow the state over one batch of rows, arrays [B, T + 1]; see RecurrentDepthLM.trace."""
    tokens, segments, positions, keys_B = model_inputs(batch)
    lm = apply(model, params)
    assert isinstance(lm, RecurrentDepthLM)
    trace = lm.trace(
        tokens[:, :-1],
        segments[:, :-1],
        positions[:, :-1],
        keys_B,
        depth=depth,
        steps=steps,
        max_steps=max_steps,
    )
    others = {name: part for name, part in params.items() if name != "core"}
    return trace, WeightFigures(
        *lm.core.injection.gains(), global_norm(params["core"]), global_norm(others)
    )


def trace(
    model: ModelConfig,
    params: Params,
    rows: Rows,
    *,
    depth: int,
    steps: int,
    max_steps: int,
    batch_rows: int,
    limit: int,
) -> tuple[Trace, WeightFigures]:
    """Follow the state of a recurrent model, averaged over rows by their tokens.

    Args:
        model: architecture, with `vocabulary_size` set.
        params: parameters.
        rows: validation rows.
        depth: steps after which the coda reads the state.
        steps: steps to follow, at least `depth`.
        max_steps: static bound of the steps: equal ones share a compilation.
        batch_rows: rows of a batch.
        limit: number of rows to read, from the first.

    Returns:
        Means over all rows, those of steps cut to [steps], and figures of the weights.
    """
    total: list[np.ndarray] = []
    tokens, weights = 0.0, None
    for _, batch in _batches(rows, limit, batch_rows):
        one, weights = jax.device_get(
            trace_step(
                model,
                max_steps,
                params,
                batch,
                jnp.asarray(depth, jnp.int32),
                jnp.asarray(steps, jnp.int32),
            )
        )
        parts = [np.asarray(figure, np.float64) * float(one.tokens) for figure in one[:-1]]
        total = [sum_ + part for sum_, part in zip(total, parts, strict=True)] if total else parts
        tokens += float(one.tokens)
    if weights is None or tokens == 0:
        raise ValueError("the validation rows hold no token")
    *by_step, hidden = (part / tokens for part in total)
    norm, residual, correlation = (jnp.asarray(figure[:steps]) for figure in by_step)
    return Trace(norm, residual, correlation, jnp.asarray(hidden), jnp.asarray(tokens)), weights


def _batches(rows: Rows, limit: int | None, size: int) -> Iterator[tuple[np.ndarray, Batch]]:
    """Numbers of the rows of each batch, -1 for padding, and their arrays."""
    count = len(rows) if limit is None else min(limit, len(rows))
    for start in range(0, count, size):
        numbers = np.arange(start, start + size)
        numbers = np.where(numbers < count, numbers, -1)
        yield numbers, rows.read(numbers)


def _target_bytes(batch: Batch, token_bytes: np.ndarray, prefix: tuple[int, int] | None) -> int:
    mask, tokens = target_mask(batch["segment_ids"]), batch["tokens"]
    total = int(token_bytes[tokens[:, 1:][mask]].sum())
    if prefix is not None:
        begin_id, extra = prefix
        total -= extra * int(np.sum(tokens[:, :-1][mask] == begin_id))
    return total


def _target_documents(rows: Rows, numbers: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """Document of each target of some rows, -1 where there is none: [B * T] int64."""
    documents = rows.documents(numbers, segment_ids)[:, 1:]
    return np.where(target_mask(segment_ids), documents, -1).reshape(-1)


def _add(
    computed: tuple[LossSums, Array], targets: np.ndarray, loss_D: np.ndarray, tokens_D: np.ndarray
) -> np.ndarray:
    """Add a batch's losses and targets to their documents; returns its sums, [5] float64."""
    sums, losses = computed
    chosen = targets >= 0
    np.add.at(loss_D, targets[chosen], np.asarray(losses, np.float64).reshape(-1)[chosen])
    np.add.at(tokens_D, targets[chosen], 1)
    return np.asarray(sums[:5], np.float64)  # without a teacher


def evaluate(
    model: ModelConfig,
    params: Params,
    rows: Rows,
    *,
    depths: Sequence[int],
    batch_rows: int,
    chunk_tokens: int,
    token_bytes: np.ndarray | None = None,
    text_prefix: tuple[int, int] | None = None,
    limit: int | None = None,
    on_batch: Callable[[int, str], None] | None = None,
) -> list[Evaluation]:
    """Evaluate at each depth, with one compilation for all of them.

    Args:
        model: architecture, with `vocabulary_size` set.
        params: parameters.
        rows: validation rows.
        depths: core steps to evaluate at; a transformer is evaluated once.
        batch_rows: rows of a batch; the last one is filled up with padding.
        chunk_tokens: tokens whose logits exist at one time.
        token_bytes: [V], bytes each token stands for, for bits per byte.
        text_prefix: id of the token that begins a document, and bytes that the token after it
            stands for beyond the text, see `DataDirectory.text_prefix`.
        limit: number of rows to read, from the first; None reads all.
        on_batch: called with (1, text) after each batch, for progress.

    Raises:
        ValueError: the rows hold no target token.
    """
    return evaluate_documents(
        model,
        params,
        rows,
        depths=depths,
        batch_rows=batch_rows,
        chunk_tokens=chunk_tokens,
        token_bytes=token_bytes,
        text_prefix=text_prefix,
        limit=limit,
        on_batch=on_batch,
    )[0]


def evaluate_documents(
    model: ModelConfig,
    params: Params,
    rows: Rows,
    *,
    depths: Sequence[int],
    batch_rows: int,
    chunk_tokens: int,
    token_bytes: np.ndarray | None = None,
    text_prefix: tuple[int, int] | None = None,
    limit: int | None = None,
    on_batch: Callable[[int, str], None] | None = None,
) -> tuple[list[Evaluation], DocumentLosses]:
    """As :func:`evaluate`, in the same pass also what each document costs at each depth.

    The losses of a batch's tokens, 4 bytes each, come back from the device beside the sums, and are
    added up by document in float64.
    """
    chosen: Sequence[int | None] = depths if model.kind == "recurrent" else [None]
    step = functools.partial(eval_step, model, chunk_tokens, params)
    first = next(_batches(rows, limit, batch_rows), None)
    if first is None:
        raise ValueError("the validation split is empty")
    jax.block_until_ready(step(first[1], jnp.asarray(1, jnp.int32)))  # compiles
    losses = np.zeros((len(chosen), len(rows.stream.document_ends)))
    tokens_D = np.zeros(losses.shape[1], np.int64)
    results = []
    for depth, loss_D in zip(chosen, losses, strict=True):
        # Sums of a batch are float32; sums over batches are float64.
        total, target_bytes = np.zeros(5), 0
        tokens_D[:] = 0  # the same at every depth
        running: tuple[tuple[LossSums, Array], np.ndarray] | None = None
        began = time.perf_counter()
        for numbers, batch in _batches(rows, limit, batch_rows):
            computing = step(batch, jnp.asarray(depth or 0, jnp.int32))
            targets = _target_documents(rows, numbers, batch["segment_ids"])
            previous, running = running, (computing, targets)
            if previous is not None:  # read a batch while the next one is computed
                total += _add(*previous, loss_D, tokens_D)
            if token_bytes is not None:
                target_bytes += _target_bytes(batch, token_bytes, text_prefix)
            if on_batch is not None:
                on_batch(1, "" if depth is None else f"depth {depth}")
        assert running is not None
        total += _add(*running, loss_D, tokens_D)
        seconds = time.perf_counter() - began
        nats, _, tokens, top1, top5 = total.tolist()  # the order of LossSums
        if tokens == 0:
            raise ValueError("the validation rows hold no target token")
        results.append(
            Evaluation(
                depth=depth,
                cross_entropy=nats / tokens,
                perplexity=math.exp(min(nats / tokens, 700.0)),
                top1=top1 / tokens,
                top5=top5 / tokens,
                bits_per_byte=nats / math.log(2) / target_bytes if target_bytes else None,
                tokens_per_second=tokens / seconds,
                target_tokens=round(tokens),
            )
        )
    return results, DocumentLosses(losses, tokens_D)


def number_of_batches(rows: Rows, limit: int | None, batch_rows: int, depths: Iterable[int]) -> int:
    """How many batches :func:`evaluate` reads in all, for progress."""
    count = len(rows) if limit is None else min(limit, len(rows))
    return -(-count // batch_rows) * len(list(depths))


def unigram_cross_entropy(data: DataDirectory, stream: TokenStream) -> float:
    """Cross-entropy, in nats per token, of validation under training's token frequencies.

    A floor of usefulness: what a model that knows nothing but how common tokens are would reach.
    Counts get one added (Laplace), so that no token is impossible. Every token of the validation
    `stream` counts, the first of each document included.
    """
    train = np.asarray(data.counts("train"), np.float64) + 1.0
    tokens = np.asarray(stream.read(0, len(stream)))
    validation = np.bincount(tokens, minlength=data.vocabulary_size).astype(np.float64)
    log_probability = np.log(train / train.sum())
    return float(-(validation @ log_probability) / validation.sum())
