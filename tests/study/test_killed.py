"""Whole studies that are killed, study and worker at once, at random moments."""

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from test_cycle import TINY, assert_same, texts  # noqa: F401  (a fixture)

from jaxlm.study.plan import disk_needs
from jaxlm.study.settings import Study, read_study

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from lives import Lives

KILLS = 40


class Peak:
    """The most bytes of a folder's files that were seen, looked at twenty times a second."""

    def __init__(self, folder: Path):
        self.bytes, self._folder, self._end = 0, folder, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            total = 0
            for place, _, files in os.walk(self._folder):
                for name in files:
                    with contextlib.suppress(FileNotFoundError):
                        total += (Path(place) / name).lstat().st_size
            self.bytes = max(self.bytes, total)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def configure(folder: Path, name: str, sources: Path) -> tuple[Study, Path]:
    """A study of its own folder, its sources read through a symbolic link."""
    place = folder / name
    place.mkdir()
    (place / "linked").symlink_to(sources)
    path = place / "study.yaml"
    path.write_text(
        TINY.replace("{folder}/studies", f"{place}/studies").format(folder=place / "linked")
    )
    return read_study(path), path


def sentinels_of(study: Study) -> dict[Path, str]:
    """Files that are not the study's, some with names that are like its own."""
    folder = study.directory
    places = (
        folder.parent / "tokens-00000.npy",
        folder / "data" / "notes.txt",
        folder / "data" / "train" / "tokens-99999.npy",
        folder / "data" / "train" / "tokens-00000.npy.bak",
        folder / "models" / "notes.txt",
    )
    return {place: f"not yours: {place.name}" for place in places}


@pytest.mark.long
def test_forty_random_kills(texts, tmp_path, capsys):  # noqa: F811
    rng = random.Random(7)
    sources = {path: path.read_bytes() for path in texts.iterdir()}
    kills, studies, phases = 0, 0, Counter()
    with Lives(tmp_path) as lives:
        undisturbed, path = configure(tmp_path, "undisturbed", texts)
        assert lives.live(path, study=True)[0] == 0, path.with_suffix(".log").read_text()[-2000:]
        _, path = configure(tmp_path, "timed", texts)  # with compiled programs at hand
        began = time.monotonic()
        assert lives.live(path, study=True)[0] == 0
        seconds = time.monotonic() - began
        while kills < KILLS:
            studies += 1
            study, path = configure(tmp_path, f"killed-{studies}", texts)
            sentinels: dict[Path, str] = {}
            with Peak(study.directory) as peak:
                for _ in range(12):
                    after = min(rng.expovariate(4 / seconds), seconds)
                    code, phase = lives.live(path, after=after, study=True)
                    assert code in (0, -9), path.with_suffix(".log").read_text()[-2000:]
                    if code == 0:
                        break
                    kills += 1
                    phases[phase] += 1
                    if (study.directory / "models").exists() and not sentinels:
                        sentinels = sentinels_of(study)
                        for place, text in sentinels.items():
                            place.write_text(text)
                else:
                    assert lives.live(path, study=True)[0] == 0
            assert peak.bytes <= disk_needs(study).peak
            for place, text in sentinels.items():
                assert place.read_text() == text
                place.unlink()
            assert_same(undisturbed, study)
            for run in ("loop-42", "plain-42"):
                updates = (study.directory / "models" / run / "metrics.jsonl").read_text()
                assert updates.count('{"update": ') == study.updates
    assert {path: path.read_bytes() for path in texts.iterdir()} == sources
    with capsys.disabled():
        print(f"\n{kills} kills in {studies} studies of {seconds:.0f} s: {phases.most_common()}")
