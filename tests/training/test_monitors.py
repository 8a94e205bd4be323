"""Monitors of recurrent depth: figures against NumPy, and each failure against its own alarm."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import long, params_of, tiny_model, write_documents

from jaxlm.config import (
    CheckpointConfig,
    Config,
    ControlConfig,
    CurriculumConfig,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    MonitorsConfig,
    OptimConfig,
    RecurrentConfig,
    RunConfig,
    TrainingConfig,
)
from jaxlm.data.pipeline import rows_of
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import Failure
from jaxlm.evaluation.evaluate import evaluate, trace
from jaxlm.models.build import apply
from jaxlm.models.layers import attention_mask, rotary_angles
from jaxlm.models.recurrent import Core, spectral_norm, token_correlation
from jaxlm.training import loop
from jaxlm.training.metrics import read_records
from jaxlm.training.monitors import TEXTS, Alarms, due, measure
from jaxlm.training.spec import step_spec

VOCABULARY, T, UPDATES = 32, 32, 200


@pytest.fixture(scope="module")
def table_data(tmp_path_factory) -> Path:
    """Documents whose next token is a fixed random function of the last two, 9 times in 10."""
    rng = np.random.default_rng(0)
    table = rng.integers(1, VOCABULARY, (VOCABULARY, VOCABULARY))

    def document():
        ids = rng.integers(1, VOCABULARY, 2).tolist()
        while len(ids) < 48:
            expected = rng.random() < 0.9
            ids.append(int(table[ids[-1], ids[-2]] if expected else rng.integers(1, VOCABULARY)))
        return ids

    train, validation = [document() for _ in range(1500)], [document() for _ in range(60)]
    return write_documents(tmp_path_factory.mktemp("table") / "data", train, validation, VOCABULARY)


def model_of(**parts) -> ModelConfig:
    recurrent = RecurrentConfig(prelude_layers=1, core_layers=1, coda_layers=1, **parts)
    return ModelConfig(
        vocabulary_size=VOCABULARY,
        width=32,
        heads=4,
        feed_forward=64,
        remat="none",
        recurrent=recurrent,
    )


def config_for(data: Path, directory: Path, seed: int = 1, **sections) -> Config:
    defaults = {
        "run": RunConfig(name="run", directory=str(directory), seed=seed),
        "data": DataConfig(directory=str(data), sequence_length=T, epochs=4),
        "model": model_of(),
        "depth": DepthConfig(mean=3.0, maximum=12, backprop=3),
        "optim": OptimConfig(name="adamw", learning_rate=5e-3, warmup_updates=20),
        "training": TrainingConfig(updates=UPDATES, micro_batch_rows=16),
        "evaluation": EvaluationConfig(every=50, depths=(3,), batch_rows=16, rows=16),
        "monitors": MonitorsConfig(after_updates=100, window=100),
        "checkpoint": CheckpointConfig(every=UPDATES),
        "logging": LoggingConfig(every=100, tensorboard=False),
    }
    return Config(**{**defaults, **sections})


def records_of(config: Config, name: str) -> list[dict]:
    return read_records(Path(config.run.directory) / config.run.name / name)


def hold(monkeypatch, change) -> None:
    """Put part of the weights back to what `change` makes of them, before every update."""
    dispatch = loop.Run.dispatch

    def held(self):
        change(self.state.params)
        self.state = jax.device_put(self.state, self.sharding)
        return dispatch(self)

    monkeypatch.setattr(loop.Run, "dispatch", held)


# ---------------------------------------------------------------- figures by hand


def correlation_by_hand(x, lengths):
    """Mean over rows of the mean of np.corrcoef of their tokens, less 1/S, weighted by tokens."""
    total = sum(
        n * (np.corrcoef(row[:n]).mean() - 1 / n) for row, n in zip(x, lengths, strict=True)
    )
    return total / sum(lengths)


@pytest.mark.parametrize("norm", ["pre", "sandwich"])
def test_figures_of_each_step_are_those_of_steps_taken_one_by_one(norm):
    model = tiny_model(norm=norm)
    params = params_of(model, 3)
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(1, 64, (3, 8)), [8, 5, 3]
    segments = np.array([[1] * n + [0] * (8 - n) for n in lengths], np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (3, 1))
    keys = jax.random.split(jax.random.key(7), 3)
    depth, steps = 2, 5

    inputs = (jnp.asarray(tokens), segments, positions, keys)
    got = jax.jit(lambda p, n: apply(model, p).trace(*inputs, depth=n, steps=steps, max_steps=7))(
        params, jnp.int32(depth)
    )

    mask, angles = attention_mask(jnp.asarray(segments)), rotary_angles(positions, 8, 50000.0)

    @jax.jit
    def start(params):
        lm = apply(model, params)
        e = lm.prelude(lm.embedding(inputs[0]), mask, angles, None)
        e = lm.prelude_norm(e) if norm == "pre" else e
        return e, lm.initial_state(e, keys)

    @jax.jit
    def step(params, state, e):
        return apply(model, params).core(state, e, mask, angles, None)

    @jax.jit
    def hidden_at(params, depth):
        return apply(model, params)(*inputs, train=False, depth=depth)

    e, state = start(params)
    states = [state]
    for _ in range(steps):
        states.append(step(params, states[-1], e))
    states = np.asarray(states, np.float64)
    real = segments > 0
    norms = np.linalg.norm(states, axis=-1)
    residual = np.linalg.norm(states[1:] - states[:-1], axis=-1) / norms[1:]
    np.testing.assert_allclose(got.state_norm[:5], [n[real].mean() for n in norms[1:]], rtol=1e-5)
    np.testing.assert_allclose(
        got.relative_residual[:5], [r[real].mean() for r in residual], rtol=1e-4
    )
    np.testing.assert_allclose(
        got.state_correlation[:5], [correlation_by_hand(s, lengths) for s in states[1:]], atol=1e-5
    )
    hidden = hidden_at(params, depth)
    assert float(got.hidden_correlation) == pytest.approx(
        correlation_by_hand(np.asarray(hidden, np.float64), lengths), abs=1e-5
    )
    assert float(got.tokens) == 16
    assert not np.any(np.asarray(got.state_norm[5:]))
    # A deeper state is another one: the coda reads the state of the depth asked for.
    other = correlation_by_hand(np.asarray(hidden_at(params, steps), np.float64), lengths)
    assert abs(float(got.hidden_correlation) - other) > 1e-4


def test_token_correlation_of_equal_and_of_unrelated_tokens():
    rng = np.random.default_rng(0)
    real = jnp.ones((4, 50), bool)
    equal = jnp.broadcast_to(rng.normal(size=(4, 1, 64)), (4, 50, 64))
    assert float(token_correlation(equal, real)) == pytest.approx(1 - 1 / 50, abs=1e-5)
    unrelated = jnp.asarray(rng.normal(size=(4, 50, 4096)) + 10.0)  # the mean does not count
    assert float(token_correlation(unrelated, real)) == pytest.approx(0.0, abs=2e-3)
    assert float(token_correlation(unrelated, ~real)) == 0.0
    half = real & (jnp.arange(50) < 25)
    mixed = jnp.where(half[..., None], equal, jnp.nan)
    assert float(token_correlation(mixed, half)) == pytest.approx(1 - 1 / 25, abs=1e-5)


def test_spectral_norms_of_the_injections():
    def gains(model, params):
        return jax.jit(lambda params: apply(model, params).core.injection.gains())(params)

    matrix = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    expected = np.linalg.svd(matrix, compute_uv=False)[0]
    assert float(spectral_norm(jnp.asarray(matrix))) == pytest.approx(expected, rel=0.02)

    model = tiny_model(injection="concat")
    kernel = np.asarray(params_of(model)["core"]["injection"]["adapter"]["kernel"])
    got = gains(model, params_of(model))
    expected = [np.linalg.svd(half, compute_uv=False)[0] for half in (kernel[:32], kernel[32:])]
    np.testing.assert_allclose(got, expected, rtol=0.02)

    model = tiny_model(injection="diagonal")
    params = params_of(model)
    params["core"]["injection"]["step_size"] = jnp.linspace(-3.0, 1.0, 32)
    step = np.log1p(np.exp(np.linspace(-3.0, 1.0, 32)))
    got = gains(model, params)
    np.testing.assert_allclose(got, [np.exp(-step).max(), step.max()], rtol=0.02)

    model = tiny_model(injection="add")
    assert [float(x) for x in gains(model, params_of(model))] == [1.0, 1.0]


def test_figures_come_from_losses_states_and_the_last_update(table_data, tmp_path):
    config = config_for(table_data, tmp_path)
    spec = step_spec(config, VOCABULARY, UPDATES)
    params = params_of(config.model)
    rows = rows_of(DataDirectory(table_data).stream("validation"), config.data)
    record = {"applied": True, "update_norm": 5.0, "core_update_norm": 3.0, "mean_depth": 3.0}
    figures = measure(config, spec, params, rows, record)
    unknown = measure(config, spec, params, rows, {**record, "update_norm": None})
    assert (unknown["core_ratio"], unknown["core_update_ratio"]) == (None, None)
    depths = (1, 2, 3, 6, 12)
    losses = [
        evaluation.cross_entropy
        for evaluation in evaluate(
            config.model, params, rows, depths=depths, batch_rows=16, chunk_tokens=512, limit=16
        )
    ]
    names = ("loss_1", "loss_half", "loss_mean", "loss_double", "loss_quadruple")
    assert [figures[name] for name in names] == losses
    assert figures["depth_gain"] == losses[0] - losses[2]
    assert figures["overthinking"] == max(losses[3:]) - losses[2]
    assert len(figures["state_norm"]) == 12
    assert figures["state_growth"] == figures["state_norm"][-1] / figures["state_norm"][0]
    assert figures["token_correlation"] == max(
        figures["state_correlation"][2], figures["hidden_correlation"]
    )
    assert figures["first_idle_step"] is None
    residual = figures["relative_residual"]
    assert min(residual) > 0.03
    assert figures["idle_residual"] == max(residual[1:3])
    leaves = {
        name: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(part)])
        for name, part in params.items()
    }
    core = np.linalg.norm(leaves.pop("core"))
    other = np.linalg.norm(np.concatenate(list(leaves.values())))
    assert figures["core_update_ratio"] == pytest.approx(3 / core, rel=1e-5)
    assert figures["core_ratio"] == pytest.approx((3 / core) / (4 / other), rel=1e-5)
    # Where the mean depth rounds to 1, depth 1 has nothing to be compared with.
    shallow = measure(config, spec, params, rows, {**record, "mean_depth": 1.4})
    assert (shallow["depth"], shallow["depth_gain"]) == (1, None)
    assert shallow["idle_residual"] is None
    assert shallow["loss_1"] == shallow["loss_mean"] == losses[0]
    # Depths 2 and 4 are others than 1: what more steps do is known.
    deeper = (shallow["loss_double"], shallow["loss_quadruple"])
    assert shallow["overthinking"] == max(deeper) - losses[0]
    # A step is idle below the setting, whatever it is.
    for limit, first in ((1.01 * min(residual), residual.index(min(residual)) + 1), (None, None)):
        changed = dataclasses.replace(config, monitors=MonitorsConfig(idle_residual=limit))
        assert measure(changed, spec, params, rows, record)["first_idle_step"] == first
    # Rows are weighted by their tokens, whatever their batches.
    split, _ = trace(
        config.model, params, rows, depth=3, steps=12, max_steps=48, batch_rows=5, limit=16
    )
    np.testing.assert_allclose(split.state_norm, figures["state_norm"], rtol=1e-5)
    np.testing.assert_allclose(split.state_correlation, figures["state_correlation"], atol=1e-5)


# ---------------------------------------------------------------- rules of alarms

QUIET = {
    "token_correlation": 0.1,
    "depth_gain": 0.5,
    "idle_residual": 0.2,
    "state_growth": 1.0,
    "overthinking": 0.0,
    "state_gain": 1.0,
    "core_ratio": 1.0,
}


def follow(alarms, passes):
    """(update, event, monitor) of each alarm over passes (update, figures that differ)."""
    return [
        (alarm.update, alarm.event, alarm.monitor)
        for update, figures in passes
        for alarm in alarms(update, {**QUIET, **figures})
    ]


def settings(**monitors) -> Config:
    return Config(
        monitors=MonitorsConfig(**{"after_updates": 100, "window": 100, **monitors}),
        optim=OptimConfig(warmup_updates=20),
    )


LOUD = {
    "token_correlation": 0.95,
    "depth_gain": 0.01,
    "idle_residual": 0.02,
    "state_growth": 5.0,
    "overthinking": 0.03,
    "state_gain": 4.5,
    "core_ratio": 11.0,
}


@pytest.mark.parametrize("monitor", TEXTS)
def test_an_alarm_is_raised_once_and_again_only_after_it_has_cleared(monitor):
    loud = {monitor: LOUD[monitor]}
    events = follow(
        Alarms(settings()),
        [(u, {} if u in (400, 450) else loud) for u in range(50, 700, 50)],
    )
    assert events == [
        (200, "raised", monitor),  # beyond since 100, the first pass that counts
        (400, "cleared", monitor),
        (600, "raised", monitor),  # beyond since 500
    ]


def test_one_good_pass_starts_the_window_anew():
    loud = {"state_growth": 5.0}
    passes = [(100, loud), (150, {}), (200, loud), (250, loud), (300, loud)]
    assert follow(Alarms(settings()), passes) == [(300, "raised", "state_growth")]


def test_nothing_counts_during_the_warm_up():
    config = dataclasses.replace(
        settings(), optim=OptimConfig(warmup_updates=500), training=TrainingConfig()
    )
    passes = [(u, LOUD) for u in range(50, 650, 50)]
    events = follow(Alarms(config), passes)
    assert {update for update, _, _ in events} == {600}
    assert len(events) == len(TEXTS)


@pytest.mark.parametrize("evaluation_every", [0, 40, 70, 500])
def test_by_default_an_alarm_comes_at_most_200_updates_after_its_condition(evaluation_every):
    config = Config(evaluation=EvaluationConfig(every=evaluation_every))
    first, end = config.monitors.after_updates, 2000
    passes = [u for u in range(1, end) if due(config, u)]
    if evaluation_every:
        passes = sorted({*passes, *range(evaluation_every, end, evaluation_every)})
    waits = []
    for last_good in range(400, 1200):  # right after a pass, and between passes
        quiet_then_loud = [(u, {"state_growth": 5.0} if u > last_good else {}) for u in passes]
        ((update, event, _),) = follow(Alarms(config), quiet_then_loud)
        assert event == "raised"
        waits.append(update - max(last_good, first))
    # One pass at most `every` later sees it first, and one exactly `window` after that tells it.
    assert max(waits) <= config.monitors.every + config.monitors.window == 200
    if evaluation_every in (0, 500):
        assert max(waits) == 200


def test_when_monitors_are_due_beside_validation_passes():
    def updates(**sections):
        return [u for u in range(1, 301) if due(Config(**sections), u)]

    assert updates() == [100, 200, 300]
    assert updates(monitors=MonitorsConfig(every=150)) == [150, 300]
    assert updates(monitors=MonitorsConfig(every=0)) == []
    assert updates(monitors=MonitorsConfig(every=None)) == []
    assert updates(monitors=MonitorsConfig(rows=0)) == []
    assert updates(model=ModelConfig(kind="transformer")) == []


def test_figures_that_are_not_finite():
    """NaN and what is unknown say nothing; an infinite state is an explosion."""
    nothing = dict.fromkeys(QUIET, float("nan"))
    assert follow(Alarms(settings()), [(u, nothing) for u in range(50, 500, 50)]) == []
    infinite = {"state_growth": float("inf"), "overthinking": float("inf")}
    passes = [(u, infinite) for u in range(50, 250, 50)]
    alarms = Alarms(settings())
    assert follow(alarms, passes) == [
        (200, "raised", "state_growth"),
        (200, "raised", "overthinking"),
    ]
    (alarm,) = alarms(250, {**QUIET, "overthinking": float("inf")})
    assert (alarm.event, alarm.monitor, alarm.value) == ("cleared", "state_growth", 1.0)


def test_a_figure_that_is_missing_neither_raises_nor_clears():
    loud, none, nan = ({"core_ratio": value} for value in (11.0, None, float("nan")))
    assert follow(Alarms(settings()), [(100, loud), (150, none), (200, none), (250, nan)]) == []
    passes = [
        (100, loud),
        (150, loud),
        (200, loud),
        (250, nan),
        (300, none),
        (350, loud),
        (400, {}),
    ]
    assert follow(Alarms(settings()), passes) == [
        (200, "raised", "core_ratio"),
        (400, "cleared", "core_ratio"),
    ]


def test_a_threshold_of_null_raises_nothing():
    config = settings(overthinking=None)
    assert follow(Alarms(config), [(u, {"overthinking": 9.0}) for u in range(50, 500, 50)]) == []


def test_a_resumed_run_remembers_its_alarms():
    passes = [(u, {"depth_gain": 0.01}) for u in range(50, 600, 50)]
    for cut in range(len(passes)):
        before = Alarms(settings())
        events = follow(before, passes[:cut])
        records = [
            {"update": u, "beyond": before.beyond(u, {**QUIET, **figures})}
            for u, figures in passes[:cut]
        ]
        after = Alarms(settings(), json.loads(json.dumps(records)))
        assert events + follow(after, passes[cut:]) == [(200, "raised", "depth_gain")]


# ---------------------------------------------------------------- runs


def healthy(table_data, tmp_path, seed, **sections):
    config = config_for(table_data, tmp_path, seed, **sections)
    assert loop.train(config) == 0
    assert records_of(config, "alarms.jsonl") == []
    records = records_of(config, "monitors.jsonl")
    assert [record["update"] for record in records] == [50, 100, 150, 200]
    return config, records


def test_a_healthy_run_raises_nothing_and_compiles_its_monitors_once(table_data, tmp_path, caplog):
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        config, records = healthy(table_data, tmp_path, 1)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("trace_step") <= 1  # none if a test before this one has compiled it
    assert compiled.count("eval_step") <= 1
    directory = tmp_path / "run"
    report = json.loads((directory / "report.json").read_text())
    assert report["monitors"] == records[-1]
    assert report["alarms"] == []
    text = (directory / "report.md").read_text()
    assert "## Monitors after update 200" in text
    assert f"| core_update_ratio | {records[-1]['core_update_ratio']:.4g} |" in text
    assert records[-1]["idle_residual"] > 0.03
    assert "No alarm was raised." in text
    updates = records_of(config, "metrics.jsonl")
    assert all(0 < r["core_update_norm"] < r["update_norm"] for r in updates)
    assert 0.5 < records[-1]["core_ratio"] < 2
    residual, idle = records[-1]["relative_residual"], records[-1]["first_idle_step"]
    assert residual[idle - 1] < 0.03 <= min(residual[: idle - 1])


def test_a_healthy_run_whose_mean_depth_begins_at_1_raises_nothing(table_data, tmp_path):
    """From 1 at the start to 1 + 2 * 200 / 1000 = 1.4 at the end: rounded, always 1."""
    control = ControlConfig(controllers=(CurriculumConfig(updates=1000),))
    _, records = healthy(table_data, tmp_path, 1, control=control)
    assert [(record["depth"], record["depth_gain"]) for record in records] == [(1, None)] * 4


def test_monitors_have_passes_of_their_own(table_data, tmp_path):
    evaluation = EvaluationConfig(every=0, depths=(3,), batch_rows=16, rows=16)
    monitors = MonitorsConfig(every=80, after_updates=80, window=80)
    config = config_for(table_data, tmp_path, evaluation=evaluation, monitors=monitors)
    assert loop.train(config) == 0
    records, updates = records_of(config, "monitors.jsonl"), records_of(config, "metrics.jsonl")
    assert [record["update"] for record in records] == [80, 160]
    # The weights are those after so many updates, each of which has been read.
    assert [r["tokens"] for r in records] == [updates[u - 1]["tokens"] for u in (80, 160)]
    assert records_of(config, "evaluations.jsonl") == []
    assert len(updates) == UPDATES


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
def test_healthy_runs_of_more_seeds_raise_nothing(table_data, tmp_path, seed):
    healthy(table_data, tmp_path, seed)


def identity_core(params):
    """Each step puts out the prelude's output whatever the state is."""
    core = params["core"]
    core["injection"]["adapter"]["kernel"] = jnp.concatenate([jnp.zeros((32, 32)), jnp.eye(32)])
    blocks = core["stack"]["blocks"]
    for branch, name in (("attention", "out"), ("mlp", "down")):
        blocks[branch][name]["kernel"] = jnp.zeros_like(blocks[branch][name]["kernel"])


