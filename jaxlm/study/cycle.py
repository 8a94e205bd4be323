"""The cycles of a study: prepare, train and evaluate each model, compare, report, reclaim.

Where models learn from a teacher, what it predicts is cached before they are trained.

Every phase begins by asking the journal whether it was done, does what is left of it, and ends by
saying so there; the work itself (preparing, training, removing) can be repeated or continues where
it was. So a study that was killed anywhere goes on with the same command, and what it does then is
what it would have done.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlm.config import Config
from jaxlm.console import console
from jaxlm.data.pipeline import validation_stream
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import DataDirectory
from jaxlm.data.teacher import (
    MANIFEST,
    cached_until,
    covered,
    files_of,
    format_of,
    mark_reclaimed,
    read_manifest,
    reclaimable,
    vocabulary_of,
    vocabulary_of_file,
)
from jaxlm.distillation.contexts import PackedContext
from jaxlm.distillation.teachers import check_teacher, context_of
from jaxlm.environment import PACKAGES
from jaxlm.errors import Failure, UserError
from jaxlm.evaluation.evaluate import unigram_cross_entropy
from jaxlm.files import Lock, refuse_links, sha256_of, size_text, write_atomically
from jaxlm.signals import on_ending
from jaxlm.study.blocks import digest_of, first_difference, read_blocks
from jaxlm.study.folder import bytes_in, check_removable, free_bytes, remove
from jaxlm.study.journal import Event, Journal
from jaxlm.study.plan import disk_needs
from jaxlm.study.report import write_report
from jaxlm.study.settings import Study, changes, run_name
from jaxlm.study.teacher import unseen
from jaxlm.study.worker import STOPPED, EvaluationSet, Job, TeacherJob, check_comparable
from jaxlm.training.manifest import damage_text, inspect
from jaxlm.training.metrics import BLOCKS, EVENTS, METRICS, read_records

JOURNAL = "journal.jsonl"
_PASS_ON_SECONDS = 0.2  # until a signal reaches the worker

Launch = Callable[[Path], int]


def _plain(tree: Any) -> Any:
    """As it reads back from JSON."""
    return json.loads(json.dumps(tree))


class _DamagedError(Failure):
    """A checkpoint is not what was written."""


class StoppedError(Exception):
    """A signal ended the study; everything is saved."""

    def __init__(self, number: signal.Signals | None):
        super().__init__(number)
        self.number = number


def launcher(environment: Mapping[str, str]) -> Launch:
    """Starts each job in a process of its own and waits for it, passing signals on.

    Args:
        environment: of the workers: unlike the study, they use the device.
    """

    def launch(job: Path) -> int:
        received: list[signal.Signals] = []

        def remember(number: int, frame: object) -> None:
            del frame
            received.append(signal.Signals(number))

        with on_ending(remember):
            # Not in the terminal's foreground group, where it would get Ctrl-C a second time.
            worker = ["-m", "jaxlm.study.worker", str(job), str(os.getpid())]
            command = [sys.executable, *worker]
            child = subprocess.Popen(command, env=dict(environment), process_group=0)
            code, passed_on = None, 0
            while code is None:
                for number in received[passed_on:]:
                    child.send_signal(number)
                    passed_on += 1
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(_PASS_ON_SECONDS)
        if received:
            raise StoppedError(received[0])
        return code

    return launch


class Cycles:
    """A study that is under way. Use as a context manager.

    Args:
        study: settings.
        launch: does a job, given its file; returns the worker's exit code.

    Raises:
        UserError: another process runs it, it began with other settings, or its folder holds a
            symbolic link.
        Failure: its journal was changed.
    """

    def __init__(self, study: Study, launch: Launch):
        self.study, self.launch = study, launch
        self.directory = study.directory
        refuse_links(self.directory, "a study")
        for name in study.config.evaluation_data:
            if name in ("validation", "window"):
                raise UserError(f"study.evaluation_data: '{name}' is a name of the study's own")
        busy = f"{self.directory}: another process runs this study"
        self._lock = Lock(self.directory / "lock", busy)
        try:
            self._open()
        except BaseException:
            self._lock.__exit__()
            raise

    def _open(self) -> None:
        (self.directory / "jobs").mkdir(exist_ok=True)
        self.journal = Journal(self.directory / JOURNAL)
        begun = self.journal.find("study")
        if begun is None:
            # One that was killed while it wrote its first event has an empty journal.
            own = ("lock", "jobs", JOURNAL)
            others = [p.name for p in self.directory.iterdir() if p.name not in own]
            if others:
                raise UserError(
                    f"{self.directory}: has no journal but holds {', '.join(sorted(others)[:4])}; "
                    f"bring journal.jsonl back, or choose another study.name"
                )
        else:
            refused = changes(begun["settings"], self.study)
            if refused:
                raise UserError(
                    f"{self.directory}: began with other settings; undo these changes, or choose "
                    f"another study.name:\n" + "\n".join(refused)
                )

    def __enter__(self) -> "Cycles":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    # ------------------------------------------------------------------ the whole

    def run(self) -> None:
        """Do what is left of the study.

        Raises:
            StoppedError: a signal came; the same command goes on.
            Failure: a worker failed, the disk is full, the models did not see the same blocks, or
                all is done and there is no verdict.
        """
        self._begin()
        for cycle in range(1, self.study.config.cycles + 1):
            if self.journal.find("cycle", cycle=cycle):
                continue
            self._finish_training_again()
            self._prepare(cycle)
            if self.study.teacher is not None:
                self._cache(cycle)
            for model, seed in self.study.runs:
                self._train(cycle, model, seed)
            self._compare(cycle)
            self._reclaim(cycle)
            self.journal.append("cycle", cycle=cycle)
        withheld = self.report()
        if withheld:
            raise Failure(
                f"{self.directory}: the study is done, and its verdict withheld: "
                f"{'; '.join(withheld)}"
            )

    def _begin(self) -> None:
        needs = disk_needs(self.study)
        begun = self.journal.find("settings") or self.journal.find("study")
        if begun is not None and begun["settings"] != _plain(self.study.tree()):
            self.journal.append("settings", settings=self.study.tree())
        if begun is None:
            for directory in self.study.config.evaluation_data.values():
                DataDirectory(Path(directory), verify=False)  # is there
            self._check_teacher()
            self._require_room(needs.peak, f"the study at its fullest ({needs.text()})")
            self.journal.append(
                "study",
                settings=self.study.tree(),
                versions={name: importlib.metadata.version(name) for name in PACKAGES},
                python=platform.python_version(),
                platform=platform.platform(),
            )
        write_atomically(self.directory / "study.yaml", self.study.yaml())

    def _check_teacher(self) -> None:
        """Refuse, before anything is prepared, a teacher that cannot teach this study's models."""
        study, teacher = self.study, self.study.teacher
        if teacher is None:
            return
        context, size = context_of(teacher), study.config.tokens_per_cycle
        if isinstance(context, PackedContext) and size % context.length:
            raise UserError(
                f"teacher: study.tokens_per_cycle ({size:,}) is no multiple of the rows that it "
                f"reads ({context.length:,} tokens): change one of them (teacher.length)"
            )
        if study.own_data:
            settings = study.first.prepare
            assert settings.tokenizer is not None
            path = Path(settings.tokenizer)
            vocabulary = vocabulary_of_file(path, settings.end_token, settings.begin_token)
        else:
            vocabulary = vocabulary_of(DataDirectory(study.data_directory, verify=False))
        check_teacher(teacher, vocabulary)
        print(unseen(study), flush=True)

    def _require_room(self, needed: int, what: str) -> None:
        """Refuse to begin something that the disk, or the study's share of it, cannot hold."""
        room, of = free_bytes(self.directory), "free on the disk"
        if self.study.config.disk is not None:
            left = round(self.study.config.disk * 1e9) - bytes_in(self.directory)
            if left < room:
                room, of = left, f"left of study.disk ({self.study.config.disk:g} GB)"
        if needed > room:
            raise Failure(
                f"{self.directory}: {what} needs about {size_text(needed)}, and "
                f"{size_text(max(room, 0))} are {of}; make room, and the same command goes on"
            )

    def _say(self, cycle: int, text: str) -> None:
        print(f"\nCycle {cycle}/{self.study.config.cycles}: {text}", flush=True)

    def _begun_before(self, kind: str, cycle: int) -> bool:
        """Whether a phase was begun before, of which only the last attempt's seconds are known.

        If not, the journal says from now on that it was.
        """
        if self.journal.find(kind, cycle=cycle):
            return True
        self.journal.append(kind, cycle=cycle)
        return False

    # ------------------------------------------------------------------ data

    def _prepare(self, cycle: int) -> None:
        """Bring the cycle's tokens, and remember what was written."""
        if self.journal.find("prepared", cycle=cycle):
            return
        interrupted = self._begun_before("preparing", cycle)
        study, began = self.study, time.time()
        needed = cycle * study.config.tokens_per_cycle + 1  # the last row's last target
        if study.own_data:
            self._say(cycle, f"preparing tokens up to {needed:,}")
            left = disk_needs(study).window - self._prepared_in_part()
            self._require_room(max(left, 0), "preparing its tokens")
            data = prepare(self._data_config(), needed)
        else:
            data = DataDirectory(study.data_directory)
            needed = study.tokens + 1
        there = data.manifest["splits"]["train"]["tokens"]
        complete = not study.own_data or data.manifest["source"]["complete"]
        # Known before anything was trained where all sources were read in the first cycle.
        if there < (study.tokens + 1 if complete else needed):
            raise UserError(
                f"{study.data_directory}: {study.config.cycles} cycles need {study.tokens + 1:,} "
                f"training tokens, and the sources give {there:,}; a study of fewer cycles or of "
                f"smaller ones, under another study.name, fits"
            )
        if cycle == 1:  # before anything is trained, and not after a cycle's training
            for directory in study.config.evaluation_data.values():
                check_comparable(DataDirectory(Path(directory), verify=False), data)
        if cycle == 1 and not complete:
            self._warn_of_shortage(there, data.manifest["source"]["files"])
        validation = data.manifest["splits"]["validation"]["tokens"]
        first = self.journal.find("prepared", cycle=1)
        recorded = {name for e in self.journal.all("prepared") for name in e["files"]}
        files = {
            path.relative_to(self.directory).as_posix(): {
                "bytes": entry["bytes"],
                "sha256": entry["sha256"],
            }
            for path, entry in (data.files() if study.own_data else [])
            if path.parent.name == "train" and path.name.startswith("tokens-")
        }
        unigram = None
        if first is None:
            limited = dataclasses.replace(study.first.data, validation_tokens=validation)
            unigram = unigram_cross_entropy(data, validation_stream(data, limited))
        self.journal.append(
            "prepared",
            cycle=cycle,
            tokens=there,
            documents=data.manifest["splits"]["train"]["documents"],
            validation_tokens=validation,
            validation_documents=data.manifest["splits"]["validation"]["documents"],
            vocabulary_size=data.vocabulary_size,
            unigram_cross_entropy=unigram,
            files={name: entry for name, entry in files.items() if name not in recorded},
            interrupted=interrupted,
            seconds=time.time() - began,
        )

    def _prepared_in_part(self) -> int:
        """Bytes of training tokens that a preparation which was interrupted has written."""
        recorded = {name for e in self.journal.all("prepared") for name in e["files"]}
        found = (self.study.data_directory / "train").glob("tokens-*")
        return sum(
            path.stat().st_size
            for path in found
            if path.relative_to(self.directory).as_posix() not in recorded
        )

    def _warn_of_shortage(self, tokens: int, files: list[dict[str, Any]]) -> None:
        """Say early where the sources seem to hold less than the study needs."""
        sizes = [int(file["identity"].split()[0]) for file in files]  # "N bytes, HASH"
        read = sum(
            size for size, file in zip(sizes, files, strict=True) if file["outcome"] is not None
        )
        # A file that was read in part counts as a whole one: there may be more, and not less.
        expected = tokens * sum(sizes) // max(read, 1)
        if expected < 1.05 * self.study.tokens:
            print(
                f"warning: {tokens:,} tokens came from {size_text(read)} of sources at most; at "
                f"that rate all {size_text(sum(sizes))} give at least about {expected:,}, and the "
                f"study needs {self.study.tokens:,}: look whether they are enough",
                file=sys.stderr,
                flush=True,
            )

    def _data_config(self) -> Config:
        first = self.study.first
        return dataclasses.replace(
            first, data=dataclasses.replace(first.data, directory=str(self.study.data_directory))
        )

    # ------------------------------------------------------------------ teacher

    def _cache(self, cycle: int) -> None:
        """Bring the teacher's predictions for the cycle's tokens, in a process of its own."""
        if self.journal.find("cached", cycle=cycle):
            return
        interrupted = self._begun_before("caching", cycle)
        study, directory, began = self.study, self.study.teacher_directory, time.time()
        assert study.teacher is not None
        until = cycle * study.config.tokens_per_cycle
        if (
            self._cached(directory) < until + 1
        ):  # a study may have been killed after the last of them
            self._say(cycle, f"{study.teacher.cache_name} predicts tokens up to {until:,}")
            needs = disk_needs(study)
            left = (until + 1 - cached_until(directory)) * needs.teacher_record
            self._require_room(min(left, needs.teacher_window), "its teacher's predictions")
            job = TeacherJob(study.teacher, study.data_directory, until, directory)
            path = self.directory / "jobs" / "teacher.json"
            job.write(path)
            self._launch(path, f"{directory}: predicting", "where it was")
            if self._cached(directory) != until + 1:
                raise Failure(
                    f"{directory}: reaches position {self._cached(directory):,}, expected "
                    f"{until + 1:,}"
                )
        manifest, first = read_manifest(directory), self.journal.find("cached", cycle=1)
        recorded = {name for e in self.journal.all("cached") for name in e["files"]}
        folder = directory.relative_to(self.directory).as_posix()
        files = {f"{folder}/{name}": entry for name, entry in files_of(manifest).items()}
        self.journal.append(
            "cached",
            cycle=cycle,
            until=until,
            teacher=manifest["teacher"],
            context=manifest["context"],
            k=manifest["k"],
            dtype=manifest["dtype"],
            bytes_per_token=format_of(manifest).bytes_per_token,
            unseen=unseen(study) if first is None else first["unseen"],
            files={name: entry for name, entry in files.items() if name not in recorded},
            interrupted=interrupted,
            seconds=time.time() - began,
        )

    @staticmethod
    def _cached(directory: Path) -> int:
        """Position after the last record of the finished shards of a cache."""
        return covered(read_manifest(directory))[1] if (directory / MANIFEST).exists() else 0

    def _launch(self, job: Path, what: str, goes_on: str) -> None:
        """Have a job done in a process of its own."""
        code = self.launch(job)
        if code == STOPPED:
            raise StoppedError(None)
        if code != 0:
            said = "what it said stands above; " if code > 0 else f"by signal {-code}; "
            raise Failure(
                f"{what} ended with exit code {code}; {said}the same command goes on {goes_on}"
            )

    # ------------------------------------------------------------------ training

    def _train(self, cycle: int, model: str, seed: int) -> None:
        """Train a run to the end of the cycle and evaluate it, in a process of its own."""
        key: dict[str, Any] = {"cycle": cycle, "model": model, "seed": seed}
        if self.journal.find("evaluated", **key):
            return
        study, name = self.study, run_name(model, seed)
        until = cycle * study.updates_per_cycle
        self._say(cycle, f"{model}, seed {seed}, to update {until:,} of {study.updates:,}")
        self._require_room(disk_needs(study).checkpoint, "a checkpoint")
        evaluations = self.directory / "evaluations"
        evaluations.mkdir(exist_ok=True)
        job = Job(
            self.run_config(model, seed),
            until,
            study.config.depths,
            self._sets(cycle),
            evaluations / f"{name}-cycle-{cycle}.json",
        )
        began = time.time()
        result = self._work(job, key)
        sums = job.result.with_suffix(".npz")
        self.journal.append(
            "evaluated",
            **key,
            evaluations=result["evaluations"],
            documents=sha256_of(sums) if sums.exists() else None,
            parameters=result["parameters"],
            nonfinite_updates=result["nonfinite_updates"],
            empty_windows=result["empty_windows"],
            device=result["device"],
            peak_memory_bytes=result["peak_memory_bytes"],
            peak_memory_of=result["peak_memory_of"],
            seconds=result["evaluation_seconds"],
            process_seconds=time.time() - began,
        )

    def _work(self, job: Job, key: dict[str, Any]) -> dict[str, Any]:
        """Have a run trained and evaluated; note where it stands. Returns what the worker found."""
        name, until = run_name(key["model"], key["seed"]), job.until
        job.result.unlink(missing_ok=True)
        path = self.directory / "jobs" / f"{name}.json"
        job.write(path)
        try:
            self._launch(path, f"{name}: training or evaluation", "from its last checkpoint")
        except Failure as failure:
            limit = job.config.training.max_nonfinite_updates
            if not self._diverged(name, limit):
                raise
            raise Failure(
                f"{failure}. Its loss or gradient was not finite in the last {limit} updates: only "
                f"with training.max_nonfinite_updates above {limit} in the settings of "
                f"{key['model']}, which may change, does it go on, and the study with it"
            ) from None
        result = json.loads(job.result.read_text(encoding="utf-8"))
        if result["update"] != until:
            raise Failure(f"{name}: stands at update {result['update']}, expected {until}")
        blocks = read_blocks(self._run_directory(name) / BLOCKS, until)
        stands = {
            "update": until,
            "tokens": result["tokens"],
            "blocks": digest_of(blocks[until - self.study.updates_per_cycle :]),
            "checkpoint": self._checkpoint(name, until),
        }
        if self.journal.find("trained", **key) is None:
            self.journal.append("trained", **key, **stands)
        elif self._open_retraining() or self._saved(key) != stands["checkpoint"]:
            self.journal.append("retrained", **key, **stands)
        return result

    def _saved(self, key: dict[str, Any]) -> str:
        """Checksum of the checkpoint that a run ended a cycle with, as the journal has it."""
        event = self.journal.find("retrained", **key) or self.journal.find("trained", **key)
        assert event is not None
        return event["checkpoint"]

    def _diverged(self, name: str, limit: int) -> bool:
        """Whether a run's last `limit` updates were all skipped for not being finite."""
        directory = self._run_directory(name)
        skipped = {
            e["update"] for e in read_records(directory / EVENTS) if e["kind"] == "not_finite"
        }
        last = [record["update"] for record in read_records(directory / METRICS)][-limit:]
        return len(last) == limit and skipped.issuperset(last)

    def _train_again(self, key: dict[str, Any]) -> None:
        """Train a run to the end of the cycle from the last whole checkpoint before it.

        The journal has a `retraining` event of it: until there is a `retrained` one, the run's
        records may end before the cycle does, and its checkpoint is not the one of before.
        """
        cycle, model, seed = key["cycle"], key["model"], key["seed"]
        nowhere = self.directory / "jobs" / f"{run_name(model, seed)}-again.json"
        until, depths = cycle * self.study.updates_per_cycle, self.study.config.depths
        self._work(Job(self.run_config(model, seed), until, depths, (), nowhere), key)

    def _open_retraining(self) -> Event | None:
        """The `retraining` event that no `retrained` one follows; there is one at most."""
        kinds = ("retraining", "retrained")
        last = next((e for e in reversed(self.journal.events) if e["event"] in kinds), None)
        return last if last is not None and last["event"] == "retraining" else None

    def _finish_training_again(self) -> None:
        """Do what is left of a run's training again, before its records are compared."""
        begun = self._open_retraining()
        if begun is not None:
            self._train_again({name: begun[name] for name in ("cycle", "model", "seed")})

    def run_config(self, model: str, seed: int) -> Config:
        """A run's configuration; the first cycle's validation documents are that of all."""
        first = self.journal.find("prepared", cycle=1)
        assert first is not None
        return self.study.run_config(model, seed, first["validation_tokens"])

    def _sets(self, cycle: int) -> tuple[EvaluationSet, ...]:
        """What is evaluated after a cycle: the fixed set, the cycle's own, and others."""
        ends = [
            event["validation_tokens"]
            for number in range(1, cycle + 1)
            if (event := self.journal.find("prepared", cycle=number)) is not None
        ]
        sets = [EvaluationSet("validation", None, (0, ends[0]))]
        if self.study.config.held_out_windows and cycle > 1 and ends[-1] > ends[-2]:
            sets.append(EvaluationSet("window", None, (ends[-2], ends[-1])))
        others = self.study.config.evaluation_data.items()
        return (*sets, *(EvaluationSet(name, directory, None) for name, directory in others))

    def _run_directory(self, name: str) -> Path:
        return self.directory / "models" / name

    def _checkpoint(self, name: str, update: int) -> str:
        """Verify a checkpoint, every byte of it. Returns the checksum of its manifest."""
        path = self._run_directory(name) / "checkpoints" / str(update)
        found = inspect(path)
        if not found.whole:
            damage = damage_text(found.damage) or "has no manifest"
            raise _DamagedError(
                f"{path}: damaged ({damage}); nothing of its tokens is reclaimed before the same "
                f"command has trained again from the checkpoint before it"
            )
        return sha256_of(path / "manifest.json")

    # ------------------------------------------------------------------ comparison

    def problems(self) -> list[str]:
        """Why the models' logs do not show that they saw the same blocks; empty if they do."""
        found: list[str] = []
        span = self.study.updates_per_cycle
        blocks: dict[str, list[list[int]]] = {}
        for model, seed in self.study.runs:
            name = run_name(model, seed)
            events = self.journal.all("trained", model=model, seed=seed)
            if not events:
                continue
            try:
                blocks[name] = read_blocks(self._run_directory(name) / BLOCKS, events[-1]["update"])
            except Failure as failure:
                found.append(str(failure))
                continue
            for event in events:
                stop = event["update"]
                if digest_of(blocks[name][stop - span : stop]) != event["blocks"]:
                    found.append(
                        f"{self._run_directory(name) / BLOCKS}: is not, between updates "
                        f"{stop - span:,} and {stop:,}, what it was when {name} was trained"
                    )
        names = list(blocks)
        for name in names[1:]:
            both = min(len(blocks[names[0]]), len(blocks[name])) // span * span
            update = first_difference(blocks[names[0]][:both], blocks[name][:both])
            if update is not None:
                found.append(
                    f"{names[0]} and {name} did not see the same blocks: update {update:,} is the "
                    f"first that differs"
                )
        return found

    def _compare(self, cycle: int) -> None:
        """Show that all models saw the same blocks, and report."""
        self.report()
        if self.journal.find("compared", cycle=cycle) is None:
            events = self.journal.all("trained", cycle=cycle)
            runs = {run_name(e["model"], e["seed"]): e["blocks"] for e in events}
            self.journal.append("compared", cycle=cycle, blocks=runs)

    def report(self) -> list[str]:
        """Write the report of all that was evaluated.

        Returns:
            Why there is no verdict so far; empty where there is one.

        Raises:
            Failure: after it is written, where the models' blocks are not shown to be the same.
        """
        problems = self.problems()
        written = write_report(self.study, self.journal, problems)
        screen = console()
        for line in written.lines:
            screen.print(line, markup=False, soft_wrap=True)
        if problems:
            raise Failure(f"{self.directory}: verdict withheld: {'; '.join(problems)}")
        return written.withheld

    # ------------------------------------------------------------------ reclaiming

    def _reclaim(self, cycle: int) -> None:
        """Remove tokens, and what was predicted for them, that no run will read again.

        Once that is sure. Data that were prepared elsewhere stay; a teacher's cache is the study's.
        """
        study = self.study
        if not study.config.reclaim or not (study.own_data or study.teacher):
            return
        if self.journal.find("reclaimed", cycle=cycle):
            return
        update = cycle * study.updates_per_cycle
        begun = self.journal.find("reclaiming", cycle=cycle)
        if begun is None:
            for model, seed in study.runs:
                key = {"cycle": cycle, "model": model, "seed": seed}
                try:
                    found = self._checkpoint(run_name(model, seed), update)
                except _DamagedError as damaged:
                    print(f"warning: {damaged}; it begins", file=sys.stderr, flush=True)
                    self.journal.append("retraining", **key)
                    self._train_again(key)
                    self.report()  # or raise, where it did not see the same blocks
                    found = self._checkpoint(run_name(model, seed), update)
                if found != self._saved(key):
                    raise Failure(
                        f"{run_name(model, seed)}: checkpoint {update} is not the one that was "
                        f"verified after training; nothing is reclaimed"
                    )
            events = [*self.journal.all("prepared"), *self.journal.all("cached")]
            recorded = {n: e for event in events for n, e in event["files"].items()}
            gone = {n for event in self.journal.all("reclaiming") for n in event["files"]}
            names, shards = self._reclaimable(cycle)
            unknown = [name for name in names if name not in recorded]
            if unknown:
                raise Failure(f"{self.directory}: {unknown[0]} is not in the journal")
            files = {name: recorded[name] for name in names if name not in gone}
            check_removable(self.directory, files)
            begun = self.journal.append("reclaiming", cycle=cycle, files=files, **shards)
        files = check_removable(self.directory, begun["files"])
        if study.own_data:
            DataDirectory(study.data_directory, verify=False).mark_reclaimed(begun["shards"])
        if study.teacher is not None:
            mark_reclaimed(study.teacher_directory, begun["teacher_shards"])
        remove(self.directory, files)
        # Those that a process which was killed removed are among them.
        freed = sum(entry.bytes for entry in files.values())
        self.journal.append("reclaimed", cycle=cycle, bytes=freed)
        self._say(cycle, f"reclaimed {len(files)} files, {size_text(freed)}")

    def _reclaimable(self, cycle: int) -> tuple[list[str], dict[str, int]]:
        """Files that hold nothing of later cycles, by path; how many shards of each kind they are.

        Those that were removed already are among them.
        """
        study, names, shards = self.study, [], {}
        tokens = cycle * study.config.tokens_per_cycle
        if study.own_data:
            paths = DataDirectory(study.data_directory, verify=False).reclaimable(tokens)
            names += [path.relative_to(self.directory).as_posix() for path in paths]
            shards["shards"] = len(paths)
        if study.teacher is not None:
            folder = study.teacher_directory.relative_to(self.directory).as_posix()
            manifest = read_manifest(study.teacher_directory)
            # A cycle's last record is that of its last target, the next cycle's first token.
            count = reclaimable(manifest, tokens + 1)
            for shard in manifest["shards"][:count]:
                names += [f"{folder}/{name}" for name in shard["files"]]
            shards["teacher_shards"] = count
        return names, shards
