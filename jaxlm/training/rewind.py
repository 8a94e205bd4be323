"""Going back to a checkpoint after the loss has jumped up and stayed there.

Spikes that do not pass by themselves are answered as large runs do it: go back to a checkpoint of
before, and pass over the data that was being read (Chowdhery et al. 2022, PaLM, section 5.1), or
read it again at a lower learning rate. What was done is a line of rewinds.jsonl, and all that
follows from it is a function of these lines and of the update, so that interruptions change
nothing.
"""

import dataclasses
import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from jaxlm.config import RewindConfig
from jaxlm.errors import UserError
from jaxlm.files import append_line

REWINDS = "rewinds.jsonl"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """One return to a checkpoint."""

    # Update whose record made the spike, and where it began.
    update: int
    since: int
    # Checkpoint that the run went back to: the next update made.
    to: int
    # Windows of data that are passed over from `to` on.
    skipped_windows: int
    # Factor of the learning rate for so many updates from `to` on.
    rate_factor: float
    rate_updates: int
    why: str


class SpikeError(Exception):
    """The loss has jumped up, and has stayed there for long enough to go back."""

    def __init__(self, update: int, since: int, why: str):
        super().__init__(why)
        self.update, self.since, self.why = update, since, why


class SpikeWatch:
    """Tells a spike that lasts from one that passes."""

    def __init__(self, settings: RewindConfig):
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._beyond = 0

    def read(self, record: dict[str, Any]) -> SpikeError | None:
        """Take the record of an update; says what is wrong once a spike has lasted.

        A loss beyond the limit is no part of the median that later ones are compared with.
        """
        settings, loss = self._settings, record["loss"]
        limit = spike_limit(list(self._losses), settings.window, settings.deviations)
        if loss is None or (limit is not None and loss > limit):
            self._beyond += 1
        else:
            self._beyond = 0
            self._losses.append(loss)
        if self._beyond < settings.patience:
            return None
        update = record["update"]
        since = update - self._beyond + 1
        figures = "not finite" if loss is None else f"{loss:.4f}"
        above = (
            "" if limit is None else f", above {limit:.4f} (the median of before, and deviation)"
        )
        return SpikeError(
            update, since, f"the loss is {figures}{above}, for {self._beyond} updates in a row"
        )


def median_and_deviation(losses: list[float]) -> tuple[float, float]:
    """The median, and the median absolute deviation from it: a few spikes move neither."""
    median = statistics.median(losses)
    return median, statistics.median(abs(x - median) for x in losses)


def spike_limit(losses: list[float], window: int, deviations: float) -> float | None:
    """Median plus deviations times the median absolute deviation; None before there are enough."""
    if len(losses) < window:
        return None
    median, deviation = median_and_deviation(losses)
    return median + deviations * deviation


class Rewinds:
    """All rewinds of a run, and what follows from them.

    Raises:
        UserError: rewinds.jsonl is damaged.
    """

    def __init__(self, directory: Path):
        self._path = directory / REWINDS
        self.made: list[Rewind] = []
        # A line without its end is one that a power failure tore: nothing followed from it yet.
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                self.made.append(Rewind(**json.loads(line)))
            except (ValueError, TypeError):
                raise UserError(
                    f"{self._path}:{number}: cannot be read as the record of a rewind, by which "
                    f"the order of the data is known; restore the file"
                ) from None

    def answer(
        self, settings: RewindConfig, spike: SpikeError, to: int, updates: int, windows: int
    ) -> Rewind:
        """What to do about a spike.

        Args:
            settings: of the run.
            spike: what happened.
            to: update of the checkpoint to go back to.
            updates: the run's horizon.
            windows: of data that there are.
        """
        # Rewinds to beyond that checkpoint will be no part of the course: what they passed over is
        # passed over with the rest, or comes again.
        start = self.windows_before(to)
        passed_over = self.windows_before(spike.update) - spike.update - (start - to)
        skip = 0
        if settings.response == "skip_data":
            skip = self.windows_before(spike.update) + 1 - start
        why = spike.why
        if skip > windows - (start + updates - to):
            why += (
                f"; there are no {skip} windows of data to spare, so that the rate is lowered "
                f"instead"
            )
            if passed_over:
                why += f", and {passed_over} windows that were passed over come again"
            skip = 0
        lower = skip == 0
        return Rewind(
            update=spike.update,
            since=spike.since,
            to=to,
            skipped_windows=skip,
            rate_factor=settings.rate_factor if lower else 1.0,
            rate_updates=settings.rate_updates if lower else 0,
            why=why,
        )

    def append(self, rewind: Rewind) -> None:
        """Make a rewind part of the run, for good."""
        append_line(self._path, json.dumps(dataclasses.asdict(rewind)))
        self.made.append(rewind)

    def _of_this_course(self) -> list[Rewind]:
        """Without those that a later rewind went back beyond."""
        return [
            rewind
            for number, rewind in enumerate(self.made)
            if all(later.to >= rewind.to for later in self.made[number + 1 :])
        ]

    def windows_before(self, update: int) -> int:
        """Windows of data that lie before an update: those that were read or passed over."""
        return update + sum(r.skipped_windows for r in self._of_this_course() if r.to <= update)

    def passed_over(self) -> int:
        """Windows of data that the run does not read, in all."""
        return sum(rewind.skipped_windows for rewind in self._of_this_course())

    def pass_over(self, iterator: Any, update: int) -> None:
        """Let a data iterator pass over the windows right before an update, where there are any.

        Also for who starts before them, such as a run that falls back to an older checkpoint.
        """
        window = self.windows_before(update)
        if window != self.windows_before(update - 1) + 1:
            iterator.set_state({"next_index": window})

    def rate(self, update: int) -> float:
        """Factor of the learning rate at an update."""
        factor = 1.0
        for rewind in self._of_this_course():
            if rewind.to <= update < rewind.to + rewind.rate_updates:
                factor *= rewind.rate_factor
        return factor
