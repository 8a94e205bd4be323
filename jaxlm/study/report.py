"""The report of a study: report.md, report.html and report.json, after each cycle.

It is made from the journal and the runs' records alone, and says what it cannot say: a look at a
study that is not finished, models that are not equal in what is compared, a verdict that is
withheld.
"""

import dataclasses
import itertools
import json
import math
import re
import statistics
from typing import Any

import numpy as np

from jaxlm.config import to_yaml
from jaxlm.files import size_text, write_atomically, write_json
from jaxlm.study.document import (
    Block,
    Bullets,
    Listing,
    Picture,
    Section,
    Table,
    as_html,
    as_markdown,
)
from jaxlm.study.figures import Axis, Figures, ModelFigures, at_equal, gather
from jaxlm.study.journal import Event, Journal
from jaxlm.study.pictures import Series, available, line_chart
from jaxlm.study.settings import Study, differing, leaves, run_name
from jaxlm.study.verdict import Losses, Verdict, compare_depths
from jaxlm.training.goodput import goodput_line

# Stored parameters within this share of one another count as equal.
_EQUAL_PARAMETERS = 0.02
# Settings of a model that may change while a study is under way, and change its speed.
_OF_SPEED = (
    r".+\.(data\.prefetch|model\.(attention|remat)|loss\.chunk_tokens|evaluation\.batch_rows|"
    r"training\.(micro_batch_rows|micro_batches|block_inputs)|profile\..+)"
)
_AXES: dict[Axis, tuple[str, str]] = {
    "tokens": ("target tokens", "{:,.0f}"),
    "flops": ("training FLOPs", "{:.4g}"),
    "seconds": ("seconds of training", "{:,.0f}"),
}


@dataclasses.dataclass(frozen=True)
class Written:
    """What :func:`write_report` did."""

    # The verdicts, or why there are none, for the terminal.
    lines: list[str]
    # Why there are none; empty where there are.
    withheld: list[str]


def write_report(study: Study, journal: Journal, problems: list[str]) -> Written:
    """Write the report of what every run has behind it.

    Args:
        study: settings.
        journal: what was done.
        problems: why it is not shown that all models saw the same blocks; withholds the verdict.
    """
    figures = gather(study, journal)
    if figures is None:
        return Written([], problems)
    verdicts: dict[str, dict[int, Verdict]] = {}
    withheld = problems or _changed_losses(study, figures)
    if not withheld:
        try:
            verdicts = _verdicts(study, figures)
        except ValueError as error:  # a loss that is not finite
            withheld = [str(error)]
    title = f"Study {study.config.name} after cycle {figures.cycles} of {study.config.cycles}"
    sections = [
        Section("Verdict", _verdict_blocks(study, figures, verdicts, withheld, problems)),
        *([Section("Optimizers", _sweep(study, figures))] if study.sweep else []),
        Section(f"Figures after cycle {figures.cycles}", _figures(study, figures)),
        Section("At equal tokens, compute and time", _equal(study, figures)),
        Section("Curves", _curves(study, figures)),
        Section("Cycle by cycle", _by_cycle(study, figures)),
        Section("What was equal", _what_was_equal(study, journal, figures, problems)),
        Section("What differed", _what_differed(study)),
        *([Section("Teacher", _teacher(study, journal))] if study.teacher else []),
        Section("Alarms, controllers, findings", _alarms(figures)),
        Section("Where the time went", _time(journal, figures)),
        Section("Settings and versions", _settings(study, journal)),
    ]
    directory = study.directory
    write_json(directory / "report.json", _json(study, journal, figures, verdicts, withheld))
    write_atomically(directory / "report.md", as_markdown(title, sections))
    write_atomically(directory / "report.html", as_html(title, sections))
    lines = [f"Report after cycle {figures.cycles}: {directory / 'report.html'}"]
    sentences, shared = _said(verdicts)
    lines += [f"  {line}" for found in sentences for line in found]
    lines += [f"  {remark}" for remark in shared]
    lines += [f"  Verdict withheld: {why}" for why in withheld]
    return Written(lines, withheld)


# ---------------------------------------------------------------- verdict


def _changed_losses(study: Study, figures: Figures) -> list[str]:
    """Files of the documents' losses that are missing, or not what the journal has of them."""
    cycle = figures.cycles
    return [
        f"{study.directory}/evaluations/{run_name(model.name, run.seed)}-cycle-{cycle}.npz: "
        f"missing, or not what was written when the run was evaluated; bring it back"
        for model in figures.models.values()
        for run in model.runs
        if run.points[cycle - 1].sums is None
    ]


