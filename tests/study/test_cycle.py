"""Whole studies of tiny models, their workers in this process unless a test says otherwise."""

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data.shards import DataDirectory
from jaxlm.errors import Failure, UserError
from jaxlm.files import sha256_of
from jaxlm.memory.devices import DEVICES
from jaxlm.study import cycle as machine
from jaxlm.study import report
from jaxlm.study.cycle import Cycles, StoppedError
from jaxlm.study.journal import Journal
from jaxlm.study.plan import disk_needs, phase_times
from jaxlm.study.settings import read_study
from jaxlm.study.status import print_plan, print_status
from jaxlm.study.worker import read_job, work
from jaxlm.training import checkpoint, loop
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
    *["preparing", "prepared", "trained", "evaluated", "trained", "evaluated", "compared"],
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
    one_long_cycle(one)
    for run in ("loop-42", "plain-42"):
        first, second = (study.directory / "models" / run for study in (finished, one))
        names = ["blocks.jsonl", "metrics.jsonl", "evaluations.jsonl"]
        for name in names:
            assert timeless(first / name) == timeless(second / name), name
        assert len(read_records(first / "evaluations.jsonl")) == 6
        assert arrays_of(first / "checkpoints/30") == arrays_of(second / "checkpoints/30")


def one_long_cycle(study) -> None:
    """Run a study of one cycle with the validation documents that a third of its tokens bring."""
    with Cycles(study, launch) as cycles:
        cycles._begin()
        machine.prepare(cycles._data_config(), 321)
        kept = DataDirectory(study.data_directory).manifest["splits"]["validation"]["tokens"]
        append = cycles.journal.append

        def with_first_validation(kind, **values):
            if kind == "prepared":
                values["validation_tokens"] = kept
            return append(kind, **values)

        cycles.journal.append = with_first_validation
        cycles.run()


def timeless(path: Path) -> list[dict]:
    """Records without what is measured by a clock."""
    return [
        {k: v for k, v in r.items() if "second" not in k and "data_wait" not in k}
        for r in read_records(path)
    ]


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
        patch.setattr(report, "available", lambda: False)  # pictures take most of a report's time
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
    assert_same(finished, study)
    # Of preparations that were begun again the seconds of the last attempt are known.
    events = Journal(study.directory / "journal.jsonl", read_only=True).all("prepared")
    assert [event["interrupted"] for event in events] == [True, True, True]
    told = "not counted: attempts that were interrupted, of cycle 1, 2, 3)"
    assert told in (study.directory / "report.md").read_text()
    assert "not counted" not in (finished.directory / "report.md").read_text()


def assert_same(finished, study) -> None:
    """Journal, evaluations, block ids, weights and optimizer states, and what is left of tokens."""
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
    verdicts = [
        json.loads((s.directory / "report.json").read_text())["verdicts"] for s in (finished, study)
    ]
    assert verdicts[0]
    assert verdicts[0] == verdicts[1]


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
    # What was removed before the kill counts.
    reclaimed = Journal(folder / "journal.jsonl", read_only=True).find("reclaimed", cycle=3)
    assert reclaimed["bytes"] == sum(e["bytes"] for e in journal.events[last]["files"].values()) > 0


# ---------------------------------------------------------------- report


def copy_of(study, folder: Path):
    """The same study in another place, to be written to."""
    shutil.copytree(study.directory, folder / "studies" / "tiny")
    config = dataclasses.replace(study.config, directory=str(folder / "studies"))
    return dataclasses.replace(study, config=config)


