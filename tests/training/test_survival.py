"""Runs that are killed, interrupted, damaged or out of room end as if nothing had happened.

Only processes die here, not machines, so that what was written stays readable without having been
synced: where there is one, a folder in memory makes a save ten times as fast as a disk would.
"""

import collections
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import write_documents
from lives import OF_RUNS, Lives
from test_runs import config_for, directory_of

from jaxlm.config import (
    CheckpointConfig,
    Config,
    ControlConfig,
    CurriculumConfig,
    EvaluationConfig,
    MonitorsConfig,
    RateByDepthConfig,
    SpikeConfig,
    TrainingConfig,
    to_yaml,
)
from jaxlm.training import loop
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.loading import load_resolved
from jaxlm.training.manifest import inspect, updates_in
from jaxlm.training.metrics import read_records
from jaxlm.training.step import init_state

UPDATES = 16
CHECKPOINT = "jaxlm.training.checkpoint"
MANIFEST = "jaxlm.training.manifest"
LOOP = "jaxlm.training.loop"
METRICS = "jaxlm.training.metrics"
# Where a life ends: a function, which of its calls, and on which side of it. The third and later
# calls of what a save does leave the life with two checkpoints more than it began with.
CHOSEN = [
    # training and evaluation
    (f"{LOOP}:Run.dispatch", 4, "before"),
    (f"{LOOP}:Run.read", 3, "after"),
    (f"{METRICS}:RunLog._append", 8, "half"),
    (f"{METRICS}:RunLog._append", 3, "after"),
    (f"{METRICS}:RunLog.blocks", 4, "before"),
    (f"{LOOP}:evaluate", 1, "before"),
    (f"{LOOP}:evaluate", 1, "after"),
    (f"{METRICS}:RunLog.evaluation", 1, "after"),
    # a save
    (f"{METRICS}:RunLog.sync", 2, "before"),
    (f"{CHECKPOINT}:Checkpoints.save", 2, "before"),
    (f"{CHECKPOINT}:Checkpoints.save", 2, "after"),
    (f"{CHECKPOINT}:Checkpoints.wait", 3, "after"),
    (f"{CHECKPOINT}:ocp.save_checkpointables_async", 2, "after"),
    (f"{CHECKPOINT}:Checkpoints._complete", 2, "before"),
    ("orbax.checkpoint._src.path.atomicity:on_commit_callback", 2, "before"),
    (f"{CHECKPOINT}:write_manifest", 2, "before"),
    (f"{MANIFEST}:sum_files", 2, "after"),
    (f"{MANIFEST}:write_atomically", 2, "before"),
    (f"{MANIFEST}:write_atomically", 2, "after"),
    ("jaxlm.files:os.replace", 6, "before"),
    ("jaxlm.files:os.replace", 6, "after"),
    (f"{MANIFEST}:sync_tree", 2, "after"),
    ("pathlib:Path.rename", 1, "before"),
    ("pathlib:Path.rename", 2, "after"),
    (f"{CHECKPOINT}:sync_directory", 2, "before"),
    # pruning
    (f"{CHECKPOINT}:removable", 2, "after"),
    (f"{CHECKPOINT}:remove", 1, "before"),
    (f"{MANIFEST}:shutil.rmtree", 1, "before"),
    ("shutil:os.unlink", 3, "after", "pruning"),
    ("shutil:os.rmdir", 1, "after", "pruning"),
    (f"{CHECKPOINT}:remove", 2, "after"),
]
STARTING = [  # of a run that has a checkpoint
    (f"{CHECKPOINT}:Checkpoints.__init__", 1, "after"),
    (f"{CHECKPOINT}:Checkpoints.recover", 1, "before"),
    (f"{LOOP}:Run.restore", 1, "after"),
    (f"{LOOP}:write_atomically", 1, "before"),
    ("jaxlm.files:os.replace", 2, "before"),
    ("jaxlm.files:os.replace", 3, "after"),
    (f"{METRICS}:RunLog.__init__", 1, "after"),
]
FINISHED = [
    (f"{LOOP}:Run.report", 1, "before"),
    (f"{LOOP}:evaluate", 1, "before"),
    (f"{LOOP}:write_report", 1, "before"),
    (f"{LOOP}:write_report", 1, "after"),
    (f"{LOOP}:Run.close", 1, "before"),
]


@pytest.fixture(scope="module")
def folder():
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="jaxlm", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def lives(folder):
    with Lives(folder) as lives:
        yield lives


