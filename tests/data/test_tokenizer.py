import io
import json
import random
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxlm.data.tokenizer import END_OF_TEXT, Tokenizer, read_tokenizer, train_tokenizer
from jaxlm.errors import UserError

SENTENCES = [
    "今日は朝から雨が降っている。",
    "駅まで歩いて十五分かかります。",
    "カレーライスとサラダを注文した。",
    "２０２５年の春、東京で会いましょう！",
    "彼女は窓を開けて、遠くの山を見ていた。",
    "The train to Osaka leaves at nine.",
    "  two spaces, a\ttab and a line\nend ",
    "print(x[0] == {'a': 1})\n    return  x\n",
]

# Text that nothing was trained on, and text that looks like what tokenizers write.
TEXTS = [
    "",
    "a",
    " a",
    "   three in front, two behind  ",
    "lines\n\n\nand\r\ttabs\n",
    "今日は東京で、雨。",
    "魑魅魍魎 😀👩\u200d💻🇯🇵 e\u0301 \u3000全角　空白",
    "ب ا \U0001f9ff\U00010348 \u0378",
    "\u2581x\u2581\u2581 y \u2581",
    "\u2581",
    " \u2581 ",
    "\u00a0\u200b\ufeff\u2585\u0001",
    "Ġ Ċ â ĉ",
    "".join(map(chr, range(1, 0x180))),
]
SPELLED = [
    END_OF_TEXT,
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    "<0x0A>",
    "<0x41>",
    "<|user|>",
    f"a{END_OF_TEXT}b<s></s> <pad>\n<0x0A><unk>",
    "<<s>>",
    "<0x<0x0A>",
    f"{END_OF_TEXT}{END_OF_TEXT}",
    " <s> ",
]


WORDS = "今日 明日 昨日 東京 大阪 駅 山 雨 朝 窓 は が を に で まで 歩いて 見て いた 降る です 。"


def documents(count=60):
    rng = random.Random(0)
    return [SENTENCES[i % 8] + "".join(rng.choices(WORDS.split(), k=12)) for i in range(count)]


def sentencepiece_model(kind="unigram", **settings):
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents()),
        model_writer=content,
        **{
            "vocab_size": 400,
            "hard_vocab_limit": False,
            "model_type": kind,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "control_symbols": ["<pad>"],
            "user_defined_symbols": ["<|user|>"],
            "num_threads": 1,
            "minloglevel": 2,
            **settings,
        },
    )
    return content.getvalue()