def test_the_report_says_what_the_runs_measured(finished):
    figures = json.loads((finished.directory / "report.json").read_text())
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    assert (figures["cycle"], figures["withheld"]) == (3, [])
    for model in ("loop", "plain"):
        events = journal.all("evaluated", model=model)
        points = figures["models"][model]["seeds"]["42"]
        assert [p["evaluations"] for p in points] == [e["evaluations"] for e in events]
    sums = finished.directory / "evaluations"
    # Verdicts from the documents' sums: their difference is that of the cross-entropies.
    for index, depth in enumerate((1, 3)):
        found = figures["verdicts"]["loop"][str(depth)]
        losses = [np.load(sums / f"{run}-42-cycle-3.npz") for run in ("loop", "plain")]
        tokens = losses[0]["validation.tokens"].sum()
        one, other = losses[0]["validation.loss"][index].sum(), losses[1]["validation.loss"].sum()
        assert found["difference"] == pytest.approx((one - other) / tokens, rel=1e-9)
        entropies = [
            journal.find("evaluated", model=model, cycle=3)["evaluations"]["validation"][i]
            for model, i in (("loop", index), ("plain", 0))
        ]
        difference = entropies[0]["cross_entropy"] - entropies[1]["cross_entropy"]
        assert found["difference"] == pytest.approx(difference, abs=2e-6)
        assert found["seed_variance_measured"] is False
        html = (finished.directory / "report.html").read_text()
        assert found["sentence"] in html
        # What holds for all depths is said once.
        assert [html.count(remark) for remark in found["remarks"]] == [1]
    # FLOPs of the Transformer: 6 per token and weight that multiplies, and attention.
    weights = 3 * (4 * 16 * 16 + 3 * 16 * 32) + 300 * 16
    attention = 3 * 2 * 2 * 16 * 4.5
    point = figures["models"]["plain"]["seeds"]["42"][2]
    assert point["flops"] == pytest.approx(3 * (2 * weights + attention) * point["tokens"])
    text = (finished.directory / "report.md").read_text()
    for part in ("## Verdict", "## What was equal", "loop at depth 3", "Goodput", "jaxlm 0.1.0"):
        assert part in text
    html = (finished.directory / "report.html").read_text()
    assert html.count("data:image/svg") == 5
    assert "http" not in html.replace("http-equiv", "")


def test_the_report_says_how_sure_its_statements_are(finished):
    one = report._how_sure(finished, 1)
    assert one in (finished.directory / "report.md").read_text()
    assert "over documents alone: how often another seed would reverse a statement is not" in one
    assert "5 %" not in one
    config = dataclasses.replace(finished.config, seeds=(1, 2, 3))
    several = report._how_sure(dataclasses.replace(finished, config=config), 2)
    assert "the chance that any of them is false is about 5 %. Each model is compared" in several
    assert "Intervals are over 3 seeds and over documents. The order of the data was" in several


def test_one_changed_line_of_a_block_log_withholds_the_verdict(finished, tmp_path):
    study = copy_of(finished, tmp_path)
    path = study.directory / "models" / "plain-42" / "blocks.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[31])  # update 15
    record["blocks"][0], record["blocks"][1] = record["blocks"][1], record["blocks"][0]
    path.write_text("".join([*lines[:31], json.dumps(record) + "\n", *lines[32:]]))
    with pytest.raises(Failure, match=r"verdict withheld: .*between updates 10 and 20.*update 15"):
        finish(study)
    figures = json.loads((study.directory / "report.json").read_text())
    assert figures["verdicts"] == {}
    assert len(figures["withheld"]) == 2
    assert "Withheld" in (study.directory / "report.md").read_text()
    assert "is better by" not in (study.directory / "report.md").read_text()
    # Both logs changed alike: they agree, and are still not what was recorded.
    shutil.copy(path, study.directory / "models" / "loop-42" / "blocks.jsonl")
    with pytest.raises(Failure, match=r"loop-42/blocks\.jsonl: is not, between updates 10 and 20"):
        finish(study)
    path.write_text("".join(lines))
    shutil.copy(path, study.directory / "models" / "loop-42" / "blocks.jsonl")
    finish(study)
    assert json.loads((study.directory / "report.json").read_text())["verdicts"]


def test_changed_sums_of_documents_withhold_the_verdict(finished, tmp_path, capsys):
    study = copy_of(finished, tmp_path)
    path = study.directory / "evaluations" / "loop-42-cycle-3.npz"
    with np.load(path) as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    changed["validation.loss"] = changed["validation.loss"] * 0.9
    kept = path.read_bytes()
    np.savez(path, **changed)
    for spoiled in ("changed", "missing"):
        if spoiled == "missing":
            path.unlink()
        with pytest.raises(Failure, match=r"withheld: .*loop-42-cycle-3\.npz: missing, or not"):
            finish(study)
        assert "Verdict withheld: " in capsys.readouterr().out
        figures = json.loads((study.directory / "report.json").read_text())
        assert figures["verdicts"] == {}
        assert [why.startswith(str(path)) for why in figures["withheld"]] == [True]
        assert "cycle-3.npz: missing, or not what" in (study.directory / "report.md").read_text()
    path.write_bytes(kept)
    finish(study)
    figures = json.loads((study.directory / "report.json").read_text())
    assert figures["verdicts"]
    assert not figures["withheld"]


