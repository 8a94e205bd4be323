import json
import os

import numpy as np
import pytest
from helpers import write_documents

from jaxlm.data.shards import DataDirectory, ShardWriter, SplitWriter, token_dtype
from jaxlm.errors import UserError


def test_token_ids_take_32_bits_beyond_65536_entries(tmp_path):
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32
    # 99573 as 16 bits would be 34037.
    ids = [65_535, 65_536, 99_573]
    data = DataDirectory(write_documents(tmp_path / "d", [ids], [[1]], 99_574))
    assert data.stream("train").read(0, 3).tolist() == ids
    assert data.stream("train").read(0, 3).dtype == np.uint32


def test_documents_and_tokens_read_back_across_shards(tmp_path):
    documents = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0], [10, 0], [11, 0]]
    data = DataDirectory(write_documents(tmp_path / "d", documents, [[1, 0]], 16, shard_tokens=5))
    assert len(data.manifest["splits"]["train"]["shards"]) == 3
    stream = data.stream("train")
    flat = [i for document in documents for i in document]
    assert len(stream) == 16
    assert stream.document_ends.tolist() == [4, 6, 12, 14, 16]
    for start in range(16):
        for stop in range(start + 1, 17):
            assert stream.read(start, stop).tolist() == flat[start:stop]


def test_going_back_removes_later_shards_and_no_file_of_anyone_else(tmp_path):
    folder = tmp_path / "train"
    writer = SplitWriter(folder, 64, shard_tokens=4)
    position = writer.sync()
    for _ in range(3):
        writer.add(np.array([5, 6, 7, 8], np.int64), 4)
    writer.close()
    written = {"tokens-00000.npy", "tokens-00001.npy", "tokens-00002.npy"}
    assert written <= {path.name for path in folder.iterdir()}
    foreign = ("notes.txt", "tokens-00000.npy.bak", "tokens-99999.npy", "counts-mine.npy")
    for name in foreign:
        (folder / name).write_text(name)
    (folder / "more").mkdir()
    SplitWriter(folder, 64, shard_tokens=4, position=position).close()
    assert {path.name for path in folder.iterdir()} == {*foreign, "more"}


def test_reading_is_a_view_of_the_mapped_file(tmp_path):
    data = DataDirectory(write_documents(tmp_path / "d", [list(range(1, 60))], [[1]], 64))
    piece = data.stream("train").read(3, 40)
    assert isinstance(piece, np.memmap)
    assert not piece.flags.owndata


def test_counts_and_totals(tmp_path):
    data = DataDirectory(write_documents(tmp_path / "d", [[1, 1, 0], [2, 0]], [[3, 0]], 5))
    assert data.counts("train").tolist() == [2, 2, 1, 0, 0]
    split = data.manifest["splits"]["train"]
    assert (split["tokens"], split["documents"]) == (5, 2)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    for bad in (16, -1):
        with pytest.raises(ValueError, match=f"token id {bad}; the vocabulary has 16 entries"):
            write_documents(tmp_path / "d", [[1, bad]], [[1]], 16)
        # Nothing half-written stays.
        assert [path.name for path in tmp_path.iterdir()] == ["d.lock"]


def test_an_existing_directory_is_never_overwritten(random_data):
    with pytest.raises(UserError, match="exists already"):
        ShardWriter(random_data, vocabulary_size=64, end_id=0)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "bit flip":
        data[-3] ^= 1
    elif how == "truncation":
        data = data[:-8]
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["tokens-00000.npy", "ends-00000.npy", "counts-00001.npy", "tokenizer.json"]
)
@pytest.mark.parametrize("how", ["bit flip", "truncation", "absence"])
def test_damage_is_found_and_the_file_is_named(random_data, name, how):
    path = random_data / "train" / name
    if name == "tokenizer.json":
        random_data = write_documents(
            random_data.parent / "with",
            [[1]],
            [[1]],
            64,
            tokenizer=(name, b'{"a": 1, "bcdefgh": 2}'),
        )
        path = random_data / name
    if how == "absence":
        os.remove(path)
    else:
        damage(path, how)
    data = DataDirectory(random_data)
    read = {"counts-00001.npy": lambda: data.counts("train"), "tokenizer.json": data.tokenizer_path}
    with pytest.raises(UserError, match=name):
        read.get(name, lambda: data.stream("train"))()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format 99, expected 3"),
        ({"dtype": "uint32"}, "needs uint16"),
        ({"vocabulary_size": 70_000}, "needs uint32"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(random_data, change, message):
    path = random_data / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        DataDirectory(random_data)


def test_a_directory_without_data_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no manifest"):
        DataDirectory(tmp_path)
    for damaged in (b"{", b"[]", b'{"format": 3}', b"\xff"):
        (tmp_path / "manifest.json").write_bytes(damaged)
        with pytest.raises(UserError, match=r"damaged|format None"):
            DataDirectory(tmp_path)


def test_fingerprint_names_what_differs(tmp_path):
    one = DataDirectory(write_documents(tmp_path / "1", [[1, 0]], [[2, 0]], 8)).fingerprint()
    same = DataDirectory(write_documents(tmp_path / "2", [[1, 0]], [[2, 0]], 8)).fingerprint()
    other = DataDirectory(write_documents(tmp_path / "3", [[3, 0]], [[2, 0]], 8)).fingerprint()
    assert one == same
    assert {field for field in one if one[field] != other[field]} == {"train tokens"}
