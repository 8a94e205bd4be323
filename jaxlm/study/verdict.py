"""Which of two models is better, by how much, and how sure that is.

Shape legend: S seeds of a model, D documents.

Estimand. The expected difference of the token-weighted cross-entropy of A and B, in nats per token,
over new training seeds *and* new documents from where these came from: what is left when the study
is repeated with other seeds and other validation text. The estimate of a model's cross-entropy is
the ratio of the sum of losses to the sum of tokens over all of its seeds.

Model. Seed s of model m loses, per token of document d,

    x_msd = mean_m + seed_ms + document_md + interaction_msd

Documents are shared by all; a document's effects on A and on B may be correlated in any way, since
only their difference enters. Seeds are nested in models and taken to be independent, also between
the models: where A and B use the same seeds and that makes them alike, the interval is too wide,
not too narrow. Seed and interaction variance are taken to be the same in both models; what happens
if they are not stands in docs/verdict.md.

Variance. With w_d the share of document d in all target tokens, the difference has the variance

    (1/S_A + 1/S_B) (seed + interaction sum(w^2))  +  document sum(w^2).

The pooled variance of the seeds' means estimates the first part: documents cancel in it. The spread
over documents of the difference of the models' means gives the second part plus the interaction's
share of the first, which is taken off by the variance that seeds leave within documents. Where less
than nothing remains it counts as zero, and the first part alone as variance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit

Statement = Literal["a", "b", "none"]

# Tests at levels below this one (5 %, but for rounding) need more than a number of degrees of
# freedom, see _Estimate.critical.
_TAIL = 0.0499


@dataclass(frozen=True)
class Losses:
    """What every seed of a model loses on the same documents.

    Raises:
        ValueError: wrong shapes or types, no seed, a loss that is not finite, a negative count of
            tokens, or a loss on a document without target tokens.
    """

    # [S, D] float64: sum of -log p over the document's target tokens, nats.
    loss: np.ndarray
    # [D] int64: target tokens of each document.
    tokens: np.ndarray

    def __post_init__(self) -> None:
        loss, tokens = self.loss, self.tokens
        if loss.ndim != 2 or tokens.ndim != 1 or loss.shape[1] != len(tokens) or not len(loss):
            raise ValueError(
                f"losses: expected loss [seeds, documents] and tokens [documents], found shapes "
                f"{loss.shape} and {tokens.shape}"
            )
        if loss.dtype != np.float64 or tokens.dtype != np.int64:
            raise ValueError(
                f"losses: expected float64 sums and int64 tokens, found {loss.dtype} and "
                f"{tokens.dtype}"
            )
        if not np.isfinite(loss).all():
            seed, document = np.argwhere(~np.isfinite(loss))[0].tolist()
            raise ValueError(
                f"losses: {loss[seed, document]} at seed {seed}, document {document}; a model that "
                f"gives no finite loss cannot be compared"
            )
        if (tokens < 0).any() or loss[:, tokens == 0].any():
            document = int(np.flatnonzero((tokens < 0) | ((tokens == 0) & loss.any(0)))[0])
            raise ValueError(
                f"losses: document {document} has {tokens[document]} target tokens and the loss "
                f"{loss[:, document].max()}"
            )


@dataclass(frozen=True)
class Verdict:
    """What a comparison says. Differences are A - B in nats per token: below zero A is better."""

    # Estimate.
    difference: float
    # Interval of this comparison alone (pointwise), at the confidence asked for.
    low: float
    high: float
    # Square root of the estimated variance of the difference.
    standard_error: float
    # Satterthwaite's degrees of freedom of that variance, less what estimating them costs. With one
    # degree of freedom of seeds, or a confidence above 95 %, the interval is wider than Student's t
    # with so many makes it.
    degrees_of_freedom: float
    # Seeds of A and of B.
    seeds: tuple[int, int]
    # Documents with target tokens.
    documents: int
    # Which model is better: allows for the other comparisons made together with this one.
    statement: Statement
    # Whether a model has two seeds or more; if not, the interval is over documents alone.
    seed_variance_measured: bool
    # The same in a sentence.
    sentence: str
    # What else must be said of it.
    remarks: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentence and the remarks."""
        return " ".join((self.sentence, *self.remarks))


