"""Verdicts against independent statistics, and in simulated studies with known variances.

Rates of single comparisons are from 3,000 studies a design with fixed seeds: the standard error is
0.4 points near 5 %, and 0.9 points of the power. benchmarks/verdict.py has the whole grid.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jaxlm.study.verdict import Losses, compare, compare_depths

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verdict.py"
SPEC = importlib.util.spec_from_file_location("verdict_benchmark", SCRIPT)
benchmark = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = benchmark
SPEC.loader.exec_module(benchmark)
Design = benchmark.Design


def losses(x, tokens=100):
    """Losses of per-token values [S, D]."""
    x = np.atleast_2d(np.asarray(x, np.float64))
    tokens = np.broadcast_to(np.asarray(tokens, np.int64), x.shape[1:]).copy()
    return Losses(x * tokens, tokens)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_difference_is_one_of_ratios_of_sums():
    """Documents of 100 and 300 tokens: A 2.0 and 4.0, B 3.0 and 3.0 nats per token."""
    a, b = losses([[2.0, 4.0]], [100, 300]), losses([[3.0, 3.0]], [100, 300])
    verdict = compare(a, b)
    assert verdict.difference == pytest.approx(3.5 - 3.0)
    assert (verdict.documents, verdict.seeds) == (2, (1, 1))
    assert compare(b, a).difference == pytest.approx(-0.5)


# ---------------------------------------------------------------- independent references


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_one_seed_each_and_equal_lengths_is_a_paired_t_test(confidence):
    topic = normal(0, 1, 40)
    a, b = 3 + topic + 0.1 * normal(1, 1, 40), 3 + topic + 0.2 * normal(2, 1, 40)
    verdict = compare(losses(a), losses(b), confidence=confidence)
    expected = stats.ttest_rel(a[0], b[0]).confidence_interval(confidence)
    assert verdict.low == pytest.approx(expected.low, rel=1e-9)
    assert verdict.high == pytest.approx(expected.high, rel=1e-9)
    assert verdict.degrees_of_freedom == pytest.approx(39)
    assert not verdict.seed_variance_measured


@pytest.mark.parametrize(("seeds_a", "seeds_b"), [(2, 2), (2, 3), (5, 5)])
def test_seeds_alone_are_a_two_sample_t_test(seeds_a, seeds_b):
    """What both models find hard cancels; nothing else differs between documents."""
    topic = normal(0, 1, 40)
    a, b = topic + 0.1 * normal(1, seeds_a, 1), topic + 0.1 * normal(2, seeds_b, 1)
    verdict = compare(losses(a), losses(b))
    expected = stats.ttest_ind(a.mean(1), b.mean(1)).confidence_interval(0.95)
    assert verdict.low == pytest.approx(expected.low, rel=1e-6)
    assert verdict.high == pytest.approx(expected.high, rel=1e-6)
    assert verdict.degrees_of_freedom == pytest.approx(seeds_a + seeds_b - 2)
    assert verdict.seed_variance_measured


def anova(a, b):
    """Variance of the difference from the mean squares of a balanced two-way layout, by loops.

    Cornfield and Tukey (1956): E[MS of seeds] = D seed + interaction; of the documents'
    differences, E[MS] = 2 interaction / S + document; within, E[MS] = interaction.
    """
    seeds, documents = a.shape
    within = between = 0.0
    for x in (a, b):
        for s in range(seeds):
            between += documents * (x[s].mean() - x.mean()) ** 2
            for d in range(documents):
                within += (x[s, d] - x[s].mean() - x[:, d].mean() + x.mean()) ** 2
    between /= 2 * (seeds - 1)
    within /= 2 * (seeds - 1) * (documents - 1)
    difference = a.mean(0) - b.mean(0)
    spread = sum((d - difference.mean()) ** 2 for d in difference) / (documents - 1)
    of_seeds = 2 / seeds * between / documents
    return of_seeds, max(0.0, spread - 2 / seeds * within) / documents


@pytest.mark.parametrize("suits", [0.0, 0.3])
def test_equal_lengths_are_an_analysis_of_variance(suits):
    shape = (3, 25)
    effect = suits * normal(5, 1, 25)
    a = effect + 0.05 * normal(1, 3, 1) + 0.2 * normal(2, *shape)
    b = -effect + 0.05 * normal(3, 3, 1) + 0.2 * normal(40, *shape)
    verdict = compare(losses(a), losses(b))
    of_seeds, of_documents = anova(a, b)
    assert (of_documents == 0) == (suits == 0)  # the estimate less than nothing counts as zero
    assert verdict.standard_error**2 == pytest.approx(of_seeds + of_documents, rel=1e-9)
    if not of_documents:
        expected = stats.ttest_ind(a.mean(1), b.mean(1)).confidence_interval(0.95)
        assert verdict.high == pytest.approx(expected.high, rel=1e-9)


def unequal_lengths(seed, documents, sigma):
    return np.exp(5 + sigma * normal(seed, documents)).astype(np.int64) + 1


def test_documents_of_unequal_length_are_as_a_bootstrap_of_documents():
    """5,000 resamples of 400 documents: the bootstrap's own error is 1 %."""
    tokens = unequal_lengths(0, 400, 1.0)
    topic = normal(1, 1, 400)
    a = topic + 0.1 * normal(2, 1, 400)
    b = topic + 0.1 * normal(3, 1, 400) + 0.02 * np.log(tokens)
    verdict = compare(losses(a, tokens), losses(b, tokens))
    chosen = np.random.default_rng(4).integers(0, 400, (5_000, 400))
    difference = ((a - b)[0] * tokens)[chosen].sum(1) / tokens[chosen].sum(1)
    assert verdict.standard_error == pytest.approx(difference.std(), rel=0.04)


