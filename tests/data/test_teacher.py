"""The cache of a teacher's predictions: written through any interruption, read by position."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from teacher_records import K, V, description, records, write
from test_pipeline import directory_of, windows_of

from jaxlm.config import DataConfig
from jaxlm.data import teacher as teacher_module
from jaxlm.data.pipeline import fingerprint_of, open_sources, training_windows
from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.teacher import (
    CacheFormat,
    CacheWriter,
    TeacherCache,
    mark_reclaimed,
    reclaimable,
    tokens_digest,
)
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.errors import UserError
from jaxlm.losses import target_mask


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """No machine fails here, only processes: what was written can be read without being synced."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def data(tmp_path):
    return DataDirectory(directory_of(tmp_path))


@pytest.fixture
def cache(tmp_path, data):
    return write(tmp_path / "teacher-t", data.stream("train"), 1102)


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def windows_with(data, cache, **settings):
    config = DataConfig(directory=str(data.directory), **settings)
    sources = open_sources(config, data, str(cache))
    return training_windows(sources, config, 2, 2), sources


LAYOUTS = {
    "packed": {"sequence_length": 32},
    "packed, a range": {"sequence_length": 32, "tokens": (320, 640), "shuffle_tokens": 160},
    "best_fit": {"sequence_length": 40, "layout": "best_fit"},
    "padded": {"sequence_length": 32, "layout": "padded", "buckets": (8, 16), "epochs": 2},
    "padded, a range": {"sequence_length": 32, "layout": "padded", "tokens": (3, 90)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_target_finds_the_record_of_its_position(data, cache, layout):
    """In any layout, order, range and split into shards; tokens tell where they are."""
    stream = data.stream("train")
    place = {int(token): i for i, token in enumerate(stream.read(0, len(stream))) if token}
    windows, _ = windows_with(data, cache, **LAYOUTS[layout])
    seen = 0
    for number in range(len(windows)):
        window = windows[number]
        length = window["tokens"].shape[-1] - 1
        assert window["teacher_ids"].shape == (*window["block"].shape, length, K)
        assert window["teacher_log_tail"].shape == (*window["block"].shape, length)
        assert [window[f"teacher_{n}"].dtype.name for n in ("ids", "log_probs", "log_tail")] == [
            "uint16",
            "float16",
            "float16",
        ]
        mask = target_mask(window["segment_ids"])
        # No input of a target ends a document: its token tells its position.
        positions = np.array([place[int(t)] + 1 for t in window["tokens"][..., :-1][mask]])
        ids, log_probs, log_tail = (
            np.concatenate([records(p, p + 1)[i] for p in positions]) for i in range(3)
        )
        np.testing.assert_array_equal(window["teacher_ids"][mask], ids)
        np.testing.assert_array_equal(window["teacher_log_probs"][mask], log_probs)
        np.testing.assert_array_equal(window["teacher_log_tail"][mask], log_tail)
        seen += len(positions)
    assert seen > 50


def test_without_a_cache_windows_are_as_before(data):
    assert set(windows_of(data.directory)[0]) == {"tokens", "segment_ids", "positions", "block"}


@pytest.mark.parametrize(
    ("k", "dtype", "vocabulary", "expected"),
    [
        (32, "float32", 99_574, 258),
        (32, "float16", 99_574, 194),
        (32, "float16", 65_536, 130),
        (8, "float16", 65_536, 34),
    ],
)
def test_bytes_per_token(k, dtype, vocabulary, expected):
    assert CacheFormat(k, dtype, vocabulary).bytes_per_token == expected


def test_files_are_as_large_as_planned(data, cache):
    sizes = sum(p.stat().st_size - 128 for p in cache.glob("*.npy"))
    assert sizes == 1101 * CacheFormat(K, "float16", V).bytes_per_token


def test_it_grows_and_what_was_there_stays(tmp_path, data):
    stream = data.stream("train")
    grown = write(tmp_path / "grown", stream, 430)
    before = files_of(grown)
    manifest = json.loads(before.pop("manifest.json"))
    short = TeacherCache(grown, data, stream, 1, 430).fingerprint
    write(grown, stream, 1102)
    after = files_of(grown)
    assert {name: after[name] for name in before} == before
    shards = json.loads(after["manifest.json"])["shards"]
    assert shards[: len(manifest["shards"])] == manifest["shards"]
    assert [s["first"] for s in shards[1:]] == [s["first"] + s["records"] for s in shards[:-1]]
    # A run on a range goes on beside a cache that grows; one on all of it has more records.
    assert TeacherCache(grown, data, stream, 1, 430).fingerprint == short
    all_of_it = TeacherCache(grown, data, stream, 1, 1102).fingerprint
    assert all_of_it["teacher"] == short["teacher"]
    assert all_of_it["teacher records"][: len(short["teacher records"])] == short["teacher records"]


def test_shards_outside_the_range_may_be_gone_and_the_folder_may_move(tmp_path, data, cache):
    moved = tmp_path / "elsewhere" / "teacher-x"
    shutil.copytree(cache, moved)
    shutil.rmtree(cache)
    for path in moved.glob("*-00000.npy"):
        path.unlink()
    windows, _ = windows_with(data, moved, sequence_length=32, tokens=(320, 640))
    assert len(windows) > 0
    with pytest.raises(UserError, match=r"ids-00000\.npy: missing"):
        windows_with(data, moved, sequence_length=32)


def test_shards_that_were_given_up_stay_in_the_fingerprint_and_are_not_read(data, cache):
    """Rows of 32 tokens, two windows of 4: 0 to 127, 128 to 255; shards of 100 records and more."""
    stream = data.stream("train")
    before = TeacherCache(cache, data, stream, 1, 1102).fingerprint
    manifest = json.loads((cache / "manifest.json").read_text())
    shards = manifest["shards"]
    ends = [shard["first"] + shard["records"] for shard in shards]
    assert [reclaimable(manifest, position) for position in (ends[1] - 1, ends[1])] == [1, 2]
    mark_reclaimed(cache, 2)
    mark_reclaimed(cache, 1)  # after a restart
    for shard in shards[:2]:
        for name in shard["files"]:
            (cache / name).unlink()
    opened = TeacherCache(cache, data, stream, 1, 1102)
    assert opened.fingerprint == before
    assert opened.readable_from == ends[1]
    place = np.array([0])
    got = opened.read((1, 4), place, place, np.array([ends[1]]), np.array([4]))
    np.testing.assert_array_equal(got["teacher_ids"][0], records(ends[1], ends[1] + 4)[0])
    with pytest.raises(UserError, match=rf"position {ends[1] - 1} was reclaimed: .* {ends[1]};"):
        opened.read((1, 4), place, place, np.array([ends[1] - 1]), np.array([4]))
    # It goes on as if nothing had happened; the folder keeps what it gave up.
    write(cache, stream, 1102)
    assert json.loads((cache / "manifest.json").read_text())["reclaimed"] == 2


def test_a_cache_that_is_still_growing_serves_the_windows_that_it_reaches(tmp_path, data):
    config = DataConfig(directory=str(data.directory), sequence_length=32, shuffle_tokens=160)

    def open_until(cache, until):
        sources = open_sources(config, data, str(cache), until)
        return training_windows(sources, config, 2, 2, until)

    # Groups of 5 rows: the first window is within the first, the second reaches into the second.
    short = write(tmp_path / "short", data.stream("train"), 161)
    whole = write(tmp_path / "whole", data.stream("train"), 1102)
    one, all_of_them = open_until(short, 1)[0], open_until(whole, None)[0]
    for name, values in one.items():
        np.testing.assert_array_equal(values, all_of_them[name])
    with pytest.raises(UserError, match=r"short: the rows .* it has those below 161 so far; go on"):
        open_until(short, 2)
    with pytest.raises(UserError, match=r"positions 1 to 161, and 1 to 1,102 are needed"):
        open_until(short, None)
    assert len(open_until(whole, 9)) == 9  # whose last row is the stream's, and shorter


def test_what_does_not_fit_is_refused(tmp_path, data, cache):
    def open_with(data=data, cache=cache, **settings):
        windows_with(data, cache, **{"sequence_length": 32, **settings})

    with pytest.raises(UserError, match=r"no: holds no teacher's predictions.*cache_teacher.py"):
        open_with(cache=tmp_path / "no")
    short = write(tmp_path / "short", data.stream("train"), 300)
    with pytest.raises(UserError, match=r"positions 1 to 300, and 1 to 1,102 are needed"):
        open_with(cache=short)
    open_with(cache=short, tokens=(0, 288))
    late = write(tmp_path / "late", data.stream("train"), 1102, first=321)
    open_with(cache=late, tokens=(320, 640))
    with pytest.raises(UserError, match=r"positions 321 to 1,102, and 289 to 641 are needed"):
        open_with(cache=late, tokens=(288, 640))
    others = DataDirectory(directory_of(tmp_path, name="others", first=2))
    with pytest.raises(UserError, match="belongs to other training tokens"):
        open_with(data=others)
    # The same tokens, cut into documents elsewhere.
    cut = DataDirectory(directory_of(tmp_path, lengths=(2, 32, 33, 1035), name="cut"))
    with pytest.raises(UserError, match="belongs to other training tokens"):
        open_with(data=cut)
    smaller = DataDirectory(directory_of(tmp_path, name="smaller", vocabulary=64_000))
    with pytest.raises(UserError, match=r"None \(65,000 ids\), .* has None \(64,000 ids\)"):
        open_with(data=smaller)


def test_another_tokenizer_is_refused_naming_both(tmp_path):
    def directory(name, text):
        tokenizer = train_tokenizer([text * 50], 264)
        with ShardWriter(
            tmp_path / name,
            vocabulary_size=264,
            end_id=tokenizer.end_id,
            end_token=tokenizer.end_token,
            tokenizer=(tokenizer.file_name, tokenizer.content),
        ) as writer:
            for split in ("train", "validation"):
                writer.add(split, np.arange(200))
        return DataDirectory(tmp_path / name)

    one = directory("one", "the cat sat on the mat ")
    two = directory("two", "a quick brown fox jumped ")
    digests = [d.manifest["tokenizer"]["sha256"] for d in (one, two)]
    form = {"tokenizer": digests[0], "vocabulary_size": 264}
    cache = tmp_path / "teacher-one"
    with CacheWriter(cache, description(**form), one.stream("train"), 1) as writer:
        ids, log_probs, log_tail = records(1, 200)
        writer.append(ids % 264, log_probs, log_tail)
        writer.finish()
    windows_with(one, cache, sequence_length=8)
    with pytest.raises(UserError) as error:
        windows_with(two, cache, sequence_length=8)
    assert all(digest[:16] in str(error.value) for digest in digests)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["ids-00001.npy", "log_probs-00001.npy", "log_tail-00001.npy"])
def test_damage_is_found(data, cache, name):
    path = cache / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"damaged \\({name}: checksum differs"):
        windows_with(data, cache, sequence_length=32)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{name}: .* bytes, expected"):
        windows_with(data, cache, sequence_length=32)


