"""A line while an update takes far longer than usual, be it slow or stuck."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

# An update that takes so many times the median is worth a line, and how many the median is of.
FACTOR, WINDOW = 20.0, 100
# Fewer updates than these say little, and shorter waits concern nobody.
_AT_LEAST_UPDATES, _AT_LEAST_SECONDS = 10, 1.0


class Watchdog:
    """Watches from a thread of its own, so that an update that never ends is told of as well.

    Args:
        tell: takes the number of the update and the line.
    """

    def __init__(self, tell: Callable[[int, str], None]):
        self._tell = tell
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()
        self._began: tuple[int, float] | None = None  # update under way, and since when
        self._told: int | None = None
        self._waiting_for = "the device"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, update: int) -> None:
        """An update is waited for from now on."""
        with self._lock:
            self._began = (update, time.monotonic())

    def waiting_for(self, what: str) -> None:
        """What the main thread is waiting for, such as data."""
        self._waiting_for = what

    def done(self, seconds: float) -> None:
        """The update has ended, after so many seconds."""
        with self._lock:
            # It may have become too slow and ended since the thread last looked.
            slow = self._slow(time.monotonic())
            self._began = None
            self._seconds.append(seconds)
        if slow is not None:
            self._tell(*slow)

    def pause(self) -> None:
        """Nothing is waited for: a validation pass or a save is under way."""
        with self._lock:
            self._began = None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_AT_LEAST_SECONDS / 2):
            with self._lock:
                slow = self._slow(time.monotonic())
            if slow is not None:
                self._tell(*slow)

    def _slow(self, now: float) -> tuple[int, str] | None:
        if self._began is None or len(self._seconds) < _AT_LEAST_UPDATES:
            return None
        update, since = self._began
        median = statistics.median(self._seconds)
        if update == self._told or now - since < max(FACTOR * median, _AT_LEAST_SECONDS):
            return None
        self._told = update
        return update, (
            f"Watchdog: update {update} has taken {now - since:.1f} s so far, {FACTOR:g} times the "
            f"median ({median:.3g} s) or more; waiting for {self._waiting_for}. If it does not go "
            f"on: is the disk or the GPU still answering (dmesg, nvidia-smi)?"
        )
