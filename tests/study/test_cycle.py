"""Whole studies of tiny models, their workers in this process unless a test says otherwise."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data.shards import DataDirectory
from jaxlm.errors import Failure
from jaxlm.study import cycle as machine
from jaxlm.study.cycle import Cycles
from jaxlm.study.journal import Journal
from jaxlm.study.settings import read_study
from jaxlm.study.worker import read_job, work
from jaxlm.training.metrics import read_records

TINY = """
study:
  name: tiny
  directory: {folder}/studies
  cycles: 3
  tokens_per_cycle: 320
  depths: [1, 3]
  held_out_windows: true
settings:
  prepare:
    inputs: ["{folder}/*.txt"]
    text_documents: line
    vocabulary_size: 300
    shard_tokens: 150
    processes: 1
    validation_fraction: 0.2
  data: {{sequence_length: 8}}
  model: {{width: 16, heads: 2, feed_forward: 32, remat: none}}
  depth: {{mean: 3, maximum: 6, backprop: 2}}
  loss: {{chunk_tokens: 16}}
  optim: {{name: adamw, learning_rate: 1e-2, warmup_updates: 2}}
  training: {{micro_batch_rows: 2, micro_batches: 2}}
  evaluation: {{every: 5, rows: 8, batch_rows: 4}}
  checkpoint: {{every: 4}}
  monitors: {{rows: 0}}
  logging: {{tensorboard: false}}
models:
  loop:
    settings:
      model: {{recurrent: {{prelude_layers: 1, core_layers: 1, coda_layers: 1}}}}
  plain:
    settings:
      model: {{kind: transformer, transformer: {{layers: 3}}}}
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for name in "abc":
        lines = [" ".join(f"{rng.randint(0, 10**6)}" for _ in range(5)) for _ in range(30)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def study_in(folder: Path, texts: Path, *overrides: str, text: str = TINY):
    folder.mkdir(exist_ok=True)
    path = folder / "study.yaml"
    path.write_text(text.format(folder=texts))
    return read_study(path, [f"study.directory={folder}/studies", *overrides])


def launch(job: Path) -> int:
    return work(read_job(job))


def finish(study):
    with Cycles(study, launch) as cycles:
        cycles.run()


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    """A study that was left alone; not to be written to."""
    study = study_in(tmp_path_factory.mktemp("finished"), texts)
    finish(study)
    return study


KINDS = [
    "study",
    *["prepared", "trained", "evaluated", "trained", "evaluated", "compared"],
    *["reclaiming", "reclaimed", "cycle"],
]


def test_a_study_from_its_beginning_to_its_end(finished):
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    assert [event["event"] for event in journal.events] == KINDS + 2 * KINDS[1:]
    for run in ("loop-42", "plain-42"):
        records = read_records(finished.directory / "models" / run / "metrics.jsonl")
        assert [record["update"] for record in records] == list(range(30))
    logs = [
        (finished.directory / "models" / run / "blocks.jsonl").read_text()
        for run in ("loop-42", "plain-42")
    ]
    assert logs[0] == logs[1]
    blocks = [i for line in logs[0].splitlines() for i in json.loads(line)["blocks"]]
    # Three windows of 40 rows, every row once, each window's own.
    assert [sorted(blocks[i : i + 40]) for i in (0, 40, 80)] == [
        list(range(i, i + 40)) for i in (0, 40, 80)
    ]
    # The fixed set is that of the first cycle in all of them; later windows have their own.
    evaluated = journal.all("evaluated", model="loop")
    targets = [e["evaluations"]["validation"][0]["target_tokens"] for e in evaluated]
    assert len(set(targets)) == 1
    assert ["window" in e["evaluations"] for e in evaluated] == [False, True, True]
    assert [e["depth"] for e in evaluated[0]["evaluations"]["validation"]] == [1, 3]


def test_used_tokens_are_gone_and_everything_else_is_there(finished):
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    removed = {n for e in journal.all("reclaiming") for n in e["files"]}
    data = DataDirectory(finished.data_directory)
    stream = data.stream("train")
    assert len(removed) >= 5
    assert 960 - 200 < stream.readable_from <= 960
    there = {
        p.relative_to(finished.directory).as_posix() for p in finished.directory.rglob("*.npy")
    }
    assert not removed & there
    for event in journal.all("prepared"):
        assert event["files"].keys() <= removed | there
    assert sum(e["bytes"] for e in journal.all("reclaimed")) == sum(
        entry["bytes"] for e in journal.all("reclaiming") for entry in e["files"].values()
    )


def test_cycles_equal_one_long_cycle(finished, texts, tmp_path):
    """The same study in a single cycle of three times the tokens, order of rows as before."""
    text = TINY.replace("cycles: 3", "cycles: 1").replace("cycle: 320", "cycle: 960")
    text = text.replace("sequence_length: 8", "sequence_length: 8, shuffle_tokens: 320")
    one = study_in(tmp_path, texts, text=text)
    with Cycles(one, launch) as cycles:
        cycles._begin()
        # Its validation documents: those that are there after a third of the tokens.
        config = cycles._data_config()
        machine.prepare(config, 321)
        kept = DataDirectory(one.data_directory).manifest["splits"]["validation"]["tokens"]
        append = cycles.journal.append

        def with_first_validation(kind, **values):
            if kind == "prepared":
                values["validation_tokens"] = kept
            return append(kind, **values)

        cycles.journal.append = with_first_validation
        cycles.run()
    for run in ("loop-42", "plain-42"):
        first, second = (study.directory / "models" / run for study in (finished, one))
        names = ["blocks.jsonl", "metrics.jsonl", "evaluations.jsonl"]
        for name in names:
            timeless = [
                [
                    {k: v for k, v in r.items() if "second" not in k and "data_wait" not in k}
                    for r in read_records(folder / name)
                ]
                for folder in (first, second)
            ]
            assert timeless[0] == timeless[1], name
        assert len(read_records(first / "evaluations.jsonl")) == 6
        assert arrays_of(first / "checkpoints/30") == arrays_of(second / "checkpoints/30")


def arrays_of(checkpoint: Path) -> dict[str, bytes]:
    from orbax.checkpoint import v1 as ocp

    loaded = ocp.load_checkpointables(str(checkpoint.absolute()))
    import jax

    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(loaded)
    }