def configure(folder: Path, name: str, runs: Path | None = None) -> tuple[Config, Path]:
    """A run of 16 updates with 8 saves, 4 evaluations, monitors between, pruning, the best kept.

    Controllers decide, and the alarm of `depth_gain`, which nothing can reach, is raised.
    """
    config = config_for(
        folder / "data",
        name,
        training=TrainingConfig(updates=UPDATES, micro_batch_rows=2, micro_batches=2),
        evaluation=EvaluationConfig(every=4, depths=(1, 3), batch_rows=4, rows=8),
        checkpoint=CheckpointConfig(every=2, keep=2),
        control=ControlConfig(
            controllers=(
                CurriculumConfig(updates=8),
                RateByDepthConfig(),
                SpikeConfig(window=3, deviations=0.5, updates=2),
            )
        ),
        monitors=MonitorsConfig(every=3, rows=4, after_updates=0, window=4, depth_gain=9.0),
    )
    if runs is not None:
        run = loop.dataclasses.replace(config.run, directory=str(runs))
        config = loop.dataclasses.replace(config, run=run)
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(config))
    return config, path


def outcome(config: Config) -> dict:
    """All of a finished run that does not depend on the clock."""
    directory = directory_of(config)
    resolved = load_resolved(directory)
    spec = loop.step_spec(resolved, resolved.model.vocabulary, UPDATES)
    abstract = jax.eval_shape(lambda: init_state(spec))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(checkpoints.find(UPDATES), abstract, place)
        metadata = checkpoints.metadata(UPDATES)
    timed = {"seconds", "tokens_per_second", "mfu", "data_wait_fraction", "peak_memory_bytes"}

    def untimed(record: dict) -> dict:
        return {key: value for key, value in record.items() if key not in timed}

    report = json.loads((directory / "report.json").read_text())
    del report["name"], report["goodput"], report["goodput_line"], report["events"]
    report["evaluations"] = [untimed(record) for record in report["evaluations"]]
    return {
        "leaves": {
            jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        },
        "data_position": metadata["data_position"],
        "progress": metadata["progress"],
        "metrics": [untimed(r) for r in read_records(directory / "metrics.jsonl")],
        "blocks": (directory / "blocks.jsonl").read_text(),
        "evaluations": [untimed(r) for r in read_records(directory / "evaluations.jsonl")],
        **{
            name: (directory / f"{name}.jsonl").read_text()
            for name in ("monitors", "alarms", "decisions")
        },
        "events": [r for r in read_records(directory / "events.jsonl") if r["kind"] != "slow"],
        "report": report,
        # Nothing is left over, whatever its name.
        "files": sum(path.is_file() for path in directory.rglob("*")),
    }


def assert_equal(config: Config, undisturbed: dict, extra_files: int = 0) -> None:
    found = outcome(config)
    found["files"] -= extra_files
    for name, expected in undisturbed.items():
        assert found[name] == expected, name


def output_of(path: Path) -> str:
    return path.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def undisturbed(folder, lives):
    rng = np.random.default_rng(0)

    def documents(count):
        return [[*rng.integers(1, 64, rng.integers(3, 60)), 0] for _ in range(count)]

    write_documents(folder / "data", documents(40), documents(6), 64)
    config, path = configure(folder, "undisturbed")
    assert lives.live(path)[0] == 0, output_of(path)
    result = outcome(config)
    assert [record["update"] for record in result["metrics"]] == list(range(UPDATES))
    assert [record["update"] for record in result["evaluations"]] == [4, 8, 12, 16]
    watched = [json.loads(line)["update"] for line in result["monitors"].splitlines()]
    assert watched == [3, 4, 6, 8, 9, 12, 15, 16]
    assert result["alarms"].count("depth_gain") == 1
    assert "Spike" in result["decisions"]
    assert "Curriculum" in result["decisions"]
    return result


def hook_of(target: str, call: int, when: str, during: str | None = None, **more) -> dict:
    return {"target": target, "call": call, "when": when, "during": during, **more}


def assert_whole(config: Config) -> None:
    """What has a number for its name is whole, at any moment."""
    directory = directory_of(config) / "checkpoints"
    for update in updates_in(directory) if directory.is_dir() else ():
        found = inspect(directory / str(update))
        assert found.whole, (update, found)


def finish(lives: Lives, path: Path) -> None:
    path.with_suffix(".log").unlink(missing_ok=True)
    code, _ = lives.live(path)
    assert code == 0, output_of(path)
    assert "Traceback" not in output_of(path), output_of(path)


