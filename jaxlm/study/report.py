"""stub."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Written:
    lines: list


def write_report(study, journal, problems):
    return Written([])
