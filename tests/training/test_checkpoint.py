import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.metrics import RunLog, read_records
from jaxlm.training.state import TrainState

PLACE = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def state_of(value: float) -> TrainState:
    params = {"w": jnp.full((4, 3), value, jnp.bfloat16)}
    return TrainState(jnp.int32(value), params, ({"m": jnp.full((4, 3), value)}, jnp.int32(1)))


def save_all(directory, losses: dict, keep=2):
    with Checkpoints(directory, keep) as checkpoints:
        for update, loss in losses.items():
            checkpoints.save(update, state_of(update), {"update": update}, loss)
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
        checkpoints.save(7, state, {"tokens": 2**31 + 7, "data": {"next_index": 3}}, None)
        jax.tree.map(lambda x: x.delete(), state)  # as a donating step would
        checkpoints.save(7, state_of(8), {}, None)  # there already: nothing happens
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
        checkpoints.save(1, state_of(1), {}, None)
    for shape in ((3, 3), (5, 3), (4, 4)):
        target = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
        with (
            Checkpoints(tmp_path / "c") as checkpoints,
            pytest.raises(RuntimeError, match=r"c/1: .* shape"),
        ):
            checkpoints.restore_params(1, target, PLACE)


def test_a_reader_leaves_a_pending_save_alone(tmp_path):
    big = {"w": jnp.ones((2000, 2000))}
    state = TrainState(jnp.int32(0), big, (jnp.int32(0),))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state, {}, None)
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
        checkpoints.save(4, state_of(4), {}, None)
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
