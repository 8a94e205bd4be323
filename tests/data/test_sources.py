import gzip
import pickle
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxlm.data import sources
from jaxlm.data.sources import Reader, Source, SourceError, Unusable, find_sources, json_text
from jaxlm.errors import UserError

MANY = 2**20


def zstd(data):
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def read(path, documents="line", maximum=MANY, key="text", temporary=None):
    [source] = find_sources([str(path)])
    with Reader(source, key, documents, maximum, temporary or path.parent) as reader:
        records = [tuple(record) for record in reader]
        assert reader.bytes_read == path.stat().st_size
    return records


def read_bytes(tmp_path, data, documents="line", name="a.txt", **settings):
    path = tmp_path / name
    path.write_bytes(data)
    return read(path, documents, **settings)


def names(inputs):
    return [source.path.name for source in find_sources(inputs)]


# Finding


def test_kinds_by_name(tmp_path):
    for name in ("a.txt", "b.MD", "c.JSONL.GZ", "d.parquet", "e.txt.zst", "f.v1.jsonl.zstd"):
        (tmp_path / name).touch()
    assert find_sources([str(tmp_path)]) == [
        Source(tmp_path / "a.txt", "text", None),
        Source(tmp_path / "b.MD", "text", None),
        Source(tmp_path / "c.JSONL.GZ", "jsonl", "gz"),
        Source(tmp_path / "d.parquet", "parquet", None),
        Source(tmp_path / "e.txt.zst", "text", "zst"),
        Source(tmp_path / "f.v1.jsonl.zstd", "jsonl", "zst"),
    ]
    source = find_sources([str(tmp_path / "a.txt")])[0]
    assert pickle.loads(pickle.dumps(source)) == source
    assert {source: 1}[source] == 1
    assert source.name == str(tmp_path / "a.txt")


