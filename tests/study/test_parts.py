"""Journal, block logs, folder, documents and figures of studies, each by itself."""

import html.parser
import json
import random
import resource

import numpy as np
import pytest
from helpers import tiny_model

from jaxlm.config import Config, DataConfig
from jaxlm.errors import Failure
from jaxlm.study.blocks import digest_of, first_difference, read_blocks
from jaxlm.study.document import Bullets, Listing, Picture, Section, Table, as_html, as_markdown
from jaxlm.study.figures import _cumulative, at_equal
from jaxlm.study.folder import check_removable, remove
from jaxlm.study.journal import Journal
from jaxlm.study.pictures import Series, line_chart

# ---------------------------------------------------------------- journal


def written(tmp_path, events=4):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(events):
        journal.append("trained", cycle=number, text="日本 — <x>")
    return path


def test_a_journal_reads_back_and_goes_on(tmp_path):
    path = written(tmp_path)
    journal = Journal(path)
    assert [e["cycle"] for e in journal.all("trained")] == [0, 1, 2, 3]
    assert journal.find("trained", cycle=2)["text"] == "日本 — <x>"
    assert journal.find("trained", cycle=9) is None
    journal.append("cycle", cycle=1)
    assert [e["event"] for e in Journal(path).events] == ["trained"] * 4 + ["cycle"]


def test_what_a_crash_leaves_of_a_line_is_cut_off(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) - len(lines[-1]), len(whole), 29):
        path.write_bytes(whole[:cut])
        assert len(Journal(path, read_only=True).events) == 3
        assert path.read_bytes() == whole[:cut]
        assert len(Journal(path).events) == 3
        assert path.read_bytes() == b"".join(lines[:-1])


def test_a_line_that_the_disk_takes_in_part_is_an_error_and_nothing_follows_it(tmp_path):
    path = written(tmp_path)
    whole, journal = path.read_bytes(), Journal(path)
    # As on a disk with room for 40 bytes more: a write takes those, the next one fails.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, before[1]))
    try:
        with pytest.raises(OSError, match="journal"):
            journal.append("cycle", cycle=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == len(whole) + 40
    journal = Journal(path)
    journal.append("cycle", cycle=1)
    assert [e["event"] for e in Journal(path).events] == ["trained"] * 4 + ["cycle"]


def test_any_change_to_a_journal_is_found(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    changed = [b"".join(lines[:i] + lines[i + 1 :]) for i in range(3)]  # a line is missing
    changed += [b"".join([lines[1], lines[0], *lines[2:]]), b"".join([lines[0], *lines])]
    rng = random.Random(0)
    for _ in range(100):
        place = rng.randrange(len(whole) - 1)  # the last line feed is what a crash may take
        byte = bytes([rng.choice([b for b in range(256) if b != whole[place]])])
        changed.append(whole[:place] + byte + whole[place + 1 :])
    for text in changed:
        path.write_bytes(text)
        with pytest.raises(Failure, match=r"journal\.jsonl:[1-5]: is not what was written"):
            Journal(path)


# ---------------------------------------------------------------- block ids


def log(path, blocks):
    """blocks: by update, by micro-batch, ids."""
    lines = [
        json.dumps({"update": u, "micro_batch": m, "blocks": ids})
        for u, batches in enumerate(blocks)
        for m, ids in enumerate(batches)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_the_digest_of_blocks_knows_rows_and_order_but_not_micro_batches(tmp_path):
    one = read_blocks(log(tmp_path / "a", [[[3, 1], [2, 0]], [[5, 4], [7, 6]]]), 2)
    other = read_blocks(log(tmp_path / "b", [[[3, 1, 2, 0]], [[5, 4, 7, 6]], [[9]]]), 2)
    assert one == other == [[3, 1, 2, 0], [5, 4, 7, 6]]
    assert digest_of(one) == digest_of(other)
    for changed in ([[3, 1, 2], [0, 5, 4, 7, 6]], [[1, 3, 2, 0], one[1]], [[31, 2, 0], one[1]]):
        assert digest_of(changed) != digest_of(one)
    assert first_difference(one, other) is None
    assert first_difference(one, [one[0], [5, 4, 7, 8]]) == 1
    assert first_difference(one, one[:1]) == 1
    # The last micro-batch of the last update is missing, which only the digest can tell.
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    (tmp_path / "a").write_text("".join(lines[:-1]))
    assert digest_of(read_blocks(tmp_path / "a", 2)) != digest_of(one)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:2],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0], "{", *lines[2:]],
        lambda lines: [lines[0].replace("[3", '["3"'), *lines[1:]],
        lambda lines: [lines[0].replace('"update"', '"updates"'), *lines[1:]],
    ],
)
def test_a_spoiled_log_of_blocks_is_named(tmp_path, spoil):
    path = log(tmp_path / "blocks.jsonl", [[[3, 1], [2, 0]], [[5, 4], [7, 6]]])
    path.write_text("".join(line + "\n" for line in spoil(path.read_text().splitlines())))
    with pytest.raises(Failure, match="blocks"):
        read_blocks(path, 2)


