import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import logits_of, params_of, tiny_model, write_documents

from jaxlm.config import DataConfig
from jaxlm.data.pipeline import rows_of
from jaxlm.data.shards import DataDirectory
from jaxlm.evaluation.evaluate import (
    eval_step,
    evaluate,
    evaluate_documents,
    unigram_cross_entropy,
)
from jaxlm.evaluation.generate import generate
from jaxlm.losses import target_mask

MODEL = tiny_model(initial_state="zero")


@pytest.fixture
def rows(random_data):
    config = DataConfig(directory=str(random_data), sequence_length=8)
    return rows_of(DataDirectory(random_data).stream("validation"), config)


def evaluated(rows, depths=(1, 3), batch_rows=4, **kwargs):
    return evaluate(
        MODEL,
        params_of(MODEL),
        rows,
        depths=depths,
        batch_rows=batch_rows,
        chunk_tokens=16,
        **kwargs,
    )


def test_figures_equal_numpy_row_by_row(rows):
    """All rows, the padded last batch included, weighted by target tokens."""
    assert len(rows) % 5  # the last batch is not full
    token_bytes = np.arange(64, dtype=np.int32) % 5
    params = params_of(MODEL)
    for got in evaluated(rows, batch_rows=5, token_bytes=token_bytes):
        losses, ranks, sizes = [], [], []
        for i in range(len(rows)):
            row = rows.read(np.array([i]))
            tokens, segments = row["tokens"].astype(int), row["segment_ids"]
            logits = np.asarray(
                logits_of(
                    MODEL,
                    params,
                    tokens[:, :-1],
                    segments[:, :-1],
                    row["positions"][:, :-1],
                    got.depth,
                ),
                np.float64,
            )[0]
            for t in np.flatnonzero(target_mask(segments)[0]):
                target = tokens[0, t + 1]
                losses.append(math.log(np.exp(logits[t]).sum()) - logits[t, target])
                ranks.append((logits[t] > logits[t, target]).sum())
                sizes.append(token_bytes[target])
        assert got.target_tokens == len(losses)
        assert got.cross_entropy == pytest.approx(np.mean(losses), rel=1e-5)
        assert got.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
        assert got.top1 == pytest.approx(np.mean(np.array(ranks) < 1))
        assert got.top5 == pytest.approx(np.mean(np.array(ranks) < 5))
        bits = np.sum(losses) / math.log(2) / np.sum(sizes)
        assert got.bits_per_byte == pytest.approx(bits, rel=1e-5)
        assert got.tokens_per_second > 0


def test_a_space_before_every_text_is_no_byte_of_it(rows):
    """A token is taken to begin documents: the token after it counts one byte less."""
    token_bytes = np.full(64, 2, np.int32)
    batch = rows.read(np.arange(len(rows)))
    mask = target_mask(batch["segment_ids"])
    begin = int(batch["tokens"][0, 0])
    after = int((mask & (batch["tokens"][:, :-1] == begin)).sum())
    assert after > 0
    plain, less = (
        evaluated(rows, batch_rows=5, token_bytes=token_bytes, text_prefix=prefix)[0].bits_per_byte
        for prefix in (None, (begin, 1))
    )
    total = 2 * int(mask.sum())
    assert less / plain == pytest.approx(total / (total - after), rel=1e-6)


def test_batch_size_does_not_matter(rows):
    one, other = (evaluated(rows, batch_rows=b)[1] for b in (3, 16))
    assert one.cross_entropy == pytest.approx(other.cross_entropy, rel=1e-6)
    assert one.target_tokens == other.target_tokens


def test_one_compilation_for_all_depths(rows):
    before = eval_step._cache_size()
    evaluated(rows, depths=(1, 2, 3, 6, 12), batch_rows=7)
    assert eval_step._cache_size() == before + 1


def test_a_limit_reads_the_first_rows(rows):
    progress = []
    limited = evaluated(rows, depths=(2,), limit=5, on_batch=lambda *a: progress.append(a))
    expected = target_mask(rows.read(np.arange(5))["segment_ids"]).sum()
    assert limited[0].target_tokens == expected
    assert progress == [(1, "depth 2")] * 2


def test_no_target_is_an_error_not_a_nan(tmp_path):
    data = DataDirectory(write_documents(tmp_path / "d", [[1, 2]], [[1], [2]], 64))
    config = DataConfig(sequence_length=8, layout="padded")
    with pytest.raises(ValueError, match="no target token"):
        evaluated(rows_of(data.stream("validation"), config))


def test_unigram_by_hand(tmp_path):
    """Training counts 3, 1, 0 plus one each: 4/7, 2/7, 1/7. Validation has one of each."""
    data = DataDirectory(write_documents(tmp_path / "d", [[0, 0, 1, 0]], [[0, 1, 2]], 3))
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_cross_entropy(data, data.stream("validation")) == pytest.approx(expected)


