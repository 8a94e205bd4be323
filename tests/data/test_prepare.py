import dataclasses
import json
import re

import numpy as np
import pytest
import tokenizers

from jaxlm.config import Config, DataConfig, PrepareConfig
from jaxlm.data import shards
from jaxlm.data.cleaning import digest, is_validation
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import DataDirectory, ShardWriter
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


def held_out_text(text, fraction=0.2):
    return is_validation(digest(text), fraction)


def texts_of(data, split):
    manifest = data.manifest
    tokenizer = read_tokenizer(
        data.tokenizer_path(), manifest["end_token"], manifest["begin_token"]
    )
    return [tokenizer.decode(ids) for ids in documents_of(data, split)]


def documents_of(data, split):
    stream, start = data.stream(split), 0
    for end in stream.document_ends:
        yield stream.read(start, int(end))
        start = int(end)


def test_text_goes_in_and_comes_out(tmp_path):
    folder = write_texts(tmp_path / "texts")
    data = prepare(config_for(tmp_path))
    for split in ("train", "validation"):
        for ids in documents_of(data, split):
            # One end token, at the end, although a text spells it.
            assert np.flatnonzero(ids == data.end_id).tolist() == [len(ids) - 1]
    found = {split: texts_of(data, split) for split in ("train", "validation")}
    # CRLF becomes LF; zero-width spaces and NUL go.
    texts = [
        re.sub("[\u200b\0]", "", path.read_bytes().decode().replace("\r\n", "\n"))
        for path in folder.iterdir()
    ]
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert sorted(found["validation"]) == sorted(t for t in texts if held_out_text(t))
    counted = data.manifest["source"]["documents"]
    raw = [path.read_bytes().decode() for path in folder.iterdir()]
    held_out = len(found["validation"])
    assert counted == {
        "in": 60,
        "train": 60 - held_out,
        "validation": held_out,
        "skipped": {},
        "replaced": 0,
        "removed_zero_width": sum(t.count("\u200b") for t in raw),
        "removed_nul": sum(t.count("\0") for t in raw),
    }


def test_bytes_of_tokens_add_up_to_the_text(tmp_path):
    write_texts(tmp_path / "texts")
    data = prepare(config_for(tmp_path))
    token_bytes = data.token_bytes()
    for split in ("train", "validation"):
        total = sum(int(token_bytes[ids].sum()) for ids in documents_of(data, split))
        assert total == data.manifest["splits"][split]["text_bytes"]


def test_the_split_depends_on_the_text_alone(tmp_path):
    texts = [f"text number {i}" for i in range(2000)]
    held_out = [text for text in texts if held_out_text(text, 0.1)]
    assert len(held_out) == pytest.approx(200, abs=45)
    # A larger fraction holds out more, never others.
    assert set(held_out) <= {text for text in texts if held_out_text(text, 0.2)}


def test_neither_names_nor_order_of_files_move_a_document(tmp_path):
    folder = write_texts(tmp_path / "texts")
    held_out = sorted(texts_of(prepare(config_for(tmp_path)), "validation"))
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"{(number * 7) % 60:03d}-renamed.txt")
    config = dataclasses.replace(
        config_for(tmp_path), data=DataConfig(directory=str(tmp_path / "renamed"))
    )
    assert sorted(texts_of(prepare(config), "validation")) == held_out


def test_the_tokenizer_never_sees_validation(tmp_path):
    folder = write_texts(tmp_path / "texts")
    before = prepare(config_for(tmp_path)).tokenizer_path().read_text()
    strange = "zzzzqqqq " * 200
    extra = next(f"{strange}{i}" for i in range(99) if held_out_text(f"{strange}{i}"))
    (folder / "extra.txt").write_text(extra)
    config = dataclasses.replace(
        config_for(tmp_path), data=DataConfig(directory=str(tmp_path / "more"))
    )
    data = prepare(config)
    assert extra in texts_of(data, "validation")
    assert data.tokenizer_path().read_text() == before


def test_other_files_than_those_prepared_are_refused(tmp_path):
    folder = write_texts(tmp_path / "texts")
    prepare(config_for(tmp_path))
    (folder / "new.txt").write_text("a new document")
    with pytest.raises(UserError, match=r"files behind prepare.inputs were added"):
        prepare(config_for(tmp_path))
    for path in folder.iterdir():
        path.unlink()
    prepare(config_for(tmp_path))  # without the sources, the data stands for itself


def test_two_preparations_at_once_do_not_mix(tmp_path):
    writer = ShardWriter(tmp_path / "data", vocabulary_size=8, end_id=0)
    with pytest.raises(UserError, match="is being prepared by another process"):
        ShardWriter(tmp_path / "data", vocabulary_size=8, end_id=0)
    with writer:
        writer.add("train", [1, 0])
        writer.add("validation", [2, 0])
    assert len(DataDirectory(tmp_path / "data").stream("train")) == 2


def test_a_failure_while_finishing_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = ShardWriter(tmp_path / "data", vocabulary_size=8, end_id=0)
    writer.add("train", [1, 0])
    monkeypatch.setattr(shards, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        writer.__exit__(None)
    assert [path.name for path in tmp_path.iterdir()] == ["data.lock"]


def test_bytes_stay_unknown_where_the_tokenizer_changes_text(tmp_path):
    write_texts(tmp_path / "texts")
    backend = tokenizers.Tokenizer.from_buffer(train_tokenizer(SENTENCES, 280).content)
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.save(str(tmp_path / "tokenizer.json"))
    data = prepare(config_for(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")))
    assert data.token_bytes() is None


def test_preparing_twice_gives_the_same_files(tmp_path):
    write_texts(tmp_path / "texts")
    config = config_for(tmp_path)
    first = prepare(config).fingerprint()
    other = dataclasses.replace(config, data=DataConfig(directory=str(tmp_path / "again")))
    assert prepare(other).fingerprint() == first


def test_other_settings_than_those_prepared_with_are_refused(tmp_path):
    write_texts(tmp_path / "texts")
    prepare(config_for(tmp_path))
    prepare(config_for(tmp_path))  # the same is fine
    with pytest.raises(UserError, match=r"prepare.vocabulary_size was 300, is 320"):
        prepare(config_for(tmp_path, vocabulary_size=320))


def test_a_given_tokenizer_is_used(tmp_path):
    write_texts(tmp_path / "texts")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_tokenizer(SENTENCES, 280).content)
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
        ({"inputs": ("empty",)}, "matches no file"),
        ({"inputs": ("package:/x",)}, "not of the form package:NAME/GLOB"),
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
    counted = data.manifest["source"]["documents"]
    assert (counted["in"], counted["skipped"]) == (62, {"empty": 1})
    assert counted["train"] + counted["validation"] == 61


def test_not_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a Hugging Face tokenizer"):
        read_tokenizer(path)