def test_killed_in_a_record_a_save_a_manifest_and_a_removal(folder, lives, undisturbed):
    config, path = configure(folder, "few")
    for place in (
        (f"{METRICS}:RunLog._append", 8, "half"),
        (f"{MANIFEST}:write_atomically", 2, "before"),
        ("pathlib:Path.rename", 1, "before"),
        ("shutil:os.unlink", 3, "after", "pruning"),
    ):
        code, _ = lives.live(path, hook_of(*place))
        assert code == -signal.SIGKILL, (place, output_of(path)[-6000:])
        assert_whole(config)
    finish(lives, path)
    assert_equal(config, undisturbed)


def test_ctrl_c_twice_ends_at_once_also_in_a_save(folder, lives, undisturbed):
    config, path = configure(folder, "twice")
    # The thread that saves is held up for a minute in all; the second signal ends the process.
    hook = hook_of(f"{CHECKPOINT}:write_manifest", 2, "before")
    hook |= {"signal": signal.SIGINT, "times": 2, "pause": 1.0, "then": 60.0}
    began = time.monotonic()
    code, phase = lives.live(path, hook)
    assert code == -signal.SIGINT, output_of(path)
    assert phase == "saving: manifest"
    assert time.monotonic() - began < 45
    assert "Ctrl-C again stops at once" in output_of(path)
    assert_whole(config)
    assert updates_in(directory_of(config) / "checkpoints") == [2]
    finish(lives, path)
    assert_equal(config, undisturbed)


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("params/**/d/*"), key=lambda path: path.stat().st_size)