class Killed(BaseException):
    """What a SIGKILL is in these tests: nothing catches it."""


def live(study, monkeypatch, edge: int, after: bool) -> bool:
    """Run a study until the journal has `edge` events and one more would come; was it killed?

    With `after` the event is written first.
    """
    append = Journal.append

    def kill(self, kind, **values):
        if len(self.events) == edge and not after:
            raise Killed
        event = append(self, kind, **values)
        if len(self.events) == edge + 1 and after:
            raise Killed
        return event

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", kill)
        try:
            finish(study)
        except Killed:
            return True
    return False


def test_killed_at_every_edge_of_the_journal(finished, texts, tmp_path, monkeypatch):
    study = study_in(tmp_path, texts)
    edges = len(KINDS) + 2 * len(KINDS[1:])
    for edge in range(edges):
        assert live(study, monkeypatch, edge, after=False), edge
        assert live(study, monkeypatch, edge, after=True), edge
    finish(study)
    a, b = (Journal(s.directory / "journal.jsonl", read_only=True) for s in (finished, study))
    assert [e["event"] for e in a.events] == [e["event"] for e in b.events]
    for kind, keys in (
        ("prepared", ("tokens", "validation_tokens", "files", "unigram_cross_entropy")),
        ("trained", ("update", "tokens", "blocks")),
        ("compared", ("blocks",)),
        ("reclaiming", ("files", "shards")),
    ):
        for one, other in zip(a.all(kind), b.all(kind), strict=True):
            assert [one[key] for key in keys] == [other[key] for key in keys]
    for one, other in zip(a.all("evaluated"), b.all("evaluated"), strict=True):
        for name, found in one["evaluations"].items():
            assert [e["cross_entropy"] for e in found] == [
                e["cross_entropy"] for e in other["evaluations"][name]
            ]
    for run in ("loop-42", "plain-42"):
        one, other = (s.directory / "models" / run for s in (finished, study))
        assert (one / "blocks.jsonl").read_text() == (other / "blocks.jsonl").read_text()
        assert arrays_of(one / "checkpoints/30") == arrays_of(other / "checkpoints/30")
    left = [
        sorted(p.name for p in (s.directory / "data/train").iterdir()) for s in (finished, study)
    ]
    assert left[0] == left[1]


def test_killed_while_shards_are_removed(finished, tmp_path, monkeypatch):
    """Half of the shards are gone, and the journal says that all are to go."""
    folder = tmp_path / "studies" / "tiny"
    shutil.copytree(finished.directory, folder)
    study = dataclasses.replace(
        finished, config=dataclasses.replace(finished.config, directory=str(tmp_path / "studies"))
    )
    journal = Journal(folder / "journal.jsonl")
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    last = max(i for i, e in enumerate(journal.events) if e["event"] == "reclaiming")
    (folder / "journal.jsonl").write_bytes(b"".join(lines[: last + 1]))
    files = list(journal.events[last]["files"])
    data = DataDirectory(finished.data_directory)
    assert len(files) >= 2
    # One that was not removed yet; what it holds does not matter to the other paths.
    left = folder / files[-1]
    assert not left.exists()
    left.write_bytes(b"something else")
    with pytest.raises(Failure, match=f"{left}: is not what the study wrote there"):
        finish(study)
    assert left.exists()
    left.unlink()
    finish(study)
    assert DataDirectory(folder / "data").manifest == data.manifest
