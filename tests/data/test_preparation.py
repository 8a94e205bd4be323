"""Preparations that are interrupted, paused, parallel, or fed with strange and damaged files."""

import dataclasses
import gzip
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxlm.config import Config, DataConfig, PrepareConfig, to_yaml
from jaxlm.data import prepare as preparation
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import DataDirectory
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.errors import UserError

ROOT = Path(__file__).parents[2]
WORDS = ["猫", "は", "静かに", "眠る", "the", "cat", "sleeps", "雨が", "降る", "rain", "falls"]
WORDS += ["ガス", "ｶﾞｽ", "①", "2026年", "—", "naïve", "🎌"]


def documents(count, seed=0):
    """Texts of one line, some of them equal."""
    rng = random.Random(seed)
    pairs = [one + two for one in WORDS for two in WORDS]
    texts = [" ".join(rng.choices(pairs, k=rng.randint(3, 40))) for _ in range(count)]
    return [*texts, *texts[:: max(count // 10, 1)]]


def config_for(folder, name, inputs, **settings):
    settings = {
        "vocabulary_size": 300,
        "validation_fraction": 0.1,
        "text_documents": "line",
        "processes": 1,
        **settings,
    }
    return Config(
        prepare=PrepareConfig(inputs=tuple(map(str, inputs)), **settings),
        data=DataConfig(directory=str(folder / name)),
    )


def write(path, texts):
    """Texts in the format of the file's name."""
    if ".jsonl" in path.name:
        rows = [json.dumps({"id": i, "meta": {"body": t}}) for i, t in enumerate(texts)]
        data = ("\n".join(rows) + "\n").encode()
    elif ".parquet" in path.name:
        table = pyarrow.table({"meta": [{"body": t} for t in texts]})
        buffer = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, buffer, row_group_size=50)
        data = buffer.getvalue().to_pybytes()
    else:
        data = ("\n".join(texts) + "\n").encode()
    if path.suffix == ".gz":
        half = len(data) // 2
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif path.suffix == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)
    return path


def shards_of(data):
    """Checksums of all shards, and counts."""
    return data.manifest["splits"]


def texts_of(data):
    """All documents of both splits, decoded."""
    manifest = data.manifest
    tokenizer = read_tokenizer(
        data.tokenizer_path(), manifest["end_token"], manifest["begin_token"]
    )
    texts = []
    for split in ("train", "validation"):
        stream = data.stream(split)
        starts = [0, *stream.document_ends[:-1].tolist()]
        for start, end in zip(starts, stream.document_ends.tolist(), strict=True):
            texts.append(tokenizer.decode(stream.read(start, end)))
    return texts


def test_all_formats_give_identical_shards(tmp_path):
    texts = documents(300)
    names = [f"a.{kind}{packed}" for kind in ("txt", "jsonl", "parquet") for packed in ("", ".gz")]
    found = []
    for name in [*names, "a.jsonl.zst", "a.txt.zst"]:
        path = write(tmp_path / name, texts)
        data = prepare(config_for(tmp_path, f"{name}.data", [path], text_key="meta.body"))
        counted = data.manifest["source"]["documents"]
        assert (counted["in"], counted["skipped"]) == (310, {"duplicate": 10})
        assert counted["train"] + counted["validation"] == 300
        assert sorted(texts_of(data)) == sorted(set(texts))
        found.append(shards_of(data))
    assert all(one == found[0] for one in found)


def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_ALONE_BYTES", 0)
    monkeypatch.setattr(preparation, "_BATCH_RECORDS", 16)
    paths = [write(tmp_path / f"{i}.txt", documents(200, seed=i)) for i in range(3)]
    one = prepare(config_for(tmp_path, "one", paths, shard_tokens=2000))
    two = prepare(config_for(tmp_path, "two", paths, shard_tokens=2000, processes=2))
    assert len(shards_of(one)["train"]["shards"]) > 3
    assert shards_of(one) == shards_of(two)
    assert one.fingerprint() == two.fingerprint()


RUN = """
import sys
from jaxlm.config import load
from jaxlm.data import prepare as preparation
preparation._COMMIT_SECONDS, preparation._ALONE_BYTES, preparation._BATCH_RECORDS = 0.0, 0, 64
preparation.prepare(load([sys.argv[1]], []))
"""


def files_of(directory):
    """Every file that is read, by name."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(directory).rglob("*")
        if path.is_file() and not path.name.startswith("preparation.sqlite")
    }


@pytest.mark.parametrize(
    ("kills", "processes"),
    [(4, 1), *[pytest.param(20, n, marks=pytest.mark.long) for n in (1, 2, 4)]],
)
def test_killed_and_continued_equals_undisturbed(tmp_path, kills, processes):
    """SIGKILL at random moments of one preparation: the same files, byte for byte."""
    paths = [
        write(tmp_path / name, documents(4000 if kills > 4 else 1000, seed=i))
        for i, name in enumerate(("a.txt", "b.jsonl.gz", "c.parquet", "d.txt.zst"))
    ]
    settings = {"text_key": "meta.body", "shard_tokens": 50_000, "near_duplicates": 0.95}
    whole = prepare(config_for(tmp_path, "whole", paths, **settings))
    config = config_for(tmp_path, "killed", paths, processes=processes, **settings)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", RUN, str(tmp_path / "config.yaml")]
    seconds = 0.0
    for attempt in range(2):  # the first also warms the file cache
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        seconds = time.monotonic() - began
        assert attempt or files_of(tmp_path / "killed") == files_of(tmp_path / "whole")

    config = dataclasses.replace(config, data=DataConfig(directory=str(tmp_path / "again")))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    rng, killed = random.Random(kills + processes), 0
    log = tmp_path / "again" / "preparation.sqlite-wal"
    for number in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        # Every fifth at start-up; the others once it has begun to commit.
        began = time.time()
        while number % 5 and process.poll() is None:
            if log.exists() and log.stat().st_mtime > began:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.5 * seconds / kills))
        killed += process.poll() is None
        process.kill()
        process.wait()
    print(f"{killed} of {kills} were killed, undisturbed it takes {seconds:.1f} s")
    assert killed >= kills / 2
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "whole")
    assert DataDirectory(tmp_path / "again").manifest == whole.manifest


@pytest.mark.parametrize("name", ["b.txt.gz", "b.jsonl.zst"])
@pytest.mark.parametrize("keep", [0.5, -1])
def test_a_truncated_file_leaves_the_others_and_is_read_anew(tmp_path, monkeypatch, name, keep):
    """Nothing of it is kept; mended, it is read once and from its beginning."""
    settings = {"text_key": "meta.body", "seed": 1}
    good = write(tmp_path / "a.txt", documents(200))
    bad = tmp_path / name
    write(bad, documents(200, seed=1))
    whole = prepare(config_for(tmp_path, "whole", [good, bad], **settings))
    data = bad.read_bytes()
    bad.write_bytes(data[: int(len(data) * keep) if keep > 0 else keep])
    config = config_for(tmp_path, "broken", [good, bad], **settings)
    with pytest.raises(UserError, match=rf"{name}: truncated after \d+ bytes of contents"):
        prepare(config)
    assert not (tmp_path / "broken" / "manifest.json").exists()
    bad.write_bytes(data)
    mended = prepare(config)
    assert shards_of(mended) == shards_of(whole)
    assert mended.manifest["source"]["documents"] == whole.manifest["source"]["documents"]


def interrupted(monkeypatch, config, after):
    """Stop a preparation, as a kill would, after so many documents."""
    take, taken = preparation._Preparation._take, 0

    def take_or_stop(self, document):
        nonlocal taken
        taken += 1
        if taken > after:
            raise KeyboardInterrupt
        take(self, document)
        self._commit()

    with monkeypatch.context() as patch:
        patch.setattr(preparation._Preparation, "_take", take_or_stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)


def test_what_changed_between_two_attempts(tmp_path, monkeypatch):
    first = write(tmp_path / "a.txt", documents(50))
    second = write(tmp_path / "b.txt", documents(50, seed=1))
    settings = {"seed": 0}
    order = preparation._in_order(preparation.find_sources([str(first), str(second)]), 0)
    read, current = (source.path for source in order)
    config = config_for(tmp_path, "data", [first, second], **settings)
    interrupted(monkeypatch, config, 60 + 20)  # 60 documents in the first file
    # The file that was being read is read anew.
    texts = documents(50, seed=2)
    write(current, texts)
    with monkeypatch.context() as patch:
        patch.setattr(preparation._Preparation, "_finish", lambda *_: None)
        with pytest.raises(UserError, match="no manifest"):
            prepare(config)
    # One that was read is refused by name; so are other files and settings.
    old = read.read_bytes()
    read.write_bytes(old + b"more\n")
    with pytest.raises(UserError, match=rf"{read.name} changed after it was read"):
        prepare(config)
    read.write_bytes(old)
    third = write(tmp_path / "c.txt", ["one"])
    with pytest.raises(UserError, match="were added or removed"):
        prepare(config_for(tmp_path, "data", [first, second, third], **settings))
    with pytest.raises(UserError, match=r"prepare.normalization was 'none', is 'NFKC'"):
        prepare(config_for(tmp_path, "data", [first, second], normalization="NFKC", **settings))
    data = prepare(config)
    assert sorted(texts_of(data)) == sorted({*old.decode().splitlines(), *texts})
    assert data.manifest["source"]["documents"]["in"] == 120


def test_a_paused_preparation_goes_on_and_repeats_nothing(tmp_path):
    """Windows of the stream by tokens are those of the whole, and one journal knows all of them."""
    paths = [write(tmp_path / f"{i}.txt", documents(300, seed=i % 3)) for i in range(4)]
    whole = prepare(config_for(tmp_path, "whole", paths, shard_tokens=3000))
    config = config_for(tmp_path, "paused", paths, shard_tokens=3000)
    expected = whole.stream("train").read(0, len(whole.stream("train")))
    reached = 0
    for tokens in (5000, 5000, 9000, 20_000):
        data = prepare(config, tokens)
        assert data.manifest["source"]["complete"] is False
        stream = data.stream("train")
        assert len(stream) >= tokens
        assert len(stream) < tokens + 200  # one document more at most
        assert len(stream) >= reached
        reached = len(stream)
        assert np.array_equal(stream.read(0, len(stream)), expected[: len(stream)])
    data = prepare(config)
    assert data.manifest["source"]["complete"] is True
    stream = data.stream("train")
    assert np.array_equal(stream.read(0, len(stream)), expected)
    assert data.manifest["source"]["documents"] == whole.manifest["source"]["documents"]
    # Files 0 and 3 hold the same texts.
    assert data.manifest["source"]["documents"]["skipped"] == {"duplicate": 4 * 10 + 300}
    assert len(set(texts_of(data))) == len(texts_of(data)) == 900


@pytest.mark.parametrize("how", ["cut short", "damaged"])
def test_what_a_pause_named_stays_when_the_file_turns_out_to_be_damaged(tmp_path, how):
    """A study has trained on the first part of a file, and removed it; a copy repairs the rest."""
    path = write(tmp_path / "a.jsonl.gz", documents(900))
    good, settings = path.read_bytes(), {"text_key": "meta.body", "near_duplicates": 0.9}
    # The tokenizer is the whole file's, whatever is wrong behind its first 20,000 bytes of text.
    settings |= {"train_bytes": 20_000, "shard_tokens": 3000}
    whole = prepare(config_for(tmp_path, "whole", [path], **settings))
    path.write_bytes(
        good[: len(good) * 9 // 10] if how == "cut short" else good[:-40] + bytes(20) + good[-20:]
    )
    config = config_for(tmp_path, "paused", [path], **settings)
    data = prepare(config, 9000)
    published = data.manifest["splits"]["train"]["shards"]
    gone = data.reclaimable(9000)
    assert len(published) - 1 == len(gone) >= 2
    data.mark_reclaimed(len(gone))
    for shard in gone:
        shard.unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: .*copy or download it again"):
            prepare(config)
        assert DataDirectory(tmp_path / "paused").manifest["splits"]["train"]["shards"] == published
    path.write_bytes(good)
    data = prepare(config)
    assert data.manifest["splits"]["train"]["shards"][: len(published)] == published
    stream, expected = data.stream("train"), whole.stream("train")
    first = stream.readable_from
    assert np.array_equal(stream.document_ends, expected.document_ends)
    assert np.array_equal(stream.read(first, len(stream)), expected.read(first, len(expected)))
    assert data.manifest["source"]["documents"] == whole.manifest["source"]["documents"]
    assert np.array_equal(data.counts("train"), whole.counts("train"))


def test_a_file_that_was_read_in_part_and_the_journal_of_it_must_stay(tmp_path):
    path = write(tmp_path / "a.txt", documents(300))
    config = config_for(tmp_path, "data", [path])
    prepare(config, 3000)
    kept = path.read_bytes()
    path.write_bytes(kept + b"more\n")
    with pytest.raises(UserError, match=r"a\.txt changed after a part of it was read"):
        prepare(config, 6000)
    path.write_bytes(kept)
    # Without the journal nothing is begun anew over what the manifest names.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")}
    (tmp_path / "data/preparation.sqlite").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"preparation\.sqlite: missing"):
        prepare(config, 6000)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.npy")} == before
    (tmp_path / "elsewhere").rename(tmp_path / "data/preparation.sqlite")
    assert len(prepare(config, 6000).stream("train")) >= 6000


def test_strange_documents_have_their_outcome(tmp_path):
    rows = [
        b'{"text": "plain and long enough"}',
        b'{"text": "half \\ud83d a pair"}',
        b'{"text": "whole \\ud83c\\udf8c pair"}',
        b'{"text": "overlong \xc0\x80 zero"}',
        b'{"text": null}',
        b'{"body": "no text here"}',
        b'{"text": 5}',
        b"[1, 2]",
        b'{"text": "broken',
        b'{"text": ""}',
        b'{"text": " \\n "}',
        b'{"text": "one\\r\\ntwo\\rthree"}',
        b'{"text": "one\\ntwo\\nthree"}',
        b'{"text": "line\\u2028sep\\u0085next"}',
        b'{"text": "nul \\u0000 inside"}',
        b'{"text": "\\ufeffmark and zero\\u200bwidth"}',
        b'{"text": "%s"}' % (b"long " * 30),
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows) + b"\n\n")
    more = {"vocabulary_size": 270, "maximum_characters": 100, "validation_fraction": 0.4}
    data = prepare(config_for(tmp_path, "data", [path], **more))
    assert sorted(texts_of(data)) == sorted(
        [
            "plain and long enough",
            "half \ufffd a pair",
            "whole \U0001f38c pair",
            "overlong \ufffd\ufffd zero",
            "one\ntwo\nthree",
            "line\u2028sep\u0085next",
            "nul  inside",
            "mark and zerowidth",
        ]
    )
    (file,) = data.manifest["source"]["files"]
    assert file["outcome"] == {
        "in": 17,
        "train": file["outcome"]["train"],
        "validation": 8 - file["outcome"]["train"],
        "skipped": {
            "null_text": 1,
            "no_text": 1,
            "text_not_a_string": 1,
            "not_an_object": 1,
            "invalid_json": 1,
            "empty": 2,
            "duplicate": 1,
            "too_long": 1,
        },
        "replaced": 3,
        "first_invalid": [3 + sum(len(row) + 1 for row in rows[:i]) for i in (1, 3)],
        "removed_zero_width": 2,
        "removed_nul": 1,
    }
    data = prepare(config_for(tmp_path, "skip", [path], invalid_text="skip", **more))
    assert data.manifest["source"]["documents"]["skipped"]["invalid_text"] == 2


def test_a_text_and_its_twin_give_the_same_tokens(tmp_path):
    """CRLF and a byte-order mark change nothing, and are seen as duplicates."""
    texts = documents(80)
    write(tmp_path / "a.txt", texts)
    data = (tmp_path / "a.txt").read_bytes()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"))
    one = prepare(config_for(tmp_path, "one", [tmp_path / "a.txt"]))
    two = prepare(config_for(tmp_path, "two", [tmp_path / "b.txt"]))
    assert shards_of(one) == shards_of(two)
    both = prepare(config_for(tmp_path, "both", [tmp_path / "a.txt", tmp_path / "b.txt"]))
    assert both.manifest["source"]["documents"]["skipped"]["duplicate"] == 10 + 90


def test_near_duplicates(tmp_path):
    texts = [f"{i} " + " ".join(random.Random(i).choices(WORDS, k=300)) for i in range(30)]
    path = write(tmp_path / "a.txt", [*texts, *[text[:-3] + "end" for text in texts]])
    data = prepare(config_for(tmp_path, "data", [path], near_duplicates=0.8))
    assert data.manifest["source"]["documents"]["skipped"] == {"near_duplicate": 30}
    assert sorted(texts_of(data)) == sorted(texts)


def test_begin_and_end_tokens(tmp_path):
    path = write(tmp_path / "a.txt", [*documents(100), "spells <s> and </s> and <|endoftext|>"])
    settings = {"begin_token": "<s>", "end_token": "</s>"}
    data = prepare(config_for(tmp_path, "data", [path], **settings))
    begin, end = data.manifest["begin_id"], data.manifest["end_id"]
    assert begin != end
    for split in ("train", "validation"):
        stream = data.stream(split)
        tokens = stream.read(0, len(stream))
        assert np.flatnonzero(tokens == end).tolist() == (stream.document_ends - 1).tolist()
        starts = [0, *stream.document_ends[:-1].tolist()]
        assert np.flatnonzero(tokens == begin).tolist() == starts
    assert "spells <s> and </s> and <|endoftext|>" in texts_of(data)


def test_a_damaged_journal_is_one_line(tmp_path):
    path = write(tmp_path / "a.txt", documents(50))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "preparation.sqlite").write_bytes(b"no database, but long enough" * 9)
    with pytest.raises(UserError, match=r"preparation\.sqlite: damaged .*prepare the data again"):
        prepare(config_for(tmp_path, "data", [path]))


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    path = write(tmp_path / "a.txt", documents(50))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        prepare(config_for(tmp_path, "data", [path]))
    assert (tmp_path / "data" / "thesis.tex").read_text() == "years of work"
