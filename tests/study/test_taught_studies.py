"""Studies whose models learn from a teacher: cached, learned from and reclaimed cycle by cycle."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cycle import (
    TINY,
    Killed,
    arrays_of,
    copy_of,
    finish,
    launch,
    live,
    one_long_cycle,
    study_in,
    texts,  # noqa: F401
    timeless,
)
from test_processes import command_of, start, wait_for, workers_of

from jaxlm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    MonitorsConfig,
    OptimConfig,
    PrepareConfig,
    RunConfig,
    TrainingConfig,
    TransformerConfig,
)
from jaxlm.data.shards import DataDirectory
from jaxlm.data.teacher import TeacherCache, cached_until
from jaxlm.data.tokenizer import read_tokenizer, train_tokenizer
from jaxlm.distillation import caching, planning, teachers
from jaxlm.distillation.teachers import JaxlmTeacher, load_teacher
from jaxlm.errors import Failure, UserError
from jaxlm.memory.devices import DEVICES
from jaxlm.study import cycle as machine
from jaxlm.study import report
from jaxlm.study.cycle import Cycles, StoppedError
from jaxlm.study.folder import bytes_in
from jaxlm.study.journal import Journal
from jaxlm.study.plan import disk_needs, phase_times
from jaxlm.study.settings import changes
from jaxlm.study.status import print_plan, print_status
from jaxlm.study.teacher import unseen
from jaxlm.training.loop import train
from jaxlm.training.metrics import read_records

sys.path.insert(0, str(Path(__file__).parents[1] / "distillation"))

import fake_torch

K = 4
MODELS = """
models:
  student:
    settings:
      model: {{kind: transformer, transformer: {{layers: 1}}}}
      distillation: {{alpha: 0.7, temperature: 2.0}}
  alone:
    settings:
      model: {{kind: transformer, transformer: {{layers: 1}}}}
      distillation: {{cache: null}}
teacher:
  run: TEACHER/runs/big
  k: 4
  batch_rows: 4