def _losses(model: ModelFigures, cycle: int, depth: int | None) -> Losses:
    """What each seed of a model loses on each document of the fixed validation set.

    Raises:
        ValueError: naming the model, where a loss is not finite.
    """
    index, rows, tokens = model.depths.index(depth), [], None
    for run in model.runs:
        path = run.points[cycle - 1].sums
        assert path is not None
        with np.load(path, allow_pickle=False) as arrays:
            rows.append(arrays["validation.loss"][index])
            tokens = arrays["validation.tokens"]
    assert tokens is not None
    try:
        return Losses(np.array(rows, np.float64), tokens.astype(np.int64))
    except ValueError as error:
        raise ValueError(f"{_label(model, depth)}: {error}") from None


def _label(model: ModelFigures, depth: int | None) -> str:
    return model.name if depth is None else f"{model.name} at depth {depth}"


def _candidates(study: Study, figures: Figures) -> tuple[list[ModelFigures], ModelFigures]:
    """The models that are compared with the reference, and the reference.

    Of a sweep, each optimizer's best learning rate.
    """
    if study.sweep:
        best = list(_best_of_sweep(study, figures).values())
        return best[1:], best[0]
    reference = figures.models[study.reference]
    return [m for m in figures.models.values() if m is not reference], reference


def _verdicts(study: Study, figures: Figures) -> dict[str, dict[int, Verdict]]:
    """By model, by depth (0 where it has none): the comparison with the reference.

    Raises:
        ValueError: a loss that is not finite.
    """
    models, reference = _candidates(study, figures)
    cycle = figures.cycles
    baseline = _losses(reference, cycle, reference.mean_depth)
    found = {}
    for model in models:
        pairs = {depth or 0: (_losses(model, cycle, depth), baseline) for depth in model.depths}
        names = (model.name, _label(reference, reference.mean_depth))
        verdicts = compare_depths(pairs, margin=study.config.margin, names=names)
        found[model.name] = {
            depth: dataclasses.replace(
                verdict,
                sentence=(f"Depth {depth}: " if depth else "") + verdict.sentence,
            )
            for depth, verdict in verdicts.items()
        }
    return found


def _said(verdicts: dict[str, dict[int, Verdict]]) -> tuple[list[list[str]], list[str]]:
    """What the verdicts say, model by model, and the remarks that belong to all of them."""
    every = [verdict for found in verdicts.values() for verdict in found.values()]
    shared = [r for r in (every[0].remarks if every else ()) if all(r in v.remarks for v in every)]
    sentences = [
        [" ".join((v.sentence, *(r for r in v.remarks if r not in shared))) for v in found.values()]
        for found in verdicts.values()
    ]
    return sentences, shared


def _verdict_blocks(
    study: Study,
    figures: Figures,
    verdicts: dict[str, dict[int, Verdict]],
    withheld: list[str],
    problems: list[str],
) -> list[Block]:
    if withheld:
        why = (
            "it is not shown that all models saw the same blocks"
            if problems
            else "there is nothing to compare"
        )
        return [
            f"Withheld: {why}. The figures below are what the runs reported, and decide nothing.",
            Bullets(withheld),
        ]
    _, reference = _candidates(study, figures)
    blocks: list[Block] = [
        f"Cross-entropy on the fixed validation documents, each model against "
        f"{_label(reference, reference.mean_depth)}."
    ]
    sentences, shared = _said(verdicts)
    blocks += [Bullets(found) for found in sentences]
    blocks += shared
    blocks.append(_how_sure(study, len(verdicts)))
    if study.sweep:
        blocks.append(
            "The learning rates were chosen on these same documents, from as many for each "
            "optimizer; the differences favour whichever profits more from choosing."
        )
    if figures.cycles < study.config.cycles:
        blocks.append(
            f"This is a look at an unfinished study, {figures.cycles} of {study.config.cycles} "
            f"cycles; whoever stops at the first look that pleases is wrong more often."
        )
    return blocks


