"""Progress of long work: a bar with time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import rich.console
import rich.progress
import rich.table
from rich.table import Column

T = TypeVar("T")
Advance = Callable[[int, str], None]


def console() -> rich.console.Console:
    """Standard output, for tables and lines that people read."""
    wide = None if sys.stdout.isatty() else 120
    return rich.console.Console(file=sys.stdout, highlight=False, width=wide)


def new_table(*columns: str) -> rich.table.Table:
    """A table whose first column is text and whose others are numbers."""
    table = rich.table.Table()
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


@contextmanager
def progress(
    title: str, total: int, start: int = 0, line_every: int | None = None
) -> Iterator[Advance]:
    """Show how far a piece of work is.

    Args:
        title: what is going on.
        total: units of work in all.
        start: units that were done before (a resumed run).
        line_every: units between plain lines where the output is not a terminal; None prints a
            line about every ten seconds.

    Yields:
        A function (units done since the last call, text to show beside the count).
    """
    if sys.stdout.isatty():
        # On a narrow terminal the text is cut first; count and time left always show.
        fixed: Any = {"no_wrap": True, "overflow": "ignore"}
        count, width = "{task.completed:.0f}/{task.total:.0f}", 2 * len(str(total)) + 1
        columns = [
            rich.progress.TextColumn("{task.description}", table_column=Column(**fixed)),
            rich.progress.TextColumn(count, table_column=Column(**fixed, min_width=width)),
            rich.progress.TimeRemainingColumn(table_column=Column(**fixed, min_width=7)),
            rich.progress.BarColumn(bar_width=12, table_column=Column(min_width=12)),
            rich.progress.TextColumn(
                "{task.fields[text]}", table_column=Column(no_wrap=True, overflow="crop", ratio=1)
            ),
        ]
        with rich.progress.Progress(*columns, console=console()) as bar:
            task = bar.add_task(title, total=total, completed=start, text="")
            yield lambda units, text: bar.update(task, advance=units, text=text)
        return

    done, began, last_line = start, time.monotonic(), time.monotonic()

    def advance(units: int, text: str) -> None:
        nonlocal done, last_line
        before, done = done, done + units
        now = time.monotonic()
        if line_every is None:
            due = now - last_line >= 10.0
        else:
            due = done // line_every > before // line_every
        if due or done >= total:
            last_line = now
            left = (now - began) / max(done - start, 1) * (total - done)
            print(f"{title} {done}/{total}  {text}  left {_duration(left)}", flush=True)

    yield advance


def tracked(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """Yield the items, showing progress by one unit each."""
    with progress(title, total) as advance:
        for item in items:
            yield item
            advance(1, "")
