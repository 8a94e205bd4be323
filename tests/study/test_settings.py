"""Study files: what is read, and which studies are refused before anything is trained."""

import pytest
from test_cycle import TINY, study_in

from jaxlm.errors import UserError
from jaxlm.study.settings import changes, differing, read_study


def read(tmp_path, text=TINY, *overrides):
    return study_in(tmp_path, tmp_path, *overrides, text=text)


def test_each_model_is_its_files_then_the_studys_settings_then_its_own(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "run: {name: alone, seed: 7}\nmodel: {width: 99, qk_norm: false}\n"
        "training: {updates: 5}\ndata: {directory: elsewhere, sequence_length: 512}\n"
    )
    text = TINY.replace("  loop:\n", f"  loop:\n    config: [{tmp_path}/base.yaml]\n")
    study = read(tmp_path, text, "study.seeds=[1, 2]")
    loop, plain = study.models.values()
    assert (loop.model.width, loop.data.sequence_length, loop.model.qk_norm) == (16, 8, False)
    assert (plain.model.kind, plain.model.transformer.layers) == ("transformer", 3)
    # 320 tokens a cycle, 2 x 2 rows of 8 tokens an update.
    assert (study.updates_per_cycle, study.updates, study.tokens) == (10, 30, 960)
    for config in (loop, plain):
        assert config.training.updates == 30
        assert config.data.tokens == (0, 960)
        assert config.data.shuffle_tokens == 320
        assert config.evaluation.depths == (1, 3)
    assert study.runs == [("loop", 1), ("loop", 2), ("plain", 1), ("plain", 2)]
    assert study.reference == "plain"
    run = study.run_config("loop", 2, 77)
    assert (run.run.name, run.run.seed, run.data.validation_tokens) == ("loop-2", 2, 77)
    assert run.data.directory == str(study.directory / "data")
    layers = [f"model.recurrent.{part}_layers" for part in ("prelude", "core", "coda")]
    assert differing(study.models).keys() == {
        *("model.kind", "model.qk_norm", "model.transformer.layers", *layers)
    }


OF_PLAIN = "model: {{kind: transformer, transformer: {{layers: 3}}}}"
WRONG = {
    "data seed": (
        (OF_PLAIN, OF_PLAIN + "\n      data: {{seed: 1}}"),
        ["data.seed is 42 in loop and 1 in plain", "would not see the same blocks"],
    ),
    "sequence length": (
        (OF_PLAIN, OF_PLAIN + "\n      data: {{sequence_length: 16}}"),
        ["data.sequence_length is 8 in loop and 16 in plain"],
    ),
    "rows an update": (
        (OF_PLAIN, OF_PLAIN + "\n      training: {{micro_batches: 4}}"),
        ["an update has 4 rows in loop and 8 in plain"],
    ),
    "tokenizer": (
        (OF_PLAIN, OF_PLAIN + "\n      prepare: {{vocabulary_size: 400}}"),
        ["prepare.vocabulary_size is 300 in loop and 400 in plain"],
    ),
    "half a window": (
        ("cycle: 320", "cycle: 336"),
        ["(336) is no multiple of the tokens of an update (32); the nearest are 320 or 352"],
    ),
    "half a group": (
        ("length: 8}}", "length: 8, shuffle_tokens: 128}}"),
        ["(320) is no multiple of data.shuffle_tokens (128); the nearest are 256 or 384"],
    ),
    "another layout": (("length: 8}}", "length: 8, layout: best_fit}}"), ["needs packed"]),
    "what the study decides": (
        ("data: {{sequence", "data: {{tokens: [0, 32], sequence"),
        ["study.yaml:17: 'data.tokens' is decided by the study"],
    ),
    "a directory and sources": (
        ("data: {{sequence", "data: {{directory: x, sequence"),
        ["'data.directory' is decided by the study; remove it, or prepare.inputs"],
    ),
    "windows of data that are there": (
        ('inputs: ["{folder}/*.txt"]', "inputs: []"),
        ["study.yaml: study.held_out_windows: no validation documents come with a cycle of data"],
    ),
    "going back": (
        (OF_PLAIN, OF_PLAIN + "\n      rewind: {{response: lower_rate}}"),
        ["rewind.response: a study's runs cannot go back"],
    ),
    "a name in a run": (
        (OF_PLAIN, OF_PLAIN + "\n      run: {{seed: 3}}"),
        ["'run.seed' is decided by the study"],
    ),
    "an unknown key": (
        ("cycles: 3", "cycels: 3"),
        ["unknown key 'study.cycels'", "'study.cycles'"],
    ),
    "an unknown key of a model": (
        ("model: {{width", "model: {{widht"),
        ["unknown key 'model.widht'; did you mean 'model.width'?", "study.yaml:18"],
    ),
    "an unknown key of an entry": (
        ("  plain:\n", "  plain:\n    confg: []\n"),
        ["unknown key 'models.plain.confg'"],
    ),
    "no tokens": (("  tokens_per_cycle: 320\n", ""), ["'study.tokens_per_cycle' is missing"]),
    "one model": (
        ("  plain:\n    settings:\n      " + OF_PLAIN, ""),
        ["a study needs two models"],
    ),
    "no such reference": (("cycles: 3", "cycles: 3\n  reference: other"), ["the models are loop"]),
    "a path as a name": (("name: tiny", "name: ../tiny"), ["'study.name'", "pattern"]),
    "a path as a model": (("  plain:\n", "  ../plain:\n"), ["dot"]),
    "a schedule beyond the horizon": (
        ("warmup_updates: 2", "warmup_updates: 30"),
        ["optim.warmup_updates (30) must be below training.updates (30)", "30 updates"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_studies_that_are_refused(tmp_path, case):
    (old, new), parts = WRONG[case]
    assert old in TINY
    with pytest.raises(UserError) as error:
        read(tmp_path, TINY.replace(old, new))
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "studies").exists()


def test_a_sweep_is_a_model_for_each_rate_and_gives_each_optimizer_as_many(tmp_path):
    text = TINY[: TINY.index("models:")] + (
        "sweep:\n  model: {{settings: {{model: {{kind: transformer}}}}}}\n  optimizers:\n"
        "    factored: {{settings: {{optim: {{name: adafactor}}}}, learning_rates: [1e-2, 1e-3]}}\n"
        "    adam: {{settings: {{optim: {{name: adamw}}}}, learning_rates: [3e-3, 1e-3]}}\n"
    )
    study = read(tmp_path, text)
    assert {n: (c.optim.name, c.optim.learning_rate) for n, c in study.models.items()} == {
        "factored-lr0.01": ("adafactor", 0.01),
        "factored-lr0.001": ("adafactor", 0.001),
        "adam-lr0.003": ("adamw", 0.003),
        "adam-lr0.001": ("adamw", 0.001),
    }
    assert study.sweep["adam-lr0.003"] == ("adam", 0.003)
    with pytest.raises(UserError, match=r"as many learning rates .* factored 2, adam 1"):
        read(tmp_path, text.replace("[3e-3, 1e-3]", "[3e-3]"))
    with pytest.raises(UserError, match=r"study\.reference: optimizers are compared with"):
        read(tmp_path, text.replace("cycles: 3", "cycles: 3\n  reference: adam-lr0.001"))


def test_what_may_change_while_a_study_is_under_way(tmp_path):
    study = read(tmp_path)
    stored = study.tree()
    free = read(tmp_path, TINY.replace("micro_batch_rows: 2", "micro_batch_rows: 4").replace(
        "micro_batches: 2", "micro_batches: 1"), "study.disk=5")  # fmt: skip
    assert changes(stored, free) == []
    assert changes(stored, read(tmp_path, TINY, "study.margin=0.1")) == [
        "study.margin: was 0.01, is 0.1"
    ]
    lines = changes(stored, read(tmp_path, TINY.replace("rate: 1e-2", "rate: 2e-2")))
    assert lines == [
        f"models.{name}.optim.learning_rate: was 0.01, is 0.02" for name in ("loop", "plain")
    ]
    assert changes(stored, read(tmp_path, TINY.replace("  plain:\n", "  other:\n")))


def test_presets_can_be_read():
    for name, updates in (
        ("quickstart", 300),
        ("rtx3090_1b", 30_720),
        ("optimizers", None),
        ("distill_quickstart", 200),
    ):
        study = read_study(f"configs/study_{name}.yaml")
        assert updates in (None, study.updates)