def _how_sure(study: Study, models: int) -> str:
    """What the intervals are over, and how often statements are false."""
    seeds = len(study.config.seeds)
    separately = "Each model is compared with the reference separately. " if models > 1 else ""
    if seeds == 1:
        return (
            f"Statements of one model at its depths are made together, and intervals are over "
            f"documents alone: how often another seed would reverse a statement is not known. "
            f"{separately}The margin of {study.config.margin:g} nats was set before the study "
            f"began."
        )
    return (
        f"Statements of one model at its depths are made together: the chance that any of them is "
        f"false is about 5 %. {separately}Intervals are over {seeds} seeds and over documents. The "
        f"order of the data was the same for all seeds: what another order would change is not in "
        f"them."
    )


# ---------------------------------------------------------------- tables


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else form.format(value)


def _figures(study: Study, figures: Figures) -> list[Block]:
    cycle = figures.cycles
    rows = []
    for model in figures.models.values():
        for depth in model.depths:
            mean = {
                key: model.mean(cycle, "validation", depth, key)
                for key in ("cross_entropy", "top1", "top5", "bits_per_byte", "tokens_per_second")
            }
            loss = mean["cross_entropy"]
            rows.append(
                [
                    model.name,
                    "-" if depth is None else str(depth),
                    _number(loss, "{:.4f}"),
                    _spread(model, cycle, depth),
                    _number(None if loss is None else math.exp(min(loss, 700)), "{:,.2f}"),
                    _number(mean["top1"], "{:.2%}"),
                    _number(mean["top5"], "{:.2%}"),
                    _number(mean["bits_per_byte"], "{:.4f}"),
                    _number(mean["tokens_per_second"], "{:,.0f}"),
                    f"{model.unrolled(depth):,}",
                    f"{model.inference_flops(depth):.4g}",
                ]
            )
    header = ["model", "depth", "cross-entropy", "between seeds", "perplexity", "top-1", "top-5"]
    header += ["bits/byte", "tok/s", "unrolled parameters", "FLOPs/token"]
    of_models = [
        [
            model.name,
            model.config.model.kind,
            f"{model.stored:,}",
            f"{model.training_flops():.4g}",
            f"{statistics.median(run.training_speed for run in model.runs):,.0f}",
            f"{statistics.fmean(run.data_wait for run in model.runs):.1%}",
            size_text(max(run.peak_memory for run in model.runs)),
            model.runs[0].points[-1].peak_memory_of,
            ", ".join(sorted({device for run in model.runs for device in run.devices})),
        ]
        for model in figures.models.values()
    ]
    seeds = len(study.config.seeds)
    over = "Of one seed" if seeds == 1 else f"Means over {seeds} seeds"
    return [
        f"{over}, weighted by target tokens, in nats per token; tok/s of the forward pass. Knowing "
        f"only how common each token is gives {figures.unigram:.4f} nats per token of the same "
        f"documents.",
        Table(header, rows, 1),
        Table(
            [
                *("model", "kind", "stored parameters", "training FLOPs/token", "training tok/s"),
                *("waiting for data", "peak memory", "of", "device"),
            ],
            of_models,
            2,
        ),
        "FLOPs count multiply-adds as two, causal attention's need, and no recomputation; of "
        "training at the depths that were drawn. Training tok/s is the median update's.",
    ]


def _spread(model: ModelFigures, cycle: int, depth: int | None) -> str:
    losses = [
        evaluation["cross_entropy"]
        for run in model.runs
        if (evaluation := run.points[cycle - 1].evaluation("validation", depth)) is not None
        and evaluation["cross_entropy"] is not None
    ]
    return "-" if len(losses) < 2 else f"±{statistics.stdev(losses):.4f}"