def test_degrees_of_freedom_of_documents_against_matrices():
    """Those of a quadratic form in normal variables, 2 mean^2 / variance."""
    tokens = unequal_lengths(0, 60, 1.5)
    w = tokens / tokens.sum()
    residual = np.eye(60) - np.outer(np.ones(60), w)
    shares = np.diag(residual @ residual.T)  # expected squared residuals, for variance 1
    form = residual.T @ np.diag(w**2 / shares) @ residual
    assert np.trace(form) == pytest.approx((w**2).sum())  # without bias
    a, b = losses(normal(1, 1, 60), tokens), losses(normal(2, 1, 60), tokens)
    verdict = compare(a, b)
    assert verdict.degrees_of_freedom == pytest.approx(
        np.trace(form) ** 2 / np.trace(form @ form), rel=1e-9
    )
    difference = (a.loss - b.loss)[0] / tokens
    squared = difference @ form @ difference
    assert verdict.standard_error**2 == pytest.approx(squared, rel=1e-9)


def test_far_tails_are_those_of_a_sum_of_two_t_variables():
    """Quantile of sqrt(p) t_2 + sqrt(1 - p) t_24 from 4 million draws, whose error is 0.5 %."""
    a = 0.05 * normal(1, 2, 1) + 0.3 * normal(5, 1, 25)
    b = 0.05 * normal(3, 2, 1) - 0.3 * normal(6, 1, 25)
    verdict = compare(losses(a), losses(b), confidence=0.98)
    of_seeds, of_documents = anova(a, b)
    share = of_seeds / (of_seeds + of_documents)
    assert 0.3 < share < 0.7
    rng = np.random.default_rng(0)
    draws = np.sqrt(share) * rng.standard_t(2, 4_000_000)
    draws += np.sqrt(1 - share) * rng.standard_t(24, 4_000_000)
    reach = (verdict.high - verdict.low) / 2 / verdict.standard_error
    assert reach == pytest.approx(np.quantile(np.abs(draws), 0.98), rel=0.015)


def test_far_tails_without_seed_variance_are_those_of_the_documents():
    a, b = losses(0.3 * normal(5, 1, 25).repeat(2, 0)), losses(0.3 * normal(6, 1, 25).repeat(2, 0))
    verdict = compare(a, b, confidence=0.98)
    reach = (verdict.high - verdict.low) / 2 / verdict.standard_error
    assert reach == pytest.approx(stats.t.isf(0.01, 24), rel=0.003)


# ---------------------------------------------------------------- simulated studies