def test_other_settings_a_foreign_folder_and_a_second_process_are_refused(
    finished, texts, tmp_path
):
    study = copy_of(finished, tmp_path)
    config = dataclasses.replace(study.config, margin=0.5)
    with pytest.raises(UserError, match=r"margin: was 0\.01, is 0\.5"):
        Cycles(dataclasses.replace(study, config=config), launch)
    with (
        Cycles(study, launch),
        pytest.raises(UserError, match="another process runs this study"),
    ):
        Cycles(study, launch)
    (study.directory / "journal.jsonl").unlink()
    with pytest.raises(UserError, match="has no journal but holds data"):
        Cycles(study, launch)
    (study.directory / "models" / "plain-42" / "link").symlink_to("/tmp")
    with pytest.raises(UserError, match="is a symbolic link"):
        Cycles(study, launch)
    small = study_in(tmp_path / "small", texts, "study.disk=0.00001")
    with pytest.raises(Failure, match=r"left of study\.disk .*make room"):
        finish(small)


def test_a_study_whose_first_event_was_not_written_begins_again(texts, tmp_path):
    study = study_in(tmp_path, texts)
    (study.directory / "jobs").mkdir(parents=True)
    for left in (b"", b'{"event": "study", "ti'):
        (study.directory / "journal.jsonl").write_bytes(left)
        with Cycles(study, launch) as cycles:
            assert cycles.journal.events == []
    (study.directory / "data").mkdir()
    with pytest.raises(UserError, match="has no journal but holds data"):
        Cycles(study, launch)


def test_sources_that_are_too_small_are_noticed_before_training(texts, tmp_path, capsys):
    study = study_in(tmp_path / "one", texts, "study.tokens_per_cycle=3200")
    with pytest.raises(UserError, match=r"3 cycles need 9,601 training tokens, and the sources"):
        finish(study)
    assert not (study.directory / "models").exists()
    study = study_in(tmp_path / "other", texts, "study.cycles=30")
    with Cycles(study, launch) as cycles:
        cycles._begin()
        cycles._prepare(1)
    said = capsys.readouterr().err
    assert "and the study needs 9,600" in said
    # Of the three files of equal size the first was read in part: all give three times as much,
    # or more.
    found = int(re.search(r"give at least about ([\d,]+)", said)[1].replace(",", ""))
    first = cycles.journal.find("prepared")["tokens"]
    assert found == pytest.approx(3 * first, rel=0.01)
    assert found <= machine.prepare(cycles._data_config()).manifest["splits"]["train"]["tokens"]


def test_room_is_asked_for_what_is_left_of_a_preparation(texts, tmp_path, monkeypatch):
    study = study_in(tmp_path, texts)
    with Cycles(study, launch) as cycles:
        cycles._begin()
        machine.prepare(cycles._data_config(), 200)  # it was interrupted there
        there = sum(p.stat().st_size for p in (study.data_directory / "train").glob("tokens-*"))
        assert there > 2 * 200
        left = (320 + 150) * 2 - there
        with monkeypatch.context() as patch:
            patch.setattr(machine, "free_bytes", lambda _: left - 1)
            with pytest.raises(Failure, match="preparing its tokens needs"):
                cycles._prepare(1)
            patch.setattr(machine, "free_bytes", lambda _: left)
            cycles._prepare(1)
        # Those of the first cycle are no part of what the second one needs.
        with monkeypatch.context() as patch:
            patch.setattr(machine, "free_bytes", lambda _: (320 + 150) * 2 - 1)
            with pytest.raises(Failure, match="preparing its tokens needs"):
                cycles._prepare(2)


def test_evaluation_data_are_looked_at_before_anything_is_trained(texts, tmp_path):
    key = "study.evaluation_data"
    study = study_in(tmp_path / "missing", texts, f"{key}={{wiki: {tmp_path}/wiki}}")
    with pytest.raises(UserError, match="wiki: holds no prepared data"):
        finish(study)
    assert not (study.directory / "journal.jsonl").exists()
    prepare = dataclasses.replace(study.first.prepare, vocabulary_size=290)
    data = dataclasses.replace(study.first.data, directory=str(tmp_path / "wiki"))
    machine.prepare(dataclasses.replace(study.first, prepare=prepare, data=data))
    with pytest.raises(UserError, match=f"{key}: .*wiki differs from .*data in its tokenizer"):
        finish(study)
    assert not (study.directory / "models").exists()