def _equal(study: Study, figures: Figures) -> list[Block]:
    models, reference = _candidates(study, figures)
    at = reference.mean_depth
    blocks: list[Block] = []
    rows = []
    for model in models:
        share = model.stored / reference.stored - 1
        blocks.append(
            f"{model.name} stores {model.stored:,} parameters, {reference.name} "
            f"{reference.stored:,} ({share:+.1%}): "
            + (
                "rows at equal tokens are at equal stored parameters too."
                if abs(share) <= _EQUAL_PARAMETERS
                else "nothing below is at equal stored parameters "
                "(scripts/match.py finds models that are)."
            )
        )
        for depth in model.depths:
            for axis, (name, form) in _AXES.items():
                point = at_equal(model.curve(axis, depth), reference.curve(axis, at))
                one, other = point.losses
                difference = None if one is None or other is None else one - other
                rows.append(
                    [
                        _label(model, depth),
                        name,
                        _number(point.x, form),
                        _number(one, "{:.4f}"),
                        _number(other, "{:.4f}"),
                        _number(difference, "{:+.4f}"),
                    ]
                )
    blocks.append(
        Table(
            ["model", "equal", "at", "its loss", f"loss of {_label(reference, at)}", "difference"],
            rows,
            2,
        )
    )
    blocks.append("Interpolated differences have no interval; the verdict is at equal tokens.")
    runs = [run for model in (*models, reference) for run in model.runs]
    devices = sorted({device for run in runs for device in run.devices})
    if len(devices) > 1:
        blocks.append(f"Seconds are of several devices ({', '.join(devices)}): not comparable.")
    blocks.append(
        "Each row is at the farthest place that both have reached; between the ends of cycles, "
        "losses are interpolated over the logarithm of the axis, before the first they are not "
        "known (-). Below zero the left model is better. Seconds are those of updates: "
        "compilation, evaluation and saving are left out. At equal FLOPs or seconds the model that "
        "costs more is read off before its schedule has ended, without the end of its decay: a "
        "disadvantage of unknown size."
        if figures.cycles == study.config.cycles
        else "Each row is at the farthest place that both have reached so far; see the note in the "
        "report of the last cycle about schedules that have not ended."
    )
    return blocks


def _by_cycle(study: Study, figures: Figures) -> list[Block]:
    sets = list(
        dict.fromkeys(
            name
            for model in figures.models.values()
            for run in model.runs
            for point in run.points
            for name in point.evaluations
        )
    )
    blocks: list[Block] = []
    for name in sets:
        rows = []
        for model in figures.models.values():
            for depth in model.depths:
                losses = [
                    model.mean(cycle, name, depth, "cross_entropy")
                    for cycle in range(1, figures.cycles + 1)
                ]
                rows.append([_label(model, depth), *[_number(x, "{:.4f}") for x in losses]])
        what = {
            "validation": "The fixed validation documents, those of the first cycle:",
            "window": "Validation documents that came with the cycle's own tokens:",
        }
        blocks.append(what.get(name, f"{name} ({study.config.evaluation_data.get(name)}):"))
        header = [f"cycle {cycle}" for cycle in range(1, figures.cycles + 1)]
        blocks.append(Table(["cross-entropy after", *header], rows))
    return blocks


def _what_was_equal(
    study: Study, journal: Journal, figures: Figures, problems: list[str]
) -> list[Block]:
    config = study.config
    rows = []
    for cycle in range(1, figures.cycles + 1):
        events = journal.all("trained", cycle=cycle)
        digests = {event["blocks"] for event in events}
        tokens = {event["tokens"] for event in events}
        rows.append(
            [
                str(cycle),
                ", ".join(f"{count:,}" for count in sorted(tokens)),
                ", ".join(sorted(digest[:16] for digest in digests)),
                "yes" if len(digests) == 1 and len(tokens) == 1 and not problems else "no",
            ]
        )
    prepared = journal.find("prepared", cycle=1)
    assert prepared is not None
    targets = {
        evaluation["target_tokens"]
        for model in figures.models.values()
        for run in model.runs
        for point in run.points
        for evaluation in point.evaluations["validation"]
    }
    seeds = ", ".join(map(str, config.seeds))
    counts = " and ".join(f"{count:,}" for count in sorted(targets))
    return [
        Table(["cycle", "target tokens so far", "SHA-256 of its block ids", "equal"], rows),
        Bullets(
            [
                f"Rows and their order: an update is {study.first.training.window_rows} rows of "
                f"{study.first.data.sequence_length:,} tokens in every model; data.seed "
                f"{study.first.data.seed}; each row is seen once.",
                f"Seeds of weights, dropout and depth draws: {seeds} for every model. Equal seeds "
                f"are not equal weights where models are shaped differently.",
                f"Validation: {prepared['validation_documents']:,} documents, "
                f"{prepared['validation_tokens']:,} tokens, fixed in the first cycle; "
                f"{counts} targets for every model, depth and cycle.",
                f"Horizon: schedules of all models cover {study.updates:,} updates from the first "
                f"cycle on.",
            ]
        ),
        *_what_changed(journal, figures),
    ]


