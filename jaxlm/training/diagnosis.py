"""What a person who read the log would notice, said once and with its likely causes.

Each finding is recognised from records alone, so that a run that was interrupted finds the same as
one that was not; only findings about speed depend on the clock.
"""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from jaxlm.config import Config
from jaxlm.models.flops import flops_per_token

Kind = Literal[
    "loss_flat",
    "loss_above_uniform",
    "gradient_zero",
    "core_unchanged",
    "always_clipped",
    "many_skipped",
    "empty_windows",
    "train_and_validation_part",
    "throughput_falls",
    "data_wait",
]

# Updates that averages are over.
WINDOW = 100
# loss_flat: a fall since the first updates below this share of ln(vocabulary); and so many updates
# after the warm-up, a mean loss that has never been that much below the unigram cross-entropy. A
# model whose output ignores its input reaches that; one that learns is below it long before.
FLAT_SHARE, UNIGRAM_UPDATES = 0.02, 500
# loss_above_uniform: nats above ln(vocabulary).
ABOVE_NATS = 0.1
# gradient_zero, core_unchanged, empty_windows: updates in a row.
ZERO_UPDATES = 5
# many_skipped, empty_windows: share of the last WINDOW updates.
SKIPPED_SHARE = 0.05
# train_and_validation_part: nats that validation has risen by since it was lowest, while training
# has fallen.
PARTING_NATS = 0.1
# throughput_falls: below this share of the best median; data_wait: above this share of the time.
SLOW_SHARE, WAIT_SHARE = 0.7, 0.05

