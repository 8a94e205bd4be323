"""Each finding from a made-up log that shows it, and none from one that is healthy."""

import dataclasses
import math

import numpy as np
import pytest
from helpers import tiny_model

from jaxlm.config import Config, DataConfig, OptimConfig
from jaxlm.models.flops import flops_per_token
from jaxlm.training.diagnosis import CAUSES, WINDOW, Diagnosis

VOCABULARY = 1000  # ln 1000 = 6.908
CONFIG = Config(
    model=tiny_model(vocabulary_size=VOCABULARY),
    data=DataConfig(sequence_length=8),
    optim=OptimConfig(warmup_updates=50, max_norm=1.0),
)


# What a window without target tokens leaves in its record; its tokens are those of the one before.
EMPTY = {
    "loss": 0.0,
    "cross_entropy": 0.0,
    "grad_norm": 0.0,
    "update_norm": 0.0,
    "core_update_norm": 0.0,
    "applied": False,
    "tokens_per_second": 0.0,
}


def healthy(update: int) -> dict:
    """Loss from 6.9 to 4, norms around 1, depth 2 or 4 with its own speed: 1 GFLOP/s."""
    rng = np.random.default_rng(update)
    depth = int(rng.choice([2, 4]))
    loss = 4 + 2.9 * math.exp(-update / 150) + rng.normal(0, 0.05)
    return {
        "update": update,
        "tokens": 1000 * (update + 1),
        "loss": loss,
        "cross_entropy": loss,
        "grad_norm": 0.7 + rng.uniform(0, 0.5),
        "update_norm": 0.1,
        "core_update_norm": 0.05,
        "applied": True,
        "depth": depth,
        "backprop_depth": 2,
        "tokens_per_second": 1e9 / flops_per_token(CONFIG.model, 4.5, depth, 2).executed,
        "data_wait_fraction": 0.01,
    }


def broken(kind: str, update: int) -> dict:
    """The healthy record with one thing wrong from update 200 on, or from the start."""
    record = healthy(update)
    late = update >= 200
    if kind == "loss_flat":
        record["loss"] = record["cross_entropy"] = 6.9 + 0.02 * math.sin(update)
    elif kind == "loss_above_uniform" and late:
        record["loss"] = record["cross_entropy"] = 7.5
    elif kind == "gradient_zero" and late:
        record["grad_norm"] = 0.0
    elif kind == "core_unchanged" and late:
        record["core_update_norm"] = 0.0
    elif kind == "always_clipped":
        record["grad_norm"] += 1.0
    elif kind == "many_skipped" and late and update % 10 == 0:
        record |= {"applied": False, "loss": None, "cross_entropy": None, "grad_norm": None}
    elif kind == "empty_windows" and late:
        record |= EMPTY | {"tokens": 1000 * 200}
    elif kind == "throughput_falls" and late:
        record["tokens_per_second"] *= 0.5
    elif kind == "data_wait" and late:
        record["data_wait_fraction"] = 0.2
    return record


def found_in(records, validations=()) -> list:
    diagnosis, found = Diagnosis(CONFIG), []
    passes = dict(validations)
    for record in records:
        found += diagnosis.read_update(record)
        if record["update"] + 1 in passes:
            loss = passes[record["update"] + 1]
            found += diagnosis.read_evaluation(
                {"update": record["update"] + 1, "cross_entropy": loss}
            )
    return found


def test_the_loss_to_a_teacher_is_not_what_is_compared():
    """It starts at 1 and stays there while the cross-entropy falls from 6.9 to 4, or does not."""
    records = [{**healthy(update), "loss": 1.0} for update in range(400)]
    assert found_in(records) == []
    flat = [{**broken("loss_flat", update), "loss": 20.0} for update in range(400)]
    assert [finding.kind for finding in found_in(flat)] == ["loss_flat"]


# Losses of the quickstart (ln 1024 = 6.93, unigram 5.65), and of a model of 50,000 tokens that
# learns slowly and warms up for 2,000 updates: points between which curves are straight.
QUICKSTART = ((0, 7.04), (60, 5.6), (100, 5.0), (200, 4.0), (300, 3.6), (3000, 3.6))
SLOW = ((0, 11.0), (2000, 7.6), (2500, 7.2), (4000, 6.0))
# It learns how common tokens are, and nothing else.
IGNORES_ITS_INPUT = ((0, 7.04), (50, 5.7), (100, 5.65), (3000, 5.65))


