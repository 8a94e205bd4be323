"""Lives of a training run, or of a study, that end by a signal, at chosen or random moments.

Run as a script it is a server: it imports jaxlm once, then forks one child for each line of its
standard input, which makes a life start in about a second. A line is JSON: `config` (a YAML file),
`study` (whether it is that of a study, whose workers are then this process: one kill ends all),
`log` (where the child's output goes), `phase` (a file that always says what the child is doing) and
`hook` (None, or where the child sends itself a signal). It answers with the child's process id, and
with its wait status when it has ended.
"""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

# What the child is doing, by the function that it is in; of nested ones the innermost counts.
OF_RUNS = {
    "jaxlm.training.loop:Run.__init__": "start-up",
    "jaxlm.training.checkpoint:Checkpoints.recover": "verifying",
    "jaxlm.training.loop:Run.restore": "restoring",
    "jaxlm.training.metrics:RunLog.__init__": "cutting records",
    "jaxlm.training.loop:Run.train": "training",
    "jaxlm.training.loop:Run._periodic_validation": "evaluation",
    "jaxlm.training.checkpoint:Checkpoints.save": "starting a save",
    "jaxlm.training.loop:Run.report": "report",
    "jaxlm.training.checkpoint:Checkpoints._complete": "saving: Orbax writes",
    "jaxlm.training.checkpoint:write_manifest": "saving: manifest",
    "jaxlm.training.checkpoint:Checkpoints._remove_old": "pruning",
}
OF_STUDIES = {
    "jaxlm.study.cycle:Cycles._prepare": "preparing",
    "jaxlm.study.worker:_evaluate_all": "evaluating all depths",
    "jaxlm.study.cycle:Cycles._compare": "comparing",
    "jaxlm.study.cycle:Cycles._reclaim": "reclaiming",
}
PHASES = OF_RUNS | OF_STUDIES


def _place(target: str) -> tuple[Any, str]:
    """The object that holds a function, and its name there."""
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, name


def _wrap(target: str, around) -> None:
    holder, name = _place(target)
    original = getattr(holder, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return around(original, args, kwargs)

    setattr(holder, name, wrapper)


# The phases that the main thread, and the one that saves, are in; the innermost is the last.
_STACKS: dict[bool, list[str]] = {True: ["start-up"], False: [""]}


def _stack() -> list[str]:
    return _STACKS[threading.current_thread() is threading.main_thread()]


def _tell_phases(path: str) -> None:
    """Write the phase of the main thread, and of the one that saves, as one line."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def tell() -> None:
        os.pwrite(file, f"{_STACKS[True][-1]}|{_STACKS[False][-1]}|".ljust(80).encode(), 0)

    def around(phase: str, original, args, kwargs):
        stack = _stack()
        stack.append(phase)
        tell()
        try:
            return original(*args, **kwargs)
        finally:
            stack.pop()
            tell()

    tell()
    for target, phase in PHASES.items():
        _wrap(target, functools.partial(around, phase))


def _send_at(hook: dict[str, Any]) -> None:
    """Send a signal to this process before or after the n-th call of a function, or half-way.

    With `during`, calls in that phase alone count.
    Half-way is for functions that write: what they would write first is written by half.
    """
    calls = 0
    number = hook.get("signal", signal.SIGKILL)

    def around(original, args, kwargs):
        nonlocal calls
        if hook["during"] not in (None, _stack()[-1]):
            return original(*args, **kwargs)
        calls += 1
        if calls != hook["call"]:
            return original(*args, **kwargs)
        if hook["when"] == "half":
            log, name, record = args  # of RunLog._append
            text = json.dumps(record)
            log._files[name].write(text[: len(text) // 2].encode())
        result = original(*args, **kwargs) if hook["when"] == "after" else None
        Path(hook["met"]).write_text(_stack()[-1])
        for _ in range(hook.get("times", 1)):
            os.kill(os.getpid(), number)
            time.sleep(hook.get("pause", 0.0))
        time.sleep(hook.get("then", 0.0))
        return result if hook["when"] == "after" else original(*args, **kwargs)

    _wrap(hook["target"], around)


def _live(order: dict[str, Any]) -> None:
    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["hook"]:
        _send_at(order["hook"])
    _tell_phases(order["phase"])
    from jaxlm.cli import run_script

    run_script(lambda: (_study if order["study"] else _train)(Path(order["config"])))


def _train(config: Path) -> int:
    from jaxlm.config import load
    from jaxlm.training import loop

    return loop.train(load([config]))


def _study(config: Path) -> int:
    from jaxlm.study.cycle import Cycles
    from jaxlm.study.settings import read_study
    from jaxlm.study.worker import read_job, work

    with Cycles(read_study(config), lambda job: work(read_job(job))) as cycles:
        cycles.run()
    return 0


def _serve() -> None:
    for target in [*PHASES, "jaxlm.cli:run_script"]:
        _place(target)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the child
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                _live(json.loads(line))
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


class Lives:
    """The server's client. Use as a context manager.

    Args:
        folder: for the compilation cache and the files that the lives write beside their run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(60)

    def live(
        self,
        config: Path,
        hook: dict[str, Any] | None = None,
        after: float | None = None,
        numbers: tuple[int, ...] = (signal.SIGKILL,),
        study: bool = False,
    ) -> tuple[int, str]:
        """Start the run once, and wait for its end.

        Args:
            config: its settings.
            hook: where it sends itself a signal: target, call, when, during.
            after: seconds until the signals are sent from outside.
            numbers: those signals, 50 ms apart.
            study: whether the settings are a study's.

        Returns:
            The exit code, negative for a signal, and what the run was doing when the first came.
        """
        phase, met = self.folder / "phase", self.folder / "met"
        for left in (phase, met):
            left.unlink(missing_ok=True)
        order = {
            "config": str(config),
            "study": study,
            "log": str(config.with_suffix(".log")),
            "phase": str(phase),
            "hook": hook and {**hook, "met": str(met)},
        }
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        child = int(self._server.stdout.readline())
        if after is not None:
            time.sleep(after)
            main, _, rest = (phase.read_text() if phase.exists() else "").partition("|")
            met.write_text(rest.partition("|")[0] or main or "start-up")
            for number in numbers:
                try:
                    os.kill(child, number)
                except ProcessLookupError:
                    break
                time.sleep(0.05)
        code = os.waitstatus_to_exitcode(int(self._server.stdout.readline()))
        return code, met.read_text() if met.exists() else ""


if __name__ == "__main__":
    _serve()