def generated(prompt, length, seed=0, temperature=0.0, top_k=0, end=-1, depth=3):
    buffer = np.zeros(length, np.int32)
    buffer[: len(prompt)] = prompt
    tokens, count = generate(
        MODEL,
        params_of(MODEL),
        jnp.asarray(buffer),
        jnp.asarray(len(prompt)),
        jnp.asarray(end),
        jax.random.key(seed),
        depth=jnp.asarray(depth),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k),
    )
    return np.asarray(tokens)[: int(count)].tolist()


def test_greedy_text_is_the_argmax_of_the_whole_prefix():
    tokens = generated([5, 9], 8)
    assert len(tokens) == 8
    for t in range(2, 8):
        logits = logits_of(MODEL, params_of(MODEL), np.array([tokens[:t]]), depth=3)
        assert tokens[t] == int(np.argmax(logits[0, -1]))
    assert generated([5, 9], 8, seed=1) == tokens


def test_sampling_follows_its_seed_and_limits():
    one = generated([5, 9], 8, temperature=1.0)
    assert generated([5, 9], 8, temperature=1.0) == one
    assert generated([5, 9], 8, seed=1, temperature=1.0) != one
    assert generated([5, 9], 8, temperature=1.0, top_k=1) == generated([5, 9], 8)


def test_generation_stops_at_the_end_token():
    tokens = generated([5, 9], 8)
    assert generated([5, 9], 8, end=tokens[4]) == tokens[: tokens.index(tokens[4], 2) + 1]


@pytest.mark.parametrize("layout", ["packed", "best_fit", "padded"])
def test_documents_lose_what_they_lose_token_by_token(random_data, layout):
    """Against each target's own loss, found through its place in the stream, for every layout.

    Documents have 4 to 60 tokens and rows 8: they span rows, share rows, and end with them.
    """
    stream = DataDirectory(random_data).stream("validation")
    rows = rows_of(stream, DataConfig(sequence_length=8, layout=layout))
    evaluations, documents = evaluate_documents(
        MODEL, params_of(MODEL), rows, depths=(1, 3), batch_rows=5, chunk_tokens=16
    )
    ends = stream.document_ends
    starts = np.concatenate([[0], ends[:-1]])
    assert documents.tokens.tolist() == (ends - starts - 1).tolist()  # all but each first token
    # In the packed layout a row's first token is token T * row of the stream.
    if layout == "packed":
        expected = np.zeros((2, len(ends)))
        for i in range(len(rows)):
            row = rows.read(np.array([i]))
            tokens, segments = row["tokens"].astype(int), row["segment_ids"]
            for number, depth in enumerate((1, 3)):
                logits = np.asarray(
                    logits_of(
                        MODEL,
                        params_of(MODEL),
                        tokens[:, :-1],
                        segments[:, :-1],
                        row["positions"][:, :-1],
                        depth,
                    ),
                    np.float64,
                )[0]
                for t in np.flatnonzero(target_mask(segments)[0]):
                    document = int((ends <= 8 * i + t + 1).sum())
                    lost = math.log(np.exp(logits[t]).sum()) - logits[t, tokens[0, t + 1]]
                    expected[number, document] += lost
        np.testing.assert_allclose(documents.loss, expected, rtol=1e-5)
    for evaluation, loss in zip(evaluations, documents.loss, strict=True):
        total = evaluation.cross_entropy * evaluation.target_tokens
        assert loss.sum() == pytest.approx(total, rel=1e-6)
        assert documents.tokens.sum() == evaluation.target_tokens


@pytest.mark.parametrize("layout", ["best_fit", "padded"])
def test_a_document_loses_the_same_alone(tmp_path, layout):
    """Side by side in a row, or in rows of their own, as in a stream of one document."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, 64, size).tolist() for size in (5, 8, 2, 1, 6, 3)]
    config = DataConfig(sequence_length=8, layout=layout)

    def losses(name, validation):
        stream = DataDirectory(write_documents(tmp_path / name, [[1, 2]], validation, 64)).stream(
            "validation"
        )
        return evaluate_documents(
            MODEL,
            params_of(MODEL),
            rows_of(stream, config),
            depths=(3,),
            batch_rows=4,
            chunk_tokens=16,
        )[1]

    together = losses("together", texts)
    assert together.tokens.tolist() == [4, 7, 1, 0, 5, 2]
    for number in (0, 1, 4):
        alone = losses(str(number), [texts[number]])
        assert together.loss[0, number] == pytest.approx(alone.loss[0, 0], rel=1e-5)


def test_documents_beyond_a_limit_have_no_tokens(random_data):
    stream = DataDirectory(random_data).stream("validation")
    rows = rows_of(stream, DataConfig(sequence_length=8))
    documents = evaluate_documents(
        MODEL, params_of(MODEL), rows, depths=(3,), batch_rows=5, chunk_tokens=16, limit=3
    )[1]
    assert documents.tokens.sum() == target_mask(rows.read(np.arange(3))["segment_ids"]).sum()
    first_beyond = int((stream.document_ends <= 24).sum()) + 1
    assert not documents.tokens[first_beyond:].any()
    assert not documents.loss[0, first_beyond:].any()
