"""Runs on data that is prepared, and given up again, while they are under way."""

import dataclasses
import random

import pytest
from helpers import tiny_model
from test_runs import config_for, directory_of, final_state

from jaxlm.config import DataConfig, EvaluationConfig, PrepareConfig
from jaxlm.data.pipeline import open_sources, training_windows
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import UserError
from jaxlm.training import finished
from jaxlm.training.loading import load_run
from jaxlm.training.loop import Run, train
from jaxlm.training.metrics import read_records

T, ROWS, UPDATES = 8, 4, 40  # tokens an update: 32


@pytest.fixture
def texts(tmp_path):
    rng = random.Random(0)
    for name in "abc":
        lines = [" ".join(f"{rng.choice('aeiou')}{rng.randint(0, 99)}" for _ in range(9))]
        lines += [" ".join(f"{rng.randint(0, 10**6)}" for _ in range(5)) for _ in range(30)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def arriving(folder, name, updates=UPDATES, **data):
    """The tiny run of test_runs on text, in groups of 10 updates, up to the range's end."""
    settings = {
        "directory": str(folder / name / "data"),
        "sequence_length": T,
        "shuffle_tokens": 320,
        "tokens": (0, UPDATES * T * ROWS),
        **data,
    }
    prepared = PrepareConfig(
        inputs=(str(folder / "*.txt"),),
        text_documents="line",
        vocabulary_size=300,
        shard_tokens=150,
        processes=1,
        validation_fraction=0.2,
    )
    config = config_for(
        folder / name / "data",
        prepare=prepared,
        data=DataConfig(**settings),
        model=tiny_model(
            "transformer", dropout=0.1, width=16, heads=2, feed_forward=32, vocabulary_size=300
        ),
        evaluation=EvaluationConfig(every=10, depths=(1,), batch_rows=4, rows=8),
    )
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, updates=updates)
    )


def reclaim(folder, tokens):
    data = DataDirectory(folder)
    paths = data.reclaimable(tokens)
    data.mark_reclaimed(len(paths))
    for path in paths:
        path.unlink(missing_ok=True)
    return paths


def test_cycles_on_a_growing_and_reclaimed_directory_equal_one_run(texts):
    whole = arriving(texts, "whole")
    first = prepare(whole, tokens=321)  # pauses, so that both know the same validation documents
    validation = len(first.stream("validation"))
    prepare(whole)
    keep = {"validation_tokens": validation}
    one = arriving(texts, "whole", **keep)
    assert len(DataDirectory(texts / "whole/data").stream("validation")) > validation
    assert train(one) == 0

    cycled = arriving(texts, "cycled", **keep)
    removed = []
    for cycle in range(4):
        prepare(cycled, tokens=320 * (cycle + 1) + 1)
        if cycle == 1:  # half a cycle, as one that was interrupted
            assert train(cycled, until_update=15) == 0
        assert train(cycled, until_update=10 * (cycle + 1)) == 0
        removed = reclaim(texts / "cycled/data", 320 * (cycle + 1))
    assert len(removed) > 6
    assert not any(path.exists() for path in removed)
    assert not (directory_of(cycled) / "report.md").exists()

    a, b = final_state(one), final_state(cycled)
    for key in ("leaves", "metrics", "blocks", "progress"):
        assert a[key] == b[key], key
    evaluations = [
        [(r["update"], r["cross_entropy"]) for r in read_records(directory_of(c) / name)]
        for c in (one, cycled)
        for name in ["evaluations.jsonl"]
    ]
    assert evaluations[0] == evaluations[1]
    assert [update for update, _ in evaluations[0]] == [10, 20, 30, 40]
    # A finished run is still evaluated, and counts of all training tokens are those of the whole.
    assert load_run(directory_of(cycled)).update == 40
    counts = [DataDirectory(texts / n / "data").counts("train") for n in ("whole", "cycled")]
    assert counts[1].sum() == len(DataDirectory(texts / "cycled/data").stream("train"))
    prepare(cycled)  # on to the end of the sources, with shards that are gone
    assert (DataDirectory(texts / "cycled/data").counts("train") == counts[0]).all()


def test_a_run_whose_data_arrives_and_goes_is_checked_all_the_same(texts):
    config = arriving(texts, "checked")
    prepare(config, tokens=641)
    assert train(config, until_update=15) == 0

    def blocks():
        found = finished.run_checks(directory_of(config), ["blocks"], lambda units, text: None)
        assert found[0].passed, found[0]
        return found[0].figure

    assert "in the data's order" in blocks()
    reclaim(texts / "checked/data", 320)
    assert "the data is gone" in blocks()


def test_what_is_not_there_or_no_longer_is_refused(texts):
    config = arriving(texts, "run")
    prepare(config, tokens=700)
    there = len(DataDirectory(texts / "run/data").stream("train"))
    with pytest.raises(UserError, match=r"asks for tokens up to 1,280, but .* has only"):
        train(config)
    with pytest.raises(UserError, match=rf"to token 961 of the stream, .* has {there} so far"):
        train(config, until_update=30)
    # 21 updates end within the third group of 10, which is shuffled as a whole.
    with pytest.raises(UserError, match="prepare more"):
        train(config, until_update=21)
    reclaim(texts / "run/data", 320)
    with pytest.raises(UserError, match=r"token .* of the stream was reclaimed: the first .* is"):
        train(config, until_update=20)
    # Rows after the reclaimed shards can be read, by their old numbers.
    first = DataDirectory(texts / "run/data").stream("train").readable_from
    later = arriving(texts, "run", tokens=(-(-first // 320) * 320, 640)).data
    windows = training_windows(open_sources(later, DataDirectory(texts / "run/data")), later, 2, 2)
    blocks = [int(i) for n in range(len(windows)) for i in windows[n]["block"].ravel()]
    assert sorted(blocks) == list(range(later.tokens[0] // T, 640 // T))


def test_growth_matters_where_a_run_reads_all(texts):
    for name, settings, message in (
        ("all", {"tokens": None}, "train tokens have grown; a run on data that grows needs"),
        ("range", {}, "validation tokens have grown; data.validation_tokens"),
    ):
        config = arriving(texts, name, shuffle_tokens=None, **settings)
        prepare(config, tokens=1400)
        assert train(config, until_update=2) == 0
        prepare(config)
        with pytest.raises(UserError, match=message):
            Run(config)
    with pytest.raises(UserError, match=r"validation_tokens \(10,000\) is above"):
        Run(arriving(texts, "range", validation_tokens=10_000))
    with pytest.raises(UserError, match="--until-update 41: expected 1 to 40"):
        train(config, until_update=41)
