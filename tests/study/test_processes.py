"""scripts/compare.py with real processes and real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cycle import (
    TINY,
    assert_made_again,
    before_reclaiming,  # noqa: F401  (a fixture)
    damaged_copy,
    finish,
    texts,  # noqa: F401  (a fixture)
)

from jaxlm.errors import Failure
from jaxlm.study.cycle import Cycles, StoppedError, launcher
from jaxlm.study.journal import Journal

ROOT = Path(__file__).parents[2]


def start(path: Path, *words: str) -> subprocess.Popen:
    log = path.with_suffix(".log").open("a")
    command = [sys.executable, str(ROOT / "scripts/compare.py"), "--config", str(path), *words]
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)


def workers_of(process: subprocess.Popen) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = path.read_text().split() if path.exists() else []
    return [int(pid) for pid in found if b"jaxlm.study.worker" in command_of(int(pid))]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition, seconds: float = 240.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.long
def test_signals_and_kills_lose_nothing(texts, tmp_path):  # noqa: F811
    path = tmp_path / "study.yaml"
    text = TINY.replace("cycles: 3", "cycles: 2").replace("every: 10", "every: 2")
    path.write_text(text.format(folder=texts).replace(f"{texts}/studies", f"{tmp_path}/studies"))
    log, folder = path.with_suffix(".log"), tmp_path / "studies" / "tiny"

    def trains(model: str, times: int):
        return lambda: log.exists() and log.read_text().count(f"Training {model}-42") >= times

    # SIGKILL of the study alone: its worker saves and ends by itself.
    process = start(path)
    wait_for(trains("loop", 1))
    workers = workers_of(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for worker in workers:
        wait_for(lambda pid=worker: b"jaxlm" not in command_of(pid))
    # SIGKILL of the worker: the study says so, and ends with 1.
    process = start(path)
    for pid in wait_for(lambda: workers_of(process)):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "exit code -9; by signal 9; the same command goes on" in log.read_text()
    # SIGTERM and Ctrl-C reach the worker, which saves.
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        process = start(path)
        wait_for(lambda p=process: workers_of(p))
        time.sleep(8.0)  # importing, compiling or training: any of these
        process.send_signal(number)
        assert process.wait(120) == code, log.read_text()[-2000:]
        assert not workers_of(process)
    process = start(path)
    assert process.wait(280) == 0, log.read_text()[-2000:]

    journal = Journal(folder / "journal.jsonl", read_only=True)
    assert len(journal.all("cycle")) == 2
    logs = [(folder / f"models/{m}-42/blocks.jsonl").read_text() for m in ("loop", "plain")]
    assert logs[0] == logs[1]
    assert [json.loads(line)["update"] for line in logs[0].splitlines()] == [
        update for update in range(20) for _ in range(2)
    ]
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/compare.py"), "--config", str(path), "--status"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "2 of 2 cycles" in result.stdout


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_makes_a_checkpoint_again(before_reclaiming, tmp_path):  # noqa: F811
    study = damaged_copy(before_reclaiming, tmp_path)
    blocks = study.directory / "models/loop-42/blocks.jsonl"
    whole = blocks.stat().st_size

    def killed(job: Path) -> int:
        worker = subprocess.Popen(
            [sys.executable, "-m", "jaxlm.study.worker", str(job), str(os.getpid())], cwd=ROOT
        )
        wait_for(lambda: blocks.stat().st_size < whole)
        worker.kill()
        return worker.wait()

    with Cycles(study, killed) as cycles, pytest.raises(Failure, match="by signal 9"):
        cycles.run()
    finish(study)
    assert_made_again(study, before_reclaiming)


@pytest.mark.usefixtures("hangup_heeded")
def test_a_study_under_nohup_outlives_its_terminal(tmp_path, monkeypatch):
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\nkill -HUP $PPID\nsleep 0.3\nexit 7\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    launch = launcher(os.environ)
    with pytest.raises(StoppedError) as stopped:
        launch(tmp_path / "job.json")
    assert stopped.value.number == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        assert launch(tmp_path / "job.json") == 7
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
