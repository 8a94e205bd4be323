"""Folders from a stranger run no code, and nothing outside of them is written or removed.

Each test plants a payload that leaves a file behind when it runs, or a path that leads out.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import write_documents

from jaxlm.config import load
from jaxlm.data.shards import DataDirectory, SplitWriter, preparation_lock
from jaxlm.data.teacher import cache_lock
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.errors import Failure, UserError
from jaxlm.files import is_inside, refuse_links
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.loading import load_run
from jaxlm.training.manifest import (
    MANIFEST,
    DamagedManifestError,
    read_manifest,
    removable,
    remove,
)
from jaxlm.training.state import TrainState

SINGLE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def trap(tmp_path):
    """A file that payloads make."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_the_payload_works(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "text",
    [
        "run: !!python/object/apply:os.system ['touch TRAP']",
        "run: !!python/object/new:os.system ['touch TRAP']",
        "run: {name: !!python/name:os.system }",
        "!!python/object/apply:subprocess.check_call [[touch, TRAP]]",
        "run: &a {name: x}\ndata: *a",
    ],
)
def test_yaml_makes_no_objects(tmp_path, trap, text):
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("TRAP", str(trap)))
    with pytest.raises(UserError, match=r"config\.yaml:1"):
        load([path])
    with pytest.raises(UserError, match=r"config\.yaml:1"):
        load_run(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", ".hidden", "a\nb"])
def test_a_run_stays_in_its_folder(tmp_path, name):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"run": {"name": name}}))
    with pytest.raises(UserError, match=r"run\.name"):
        load([path])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_is_never_unpickled(tmp_path, trap, name):
    (tmp_path / name).write_bytes(pickle.dumps(Payload(trap)))
    with pytest.raises(UserError, match=name):
        read_tokenizer(tmp_path / name, end_token=None, begin_token=None)


@pytest.fixture
def data(tmp_path):
    return write_documents(tmp_path / "data", [[1, 2, 3, 0]] * 50, [[1, 2, 0]] * 5, 64)


