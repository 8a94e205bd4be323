"""Teachers: which context they see, what they predict, and what is written of it."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import logits_of, params_of, tiny_model, write_documents

from jaxlm.config import Config
from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.teacher import CacheFormat, TeacherCache, cached_until, covered, read_manifest
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.distillation.caching import cache_directory, verify
from jaxlm.distillation.caching import cache_teacher as write_cache
from jaxlm.distillation.contexts import DocumentContext, PackedContext
from jaxlm.distillation.planning import CachePlan, logits_bytes, size_of_hugging_face, size_of_run
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.distillation.teachers import HuggingFaceTeacher, JaxlmTeacher, load_hugging_face
from jaxlm.errors import Failure, UserError
from jaxlm.losses import TeacherRecords, chunked_cross_entropy
from jaxlm.memory.devices import DEVICES

ROOT = Path(__file__).parents[2]
V, K = 64, 5
LENGTHS = (1, 2, 30, 7, 3, 1, 61, 12, 40)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, V, n - 1), 0] for n in LENGTHS]
    return DataDirectory(write_documents(tmp_path / "data", documents, [[1, 0]], V))


def cache_teacher(data, teacher, name, *arguments, **more):
    directory = cache_directory(data, name)
    assert write_cache(data, teacher, directory, *arguments, **more)
    return directory


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ---------------------------------------------------------------- contexts


@pytest.mark.parametrize(("length", "overlap"), [(8, 0), (8, 3), (8, 7), (100, 10)])
def test_windows_of_documents(data, length, overlap):
    """Every position once, in order, from its own document, `overlap` tokens back or more."""
    stream = data.stream("train")
    ends = np.cumsum(LENGTHS)
    spans = DocumentContext(length, overlap).spans(stream, 0, len(stream))
    positions = []
    for start, stop, first in zip(spans.starts, spans.stops, spans.first, strict=True):
        document = int(np.searchsorted(ends, start, side="right"))
        begin, end = ends[document] - LENGTHS[document], ends[document]
        assert begin <= start < stop <= end
        assert stop - start <= length + 1
        assert start == begin or first - start > overlap
        positions += range(first, stop)
    assert positions == list(range(len(stream)))
    assert spans.records == len(stream)
    # A part of the stream: the documents that hold it, whole.
    part = DocumentContext(length, overlap).spans(stream, 35, 60)
    assert (part.first[0], part.stops[-1]) == (33, 105)


def test_packed_rows(data):
    stream = data.stream("train")
    spans = PackedContext(32).spans(stream, 0, len(stream))
    assert spans.starts.tolist() == [0, 32, 64, 96, 128]
    assert spans.stops.tolist() == [33, 65, 97, 129, 157]
    assert spans.first.tolist() == [1, 33, 65, 97, 129]
    part = PackedContext(32).spans(stream, 40, 64)
    assert (part.first[0], part.stops[-1]) == (33, 65)
    assert part.after(50).first.tolist() == [50]
    assert len(part.after(65)) == 0


# ---------------------------------------------------------------- a run of jaxlm


def jaxlm_teacher(model, params, depth, length=16, rows=3, k=K):
    identity = {"kind": "jaxlm", "name": "t", "update": 1, "weights": None, "depth": depth}
    return JaxlmTeacher(model, params, depth, V, k, rows, 8, PackedContext(length), identity, None)


def test_a_jaxlm_teacher_predicts_what_the_model_predicts_on_packed_rows(data):
    """Against logits of the model; the packed rows are put together by hand."""
    model = tiny_model(initial_state="zero", vocabulary_size=80)  # more entries than the data
    params = params_of(model)
    cache_teacher(data, jaxlm_teacher(model, params, 3), "t", CacheFormat(K, "float32", V))
    stream = data.stream("train")
    cache = TeacherCache(data.directory / "teacher-t", data, stream, 1, len(stream))
    tokens, ends = stream.read(0, len(stream)), np.cumsum(LENGTHS)
    rows = 10
    padded = np.concatenate([tokens, np.zeros(rows * 16 + 1 - len(tokens), np.uint16)])
    table = padded[np.arange(rows)[:, None] * 16 + np.arange(16)]
    document = np.searchsorted(ends, np.arange(len(padded)), side="right")
    document = document[np.arange(rows)[:, None] * 16 + np.arange(16)]
    segments = document - document[:, :1] + 1
    first = np.array([[np.flatnonzero(row == d)[0] for d in row] for row in segments])
    logits = logits_of(model, params, table, segments, np.arange(16) - first, depth=3)
    log_p = log_softmax(np.asarray(logits, np.float64)[..., :V].reshape(-1, V))[: len(tokens) - 1]
    got = cache.read((1, 156), *(np.array([n]) for n in (0, 0, 1, 156)))
    ids = got["teacher_ids"][0].astype(int)
    expected = np.take_along_axis(log_p, ids, -1)
    np.testing.assert_allclose(got["teacher_log_probs"][0], expected, atol=1e-4)
    assert np.all(np.sort(-log_p, -1)[:, K - 1 : K] * -1 <= expected + 1e-4)  # the largest K
    rest = 1 - np.exp(expected).sum(-1)
    np.testing.assert_allclose(np.exp(got["teacher_log_tail"][0]), rest, rtol=2e-3)
    total = np.exp(got["teacher_log_probs"][0]).sum(-1) + np.exp(got["teacher_log_tail"][0])
    np.testing.assert_allclose(total, 1, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cached_and_live_teacher_teach_alike(data, dtype):
    """The divergence of a student, from the cache and from the teacher itself: within 1e-3."""
    model = tiny_model("transformer")
    params = params_of(model)
    teacher = jaxlm_teacher(model, params, None)
    cache_teacher(data, teacher, "t", CacheFormat(K, dtype, V))
    stream = data.stream("train")
    live = teacher.predict(stream, PackedContext(16).spans(stream, 0, 48))
    cache = TeacherCache(data.directory / "teacher-t", data, stream, 1, len(stream))
    read = cache.read((1, 48), *(np.array([n]) for n in (0, 0, 1, 48)))
    rng = np.random.default_rng(1)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((48, 8), (V, 8)))

    def divergence(records):
        records = TeacherRecords(*map(jnp.asarray, records))
        sums = chunked_cross_entropy(
            hidden, head, jnp.zeros(48, int), jnp.ones(48), chunk_tokens=16, teacher=records
        )
        return float(sums.distillation) / 48

    one = divergence(live)
    two = divergence(read[f"teacher_{name}"][0] for name in ("ids", "log_probs", "log_tail"))
    assert one > 0.3
    assert two == pytest.approx(one, abs=1e-3 if dtype == "float16" else 1e-4)


def test_it_goes_on_where_it_was(data):
    """In two parts, by ranges: the records of one that was made at once."""
    model = tiny_model("transformer")
    teacher = jaxlm_teacher(model, params_of(model), None)
    form = CacheFormat(K, "float32", V)
    parts = cache_teacher(data, teacher, "parts", form, (0, 48))
    assert covered(read_manifest(parts)) == (1, 49)
    cache_teacher(data, teacher, "parts", form, (48, 157))
    whole = cache_teacher(data, teacher, "whole", form)
    stream = data.stream("train")
    read = [
        TeacherCache(d, data, stream, 1, 157).read(
            (1, 156), *(np.array([n]) for n in (0, 0, 1, 156))
        )
        for d in (parts, whole)
    ]
    jax.tree.map(np.testing.assert_array_equal, *read)
    assert verify(data, whole).describe() == "t (jaxlm), k = 5, float32, packed rows of 16 tokens"
    cache_teacher(data, teacher, "late", form, (0, 48))
    with pytest.raises(UserError, match="cannot begin at 129"):
        cache_teacher(data, teacher, "late", form, (128, 157))
    with pytest.raises(UserError, match=r"--tokens 0:158: the training tokens are 0 to 157"):
        cache_teacher(data, teacher, "whole", form, (0, 158))


@pytest.mark.parametrize("kind", ["packed", "documents"])
def test_ranges_that_end_exactly_make_the_records_of_a_whole(data, kind):
    """Ends within rows of 16, within documents, and within windows of 8 of them."""
    if kind == "packed":
        model = tiny_model("transformer")
        teacher = jaxlm_teacher(model, params_of(model), None)
    else:
        teacher = hugging_face(FakeModel(), DocumentContext(8, 3))
    form, stream = CacheFormat(K, "float32", V), data.stream("train")
    for stop in (40, 41, 77, 156):
        parts = cache_teacher(data, teacher, "parts", form, (0, stop), exact=True)
        assert covered(read_manifest(parts))[1] == stop + 1
    whole = cache_teacher(data, teacher, "whole", form)
    assert len(read_manifest(parts)["shards"]) == 4
    read = [
        TeacherCache(d, data, stream, 1, 157).read(
            (1, 156), *(np.array([n]) for n in (0, 0, 1, 156))
        )
        for d in (parts, whole)
    ]
    jax.tree.map(np.testing.assert_array_equal, *read)


def test_it_is_left_where_it_is_told_to(data):
    model = tiny_model("transformer")
    teacher = jaxlm_teacher(model, params_of(model), None)
    form, asked = CacheFormat(K, "float32", V), []
    directory = cache_directory(data, "t")

    def stopping():
        asked.append(cached_until(directory))
        return len(asked) == 3

    assert not write_cache(data, teacher, directory, form, stopping=stopping)
    assert cached_until(directory) == 1 + 2 * 3 * 16  # two groups of three rows
    whole = cache_teacher(data, teacher, "whole", form)
    assert write_cache(data, teacher, directory, form)
    for name in ("ids-00000.npy", "manifest.json"):
        assert (directory / name).read_bytes() == (whole / name).read_bytes()


def test_a_full_disk_is_told_before_the_work(data, monkeypatch):
    model = tiny_model("transformer")
    teacher = jaxlm_teacher(model, params_of(model), None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    # 156 records of 5 x (2 + 2) + 2 bytes.
    with pytest.raises(Failure, match=r"take 3 kB, the disk has 1 kB"):
        cache_teacher(data, teacher, "t", CacheFormat(K, "float16", V))


# ---------------------------------------------------------------- Hugging Face


class FakeModel:
    """Has the interface of a causal language model of transformers.

    The logits at a position depend on all tokens before it in the window, and on their order.
    """

    device = "cpu"

    def __init__(self, outputs=V + 3):
        rng = np.random.default_rng(7)
        self.embedding = rng.normal(size=(V, 12))
        self.head = rng.normal(size=(12, outputs))
        self.shapes = []

    def logits(self, tokens):
        """[W, outputs] of one window."""
        state, states = np.zeros(12), []
        for token in tokens:
            state = 0.7 * state + self.embedding[token]
            states.append(state)
        return np.array(states).reshape(-1, 12) @ self.head

    def __call__(self, *, input_ids, attention_mask, use_cache):
        assert use_cache is False
        self.shapes.append(input_ids.shape)
        out = np.zeros((*input_ids.shape, self.head.shape[1]))
        for row, (tokens, mask) in enumerate(
            zip(input_ids.array, attention_mask.array, strict=True)
        ):
            used = int(mask.sum())
            assert mask[:used].all()  # padding stands on the right
            out[row, :used] = self.logits(tokens[:used])
            out[row, used:] = np.nan
        return SimpleNamespace(logits=fake_torch.Tensor(out))


def hugging_face(model, context, rows=2, k=K):
    identity = {"kind": "huggingface", "name": "fake", "depth": None}
    return HuggingFaceTeacher(model, fake_torch, V, k, rows, 4, context, identity, None)


@pytest.mark.parametrize(("length", "overlap"), [(8, 3), (100, 0)])
def test_a_hugging_face_teacher_sees_its_document_and_nothing_else(data, length, overlap):
    model = FakeModel()
    teacher = hugging_face(model, DocumentContext(length, overlap))
    cache_teacher(data, teacher, "fake", CacheFormat(K, "float32", V))
    stream = data.stream("train")
    cache = TeacherCache(data.directory / "teacher-fake", data, stream, 1, len(stream))
    tokens, end = stream.read(0, len(stream)), 0
    for n in LENGTHS:
        begin, end = end, end + n
        for position in range(begin + 1, end):
            # The window by hand: begun as early as is allowed.
            start, target = begin, position - begin
            while target > (start - begin) + length:
                start += length - overlap
            log_p = log_softmax(model.logits(tokens[start:position])[-1][:V])
            read = cache.read((1, 1), *(np.array([i]) for i in (0, 0, position, 1)))
            order = np.argsort(-log_p)[:K]
            assert read["teacher_ids"][0, 0].tolist() == order.tolist()
            np.testing.assert_allclose(read["teacher_log_probs"][0, 0], log_p[order], atol=1e-5)
            rest = np.log(1 - np.exp(log_p[order]).sum())
            assert float(read["teacher_log_tail"][0, 0]) == pytest.approx(rest, abs=4e-3)
    assert all(rows <= 2 and width <= length for rows, width in model.shapes)


def test_windows_of_like_length_go_together(data):
    """Inputs of 60 and 39, 29 and 11, 6 and 2, 1 and 0, 0 tokens; in their order it were 223."""
    model = FakeModel()
    teacher = hugging_face(model, DocumentContext(64, 0))
    cache_teacher(data, teacher, "fake", CacheFormat(K, "float16", V))
    widths = [60, 29, 6, 1]
    assert model.shapes == [*[(2, width) for width in widths], (1, 1)]


def test_a_teacher_with_fewer_logits_than_ids_is_refused(data):
    teacher = hugging_face(FakeModel(outputs=V - 1), DocumentContext(8, 0))
    with pytest.raises(UserError, match="gives 63 logits, the data has 64 ids"):
        cache_teacher(data, teacher, "fake", CacheFormat(K, "float16", V))


def libraries(monkeypatch, pieces, model=None, **config):
    """Stand-ins for torch and transformers."""
    from jaxlm.distillation import teachers

    loaded = []

    def from_pretrained(name, **options):
        loaded.append(options)
        fake = model or FakeModel()
        fake.eval, fake.config = lambda: None, SimpleNamespace(_commit_hash="c0ffee")
        return fake

    settings = SimpleNamespace(max_position_embeddings=128, vocab_size=len(pieces), **config)
    settings.get_text_config = lambda: settings
    tokenizer = SimpleNamespace(get_vocab=lambda: {piece: i for i, piece in pieces.items()})
    torch = SimpleNamespace(
        **{name: getattr(fake_torch, name) for name in dir(fake_torch) if name[0] != "_"},
        bfloat16="bf16",
        cuda=SimpleNamespace(is_available=lambda: False),
    )
    transformers = SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=lambda name, revision: settings),
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, revision: tokenizer),
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=from_pretrained),
        BitsAndBytesConfig=lambda **options: options,
    )
    modules = {"torch": torch, "transformers": transformers}
    monkeypatch.setattr(teachers, "import_library", modules.__getitem__)
    return loaded


@pytest.fixture
def text_data(tmp_path):
    tokenizer = train_tokenizer(["the cat sat on the mat " * 50], 264)
    with ShardWriter(
        tmp_path / "text",
        vocabulary_size=264,
        end_id=tokenizer.end_id,
        end_token=tokenizer.end_token,
        tokenizer=(tokenizer.file_name, tokenizer.content),
    ) as writer:
        for split in ("train", "validation"):
            writer.add(split, tokenizer.encode(["the cat sat on the mat"])[0])
    return DataDirectory(tmp_path / "text"), tokenizer.pieces()


LOADING = {
    "revision": None,
    "dtype": "bfloat16",
    "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "device_map": None,
    "context": DocumentContext(64, 8),
    "k": K,
    "batch_rows": 1,
    "chunk_tokens": 8,
}


def test_a_hugging_face_teacher_is_loaded_as_asked_for(text_data, monkeypatch):
    data, pieces = text_data
    loaded = libraries(monkeypatch, {**pieces, 264: "<pad>"})  # ids beyond the data's may be
    teacher = load_hugging_face("org/name", data, **LOADING)
    assert loaded == [
        {"revision": None, "dtype": "bf16", "quantization_config": LOADING["quantization"]}
    ]
    assert teacher.identity["revision"] == "c0ffee"
    assert teacher.vocabulary is not None
    with pytest.raises(UserError, match=r"length 129: org/name reads at most 128 tokens"):
        load_hugging_face("org/name", data, **{**LOADING, "context": DocumentContext(129, 0)})


def test_another_vocabulary_is_refused_naming_both_fingerprints(text_data, monkeypatch):
    data, pieces = text_data
    libraries(monkeypatch, {**pieces, 17: "other"})
    with pytest.raises(UserError) as error:
        load_hugging_face("org/name", data, **LOADING)
    message = str(error.value)
    assert "\n" not in message
    assert f"id 17 is {pieces[17]!r} here and 'other' there" in message
    fingerprints = [word.strip("(,") for word in message.split() if word.startswith("(")]
    assert len(set(fingerprints)) == 2
    assert all(len(f) == 16 for f in fingerprints)


def test_a_missing_library_is_one_line(text_data, monkeypatch):
    from jaxlm.distillation import teachers

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(teachers.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"^a teacher of Hugging Face needs torch.*jaxlm\[hf\]'$"):
        load_hugging_face("org/name", text_data[0], **LOADING)


# ---------------------------------------------------------------- plans


def test_a_plan_of_32_billion_parameters_and_200_million_tokens():
    """By hand: 2 x 32e9 x 200e6 = 1.28e19 FLOP; 200e6 x 258 bytes = 51.6 GB; 64, 32 and 18 GB."""
    size = size_of_hugging_face("llm", None, "bfloat16", None, 32_000_000_000)
    form = CacheFormat(32, "float32", 99_574)
    plan = CachePlan(size, DEVICES["rtx3090"], form, 200_000_000, 200_000_000, 408_000_000)
    assert plan.flops == pytest.approx(1.28e19)
    assert plan.disk == 51_600_000_000
    assert plan.days(1.0) == pytest.approx(1.28e19 / 71e12 / 86_400, rel=0.01)
    assert [round(x / 1e9) for x in size.memory.values()] == [64, 32, 18]
    assert [plan.form_fits(f) for f in size.memory] == [False, False, True]
    assert not plan.fits
    quantised = size_of_hugging_face("llm", None, "bfloat16", {"load_in_4bit": True}, 32 * 10**9)
    assert dataclasses.replace(plan, teacher=quantised).fits


@pytest.mark.parametrize(("weights", "each"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_a_plan_counts_logits_in_the_type_that_they_have(weights, each):
    teacher = TeacherConfig(hf="llm", weights=weights, length=1000, batch_rows=3)
    size = size_of_hugging_face("llm", None, weights, None, 32 * 10**9)
    assert logits_bytes(teacher, size, 64) == each * 3 * 1000 * 64
    # Padding beyond the data's vocabulary is there too.
    padded = dataclasses.replace(size, vocabulary=80)
    assert logits_bytes(teacher, padded, 64) == each * 3 * 1000 * 80


def test_a_plan_of_a_run_counts_its_depth():
    config = Config(model=tiny_model(param_dtype="bfloat16"))
    shallow, deep = (size_of_run(config, depth, PackedContext(8)) for depth in (1, 11))
    assert shallow.memory == {"bfloat16": 2 * shallow.parameters}
    layers, injection = 2 * 2 * (4 * 32 * 32 + 3 * 32 * 64), 2 * 2 * 32 * 32
    attention = 2 * 2 * 2 * 32 * 4.5
    assert deep.flops - shallow.flops == pytest.approx(10 * (layers + injection + attention))


def test_the_script_plans_without_loading(tmp_path, data):
    command = [
        sys.executable,
        str(ROOT / "scripts/cache_teacher.py"),
        "--data",
        str(data.directory),
    ]
    plan = ["--hf", "org/name-32b", "--plan", "--parameters", "32e9", "--k", "8"]
    result = subprocess.run([*command, *plan], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "does not fit" in result.stdout
    assert "teacher-name-32b: 157 records to make" in result.stdout.replace("\n", "")
    assert "34 bytes a token" in result.stdout
    assert [p.name for p in data.directory.iterdir() if p.name.startswith("teacher")] == []
    result = subprocess.run(
        [*command, *plan, "--update", "3"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "error: --update does not go with --hf" in result.stderr
