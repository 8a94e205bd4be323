"""How often a verdict is wrong, and how often it finds a real difference, in simulated studies.

    python benchmarks/verdict.py [--studies 10000]

Each study has 200 documents (or as given) with log-normal lengths, new ones every time; a topic
that both models find easy or hard, the longer the easier; a part of each document that suits one
model better; seeds; and an interaction of seeds with documents. The parts are scaled so that the
difference of the models has the standard error 0.01 nats per token given the lengths. Seeds have
the share of its square that stands in the first column.

False positives: equal models that are called different. Found: a handicap of twice the standard
error that is called right. Theory: the power of Student's t test at noncentrality 2 (from
scipy.stats.nct) with Satterthwaite's degrees of freedom of the *true* variances, which a study
does not know. `of 4 depths`: studies with any false verdict among four comparisons.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np
from scipy import stats

from jaxlm.study.verdict import Losses, compare, compare_depths

STANDARD_ERROR = 0.01
MEAN_LOSS = 3.0


@dataclasses.dataclass(frozen=True)
class Design:
    """What the studies of one line of the table have in common."""

    # Seeds of A and of B.
    seeds: tuple[int, int]
    # Share of the variance of the difference that comes of seeds, interaction included.
    share: float
    # Share of that which is interaction of seeds and documents.
    interaction: float = 0.0
    # Documents.
    documents: int = 200
    # Standard deviation of the logarithm of a document's length; 0 makes all equal.
    lengths: float = 1.0
    # Standard deviation of what both models find hard, nats per token.
    topic: float = 0.5
    # Variance of A's seeds over that of B's.
    ratio: float = 1.0


def _seed_variances(design: Design) -> tuple[float, float]:
    """Variances of A's and B's means over their seeds, interaction included."""
    a, b = design.ratio / design.seeds[0], 1 / design.seeds[1]
    part = design.share * STANDARD_ERROR**2
    return part * a / (a + b), part * b / (a + b)


def studies(
    design: Design, number: int, seed: int, depths: int = 1, correlation: float = 0.0
) -> Iterator[tuple[list[tuple[Losses, Losses]], np.ndarray]]:
    """Simulated studies of equal models.

    Args:
        design: variances.
        number: of studies.
        seed: of all random numbers.
        depths: comparisons of each study.
        correlation: of everything but the topic between two depths.

    Yields:
        Losses of A and of B at each depth; and the share of each document in all tokens, [D].
    """
    rng = np.random.default_rng(seed)
    width = design.documents

    def normal(*shape: int) -> np.ndarray:
        """[depths, *shape]."""
        common = math.sqrt(correlation) * rng.standard_normal(shape)
        return common + math.sqrt(1 - correlation) * rng.standard_normal((depths, *shape))

    for _ in range(number):
        logarithm = 5 + design.lengths * rng.standard_normal(width)
        tokens = np.maximum(np.exp(logarithm), 2).astype(np.int64)
        weights = tokens / tokens.sum()
        spread = weights @ weights
        topic = MEAN_LOSS + design.topic * rng.standard_normal(width)
        topic -= 0.2 * np.log(tokens)
        suits = math.sqrt((1 - design.share) / spread) * STANDARD_ERROR * normal(1, width) / 2
        models = []
        for model, variance in enumerate(_seed_variances(design)):
            count = design.seeds[model]
            main = math.sqrt((1 - design.interaction) * variance * count)
            inner = math.sqrt(design.interaction * variance * count / spread)
            x = topic + (-1) ** model * suits
            x = x + main * normal(count, 1) + inner * normal(count, width)
            models.append(x * tokens)
        yield (
            [(Losses(a, tokens), Losses(b, tokens)) for a, b in zip(*models, strict=True)],
            weights,
        )


# Power of the t test at noncentrality 2 and level 5 %, by the reciprocal of its degrees of freedom.
_INVERSE = np.linspace(1e-4, 1.2, 600)
_CRITICAL = stats.t.isf(0.025, 1 / _INVERSE)
_POWER = stats.nct.sf(_CRITICAL, 1 / _INVERSE, 2) + stats.nct.cdf(-_CRITICAL, 1 / _INVERSE, 2)


def theory(design: Design, weights: np.ndarray) -> float:
    """Power of Student's t test with Satterthwaite's degrees of freedom of the true variances."""
    unit = STANDARD_ERROR**2
    if design.ratio == 1:  # one variance for both models
        noise = (design.share * unit) ** 2 / (sum(design.seeds) - 2)
    else:
        counts = np.array(design.seeds) - 1
        noise = float((np.square(_seed_variances(design)) / counts).sum())
    square = weights**2
    documents = max(square.sum() ** 2 / (square @ square) - 1, 1.0)
    noise += ((1 - design.share) * unit) ** 2 / documents
    return float(np.interp(noise / unit**2, _INVERSE, _POWER))


@dataclasses.dataclass(frozen=True)
class Rates:
    """Shares of the studies."""

    false_positives: float
    found: float
    theory: float
    # Intervals that hold the true difference.
    covered: float


def rates(design: Design, number: int, seed: int = 0) -> Rates:
    """Simulate studies of equal models, and the same with B handicapped."""
    false = found = covered = 0
    powers = []
    handicap = 2 * STANDARD_ERROR
    for (pair,), weights in studies(design, number, seed):
        a, b = pair
        verdict = compare(a, b)
        false += verdict.statement != "none"
        covered += verdict.low <= 0 <= verdict.high
        worse = Losses(b.loss + handicap * b.tokens, b.tokens)
        found += compare(a, worse).statement == "a"
        powers.append(theory(design, weights))
    return Rates(false / number, found / number, float(np.mean(powers)), covered / number)


def family_rate(design: Design, number: int, correlation: float, seed: int = 0) -> float:
    """Share of studies of equal models with any verdict among four depths."""
    false = 0
    for pairs, _ in studies(design, number, seed, depths=4, correlation=correlation):
        verdicts = compare_depths(dict(enumerate(pairs)))
        false += any(verdict.statement != "none" for verdict in verdicts.values())
    return false / number


GRID = [
    *[
        Design(seeds, share)
        for seeds in ((2, 2), (2, 3), (3, 3), (5, 5))
        for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0)
    ],
    Design((1, 2), 0.5),
    Design((1, 2), 1.0),
    Design((1, 3), 0.5),
    *[
        Design(seeds, share, interaction=part)
        for seeds in ((2, 2), (3, 3))
        for share in (0.3, 0.8)
        for part in (0.5, 1.0)
    ],
    Design((2, 2), 1.0, interaction=1.0),
    Design((2, 2), 0.85, lengths=0.0),
    Design((3, 3), 0.5, lengths=0.0),
    Design((3, 3), 0.5, lengths=2.0),
    Design((3, 3), 0.0, lengths=2.0),
    Design((3, 3), 0.5, topic=0.0),
    Design((3, 3), 0.5, documents=30),
    Design((3, 3), 0.5, documents=2000),
]
UNEQUAL = [
    Design(seeds, share, ratio=ratio)
    for seeds in ((2, 2), (3, 3), (5, 5), (2, 3), (3, 2))
    for share in (0.5, 1.0)
    for ratio in (4.0, 25.0)
]


def _line(design: Design, number: int) -> str:
    found = rates(design, number)
    seeds = f"{design.seeds[0]} + {design.seeds[1]}"
    return (
        f"{seeds:>6}{design.share:>7.2f}{design.interaction:>9.2f}{design.documents:>7}"
        f"{design.lengths:>9.1f}{design.topic:>7.1f}{design.ratio:>7.0f}"
        f"{found.false_positives:>10.2%}{found.found:>9.2%}{found.theory:>9.2%}"
        f"{100 * (found.found - found.theory):>+8.1f}"
    )


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=10_000, help="simulated studies a line")
    number = parser.parse_args().studies
    began = time.perf_counter()
    error = math.sqrt(0.05 * 0.95 / number), math.sqrt(0.25 / number)
    print(f"Standard error of the rates: {error[0]:.2%} near 5 %, {error[1]:.2%} at most\n")
    head = (
        f"{'seeds':>6}{'share':>7}{'interact':>9}{'docs':>7}{'lengths':>9}{'topic':>7}{'ratio':>7}"
        f"{'false':>10}{'found':>9}{'theory':>9}{'diff':>8}"
    )
    for title, designs in (("Seed variance alike", GRID), ("Seed variance unlike", UNEQUAL)):
        print(f"{title}\n{head}")
        for design in designs:
            print(_line(design, number), flush=True)
        print()
    print(f"Equal models, any verdict among 4 depths\n{'seeds':>6}{'share':>7}{'correlation':>13}")
    for seeds in ((2, 2), (3, 3), (5, 5)):
        for share in (0.3, 0.9):
            for correlation in (0.0, 0.9, 0.99):
                rate = family_rate(Design(seeds, share), number // 4, correlation)
                name = f"{seeds[0]} + {seeds[1]}"
                print(f"{name:>6}{share:>7.2f}{correlation:>13.2f}{rate:>10.2%}", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
