"""The documents: translations follow the English text, and what they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md")])
TRANSLATIONS = sorted([*ROOT.glob("*.ja.md"), *ROOT.glob("docs/*.ja.md")])
# ASCII: in Japanese a path may stand between letters.
PATH = re.compile(
    r"(?<![\w./-])(?:benchmarks|configs|docs|jaxlm|scripts|tests)/[\w./-]*\.(?:md|py|yaml)\b",
    re.ASCII,
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d.,]*")


def original_of(translation: Path) -> Path:
    return translation.with_name(translation.name.replace(".ja.md", ".md"))


def split(text: str) -> tuple[list[str], list[str]]:
    """Lines outside of fenced code, and those inside with their fences."""
    prose: list[str] = []
    code: list[str] = []
    inside = False
    for line in text.splitlines():
        fence = line.startswith("```")
        (code if inside or fence else prose).append(line)
        inside ^= fence
    assert not inside, "a fence is not closed"
    return prose, code


def outline(path: Path) -> dict[str, list]:
    """What a translation has in common with its original."""
    prose, code = split(path.read_text(encoding="utf-8"))
    return {
        "levels of headings": [m[0] for line in prose if (m := re.match(r"#+(?= )", line))],
        # Comments may be translated.
        "code": [re.sub(r"(^|\s)\s*#.*", "", line).rstrip() for line in code],
        "numbers in rows of tables": [
            NUMBER.findall(line) for line in prose if line.startswith("|")
        ],
        # Of text that was wrapped within a code span, too.
        "names in the text": sorted(set(re.findall(r"`([^`]+)`", " ".join(prose)))),
    }


def test_there_are_translations():
    assert [path.relative_to(ROOT).as_posix() for path in TRANSLATIONS] == [
        "README.ja.md",
        "docs/study.ja.md",
    ]


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=lambda path: path.name)
def test_a_translation_follows_its_original(translation):
    found, expected = outline(translation), outline(original_of(translation))
    for what in expected:
        assert found[what] == expected[what], f"{translation.name}: {what}"


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=lambda path: path.name)
def test_a_translation_and_its_original_link_each_other(translation):
    original = original_of(translation)
    for path, other in ((translation, original), (original, translation)):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert LINK.findall(first) == [other.name], path.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if link and not (path.parent / link).exists()]
    missing += [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    assert not missing, f"{path.relative_to(ROOT)} names {', '.join(missing)}"