def no_injection(params):
    kernel = params["core"]["injection"]["adapter"]["kernel"]
    params["core"]["injection"]["adapter"]["kernel"] = kernel.at[32:].set(0.0)


def one_row_for_all_tokens(params):
    table = params["embedding"]["table"]
    params["embedding"]["table"] = jnp.broadcast_to(table[:1], table.shape)


def without_state_norm(self, s_BTD, e_BTD, mask, angles, keys_B):
    return self.stack(self.injection(s_BTD, e_BTD), mask, angles, keys_B)


FIXED = {
    "model": model_of(initial_state="prelude"),
    "depth": DepthConfig(distribution="fixed", mean=2.0, maximum=4, backprop="full"),
}
FAILURES = {
    "depth_gain": (identity_core, {}),
    "overthinking": (no_injection, FIXED),
    "token_correlation": (one_row_for_all_tokens, FIXED),
    # Programs are shared by configuration: this one has an epsilon of its own.
    "state_growth": (
        None,
        {"model": dataclasses.replace(model_of(injection="add"), norm_epsilon=1.5e-6)},
    ),
}


@pytest.mark.parametrize(
    "monitor", ["depth_gain", "token_correlation", long("overthinking"), long("state_growth")]
)
def test_each_failure_raises_its_own_alarm(table_data, tmp_path, monkeypatch, capsys, monitor):
    change, sections = FAILURES[monitor]
    if change is None:
        monkeypatch.setattr(Core, "__call__", without_state_norm)
    else:
        hold(monkeypatch, change)
    config = config_for(table_data, tmp_path, **sections)
    assert loop.train(config) == 0
    alarms = {alarm["monitor"]: alarm for alarm in records_of(config, "alarms.jsonl")}
    assert monitor in alarms, records_of(config, "monitors.jsonl")[-1]
    # The condition holds from the start and counts from update 100 on.
    # A core that puts out the same whatever its state is stands still from the second step on.
    for name in (monitor, "idle_residual") if monitor == "depth_gain" else (monitor,):
        assert alarms[name]["since"] == 100
        assert alarms[name]["update"] == 200
    output = capsys.readouterr().out
    assert output.count(f"ALARM at update 200: {monitor} is") == 1
    assert f"Alarm raised at update 200: {monitor}" in (tmp_path / "run/report.md").read_text()
    # Losses are those of other depths here, so other alarms may join; of these none may.
    unrelated = {
        "depth_gain": {"state_growth", "token_correlation", "overthinking"},
        "overthinking": {"state_growth", "token_correlation", "depth_gain", "idle_residual"},
        "token_correlation": {"state_growth", "overthinking"},
        "state_growth": {"token_correlation", "idle_residual"},
    }
    assert not unrelated[monitor] & set(alarms)


def test_an_alarm_that_stops_saves_first_and_lets_the_same_command_go_on(
    table_data, tmp_path, monkeypatch
):
    hold(monkeypatch, identity_core)
    config = config_for(
        table_data,
        tmp_path,
        monitors=MonitorsConfig(
            after_updates=50, window=50, idle_residual=None, stop=("depth_gain",)
        ),
        evaluation=EvaluationConfig(every=25, depths=(3,), batch_rows=16, rows=16),
        checkpoint=CheckpointConfig(every=1000),
    )
    with pytest.raises(Failure, match="saved after update 100 and stopped by the alarm of depth_g"):
        loop.train(config)
    assert (tmp_path / "run/checkpoints/100").is_dir()
    assert loop.train(config) == 0
    assert len(records_of(config, "metrics.jsonl")) == UPDATES
    assert [r["update"] for r in records_of(config, "monitors.jsonl")] == list(range(25, 201, 25))
    (alarm,) = records_of(config, "alarms.jsonl")
    assert (alarm["update"], alarm["action"]) == (100, "stop")
