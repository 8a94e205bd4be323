import errno
import importlib.util
import json
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config import CheckpointConfig, Config, to_yaml
from jaxlm.errors import Failure, UserError
from jaxlm.files import Lock, size_text
from jaxlm.training import checkpoint
from jaxlm.training.checkpoint import Checkpoints, checkpoint_bytes
from jaxlm.training.manifest import (
    MANIFEST,
    DamagedManifestError,
    Manifest,
    inspect,
    read_manifest,
    removable,
    remove,
    retained,
    updates_in,
)
from jaxlm.training.metrics import RunLog, read_records
from jaxlm.training.state import TrainState

PLACE = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def state_of(value: float) -> TrainState:
    params = {"w": jnp.full((4, 3), value, jnp.bfloat16)}
    return TrainState(jnp.int32(value), params, ({"m": jnp.full((4, 3), value)}, jnp.int32(1)))


def save_all(directory, losses: dict, keep=2):
    with Checkpoints(directory, keep) as checkpoints:
        for update, loss in losses.items():
            checkpoints.save(update, state_of(update), {"update": update}, 10 * update, loss)
    with Checkpoints(directory, keep) as checkpoints:
        return checkpoints.updates


def test_the_newest_and_the_best_are_kept(tmp_path):
    assert save_all(tmp_path / "a", {100: 1.0, 200: 2.0, 300: 3.0, 400: 4.0, 500: 5.0}) == [
        100,
        400,
        500,
    ]
    assert save_all(tmp_path / "b", {1: 1.0, 2: None, 3: 0.5, 4: None}) == [3, 4]
    assert save_all(tmp_path / "c", {1: None, 2: None, 3: None}, keep=1) == [3]


def test_state_and_metadata_come_back(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        state = state_of(7)
        checkpoints.save(7, state, {"tokens": 2**31 + 7, "data": {"next_index": 3}}, 70, None)
        jax.tree.map(lambda x: x.delete(), state)  # as a donating step would
        checkpoints.save(7, state_of(8), {}, 80, None)  # there already: nothing happens
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest == 7
        assert checkpoints.metadata(7) == {"tokens": 2**31 + 7, "data": {"next_index": 3}}
        abstract = jax.eval_shape(lambda: state_of(0))
        restored = checkpoints.restore(7, abstract, PLACE)
        params = checkpoints.restore_params(7, abstract.params, PLACE)
    assert jax.tree.structure(restored) == jax.tree.structure(state_of(0))
    for got, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(7)), strict=True):
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)
    assert np.array_equal(params["w"], state_of(7).params["w"])


def test_another_shape_is_refused_not_cut_or_padded(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state_of(1), {}, 10, None)
    for shape in ((3, 3), (5, 3), (4, 4)):
        target = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
        with (
            Checkpoints(tmp_path / "c") as checkpoints,
            pytest.raises(Failure, match=r"c/1: .* shape"),
        ):
            checkpoints.restore_params(1, target, PLACE)