@dataclass(frozen=True)
class _Estimate:
    """A difference with the two independent parts of its variance."""

    difference: float
    # Variance that comes of seeds, and its degrees of freedom (0: not measured).
    seeds: float
    seed_freedom: int
    # Variance that comes of documents alone, and its degrees of freedom.
    documents: float
    document_freedom: float

    @property
    def standard_error(self) -> float:
        return float(np.sqrt(self.seeds + self.documents))

    @property
    def _share(self) -> float:
        total = self.seeds + self.documents
        return self.seeds / total if total > 0 else 0.0

    @property
    def degrees_of_freedom(self) -> float:
        """Satterthwaite (1946), corrected for variance parts that are estimates themselves.

        Few seeds often understate their variance. The standard error is then too small and the
        degrees of freedom, which see little of the seeds, too large. Welch's second-order term
        (Biometrika 34, 1947) goes as (1 - share) / freedom^2; its factor 7 keeps the rate of false
        positives of a 5 % test at or below 6 % for any true share with two seeds of each model.
        """
        share, inverse = self._share, 0.0
        if self.seed_freedom:
            correction = 1 + 7 / self.seed_freedom**2 * (1 - share)
            inverse = share**2 * correction / self.seed_freedom
        return 1 / (inverse + (1 - share) ** 2 / self.document_freedom)

    def critical(self, level: float) -> float:
        """Standard errors that a difference of zero exceeds with probability `level` at most.

        Student's t with the effective degrees of freedom. These do not hold far out in the tails,
        nor for one degree of freedom of seeds: there the fiducial solution of Behrens and Fisher
        stands in, whose true level no one has found above the one asked for (Robinson, Annals of
        Statistics 4, 1976).
        """
        if not self.seed_freedom or (level > _TAIL and self.seed_freedom > 1):
            return float(stdtrit(self.degrees_of_freedom, 1 - level / 2))
        # Quantile of sqrt(share) t_seeds + sqrt(1 - share) t_documents, the second in slices that
        # are narrow in the tails.
        middle = (np.arange(400) + 0.5) / 400
        weights = 6 * middle * (1 - middle) / 400
        share = self._share
        shift = np.sqrt(1 - share) * stdtrit(self.document_freedom, middle**2 * (3 - 2 * middle))

        def excess(critical: float) -> float:
            # sqrt(share) is 0 where seeds do not vary; then the tail is a step.
            scaled = (shift - critical) / np.sqrt(max(share, 1e-12))
            return float(stdtr(self.seed_freedom, scaled) @ weights) - level / 2

        highest = sum(
            stdtrit(freedom, 1 - level / 4)
            for freedom in (self.seed_freedom, self.document_freedom)
        )
        return cast(float, brentq(excess, 0.0, float(highest)))

    def interval(self, level: float) -> tuple[float, float]:
        """Both ends of the interval that misses the truth with probability `level`."""
        reach = self.critical(level) * self.standard_error if self.standard_error else 0.0
        return self.difference - reach, self.difference + reach

    def statement(self, level: float, margin: float) -> Statement:
        """Which model is better; one seed of each must differ by more than the margin."""
        low, high = self.interval(level)
        bound = 0.0 if self.seed_freedom else margin
        if high < -bound:
            return "a"
        return "b" if low > bound else "none"


def _document_freedom(weights_D: np.ndarray, scale_D: np.ndarray) -> float:
    """Degrees of freedom of sum(scale * residual^2), residual = x - sum(w x), for iid normal x.

    2 mean^2 / variance of the quadratic form x' G x, which is trace(G)^2 / trace(G^2); documents of
    equal length give D - 1.
    """
    w, a = weights_D, scale_D
    square = w @ w
    diagonal = a**2 @ ((1 - 2 * w + square) ** 2 - (square - 2 * w) ** 2)
    # Sum over i and j of a_i a_j (square - w_i - w_j)^2, diagonal included.
    a0, a1, a2 = a.sum(), a @ w, a @ w**2
    everything = square**2 * a0**2 + 2 * a0 * a2 + 2 * a1**2 - 4 * square * a0 * a1
    return float(square**2 / (diagonal + everything))


def _estimate(a: Losses, b: Losses) -> _Estimate:
    if not np.array_equal(a.tokens, b.tokens):
        raise ValueError(
            f"the models were evaluated on different documents ({len(a.tokens)} and "
            f"{len(b.tokens)}, {a.tokens.sum()} and {b.tokens.sum()} target tokens); evaluate both "
            f"on the same"
        )
    chosen = a.tokens > 0
    if chosen.sum() < 2:
        raise ValueError("a comparison needs two documents with target tokens, or more")
    tokens_D = a.tokens[chosen].astype(np.float64)
    w = tokens_D / tokens_D.sum()
    x_SD = [losses.loss[:, chosen] / tokens_D for losses in (a, b)]
    mean_S = [x @ w for x in x_SD]
    difference_D = x_SD[0].mean(0) - x_SD[1].mean(0)
    difference = float(difference_D @ w)
    # A document's squared residual is expected to be this share of its variance: the mean that is
    # taken off follows the document, the more so the longer it is.
    scale_D = w**2 / (1 - 2 * w + w @ w)
    spread = float(scale_D @ (difference_D - difference) ** 2)
    freedom = _document_freedom(w, scale_D)
    seed_freedom = len(mean_S[0]) + len(mean_S[1]) - 2
    if not seed_freedom:
        return _Estimate(difference, 0.0, 0, spread, freedom)
    seeds = interaction = 0.0
    for x, mean in zip(x_SD, mean_S, strict=True):
        seeds += float(((mean - mean.mean()) ** 2).sum())
        residual_SD = x - x.mean(0) - (mean - mean.mean())[:, None]
        interaction += float((residual_SD**2 @ scale_D).sum())
    # Of a sum of squares, the part in the difference of means over seeds.
    part = (1 / len(mean_S[0]) + 1 / len(mean_S[1])) / seed_freedom
    documents = max(spread - interaction * part, 0.0)
    return _Estimate(difference, seeds * part, seed_freedom, documents, freedom)