@pytest.fixture(scope="module")
def before_reclaiming(texts, tmp_path_factory):
    """A study of one cycle that has only to reclaim its tokens; not to be written to."""
    study = study_in(tmp_path_factory.mktemp("before"), texts, "study.cycles=1")
    with pytest.MonkeyPatch.context() as patch:
        assert live(study, patch, KINDS.index("reclaiming") - 1, after=True)
    return study


DAMAGED = "models/loop-42/checkpoints/10"


def damaged_copy(study, folder: Path):
    """The same study elsewhere, one model's last checkpoint damaged."""
    study = copy_of(study, folder)
    path = study.directory / DAMAGED / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    return study


def assert_made_again(study, before) -> None:
    """A damaged study ended with the runs, figures and verdicts of one that was not."""
    names = [event["event"] for event in Journal(study.directory / "journal.jsonl").events]
    edge = KINDS.index("reclaiming")
    # It stands elsewhere, which is a change of its settings.
    assert names == [*KINDS[:edge], "settings", "retraining", "retrained", *KINDS[edge:]]
    again = Journal(study.directory / "journal.jsonl").find("retrained")
    checksum = sha256_of(study.directory / DAMAGED / "manifest.json")
    assert (again["model"], again["checkpoint"]) == ("loop", checksum)
    assert (study.directory / "models/loop-42/checkpoints/10.damaged").is_dir()
    for run in ("loop-42", "plain-42"):
        one, other = (s.directory / "models" / run for s in (study, before))
        assert (one / "blocks.jsonl").read_text() == (other / "blocks.jsonl").read_text()
        assert arrays_of(one / "checkpoints/10") == arrays_of(other / "checkpoints/10")
    one, other = (json.loads((s.directory / "report.json").read_text()) for s in (study, before))
    assert other["verdicts"]
    assert one["verdicts"] == other["verdicts"]
    for model in ("loop", "plain"):
        assert [p["evaluations"] for p in one["models"][model]["seeds"]["42"]] == [
            p["evaluations"] for p in other["models"][model]["seeds"]["42"]
        ]


def test_a_damaged_checkpoint_keeps_the_tokens_and_is_made_again(
    before_reclaiming, tmp_path, capsys
):
    study = damaged_copy(before_reclaiming, tmp_path)
    # The process that is to make it again is killed at once.
    with (
        Cycles(study, lambda job: -9) as cycles,
        pytest.raises(Failure, match="by signal 9; the same command goes on"),
    ):
        cycles.run()
    assert "checkpoints/10: damaged (manifest.json: is not what" in capsys.readouterr().err
    journal = Journal(study.directory / "journal.jsonl", read_only=True)
    assert journal.find("reclaiming") is None
    assert all((study.directory / n).exists() for n in journal.find("prepared")["files"])
    finish(study)
    assert_made_again(study, before_reclaiming)


def test_a_study_goes_on_that_was_ended_while_it_made_a_checkpoint_again(
    before_reclaiming, tmp_path, monkeypatch
):
    """Midway, where the run's logs have been cut back and end too early."""
    study = damaged_copy(before_reclaiming, tmp_path)
    dispatch = loop.Run.dispatch

    def end(self):
        if self.progress.update == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return dispatch(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "dispatch", end)
        with pytest.raises(StoppedError):
            finish(study)
    blocks = (study.directory / "models/loop-42/blocks.jsonl").read_text()
    assert json.loads(blocks.splitlines()[-1])["update"] == 8
    finish(study)
    assert_made_again(study, before_reclaiming)


def test_a_study_goes_on_that_was_killed_once_a_checkpoint_was_made_again(
    before_reclaiming, tmp_path, monkeypatch
):
    """Before the journal says so: the checkpoint is whole, and not the one of before."""
    study = damaged_copy(before_reclaiming, tmp_path)
    assert live(study, monkeypatch, KINDS.index("reclaiming") + 2, after=False)
    assert Journal(study.directory / "journal.jsonl").events[-1]["event"] == "retraining"
    finish(study)
    assert_made_again(study, before_reclaiming)