def test_a_reader_leaves_a_pending_save_alone(tmp_path):
    big = {"w": jnp.ones((2000, 2000))}
    state = TrainState(jnp.int32(0), big, (jnp.int32(0),))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state, {}, 10, None)
        with Checkpoints(tmp_path / "c", read_only=True) as reader:
            assert reader.updates in ([], [1])
    with Checkpoints(tmp_path / "c", read_only=True) as reader:
        assert reader.updates == [1]
    with pytest.raises(UserError, match="no checkpoint has been saved yet"):
        Checkpoints(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_what_is_not_there_is_named(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(UserError, match="no checkpoint; there: none"):
            checkpoints.find(None)
        checkpoints.save(4, state_of(4), {}, 10, None)
        checkpoints.wait()
        with pytest.raises(UserError, match="no checkpoint of update 5; there: 4"):
            checkpoints.find(5)
        assert checkpoints.find(None) == 4


def test_records_after_the_checkpoint_are_removed_at_resume(tmp_path):
    log = RunLog(tmp_path, 0, tensorboard=False)
    for update in range(5):
        log.update({"update": update, "loss": 1.0})
        log.blocks(update, [[1, 2], [3, -1]])
        log.evaluation({"update": update + 1, "depth": None, "cross_entropy": 1.0, "top1": 0.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"update": 5, "lo')  # torn by a power failure
    RunLog(tmp_path, 3, tensorboard=False).close()
    assert [r["update"] for r in read_records(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [r["update"] for r in read_records(tmp_path / "evaluations.jsonl")] == [1, 2, 3]
    blocks = read_records(tmp_path / "blocks.jsonl")
    assert [r["update"] for r in blocks] == [0, 0, 1, 1, 2, 2]
    assert [r["blocks"] for r in blocks[:2]] == [[1, 2], [3]]


def test_records_that_should_be_there_are_missed(tmp_path):
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.update({"update": 0, "loss": 1.0})
    log.close()
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds the records of 1 of the 3 updates"):
        RunLog(tmp_path, 3, tensorboard=False)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("name", ["metrics", "blocks", "evaluations", "events", "decisions"])
@pytest.mark.parametrize("line", [b"\0\0\0", b"5", b'{"updatf": 1}', b'{"update": "1"}'])
def test_a_damaged_record_of_before_the_checkpoint_stops_the_start(tmp_path, name, line):
    log = RunLog(tmp_path, 0, tensorboard=False)
    for update in range(5):
        log.update({"update": update, "loss": 1.0})
        log.blocks(update, [[1]])
        log.evaluation({"update": update + 1, "depth": None, "cross_entropy": 1.0, "top1": 0.0})
        log.event(update, "kind", "text")
        log.decision({"update": update})
    log.close()
    path = tmp_path / f"{name}.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = line
    path.write_bytes(b"\n".join(lines))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(UserError, match=rf"{name}\.jsonl:2: cannot be read as a record"):
        RunLog(tmp_path, 4, tensorboard=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert len(read_records(path)) in (1, 5)


def test_blocks_that_end_too_early_are_missed(tmp_path):
    log = RunLog(tmp_path, 0, tensorboard=False)
    for update in range(3):
        log.update({"update": update, "loss": 1.0})
        log.blocks(update, [[1], [2]])
    log.close()
    path = tmp_path / "blocks.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    with pytest.raises(UserError, match=r"blocks\.jsonl: holds the records of 2 of the 3 updates"):
        RunLog(tmp_path, 3, tensorboard=False)


def test_a_change_that_no_checkpoint_has_did_not_happen(tmp_path):
    """It is recorded with the update it was made at, before the checkpoint that makes it true."""
    log = RunLog(tmp_path, 0, tensorboard=False)
    for update in range(6):
        log.update({"update": update, "loss": 1.0})
        log.blocks(update, [[1]])
    for update in (2, 6):
        log.change({"update": update, "key": "optim.learning_rate", "was": 1, "is": 2})
    log.close()
    RunLog(tmp_path, 6, tensorboard=False).close()
    assert [r["update"] for r in read_records(tmp_path / "changes.jsonl")] == [2]


# ------------------------------------------------------------------------------------ retention


def manifest_of(update: int, loss: float | None = None, tokens: int = 0) -> Manifest:
    return Manifest(update, tokens, loss, 0.0, {})


def kept(losses: list, keep: int = 1) -> set[int]:
    return retained([manifest_of(n + 1, loss) for n, loss in enumerate(losses)], keep, None)


def test_retention_of_the_newest_and_the_best():
    assert kept([1.0, 2.0, 3.0, 4.0, 5.0], keep=2) == {1, 4, 5}
    assert kept([5.0, 4.0, 3.0]) == {3}
    assert kept([2.0, 1.0, 1.0, 3.0]) == {3, 4}  # of equal ones the newest
    assert kept([]) == set()
    # By number: 1000 is newer than 999, whatever the order of names or of files.
    manifests = [manifest_of(update) for update in (1000, 9, 999, 10)]
    assert retained(manifests, 2, None) == {999, 1000}


def test_some_are_kept_for_good_by_tokens():
    """Saved every 40 tokens; one stays for each 100."""
    manifests = [manifest_of(n, tokens=40 * n) for n in range(1, 11)]
    assert retained(manifests, 1, 100) == {3, 5, 8, 10}
    # What was removed in between does not move the marks.
    assert retained([m for m in manifests if m.update in (3, 5, 8, 10)], 1, 100) == {3, 5, 8, 10}


def test_losses_that_are_not_finite_are_never_the_best(tmp_path):
    losses = {1: 1.0, 2: float("nan"), 3: 0.5, 4: float("nan"), 5: float("-inf"), 6: None}
    assert save_all(tmp_path, losses, keep=2) == [3, 5, 6]


def test_what_a_killed_process_left_is_removed_by_a_writer_alone(tmp_path):
    save_all(tmp_path, {1: None})
    left = ["2.saving", "2.saving.orbax-checkpoint-tmp", "0.deleting", "3.orbax-checkpoint-tmp-1"]
    for name in [*left, "1.damaged", "notes"]:
        (tmp_path / name / "params").mkdir(parents=True)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.updates == [1]
    assert len(list(tmp_path.iterdir())) == 7
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.updates == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "1.damaged", "notes"]


# ------------------------------------------------------------------------------------ damage


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flipped(content: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of random numbers, with all the kinds of files that there are."""
    rng = np.random.default_rng(0)
    state = TrainState(
        jnp.int32(3),
        {"w": jnp.asarray(rng.standard_normal((40, 30)), jnp.float32)},
        ({"m": jnp.asarray(rng.standard_normal((40, 30)), jnp.float32)}, jnp.int32(3)),
    )
    with Checkpoints(tmp_path / "c", 9) as checkpoints:
        checkpoints.save(3, state, {"tokens": 5}, 5, 1.5)
    return tmp_path / "c" / "3"


def test_every_flipped_bit_is_found(saved):
    """200 in turn, over all files; and one in each byte of the manifest."""
    rng = random.Random(0)
    files = [path for path in files_of(saved) if path.stat().st_size]
    assert {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", MANIFEST} <= {
        path.name for path in files
    }
    assert inspect(saved).whole
    for _ in range(200):
        path = rng.choice(files)
        content = path.read_bytes()
        at = rng.randrange(len(content))
        path.write_bytes(flipped(content, at, rng.randrange(8)))
        (line,) = inspect(saved).damage
        assert line.startswith(path.relative_to(saved).as_posix() + ": "), (path, at)
        path.write_bytes(content)
    assert inspect(saved).whole
    content = (saved / MANIFEST).read_bytes()
    for at in range(len(content)):
        (saved / MANIFEST).write_bytes(flipped(content, at, rng.randrange(8)))
        with pytest.raises(DamagedManifestError, match="is not what was written"):
            read_manifest(saved)


def test_cut_missing_and_additional_files_are_named(saved):
    for path in files_of(saved):
        name, content = path.relative_to(saved).as_posix(), path.read_bytes()
        for size in {0, len(content) // 2, len(content) - 1} - {-1, len(content)}:
            path.write_bytes(content[:size])
            found = inspect(saved)
            assert len(found.damage) == 1, name
            if name != MANIFEST:
                expected = f"{name}: {size:,} bytes, expected {len(content):,}"
                assert found.damage == [expected]
                assert inspect(saved, contents=False).damage == [expected]
        path.unlink()
        if name == MANIFEST:
            assert inspect(saved).unverified
        else:
            assert inspect(saved).damage == [f"{name}: missing"]
        path.write_bytes(content)
    (saved / "params/d/more").touch()
    assert inspect(saved).damage == ["params/d/more: does not belong here"]


def damage_of(directory: Path, update: int, within: str = "params") -> Path:
    """Flip a bit in the largest file of a checkpoint."""
    path = max(
        (directory / str(update) / within).rglob("d/*"), key=lambda path: path.stat().st_size
    )
    content = path.read_bytes()
    path.write_bytes(flipped(content, len(content) // 2, 0))
    return path


def test_recovery_passes_over_damage_and_moves_it_aside(tmp_path, capsys):
    c = tmp_path / "c"
    save_all(c, {1: None, 2: None, 10: None}, keep=3)
    (c / "10.damaged").mkdir()  # of another time
    name = damage_of(c, 10).relative_to(c / "10").as_posix()
    second = damage_of(c, 2, "optimizer").relative_to(c / "2").as_posix()
    with Checkpoints(c, 3) as checkpoints:
        assert checkpoints.recover(tmp_path / "recovery.jsonl") == 1
        assert checkpoints.updates == [1]
        checkpoints.restore(1, jax.eval_shape(lambda: state_of(0)), PLACE)
    assert (c / "10.damaged-2" / name).is_file()
    assert (c / "2.damaged" / second).is_file()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        f"warning: {c}/10: damaged ({name}: checksum differs); using update 1 instead; moved to "
        f"{c}/10.damaged-2"
    )
    assert len(lines) == 2
    entries = read_records(tmp_path / "recovery.jsonl")
    assert [(e["damaged"], e["moved_to"], e["continued_from"]) for e in entries] == [
        (10, "10.damaged-2", 1),
        (2, "2.damaged", 1),
    ]


def test_nothing_whole_is_an_error_that_names_all(tmp_path):
    c = tmp_path / "c"
    save_all(c, {1: None, 2: None}, keep=3)
    damage_of(c, 1)
    damage_of(c, 2)
    with (
        Checkpoints(c) as checkpoints,
        pytest.raises(
            Failure, match=r"no checkpoint is whole: 2 \(params/\S+: checksum differs\), 1"
        ),
    ):
        checkpoints.recover(tmp_path / "recovery.jsonl")
    assert sorted(path.name for path in c.iterdir()) == ["1", "2"]
    assert not (tmp_path / "recovery.jsonl").exists()


def test_what_training_removes_while_it_is_read_is_no_damage(tmp_path, monkeypatch, capsys):
    """A reader has listed 1 and is about to read it when 2 is written and 1 removed."""
    save_all(tmp_path, {1: None}, keep=1)
    examine = checkpoint.inspect

    def meanwhile(path, **arguments):
        if path.name == "1":
            save_all(tmp_path, {2: None}, keep=1)
        return examine(path, **arguments)

    monkeypatch.setattr(checkpoint, "inspect", meanwhile)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.find(None) == 2
        abstract = jax.eval_shape(lambda: state_of(0)).params
        checkpoints.restore_params(2, abstract, PLACE)
        with pytest.raises(Failure, match=r"/1: was removed while it was read; .* Try again"):
            checkpoints.restore_params(1, abstract, PLACE)
    assert capsys.readouterr().err == ""


def test_a_manifest_on_a_bad_sector_is_damage_of_its_checkpoint_alone(tmp_path, monkeypatch):
    save_all(tmp_path / "c", {1: None, 2: None, 3: None}, keep=3)
    read = Path.read_bytes

    def fails(path):
        if path.parts[-2:] == ("2", "manifest.json"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    assert inspect(tmp_path / "c/2").damage == [
        "manifest.json: cannot be read (Input/output error)"
    ]
    assert removable(tmp_path / "c", 1, None) == [1]  # 2 is left for a person
    remove(tmp_path / "c", 3)
    with Checkpoints(tmp_path / "c", keep=3) as checkpoints:
        assert checkpoints.recover(tmp_path / "recovery.jsonl") == 1


def test_readers_pass_over_damage_and_touch_nothing(tmp_path, capsys):
    save_all(tmp_path, {1: None, 2: None, 3: None}, keep=3)
    damage_of(tmp_path, 3)
    damage_of(tmp_path, 2, "optimizer")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.find(None, params_only=True) == 2
        assert "/3: damaged (params/" in capsys.readouterr().err
        assert checkpoints.find(None) == 1
        with pytest.raises(Failure, match=r"/3: damaged .*; other checkpoints: 1, 2"):
            checkpoints.find(3)
        assert checkpoints.updates == [1, 2, 3]


def test_a_checkpoint_that_lost_its_manifest_comes_after_all_whole_ones(tmp_path, capsys):
    """It cannot be compared with anything: it is used where nothing better is, with a warning."""
    save_all(tmp_path, {1: None, 2: None, 3: None}, keep=9)
    (tmp_path / "3" / MANIFEST).unlink()
    record = tmp_path / "recovery.jsonl"
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.find(None) == 2
        assert "/3: damaged (manifest.json: missing); using update 2" in capsys.readouterr().err
        assert checkpoints.find(3) == 3  # asked for by name
        assert "/3: has no manifest.json" in capsys.readouterr().err
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert checkpoints.recover(record) == 2
        assert checkpoints.updates == [1, 2]
    assert (tmp_path / "3.damaged").is_dir()
    for update in (1, 2):
        (tmp_path / str(update) / MANIFEST).unlink()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.recover(record) == 2
        assert "/2: has no manifest.json" in capsys.readouterr().err
        checkpoints.restore(2, jax.eval_shape(lambda: state_of(0)), PLACE)
        checkpoints.save(4, state_of(4), {}, 10, None)
    # Retention leaves to a person what it knows nothing of.
    assert updates_in(tmp_path) == [1, 2, 4]


def test_a_move_that_was_killed_is_recorded_once(tmp_path, monkeypatch):
    save_all(tmp_path, {1: None, 2: None})
    (tmp_path / "2" / MANIFEST).write_text("{}")
    record = tmp_path / "recovery.jsonl"

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(KeyboardInterrupt):
            checkpoints.recover(record)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.recover(record) == 1
    (only,) = read_records(record)
    assert (only["damaged"], only["moved_to"]) == (2, "2.damaged")


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    save_all(tmp_path, {1: None})
    (tmp_path / "1" / MANIFEST).unlink()
    for path in (tmp_path / "1" / "params").rglob("*"):
        if path.is_file() and path.stat().st_size:
            path.write_bytes(path.read_bytes()[:-1])
    with (
        Checkpoints(tmp_path, read_only=True) as checkpoints,
        pytest.raises(Failure, match="1: cannot be read as the state") as caught,
    ):
        checkpoints.restore(1, jax.eval_shape(lambda: state_of(0)), PLACE)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


# ------------------------------------------------------------------------------------ no room


def test_size_for_people():
    sizes = (0, 999_499, 1_230_000, 45_600_000, 1.23e9, 456e9, 7.5e12)
    texts = ["0 kB", "999 kB", "1.23 MB", "45.6 MB", "1.23 GB", "456 GB", "7.50 TB"]
    assert [size_text(size) for size in sizes] == texts


def test_the_size_of_a_checkpoint_is_known_before(saved):
    """2 x 40 x 30 floats and 2 integers, 1 % and 1 MiB."""
    state = TrainState(
        jnp.int32(0), {"w": jnp.zeros((40, 30))}, ({"m": jnp.zeros((40, 30))}, jnp.int32(0))
    )
    assert checkpoint_bytes(state) == 9608 + 96 + 2**20
    assert sum(path.stat().st_size for path in files_of(saved)) < checkpoint_bytes(state)


def test_a_save_that_cannot_fit_is_refused_and_one_that_hardly_does_is_warned_of(
    tmp_path, monkeypatch, capsys
):
    c = tmp_path / "c"
    save_all(c, {1: None, 2: None}, keep=3)
    usage = shutil.disk_usage(c)
    needed = checkpoint_bytes(state_of(3))
    assert capsys.readouterr().err == ""
    with Checkpoints(c, 3) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
        checkpoints.save(3, state_of(3), {}, 10, None)
        assert "1.05 MB free; a checkpoint needs up to 1.05 MB" in capsys.readouterr().err
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
        with pytest.raises(
            Failure,
            match=r"c/4: not saved: no room; needs up to 1.05 MB, 1.05 MB free; .* continues from "
            r"update 3",
        ):
            checkpoints.save(4, state_of(4), {}, 10, None)
    assert sorted(path.name for path in c.iterdir()) == ["1", "2", "3"]
    assert all(inspect(path).whole for path in c.iterdir())


def big_state() -> TrainState:
    numbers = np.random.default_rng(0).standard_normal((500, 1000)).astype(np.float32)
    return TrainState(jnp.int32(1), {"w": jnp.asarray(numbers)}, (jnp.int32(1),))


def test_a_save_that_fails_in_the_background_is_one_line(tmp_path, caplog):
    """A limit on the size of files stands in for a full disk: the kernel refuses the write."""
    c = tmp_path / "c"
    save_all(c, {1: None}, keep=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = r"c/2: not saved: File too large; needs up to \d.* free; .* continues from update 1"
    with Checkpoints(c, 3) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            checkpoints.save(2, big_state(), {}, 10, None)
            with pytest.raises(Failure, match=message):
                checkpoints.save(3, big_state(), {}, 10, None)
            assert sorted(path.name for path in c.iterdir()) == ["1"]
            checkpoints.save(2, big_state(), {}, 10, None)
            with pytest.raises(Failure, match=message):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert inspect(c / "1").whole
        checkpoints.save(2, big_state(), {}, 10, None)  # there is room again
    assert inspect(c / "2").whole
    assert caplog.text == ""


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied", "/x"),
        ValueError(
            "PERMISSION_DENIED: \"/x\": Failed to open: Permission denied [os_error_code='13']"
        ),
    ],
)
def test_what_the_system_says_is_said(tmp_path, monkeypatch, error):
    def refuse(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", refuse)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(Failure, match=r"/5: not saved: Permission denied; needs"),
    ):
        checkpoints.save(5, state_of(5), {}, 10, None)


def test_mistakes_of_our_own_are_not_hidden(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ValueError("a bug")

    monkeypatch.setattr(checkpoint, "write_manifest", fail)
    with pytest.raises(ValueError, match="a bug"):
        save_all(tmp_path, {1: None})


def test_a_folder_that_is_gone_or_another_one_is_not_saved_to(tmp_path):
    """What an unmounted disk leaves: no folder, or the empty one below it."""
    c = tmp_path / "c"
    with Checkpoints(c) as checkpoints:
        checkpoints.save(1, state_of(1), {}, 10, None)
        checkpoints.wait()
        c.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(Failure, match=r"c: is no longer the folder .* update 2 is not"):
                checkpoints.save(2, state_of(2), {}, 10, None)
            c.mkdir(exist_ok=True)
        assert list(c.iterdir()) == []
    assert inspect(tmp_path / "elsewhere" / "1").whole


def test_a_folder_that_goes_during_a_save_gets_no_other_in_its_place(tmp_path, monkeypatch):
    """Orbax makes folders that are missing: the checkpoint would lie below the mount point."""
    run = tmp_path / "disk" / "run"
    save = checkpoint.ocp.save_checkpointables_async

    class Response:
        def __init__(self, *arguments, **settings):
            self.written = save(*arguments, **settings)

        def result(self):
            self.written.result()
            run.parent.rename(tmp_path / "elsewhere")
            (run / "checkpoints" / "1.saving" / "params").mkdir(parents=True)  # as Orbax does

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", Response)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, state_of(1), {}, 10, None)
    with pytest.raises(Failure, match=r"checkpoints: is no longer the folder .* update 1 is not"):
        checkpoints.__exit__()
    assert not run.exists()
    assert (tmp_path / "elsewhere" / "run" / "checkpoints").is_dir()


@pytest.fixture
def small_disk(tmp_path):
    """A mounted file system of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_a_real_disk_that_fills_up_or_turns_read_only(small_disk, monkeypatch):
    def save(checkpoints):
        checkpoints.save(2, big_state(), {}, 10, None)
        checkpoints.wait()

    c = small_disk / "c"
    monkeypatch.setattr(checkpoint, "checkpoint_bytes", lambda _: 1000)  # it fills after the check
    with Checkpoints(c, 3) as checkpoints:
        checkpoints.save(1, big_state(), {}, 10, None)
        checkpoints.wait()
        for leave in (1_000_000, 40_000, 5000):
            (small_disk / "filling").write_bytes(
                b"\1" * (shutil.disk_usage(small_disk).free - leave)
            )
            with pytest.raises(Failure, match=r"c/2: not saved: No space left on device; needs"):
                save(checkpoints)
            (small_disk / "filling").unlink()
            assert sorted(path.name for path in c.iterdir()) == ["1"]
            assert inspect(c / "1").whole
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        subprocess.run(remount, check=True)
        with pytest.raises(Failure, match=r"c/2: not saved: Read-only file system; needs"):
            save(checkpoints)
        subprocess.run([*remount[:2], "remount,rw", remount[-1]], check=True)
        save(checkpoints)
    assert inspect(c / "2").whole


# ------------------------------------------------------------------------------------ the script


@pytest.fixture
def script(monkeypatch):
    """Run scripts/checkpoints.py in this process; `module` is the script."""
    path = Path(__file__).parents[2] / "scripts/checkpoints.py"
    spec = importlib.util.spec_from_file_location("checkpoints_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["checkpoints.py", *map(str, words)])
        return module.main()

    run.module = module
    return run


@pytest.fixture
def run(tmp_path):
    """A run with five checkpoints, 2 the best."""
    config = Config(checkpoint=CheckpointConfig(keep=3))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    losses = {1: 3.0, 2: 1.0, 9: 2.0, 10: None, 11: None}
    save_all(tmp_path / "checkpoints", losses, keep=5)
    return tmp_path


def test_list_and_verify(script, run, capsys):
    assert script(run, "verify") == 0
    assert script(run, "list") == 0
    printed = capsys.readouterr().out
    assert re.search(r"2 │ +20 │ +1\.0000 │ +\d kB │ +\d+ s │ +whole │ +best", printed)
    assert re.search(r"10 │ +100 │ +- │", printed)
    name = damage_of(run / "checkpoints", 10).relative_to(run / "checkpoints").as_posix()
    (run / "checkpoints/9/manifest.json").unlink()
    assert script(run, "list") == 0  # compares no contents
    capsys.readouterr()
    assert script(run, "verify") == 1
    assert f"{name}: checksum differs" in capsys.readouterr().out
    assert script(run, "verify", "--json") == 1
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["update"], row["state"]) for row in rows] == [
        (1, "whole"),
        (2, "whole"),
        (9, "unverified"),
        (10, "damaged"),
        (11, "whole"),
    ]
    assert [row["best"] for row in rows] == [False, True, False, False, False]
    assert (rows[1]["tokens"], rows[1]["validation_cross_entropy"]) == (20, 1.0)


def test_what_training_removes_while_it_is_verified_is_not_listed(script, run, monkeypatch, capsys):
    def meanwhile(path, *arguments):
        if path.name == "1":
            remove(path.parent, 1)
        return inspect(path, *arguments)

    monkeypatch.setattr(script.module, "inspect", meanwhile)
    assert script(run, "verify", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["update"], row["state"]) for row in rows] == [(u, "whole") for u in (2, 9, 10, 11)]


def updates_of(run: Path) -> list[int]:
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.updates


def test_prune(script, run, capsys):
    assert script(run, "prune") == 0
    assert "would remove" in capsys.readouterr().out
    assert updates_of(run) == [1, 2, 9, 10, 11]
    assert script(run, "prune", "--yes") == 0  # keeps 3 as the run would
    assert updates_of(run) == [2, 9, 10, 11]
    with Lock(run / "lock", ""), pytest.raises(UserError, match="is being trained"):
        script(run, "prune", "--keep", 1, "--yes")
    with pytest.raises(UserError, match="--keep 0: keep at least 1"):
        script(run, "prune", "--keep", 0, "--yes")
    assert script(run, "prune", "--keep", 1, "--yes") == 0
    assert updates_of(run) == [2, 11]


def test_prune_removes_what_a_killed_removal_left(script, run, capsys):
    left = run / "checkpoints" / "1.deleting"
    (run / "checkpoints" / "1").rename(left)
    assert script(run, "prune", "--keep", 9) == 0
    assert f"would remove {left}" in capsys.readouterr().out
    assert left.is_dir()
    assert script(run, "prune", "--keep", 9, "--yes") == 0
    assert not left.exists()
    assert updates_of(run) == [2, 9, 10, 11]


def test_prune_counts_whole_checkpoints(script, run):
    damage_of(run / "checkpoints", 11)  # the newest: a restart goes on from 10
    assert script(run, "prune", "--keep", 1, "--yes") == 0
    assert updates_of(run) == [2, 10, 11]


def test_prune_leaves_the_only_whole_checkpoint(script, run):
    for update in (2, 9, 10, 11):
        damage_of(run / "checkpoints", update)
    assert script(run, "prune", "--keep", 1, "--yes") == 0
    assert updates_of(run) == [1, 2, 9, 10, 11]