def _sentence(
    difference: float,
    interval: tuple[float, float],
    statement: Statement,
    *,
    names: tuple[str, str],
    detail: str,
) -> str:
    """The sentence of a verdict.

    Args:
        difference: A - B, nats per token.
        interval: of the difference.
        statement: which model is better.
        names: of A and of B.
        detail: what the interval is, for the brackets at the end.
    """
    low, high = interval
    if statement == "none":
        text = (
            f"No difference shown: {names[0]} - {names[1]} is {difference:+.4f} nats per token "
            f"[{low:+.4f}, {high:+.4f}]"
        )
    else:
        name, sign = (names[0], -1) if statement == "a" else (names[1], 1)
        low, high = sorted((sign * low, sign * high))
        text = f"{name} is better by {sign * difference:.4f} nats per token [{low:.4f}, {high:.4f}]"
    return f"{text} ({detail})."


def _verdict(
    estimate: _Estimate,
    losses: tuple[Losses, Losses],
    statement: Statement,
    comparisons: int,
    margin: float,
    confidence: float,
    names: tuple[str, str],
) -> Verdict:
    interval = estimate.interval(1 - confidence)
    seeds = (len(losses[0].loss), len(losses[1].loss))
    documents = int((losses[0].tokens > 0).sum())
    over = f"{seeds[0]} and {seeds[1]} seeds and " if estimate.seed_freedom else ""
    alone = ", for this comparison alone" if comparisons > 1 else ""
    detail = f"{100 * confidence:g} % interval over {over}{documents:,} documents{alone}"
    remarks = []
    if not estimate.seed_freedom:
        remarks.append(
            f"One seed of each model: seed variance was not measured, and only a difference beyond "
            f"{margin:g} nats per token counts."
        )
    elif min(seeds) == 1:
        one, other = names if seeds[0] == 1 else names[::-1]
        remarks.append(f"{one} has one seed: its seed variance is taken to be that of {other}.")
    if statement == "none" and estimate.statement(1 - confidence, margin) != "none":
        remarks.append(f"Alone it would count, but {comparisons} comparisons were made together.")
    return Verdict(
        difference=estimate.difference,
        low=interval[0],
        high=interval[1],
        standard_error=estimate.standard_error,
        degrees_of_freedom=estimate.degrees_of_freedom,
        seeds=seeds,
        documents=documents,
        statement=statement,
        seed_variance_measured=estimate.seed_freedom > 0,
        sentence=_sentence(estimate.difference, interval, statement, names=names, detail=detail),
        remarks=tuple(remarks),
    )


def compare(
    a: Losses,
    b: Losses,
    margin: float = 0.01,
    confidence: float = 0.95,
    names: tuple[str, str] = ("A", "B"),
) -> Verdict:
    """Compare two models, or two depths of one, that were evaluated on the same documents.

    Args:
        a: losses of A.
        b: losses of B; its seeds need not be as many.
        margin: nats per token that the whole interval must lie beyond where each model has one
            seed; not used otherwise.
        confidence: of the interval, and one less the rate of false verdicts.
        names: of A and of B, for the text.

    Raises:
        ValueError: other documents in `a` than in `b`, fewer than two documents, a margin below
            zero, or a confidence that is not between 0 and 1.
    """
    return compare_depths({0: (a, b)}, margin, confidence, names)[0]


def compare_depths(
    pairs: Mapping[int, tuple[Losses, Losses]],
    margin: float = 0.01,
    confidence: float = 0.95,
    names: tuple[str, str] = ("A", "B"),
) -> dict[int, Verdict]:
    """Compare at several depths, with one bound on the chance of any false statement.

    Statements follow Holm (1979): with probability `confidence` none of them is false, however the
    depths depend on one another. The intervals are those of each comparison alone.

    Args:
        pairs: by depth, losses of A and of B.
        margin: see :func:`compare`.
        confidence: see :func:`compare`; for all statements together.
        names: of A and of B, for the text.

    Raises:
        ValueError: as :func:`compare`.
    """
    if not 0 < confidence < 1 or margin < 0:
        raise ValueError(
            f"expected a confidence between 0 and 1 and a margin of at least 0, found {confidence} "
            f"and {margin}"
        )
    estimates = {depth: _estimate(*pair) for depth, pair in pairs.items()}
    statements: dict[int, Statement] = dict.fromkeys(pairs, "none")
    undecided = set(pairs)
    while undecided:
        level = (1 - confidence) / len(undecided)
        found = {d for d in undecided if estimates[d].statement(level, margin) != "none"}
        if not found:
            break
        for depth in found:
            statements[depth] = estimates[depth].statement(level, margin)
        undecided -= found
    return {
        depth: _verdict(
            estimates[depth], pair, statements[depth], len(pairs), margin, confidence, names
        )
        for depth, pair in pairs.items()
    }
