"""A line for updates that take far longer than usual."""

import time

import pytest

from jaxlm.training.watchdog import Watchdog


@pytest.fixture
def dog():
    told = []
    dog = Watchdog(lambda update, line: told.append((update, line)))
    yield dog, told
    dog.close()


def test_20_times_the_median_is_told_once_and_while_it_lasts(dog):
    dog, _ = dog
    for seconds in [1.0] * 9 + [100.0]:  # the median is 1
        dog.done(seconds)
    began = time.monotonic()
    dog.begin(10)
    assert dog._slow(began + 19.9) is None
    update, line = dog._slow(began + 20.1)
    assert update == 10
    assert line.startswith(
        "Watchdog: update 10 has taken 20.1 s so far, 20 times the median (1 s) or more; waiting "
        "for the device."
    )
    assert dog._slow(began + 40) is None  # said already
    dog.done(41.0)
    dog.begin(11)
    dog.waiting_for("data")
    assert "waiting for data" in dog._slow(time.monotonic() + 21)[1]


def test_nothing_is_told_of_saves_nor_before_there_are_ten_updates(dog):
    dog, _ = dog
    for _ in range(9):
        dog.done(0.001)
    dog.begin(9)
    assert dog._slow(time.monotonic() + 100) is None
    dog.done(0.001)
    dog.begin(10)
    dog.pause()
    assert dog._slow(time.monotonic() + 100) is None
    dog.begin(10)
    assert dog._slow(time.monotonic() + 0.9) is None  # under a second concerns nobody


def test_an_update_that_ends_before_the_thread_looks_again_is_told_of(dog, monkeypatch):
    """The thread looks twice a second: what was too slow for less than that counts as well."""
    dog, told = dog
    for _ in range(10):
        dog.done(0.05)  # the limit is 1 s
    dog._stop.set()  # the thread looks no more
    dog._thread.join()
    now = time.monotonic()
    dog.begin(10)
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.3)
    dog.done(1.3)
    assert [update for update, _ in told] == [10]
    dog.begin(11)
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.2)
    dog.done(0.9)
    assert [update for update, _ in told] == [10]


def test_the_thread_tells_of_an_update_that_hangs(dog):
    dog, told = dog
    for _ in range(10):
        dog.done(0.01)
    dog.begin(10)
    for _ in range(100):
        time.sleep(0.05)
        if told:
            break
    assert [update for update, _ in told] == [10]