@pytest.mark.parametrize(
    "design",
    [
        Design((2, 2), 0.0),
        Design((2, 2), 0.9),
        Design((2, 3), 0.5),
        Design((2, 3), 1.0),
        Design((3, 3), 0.3, interaction=1.0),
        Design((3, 3), 0.8, interaction=0.5),
        Design((3, 3), 0.5, lengths=2.0),
        Design((5, 5), 0.7, lengths=0.0),
        Design((5, 5), 0.9, topic=0.0),
    ],
    ids=str,
)
def test_error_and_power_are_as_promised(design):
    """At most 6 % false positives; power within 3 points of theory.

    Three standard errors of 3,000 studies, 2.7 points, are allowed for: nine designs are tried.
    """
    rates = benchmark.rates(design, 3_000, seed=1)
    assert rates.false_positives <= 0.06
    assert rates.covered >= 0.94
    assert abs(rates.found - rates.theory) <= 0.03 + 0.027


def test_two_seeds_each_err_on_the_safe_side_where_seeds_and_documents_weigh_alike():
    """The one place where theory is out of reach: it knows how much of the variance is seeds'."""
    rates = benchmark.rates(Design((2, 2), 0.5), 3_000, seed=1)
    assert rates.false_positives <= 0.06
    assert -0.07 - 0.018 <= rates.found - rates.theory <= 0.03


@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_any_false_verdict_among_four_depths_is_as_rare(correlation):
    assert benchmark.family_rate(Design((2, 2), 0.9), 1_000, correlation, seed=2) <= 0.06


@pytest.mark.long
@pytest.mark.parametrize("design", benchmark.GRID, ids=str)
def test_error_and_power_over_the_whole_grid(design):
    """Power may fall short by what docs/verdict.md admits; two standard errors are 1.4 points.

    Of the false positives they are 0.6 points: the worst design is near 6 %.
    """
    rates = benchmark.rates(design, 5_000, seed=3)
    assert rates.false_positives <= 0.06 + 0.006
    short = {1: 0.22, 2: 0.07}.get(sum(design.seeds) - 2, 0.04 if design.interaction else 0.03)
    assert -short - 0.014 <= rates.found - rates.theory <= 0.03 + 0.014


# ---------------------------------------------------------------- statements


