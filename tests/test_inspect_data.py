"""scripts/inspect_data.py on directories whose contents are known."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers import write_documents

from jaxlm.config import Config, DataConfig, PrepareConfig
from jaxlm.data.prepare import prepare

ROOT = Path(__file__).parents[1]


@pytest.fixture
def inspect_data(monkeypatch):
    """Run the script in this process."""
    spec = importlib.util.spec_from_file_location("inspect_data", ROOT / "scripts/inspect_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["inspect_data.py", *map(str, words)])
        return module.main()

    return run


@pytest.fixture
def prepared(tmp_path):
    """Eight texts, one of them twice, one empty."""
    texts = [f"text {i} " + "cat and dog " * 2**i for i in range(8)]
    rows = [{"text": text} for text in [*texts, texts[0], " "]]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = PrepareConfig(
        inputs=(str(path),), vocabulary_size=262, validation_fraction=0.3, processes=1
    )
    directory = tmp_path / "data"
    prepare(Config(prepare=settings, data=DataConfig(directory=str(directory))))
    return directory


def test_counts_reasons_lengths_and_samples(inspect_data, prepared, capsys):
    assert inspect_data(prepared, "--samples", 2, "--files") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("in │ 10", "skipped: duplicate │ 1", "skipped: empty │ 1", "texts.jsonl │ 10"):
        assert words in printed
    assert "<|endoftext|>" in printed
    assert printed.count("cat and dog") >= 2
    assert inspect_data(prepared, "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 8
    assert counts["documents"]["skipped"] == {"duplicate": 1, "empty": 1}
    assert counts["complete"] is True


def test_data_without_a_tokenizer(inspect_data, tmp_path, capsys):
    """Documents of 1, 2, 3 and 9 tokens: bins of 1, 2 to 3, 4 to 7 and 8 to 15."""
    documents = [[1], [1, 0], [1, 2, 0], [5] * 9]
    directory = write_documents(tmp_path / "d", documents, [[1, 0]], 8)
    assert inspect_data(directory) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 to 1 │ 1 │" in printed
    assert "2 to 3 │ 2 │" in printed
    assert "4 to 7 │ 0 │" in printed
    assert "8 to 15 │ 1 │" in printed


def test_verify_names_what_is_damaged(inspect_data, prepared, capsys):
    assert inspect_data(prepared, "--verify") == 0
    assert "8 of 8 files are whole" in capsys.readouterr().out
    tokens = prepared / "train" / "tokens-00000.npy"
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1
    tokens.write_bytes(data)
    (prepared / "validation" / "ends-00000.npy").unlink()
    assert inspect_data(prepared, "--verify") == 1
    printed = capsys.readouterr().out
    assert "train/tokens-00000.npy: damaged (checksum differs)" in printed
    assert "validation/ends-00000.npy: missing" in printed
    assert "6 of 8 files are whole" in printed


def test_swapped_shards_are_named(inspect_data, tmp_path, capsys):
    documents = [[i, i + 1, 0] for i in range(1, 9)]
    directory = write_documents(tmp_path / "d", documents, [[1, 0]], 16, shard_tokens=12)
    one, two = (directory / "train" / f"tokens-0000{i}.npy" for i in (0, 1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert inspect_data(directory, "--verify") == 1
    printed = capsys.readouterr().out
    assert "tokens-00000.npy: damaged" in printed
    assert "tokens-00001.npy: damaged" in printed