@pytest.mark.parametrize(
    ("curve", "vocabulary", "unigram", "warm_up", "named_at"),
    [
        (QUICKSTART, 1024, 5.65, 20, None),
        (SLOW, 50_000, 7.7, 2000, None),
        (IGNORES_ITS_INPUT, 1024, 5.65, 20, 520),
        (IGNORES_ITS_INPUT, 1024, 5.65, 300, 800),
        # Training tokens are a little easier than the validation tokens that the unigram is of.
        (IGNORES_ITS_INPUT, 1024, 5.75, 20, 520),
        (IGNORES_ITS_INPUT, 1024, None, 20, None),
        # 2 % of ln 1024 are 0.139 nats; 0.2 below the unigram it has learnt something.
        (IGNORES_ITS_INPUT, 1024, 5.85, 20, None),
    ],
)
def test_a_loss_that_stays_at_the_unigram_cross_entropy_is_flat(
    curve, vocabulary, unigram, warm_up, named_at
):
    config = dataclasses.replace(
        CONFIG,
        model=tiny_model(vocabulary_size=vocabulary),
        optim=OptimConfig(warmup_updates=warm_up),
    )
    diagnosis, found = Diagnosis(config, unigram=unigram), []
    noise = np.random.default_rng(0).normal(0, 0.05, 3000)
    for update in range(3000):
        loss = float(np.interp(update, *zip(*curve, strict=True)) + noise[update])
        # The loss to a teacher says nothing about tokens' frequencies.
        record = healthy(update) | {"loss": 1.0, "cross_entropy": loss}
        found += diagnosis.read_update(record)
    assert [(f.update, f.kind) for f in found] == ([(named_at, "loss_flat")] if named_at else [])
    if named_at:
        assert f"common each token is gives {unigram:.3f}" in found[0].text


def test_a_healthy_log_shows_nothing():
    passes = [(u, 4.1 + 2.9 * math.exp(-u / 150)) for u in range(50, 1001, 50)]
    assert found_in([healthy(u) for u in range(1000)], passes) == []


@pytest.mark.parametrize("kind", sorted(set(CAUSES) - {"train_and_validation_part"}))
def test_each_fault_is_named_once_and_alone(kind):
    found = found_in([broken(kind, u) for u in range(1000)])
    assert [f.kind for f in found] == [kind]
    begins = 0 if kind in ("loss_flat", "always_clipped") else 200
    assert begins < found[0].update <= begins + 2 * WINDOW
    assert CAUSES[kind] in found[0].text
    assert found[0].line().startswith(f"Noticed at update {found[0].update}: ")


def test_a_run_without_any_target_token_is_told_that_alone():
    found = found_in([{**healthy(u), **EMPTY, "tokens": 0} for u in range(1000)])
    assert [(f.update, f.kind) for f in found] == [(4, "empty_windows")]
    assert found[0].text.startswith("5 of the last 5 windows held no target token")


@pytest.mark.parametrize(
    "figures",
    [
        {"core_update_norm": None},  # a model without a core
        {"core_update_norm": 0.0, "update_norm": 0.0},  # a rate of 0
        {"core_update_norm": 1e-12},
        {"core_update_norm": None, "update_norm": None},  # not finite
    ],
)
def test_a_core_that_is_not_alone_in_standing_still_is_not_named(figures):
    assert found_in([{**healthy(update), **figures} for update in range(300)]) == []


def test_four_updates_that_leave_the_core_alone_are_not_named():
    still = {"core_update_norm": 0.0}
    records = [{**healthy(u), **(still if u % 5 else {})} for u in range(300)]
    assert found_in(records) == []


@pytest.mark.parametrize(("every", "named"), [(50, False), (20, False), (10, True)])
def test_some_windows_without_target_tokens(every, named):
    """2, 5 and 10 in 100; above 5 is a finding."""
    records, tokens = [], 0
    for update in range(600):
        empty = update % every == 0
        tokens += 0 if empty else 1000
        records.append({**healthy(update), **(EMPTY if empty else {}), "tokens": tokens})
    assert [f.kind for f in found_in(records)] == ["empty_windows"] * named


def test_a_flat_loss_is_named_beside_windows_without_target_tokens():
    """Their loss of 0 would lower the mean by 5 %, which counts as learning."""
    records, tokens = [], 0
    for update in range(400):
        empty = update % 20 == 0
        tokens += 0 if empty else 1000
        more = EMPTY if empty else {}
        records.append({**broken("loss_flat", update), **more, "tokens": tokens})
    (found,) = found_in(records)
    assert found.kind == "loss_flat"
    assert "updates is 6.9" in found.text


def test_a_validation_loss_that_turns_away_is_named():
    # Training falls on; validation has its minimum of 4.5 at 400 and is 0.1 above it at 600.
    passes = [(u, 4.5 + abs(u - 400) / 2000) for u in range(200, 1001, 100)]
    found = found_in([healthy(u) for u in range(1000)], passes)
    assert [f.kind for f in found] == ["train_and_validation_part"]
    assert found[0].update == 699  # at 600 it is exactly 0.1 above, and not more
    assert "the validation loss is 4.650, up from 4.500, while" in found[0].text


def test_what_was_named_before_is_not_named_again():
    records = [broken("data_wait", u) for u in range(1000)]
    diagnosis = Diagnosis(CONFIG, named=["data_wait"])
    assert all(diagnosis.read_update(record) == [] for record in records)


def test_findings_are_the_same_after_an_interruption():
    records = [broken("always_clipped", u) for u in range(300)]
    whole = found_in(records)
    before, after = Diagnosis(CONFIG), Diagnosis(CONFIG)
    first = [f for r in records[:100] for f in before.read_update(r)]
    for record in records[:100]:
        after.read_update(record)
    assert first + [f for r in records[100:] for f in after.read_update(r)] == whole


def test_no_warm_up_and_no_clipping_are_fine():
    config = dataclasses.replace(CONFIG, optim=OptimConfig(clip="off"))
    diagnosis = Diagnosis(config)
    for update in range(300):
        record = healthy(update) | {"grad_norm": 50.0}
        assert diagnosis.read_update(record) == []
