"""What the terminal shows of a study: how far it is, and what it will take."""

import dataclasses
import time

from jaxlm.console import console, new_table
from jaxlm.data.teacher import cached_until
from jaxlm.distillation.planning import WEIGHT_SHARE, CachePlan, logits_bytes, size_of
from jaxlm.errors import UserError
from jaxlm.files import size_text
from jaxlm.memory.devices import DEVICES, Device
from jaxlm.study.folder import bytes_in, free_bytes
from jaxlm.study.journal import Journal
from jaxlm.study.plan import disk_needs, phase_times, vocabulary_of, with_vocabulary
from jaxlm.study.settings import Study, run_name
from jaxlm.training.manifest import updates_in
from jaxlm.training.planning import default_budget, plan_training

# Pinned host memory that may be used, as scripts/plan_memory.py has it.
_HOST_BUDGET = 12_000_000_000


def print_status(study: Study) -> int:
    """Print how far a study is. Returns the exit code."""
    path = study.directory / "journal.jsonl"
    if not path.is_file():
        raise UserError(f"{study.directory}: the study has not begun")
    journal = Journal(path, read_only=True)
    screen, cycles = console(), study.config.cycles
    teacher = [] if study.teacher is None else [f"teacher {study.teacher.cache_name}"]
    runs = [run_name(*run) for run in study.runs]
    table = new_table("cycle", "tokens", *teacher, *runs, "reclaimed")
    for cycle in range(1, cycles + 1):
        prepared = journal.find("prepared", cycle=cycle)
        cells = [str(cycle), f"{prepared['tokens']:,}" if prepared else "-"]
        if study.teacher is not None:
            cells.append(_of_teacher(study, journal, cycle))
        for model, seed in study.runs:
            cells.append(_of_run(study, journal, cycle, model, seed))
        reclaimed = journal.find("reclaimed", cycle=cycle)
        cells.append(size_text(reclaimed["bytes"]) if reclaimed else "-")
        table.add_row(*cells)
    screen.print(f"Study {study.config.name} in {study.directory}", markup=False)
    screen.print(table)
    screen.print("Validation loss, at the lowest of its depths, where a run has finished a cycle.")
    if journal.events:
        ago = time.time() - journal.events[-1]["time"]
        last = f"{journal.events[-1]['event']}, {ago / 3600:.1f} hours ago"
        screen.print(f"Last event: {last}", markup=False)
    done = len(journal.all("cycle"))
    screen.print(
        f"{done} of {cycles} cycles; {size_text(bytes_in(study.directory))} on disk, "
        f"{size_text(free_bytes(study.directory))} free"
    )
    return 0


def _of_teacher(study: Study, journal: Journal, cycle: int) -> str:
    if journal.find("cached", cycle=cycle):
        return "cached"
    size, directory = study.config.tokens_per_cycle, study.teacher_directory
    within = cached_until(directory) - 1 - (cycle - 1) * size
    return f"{within / size:.0%}" if 0 < within <= size else "-"


def _of_run(study: Study, journal: Journal, cycle: int, model: str, seed: int) -> str:
    key = {"cycle": cycle, "model": model, "seed": seed}
    evaluated = journal.find("evaluated", **key)
    if evaluated is not None:
        losses = [e["cross_entropy"] for e in evaluated["evaluations"]["validation"]]
        finite = [loss for loss in losses if loss is not None]
        return f"{min(finite):.4f}" if finite else "not finite"
    if journal.find("trained", **key):
        return "trained"
    checkpoints = study.directory / "models" / run_name(model, seed) / "checkpoints"
    latest = max(updates_in(checkpoints), default=0) if checkpoints.is_dir() else 0
    within = latest - (cycle - 1) * study.updates_per_cycle
    if 0 < within < study.updates_per_cycle:
        return f"{within / study.updates_per_cycle:.0%}"
    return "-"


def print_plan(study: Study) -> int:
    """Print disk by phase, days by phase and the memory of each model.

    Returns:
        The exit code: 1 where something does not fit.
    """
    if study.config.device not in DEVICES:
        raise UserError(
            f"study.device {study.config.device}: not known; one of {', '.join(DEVICES)}"
        )
    device = DEVICES[study.config.device]
    screen = console()
    config = study.config
    screen.print(
        f"Study {config.name}: {config.cycles} cycles of {config.tokens_per_cycle:,} tokens, "
        f"{len(study.runs)} run(s), {study.updates_per_cycle:,} updates a cycle",
        markup=False,
        soft_wrap=True,
    )
    fits = _print_disk(study)
    _print_days(study, device)
    return 0 if _print_memory(study, device) and fits else 1