def describe(path: Path) -> dict:
    content = path.read_bytes()
    return {
        "file": path.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def edit_manifest(data: Path, change) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    change(manifest)
    (data / "manifest.json").write_text(json.dumps(manifest))


def test_a_shard_is_never_unpickled(data, trap):
    """A .npy file of Python objects, with the right size and checksum in the manifest."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(trap)], dtype=object), allow_pickle=True)
    shard = next((data / "train").glob("tokens-*.npy"))
    for content in (buffer.getvalue(), pickle.dumps(Payload(trap))):
        shard.write_bytes(content)

        def change(manifest):
            manifest["splits"]["train"]["shards"][0]["files"][0] = describe(shard)

        edit_manifest(data, change)
        with pytest.raises(UserError, match=r"tokens-00000\.npy: not an array of numbers"):
            DataDirectory(data).stream("train")


@pytest.mark.parametrize("name", ["../../secret.npy", "/SECRET"])
def test_a_manifest_of_data_stays_in_its_folder(data, tmp_path, name):
    secret = tmp_path / "secret.npy"
    np.save(secret, np.arange(200, dtype=np.uint16))
    name = name.replace("/SECRET", str(secret))

    def change(manifest):
        manifest["splits"]["train"]["shards"][0]["files"][0] = describe(secret) | {"file": name}

    edit_manifest(data, change)
    with pytest.raises(UserError, match=r"names the file .*secret\.npy', which is not in"):
        DataDirectory(data).stream("train")


def test_preparing_into_a_link_removes_nothing_behind_it(tmp_path):
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("years of work")
    (tmp_path / "train").symlink_to(documents)
    with pytest.raises(UserError, match="train: is a link"):
        SplitWriter(tmp_path / "train", 64, 1000)
    assert (documents / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a/b.npy", True),
        ("a..b", True),
        ("../a", False),
        ("a/../../b", False),
        ("/etc/passwd", False),
        ("", False),
        ("a\\..\\b", False),
        ("a\0b", False),
        (7, False),
    ],
)
def test_names_that_lead_out(name, inside):
    assert is_inside(name) == inside


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    state = TrainState(jax.numpy.int32(3), {"w": jax.numpy.ones(8)}, (jax.numpy.int32(3),))
    with Checkpoints(tmp_path / "c", 9) as checkpoints:
        checkpoints.save(3, state, {"tokens": 5}, 5, None)
    return tmp_path / "c" / "3"


def forged(checkpoint: Path, change) -> None:
    """Edit a manifest, with the checksum of what it then says."""
    tree = json.loads((checkpoint / MANIFEST).read_text())["manifest"]
    change(tree)
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"manifest": tree, "sha256": digest}, indent=1) + "\n"
    (checkpoint / MANIFEST).write_text(text)
    assert hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest() == digest


def test_a_manifest_of_a_checkpoint_stays_in_its_folder(checkpoint, tmp_path):
    assert read_manifest(checkpoint).update == 3
    forged(checkpoint, lambda tree: tree["files"].pop("_CHECKPOINT_METADATA"))
    assert read_manifest(checkpoint).update == 3  # the forgery itself is well made
    forged(
        checkpoint, lambda tree: tree["files"].update({"../../x": {"bytes": 1, "sha256": "0" * 64}})
    )
    with pytest.raises(DamagedManifestError):
        read_manifest(checkpoint)
    with pytest.raises(Failure, match="no checkpoint is whole"):
        Checkpoints(checkpoint.parent, read_only=True).find(None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update", "/HOME/thesis"),
        ("update", "../../HOME/thesis"),
        ("update", 4),
        ("update", 3.0),
        ("update", True),
        ("tokens", "5"),
        ("saved_at", "now"),
        ("validation_cross_entropy", float("nan")),
        ("validation_cross_entropy", [1]),
    ],
)
def test_a_manifest_names_no_other_folder(checkpoint, tmp_path, key, value):
    """Retention removes folders by the updates that manifests name."""
    thesis = tmp_path / "home" / "thesis"
    thesis.mkdir(parents=True)
    if isinstance(value, str):
        value = value.replace("/HOME", str(tmp_path / "home")).replace("HOME", "home")
    forged(checkpoint, lambda tree: tree.update({key: value}))
    with pytest.raises(DamagedManifestError):
        read_manifest(checkpoint)
    assert removable(checkpoint.parent, 1, None) == []
    assert thesis.is_dir()


def script(*arguments) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[1]
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_nothing_is_written_through_a_link(tmp_path):
    thesis = tmp_path / "thesis"
    thesis.write_text("years of work")
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: mine}\n")
    data = write_documents(tmp_path / "data", [[1, 2, 3, 0]] * 50, [[1, 2, 0]] * 5, 64)
    (tmp_path / "my.yaml").write_text("data: {sequence_length: 8}\ntraining: {updates: 1}\n")
    settings = ["--config", tmp_path / "my.yaml", f"run.directory={run.parent}", "run.name=mine"]
    settings += [f"data.directory={data}"]
    for name in ("lock", "metrics.jsonl.tmp", "checkpoints/7"):
        (run / name).symlink_to(thesis)
        for command in (["checkpoints.py", run, "prune", "--yes"], ["train.py", *settings]):
            done = script(f"scripts/{command[0]}", *command[1:])
            assert done.returncode == 2, done.stderr
            assert f"error: {run / name}: is a symbolic link" in done.stderr
            assert "Traceback" not in done.stderr
        (run / name).unlink()
    (data / "manifest.json.tmp").symlink_to(thesis)
    with pytest.raises(UserError, match=r"manifest\.json\.tmp: is a symbolic link"):
        preparation_lock(data)
    with pytest.raises(UserError, match=r"manifest\.json\.tmp: is a symbolic link"):
        cache_lock(data)
    (data / "manifest.json.tmp").unlink()
    (tmp_path / "data.lock").unlink(missing_ok=True)
    (tmp_path / "data.lock").symlink_to(thesis)
    with pytest.raises(UserError, match=r"data\.lock: is a symbolic link"):
        preparation_lock(data)
    assert thesis.read_text() == "years of work"


def test_a_folder_of_links_is_refused_and_one_on_another_disk_is_not(tmp_path):
    folder = tmp_path / "folder"
    (folder / "models" / "run").mkdir(parents=True)
    refuse_links(folder, "a study")
    for link in (folder / "models" / "run" / "report.md.tmp", folder / "evaluations"):
        link.symlink_to(tmp_path)
        with pytest.raises(UserError, match=f"{link}: is a symbolic link"):
            refuse_links(folder, "a study")
        link.unlink()
    (tmp_path / "other").symlink_to(folder)
    with pytest.raises(UserError, match="other: is a symbolic link; the folder of a study"):
        refuse_links(tmp_path / "other", "a study")
    with preparation_lock(tmp_path / "other"):  # data may lie on any disk
        pass


def test_nothing_of_a_checkpoint_is_unpickled(checkpoint, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    with Checkpoints(checkpoint.parent, read_only=True) as checkpoints:
        assert checkpoints.metadata(3) == {"tokens": 5}
        abstract = TrainState(
            jax.ShapeDtypeStruct((), np.int32),
            {"w": jax.ShapeDtypeStruct((8,), np.float32)},
            (jax.ShapeDtypeStruct((), np.int32),),
        )
        assert checkpoints.restore(3, abstract, SINGLE).params["w"].tolist() == [1.0] * 8


def test_pickles_in_place_of_a_checkpoint_s_files_are_data(checkpoint, trap):
    """Each file in turn, described by a manifest that fits."""
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Payload(trap)))
        name = path.relative_to(checkpoint).as_posix()
        entry = {key: value for key, value in describe(path).items() if key != "file"}
        forged(checkpoint, lambda tree, name=name, entry=entry: tree["files"].update({name: entry}))
        with Checkpoints(checkpoint.parent, read_only=True) as checkpoints:
            abstract = {"w": jax.ShapeDtypeStruct((8,), np.float32)}
            with contextlib.suppress(Exception):  # whatever it is, the trap says if code has run
                checkpoints.metadata(checkpoints.find(3))
                checkpoints.restore_params(3, abstract, SINGLE)
        path.write_bytes(content)


def test_links_among_checkpoints_are_neither_read_nor_removed(checkpoint, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    for name in ("7", "8.deleting", "9.saving"):
        (checkpoint.parent / name).symlink_to(outside)
    inside = checkpoint / "params" / "link"
    inside.symlink_to(outside)
    with Checkpoints(checkpoint.parent, 1) as checkpoints:
        assert checkpoints.updates == [3]
    remove(checkpoint.parent, 3)
    assert not checkpoint.exists()
    assert (outside / "thesis.txt").read_text() == "years of work"


def test_the_records_of_a_run_are_data(tmp_path, trap):
    """report.html and the like are made from records; a script reads them as text."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: run}\n")
    (run / "metrics.jsonl").write_bytes(pickle.dumps(Payload(trap)) + b"\n")
    done = script("scripts/checkpoints.py", run, "list", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == []
