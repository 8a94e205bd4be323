import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm import config as configuration
from jaxlm.config import Config, ModelConfig, load, to_tree, to_yaml
from jaxlm.errors import UserError

ROOT = Path(__file__).parents[1]

WRONG = {
    "misspelt key": ("model: {widht: 64}", "'model.widht'", "did you mean 'model.width'"),
    "initials": ("optim: {lr: 1e-4}", "'optim.lr'", "did you mean 'optim.learning_rate'"),
    "wrong section": (
        "model: {learning_rate: 1e-4}",
        "'model.learning_rate'",
        "did you mean 'optim.learning_rate'",
    ),
    "no section": ("width: 64", "'width'", "did you mean 'model.width'"),
    "nested too deep": (
        "model: {recurrent: {layers: 3}}",
        "'model.recurrent.layers'",
        "did you mean",
    ),
    "unknown section": ("optimizer: {name: adamw}", "'optimizer'", "did you mean 'optim'"),
    "dotted key in a file": ("model.width: 64", "model.width", "nest"),
    "duplicate key": ("model:\n  width: 64\n  width: 32", ":3:", "stands twice (first on line 2)"),
    "duplicate section": ("model: {width: 64}\nmodel: {heads: 2}", "'model'", "stands twice"),
    "text for a number": ("optim: {learning_rate: fast}", "'optim.learning_rate'", "valid number"),
    "octal-looking": ("run: {seed: 012}", "'run.seed'", "valid integer"),
    "sexagesimal-looking": ("run: {seed: 3:20}", "'run.seed'", "valid integer"),
    "underscores": ("run: {seed: 1_000}", "'run.seed'", "valid integer"),
    "number for text": ("run: {name: 12}", "'run.name'", "valid string"),
    "fraction for a count": ("training: {updates: 1.5}", "'training.updates'", "valid integer"),
    "boolean for a count": ("training: {updates: true}", "'training.updates'", "valid integer"),
    "no for a boolean": ("model: {qk_norm: no}", "'model.qk_norm'", "valid boolean"),
    "null for a number": ("model: {width: null}", "'model.width'", "null"),
    "null for a section": ("model:", "'model'", "null"),
    "list for a section": ("model: [1]", "'model'", "object"),
    "negative rate": ("optim: {learning_rate: -1e-4}", "'optim.learning_rate'", "greater than 0"),
    "infinite rate": ("optim: {learning_rate: .inf}", "'optim.learning_rate'", "valid number"),
    "beta of one": ("optim: {beta2: 1.0}", "'optim.beta2'", "less than 1"),
    "no clipping by zero": ("optim: {max_norm: 0}", "'optim.max_norm'", "greater than 0"),
    "unknown choice": ("model: {norm: post}", "'model.norm'", "'pre' or 'sandwich'"),
    "zero depth": ("depth: {backprop: 0}", "'depth.backprop'", "or"),
    "bad list item": ("evaluation: {depths: [1, x]}", "'evaluation.depths[1]'", "valid integer"),
    "empty list": ("evaluation: {depths: []}", "'evaluation.depths'", "at least 1 item"),
    "heads not dividing width": ("model: {width: 64, heads: 7}", "model: width (64)", "heads (7)"),
    "odd head size": ("model: {width: 21, heads: 7}", "model:", "even head size"),
    "kv heads": ("model: {width: 64, heads: 4, kv_heads: 3}", "heads (4)", "kv_heads (3)"),
    "depth above the cap": ("depth: {mean: 20, maximum: 16}", "mean (20)", "maximum (16)"),
    "fractional fixed depth": ("depth: {distribution: fixed, mean: 2.5}", "mean (2.5)", "whole"),
    "gradient depth above the cap": ("depth: {backprop: 17}", "backprop (17)", "maximum (16)"),
    "decay without its schedule": ("optim: {decay_updates: 9}", "decay_updates (9)", "schedule"),
    "momentum elsewhere": ("optim: {name: adamw, momentum: 0.9}", "momentum", "adafactor"),
    "half-life elsewhere": ("optim: {name: muon, half_life_tokens: 9}", "half_life", "muon"),
    "narrow sums in MultiSteps": (
        "optim: {accumulation: optax_multisteps, accumulator_dtype: bfloat16}",
        "accumulator_dtype",
        "token_weighted",
    ),
    "end above peak": ("optim: {end_learning_rate: 1}", "end_learning_rate (1)", "learning_rate"),
    "warm-up as long as the run": (
        "optim: {warmup_updates: 100}\ntraining: {updates: 100}",
        "optim.warmup_updates (100)",
        "training.updates (100)",
    ),
    "not a mapping": ("- 1\n- 2", "expected settings", "list"),
    "not YAML": ("model: [", ":1:", "expected"),
    "a tag": ("run: {name: !!binary aGk=}", ":1:", "not supported"),
    "an alias": ("model: &a {width: *a}", ":1:", "not supported"),
    "an anchor": ("run: &x {seed: 1}", ":1:", "not supported"),
    "a NUL byte": ("run: {name: a\0b}", "not valid YAML", "special characters"),
    "a huge seed": ("run: {seed: 4294967296}", "'run.seed'", "less than 4294967296"),
    "a bad item": ("prepare: {inputs: [a, 1]}", "'prepare.inputs[1]' is 1", "in quotes"),
    "path as a name": ("run: {name: ../other}", "'run.name'", "match pattern"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_helpful_line(tmp_path, case):
    text, *parts = WRONG[case]
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load([path])
    message = str(error.value)
    assert message.count("\n") == 0, message
    for part in [str(path), *parts]:
        assert part in message


def test_wrong_settings_end_a_script_with_code_2(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("model: {widht: 64}")
    command = [sys.executable, str(ROOT / "scripts/train.py"), "--config", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    # Where the extra `plan` is installed without a driver, jaxlib's import has its say first.
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert lines == [f"error: {path}:1: unknown key 'model.widht'; did you mean 'model.width'?"]
    assert "Traceback" not in result.stderr


def test_several_mistakes_are_told_together(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("model: {widht: 64}\noptim: {beta1: 2}")
    with pytest.raises(UserError) as error:
        load([path])
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1.0e4", 1e4), ("1E+3", 1e3), (".5", 0.5), ("1", 1.0), ("3.", 3.0)],
)
def test_numbers_are_numbers(tmp_path, text, value):
    path = tmp_path / "c.yaml"
    path.write_text(f"optim: {{learning_rate: {text}}}")
    assert load([path]).optim.learning_rate == value
    assert load([], [f"optim.learning_rate={text}"]).optim.learning_rate == value


@pytest.mark.parametrize("text", ["no", "off", "012", "0o17", "2026-01-01", "1_000", "yes"])
def test_text_stays_text(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{name: {text}}}")
    assert load([path]).run.name == text


def test_files_and_words_merge_from_left_to_right(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("model: {width: 64, heads: 2}\nrun: {seed: 1}")
    two.write_text("model: {width: 128}")
    config = load([one, two], ["run.seed=3", "evaluation.depths=[2, 4]", "depth.backprop=full"])
    assert (config.model.width, config.model.heads, config.run.seed) == (128, 2, 3)
    assert config.evaluation.depths == (2, 4)
    assert config.depth.backprop == "full"
    # A message names the file that the wrong value came from.
    two.write_text("model: {width: 0}")
    with pytest.raises(UserError, match=r"two\.yaml:1: 'model\.width'"):
        load([one, two])
    with pytest.raises(UserError, match=r"command line: 'model\.width'"):
        load([one], ["model.width=0"])
    with pytest.raises(UserError, match="expected key=value"):
        load([one], ["model.width"])


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot read the configuration"):
        load([tmp_path / "absent.yaml"])


def test_resolved_configuration_reads_back_equal(tmp_path):
    config = load([], ["depth.backprop=full", "model.kv_heads=2", "run.name='012'"])
    path = tmp_path / "resolved.yaml"
    path.write_text(to_yaml(config))
    assert load([path]) == config
    for name in ("1e-4", "1e5", "no", "012", "null", "true", "3.14", "2026-01-01"):
        named = load([], [f"run.name='{name}'"])
        path.write_text(to_yaml(named))
        assert load([path]) == named
    assert to_tree(config)["run"]["name"] == "012"


def test_settings_are_frozen_hashable_and_checked_in_python_too():
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().width = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="multiple of heads"):
        ModelConfig(width=64, heads=7)


def test_every_setting_is_documented():
    """Each field has a comment line above it."""
    source = Path(configuration.__file__).read_text()
    lines = source[: source.index("# Reading")].splitlines()
    for number, line in enumerate(lines):
        field = line.startswith("    ") and not line.startswith("     ") and ": " in line
        if field and " = " in line and line.split(":")[0].strip().isidentifier():
            documented = lines[number - 1].strip().startswith("#") or "Config()" in line
            assert documented, line


def test_settings_that_do_not_fit_name_all_places_they_come_from(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim: {warmup_updates: 20}\ntraining: {micro_batches: 2}\n")
    with pytest.raises(UserError) as error:
        load([path], ["training.updates=17"])
    assert str(error.value) == (
        f"{path}, command line: optim.warmup_updates (20) must be below training.updates (17)"
    )