@pytest.mark.long
def test_a_save_that_fails_removes_nothing(finished, texts, tmp_path, monkeypatch):
    """The disk is full when the second model saves the end of the first cycle."""
    study = study_in(tmp_path, texts)
    write = checkpoint.write_manifest

    def full(directory, *arguments, **settings):
        if "plain-42" in str(directory) and "10" in directory.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(directory, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", full)
        with pytest.raises(Failure, match=r"plain-42.*No space left"):
            finish(study)
    journal = Journal(study.directory / "journal.jsonl", read_only=True)
    assert journal.find("trained", model="loop") is not None
    assert journal.find("trained", model="plain") is None
    assert journal.find("reclaiming") is None
    assert all((study.directory / n).exists() for n in journal.find("prepared")["files"])
    finish(study)
    assert_same(finished, study)


def rewrite(study, change) -> None:
    """Write a study's journal again, its events changed by `change(event, values)`."""
    old = Journal(study.directory / "journal.jsonl")
    old.path.unlink()
    journal = Journal(old.path)
    for event in old.events:
        values = {
            k: v for k, v in event.items() if k not in ("event", "time", "previous", "sha256")
        }
        change(event, values)
        journal.append(event["event"], **values)


def test_a_model_that_has_diverged_is_reported_and_not_judged(finished, tmp_path):
    study = copy_of(finished, tmp_path)

    def diverge(event, values):
        if event["event"] == "evaluated" and event["model"] == "loop":
            path = study.directory / f"evaluations/loop-42-cycle-{event['cycle']}.npz"
            with np.load(path) as arrays:
                changed = {name: arrays[name] for name in arrays.files}
            changed["validation.loss"][0, 0] = np.inf
            np.savez(path, **changed)
            values["documents"] = sha256_of(path)
            values["evaluations"]["validation"][0] |= {"cross_entropy": None, "perplexity": None}

    rewrite(study, diverge)
    with pytest.raises(Failure, match="is done, and its verdict withheld: loop at depth 1: losses"):
        finish(study)
    text = (study.directory / "report.md").read_text()
    assert "loop at depth 1: losses: inf at seed 0, document 0" in text
    assert "| loop | 1 | - |" in text
    assert "is better by" not in text


def test_the_report_tells_the_peak_and_the_devices_of_all_cycles(finished, tmp_path):
    """The last process of a run may have evaluated alone, on another device."""
    study = copy_of(finished, tmp_path)

    def move(event, values):
        if event["event"] == "evaluated" and event["model"] == "loop":
            values["peak_memory_bytes"] = [3_000_000, 9_000_000, 2_000_000][event["cycle"] - 1]
            values["device"] = "NVIDIA A" if event["cycle"] < 3 else "NVIDIA B"

    rewrite(study, move)
    finish(study)
    text = (study.directory / "report.md").read_text()
    assert re.search(r"\| loop \| recurrent .* 9.00 MB \| process \| NVIDIA A, NVIDIA B \|", text)
    assert "Seconds are of several devices (NVIDIA A, NVIDIA B, cpu): not comparable." in text


def change_records(path: Path, change) -> None:
    """Write a run's records again, each changed by `change(record)`."""
    records = read_records(path)
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_report_tells_what_changed_the_speed_on_the_way(finished, tmp_path):
    assert "Not the same" not in (finished.directory / "report.md").read_text()
    study = copy_of(finished, tmp_path)

    def move(record):
        if record["update"] == 20:
            record["environment"]["threads"] = 77
            record["environment"]["versions"]["jax"] = "9.9.9"

    change_records(study.directory / "models/plain-42/starts.jsonl", move)
    plain = study.models["plain"]
    training = dataclasses.replace(plain.training, micro_batch_rows=4, micro_batches=1)
    logging = dataclasses.replace(plain.logging, tensorboard=True)
    changed = dataclasses.replace(plain, training=training, logging=logging)
    finish(dataclasses.replace(study, models=study.models | {"plain": changed}))
    text = (study.directory / "report.md").read_text()
    section = text[text.index("## What was equal") : text.index("## What differed")]
    section = section.replace("\\_", "_")
    assert "Not the same throughout: seconds and tok/s are not comparable." in section
    assert re.search(r"\* loop-42, plain-42: cpu, \d+ CPU threads, python .*, jax 0\.", section)
    assert re.search(r"\* plain-42: cpu, 77 CPU threads, python .*, jax 9\.9\.9, ", section)
    assert "* plain.training.micro_batch_rows: 2, later 4\n" in section
    assert "* plain.training.micro_batches: 2, later 1\n" in section
    assert section.count("later") == 2


def test_the_report_counts_layers_that_were_left_as_they_were(finished, tmp_path):
    assert "no update that was skipped" in (finished.directory / "report.md").read_text()
    study = copy_of(finished, tmp_path)

    def keep(record):
        record["kept_layers"] = 2 if record["update"] in (5, 25) else 0

    change_records(study.directory / "models/loop-42/metrics.jsonl", keep)
    finish(study)
    text = (study.directory / "report.md").read_text()
    assert "loop-42: 4 times a single layer was left as it was because its gradient" in text
    assert "no update that was skipped" not in text


ONE_LAYER = "model: {{kind: transformer, transformer: {{layers: 1}}}}"


def test_a_model_whose_loss_is_not_finite_any_more_ends_the_study_until_it_may_go_on(
    texts, tmp_path
):
    """Nothing is trained for weeks that is dead, and the others can still be."""
    text = TINY[: TINY.index("models:")].replace("cycles: 3", "cycles: 1") + (
        "models:\n"
        f"  hot: {{{{settings: {{{{{ONE_LAYER}, optim: {{{{learning_rate: 1e30}}}}}}}}}}}}\n"
        f"  plain: {{{{settings: {{{{{ONE_LAYER}}}}}}}}}\n"
    )
    key = "models.hot.settings.training.max_nonfinite_updates"
    study = study_in(tmp_path, texts, f"{key}=3", text=text)
    for _ in range(2):
        with pytest.raises(Failure, match=r"updates above 3 in the settings of hot, which may"):
            finish(study)
    assert not (study.directory / "models/plain-42").exists()
    finish(study_in(tmp_path, texts, f"{key}=1000", text=text))
    figures = json.loads((study.directory / "report.json").read_text())
    assert list(figures["verdicts"]) == ["hot"]  # the loss that it ended with counts
    metrics = read_records(study.directory / "models/hot-42/metrics.jsonl")
    skipped = sum(not record["applied"] for record in metrics)
    assert (len(metrics), skipped) == (10, 9)
    text = (study.directory / "report.md").read_text()
    assert f"hot-42: {skipped} updates skipped because a loss or gradient was not finite" in text


def test_a_rate_that_is_too_high_ends_no_sweep(texts, tmp_path):
    text = TINY[: TINY.index("models:")].replace("cycles: 3", "cycles: 1") + (
        f"sweep:\n  model: {{{{settings: {{{{{ONE_LAYER}}}}}}}}}\n  optimizers:\n"
        "    adam: {{settings: {{}}, learning_rates: [1e-2, 1e30]}}\n"
    )
    study = study_in(tmp_path, texts, "settings.training.max_nonfinite_updates=2", text=text)
    finish(study)
    figures = json.loads((study.directory / "report.json").read_text())
    assert (figures["reference"], figures["withheld"]) == ("adam-lr0.01", [])
    text = (study.directory / "report.md").read_text()
    section = text[text.index("## Optimizers") : text.index("## Figures")]
    assert "adam-lr1e30-42: 9 of 10 updates skipped because a loss or gradient" in section
    assert "adam-lr0.01" not in section
    assert "| adam | 0.01 | 2 |" in section


@pytest.mark.long
def test_optimizers_each_at_its_best_rate(texts, tmp_path):
    text = TINY[: TINY.index("models:")].replace("cycles: 3", "cycles: 1") + (
        "sweep:\n  model: {{settings: {{model: {{kind: transformer}}}}}}\n  optimizers:\n"
        "    adam: {{settings: {{}}, learning_rates: [1e-2, 1e-5]}}\n"
        "    factored: {{settings: {{optim: {{name: adafactor}}}}, learning_rates: [1e-2, 1e-5]}}\n"
    )
    study = study_in(tmp_path, texts, text=text)
    finish(study)
    figures = json.loads((study.directory / "report.json").read_text())
    # A rate of 1e-5 learns nothing in ten updates.
    assert figures["reference"] == "adam-lr0.01"
    assert list(figures["verdicts"]) == ["factored-lr0.01"]
    text = (study.directory / "report.md").read_text()
    assert "| adam | 0.01 | 2 |" in text
    assert "factored: the best of its rates, 0.01, is the sweep's edge" in text
    html = (study.directory / "report.html").read_text()
    assert "Validation loss by learning rate" in html


@pytest.mark.long
def test_data_prepared_elsewhere_are_read_and_left_alone(texts, tmp_path):
    whole = study_in(tmp_path / "whole", texts)
    config = dataclasses.replace(
        whole.first, data=dataclasses.replace(whole.first.data, directory=str(tmp_path / "data"))
    )
    machine.prepare(config)
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "data").rglob("*"))
    text = TINY.replace('inputs: ["{folder}/*.txt"]', "inputs: []")
    text = text.replace("  held_out_windows: true\n", "")
    text = text.replace("length: 8}}", f"length: 8, directory: {tmp_path}/data}}}}")
    study = study_in(tmp_path / "study", texts, text=text)
    finish(study)
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "data").rglob("*")) == before
    journal = Journal(study.directory / "journal.jsonl", read_only=True)
    assert not journal.all("reclaiming")
    assert [event["files"] for event in journal.all("prepared")] == [{}, {}, {}]
    assert json.loads((study.directory / "report.json").read_text())["verdicts"]


