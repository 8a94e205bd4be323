"""A report as paragraphs, tables and pictures; as Markdown, and as one HTML file without a network.

Everything that comes from files, names included, passes through here as text and is escaped.
"""

import base64
import html
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table; cells are text."""

    header: list[str]
    rows: list[list[str]]
    # First columns that are text and aligned left; the others are numbers.
    text_columns: int = 1


@dataclass(frozen=True)
class Picture:
    """A picture, and what it shows in words."""

    svg: bytes
    title: str


@dataclass(frozen=True)
class Listing:
    """Text that is shown as it is, folded away under a title."""

    title: str
    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: list[str]


Block = str | Table | Picture | Listing | Bullets


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
       max-width: 72rem; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.2rem;
     border-bottom: 1px solid #bbb; }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .875rem;
          font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; } th { border-bottom: 2px solid #888; }
th.text, td.text { text-align: left; } .verdict li { margin: .5rem 0; font-weight: 600; }
figure { margin: 1rem 0; display: inline-block; width: 100%; max-width: 34rem;
         vertical-align: top; }
figure img { width: 100%; height: auto; } figcaption { font-size: .875rem; color: #444; }
pre { overflow-x: auto; background: #f4f4f4; padding: .6rem; font-size: .8rem; }
summary { cursor: pointer; } li { overflow-wrap: anywhere; }
"""


def as_html(title: str, sections: list[Section]) -> str:
    """One self-contained file."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    for section in sections:
        name = re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")
        parts.append(f'<section class="{name}"><h2>{html.escape(section.title)}</h2>')
        parts += [_html_block(block) for block in section.blocks]
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>", ""])


def _html_block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Listing):
        return (
            f"<details><summary>{html.escape(block.title)}</summary>"
            f"<pre>{html.escape(block.text)}</pre></details>"
        )
    if isinstance(block, Picture):
        data = base64.b64encode(block.svg).decode("ascii")
        title = html.escape(block.title)
        return (
            f'<figure><img alt="{title}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{title}</figcaption></figure>"
        )

    def row(cells: list[str], tag: str) -> str:
        marked = [
            f"<{tag}{' class=text' if i < block.text_columns else ''}>{html.escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(marked)}</tr>"

    rows = "\n".join(row(cells, "td") for cells in block.rows)
    return (
        f'<div class="scroll"><table><thead>{row(block.header, "th")}</thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def as_markdown(title: str, sections: list[Section]) -> str:
    """The same without pictures."""
    parts = [f"# {_markdown(title)}"]
    for section in sections:
        parts.append(f"## {_markdown(section.title)}")
        parts += [_markdown_block(b) for b in section.blocks if not isinstance(b, Picture)]
        if any(isinstance(block, Picture) for block in section.blocks):
            parts.append("Pictures: report.html.")
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _markdown_block(block: Block) -> str:
    if isinstance(block, str):
        return _markdown(block)
    if isinstance(block, Bullets):
        return "\n".join(f"* {_markdown(item)}" for item in block.items)
    if isinstance(block, Listing):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return f"{_markdown(block.title)}:\n\n{fence}\n{block.text.rstrip()}\n{fence}"
    assert isinstance(block, Table)
    align = [":---" if i < block.text_columns else "---:" for i in range(len(block.header))]
    rows = [[_markdown(cell) for cell in row] for row in (block.header, *block.rows)]
    lines = [rows[0], align, *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
