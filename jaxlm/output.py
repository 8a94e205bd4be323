"""Standard output and error that end no work."""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any


class _Lasting(io.FileIO):
    """A file that takes everything, also when nobody reads any more or its disk is full."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or remember why it was not possible."""
        try:
            written = super().write(data)
            while written is None:  # a reader that is slow, of a stream that does not wait for it
                select.select([], [self], [])
                written = super().write(data)
            return written
        except OSError as error:
            self.lost = error
            return len(data)


def lasting_output() -> Callable[[], OSError | None]:
    """From here on, standard output and error end no work that prints to them.

    A terminal is closed, `tee` dies of the same Ctrl-C, the disk of a log fills up: none of it is a
    reason to lose the updates since the last checkpoint.

    Returns:
        A function that says why part of the output was lost; None where nothing was, and where
        its reader has gone.
    """
    files: list[_Lasting] = []

    def lasting(stream: Any, descriptor: int) -> Any:
        if stream is None:  # closed before the start
            nothing = os.open(os.devnull, os.O_WRONLY)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            return os.fdopen(descriptor, "w", closefd=False)
        stream.flush()
        files.append(_Lasting(stream.fileno()))
        return io.TextIOWrapper(
            io.BufferedWriter(files[-1]),
            encoding=stream.encoding,
            errors=stream.errors,
            # Without the second, `python -u` would wait for the buffer to be full.
            line_buffering=stream.line_buffering or stream.write_through,
        )

    def lost() -> OSError | None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gone = (errno.EPIPE, errno.EIO)
        return next((f.lost for f in files if f.lost and f.lost.errno not in gone), None)

    sys.stdout, sys.stderr = lasting(sys.stdout, 1), lasting(sys.stderr, 2)
    return lost