def test_folders_are_read_recursively_without_what_is_hidden_or_unknown(tmp_path):
    for name in ("b/c/2.txt", "b/1.jsonl", "a.md", ".git/x.txt", "b/.x.txt", "_SUCCESS", "x.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert names([str(tmp_path)]) == ["a.md", "1.jsonl", "2.txt"]
    assert names([f"{tmp_path}/**/*.txt"]) == ["2.txt"]
    assert names([f"{tmp_path}/*/*/*.txt", f"{tmp_path}/b/**"]) == ["2.txt", "1.jsonl"]
    assert names([f"{tmp_path}/**/c/**/*.txt"]) == ["2.txt"]


def test_each_file_once_in_order_of_the_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my[1].txt", "b.txt", "a.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert names(["b.txt", "*.txt", f"{tmp_path}/b.txt"]) == ["b.txt", "a.txt", "my[1].txt"]
    assert names(["my[1].txt"]) == ["my[1].txt"]
    assert names(["**/*.txt", "."]) == ["a.txt", "b.txt", "my[1].txt"]


def test_links(tmp_path):
    data = tmp_path / "data"
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (data / "x").mkdir(parents=True)
    (tmp_path / "store" / "5ca1ab1e").touch()  # a file in a store of hashed names
    (data / "x" / "c.parquet").symlink_to("../../store/5ca1ab1e")
    (tmp_path / "store" / "deep" / "d.txt").touch()
    (data / "elsewhere").symlink_to("../store/deep")
    for i in range(4):
        (data / f"back{i}").symlink_to(".")
        (data / "x" / f"up{i}").symlink_to("..")
    for inputs in ([str(data)], [f"{data}/**"], [f"{data}/**/*.parquet", f"{data}/**/*.txt"]):
        found = find_sources(inputs)
        assert sorted(source.path.name for source in found) == ["5ca1ab1e", "d.txt"]
        assert [s.kind for s in found if s.path.name == "5ca1ab1e"] == ["parquet"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere/*.txt", r"'.*nowhere/\*\.txt' matches no file"),
        ("empty", r"'.*empty' matches no file \(\.txt, \.md, \.jsonl, \.parquet, each plain, "),
        ("a.csv", r"a\.csv: its name ends in none of \.txt, \.md, \.jsonl, \.parquet, each plain"),
        ("*.csv", r"a\.csv: its name ends in none of"),
        ("a.json", r"a\.json: .*; JSON is read as \.jsonl, one object a line"),
        ("b.jsonl.bz2", r"b\.jsonl\.bz2: .* each plain, \.gz or \.zst$"),
        ("a.gz", r"a\.gz: its name ends in none of"),
        ("a.txt.bz2", r"a\.txt\.bz2: its name ends in none of"),
    ],
)
def test_what_is_not_found_or_not_known(tmp_path, given, message):
    (tmp_path / "empty").mkdir()
    for name in ("a.csv", "a.json", "a.gz", "a.txt.bz2", "b.jsonl.bz2"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message) as error:
        find_sources([str(tmp_path / given)])
    assert "\n" not in str(error.value)


def test_package_files():
    assert names(["package:pytest/pytest-*/entry_points.txt"]) == ["entry_points.txt"]
    with pytest.raises(UserError, match="not of the form package:NAME/GLOB"):
        find_sources(["package:/x"])
    with pytest.raises(UserError, match=r"pip install --no-deps .* not-there"):
        find_sources(["package:not-there/*.md"])
    with pytest.raises(UserError, match="matches no file"):
        find_sources(["package:pytest/*.nothing"])


# Text and JSONL

LINES = "one\r\ntwo\rthr\u2028ee\u0085\x0b\x0c\x1c\n\n \t\r\n\u3000four \r\r five".encode()


def test_lines(tmp_path):
    assert read_bytes(tmp_path, LINES) == [
        (b"one", 0, None),
        (b"two", 5, None),
        (b"thr\xe2\x80\xa8ee\xc2\x85\x0b\x0c\x1c", 9, None),
        (b"\xe3\x80\x80four ", 28, None),
        (b" five", 38, None),
    ]


def test_paragraphs(tmp_path):
    data = b" \n\n  one\n two \r\n\t \r\nthree\rfour\r\rfive\r\n\r\n\r\nsix\n \n\n"
    assert read_bytes(tmp_path, data, "paragraph") == [
        (b"  one\n two ", 3, None),
        (b"three\rfour", 20, None),
        (b"five", 32, None),
        (b"six", 42, None),
    ]
    assert read_bytes(tmp_path, b"one\n\n two\r\n", "paragraph") == [
        (b"one", 0, None),
        (b" two", 5, None),
    ]


def test_whole_files(tmp_path):
    assert read_bytes(tmp_path, LINES, "file") == [(LINES, 0, None)]
    assert read_bytes(tmp_path, b"", "file") == [(b"", 0, None)]
    assert read_bytes(tmp_path, b"", "line") == []
    assert read_bytes(tmp_path, b"", "paragraph") == []


def test_jsonl_lines_end_with_lf_alone(tmp_path):
    data = b'{"text": "a"}\r\n\r\n \n{"text":\r"b\xe2\x80\xa8"}\n{"text": "c"}\r'
    assert read_bytes(tmp_path, data, name="a.jsonl") == [
        (b'{"text": "a"}\r', 0, None),
        (b'{"text":\r"b\xe2\x80\xa8"}', 19, None),
        (b'{"text": "c"}\r', 36, None),
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_byte_order_mark_is_dropped_at_the_start_alone(tmp_path, suffix):
    data = COMPRESS[suffix](b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    two = (b"\xef\xbb\xbftwo", 7, None)
    assert read_bytes(tmp_path, data, name=f"a.txt{suffix}") == [(b"one", 3, None), two]
    assert read_bytes(tmp_path, data, name=f"a.jsonl{suffix}") == [(b"one", 3, None), two]
    whole = (b"one\n\xef\xbb\xbftwo\n", 3, None)
    assert read_bytes(tmp_path, data, "file", name=f"b.txt{suffix}") == [whole]


def test_what_is_too_long_is_passed_over(tmp_path):
    data = b"12345\r\n123456\r\n\n12\n345\n\n12\n34\n\n       \n\n1\n23456\n"
    long = (b"", 7, "too_long")
    assert read_bytes(tmp_path, data, "line", maximum=5)[:3] == [
        (b"12345", 0, None),
        long,
        (b"12", 16, None),
    ]
    assert read_bytes(tmp_path, data, "paragraph", maximum=5) == [
        (b"", 0, "too_long"),
        (b"", 16, "too_long"),
        (b"12\n34", 24, None),
        (b"", 40, "too_long"),
    ]
    assert read_bytes(tmp_path, data, "file", maximum=5) == [(b"", 0, "too_long")]
    assert read_bytes(tmp_path, data, "file", maximum=len(data)) == [(data, 0, None)]
    lines = read_bytes(tmp_path, b'{"text":"12345"}\n{"text":"1"}\n', name="a.jsonl", maximum=15)
    assert lines == [(b"", 0, "too_long"), (b'{"text":"1"}', 17, None)]


def expected(data, documents, maximum):
    """The rules said again over a whole file, with regular expressions."""
    end = rb"\n" if documents == "jsonl" else rb"(?>\r\n|\r|\n)"
    content = rb"[^\n]" if documents == "jsonl" else rb"[^\r\n]"
    line = rb"%s*[^\s]%s*" % (content, content)
    if documents == "paragraph":
        line = rb"%s(?:%s%s)*" % (line, end, line)
    return [
        (m[0], m.start(), None) if len(m[0]) <= maximum else (b"", m.start(), "too_long")
        for m in re.finditer(rb"(?<![^\r\n])%s" % line, data)
    ]


@pytest.mark.parametrize("documents", ["line", "paragraph", "jsonl"])
def test_where_blocks_end_does_not_matter(tmp_path, monkeypatch, documents):
    generator = random.Random(0)
    for _ in range(100):
        signs = ("\n", "\r\n", " ", "a", "bc") if documents == "jsonl" else ("\n", "\r", " ", "a")
        data = "".join(generator.choices(signs, k=30)).encode()
        maximum = generator.choice([2, 3, 5, MANY])
        right = expected(data, documents, maximum)
        for block in (3, 4, 7):
            monkeypatch.setattr(sources, "_BLOCK", block)
            name = "a.jsonl" if documents == "jsonl" else "a.txt"
            found = read_bytes(tmp_path, data, documents, name=name, maximum=maximum)
            assert found == right, (data, block, maximum)


# Compression


def text_of(count):
    return b"".join(b"line %d of some text %d\n" % (i, i * i) for i in range(count))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_all_members_are_read(tmp_path, suffix):
    first, second = text_of(20_000), text_of(500) + b"the end"
    data = COMPRESS[suffix](first) + COMPRESS[suffix](b"") + COMPRESS[suffix](second)
    plain = read_bytes(tmp_path, first + second)
    assert len(plain) == 20_501
    assert plain[-1][0] == b"the end"
    assert read_bytes(tmp_path, data, name=f"a.txt{suffix}") == plain


def test_skippable_frames_and_zero_padding(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    data = skippable + zstd(b"one\n") + skippable + zstd(b"two\n") + skippable
    assert read_bytes(tmp_path, data, name="a.txt.zst") == [(b"one", 0, None), (b"two", 4, None)]
    data = gzip.compress(b"one\n") + bytes(600) + gzip.compress(b"two\n") + bytes(600)
    assert read_bytes(tmp_path, data, name="a.txt.gz") == [(b"one", 0, None), (b"two", 4, None)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", ["nothing", "in header", "half", "last byte", "second member"])
def test_a_truncated_file_is_an_error_after_its_whole_lines(tmp_path, suffix, cut):
    text = text_of(20_000)
    data = COMPRESS[suffix](text)
    twice = data + COMPRESS[suffix](b"more")
    kept = {
        "nothing": b"",
        "in header": data[:3],
        "half": data[: len(data) // 2],
        "last byte": data[:-1],
        "second member": twice[: len(data) + 2],
    }[cut]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(kept)
    [source] = find_sources([str(path)])
    found = []
    with (
        Reader(source, "text", "line", MANY, tmp_path) as reader,
        pytest.raises(SourceError, match=r"truncated after \d+ bytes .*; copy or") as error,
    ):
        found.extend(record.data for record in reader)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    # Whole lines only, up to the offset that the message names.
    good = int(re.findall(r"after (\d+) bytes", str(error.value))[0])
    assert found == text[: text[:good].rfind(b"\n") + 1].splitlines()
    assert (good > 0) == (cut in ("half", "last byte", "second member"))
    if cut in ("last byte", "second member"):
        assert good == len(text)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_is_an_error(tmp_path, suffix):
    data = COMPRESS[suffix](text_of(20_000))
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    wrong_checksum = data[:-6] + bytes(5) + data[-1:] if suffix == ".gz" else data[:-4] + bytes(4)
    for bad in (flipped, wrong_checksum, data + b"trailing garbage", b"not compressed at all"):
        with pytest.raises(SourceError, match=r"damaged \(.*\) after \d+ bytes"):
            read_bytes(tmp_path, bad, name=f"a.txt{suffix}")


def test_a_window_of_two_gigabytes_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(b"one\n") + compressor.flush()
    assert read_bytes(tmp_path, data, name="a.txt.zst") == [(b"one", 0, None)]


# Parquet


def write_parquet(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_parquet(tmp_path, kind):
    texts = pa.array(["one", None, "", "吾輩\n"] + ["long " * 9, "one"] * 20).cast(kind)
    path = write_parquet(tmp_path / "a.parquet", {"id": range(44), "text": texts}, row_group_size=7)
    found = read(path, maximum=44)
    assert found[:5] == [
        (b"one", 0, None),
        (b"", 1, "null_text"),
        (b"", 2, None),
        ("吾輩\n".encode(), 3, None),
        (b"", 4, "too_long"),
    ]
    assert found[43] == (b"one", 43, None)
    assert len(found) == 44


def test_parquet_bytes_are_passed_through(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")]
    )
    assert read(write_parquet(tmp_path / "a.parquet", {"text": bad})) == [(b"a\xffb", 0, None)]


def test_parquet_columns_in_structs(tmp_path):
    meta = pa.StructArray.from_arrays(
        [pa.array(["a", "b", None]), pa.array([1, 2, 3]), pa.array(["x", "y", "z"])],
        ["body", "n", "very.deep"],
        mask=pa.array([False, True, False]),
    )
    path = write_parquet(tmp_path / "a.parquet", {"meta": meta})
    # The second struct is null, whatever lies under it.
    a, null = (b"a", 0, None), (b"", 1, "null_text")
    assert read(path, key="meta.body") == [a, null, (b"", 2, "null_text")]
    assert read(path, key="meta.very.deep") == [(b"x", 0, None), null, (b"z", 2, None)]
    fields = [pa.field("body", pa.string(), nullable=False)]
    required = pa.StructArray.from_arrays(
        [pa.array(["a", "b"])], fields=fields, mask=pa.array([False, True])
    )
    assert read(write_parquet(path, {"meta": required}), key="meta.body") == [a, null]
    literal = {"meta": meta, "meta.body": ["A", "B", "C"], "n": [1, 2, 3]}
    path = write_parquet(tmp_path / "b.parquet", literal)
    assert [data for data, *_ in read(path, key="meta.body")] == [b"A", b"B", b"C"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("body", r"no column 'body' \(prepare\.text_key\); its columns are id, meta\.text, list"),
        ("meta.body", r"no column 'meta\.body'"),
        ("id.x", r"no column 'id\.x'"),
        ("id", r"column 'id' \(prepare\.text_key\) is not text but int64"),
        ("meta", r"column 'meta' .* is not text but a struct"),
        ("list", r"column 'list' .* is not text but list<"),
    ],
)
def test_parquet_columns_that_do_not_serve(tmp_path, key, message):
    columns = {"id": [1], "meta": [{"text": "a"}], "list": [["a"]]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(UserError, match=rf"a\.parquet: .*{message}") as error:
        read(path, key=key)
    assert not isinstance(error.value, SourceError)


def test_parquet_that_is_truncated_or_damaged(tmp_path):
    texts = ["text " * 10 + str(i) for i in range(5000)]
    options = {"compression": "none", "write_page_checksum": True}
    path = write_parquet(tmp_path / "a.parquet", {"text": texts}, **options)
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 0xFF
    for bad in (b"", data[:3], data[: len(data) // 2], data[:-1], flipped):
        path.write_bytes(bad)
        with pytest.raises(SourceError, match=r"a\.parquet: .*damaged .*after \d+ rows") as error:
            read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_parquet(tmp_path, suffix):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    plain = write_parquet(tmp_path / "a.parquet", {"text": [f"text {i}" for i in range(5000)]})
    path = tmp_path / f"a.parquet{suffix}"
    path.write_bytes(COMPRESS[suffix](plain.read_bytes()))
    assert read(path, temporary=temporary) == read(plain)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="truncated after"):
        read(path, temporary=temporary)
    assert list(temporary.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read(path, temporary=tmp_path / "nowhere")


# Both


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.jsonl.gz"])
def test_a_file_that_is_gone(tmp_path, name):
    (tmp_path / name).touch()
    [source] = find_sources([str(tmp_path / name)])
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: .*read.*No such file"):
        next(Reader(source, "text", "line", MANY, tmp_path))


def test_reading_stops_where_it_is_closed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(text_of(200_000))
    [source] = find_sources([str(path)])
    with Reader(source, "text", "line", MANY, tmp_path) as reader:
        assert next(reader) == (b"line 0 of some text 0", 0, None)
        assert 0 < reader.bytes_read < path.stat().st_size
    assert list(reader) == []


@pytest.mark.parametrize(
    ("name", "package"), [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).touch()
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"needs {package}; run: pip install 'jaxlm\[data\]'"):
        read(tmp_path / name)


MEMORY = """
import re, sys
from pathlib import Path
from jaxlm.data.sources import Reader, find_sources

def peak():  # KiB of this program; ru_maxrss begins with what the parent had
    return int(re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[0])

[source] = find_sources([sys.argv[1]])
if source.kind == "parquet":
    import pyarrow.parquet
before = peak()
reader = Reader(source, "text", sys.argv[2], int(sys.argv[3]), Path("."))
print([(len(data), offset, reason) for data, offset, reason in reader][-3:])
print((peak() - before) // 1024)
"""


def memory(path, documents, maximum):
    """The last records, and the MiB that reading took."""
    arguments = [sys.executable, "-c", MEMORY, str(path), documents, str(maximum)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    records, used = output.splitlines()
    return records, int(used)


def write_long_line(path, size):
    with path.open("wb") as file:
        for _ in range(size // MANY):
            file.write(b"a" * MANY)
        file.write(b"\n\nthe end\n")
    return path


@pytest.mark.parametrize("documents", ["line", "paragraph"])
@pytest.mark.parametrize(
    ("size", "maximum"), [(60, 8), pytest.param(300, 64, marks=pytest.mark.long)]
)
def test_a_long_line_is_not_held(tmp_path, documents, size, maximum):
    path = write_long_line(tmp_path / "a.txt", size * MANY)
    records, used = memory(path, documents, maximum * MANY)
    assert records == f"[(0, 0, 'too_long'), (7, {size * MANY + 2}, None)]"
    assert used < maximum * 1.25 + 16


def test_a_document_is_held_once(tmp_path):
    path = write_long_line(tmp_path / "a.txt", 40 * MANY)
    records, used = memory(path, "line", 40 * MANY)
    assert records == f"[({40 * MANY}, 0, None), (7, {40 * MANY + 2}, None)]"
    assert used < 40 * 1.25 + 16


def test_what_is_compressed_very_well_is_not_held(tmp_path):
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](bytes(100 * MANY) + b"\nthe end"))
        records, used = memory(path, "line", MANY)
        assert records == f"[(0, 0, 'too_long'), (7, {100 * MANY + 1}, None)]"
        assert used < 48


def test_a_row_group_is_not_held(tmp_path):
    texts = pa.array([random.Random(i).randbytes(2**18) for i in range(240)])
    pages = {"use_dictionary": False, "write_batch_size": 4}  # of 1 MiB; a page is held whole
    path = write_parquet(tmp_path / "a.parquet", {"text": texts}, **pages)
    records, used = memory(path, "line", MANY)
    assert records.endswith("(262144, 239, None)]")
    assert used < 40


# JSON


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        ('{"text": "吾輩"}\r', "text", "吾輩"),
        ('{"text": ""}', "text", ""),
        ('{"a": {"b": {"c": "deep"}}}', "a.b.c", "deep"),
        ('{"a.b": "literal", "a": {"b": "nested"}}', "a.b", "literal"),
        ('{"a": {"b.c": "half"}}', "a.b.c", "half"),
        (r'{"text": "\ud83d\ud83c\udf4e\u0000"}', "text", "\ud83d🍎\x00"),
        ('{"n": [NaN, -Infinity, 1e999, 12345678901234567890], "text": "a"}', "text", "a"),
        ('{"text": "first", "text": "last"}', "text", "last"),
    ],
)
def test_json_text(line, key, text):
    assert json_text(line.encode(), key) == text


def test_json_bytes_that_are_not_utf8():
    assert json_text(b'{"text": "caf\xe9 \xe3\x81"}', "text") == "caf\udce9 \udce3\udc81"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "invalid_json"),
        (b"{'text': 'a'}", "invalid_json"),
        (b'{"text": "a"} {"text": "b"}', "invalid_json"),
        (b'\xef\xbb\xbf{"text": "a"}', "invalid_json"),
        (b'{"text": "a\tb"}', "invalid_json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'["text"]', "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"body": "a"}', "no_text"),
        (b'{"text": null}', "null_text"),
        (b'{"text": 5}', "text_not_a_string"),
        (b'{"text": {"text": "a"}}', "text_not_a_string"),
    ],
)
def test_json_without_a_text(line, reason):
    with pytest.raises(Unusable) as error:
        json_text(line, "text")
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": {}}', "no_text"),
        (b'{"a": null}', "no_text"),
        (b'{"a": "b"}', "no_text"),
        (b'{"a": [{"b": "c"}]}', "no_text"),
        (b'{"a": {"b": null}}', "null_text"),
    ],
)
def test_nested_json_without_a_text(line, reason):
    with pytest.raises(Unusable) as error:
        json_text(line, "a.b")
    assert error.value.reason == reason