# ---------------------------------------------------------------- plan and status


def test_the_plan_by_hand(texts, tmp_path):
    study = study_in(tmp_path, texts)
    needs = disk_needs(study)
    # A window and the shard that reaches into it, 2 bytes a token; four checkpoints of each run:
    # two are kept, beside them the best, and one is being written.
    assert (needs.window, needs.tokens) == ((320 + 150) * 2, (320 + 150) * 2)
    assert disk_needs(study_in(tmp_path, texts, "study.reclaim=false")).tokens == 960 * 2
    weights = 3 * (4 * 16 * 16 + 3 * 16 * 32) + 300 * 16
    norms = 3 * (2 * 16 + 2 * 8) + 16
    bytes_ = 3 * 4 * (weights + norms)  # float32 weights and AdamW's two moments
    assert needs.checkpoints["plain"] == pytest.approx(4 * (1.01 * bytes_ + 2**20), rel=1e-3)
    # One more at each 300 of the 960 tokens; more than are saved (7 and 3 ends) are never kept.
    for tokens, more in ((300, 3), (10, 30 // 4 + 3)):
        good = study_in(tmp_path, texts, f"settings.checkpoint.keep_every_tokens={tokens}")
        assert disk_needs(good).checkpoints["plain"] == needs.checkpoints["plain"] // 4 * (4 + more)
    three = disk_needs(study_in(tmp_path, texts, "study.seeds=[1, 2, 3]"))
    assert three.checkpoints["plain"] == 3 * needs.checkpoints["plain"]
    times = {(t.phase, t.model): t.seconds for t in phase_times(study, DEVICES["rtx3090"])}
    # Forward, backward, and the logits once more; 4.5 keys a query on average; 71 TFLOP/s.
    once = 2 * weights + 3 * 2 * 2 * 16 * 4.5
    assert times["train", "plain"] == pytest.approx(320 * (3 * once + 2 * 300 * 16) / 71e12)
    # A fifth of the documents is held out: a quarter as many tokens as are trained on.
    assert times["evaluate", "plain"] == pytest.approx(80 * once / 71e12)


def test_status_of_a_finished_study_and_of_one_under_way(finished, texts, tmp_path, capsys):
    assert print_status(finished) == 0
    said = capsys.readouterr().out
    assert "3 of 3 cycles" in said
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    loss = journal.find("evaluated", model="plain", cycle=2)["evaluations"]["validation"][0]
    assert f"{loss['cross_entropy']:.4f}" in said
    with pytest.raises(UserError, match="the study has not begun"):
        print_status(study_in(tmp_path, texts))
    assert not (tmp_path / "studies").exists()


@pytest.mark.long
def test_the_plan_compiles_each_model_for_the_card(texts, tmp_path, capsys):
    study = study_in(tmp_path, texts)
    assert print_plan(study) == 0
    said = capsys.readouterr().out
    assert "loop" in said
    assert said.count(" yes ") == 2
    assert "it fits" in said
    assert print_plan(study_in(tmp_path, texts, "study.disk=0.0001")) == 1
    assert "it does not fit" in capsys.readouterr().out