def one_seed(difference, spread, documents=400):
    """Losses of A and B whose difference has exactly this mean and standard deviation."""
    d = np.tile([-1.0, 1.0], documents // 2) * spread * np.sqrt((documents - 1) / documents)
    return losses([3 + difference + d]), losses([np.full(documents, 3.0)])


@pytest.mark.parametrize(
    ("difference", "statement"), [(-0.03, "a"), (0.03, "b"), (-0.018, "none"), (0.018, "none")]
)
def test_one_seed_must_beat_the_margin_with_its_whole_interval(difference, statement):
    """The standard error is 0.1 / 20 = 0.005: the interval reaches 0.0098 to both sides."""
    a, b = one_seed(difference, 0.1)
    verdict = compare(a, b)
    assert verdict.standard_error == pytest.approx(0.005)
    assert verdict.statement == statement
    assert "seed variance was not measured" in verdict.text
    assert "beyond 0.01 nats" in verdict.text
    assert compare(a, b, margin=0.0).statement == ("a" if difference < 0 else "b")


def test_the_margin_is_for_one_seed_only():
    a, b = losses(3.0 + 0.0005 * normal(1, 5, 20)), losses(3.002 + 0.0005 * normal(2, 5, 20))
    assert compare(a, b, margin=1.0).statement == "a"


def test_texts_say_what_was_found():
    a, b = losses([[3.0, 3.2], [3.1, 3.3]]), losses([[4.0, 4.2], [4.1, 4.3]])
    reach = stats.t.isf(0.025, 2) * np.sqrt(2 * 0.005 / 2)
    text = compare(a, b, names=("Recurrent", "Transformer")).text
    assert text == (
        f"Recurrent is better by 1.0000 nats per token [{1 - reach:.4f}, {1 + reach:.4f}] "
        "(95 % interval over 2 and 2 seeds and 2 documents)."
    )
    text = compare(b, a).text
    assert text.startswith(f"B is better by 1.0000 nats per token [{1 - reach:.4f}, ")
    text = compare(a, a, confidence=0.9).text
    assert text.startswith("No difference shown: A - B is +0.0000 nats per token [-0.")
    assert "90 % interval" in text


def test_one_seed_against_several_borrows_their_variance():
    a, b = losses([[3.0, 3.2]]), losses([[4.0, 4.2], [4.1, 4.3], [4.3, 4.5]])
    verdict = compare(a, b)
    pooled = np.var([4.1, 4.2, 4.4], ddof=1)
    assert verdict.standard_error == pytest.approx(np.sqrt(pooled * (1 + 1 / 3)))
    assert verdict.seed_variance_measured
    assert "A has one seed: its seed variance is taken to be that of B." in verdict.text


def test_holm_over_depths_by_hand():
    """p-values 0.2, 0.011, 0.016, 0.024: three are below 0.05 / 4, / 3, / 2; the fourth is not.

    Bonferroni would leave one. At 0.03 in place of 0.024 the third is not found, though alone it
    would be.
    """

    def pair(p):
        return one_seed(-0.005 * stats.t.isf(p / 2, 399), 0.1)

    pairs = {depth: pair(p) for depth, p in {1: 0.2, 3: 0.011, 6: 0.016, 12: 0.024}.items()}
    for depth, (a, b) in pairs.items():
        p = stats.ttest_rel(a.loss[0], b.loss[0]).pvalue
        assert p == pytest.approx({1: 0.2, 3: 0.011, 6: 0.016, 12: 0.024}[depth])
    verdicts = compare_depths(pairs, margin=0.0)
    found = {depth: verdict.statement for depth, verdict in verdicts.items()}
    assert found == {1: "none", 3: "a", 6: "a", 12: "a"}
    assert "for this comparison alone" in verdicts[3].text
    verdicts = compare_depths({**pairs, 12: pair(0.03)}, margin=0.0)
    assert verdicts[12].statement == "none"
    assert verdicts[12].high < 0
    assert "Alone it would count, but 4 comparisons were made together." in verdicts[12].text
    assert "Alone" not in verdicts[1].text


def test_identical_models_do_not_differ():
    a = losses(3 + normal(0, 2, 10))
    assert compare(a, a).statement == "none"
    constant = losses(np.full((2, 10), 3.0))
    verdict = compare(constant, constant)
    assert (verdict.low, verdict.difference, verdict.high) == (0, 0, 0)
    assert verdict.statement == "none"


def test_documents_without_targets_do_not_matter():
    tokens = unequal_lengths(0, 30, 1.0)
    a, b = losses(normal(1, 2, 30), tokens), losses(normal(2, 3, 30), tokens)

    def padded(x):
        return Losses(np.insert(x.loss, [0, 7], 0.0, axis=1), np.insert(x.tokens, [0, 7], 0))

    assert compare(padded(a), padded(b)) == compare(a, b)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("loss", "tokens", "message"),
    [
        (np.ones(3), np.ones(3, np.int64), "expected loss \\[seeds, documents\\]"),
        (np.ones((2, 3)), np.ones(4, np.int64), r"found shapes \(2, 3\) and \(4,\)"),
        (np.ones((0, 3)), np.ones(3, np.int64), "expected loss"),
        (np.ones((2, 3), np.float32), np.ones(3, np.int64), "found float32"),
        (np.array([[1.0, np.nan]]), np.ones(2, np.int64), "nan at seed 0, document 1"),
        (np.ones((1, 2)), np.array([1, 0]), "document 1 has 0 target tokens and the loss 1"),
        (np.ones((1, 2)), np.array([1, -2]), "document 1 has -2 target tokens"),
    ],
)
def test_wrong_losses_are_refused(loss, tokens, message):
    with pytest.raises(ValueError, match=message):
        Losses(loss, tokens)


def test_what_cannot_be_compared_is_refused():
    a = losses(np.ones((2, 3)))
    with pytest.raises(ValueError, match="different documents"):
        compare(a, losses(np.ones((2, 3)), 99))
    with pytest.raises(ValueError, match="two documents"):
        compare(losses([[1.0]]), losses([[1.0]]))
    with pytest.raises(ValueError, match="confidence between 0 and 1"):
        compare(a, a, confidence=95)
    with pytest.raises(ValueError, match="margin of at least 0"):
        compare(a, a, margin=-0.1)