def _what_changed(journal: Journal, figures: Figures) -> list[Block]:
    """What was not the same in all runs, or not all the time, and changes their speed."""
    environments: dict[str, list[str]] = {}
    for model in figures.models.values():
        for run in model.runs:
            for environment in run.environments:
                environments.setdefault(environment, []).append(run_name(model.name, run.seed))
    items = []
    if len(environments) > 1:
        items += [f"{', '.join(names)}: {one}" for one, names in environments.items()]
    settings = [
        leaves(event["settings"]["models"])
        for event in (*journal.all("study"), *journal.all("settings"))
    ]
    for before, after in itertools.pairwise(settings):
        items += [
            f"{key}: {_plain(before[key])}, later {_plain(value)}"
            for key, value in after.items()
            if value != before[key] and re.fullmatch(_OF_SPEED, key)
        ]
    if not items:
        return []
    return ["Not the same throughout: seconds and tok/s are not comparable.", Bullets(items)]


def _what_differed(study: Study) -> list[Block]:
    found = differing(study.models)
    if not found:
        return ["No setting."]
    rows = [[key, *[_plain(value) for value in values]] for key, values in found.items()]
    return [Table(["setting", *study.models], rows, 1 + len(study.models))]


def _teacher(study: Study, journal: Journal) -> list[Block]:
    """Who taught, from what, and whom."""
    cached = journal.find("cached", cycle=1)
    assert cached is not None
    teacher, context = cached["teacher"], cached["context"]
    of_weights = [  # of a run's weights the beginning of their checksum
        f"{key} {_plain(teacher[key])[:16] if key == 'weights' else _plain(teacher[key])}"
        for key in ("update", "revision", "depth", "quantization", "weights")
        if teacher.get(key) is not None
    ]
    rows = []
    for name, config in study.models.items():
        learns = "yes" if name in study.students else "no"
        if name in study.measured and name not in study.students:
            learns = "measured only"
        alpha, temperature = config.distillation.alpha, config.distillation.temperature
        values = [f"{alpha:g}", f"{temperature:g}"] if name in study.measured else ["-", "-"]
        rows.append([name, learns, *values])
    events = journal.all("cached")
    return [
        Bullets(
            [
                f"{teacher['name']} ({teacher['kind']}): {', '.join(of_weights)}.",
                f"Of each position its {cached['k']} likeliest tokens and the mass of all others, "
                f"in {cached['dtype']}: {cached['bytes_per_token']} bytes.",
                f"It sees {context['kind']} of {context['length']:,} tokens"
                + (f", which overlap by {context['overlap']:,}" if context["overlap"] else "")
                + f"; students see packed rows of {study.first.data.sequence_length:,}.",
                cached["unseen"],
                f"Its predictions of {events[-1]['until']:,} tokens took {_took(events)}. The "
                f"FLOPs and the seconds of a model here include neither that nor the teacher's "
                f"training.",
            ]
        ),
        Table(["model", "learns from it", "alpha", "temperature"], rows, 2),
        "Validation is the plain cross-entropy, for students and others alike.",
    ]


def _plain(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False).strip('"')


def _alarms(figures: Figures) -> list[Block]:
    items = []
    for model in figures.models.values():
        for run in model.runs:
            name = run_name(model.name, run.seed)
            items += [
                f"{name}: alarm {alarm.get('event')} at update {alarm.get('update')}: "
                f"{alarm.get('monitor')} is {alarm.get('value')}, threshold "
                f"{alarm.get('threshold')}: {alarm.get('text')}"
                for alarm in run.alarms
            ]
            items += [
                f"{name}: decision at update {decision.get('update')}: "
                + ", ".join(f"{k} {_plain(v)}" for k, v in decision.items() if k != "update")
                for decision in run.decisions
            ]
            items += [
                f"{name}: update {event.get('update')}: {event.get('text')}" for event in run.events
            ]
            if run.nonfinite_updates or run.empty_windows:
                items.append(
                    f"{name}: {run.nonfinite_updates} updates skipped because a loss or gradient "
                    f"was not finite, {run.empty_windows} windows without a target token"
                )
            if run.kept_layers:
                items.append(
                    f"{name}: {run.kept_layers:,} times a single layer was left as it was because "
                    f"its gradient was not finite"
                )
    if not items:
        return ["No alarm, no decision of a controller, no finding, no update that was skipped."]
    shown = items[:40]
    more = len(items) - len(shown)
    return [Bullets(shown + ([f"and {more} more, in the runs' records"] if more else []))]