def test_a_cache_of_something_else_is_not_continued(tmp_path, data, cache):
    stream = data.stream("train")
    other = {"kind": "jaxlm", "name": "t", "depth": 8}
    with pytest.raises(UserError, match=r'teacher was .*"depth": 4.*, is .*"depth": 8'):
        CacheWriter(cache, description(teacher=other), stream, 1)
    with pytest.raises(UserError, match="cannot begin at 1,200"):
        CacheWriter(cache, description(), stream, 1200)
    with pytest.raises(UserError, match="holds other files"):
        CacheWriter(data.directory / "train", description(), stream, 1)
    with (
        CacheWriter(cache, description(), stream, 1),  # the failed ones hold nothing
        pytest.raises(UserError, match="another process is writing"),
    ):
        CacheWriter(cache, description(), stream, 1)


def test_what_is_no_prediction_is_not_written(tmp_path, data):
    stream = data.stream("train")
    ids, log_probs, log_tail = records(1, 4)
    with CacheWriter(tmp_path / "c", description(), stream, 1) as writer:
        with pytest.raises(ValueError, match="position 1 is not finite"):
            writer.append(ids, log_probs * np.nan, log_tail)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            writer.append(ids + V, log_probs, log_tail)
        writer.append(ids, log_probs, np.full(3, -np.inf))  # an empty rest is a prediction


