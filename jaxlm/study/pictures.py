"""Pictures of a study, as SVG. Models differ in line style and marker, so that no colour is needed.

Needs matplotlib (the extra `report`).
"""

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Okabe and Ito's colours, which people with any colour vision tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Series:
    """A line with its points."""

    label: str
    x: np.ndarray
    y: np.ndarray
    # Equal numbers share the line style and the colour: those of a model.
    group: int
    # Equal numbers share the marker: those of a depth.
    member: int = 0


def available() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def line_chart(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
    ticks: Sequence[int] | None = None,
    level: tuple[str, float] | None = None,
) -> bytes:
    """Lines over a common axis.

    Args:
        series: the lines.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        logarithmic: the horizontal axis is.
        ticks: where the horizontal axis has its ticks.
        level: name and height of a horizontal line.
    """
    import matplotlib

    settings: Any = {"svg.hashsalt": "jaxlm", "font.size": 10, "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

        figure = Figure(figsize=(4.8, 3.8), layout="constrained")
        axes = figure.subplots()
        for line in series:
            axes.plot(
                line.x,
                line.y,
                linestyle=_LINES[line.group % len(_LINES)],
                color=_COLOURS[line.group % len(_COLOURS)],
                marker=_MARKERS[(line.group + 2 * line.member) % len(_MARKERS)],
                fillstyle="full" if line.member % 2 == 0 else "none",
                markersize=5,
                linewidth=1.4,
                label=line.label,
            )
        if level is not None:
            axes.axhline(level[1], color="#777777", linewidth=0.8, linestyle=(0, (1, 4)))
            axes.annotate(level[0], (0.02, level[1]), xycoords=("axes fraction", "data"),
                          fontsize=8, color="#555555", va="bottom")  # fmt: skip
        if logarithmic:
            axes.set_xscale("log", base=2 if ticks else 10)
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1.2T
        if ticks is not None:
            axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
            axes.minorticks_off()
        if max((abs(value) for line in series for value in line.y), default=0) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=x, ylabel=y)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, framealpha=0.8)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