"""


@pytest.fixture(scope="module")
def teacher(texts, tmp_path_factory):  # noqa: F811
    """A run of jaxlm, and the tokenizer of its data. Returns their folder."""
    folder = tmp_path_factory.mktemp("teacher")
    config = Config(
        run=RunConfig(name="big", directory=str(folder / "runs")),
        prepare=PrepareConfig(
            inputs=(f"{texts}/*.txt",),
            text_documents="line",
            vocabulary_size=300,
            processes=1,
            validation_fraction=0.3,
        ),
        data=DataConfig(directory=str(folder / "data"), sequence_length=8),
        model=ModelConfig(
            kind="transformer", width=32, heads=2, feed_forward=32, remat="none",
            transformer=TransformerConfig(layers=1),
        ),
        optim=OptimConfig(name="adamw", learning_rate=1e-2, warmup_updates=2),
        training=TrainingConfig(updates=20, micro_batch_rows=4),
        evaluation=EvaluationConfig(every=0, batch_rows=4),
        checkpoint=CheckpointConfig(every=20),
        monitors=MonitorsConfig(rows=0),
        logging=LoggingConfig(tensorboard=False),
    )  # fmt: skip
    assert train(config) == 0
    return folder


def text_of(teacher: Path, models: str = MODELS) -> str:
    return TINY[: TINY.index("models:")].replace(
        "    vocabulary_size: 300", f"    tokenizer: {teacher}/data/tokenizer.json"
    ) + models.replace("TEACHER", str(teacher))


def taught(folder: Path, texts: Path, teacher: Path, *overrides: str, models: str = MODELS):  # noqa: F811
    return study_in(folder, texts, *overrides, text=text_of(teacher, models))


@pytest.fixture(scope="module")
def finished(texts, teacher, tmp_path_factory):  # noqa: F811
    """A study that was left alone; not to be written to."""
    study = taught(tmp_path_factory.mktemp("finished"), texts, teacher)
    finish(study)
    return study


KINDS = [
    "study",
    *["preparing", "prepared", "caching", "cached"],
    *["trained", "evaluated", "trained", "evaluated", "compared"],
    *["reclaiming", "reclaimed", "cycle"],
]


def test_a_study_with_a_teacher_from_its_beginning_to_its_end(finished):
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    assert [event["event"] for event in journal.events] == KINDS + 2 * KINDS[1:]
    metrics = {
        name: read_records(finished.directory / f"models/{name}-42/metrics.jsonl")
        for name in ("student", "alone")
    }
    assert [len(records) for records in metrics.values()] == [30, 30]
    for record in metrics["student"]:
        mixture = 0.3 * record["cross_entropy"] + 0.7 * 2.0**2 * record["distillation"]
        assert record["loss"] == pytest.approx(mixture, rel=1e-5)
        assert record["distillation"] > 0
    # Who opts out trains as if there were no teacher.
    assert {record["distillation"] for record in metrics["alone"]} == {None}
    assert all(r["loss"] == r["cross_entropy"] for r in metrics["alone"])
    # 320 positions a cycle, the last being that of the last row's last target.
    for cycle, event in enumerate(journal.all("cached"), 1):
        sizes = {name.rpartition("/")[2]: entry["bytes"] for name, entry in event["files"].items()}
        number = f"{cycle - 1:05d}"
        assert sizes == {
            f"ids-{number}.npy": 128 + 320 * K * 2,
            f"log_probs-{number}.npy": 128 + 320 * K * 2,
            f"log_tail-{number}.npy": 128 + 320 * 2,
        }
        assert (event["until"], event["teacher"]["name"]) == (320 * cycle, "big")


def test_the_report_names_the_teacher_and_whom_it_teaches(finished):
    text = (finished.directory / "report.md").read_text()
    section = text[text.index("## Teacher") : text.index("## Alarms")]
    for part in (
        r"big (jaxlm): update 20, weights",
        "Of each position its 4 likeliest tokens and the mass of all others, in float16: 18 bytes.",
        "packed rows of 8 tokens; students see packed rows of 8.",
        "None of the study's validation documents was among the training documents of",
        "both cut them from the same files and held them out by a hash of the same text, 0.3 and",
        "Its predictions of 960 tokens took",
        "| student | yes | 0.7 | 2 |",
        "| alone | no | - | - |",
    ):
        assert part in section, section
    differed = text[text.index("## What differed") : text.index("## Teacher")]
    assert r"| distillation.alpha | 0.7 | 0.5 |".replace(".alpha", r".alpha") in differed
    figures = json.loads((finished.directory / "report.json").read_text())
    assert figures["teacher"]["students"] == {"student": {"alpha": 0.7, "temperature": 2.0}}
    assert figures["teacher"]["context"]["length"] == 8


def test_who_is_only_measured_does_not_count_as_a_student(finished, tmp_path):
    study = copy_of(finished, tmp_path)
    student = study.models["student"]
    distillation = dataclasses.replace(student.distillation, alpha=0.0)
    models = study.models | {"student": dataclasses.replace(student, distillation=distillation)}
    study = dataclasses.replace(study, models=models)
    assert study.run_config("student", 42, 1).distillation.cache == str(study.teacher_directory)
    assert study.run_config("alone", 42, 1).distillation.cache is None
    report.write_report(study, Journal(study.directory / "journal.jsonl"), [])
    text = (study.directory / "report.md").read_text()
    assert "| student | measured only | 0 | 2 |" in text
    assert "| alone | no | - | - |" in text
    assert json.loads((study.directory / "report.json").read_text())["teacher"]["students"] == {}


def test_what_was_learned_from_is_gone_and_other_files_stay(finished):
    journal = Journal(finished.directory / "journal.jsonl", read_only=True)
    folder = finished.directory / "data/teacher-big"
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["reclaimed"], len(manifest["shards"])) == (3, 3)
    assert [event["teacher_shards"] for event in journal.all("reclaiming")] == [1, 2, 3]
    for cycle, event in enumerate(journal.all("reclaiming")):
        of_teacher = {name for name in event["files"] if "teacher" in name}
        assert of_teacher == set(journal.all("cached")[cycle]["files"])


def test_a_damaged_record_and_a_foreign_file_are_not_removed(texts, teacher, tmp_path, monkeypatch):  # noqa: F811
    study = taught(tmp_path, texts, teacher)
    assert live(study, monkeypatch, KINDS.index("reclaiming"), after=False)
    folder = study.directory / "data/teacher-big"
    (folder / "notes.txt").write_text("mine")
    (folder / "ids-00009.npy").write_text("mine")
    path = folder / "log_tail-00000.npy"
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(Failure, match=r"log_tail-00000\.npy: is not what the study wrote there"):
        finish(study)
    assert path.exists()
    path.write_bytes(kept)
    assert live(study, monkeypatch, KINDS.index("cycle"), after=False)
    assert sorted(p.name for p in folder.iterdir()) == [
        "ids-00009.npy",
        "manifest.json",
        "notes.txt",
    ]


def same_runs(one, other):
    for run in ("student-42", "alone-42"):
        a, b = (study.directory / "models" / run for study in (one, other))
        for name in ("blocks.jsonl", "metrics.jsonl", "evaluations.jsonl"):
            assert timeless(a / name) == timeless(b / name), name
        assert len(read_records(a / "metrics.jsonl")) == 30
        assert arrays_of(a / "checkpoints/30") == arrays_of(b / "checkpoints/30")


def test_cycles_equal_one_long_cycle(finished, texts, teacher, tmp_path):  # noqa: F811
    text = text_of(teacher).replace("cycles: 3", "cycles: 1").replace("cycle: 320", "cycle: 960")
    text = text.replace("sequence_length: 8", "sequence_length: 8, shuffle_tokens: 320")
    one = study_in(tmp_path, texts, text=text)
    one_long_cycle(one)
    same_runs(finished, one)


def predicted(monkeypatch) -> list[int]:
    """How many records each group of a teacher's rows gives, from here on."""
    groups, predict = [], JaxlmTeacher.predict

    def counted(self, stream, spans):
        groups.append(spans.records)
        return predict(self, stream, spans)

    monkeypatch.setattr(JaxlmTeacher, "predict", counted)
    return groups