def _took(events: list[Event]) -> str:
    """How long the phases of these events took, of each cycle one."""
    again = [str(event["cycle"]) for event in events if event["interrupted"]]
    text = f"{sum(event['seconds'] for event in events):,.0f} s"
    if again:
        text += f" (not counted: attempts that were interrupted, of cycle {', '.join(again)})"
    return text


def _time(journal: Journal, figures: Figures) -> list[Block]:
    prepared = journal.all("prepared")
    items = [
        f"{run_name(model.name, run.seed)}: {goodput_line(run.goodput)}"
        for model in figures.models.values()
        for run in model.runs
        if run.goodput
    ]
    freed = sum(event["bytes"] for event in journal.all("reclaimed"))
    what = "tokens and predictions" if journal.find("cached") else "tokens"
    return [
        Bullets(items),
        "Goodput is the share of a run's time that went into updates which it still has.",
        f"Preparing took {_took(prepared)} in {len(prepared)} cycle(s); {size_text(freed)} of "
        f"{what} were reclaimed.",
    ]


def _settings(study: Study, journal: Journal) -> list[Block]:
    begun = journal.find("study")
    assert begun is not None
    versions = ", ".join(f"{name} {version}" for name, version in begun["versions"].items())
    blocks: list[Block] = [
        f"Begun with {versions}, Python {begun['python']}, {begun['platform']}.",
        Listing("The study", _study_text(study)),
    ]
    for name, config in study.models.items():
        blocks.append(Listing(f"Model {name}", to_yaml(config)))
    return blocks


def _study_text(study: Study) -> str:
    tree = study.tree()["study"]
    return "\n".join(f"{key}: {_plain(value)}" for key, value in leaves(tree).items())


# ---------------------------------------------------------------- pictures


def _curves(study: Study, figures: Figures) -> list[Block]:
    if not available():
        return ["Pictures need matplotlib: pip install 'jaxlm[report]'."]
    models, reference = _candidates(study, figures)
    shown = [*models, reference]
    blocks: list[Block] = []
    for axis, (name, _) in _AXES.items():
        series = []
        for group, model in enumerate(shown):
            for member, depth in enumerate(model.depths):
                x, y = model.curve(axis, depth)
                series.append(Series(_label(model, depth), x, y, group, member))
        unit = " (s)" if axis == "seconds" else ""
        svg = line_chart(series, x=f"{name}{unit}", y="validation cross-entropy (nats per token)")
        blocks.append(Picture(svg, f"Validation loss at the end of each cycle, by {name}"))
    looped = [model for model in shown if model.mean_depth is not None]
    if looped:
        blocks += _by_depth(figures, shown, looped)
    return blocks


def _by_depth(
    figures: Figures, shown: list[ModelFigures], looped: list[ModelFigures]
) -> list[Block]:
    blocks: list[Block] = []
    depths = sorted({depth for model in looped for depth in model.depths if depth is not None})
    for key, label, what in (
        ("cross_entropy", "validation cross-entropy (nats per token)", "Validation loss"),
        ("tokens_per_second", "speed of the forward pass (tok/s)", "Speed"),
    ):
        series = []
        for group, model in enumerate(shown):
            at = [d for d in depths if d in model.depths] if model in looped else depths
            y = [
                model.mean(figures.cycles, "validation", d if model in looped else None, key)
                for d in at
            ]
            series.append(Series(model.name, np.array(at), np.array(y, np.float64), group))
        svg = line_chart(series, x="core steps n", y=label, logarithmic=True, ticks=depths)
        blocks.append(Picture(svg, f"{what} by depth; a Transformer has one value"))
    return blocks


# ---------------------------------------------------------------- sweeps


def _best_of_sweep(study: Study, figures: Figures) -> dict[str, ModelFigures]:
    """Of each optimizer the model with the lowest validation loss at its mean depth."""
    best: dict[str, ModelFigures] = {}
    for name, (optimizer, _) in study.sweep.items():
        model = figures.models[name]
        if optimizer not in best or _final(figures, model) < _final(figures, best[optimizer]):
            best[optimizer] = model
    return best


def _final(figures: Figures, model: ModelFigures) -> float:
    loss = model.mean(figures.cycles, "validation", model.mean_depth, "cross_entropy")
    return math.inf if loss is None else loss