def unigram_backend(pieces=(), **settings):
    """A Hugging Face unigram as those that are converted from SentencePiece."""
    control = ["<unk>", "<s>", "</s>", "<pad>", "<|user|>", END_OF_TEXT]
    letters = sorted(set("".join([*SENTENCES, *SPELLED])) - {" "})
    scores = [(piece, 0.0) for piece in (*control, *(f"<0x{b:02X}>" for b in range(256)))]
    scores += [(piece, -3.0) for piece in ("\u2581", *letters)]
    scores += [(piece, -4.0) for piece in ("東京", "\u2581the", "雨が", "\u2581\u2581", *pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.add_special_tokens(control)
    for name, value in settings.items():
        setattr(backend, name, value)
    return backend


def llama_like():
    """Normaliser and decoder of Llama's and llm-jp's tokenizers: a space before every text."""
    space = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return unigram_backend(
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        ),
        decoder=decoders.Sequence([*space, decoders.Strip(" ", 1, 0)]),
        post_processor=processors.TemplateProcessing(
            single="<s> $A </s> </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        ),
    )


def metaspace():
    """A space before texts that begin with none, and words that begin with their space."""
    space = decoders.Metaspace(prepend_scheme="always")
    return unigram_backend(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"),
        decoder=decoders.Sequence([decoders.ByteFallback(), space]),
    )


def saved(tmp_path, content):
    name = "tokenizer.json" if content[:1] == b"{" else "tokenizer.model"
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


def read(tmp_path, made, end_token, begin_token):
    content = made if isinstance(made, bytes) else made.to_str().encode()
    return read_tokenizer(saved(tmp_path, content), end_token, begin_token)


KINDS = {
    "byte-level BPE": lambda path: train_tokenizer(documents(), 300, END_OF_TEXT, "<s>"),
    "unigram": lambda path: train_tokenizer(documents(), 320, END_OF_TEXT, "<s>", "unigram"),
    "SentencePiece unigram": lambda path: read(
        path, sentencepiece_model(add_dummy_prefix=False), "</s>", "<s>"
    ),
    "SentencePiece unigram, space": lambda path: read(
        path, sentencepiece_model(add_dummy_prefix=True), "</s>", "<s>"
    ),
    "SentencePiece BPE, space": lambda path: read(
        path, sentencepiece_model("bpe", add_dummy_prefix=True), "</s>", "<s>"
    ),
    # The end is a piece that SentencePiece finds in text.
    "SentencePiece, end in text": lambda path: read(
        path,
        sentencepiece_model(add_dummy_prefix=False, user_defined_symbols=[END_OF_TEXT]),
        END_OF_TEXT,
        "<s>",
    ),
    "Llama-like": lambda path: read(path, llama_like(), "</s>", "<s>"),
    "Metaspace": lambda path: read(path, metaspace(), END_OF_TEXT, None),
}
PREFIX = {"SentencePiece unigram, space", "SentencePiece BPE, space", "Llama-like", "Metaspace"}
EXACT = [name for name in KINDS if name not in ("Llama-like", "Metaspace")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp("made")) for name, make in KINDS.items()}


def inner(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Ids between the control tokens, of which there is one at each end and none between."""
    assert ids.dtype == np.int64
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    assert ids[: len(begin)].tolist() == begin
    assert ids[-1] == tokenizer.end_id
    text = ids[len(begin) : -1]
    assert not np.isin(text, [*begin, tokenizer.end_id]).any()
    return text


@pytest.mark.parametrize("name", EXACT)
def test_any_text_comes_back_exactly(made, name):
    tokenizer = made[name]
    texts = [*TEXTS, *SPELLED, *SENTENCES]
    lengths = tokenizer.token_bytes()
    assert tokenizer.prefix_bytes == (name in PREFIX)
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        inner(tokenizer, ids)
        assert tokenizer.decode(ids) == text
        prefix = tokenizer.prefix_bytes if text else 0
        assert lengths[ids].sum() - prefix == len(text.encode())
        assert (tokenizer.encode_prompt(text) == ids[:-1]).all()


@pytest.mark.parametrize("name", KINDS)
def test_text_never_becomes_a_control_token(made, name):
    tokenizer = made[name]
    lengths = tokenizer.token_bytes()
    for text, ids in zip(SPELLED, tokenizer.encode(SPELLED), strict=True):
        found = inner(tokenizer, ids)
        # No special token (these have no bytes) and no byte of a newline or an A.
        assert lengths[found].all()
        assert tokenizer.decode(ids) == (text.removeprefix(" ") if name == "Metaspace" else text)
        assert "\n" not in tokenizer.decode(found[:5])


@pytest.mark.parametrize("name", KINDS)
def test_the_saved_copy_is_the_same_tokenizer(made, name, tmp_path):
    tokenizer = made[name]
    assert tokenizer.file_name == ("tokenizer.model" if "Piece" in name else "tokenizer.json")
    path = tmp_path / tokenizer.file_name
    path.write_bytes(tokenizer.content)
    copy = read_tokenizer(path, tokenizer.end_token, tokenizer.begin_token)
    assert copy.content == tokenizer.content
    assert (copy.end_id, copy.begin_id) == (tokenizer.end_id, tokenizer.begin_id)
    assert copy.vocabulary_size == tokenizer.vocabulary_size
    assert (copy.token_bytes() == tokenizer.token_bytes()).all()
    texts = [*TEXTS, *SPELLED, *SENTENCES]
    for a, b in zip(copy.encode(texts), tokenizer.encode(texts), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("name", ["Llama-like", "Metaspace"])
def test_what_a_tokenizer_changes_shows_in_the_bytes(made, name):
    tokenizer = made[name]
    lengths = tokenizer.token_bytes()
    assert tokenizer.prefix_bytes == 1
    changed = []
    texts = [text for text in TEXTS if text]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        same = lengths[ids].sum() - 1 == len(text.encode())
        assert same == (tokenizer.decode(ids) == text), text
        changed += [] if same else [text]
    bars = {"\u2581x\u2581\u2581 y \u2581", "\u2581", " \u2581 "}
    spaced = {" a", "   three in front, two behind  "} if name == "Metaspace" else set()
    assert set(changed) == bars | spaced


def test_extra_white_space_that_a_model_removes_shows_in_the_bytes(tmp_path):
    tokenizer = read(tmp_path, sentencepiece_model(remove_extra_whitespaces=True), "</s>", None)
    lengths = tokenizer.token_bytes()
    for text, same in (("a b", True), (" a", False), ("a  b", False), ("a\n", True)):
        ids = tokenizer.encode([text])[0]
        assert (lengths[ids].sum() - tokenizer.prefix_bytes == len(text)) == same
        assert (tokenizer.decode(ids) == text) == same


def test_bytes_of_tokens_by_hand(tmp_path):
    tokenizer = read(tmp_path, llama_like(), "</s>", "<s>")
    lengths = tokenizer.token_bytes()
    assert lengths.dtype == np.int32
    # Six control tokens, 256 bytes, the space.
    assert lengths[:263].tolist() == [0] * 6 + [1] * 257
    # The last four pieces: 東京, ▁the, 雨が, ▁▁.
    assert lengths[-4:].tolist() == [6, 4, 6, 2]
    found = inner(tokenizer, tokenizer.encode(["雨が\n東京 the"])[0])
    assert lengths[found].tolist() == [1, 6, 1, 6, 4]


def test_a_space_before_text_is_a_prefix_byte(tmp_path):
    backend = tokenizers.Tokenizer.from_buffer(train_tokenizer(documents(), 300).content)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = read(tmp_path, backend, END_OF_TEXT, None)
    assert tokenizer.prefix_bytes == 1
    ids = tokenizer.encode(["雨", " 雨"])
    assert [tokenizer.token_bytes()[i].sum() for i in ids] == [4, 4]


def test_bytes_are_unknown_where_pieces_do_not_add_up(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = read(tmp_path, backend, "</s>", None)
    assert tokenizer.token_bytes() is None
    assert tokenizer.prefix_bytes == 0


def test_ids_above_16_bits(tmp_path):
    entries = ["[UNK]", "</s>", "a", *(f"word{i}" for i in range(99_570)), "Ω"]
    vocabulary = {piece: i for i, piece in enumerate(entries)}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for backend, text in (
        (words, "Ω a Ω"),
        (tokenizers.Tokenizer(models.BPE(vocabulary, [])), "ΩaΩ"),
    ):
        tokenizer = read(tmp_path, backend, "</s>", None)
        assert tokenizer.vocabulary_size == 99_574
        assert tokenizer.encode([text])[0].tolist() == [99_573, 2, 99_573, 1]


@pytest.mark.parametrize("kind", ["merges", "whole words", "WordLevel", "WordPiece"])
def test_a_model_that_can_spell_its_end_token_does_not(tmp_path, kind):
    pieces = ["[UNK]", *"</s>", "</", "s>", "</s>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    model, expected = {
        "merges": (models.BPE(vocabulary, merges), [1, 2, 6]),
        "whole words": (models.BPE(vocabulary, merges[:2], ignore_merges=True), [1, 2, 6]),
        "WordLevel": (models.WordLevel(vocabulary, "[UNK]"), [1, 0]),
        "WordPiece": (models.WordPiece(vocabulary, unk_token="[UNK]"), [1, 0]),
    }[kind]
    tokenizer = read(tmp_path, tokenizers.Tokenizer(model), "</s>", None)
    assert tokenizer.encode(["</s>"])[0].tolist() == [*expected, 7]


def test_begin_and_end_may_be_ordinary_entries(tmp_path):
    backend = tokenizers.Tokenizer.from_buffer(train_tokenizer(documents(), 300).content)
    backend.add_tokens([tokenizers.AddedToken("<doc>", special=False)])
    tokenizer = read(tmp_path, backend, "<doc>", None)
    assert tokenizer.end_id == 300
    text = f"<doc> {END_OF_TEXT}"
    ids = tokenizer.encode([text])[0]
    inner(tokenizer, ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_twice_gives_the_same(kind):
    first, again = (train_tokenizer(documents(), 320, kind=kind).content for _ in range(2))
    assert first == again
    entries = json.loads(first)["model"]["vocab"]
    assert len(entries) == 320


def test_a_trained_unigram_has_its_entries_in_order():
    tokenizer = train_tokenizer(documents(), 320, END_OF_TEXT, "<s>", "unigram")
    entries = [piece for piece, _ in json.loads(tokenizer.content)["model"]["vocab"]]
    assert entries[:4] == [END_OF_TEXT, "<s>", "<unk>", "<0x00>"]
    assert entries[258] == "<0xFF>"
    assert (tokenizer.end_id, tokenizer.begin_id, tokenizer.vocabulary_size) == (0, 1, 320)
    learnt = entries[259:]
    assert len(set(entries)) == 320
    # Half of the learnt pieces at most are single characters, the more frequent ones.
    assert sum(len(piece) == 1 for piece in learnt) <= len(learnt) // 2
    assert "。" in learnt


def test_a_unigram_of_many_characters_has_the_frequent_ones():
    # 100 characters that come once, and few that make up nearly all of the text.
    rare = "".join(map(chr, range(0x5000, 0x5064)))
    texts = [*documents() * 100, rare]
    tokenizer = train_tokenizer(texts, 330, kind="unigram")
    entries = {piece for piece, _ in json.loads(tokenizer.content)["model"]["vocab"]}
    assert not entries & set(rare)
    ids = tokenizer.encode([rare])[0]
    assert len(ids) == 3 * 100 + 1
    assert tokenizer.decode(ids) == rare


def test_bytes_alone_are_a_vocabulary():
    tokenizer = train_tokenizer(["a"], 257)
    assert tokenizer.encode(["雨 a"])[0].shape == (6,)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (["a"], 5000, "prepare.vocabulary_size is 5000, but the text gives only"),
        ([], 5000, "prepare.vocabulary_size is 5000, but the text gives only"),
        (["a"], 256, "prepare.vocabulary_size is 256; 256 bytes and . special tokens need"),
    ],
)
def test_vocabularies_that_cannot_be(kind, texts, size, message):
    with pytest.raises(UserError, match=message) as error:
        train_tokenizer(texts, size, kind=kind)
    assert "\n" not in str(error.value)


def test_files_that_are_no_tokenizer(tmp_path):
    whole = sentencepiece_model()
    contents = {
        "empty.json": b"",
        "other.json": b'{"model_max_length": 7}',
        "binary.json": b"\xff\xfe\x00",
        "cut.json": train_tokenizer(documents(), 300).content[:-99],
        "empty.model": b"",
        "text.model": b"hello, this is no model\n",
        "cut.model": whole[: len(whole) // 2],
        "binary.model": bytes(range(256)),
        "tokenizer.txt": b"{}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name) as error:
            read_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"nowhere\.model: no such tokenizer file"):
        read_tokenizer(tmp_path / "nowhere.model")


def test_tokens_that_a_vocabulary_lacks(tmp_path):
    path = saved(tmp_path, sentencepiece_model())
    with pytest.raises(UserError, match=r"has no token '<\|endoftext\|>'.*<s>, </s>, <pad>"):
        read_tokenizer(path)
    with pytest.raises(UserError, match=r"to begin a document with; set prepare.begin_token"):
        read_tokenizer(path, "</s>", "<bos>")
    with pytest.raises(UserError, match=r"prepare.begin_token and prepare.end_token are both"):
        read_tokenizer(path, "</s>", "</s>")
    path = saved(tmp_path, train_tokenizer(documents(), 300).content)
    with pytest.raises(UserError, match=r"has no token '</s>' to end .*: <\|endoftext\|>"):
        read_tokenizer(path, "</s>")
    with pytest.raises(UserError, match=r"'a' cannot begin or end documents"):
        read_tokenizer(path, "a")


def test_sentencepiece_missing_is_said(tmp_path, monkeypatch):
    path = saved(tmp_path, sentencepiece_model())
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"tokenizer.model: .*pip install 'jaxlm\[data\]'"):
        read_tokenizer(path)


def test_random_text_comes_back(made):
    rng = np.random.default_rng(0)
    alphabet = [*" \n\u2581<>|/s0xA雨東京ab", "<0x41>", "</s>", "  ", "\U0001f600", "\u3099"]
    texts = ["".join(rng.choice(alphabet, rng.integers(1, 40))) for _ in range(300)]
    for name in EXACT:
        tokenizer = made[name]
        lengths = tokenizer.token_bytes()
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            inner(tokenizer, ids)
            assert tokenizer.decode(ids) == text, name
            assert lengths[ids].sum() - tokenizer.prefix_bytes == len(text.encode()), name
