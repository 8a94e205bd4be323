"""Where the time goes, with a clock that the tests turn."""

import json
import subprocess
import sys
import time

import pytest

from jaxlm.training import goodput
from jaxlm.training.goodput import GOODPUT, Goodput, goodput_line, read_accounts, summary


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only `tick` adds."""
    now = [100.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput, "_process_age", lambda: 4.0)

    def tick(seconds: float) -> None:
        now[0] += seconds

    return tick


def test_the_kinds_and_goodput_add_up_over_two_starts(tmp_path, clock):
    """4 + 6 s of starting, 30 of training, of which 10 compile; a kill; 2 updates made again."""
    account = Goodput(tmp_path, 0, [])
    clock(6)
    account.switch("training")
    clock(30)
    account.move("compile", 10)
    account.record(4)
    clock(5)  # two updates of 2.5 s that nobody writes down
    lost = [{"update": 4, "seconds": 2.5}, {"update": 5, "seconds": 2.5}]
    account = Goodput(tmp_path, 4, lost)
    clock(1)
    account.switch("training")
    clock(20)
    account.switch("evaluation")
    clock(5)
    account.record(8)
    found = summary(read_accounts(tmp_path))
    # 4 + 6 + 30 + 5 and 4 + 1 + 20 + 5; kept are 20 of the first 25 and the 20 later ones.
    assert found["seconds"] == pytest.approx(75)
    assert found["starts"] == 2
    assert found["made_again_updates"] == 2
    assert found["goodput"] == pytest.approx(40 / 75)
    expected = {"start": 15, "compile": 10, "data": 0, "evaluation": 5, "checkpoint": 0}
    expected |= {"profile": 0, "made_again": 5}
    assert found["shares"] == pytest.approx({k: v / 75 for k, v in expected.items()})
    assert found["goodput"] + sum(found["shares"].values()) == pytest.approx(1)
    assert goodput_line(found) == (
        "Goodput 53.3% of 0:01:15 h in 2 starts (starting 20.0%, compiling 13.3%, evaluation "
        "6.7%, updates made again 6.7%)"
    )


def test_updates_that_were_written_down_are_not_counted_twice(tmp_path, clock):
    account = Goodput(tmp_path, 0, [], first=False)
    account.switch("training")
    clock(10)
    account.record(10)
    lost = [{"update": u, "seconds": 1.0, "data_wait_fraction": 0.0} for u in range(6, 10)]
    account = Goodput(tmp_path, 6, lost, False)
    found = summary(read_accounts(tmp_path))
    assert found["seconds"] == pytest.approx(10)
    assert found["goodput"] == pytest.approx(0.6)


def test_waiting_for_data_of_updates_made_again_is_counted_once(tmp_path, clock):
    """10 updates of 6 s of data and 4 of training, all lost: 60 % data, 40 % made again."""
    account = Goodput(tmp_path, 0, [], first=False)
    account.switch("training")
    clock(40)
    account.switch("data")
    clock(60)
    account.record(10)
    lost = [{"update": u, "seconds": 10.0, "data_wait_fraction": 0.6} for u in range(10)]
    Goodput(tmp_path, 0, lost, False).record(0)
    found = summary(read_accounts(tmp_path))
    assert found["goodput"] == pytest.approx(0)
    assert found["shares"]["data"] == pytest.approx(0.6)
    assert found["shares"]["made_again"] == pytest.approx(0.4)


def test_records_are_made_once_a_minute_and_survive_a_torn_line(tmp_path, clock):
    account = Goodput(tmp_path, 0, [])
    clock(59)
    account.record(1, due_only=True)
    assert len(read_accounts(tmp_path)) == 1
    clock(2)
    account.record(2, due_only=True)
    assert len(read_accounts(tmp_path)) == 2
    with (tmp_path / GOODPUT).open("a") as file:
        file.write('{"start": 1, "ti')
    assert len(read_accounts(tmp_path)) == 2
    assert Goodput(tmp_path, 0, [])._start == 2
    assert summary([]) is None


def test_the_age_of_a_process_counts_its_imports(tmp_path):
    script = (
        "import time, json; time.sleep(0.7)\n"
        "from jaxlm.training.goodput import _process_age\n"
        "print(_process_age())"
    )
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", script]))
    assert 0.7 < age < time.monotonic() - began + 0.1  # the kernel counts in hundredths


def test_a_line_is_plain_json(tmp_path, clock):
    Goodput(tmp_path, 3, [])
    (line,) = (tmp_path / GOODPUT).read_text().splitlines()
    assert json.loads(line)["update"] == 3