def _sweep(study: Study, figures: Figures) -> list[Block]:
    best = _best_of_sweep(study, figures)
    rows, edges = [], []
    for optimizer, model in best.items():
        rates = sorted(rate for other, rate in study.sweep.values() if other == optimizer)
        rate = study.sweep[model.name][1]
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            edges.append(f"{optimizer}: the best of its rates, {rate:g}, is the sweep's edge")
        seconds = statistics.fmean(run.points[-1].seconds for run in model.runs)
        rows.append(
            [
                optimizer,
                f"{rate:g}",
                f"{len(rates)}",
                f"{_final(figures, model):.4f}",
                f"{seconds:,.0f}",
                f"{statistics.median(run.training_speed for run in model.runs):,.0f}",
                size_text(max(run.peak_memory for run in model.runs)),
            ]
        )
    header = ["optimizer", "best rate", "rates tried", "validation loss", "seconds of training"]
    blocks: list[Block] = [
        "Each optimizer at its best learning rate, chosen by the validation loss after "
        f"cycle {figures.cycles} at the mean depth of training.",
        Table([*header, "tok/s", "peak memory"], rows),
    ]
    skipped = [
        f"{run_name(name, run.seed)}: {run.nonfinite_updates:,} of "
        f"{run.points[-1].update:,} updates skipped because a loss or gradient was not finite"
        for name in study.sweep
        for run in figures.models[name].runs
        if run.nonfinite_updates
    ]
    if skipped:
        blocks.append(Bullets(skipped))
    if edges:
        blocks.append(Bullets([f"{edge}: a wider sweep may do better" for edge in edges]))
    if available():
        series = []
        for group, optimizer in enumerate(best):
            points = sorted(
                (rate, _final(figures, figures.models[name]))
                for name, (other, rate) in study.sweep.items()
                if other == optimizer
            )
            x, y = np.array(points).T
            series.append(Series(optimizer, x, y, group))
        svg = line_chart(
            series,
            x="peak learning rate",
            y="validation cross-entropy (nats per token)",
            logarithmic=True,
        )
        blocks.append(Picture(svg, "Validation loss by learning rate"))
    return blocks


# ---------------------------------------------------------------- for programs


def _teacher_json(study: Study, journal: Journal) -> dict[str, Any]:
    cached = journal.find("cached", cycle=1)
    assert cached is not None
    keys = ("teacher", "context", "k", "dtype", "bytes_per_token", "unseen")
    return {key: cached[key] for key in keys} | {
        "seconds": sum(event["seconds"] for event in journal.all("cached")),
        # Of these the attempts before the last are not in `seconds`.
        "interrupted_cycles": [e["cycle"] for e in journal.all("cached") if e["interrupted"]],
        "students": {
            name: {
                "alpha": study.models[name].distillation.alpha,
                "temperature": study.models[name].distillation.temperature,
            }
            for name in study.students
        },
    }


def _json(
    study: Study,
    journal: Journal,
    figures: Figures,
    verdicts: dict[str, dict[int, Verdict]],
    withheld: list[str],
) -> dict[str, Any]:
    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {str(key): finite(value) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    models, reference = _candidates(study, figures)
    equal = []
    for model, axis in itertools.product(models, _AXES):
        for depth in model.depths:
            point = at_equal(model.curve(axis, depth), reference.curve(axis, reference.mean_depth))
            equal.append(
                {"model": model.name, "depth": depth, "axis": axis, "x": point.x,
                 "losses": list(point.losses)}
            )  # fmt: skip
    return finite(
        {
            "study": study.config.name,
            "cycle": figures.cycles,
            "cycles": study.config.cycles,
            "reference": reference.name,
            "withheld": withheld,
            "verdicts": {
                name: {
                    depth: {**dataclasses.asdict(v), "text": v.text} for depth, v in found.items()
                }
                for name, found in verdicts.items()
            },
            "equal": equal,
            **({} if study.teacher is None else {"teacher": _teacher_json(study, journal)}),
            "models": {
                name: {
                    "stored_parameters": model.stored,
                    "training_flops_per_token": model.training_flops(),
                    "seeds": {
                        str(run.seed): [
                            {
                                "cycle": point.cycle,
                                "update": point.update,
                                "tokens": point.tokens,
                                "flops": point.flops,
                                "seconds": point.seconds,
                                "peak_memory_bytes": point.peak_memory,
                                "evaluations": point.evaluations,
                            }
                            for point in run.points[: figures.cycles]
                        ]
                        for run in model.runs
                    },
                }
                for name, model in figures.models.items()
            },
        }
    )
