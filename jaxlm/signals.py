"""Signals that end long work in order."""

import contextlib
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
