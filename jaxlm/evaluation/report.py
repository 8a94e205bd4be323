"""What a run leaves for people and programs: report.md, report.json, and pictures."""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from jaxlm.evaluation.evaluate import Evaluation
from jaxlm.files import write_atomically, write_json

_COLUMNS = (
    ("depth", "depth", "{}"),
    ("cross-entropy", "cross_entropy", "{:.4f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("top-1", "top1", "{:.2%}"),
    ("top-5", "top5", "{:.2%}"),
    ("bits/byte", "bits_per_byte", "{:.4f}"),
    ("tok/s", "tokens_per_second", "{:,.0f}"),
    ("target tokens", "target_tokens", "{:,}"),
)


def _cells(evaluation: Evaluation) -> list[str]:
    values = dataclasses.asdict(evaluation)
    return ["-" if values[k] is None else form.format(values[k]) for _, k, form in _COLUMNS]


def evaluation_table(evaluations: Sequence[Evaluation], title: str) -> rich.table.Table:
    """The figures of each depth as a table for the terminal."""
    table = rich.table.Table(title=title)
    for name, _, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for evaluation in evaluations:
        table.add_row(*_cells(evaluation))
    return table


def evaluation_json(
    evaluations: Sequence[Evaluation], unigram: float, update: int, **extra: Any
) -> dict[str, Any]:
    """The figures of each depth as plain values."""
    return {
        "update": update,
        **extra,
        "unigram_cross_entropy": unigram,
        "evaluations": [dataclasses.asdict(evaluation) for evaluation in evaluations],
    }


def _markdown(report: dict[str, Any], evaluations: Sequence[Evaluation], curves: bool) -> str:
    names = [name for name, _, _ in _COLUMNS]
    rows = [names, ["---:"] * len(names), *[_cells(e) for e in evaluations]]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    best = min(evaluations, key=lambda e: (math.isnan(e.cross_entropy), e.cross_entropy))
    gain = report["unigram_cross_entropy"] - best.cross_entropy
    at = "" if best.depth is None else f" at depth {best.depth}"
    picture = "\n![Training and validation loss](curves.png)\n" if curves else ""
    return f"""# Run {report["name"]}

{report["model"]} with {report["parameters"]:,} stored parameters, \
{report["update"]:,} updates, {report["tokens"]:,} target tokens.

Validation, weighted by target tokens:

{table}

Unigram cross-entropy of the validation tokens (knowing only how common each token is in training):
{report["unigram_cross_entropy"]:.4f} nats. The best figure above, {best.cross_entropy:.4f}{at}, \
is {gain:.4f} nats below it.

Updates skipped because a loss or gradient was not finite: {report["nonfinite_updates"]}. \
Windows without a target token: {report["empty_windows"]}.
{_monitors_markdown(report, curves)}{_events_markdown(report)}{picture}"""


def _events_markdown(report: dict[str, Any]) -> str:
    """Where the time went, and what a person should know."""
    text = f"\n{report['goodput_line']}.\n" if "goodput_line" in report else ""
    events = [f"* Update {e['update']:,}: {e['text']}" for e in report.get("events", [])]
    return text + ("\n## Noticed\n\n" + "\n".join(events) + "\n" if events else "")


def _monitors_markdown(report: dict[str, Any], pictures: bool) -> str:
    """The monitors' last figures and every alarm; nothing for a run that was not watched."""
    figures = report.get("monitors")
    if figures is None:
        return ""

    def text(value: Any) -> str:
        values = value if isinstance(value, list) else [value]
        return ", ".join("-" if x is None else f"{x:.4g}" for x in values)

    hidden = ("update", "tokens", "beyond")
    lines = [
        f"\n## Monitors after update {figures['update']:,}",
        "\nFigures with several numbers are by core step, from 1 on.\n",
        "| figure | value |\n| --- | --- |",
        *[f"| {name} | {text(x)} |" for name, x in figures.items() if name not in hidden],
    ]
    if pictures:
        lines.append("\n![What the state does, by update and by core step](monitors.png)")
    lines += [
        f"\n* Alarm {alarm['event']} at update {alarm['update']:,}: {alarm['monitor']} is "
        f"{text(alarm['value'])}, threshold {alarm['threshold']:g}: {alarm['text']}"
        for alarm in report["alarms"]
    ]
    if not report["alarms"]:
        why = report.get("not_judged")
        lines.append("\nNo alarm was raised" + ("." if why is None else f": {why}."))
    return "\n".join(lines) + "\n"


def _draw_curves(
    path: Path,
    metrics: Sequence[dict[str, Any]],
    validation: Sequence[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    unigram: float,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by_depth = [e for e in evaluations if e.depth is not None]
    panels = 3 if len(by_depth) > 1 else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 4.2), layout="constrained")
    left, right = axes[:2]
    tokens = [record["tokens"] for record in metrics]
    left.plot(tokens, [record["cross_entropy"] for record in metrics], lw=0.6, label="training")
    for depth in sorted({r["depth"] for r in validation}, key=lambda d: d or 0):
        points = [r for r in validation if r["depth"] == depth]
        label = "validation" if depth is None else f"validation, depth {depth}"
        left.plot(
            [r["tokens"] for r in points],
            [r["cross_entropy"] for r in points],
            "o-",
            ms=3,
            label=label,
        )
    left.axhline(unigram, color="grey", ls="--", lw=1, label="unigram")
    left.set(xlabel="target tokens", ylabel="cross-entropy (nats per token)", title="Loss")
    left.legend(fontsize=8)
    right.plot(tokens, [r["grad_norm"] for r in metrics], lw=0.6, label="gradient norm")
    right.plot(tokens, [r["update_norm"] for r in metrics], lw=0.6, label="norm of the change")
    right.plot(tokens, [r["learning_rate"] for r in metrics], lw=1.0, label="learning rate")
    right.set(xlabel="target tokens", yscale="log", title="Optimisation")
    right.legend(fontsize=8)
    if panels == 3:
        by_depth.sort(key=lambda e: e.depth or 0)
        depths = [e.depth for e in by_depth]
        axes[2].plot(depths, [e.cross_entropy for e in by_depth], "o-", ms=4)
        axes[2].set_xscale("log", base=2)
        axes[2].set_xticks(depths, [str(depth) for depth in depths])
        axes[2].set(
            xlabel="core steps",
            ylabel="cross-entropy (nats per token)",
            title="Validation by depth",
        )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_monitors(path: Path, records: Sequence[dict[str, Any]], limits: dict[str, Any]) -> None:
    """One panel for each monitor with its threshold, and the last figures by core step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    units = {"depth_gain": "nats", "overthinking": "nats"}
    figure, grid = plt.subplots(2, 5, figsize=(21, 6.5), layout="constrained")
    axes = list(grid.flat)
    updates = [record["update"] for record in records]
    styles = {"1": "o:", "half": "s-.", "mean": "D-", "double": "^--", "quadruple": "v:"}
    names = {"1": "1", "half": "mean / 2", "mean": "mean", "double": "2 x mean"}
    for name, style in styles.items():
        losses = [_plotted(record[f"loss_{name}"]) for record in records]
        axes[0].plot(updates, losses, style, ms=4, lw=1, label=names.get(name, "4 x mean"))
    axes[0].set(xlabel="update", ylabel="cross-entropy (nats per token)", title="Loss by depth")
    axes[0].legend(fontsize=8, title="depth")
    for axis, (name, limit) in zip(axes[1:], limits.items(), strict=False):
        axis.plot(updates, [_plotted(record.get(name)) for record in records], "o-", ms=3, lw=1)
        if limit is not None:
            axis.axhline(limit, color="grey", ls="--", lw=1, label=f"threshold {limit:g}")
            axis.legend(fontsize=8)
        title = name.replace("_", " ").capitalize()
        axis.set(xlabel="update", ylabel=units.get(name, "ratio"), title=title)
    last = records[-1]
    steps = range(1, len(last["state_norm"]) + 1)
    axes[-2].plot(steps, list(map(_plotted, last["state_norm"])), "o-", ms=3, lw=1)
    axes[-2].set(xlabel="core step", ylabel="mean norm", title="State norm, last pass")
    for name, style in (("relative_residual", "o-"), ("state_correlation", "s--")):
        values = list(map(_plotted, last[name]))
        axes[-1].plot(steps, values, style, ms=3, lw=1, label=name.replace("_", " "))
    axes[-1].set(xlabel="core step", ylabel="ratio", title="By step, last pass")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plotted(value: float | None) -> float:
    """Numbers that are not finite leave a gap."""
    return math.nan if value is None else value


def write_report(
    directory: Path,
    report: dict[str, Any],
    evaluations: Sequence[Evaluation],
    metrics: Sequence[dict[str, Any]],
    validation: Sequence[dict[str, Any]],
    monitors: Sequence[dict[str, Any]] = (),
    limits: dict[str, float | None] | None = None,
) -> list[str]:
    """Write report.json, report.md and, with the extra `report` installed, pictures.

    Args:
        directory: the run.
        report: from :func:`evaluation_json`, with `name`, `model`, `parameters`, `tokens`,
            `nonfinite_updates`, `empty_windows`; of a run that was watched, `monitors`,
            `alarms` and `not_judged`, why none could be raised; where known, `goodput_line` and
            `events`.
        evaluations: the final figures of each depth.
        metrics: records of metrics.jsonl.
        validation: records of evaluations.jsonl.
        monitors: records of monitors.jsonl.
        limits: threshold of each monitor.

    Returns:
        The names of the files written.
    """
    curves = importlib.util.find_spec("matplotlib") is not None
    write_json(directory / "report.json", report)
    write_atomically(directory / "report.md", _markdown(report, evaluations, curves))
    if not curves:
        return ["report.md", "report.json"]
    unigram = report["unigram_cross_entropy"]
    _draw_curves(directory / "curves.png", metrics, validation, evaluations, unigram)
    written = ["report.md", "report.json", "curves.png"]
    if monitors and limits:
        _draw_monitors(directory / "monitors.png", monitors, limits)
        written.append("monitors.png")
    return written
