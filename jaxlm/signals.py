"""Signals that end long work in order."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_ending(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the block, call a handler for SIGTERM, SIGINT and SIGHUP; afterwards, as before.

    A SIGHUP that is ignored, as under nohup, stays so: work then outlives its terminal.

    Args:
        handler: as for `signal.signal`: gets the signal's number and the stack frame.
    """
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    numbers = (signal.SIGTERM, signal.SIGINT, *hangup)
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def say(text: str) -> None:
    """Print a line from within a handler.

    Not through `sys.stdout`: a handler may stand in the middle of another print, and the terminal
    may be what has gone.
    """
    shown = "\x1b[?25h" if os.isatty(1) else ""  # the cursor, which a progress bar hides
    with contextlib.suppress(OSError):
        os.write(1, f"{shown}\n{text}\n".encode())