def test_the_fingerprint_of_a_run_names_teacher_and_records(tmp_path, data, cache):
    _, sources = windows_with(data, cache, sequence_length=32)
    fields = fingerprint_of(data, DataConfig(), sources)
    assert set(fields) - set(data.fingerprint()) == {"teacher", "teacher records"}
    deeper = {"kind": "jaxlm", "name": "t", "depth": 8}
    other = write(tmp_path / "other", data.stream("train"), 1102, teacher=deeper)
    _, sources = windows_with(data, other, sequence_length=32)
    assert fingerprint_of(data, DataConfig(), sources)["teacher"] != fields["teacher"]


def test_a_digest_knows_tokens_and_documents(tmp_path, data):
    stream = data.stream("train")
    whole = tokens_digest(stream, 1, 1102)
    assert tokens_digest(DataDirectory(data.directory).stream("train"), 1, 1102) == whole
    resharded = DataDirectory(directory_of(tmp_path, name="resharded", shard_tokens=2000))
    assert tokens_digest(resharded.stream("train"), 1, 1102) == whole


# A fork server: children write a cache and are killed at the n-th call of what reaches the disk.
SERVER = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [TESTS, TESTS + "/data"]
import teacher_records
from jaxlm.data import shards
from jaxlm.data.shards import DataDirectory
folder, data = Path(sys.argv[1]), DataDirectory(Path(sys.argv[2]))
stream = data.stream("train")