@pytest.mark.parametrize(
    "edges",
    [
        # Around the caching and the reclaiming of the first two cycles.
        [(i + n, after) for i in (0, 12) for n in (4, 10, 11) for after in (False, True)],
        pytest.param([(n, a) for n in range(37) for a in (False, True)], marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_killed_at_edges_of_the_journal(finished, texts, teacher, tmp_path, monkeypatch, edges):  # noqa: F811
    groups = predicted(monkeypatch)
    study = taught(tmp_path, texts, teacher)
    for edge, after in edges:
        assert live(study, monkeypatch, edge, after), edge
    finish(study)
    a, b = (Journal(s.directory / "journal.jsonl", read_only=True) for s in (finished, study))
    assert [e["event"] for e in a.events] == [e["event"] for e in b.events]
    for kind, keys in (
        ("cached", ("until", "teacher", "files")),
        ("trained", ("update", "tokens", "blocks")),
        ("reclaiming", ("files", "shards", "teacher_shards")),
    ):
        for one, other in zip(a.all(kind), b.all(kind), strict=True):
            assert [one[key] for key in keys] == [other[key] for key in keys], kind
    same_runs(finished, study)
    assert sum(groups) == 960  # nothing is predicted twice
    again = [event["cycle"] for event in b.all("cached") if event["interrupted"]]
    assert again[:2] == [1, 2]
    figures = json.loads((study.directory / "report.json").read_text())
    assert figures["teacher"]["interrupted_cycles"] == again
    text = (study.directory / "report.md").read_text()
    told = f"interrupted, of cycle {', '.join(map(str, again))}). The FLOPs"
    assert told in text[text.index("## Teacher") :]


def test_killed_while_it_predicts(finished, texts, teacher, tmp_path, monkeypatch):  # noqa: F811
    """And saved where a signal ends it: either goes on where it was, with the same records."""
    study = taught(tmp_path, texts, teacher)
    assert live(study, monkeypatch, KINDS.index("cached") - 1, after=True)
    monkeypatch.setattr(caching, "_COMMIT_SECONDS", 0.0)
    groups, predict = [], JaxlmTeacher.predict

    def killed(self, stream, spans):
        groups.append(spans.records)
        if len(groups) == 4:
            raise Killed
        if len(groups) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return predict(self, stream, spans)

    monkeypatch.setattr(JaxlmTeacher, "predict", killed)
    assert print_status(study) == 0
    with pytest.raises(Killed):
        finish(study)
    assert cached_until(study.teacher_directory) == 1 + 3 * 32
    with pytest.raises(StoppedError):
        finish(study)
    assert cached_until(study.teacher_directory) == 1 + 5 * 32
    assert Journal(study.directory / "journal.jsonl").find("cached") is None
    assert live(study, monkeypatch, KINDS.index("cached"), after=True)
    assert groups == [32] * 11  # the fourth was lost, ten make a cycle
    files = Journal(study.directory / "journal.jsonl").find("cached")["files"]
    finished_files = Journal(finished.directory / "journal.jsonl").find("cached", cycle=1)["files"]
    assert files == finished_files


# ---------------------------------------------------------------- what is refused

OF_ALONE = "      distillation: {{cache: null}}\n"
WRONG = {
    "no tokenizer": (
        ("    tokenizer: TEACHER/data/tokenizer.json\n", ""),
        ["set prepare.tokenizer in the study's settings to its tokenizer's file"],
    ),
    "nobody learns": (
        ("alpha: 0.7, temperature: 2.0", "cache: null"),
        ["teacher: no model learns from it"],
    ),
    "a cache of one's own": (
        ("cache: null", "cache: prepared/teacher-x"),
        ["'distillation.cache' is decided by the study", "or set it to null", "study.yaml:"],
    ),
    "two teachers": (
        ("  k: 4\n", "  k: 4\n  hf: org/name\n"),
        ["teacher: name one teacher: a run, or hf"],
    ),
    "no teacher": (("  run: TEACHER/runs/big\n", ""), ["teacher: name one teacher"]),
    "what is not of a run": (
        ("  k: 4\n", "  k: 4\n  overlap: 2\n"),
        ["teacher: overlap does not go with run"],
    ),
    "no token": (("  k: 4\n", "  k: 0\n"), ["'teacher.k' is 0: should be greater than or equal"]),
    "an unknown key": (("  k: 4\n", "  kk: 4\n"), ["unknown key 'teacher.kk'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_study_files_that_are_refused(texts, tmp_path, case):  # noqa: F811
    (old, new), parts = WRONG[case]
    text = text_of(Path("TEACHER"))
    assert old in text
    with pytest.raises(UserError) as error:
        study_in(tmp_path, texts, text=text.replace(old, new))
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def refused(study, match):
    with pytest.raises(UserError, match=match):
        finish(study)
    assert sorted(path.name for path in study.directory.iterdir()) == ["jobs", "lock"]


def test_teachers_that_cannot_teach_are_refused_before_anything_is_prepared(
    texts,  # noqa: F811
    teacher,
    tmp_path,
):
    other = train_tokenizer((path.read_text()[:900] for path in texts.glob("*.txt")), 300)
    (tmp_path / "other.json").write_bytes(other.content)
    study = taught(tmp_path, texts, teacher, f"settings.prepare.tokenizer={tmp_path}/other.json")
    refused(study, r"other\.json: its tokenizer \(.*\) is not that of .*big \(.*; prepare the data")
    refused(
        taught(tmp_path, texts, teacher, "teacher.k=301"),
        r"k is 301: the vocabulary of .*tokenizer\.json has 300",
    )
    refused(taught(tmp_path, texts, teacher, "teacher.depth=3"), "depth goes with a recurrent")
    refused(
        taught(tmp_path, texts, teacher, "teacher.length=12"),
        r"\(320\) is no multiple of the rows that it reads \(12 tokens\): change one of them",
    )
    refused(taught(tmp_path, texts, teacher, f"teacher.run={tmp_path}"), "not a run")


def test_what_may_change_while_a_study_has_a_teacher(texts, teacher, tmp_path):  # noqa: F811
    study = taught(tmp_path, texts, teacher)
    stored = json.loads(json.dumps(study.tree()))
    assert changes(stored, taught(tmp_path, texts, teacher, "teacher.batch_rows=2")) == []
    moved = dataclasses.replace(study.config, directory="elsewhere")
    assert changes(stored, dataclasses.replace(study, config=moved)) == []
    assert changes(stored, taught(tmp_path, texts, teacher, "teacher.k=5")) == [
        "teacher.k: was 4, is 5"
    ]
    without = taught(tmp_path, texts, teacher, models=MODELS[: MODELS.index("teacher:")])
    lines = changes(stored, without)
    assert "models.student.distillation.cache: was 'teacher-big', is None" in lines
    assert "teacher.k: was 4, is None" in lines
    lines = changes(json.loads(json.dumps(without.tree())), study)
    assert "teacher.k: was None, is 4" in lines
    assert not any("{}" in line for line in lines)


def test_whether_the_teacher_saw_the_validation_documents(texts, teacher, tmp_path):  # noqa: F811
    def said(*overrides):
        return unseen(taught(tmp_path, texts, teacher, *overrides))

    none = "None of the study's validation documents was among the training documents of"
    # Before its own files were looked at.
    assert said().startswith(none)
    assert "if both cut them alike, which is not known yet; both held them out by a hash" in said()
    assert "prepare.validation_fraction was 0.3, below the study's 0.4" in said(
        "settings.prepare.validation_fraction=0.4"
    )
    assert "prepare.text_documents was 'line', the study's is 'paragraph'" in said(
        "settings.prepare.text_documents=paragraph"
    )
    # Once they were: the same, or others, in which a text may be a part of a longer document.
    study = taught(tmp_path / "same", texts, teacher)
    with Cycles(study, launch) as cycles:
        cycles._begin()
        cycles._prepare(1)
    assert unseen(study) == (
        f"{none} {teacher}/runs/big: both cut them from the same files and held them out by a "
        f"hash of the same text, 0.3 and 0.2 of them."
    )
    manifest = study.data_directory / "manifest.json"
    text = manifest.read_text()
    assert '"file": "b.txt"' in text
    manifest.write_text(text.replace('"file": "b.txt"', '"file": "d.txt"'))
    assert "if both cut them alike, which is not shown: their files differ; both" in unseen(study)
    # Data that were made by something else, or that the teacher was not trained on.
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = other / "runs/big/config.yaml"
    config.write_text(config.read_text().replace(str(teacher), str(other)))
    manifest = other / "data/manifest.json"
    kept = json.loads(manifest.read_text())
    assert unseen(taught(tmp_path, texts, other)).startswith(none)
    for spoiled in (kept | {"source": {}}, kept | {"normalization": "NFC"}):
        manifest.write_text(json.dumps(spoiled))
        assert "(its data.directory no longer holds what it was trained on, or does not" in unseen(
            taught(tmp_path, texts, other)
        )
    models = MODELS.replace("run: TEACHER/runs/big", "hf: org/name")
    study = taught(tmp_path, texts, teacher, models=models)
    assert unseen(study).startswith("Whether org/name was trained on the study's")


# ---------------------------------------------------------------- plan and status


def test_the_plan_by_hand(texts, teacher, tmp_path, monkeypatch):  # noqa: F811
    study = taught(tmp_path, texts, teacher)
    needs = disk_needs(study)
    # Four ids and four log-probabilities of two bytes each, and two bytes of the rest.
    assert (needs.teacher_record, needs.teacher_window, needs.teacher) == (18, 5760, 5760)
    assert disk_needs(taught(tmp_path, texts, teacher, "study.reclaim=false")).teacher == 3 * 5760
    times = {(t.phase, t.model): t.seconds for t in phase_times(study, DEVICES["rtx3090"])}
    weights = 4 * 32 * 32 + 3 * 32 * 32 + 300 * 32
    forward = 2 * weights + 2 * 2 * 32 * 4.5
    assert times["cache teacher", None] == pytest.approx(320 * forward / 71e12)
    # Of Hugging Face with a number of parameters: nothing is asked for.
    models = MODELS.replace("run: TEACHER/runs/big", "hf: org/name-32b\n  parameters: 32e9")
    study = taught(tmp_path, texts, teacher, models=models)
    times = {(t.phase, t.model): t.seconds for t in phase_times(study, DEVICES["rtx3090"])}
    assert times["cache teacher", None] == pytest.approx(320 * 64e9 / 71e12)
    assert study.teacher_directory == study.directory / "data/teacher-name-32b"

    def missing(name):
        raise UserError(f"no {name}")

    monkeypatch.setattr(planning, "import_library", missing)
    without = taught(tmp_path, texts, teacher, "teacher.parameters=null", models=models)
    with pytest.raises(UserError, match=r"^no torch; or give the number of its parameters"):
        phase_times(without, DEVICES["rtx3090"])
    assert phase_times(study, DEVICES["rtx3090"])


def test_room_for_the_records_is_asked_for_before_they_are_made(texts, teacher, tmp_path):  # noqa: F811
    study = taught(tmp_path, texts, teacher)
    with Cycles(study, launch) as cycles:
        cycles._begin()
        cycles._prepare(1)
        there = bytes_in(study.directory)
        small = dataclasses.replace(study.config, disk=(there + 5000) / 1e9)
        cycles.study = dataclasses.replace(study, config=small)
        with pytest.raises(Failure, match=r"its teacher's predictions needs about 6 kB, and 5 kB"):
            cycles._cache(1)


def test_status_shows_how_far_the_teacher_is(finished, texts, teacher, tmp_path, capsys):  # noqa: F811
    assert print_status(finished) == 0
    said = capsys.readouterr().out
    assert "teacher big" in said
    assert said.count("cached") == 3


@pytest.mark.long
def test_the_plan_prints_the_teacher_and_the_memory_that_it_takes(texts, teacher, tmp_path, capsys):  # noqa: F811
    assert print_plan(taught(tmp_path, texts, teacher)) == 0
    said = capsys.readouterr().out
    for part in ("teacher cache: 18 bytes a token", "cache teacher", "teacher big: weights"):
        assert part in said
    models = MODELS.replace("run: TEACHER/runs/big", "hf: org/name-32b\n  parameters: 32e9")
    assert print_plan(taught(tmp_path, texts, teacher, models=models)) == 1
    assert "32,000,000,000" in capsys.readouterr().out


# ---------------------------------------------------------------- other teachers, other data


def test_a_teacher_of_hugging_face_makes_the_records_of_one_long_caching(
    texts,  # noqa: F811
    teacher,
    tmp_path,
    monkeypatch,
):
    """Cycles end within documents, and within windows of them."""
    tokenizer = read_tokenizer(teacher / "data/tokenizer.json", "<|endoftext|>", None)
    pieces = SimpleNamespace(get_vocab=lambda: {p: i for i, p in tokenizer.pieces().items()})
    table = np.random.default_rng(0).normal(size=(300, 300))

    def model(*, input_ids, attention_mask, use_cache):
        del attention_mask, use_cache
        # What comes depends on all tokens of the window so far.
        return SimpleNamespace(logits=fake_torch.Tensor(np.cumsum(table[input_ids.array], axis=1)))

    def from_pretrained(name, **_):
        made = lambda **inputs: model(**inputs)  # noqa: E731
        made.device, made.eval = "cpu", lambda: None
        made.config = SimpleNamespace(_commit_hash="c0ffee")
        return made

    config = SimpleNamespace(max_position_embeddings=64)
    config.get_text_config = lambda: config
    modules = {
        "torch": SimpleNamespace(
            **{name: getattr(fake_torch, name) for name in dir(fake_torch) if name[0] != "_"},
            bfloat16="bf16",
            cuda=SimpleNamespace(is_available=lambda: False),
        ),
        "transformers": SimpleNamespace(
            AutoConfig=SimpleNamespace(from_pretrained=lambda name, revision: config),
            AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, revision: pieces),
            AutoModelForCausalLM=SimpleNamespace(from_pretrained=from_pretrained),
        ),
    }
    monkeypatch.setattr(teachers, "import_library", modules.__getitem__)
    models = MODELS.replace("run: TEACHER/runs/big", "hf: org/name\n  length: 12\n  overlap: 5")
    study = taught(tmp_path, texts, teacher, "study.reclaim=false", models=models)
    finish(study)
    journal = Journal(study.directory / "journal.jsonl", read_only=True)
    assert [e["until"] for e in journal.all("cached")] == [320, 640, 960]
    data = DataDirectory(study.data_directory)
    stream = data.stream("train")
    assert not set(stream.document_ends) & {321, 641}
    whole = tmp_path / "whole"
    assert caching.cache_teacher(
        data,
        load_teacher(study.teacher, data),
        whole,
        study.teacher.form(300),
        (0, 960),
    )
    read = [
        TeacherCache(folder, data, stream, 1, 961).read(
            (1, 960), *(np.array([n]) for n in (0, 0, 1, 960))
        )
        for folder in (study.teacher_directory, whole)
    ]
    for name, values in read[0].items():
        np.testing.assert_array_equal(values, read[1][name])
    text = (study.directory / "report.md").read_text()
    assert "windows of documents of 12 tokens, which overlap by 5; students see packed" in text
    assert "org/name (huggingface): revision c0ffee, weights bfloat16." in text


@pytest.mark.long
def test_data_prepared_elsewhere_are_left_alone_and_the_cache_is_the_studys(
    finished,
    texts,  # noqa: F811
    teacher,
    tmp_path,
):
    config = dataclasses.replace(
        finished.first,
        data=dataclasses.replace(finished.first.data, directory=str(tmp_path / "data")),
    )
    machine.prepare(config)
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "data").rglob("*"))
    text = text_of(teacher).replace('inputs: ["{folder}/*.txt"]', "inputs: []")
    text = text.replace("  held_out_windows: true\n", "")
    text = text.replace("length: 8}}", f"length: 8, directory: {tmp_path}/data}}}}")
    study = study_in(tmp_path / "study", texts, text=text)
    finish(study)
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "data").rglob("*")) == before
    journal = Journal(study.directory / "journal.jsonl", read_only=True)
    assert [e["event"] for e in journal.events] == KINDS + 2 * KINDS[1:]
    assert study.teacher_directory == study.directory / "teacher-big"
    assert [path.name for path in study.teacher_directory.iterdir()] == ["manifest.json"]
    assert [len(e["files"]) for e in journal.all("reclaiming")] == [3, 3, 3]
    assert "None of the study's validation" in (study.directory / "report.md").read_text()


def test_a_study_of_before_has_no_word_of_teachers(texts, tmp_path):  # noqa: F811
    study = study_in(tmp_path, texts)
    assert study.tree().keys() == {"study", "sweep", "models"}
    assert (disk_needs(study).teacher_record, disk_needs(study).teacher) == (0, 0)
    assert study.students == []


@pytest.mark.long
def test_signals_and_kills_while_a_process_predicts(texts, teacher, tmp_path):  # noqa: F811
    path = tmp_path / "study.yaml"
    text = text_of(teacher).format(folder=texts).replace("cycles: 3", "cycles: 2")
    path.write_text(text.replace(f"{texts}/studies", f"{tmp_path}/studies"))
    log, folder = path.with_suffix(".log"), tmp_path / "studies/tiny"
    lock = folder / "data/teacher-big.lock"
    # SIGKILL of the study alone: who predicts for it ends by itself.
    process = start(path)
    (worker,) = wait_for(lambda: workers_of(process))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: b"jaxlm" not in command_of(worker))
    # SIGKILL of the worker: the study says so, and ends with 1.
    process = start(path)
    (worker,) = wait_for(lambda: workers_of(process))
    os.kill(worker, signal.SIGKILL)
    assert process.wait(60) == 1
    said = log.read_text()
    assert "teacher-big: predicting ended with exit code -9; by signal 9; the same" in said
    # SIGTERM and Ctrl-C, sent at any moment, reach it.
    for number, code, seconds in ((signal.SIGTERM, 0, 0.0), (signal.SIGINT, 130, 3.0)):
        process = start(path)
        wait_for(lambda p=process: workers_of(p))
        time.sleep(seconds)
        process.send_signal(number)
        assert process.wait(120) == code, log.read_text()[-2000:]
        assert not workers_of(process)
    process = start(path)
    assert process.wait(280) == 0, log.read_text()[-2000:]
    assert lock.exists()
    journal = Journal(folder / "journal.jsonl", read_only=True)
    assert [e["event"] for e in journal.events] == KINDS + KINDS[1:]
    assert [e["until"] for e in journal.all("cached")] == [320, 640]