def _print_disk(study: Study) -> bool:
    needs, screen = disk_needs(study), console()
    table = new_table("disk, by phase", "at most", "so far in all")
    total = 0
    phases = [
        ("prepare: training tokens that are there at one time", needs.tokens),
        ("prepare: validation, ends of documents, documents seen", needs.beside_tokens),
        (
            f"teacher cache: {needs.teacher_record} bytes a token"
            if study.teacher
            else "teacher cache (no distillation)",
            needs.teacher,
        ),
        *[(f"train {name}: checkpoints", size) for name, size in needs.checkpoints.items()],
        ("records, block ids, evaluations", needs.records),
    ]
    for name, size in phases:
        total += size
        table.add_row(name, size_text(size), size_text(total))
    screen.print(table)
    room = free_bytes(study.directory)
    if study.config.disk is not None:
        room = min(room, round(study.config.disk * 1e9))
    if not study.own_data:
        screen.print(f"Tokens are read in {study.data_directory} and stay there.", markup=False)
    elif not study.config.reclaim:
        screen.print("Tokens are not reclaimed (study.reclaim: false).")
    if study.teacher is not None:
        screen.print(
            f"The teacher's cache is in {study.teacher_directory}"
            + (", and is reclaimed after each cycle." if study.config.reclaim else "."),
            markup=False,
            soft_wrap=True,
        )
    screen.print("Raw sources are read where they are, are never removed, and are not counted.")
    fits = needs.peak <= room
    screen.print(
        f"{size_text(needs.peak)} at the fullest, {size_text(room)} may be used: "
        + ("it fits." if fits else "it does not fit.")
    )
    return fits


def _print_days(study: Study, device: Device) -> None:
    screen, cycles = console(), study.config.cycles
    table = new_table(f"time at least, {device.kind}", "a cycle", "all cycles", "from")
    table.columns[-1].justify = "left"
    times = phase_times(study, device)
    for time_ in times:
        name = time_.phase if time_.model is None else f"{time_.phase} {time_.model}"
        table.add_row(name, _days(time_.seconds), _days(cycles * time_.seconds), time_.basis)
    table.add_section()
    total = sum(time_.seconds for time_ in times)
    table.add_row("all", _days(total), _days(cycles * total), "")
    screen.print(table)


def _days(seconds: float) -> str:
    if seconds >= 86_400 / 2:
        return f"{seconds / 86_400:.2f} days"
    return f"{seconds / 3600:.2f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _print_memory(study: Study, device: Device) -> bool:
    budget, screen = default_budget(device), console()
    table = new_table(f"memory, {device.kind}", "parameters", "peak GB", "pinned host GB", "fits")
    fits = True
    vocabulary = vocabulary_of(study)
    kinds: dict[str, list[str]] = {}
    for name, config in study.models.items():
        # Models that differ in nothing that the program knows are compiled once.
        plain = dataclasses.replace(
            config,
            optim=dataclasses.replace(config.optim, learning_rate=1.0, end_learning_rate=0.0),
        )
        kinds.setdefault(repr(plain), []).append(name)
    for names in kinds.values():
        config = with_vocabulary(study.models[names[0]], vocabulary)
        plan = plan_training(config, device, study.teacher and study.teacher.form(vocabulary))
        ok = plan.peak <= budget and plan.host <= _HOST_BUDGET
        fits &= ok
        table.add_row(
            ", ".join(names),
            f"{plan.parameters:,}",
            f"{plan.peak / 1e9:.3f}",
            f"{plan.host / 1e9:.3f}",
            "yes" if ok else "no",
        )
    if study.teacher is not None:
        form, size = study.teacher.form(vocabulary), size_of(study.teacher)
        logits = logits_bytes(study.teacher, size, vocabulary)
        ok = CachePlan(size, device, form, 0, 0, logits).fits
        fits &= ok
        table.add_row(
            f"teacher {study.teacher.cache_name}: weights ({size.form}) and logits",
            f"{size.parameters:,}",
            f"{(size.memory[size.form] + logits) / 1e9:.3f}",
            "0.000",
            "yes" if ok else "no",
        )
    screen.print(table)
    if study.teacher is not None:
        screen.print(
            f"A teacher's weights and logits may take {WEIGHT_SHARE:.0%} of the card; what its "
            f"layers compute in between is not counted."
        )
    screen.print(
        f"Budget: {budget / 1e9:.3f} GB on the card, {_HOST_BUDGET / 1e9:.0f} GB pinned on the "
        "host. Models take turns, each in a process of its own."
    )
    return fits