def life(target, kill_at):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = 0
    def hooked(original):
        def call(*arguments, **settings):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **settings)
        return call
    os.fsync, os.replace = hooked(lambda descriptor: None), hooked(os.replace)
    shards.ArrayFile.append = hooked(shards.ArrayFile.append)
    teacher_records.write(target, stream, 200, batch=33, shard_tokens=90)
    os._exit(0)

deaths = 0
for kill_at in range(1, 10_000):
    target = folder / f"killed-{kill_at}"
    # Some twice at the same call of a life: the second one has got further.
    codes = [life(target, kill_at) for _ in range(1 + (kill_at % 4 == 0))]
    assert life(target, 0) == 0
    deaths += codes.count(-9)
    if codes[0] == 0:
        break
print(deaths)
"""


def test_a_cache_that_is_killed_anywhere_ends_the_same(tmp_path, data):
    whole = write(tmp_path / "whole", data.stream("train"), 200, batch=33, shard_tokens=90)
    undisturbed = files_of(whole)
    assert "progress.json" not in undisturbed
    code = f"TESTS = {str(Path(__file__).parents[1])!r}\n{SERVER}"
    command = [sys.executable, "-c", code, str(tmp_path), str(data.directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    folders = [p for p in tmp_path.iterdir() if p.name.startswith("killed") and p.is_dir()]
    assert int(result.stdout) > 50
    assert len(folders) > 40
    for folder in folders:
        assert files_of(folder) == undisturbed, folder


def test_formats_of_other_versions_are_refused(tmp_path, data, cache, monkeypatch):
    monkeypatch.setattr(teacher_module, "FORMAT", 2)
    with pytest.raises(UserError, match="not of format 2"):
        TeacherCache(cache, data, data.stream("train"), 1, 1102)
    monkeypatch.undo()
    manifest = json.loads((cache / "manifest.json").read_text())
    files = manifest["shards"][0]["files"]
    files["../../secret.npy"] = files.pop("ids-00000.npy")
    (cache / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="names files that are not those of shard 0"):
        TeacherCache(cache, data, data.stream("train"), 1, 1102)
