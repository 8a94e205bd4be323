"""What a check finds, and what that says about causes: shared by all checks of preflight.py."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from jaxlm.files import finite

Context = TypeVar("Context")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that would explain a failure."""

    # The same for the same cause, whichever check names it.
    key: str
    # What is wrong, with the figures that speak for it.
    text: str
    # How strongly they do, from 0 to 1: 1 is proof, 0.1 a guess without any figure.
    weight: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What a check found."""

    # Name of the check.
    name: str
    # None: it could not be made, and `figure` says why.
    passed: bool | None
    # What was measured, and what it is compared with.
    figure: str
    threshold: str = ""
    # Of a failure: likely causes, the likeliest first, and what to look at first.
    causes: tuple[Cause, ...] = ()
    look_at: str = ""
    # The figures as plain values, for programs; None where not finite.
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


def result(
    name: str,
    passed: bool,
    figure: str,
    threshold: str = "",
    causes: Iterable[Cause] = (),
    look_at: str = "",
    **numbers: Any,
) -> Result:
    """A result with its causes in the order of their weight; a pass has none."""
    ordered = tuple(sorted(causes, key=lambda cause: -cause.weight))
    numbers = {key: finite(value) for key, value in numbers.items()}
    if passed:
        return Result(name, True, figure, threshold, numbers=numbers)
    return Result(name, False, figure, threshold, ordered, look_at, numbers)


def skipped(name: str, why: str) -> Result:
    """A check that could not be made."""
    return Result(name, None, why)


@dataclasses.dataclass(frozen=True)
class Check(Generic[Context]):
    """A check by its name: `run` measures and judges."""

    name: str
    run: Callable[[Context], Result]


def ranked(results: Iterable[Result]) -> list[tuple[Cause, list[str]]]:
    """The causes of all failures together, the likeliest first, each with the checks naming it.

    One defect makes several checks fail, and each names what it can see: a cause counts by the
    strongest evidence that any check has for it, then by how many name it.
    """
    best: dict[str, Cause] = {}
    named: dict[str, list[str]] = {}
    for one in results:
        for cause in one.causes:
            if cause.key not in best or cause.weight > best[cause.key].weight:
                best[cause.key] = cause
            if one.name not in named.setdefault(cause.key, []):
                named[cause.key].append(one.name)
    keys = sorted(best, key=lambda key: (-best[key].weight, -len(named[key])))
    return [(best[key], named[key]) for key in keys]


def listed(names: Iterable[str], most: int = 3) -> str:
    """Names in one line, the first few of many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
