import dataclasses
import json

import numpy as np
import pytest

from jaxlm.config import Config, DataConfig, PrepareConfig
from jaxlm.data.prepare import is_validation, prepare
from jaxlm.data.shards import DataDirectory
from jaxlm.data.text import find_inputs
from jaxlm.data.tokenizer import END_OF_TEXT, read_tokenizer, train_tokenizer
from jaxlm.errors import UserError

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "吾輩は猫である。名前はまだ無い。",
    "ｶﾞｷﾞ が 〜 − 〜\u200b zero width",
    f"a document that spells {END_OF_TEXT} in its text",
    "tabs\tand\nlines\r\n  and   spaces ",
    "🎌 emoji and \x00 a NUL",
]


def write_texts(folder, count=60):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(
            f"Document {i}. " + SENTENCES[i % len(SENTENCES)] * (1 + i % 3),
            encoding="utf-8",
            newline="",
        )
    return folder


def config_for(tmp_path, **settings):
    settings = {
        "inputs": (str(tmp_path / "texts" / "*.txt"),),
        "vocabulary_size": 300,
        "validation_fraction": 0.2,
        **settings,
    }
    data = DataConfig(directory=str(tmp_path / "data"))
    return Config(prepare=PrepareConfig(**settings), data=data)


def documents_of(data, split):
    stream, start = data.stream(split), 0
    for end in stream.document_ends:
        yield stream.read(start, int(end))
        start = int(end)


def test_text_goes_in_and_comes_out(tmp_path):
    folder = write_texts(tmp_path / "texts")
    data = prepare(config_for(tmp_path))
    tokenizer = read_tokenizer(data.tokenizer_path())
    found = {"train": set(), "validation": set()}
    for split in found:
        for ids in documents_of(data, split):
            # One end token, at the end, although a text spells it.
            assert np.flatnonzero(ids == data.end_id).tolist() == [len(ids) - 1]
            found[split].add(tokenizer.decode(ids))
    texts = {path.read_bytes().decode() for path in folder.iterdir()}
    # Text mode turns the CRLF of one sentence into LF, as reading a text file does.
    assert found["train"] | found["validation"] == {t.replace("\r\n", "\n") for t in texts}
    assert not found["train"] & found["validation"]
    assert found["validation"]
    counted = data.manifest["source"]["documents"]
    assert counted == {"in": 60, "kept": 60, "skipped_empty": 0}


def test_bytes_of_tokens_add_up_to_the_text(tmp_path):
    write_texts(tmp_path / "texts")
    data = prepare(config_for(tmp_path))
    token_bytes = data.token_bytes()
    for split in ("train", "validation"):
        total = sum(int(token_bytes[ids].sum()) for ids in documents_of(data, split))
        assert total == data.manifest["splits"][split]["text_bytes"]


def test_the_split_depends_on_the_text_alone(tmp_path):
    texts = [f"text number {i}" for i in range(2000)]
    held_out = [text for text in texts if is_validation(text, 0.1)]
    assert len(held_out) == pytest.approx(200, abs=45)
    # A larger fraction holds out more, never others.
    assert set(held_out) <= {text for text in texts if is_validation(text, 0.2)}


def test_preparing_twice_gives_the_same_files(tmp_path):
    write_texts(tmp_path / "texts")
    config = config_for(tmp_path)
    first = prepare(config).fingerprint
    other = dataclasses.replace(config, data=DataConfig(directory=str(tmp_path / "again")))
    assert prepare(other).fingerprint == first


def test_other_settings_than_those_prepared_with_are_refused(tmp_path):
    write_texts(tmp_path / "texts")
    prepare(config_for(tmp_path))
    prepare(config_for(tmp_path))  # the same is fine
    with pytest.raises(UserError, match=r"prepare.vocabulary_size was 300, is 320"):
        prepare(config_for(tmp_path, vocabulary_size=320))


def test_a_given_tokenizer_is_used(tmp_path):
    write_texts(tmp_path / "texts")
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(SENTENCES, 280).to_json())
    data = prepare(config_for(tmp_path, tokenizer=str(path)))
    assert data.vocabulary_size == 280
    with pytest.raises(UserError, match=r"no token '</s>'.*prepare.end_token.*<\|endoftext\|>"):
        prepare(
            dataclasses.replace(
                config_for(tmp_path, tokenizer=str(path), end_token="</s>"),
                data=DataConfig(directory=str(tmp_path / "other")),
            )
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ()}, "prepare.inputs is empty"),
        ({"inputs": ("nowhere/*.txt",)}, "'nowhere/.*' matches no file"),
        ({"inputs": ("package:not-there/*.md",)}, "pip install --no-deps .* not-there"),
        ({"tokenizer": "nowhere.json"}, "nowhere.json: no such tokenizer"),
        ({"vocabulary_size": 60_000}, "prepare.vocabulary_size is 60000, but the text gives only"),
        ({"validation_fraction": 1e-9}, "falls into validation"),
    ],
)
def test_mistakes_are_one_line(tmp_path, settings, message):
    write_texts(tmp_path / "texts")
    with pytest.raises(UserError, match=message) as error:
        prepare(config_for(tmp_path, **settings))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "data.building").exists()


def test_unreadable_text_is_named(tmp_path):
    folder = write_texts(tmp_path / "texts")
    (folder / "latin1.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin1\.txt: not UTF-8 at byte 3"):
        prepare(config_for(tmp_path))
    assert not (tmp_path / "data.building").exists()


def test_a_byte_order_mark_is_no_text_and_empty_files_are_counted(tmp_path):
    folder = write_texts(tmp_path / "texts")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (folder / "empty.txt").write_text(" \n")
    data = prepare(config_for(tmp_path))
    tokenizer = read_tokenizer(data.tokenizer_path())
    texts = [
        tokenizer.decode(ids) for s in ("train", "validation") for ids in documents_of(data, s)
    ]
    assert "with a mark" in texts
    assert data.manifest["source"]["documents"] == {"in": 62, "kept": 61, "skipped_empty": 1}


def test_not_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        read_tokenizer(path)


def test_package_files_are_found_without_importing_the_package():
    found = find_inputs(["package:pytest/pytest-*/METADATA"])
    assert [path.name for path in found] == ["METADATA"]


def test_a_killed_preparation_leaves_nothing_that_looks_prepared(tmp_path):
    write_texts(tmp_path / "texts")
    (tmp_path / "data.building" / "train").mkdir(parents=True)
    data = prepare(config_for(tmp_path))
    assert isinstance(data, DataDirectory)
    assert not (tmp_path / "data.building").exists()