CAUSES: dict[Kind, str] = {
    "loss_flat": (
        "a learning rate far too low or too high (compare update_norm with the weights), targets "
        "that have nothing to do with the inputs (inspect_data.py --samples), or a model whose "
        "output does not depend on its input (preflight.py)"
    ),
    "loss_above_uniform": (
        "a learning rate too high (look for a jump in grad_norm), too short a warm-up, or a wrong "
        "tokenizer or vocabulary"
    ),
    "gradient_zero": (
        "weights that no longer reach the loss, or gradients below the smallest number of a 16-bit "
        "type; preflight.py names the parameters"
    ),
    "core_unchanged": (
        "a core whose weights do not reach the loss or get no gradient (preflight.py names the "
        "parameters), or changes below the smallest step of its 16-bit weights; without learning "
        "more depth gains nothing (depth_gain in monitors.jsonl)"
    ),
    "always_clipped": (
        "optim.max_norm is below the usual norm, so that every update has the same length and the "
        "learning rate means something else than it says; raise max_norm or lower the rate"
    ),
    "many_skipped": (
        "a learning rate too high, or single rows of broken data (replay.py shows where numbers "
        "stop being finite)"
    ),
    "empty_windows": (
        "documents of a single token, which have nothing to predict (inspect_data.py --samples); "
        "such a window changes nothing but takes its time"
    ),
    "train_and_validation_part": (
        "data seen several times (data.epochs, duplicates), or validation documents of another "
        "kind than the training documents"
    ),
    "throughput_falls": (
        "another process on the GPU, heat (nvidia-smi -q -d PERFORMANCE), host memory that is "
        "being swapped, or a slower disk; see data_wait_fraction in metrics.jsonl"
    ),
    "data_wait": (
        "a slow or busy disk, or too few prefetched windows (data.prefetch); a network or Windows "
        "drive under WSL2 is slow: copy the data to the Linux file system"
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was noticed."""

    # The update whose record showed it; of a validation pass, the last update before it.
    update: int
    kind: Kind
    # Figures, and likely causes in order.
    text: str

    def line(self) -> str:
        """One line for the terminal."""
        return f"Noticed at update {self.update}: {self.text}"


class Diagnosis:
    """Reads records in order and names each kind of finding once.

    Args:
        config: of the run, with its vocabulary size.
        named: kinds that the run has named before.
        unigram: cross-entropy of knowing only how common each token is; None where it is unknown.
    """

    def __init__(self, config: Config, named: Iterable[str] = (), unigram: float | None = None):
        self._config, self._unigram = config, unigram
        self._uniform = math.log(config.model.vocabulary)
        self._begin = config.optim.warmup_updates + WINDOW  # nothing is judged before
        self._unigram_from = config.optim.warmup_updates + UNIGRAM_UPDATES
        self._named = set(named)
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._tokens = 0  # of all records so far
        self._first_losses: list[float] = []
        self._lowest_mean = math.inf  # of training losses, over WINDOW updates
        self._best_speed = 0.0
        # The lowest validation loss, and the mean training loss at that time.
        self._lowest = (math.inf, math.inf)

    def read_update(self, record: dict[str, Any]) -> list[Finding]:
        """What the record of an update brings to notice."""
        # Without target tokens nothing is learnt or skipped, and the loss of 0 says nothing.
        empty = record["tokens"] == self._tokens
        self._tokens = record["tokens"]
        self._recent.append({**record, "empty": empty})
        loss = record["cross_entropy"]  # the loss itself may be that to a teacher
        if not empty and loss is not None and len(self._first_losses) < ZERO_UPDATES:
            self._first_losses.append(loss)
        return self._new(record["update"], self._of_updates(record["update"]))

    def read_evaluation(self, record: dict[str, Any]) -> list[Finding]:
        """What the record of a validation pass brings to notice."""
        return self._new(record["update"] - 1, self._of_validation(record))

    def _new(self, update: int, noticed: Iterable[tuple[Kind, str]]) -> list[Finding]:
        found = []
        for kind, figures in noticed:
            if kind not in self._named:
                self._named.add(kind)
                found.append(Finding(update, kind, f"{figures}. Likely: {CAUSES[kind]}"))
        return found

    def _losses(self) -> list[float]:
        return [
            r["cross_entropy"]
            for r in self._recent
            if r["cross_entropy"] is not None and not r["empty"]
        ]

    def _of_updates(self, update: int) -> Iterator[tuple[Kind, str]]:
        recent = self._recent
        last = list(recent)[-ZERO_UPDATES:]
        if len(last) == ZERO_UPDATES and all(r["grad_norm"] == 0 and r["applied"] for r in last):
            yield "gradient_zero", f"the gradient was zero for {ZERO_UPDATES} updates in a row"
        # None in a model without a core. An update that changes nothing at all is another thing.
        unchanged = [r["applied"] and r["core_update_norm"] == 0 and r["update_norm"] for r in last]
        if len(last) == ZERO_UPDATES and all(unchanged):
            yield (
                "core_unchanged",
                f"the core's weights stayed the same for {ZERO_UPDATES} updates in a row, while "
                f"others changed (by a norm of {last[-1]['update_norm']:.3g})",
            )
        empty = sum(r["empty"] for r in recent)
        in_a_row = len(last) == ZERO_UPDATES and all(r["empty"] for r in last)
        if in_a_row or empty > SKIPPED_SHARE * WINDOW:
            yield (
                "empty_windows",
                f"{empty} of the last {len(recent)} windows held no target token",
            )
        if len(recent) < WINDOW:
            return
        skipped = sum(not r["applied"] and not r["empty"] for r in recent) / WINDOW
        if skipped > SKIPPED_SHARE:
            yield "many_skipped", f"{skipped:.0%} of the last {WINDOW} updates were skipped"
        wait = statistics.median(r["data_wait_fraction"] for r in recent)
        if wait > WAIT_SHARE:
            yield "data_wait", f"training waits for data {wait:.0%} of the time"
        yield from self._of_speed()
        if update < self._begin:
            return
        losses = self._losses()
        if losses:
            yield from self._of_losses(update, statistics.fmean(losses))
        limit = self._config.optim.max_norm
        norms = [r["grad_norm"] for r in recent if r["grad_norm"] is not None]
        clipping = self._config.optim.clip in ("global", "two_pass", "previous_norm")
        if clipping and len(norms) == WINDOW and min(norms) > limit:
            yield (
                "always_clipped",
                f"the gradient norm was above optim.max_norm ({limit:g}) in all of the last "
                f"{WINDOW} updates, {statistics.median(norms):.3g} in the median",
            )

    def _of_losses(self, update: int, mean: float) -> Iterator[tuple[Kind, str]]:
        if mean > self._uniform + ABOVE_NATS:
            yield (
                "loss_above_uniform",
                f"the mean loss of the last {WINDOW} updates is {mean:.3f}, above the "
                f"{self._uniform:.3f} of guessing all {self._config.model.vocabulary} tokens alike",
            )
            return
        self._lowest_mean = min(self._lowest_mean, mean)
        first = statistics.fmean(self._first_losses) if self._first_losses else math.nan
        if first - self._lowest_mean < FLAT_SHARE * self._uniform:
            yield (
                "loss_flat",
                f"the mean loss of the last {WINDOW} updates is {mean:.3f}, {first:.3f} in the "
                f"first {ZERO_UPDATES}: it does not fall",
            )
        elif (
            self._unigram is not None
            and update >= self._unigram_from
            and self._lowest_mean > self._unigram - FLAT_SHARE * self._uniform
        ):
            yield (
                "loss_flat",
                f"the mean loss of the last {WINDOW} updates is {mean:.3f}, where knowing only how "
                f"common each token is gives {self._unigram:.3f}: it does not fall below",
            )

    def _of_speed(self) -> Iterator[tuple[Kind, str]]:
        # By operations, because deep updates take longer without anything being wrong.
        speeds = [
            r["tokens_per_second"] * self._flops(r["depth"], r["backprop_depth"])
            for r in self._recent
            if not r["empty"]
        ]
        if len(speeds) < WINDOW // 2:
            return
        speed = statistics.median(speeds)
        if speed < SLOW_SHARE * self._best_speed:
            yield (
                "throughput_falls",
                f"the last {WINDOW} updates ran at {speed / self._best_speed:.0%} of the best "
                f"speed so far",
            )
        self._best_speed = max(self._best_speed, speed)

    def _flops(self, depth: int | None, backprop_depth: int | None) -> float:
        attended = (self._config.data.sequence_length + 1) / 2
        model = self._config.model
        return flops_per_token(model, attended, depth or 0, backprop_depth or 0).executed

    def _of_validation(self, record: dict[str, Any]) -> Iterator[tuple[Kind, str]]:
        losses, validation = self._losses(), record["cross_entropy"]
        if len(losses) < WINDOW // 2 or validation is None:
            return
        training = statistics.fmean(losses)
        lowest, then = self._lowest
        if validation > lowest + PARTING_NATS and training < then:
            yield (
                "train_and_validation_part",
                f"the validation loss is {validation:.3f}, up from {lowest:.3f}, while training "
                f"went from {then:.3f} to {training:.3f}",
            )
        self._lowest = min(self._lowest, (validation, training))