# ---------------------------------------------------------------- folder


def test_only_the_studys_own_shards_can_be_removed(tmp_path):
    study = tmp_path / "study"
    (study / "data" / "train").mkdir(parents=True)
    shard = study / "data/train/tokens-00000.npy"
    shard.write_bytes(b"12345")
    entry = {
        "bytes": 5,
        "sha256": "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5",
    }
    for name in (
        *("../outside", "/etc/passwd", "data/train/../../../x", "data/train/ends-00000.npy"),
        *("data/validation/tokens-00000.npy", "models/a/checkpoints/3/manifest.json", ""),
        *("data/train/tokens-00000.npy/", "data/train/tokens-00000.npy\n", "journal.jsonl"),
    ):
        with pytest.raises(Failure, match="is no shard that a study removes"):
            check_removable(study, {name: entry})
    with pytest.raises(Failure, match="no size and checksum"):
        check_removable(study, {"data/train/tokens-00000.npy": {}})
    with pytest.raises(Failure, match="is not what the study wrote there"):
        check_removable(study, {"data/train/tokens-00000.npy": {**entry, "sha256": "0" * 64}})
    files = check_removable(study, {"data/train/tokens-00000.npy": entry})
    # A folder that became a link after the check is not followed.
    elsewhere = tmp_path / "elsewhere"
    (study / "data").rename(elsewhere)
    (study / "data").symlink_to(elsewhere)
    with pytest.raises(OSError, match="data"):
        remove(study, files)
    assert (elsewhere / "train/tokens-00000.npy").exists()
    (study / "data").unlink()
    elsewhere.rename(study / "data")
    remove(study, files)
    assert not shard.exists()
    remove(study, files)  # they are gone already


# ---------------------------------------------------------------- document

EVIL = '<script>alert("x")</script> `a` | b\n# c &amp; \\'


class _Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_everything_from_files_is_text_in_the_report():
    blocks = [EVIL, Table([EVIL], [[EVIL]]), Bullets([EVIL]), Listing(EVIL, EVIL + "```")]
    sections = [Section(EVIL, [*blocks, Picture(b"<svg/>", EVIL)])]
    parser = _Tags()
    parser.feed(as_html(EVIL, sections))
    assert {tag for tag, _ in parser.tags} == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "section", "p", "div"),
        *("table", "thead", "tbody", "tr", "th", "td", "ul", "li", "details", "summary", "pre"),
        *("figure", "img", "figcaption"),
    }
    for _, attributes in parser.tags:
        assert not any(name.startswith("on") or name == "href" for name in attributes)
        assert attributes.get("src", "data:").startswith("data:")
    assert "".join(parser.text).count(EVIL) == 10
    lines = as_markdown(EVIL, sections).splitlines()
    outside = "\n".join(lines[: lines.index("````")])
    assert "<script" not in outside.replace("\\<", "")
    assert sum(line.startswith("#") for line in lines[: lines.index("````")]) == 2
    row = next(line for line in lines if line.startswith("| "))
    assert row.replace("\\|", "").count("|") == 2


def test_pictures_are_the_same_every_time_and_need_nothing_outside():
    x = np.arange(1.0, 4.0)
    series = [Series("a <b>", x, x, 0), Series("b", x, 2 * x, 1, 1)]
    first, second = (line_chart(series, x="tokens", y="nats", ticks=[1, 2]) for _ in range(2))
    assert first == second
    assert b"<script" not in first


# ---------------------------------------------------------------- figures


def test_losses_at_equal_places_by_hand():
    """b is at 4 after 1 and at 2 after 100: at 10, half-way in the logarithm, at 3."""
    a = (np.array([1.0, 10.0]), np.array([3.0, 1.0]))
    b = (np.array([1.0, 100.0]), np.array([4.0, 2.0]))
    assert at_equal(a, b).x == 10.0
    assert at_equal(a, b).losses == pytest.approx((1.0, 3.0))
    # Before its first point a curve is not known.
    late = (np.array([20.0, 200.0]), np.array([5.0, 4.0]))
    assert at_equal(a, late).losses == (1.0, None)


def test_flops_and_seconds_behind_an_update_by_hand():
    """A Transformer of L layers costs 3 forward passes: 6 * (parameters that multiply) a token."""
    model = tiny_model("transformer", width=32, heads=4, feed_forward=64, vocabulary_size=64)
    config = Config(model=model, data=DataConfig(sequence_length=8))
    records = [
        {"tokens": tokens, "seconds": seconds, "depth": None, "backprop_depth": None}
        for tokens, seconds in ((30, 10.0), (50, 1.0), (70, 1.0))
    ]
    flops, seconds = _cumulative(config, records)
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 64 * 32
    attention = 2 * 2 * 32 * (8 + 1) / 2  # two products with 4.5 keys on average, 2 layers
    assert flops == pytest.approx(np.array([30, 50, 70]) * 3 * (2 * weights + 2 * attention))
    assert seconds == pytest.approx([10.0, 11.0, 12.0])