def test_a_damaged_newest_checkpoint_is_passed_over(folder, lives, undisturbed):
    config, path = configure(folder, "damaged")
    directory = directory_of(config)
    hook = hook_of(f"{LOOP}:Run.dispatch", 8, "before", signal=signal.SIGTERM)
    assert lives.live(path, hook)[0] == 0
    assert updates_in(directory / "checkpoints")[-2:] == [6, 8]
    victim = largest_file(directory / "checkpoints/8")
    flip(victim, victim.stat().st_size // 2, 3)
    name = victim.relative_to(directory / "checkpoints/8").as_posix()
    finish(lives, path)
    assert (
        f"checkpoints/8: damaged ({name}: checksum differs); using update 6 instead; moved to"
    ) in output_of(path)
    (entry,) = read_records(directory / "recovery.jsonl")
    assert (entry["damaged"], entry["continued_from"], entry["moved_to"]) == (8, 6, "8.damaged")
    assert entry["damage"] == [f"{name}: checksum differs"]
    aside = list((directory / "checkpoints/8.damaged").rglob("*"))
    assert_equal(config, undisturbed, extra_files=1 + sum(p.is_file() for p in aside))


def test_nothing_is_touched_when_no_checkpoint_is_whole(folder, lives, undisturbed):
    config, path = configure(folder, "lost")
    directory = directory_of(config)
    hook = hook_of(f"{LOOP}:Run.dispatch", 4, "before", signal=signal.SIGTERM)
    assert lives.live(path, hook)[0] == 0
    for update in (2, 4):
        largest_file(directory / f"checkpoints/{update}").unlink()
    before = sorted(directory.rglob("*"))
    path.with_suffix(".log").unlink()
    assert lives.live(path)[0] == 1
    (line,) = [line for line in output_of(path).splitlines() if line.startswith("error")]
    assert re.search(
        r"checkpoints: no checkpoint is whole: 4 \(params/\S+: missing\), 2 \(params/\S+: missing"
        r"\); bring one back from a copy, or remove .*/lost to start over",
        line,
    )
    assert sorted(directory.rglob("*")) == before


# ------------------------------------------------------------------------------------ long


class History:
    """Lives through moments, run after run, and counts what was hit."""

    def __init__(self, folder: Path, lives: Lives, undisturbed: dict, name: str):
        self._folder, self._lives, self._undisturbed = folder, lives, undisturbed
        self._name, self._began = name, time.monotonic()
        self.runs = 0
        # Signals and the phase that they met.
        self.hit: collections.Counter[tuple[str, str]] = collections.Counter()
        # Moments that a life ended before.
        self.missed: list[dict] = []

    def live(self, moments: list[dict]) -> None:
        """Start one run, end it at each of the moments, let it finish, and compare."""
        self.runs += 1
        config, path = configure(self._folder, f"{self._name}{self.runs}")
        for moment in moments:
            path.with_suffix(".log").unlink(missing_ok=True)
            code, phase = self._lives.live(path, **moment)
            sent = moment.get("numbers", (signal.SIGKILL,))
            expected = {0, 130, *(-number for number in sent)}
            assert code in expected, output_of(path)
            if code == 0 and "Saved after update" not in output_of(path):
                self.missed.append(moment)
            else:
                self.hit["+".join(signal.Signals(s).name for s in sent), phase] += 1
            assert_whole(config)
        finish(self._lives, path)
        assert_equal(config, self._undisturbed)
        shutil.rmtree(directory_of(config))

    def show(self, capsys) -> None:
        """Print how many signals met each phase."""
        with capsys.disabled():
            seconds = time.monotonic() - self._began
            print(f"\n{self.hit.total()} signals in {self.runs} runs, {seconds:.0f} s")
            for (what, phase), count in sorted(self.hit.items()):
                print(f"{count:4d}  {what} in {phase}")


def seconds_of(lives: Lives, path: Path) -> float:
    """How long a life is that nothing ends."""
    began = time.monotonic()
    finish(lives, path)
    return time.monotonic() - began


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_matrix_of_kills(folder, lives, undisturbed, capsys):
    """Over 60 SIGKILLs at chosen and at random moments."""
    rng = random.Random(0)
    history = History(folder, lives, undisturbed, "killed")
    # Chosen moments, mixed so that a run lives through early and late ones. A run may be finished
    # before its last moments come; those have their turn in the next one.
    chosen = [{"hook": hook_of(*place)} for place in CHOSEN]
    starting = [{"hook": hook_of(*place)} for place in STARTING]
    rng.shuffle(chosen)
    while chosen and history.runs < 20:
        history.live([*chosen[:5], *starting[:1]])
        chosen, starting = history.missed + chosen[5:], starting[1:]
        history.missed = []
    assert chosen == starting == []
    history.live(
        [{"hook": hook_of(f"{LOOP}:Run.report", 1, "before")}]
        + [{"hook": hook_of(*place)} for place in FINISHED]
    )
    assert history.missed == []
    seconds = seconds_of(lives, configure(folder, "timed")[1])
    while history.hit.total() < 64:
        history.live([{"after": rng.uniform(0.1, seconds)} for _ in range(6)])
    history.show(capsys)
    phases = {phase for _, phase in history.hit}
    assert phases >= set(OF_RUNS.values()), set(OF_RUNS.values()) - phases


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_matrix_of_requests_to_stop(folder, lives, undisturbed, capsys):
    """Over 20 times SIGTERM, Ctrl-C, or Ctrl-C twice, at chosen and at random moments."""
    rng = random.Random(1)
    history = History(folder, lives, undisturbed, "stopped")
    for number in (signal.SIGTERM, signal.SIGINT):
        history.live(
            [
                {"hook": hook_of(*place, signal=number), "numbers": (number,)}
                for place in (
                    (f"{LOOP}:Run.dispatch", 2, "before"),
                    (f"{LOOP}:Run.read", 1, "after"),
                    (f"{LOOP}:evaluate", 1, "before"),
                    (f"{CHECKPOINT}:write_manifest", 1, "before"),
                    (f"{CHECKPOINT}:removable", 1, "after"),
                )
            ]
        )
    assert history.missed == []
    seconds = seconds_of(lives, configure(folder, "timed-again")[1])
    signals = itertools.cycle([(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGINT)])
    while history.hit.total() < 22:
        history.live(
            [{"after": rng.uniform(0.2, 0.8) * seconds, "numbers": next(signals)} for _ in range(4)]
        )
    history.show(capsys)


@pytest.fixture
def small_disk(tmp_path):
    """A mounted file system of 6 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, leave: int) -> None:
    (disk / "filling").write_bytes(b"\1" * (shutil.disk_usage(disk).free - leave))


@pytest.mark.long
def test_a_full_disk_ends_the_run_with_one_line_and_costs_nothing(
    folder, lives, undisturbed, small_disk
):
    config, path = configure(folder, "full", runs=small_disk)
    hook = hook_of(f"{LOOP}:Run.dispatch", 6, "before", signal=signal.SIGTERM)
    assert lives.live(path, hook)[0] == 0
    checkpoints = directory_of(config) / "checkpoints"
    before = updates_in(checkpoints)
    for leave, message in (
        (600_000, rf"error: {checkpoints}/8: not saved: no room; needs up to 1\.\d+ MB, \d+ kB"),
        (0, rf"error: {directory_of(config)}/\S+: No space left on device"),
    ):
        fill(small_disk, leave)
        path.with_suffix(".log").unlink()
        assert lives.live(path)[0] == 1, output_of(path)
        errors = [line for line in output_of(path).splitlines() if line.startswith("error")]
        assert len(errors) == 1, output_of(path)
        assert re.match(message, errors[0])
        assert "Traceback" not in output_of(path)
        assert updates_in(checkpoints) == before
        assert_whole(config)
        (small_disk / "filling").unlink()
    finish(lives, path)
    assert_equal(config, undisturbed)
