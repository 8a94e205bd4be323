"""Whole runs that learn from a teacher's cache."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny_model
from test_runs import config_for, directory_of, final_state, until

from jaxlm.config import Config, DistillationConfig, SourceConfig, load
from jaxlm.data.shards import DataDirectory
from jaxlm.data.teacher import CacheWriter
from jaxlm.errors import UserError
from jaxlm.memory.devices import RTX3090
from jaxlm.training import loop
from jaxlm.training.loading import load_run
from jaxlm.training.metrics import read_records
from jaxlm.training.planning import lower_step
from jaxlm.training.replay import replay

V, K = 64, 4


def cache_for(directory: Path, name: str = "t", seed: int = 0, stop: int | None = None) -> Path:
    """What a teacher that knows nothing of the text predicts."""
    data = DataDirectory(directory)
    stream = data.stream("train")
    count = (stop or len(stream)) - 1
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(count, V))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-log_p, -1)
    chosen = np.take_along_axis(log_p, ids, -1)
    description = {
        "teacher": {"kind": "jaxlm", "name": name, "depth": None},
        "context": {"kind": "packed rows", "length": 8, "overlap": 0},
        "tokenizer": None,
        "vocabulary": None,
        "vocabulary_size": V,
        "k": K,
        "dtype": "float16",
    }
    path = directory / f"teacher-{name}"
    with CacheWriter(path, description, stream, 1, 500) as writer:
        for i in range(0, count, 250):
            part = slice(i, i + 250)
            tail = np.log(np.exp(chosen[part, K:]).sum(-1))
            writer.append(ids[part, :K], chosen[part, :K], tail)
            writer.commit()
        writer.finish()
    return path


def distilled(directory: Path, name: str, cache: Path | None, **settings) -> Config:
    section = DistillationConfig(cache=cache and str(cache), temperature=2.0, **settings)
    model = tiny_model("transformer", dropout=0.1, width=16, heads=2, feed_forward=32)
    return config_for(directory, name, model=model, distillation=section)


def test_a_distilled_run_resumes_bitwise_and_says_what_it_learns(random_data, monkeypatch, capsys):
    cache = cache_for(random_data)
    assert loop.train(distilled(random_data, "whole", cache)) == 0
    assert "Teacher: t (jaxlm), k = 4, float16, packed rows of 8 tokens" in capsys.readouterr().out
    config = distilled(random_data, "interrupted", cache)
    for updates in (13, 30):
        until(monkeypatch, updates)
        loop.train(config)
    loop.train(config)
    whole = directory_of(distilled(random_data, "whole", cache))
    assert final_state(config) == final_state(distilled(random_data, "whole", cache))
    records = read_records(whole / "metrics.jsonl")
    assert records == [{**r, "loss": r["loss"], "distillation": r["distillation"]} for r in records]
    for one, two in zip(records, read_records(directory_of(config) / "metrics.jsonl"), strict=True):
        assert one["distillation"] == two["distillation"]
        mixture = 0.5 * one["cross_entropy"] + 0.5 * 4 * one["distillation"]
        assert one["loss"] == pytest.approx(mixture, rel=1e-5)
    # An update made again reads the teacher again.
    again = replay(whole, 38)
    assert again.differs_from is None
    assert again.micro_batches[0].finite
    # Evaluation is plain, and needs no cache.
    report = json.loads((whole / "report.json").read_text())
    assert "distillation" not in report["evaluations"][0]
    run = load_run(whole)
    assert run.data.directory == random_data


def test_another_teacher_is_another_run(random_data, monkeypatch):
    cache = cache_for(random_data)
    config = distilled(random_data, "run", cache)
    until(monkeypatch, 10)
    loop.train(config)
    other = cache_for(random_data, "other", seed=1)
    with pytest.raises(UserError, match=r"data: teacher changed\ndata: teacher records changed"):
        loop.train(distilled(random_data, "run", other))
    with pytest.raises(UserError, match="data: teacher changed"):
        loop.train(distilled(random_data, "run", None))
    with pytest.raises(UserError, match=r"distillation.alpha: was 0.5, is 0.25"):
        loop.train(distilled(random_data, "run", cache, alpha=0.25))
    # Its folder may have moved.
    moved = random_data.parent / "moved"
    cache.rename(moved)
    until(monkeypatch, 20)
    assert loop.train(distilled(random_data, "run", moved)) == 0


def test_a_teacher_cannot_come_later(random_data, monkeypatch):
    until(monkeypatch, 10)
    loop.train(distilled(random_data, "run", None))
    record = read_records(directory_of(distilled(random_data, "run", None)) / "metrics.jsonl")[0]
    assert record["distillation"] is None
    with pytest.raises(UserError, match="data: teacher changed"):
        loop.train(distilled(random_data, "run", cache_for(random_data)))


def test_a_cache_that_is_too_short_ends_the_run_before_it_begins(random_data):
    cache = cache_for(random_data, stop=300)
    with pytest.raises(UserError, match=r"teacher-t: has positions 1 to 300, and 1 to [\d,]+ are"):
        loop.train(distilled(random_data, "run", cache))
    assert not directory_of(distilled(random_data, "run", cache)).exists()


def test_sources_that_are_mixed_have_no_teacher(random_data):
    config = config_for(random_data)
    sources = (SourceConfig(str(random_data), 1.0),)
    data = dataclasses.replace(config.data, sources=sources)
    with pytest.raises(ValueError, match=r"distillation.cache .* data.sources mixes several"):
        dataclasses.replace(config, data=data, distillation=DistillationConfig(cache="x"))


def test_settings_are_read_from_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("distillation: {cache: a/teacher-b, alpha: 1, temperature: 2}")
    assert load([path]).distillation == DistillationConfig("a/teacher-b", 1.0, 2.0)
    path.write_text("distillation: {alpha: 1.5}")
    with pytest.raises(UserError, match=r"'distillation.alpha' is 1.5: should be less than or"):
        load([path])


def shapes_of(lowered) -> list[str]:
    return [str(x) for x in jax.tree.leaves(lowered.in_avals)]


def test_the_planner_counts_the_teachers_arrays(random_data, tmp_path):
    """[M, B, T, k] ids and log-probabilities, [M, B, T] rests, in the cache's types."""
    config = distilled(random_data, "run", cache_for(random_data))
    lowered, _, _ = lower_step(config, RTX3090)
    expected = ["uint16[2,2,8,4]", "float16[2,2,8,4]"]
    for shape in (*expected, "float16[2,2,8]"):
        assert shape in shapes_of(lowered)
    off, _, _ = lower_step(distilled(random_data, "run", None), RTX3090)
    assert len(shapes_of(lowered)) == len(shapes_of(off)) + 3
    # A cache that is still to be made is planned with the defaults of scripts/cache_teacher.py.
    missing, _, _ = lower_step(distilled(random_data, "run", tmp_path / "no"), RTX3090)
    assert "uint16[2,2,8,32]" in shapes_of(missing)
