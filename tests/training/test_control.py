"""Controllers: exact decisions, one compiled program, and resumption in the middle of them."""

import dataclasses
import doctest
import json
import logging
import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import long, tiny_model
from test_layerwise import in_backward, window_of
from test_layerwise import spec_of as layerwise_spec_of
from test_runs import (
    ENGINES,
    config_for,
    directory_of,
    final_state,
    signal_at,
    signal_at_read,
    until,
)

from jaxlm.config import (
    Config,
    ControlConfig,
    CurriculumConfig,
    DepthConfig,
    EvaluationConfig,
    GradientNormConfig,
    ModelConfig,
    OptimConfig,
    PlateauConfig,
    RateByDepthConfig,
    RunConfig,
    SpikeConfig,
    TrainingConfig,
    load,
)
from jaxlm.errors import UserError
from jaxlm.training import loop
from jaxlm.training.control import (
    EVALUATION_FIELDS,
    UPDATE_FIELDS,
    Control,
    Controller,
    Drawn,
    GradientNorm,
    Plateau,
    RateByDepth,
    Spike,
    build,
)
from jaxlm.training.metrics import read_records
from jaxlm.training.optimizer import build_optimizer
from jaxlm.training.step import init_state, train_step

ROOT = Path(__file__).parents[2]


def update_record(update, loss=3.0):
    return {**dict.fromkeys(UPDATE_FIELDS, 1.0), "update": update, "loss": loss}


def evaluation_record(update, loss):
    return {**dict.fromkeys(EVALUATION_FIELDS, 1.0), "update": update, "cross_entropy": loss}


def control_of(*controllers, **depth) -> Control:
    depth = DepthConfig(**{"mean": 3.0, "maximum": 6, "backprop": 2, **depth})
    return Control(Config(depth=depth, control=ControlConfig(controllers=controllers)))


# ---------------------------------------------------------------- one controller at a time


def test_plateau_falls_after_its_patience_rests_and_falls_again_down_to_its_floor():
    controller = Plateau(
        PlateauConfig(improvement=0.1, patience=2, cooldown=1, factor=0.5, minimum=0.2)
    )
    got = []
    losses = [5.0, 4.0, 3.95, 3.85, 3.9, 3.9, 3.9, 3.9, 3.9, None, 3.0, 3.0, 3.0, 3.0, 3.0]
    for number, loss in enumerate(losses):
        controller.read_evaluation(evaluation_record(10 * number, loss))
        got.append((controller.decide(10 * number, None)[0], controller.state["bad"]))
    assert got == [
        (1.0, 0),
        (1.0, 0),
        (1.0, 1),  # 3.95 is not 0.1 below 4.0
        (1.0, 0),  # 3.85 is, though it is not 0.1 below the one before
        (1.0, 1),
        (0.5, 0),
        (0.5, 0),  # rests
        (0.5, 1),
        (0.25, 0),
        (0.25, 0),  # rests, whatever the loss
        (0.25, 0),
        (0.25, 1),
        (0.2, 0),  # not 0.125: the floor
        (0.2, 0),
        (0.2, 1),
    ]
    assert (
        "validation loss 3.0 after 120 updates: 2 passes in a row were not 0.1 below the best"
        in (controller.decide(130, None)[1])
    )


def test_spike_is_judged_by_median_and_deviation():
    controller = Spike(SpikeConfig(window=5, deviations=3.0, factor=0.25, updates=4))
    # Median 3, absolute deviations 1, 0, 1, 0, 1 of which the median is 1: the limit is 6.
    for update, loss in enumerate([2.0, 3.0, 4.0, 3.0, 2.0]):
        controller.read_update(update_record(update, loss))
    assert controller.state["losses"] == [2.0, 3.0, 4.0, 3.0, 2.0]
    # Median 3 and deviation 1 again after a loss that is at the limit.
    controller.read_update(update_record(5, 6.0))
    assert controller.state["until"] == 0
    controller.read_update(update_record(6, 6.01))
    assert controller.state["until"] == 0 + 6 + 2 + 4
    assert [controller.decide(u, None)[0] for u in (8, 11, 12)] == [0.25, 0.25, 1.0]
    assert controller.decide(8, None)[1] == (
        "loss 6.0100 of update 6 is above 6.0000: median 3.0000 + 3 x deviation 1.0000"
    )
    controller.read_update(update_record(9, None))
    assert controller.state["until"] == 15
    assert "not finite" in controller.decide(14, None)[1]


def test_gradient_norms_lower_the_rate_with_hysteresis():
    """Usual norm 2, from 4 updates; recent norm from 2: begins above 2 x 2, ends below 1.5 x 2."""
    settings = GradientNormConfig(usual=4, recent=2, begin=2.0, end=1.5, power=0.5, minimum=0.3)
    controller = GradientNorm(settings)
    seen = []
    for update, norm in enumerate([2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]):
        controller.read_update(update_record(update, 1.0) | {"grad_norm": norm})
        seen.append(controller.decide(update, None)[0])
    # Recent medians from update 5 on: 3, 4, 6, 8; 4 is not above twice the usual norm, 6 is.
    assert seen[:7] == [1.0] * 7
    # Usual norms of the last two: median of 2, 2, 2, 4, which is 2, and of 2, 2, 4, 4, which is 3.
    assert seen[7:] == pytest.approx([(2 / 6) ** 0.5, (3 / 8) ** 0.5])
    assert controller.decide(9, None)[1] == (
        "after update 8 the recent gradient norm is 8, the usual one 3"
    )
    controller.read_update(update_record(9, 1.0) | {"grad_norm": None})  # says nothing
    assert controller.decide(10, None)[0] == seen[-1]
    # Following goes on down to 1.5 times the usual norm: 5 is 1.25 times the median of 2, 4, 4, 8.
    controller.read_update(update_record(10, 1.0) | {"grad_norm": 2.0})
    assert controller.decide(11, None)[0] == 1.0


def test_the_multiplier_of_gradient_norms_has_a_floor():
    controller = GradientNorm(GradientNormConfig(usual=2, recent=1, minimum=0.25))
    for update, norm in enumerate([1.0, 1.0, 100.0]):
        controller.read_update(update_record(update, 1.0) | {"grad_norm": norm})
    assert controller.decide(3, None)[0] == 0.25
    assert json.loads(json.dumps(controller.state)) == controller.state


def test_nothing_is_a_spike_before_the_window_is_full():
    controller = Spike(SpikeConfig(window=3))
    for update, loss in enumerate([1.0, 1.0, 99.0]):
        controller.read_update(update_record(update, loss))
    assert controller.state["until"] == 0


def test_rate_by_depth():
    controller = RateByDepth(RateByDepthConfig(power=0.5))
    got = [controller.decide(0, Drawn(4.0, depth))[0] for depth in (1, 4, 16)]
    assert got == [2.0, 1.0, 0.5]


# ---------------------------------------------------------------- all of them together


def test_decisions_are_logged_with_reasons_and_apply_two_updates_later():
    control = control_of(
        SpikeConfig(window=2, deviations=1.0, factor=0.5, updates=2),
        CurriculumConfig(updates=2),
        RateByDepthConfig(power=1.0),
        CurriculumConfig(quantity="backprop_depth", updates=4),
    )
    losses = [3.0, 3.0, 9.0, 3.0, 3.0, 3.0, 3.0]
    settings = []
    for update, depth in enumerate([1, 2, 3, 6, 3, 3, 3]):
        settings.append(control.decide(update, lambda mean, depth=depth: depth))
        if update:  # the record of the update before, as in the loop
            control.read_update(update_record(update - 1, losses[update - 1]))
    assert [s.mean_depth for s in settings] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    # 1, 1.25, 1.5 (to even: 2), 1.75, 2; never above the depth drawn.
    assert [s.backprop_depth for s in settings] == [1, 1, 2, 2, 2, 2, 2]
    # The spike of update 2 is answered at 4 and 5; depth 6 with mean 3 halves update 3.
    assert [s.rate_multiplier for s in settings] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0]
    decisions = [d for s in settings for d in s.decisions if d.controller == "Spike[0]"]
    assert [dataclasses.astuple(d)[:5] for d in decisions] == [
        (4, "Spike[0]", "rate_multiplier", 1.0, 0.5),
        (6, "Spike[0]", "rate_multiplier", 0.5, 1.0),
    ]
    assert "loss 9.0000 of update 2 is above 3.0000" in decisions[0].why
    assert decisions[1].why == "2 updates since the spike are over"
    first = [(d.controller, d.old, d.new) for d in settings[0].decisions]
    assert first == [("Curriculum[1]", 3.0, 1.0), ("Curriculum[3]", 2.0, 1.0)]


def test_a_validation_pass_counts_from_the_next_update():
    control = control_of(PlateauConfig(patience=1, improvement=0.0, cooldown=0))
    multipliers = []
    for update in range(6):
        multipliers.append(control.decide(update, lambda mean: 3).rate_multiplier)
        if update in (1, 3):
            control.read_evaluation(evaluation_record(update + 1, 2.0))
    assert multipliers == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_several_controllers_of_one_depth_are_a_mistake_in_the_settings():
    config = Config(
        control=ControlConfig(controllers=(SpikeConfig(), CurriculumConfig(quantity="mean_depth")))
    )

    @dataclasses.dataclass(frozen=True)
    class OtherConfig:
        kind: str = "other"

    class Other(Controller):
        quantity = "mean_depth"

    with pytest.raises(UserError) as found:
        Control(config, [*build(config), Other(OtherConfig())])
    assert str(found.value) == (
        "control.controllers: curriculum[1] and other[2] set mean_depth; keep one of them"
    )


def test_a_kind_without_a_class_is_not_taken_for_another():
    config = Config(control=ControlConfig(controllers=(SpikeConfig(),)))
    object.__setattr__(config.control, "controllers", (DepthConfig(),))
    with pytest.raises(TypeError, match="DepthConfig: its controller is missing"):
        build(config)


def test_without_controllers_everything_is_as_configured():
    got = control_of().decide(0, lambda mean: 5 if mean == 3.0 else -1)
    assert dataclasses.astuple(got) == (1.0, 3.0, 5, 2, ())


def test_limits_hold_whatever_controllers_say():
    control = control_of(CurriculumConfig(updates=1), CurriculumConfig(quantity="backprop_depth"))
    for controller, value in zip(control.controllers, (99.0, 99.0), strict=True):
        controller.decide = lambda update, drawn, value=value: (value, "")
    got = control.decide(0, lambda mean: 6)
    assert (got.mean_depth, got.backprop_depth) == (6.0, 2)


def drive(control, updates, losses, flush):
    """Settings of `updates`; the record of those in `flush` is read at once, as before a save."""
    got, pending = [], None
    for update in updates:
        previous, pending = pending, update
        got.append(control.decide(update, lambda mean, u=update: 1 + u % 4))
        if previous is not None:
            control.read_update(update_record(previous, losses[previous]))
        if update in flush:
            control.read_update(update_record(pending, losses[pending]))
            pending = None
            if update % 5 == 4:
                control.read_evaluation(evaluation_record(update + 1, losses[update]))
    return got


def test_state_goes_through_json_at_any_update_and_changes_no_decision():
    controllers = (
        SpikeConfig(window=4, deviations=1.5, updates=3),
        PlateauConfig(patience=1, cooldown=1),
        CurriculumConfig(updates=17, shape="one_minus_sqrt"),
        RateByDepthConfig(),
    )
    losses = np.random.default_rng(0).normal(3.0, 0.5, 40).tolist()
    passes = set(range(4, 40, 5))
    expected = drive(control_of(*controllers), range(40), losses, passes)
    assert len({s.rate_multiplier for s in expected}) > 8
    for cut in range(1, 40):
        before = control_of(*controllers)
        got = drive(before, range(cut), losses, passes | {cut - 1})
        after = control_of(*controllers)
        after.restore(json.loads(json.dumps(before.state())))
        got += drive(after, range(cut, 40), losses, passes)
        assert got == expected, cut


def test_a_changed_controller_begins_anew_and_the_others_go_on():
    before = control_of(PlateauConfig(patience=1, cooldown=0), SpikeConfig(window=3))
    for update in (10, 20):
        before.read_evaluation(evaluation_record(update, 2.0))
    before.read_update(update_record(18, 2.5))
    before.decide(20, lambda mean: 3)
    stored = before.state()
    after = control_of(SpikeConfig(window=3), PlateauConfig(patience=2, cooldown=0))
    after.restore(stored)
    assert after.controllers[0].state["losses"] == [2.5]
    assert after.controllers[1].state["multiplier"] == 1.0
    same = control_of(PlateauConfig(patience=1, cooldown=0), SpikeConfig(window=3))
    same.restore(stored)
    assert same.controllers[0].state["multiplier"] == 0.5


# ---------------------------------------------------------------- the step


@pytest.mark.parametrize("engine", ["after_backward", long("in_backward")])
def test_a_multiplier_of_one_changes_no_bit_and_another_scales_rate_and_decay(engine):
    """Weights, state and metrics of two updates; decay alone where the gradient is zero."""
    model = tiny_model(
        "transformer",
        width=16,
        heads=2,
        feed_forward=32,
        remat="full",
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
    )
    spec = layerwise_spec_of(model, weight_decay=0.5)
    spec = in_backward(spec) if engine == "in_backward" else spec
    depth, backprop = jnp.int32(3), jnp.int32(2)

    def two_updates(*multiplier):
        state, metrics = init_state(spec), []
        for update in range(2):
            state, one = train_step(spec, state, window_of(1, update), depth, backprop, *multiplier)
            metrics.append(one)
        return state, metrics

    plain, once = two_updates(), two_updates(jnp.float32(1.0))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(once), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    halved = two_updates(jnp.float32(0.5))
    rates = [float(m.learning_rate) for m in plain[1]]
    assert [float(m.learning_rate) for m in halved[1]] == [rate / 2 for rate in rates]
    assert float(halved[1][0].update_norm) < 0.9 * float(plain[1][0].update_norm)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon", "optax_adafactor"])
@pytest.mark.parametrize("accumulation", ["token_weighted", "optax_multisteps"])
def test_every_optimizer_scales_its_update_and_its_decay(name, accumulation):
    """Float32 weights, first update: the change is proportional to the rate, decay included."""
    config = OptimConfig(
        name=name,
        learning_rate=1e-2,
        weight_decay=0.3,
        clip="off",
        accumulation=accumulation,
    )
    tx = build_optimizer(
        config, updates=9, micro_batches=1, window_tokens=64, key=jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    params = {"layer": {"kernel": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}}
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    state = tx.init(params)

    @jax.jit
    def update(grads, state, params, multiplier=None):
        extra = {} if multiplier is None else {"rate_multiplier": multiplier}
        return tx.update(grads, state, params, **extra)[0]["layer"]["kernel"]

    def change(grads, *multiplier):
        return np.asarray(update(grads, state, params, *multiplier))

    one = change(grads, jnp.float32(1.0))
    assert one.tobytes() == change(grads).tobytes()
    np.testing.assert_allclose(change(grads, jnp.float32(0.25)), one / 4, rtol=1e-5, atol=1e-9)
    zero = jax.tree.map(jnp.zeros_like, grads)
    decay = -1e-2 * 0.3 * np.asarray(params["layer"]["kernel"])
    np.testing.assert_allclose(change(zero, jnp.float32(0.25)), decay / 4, rtol=1e-5, atol=1e-9)


# ---------------------------------------------------------------- runs

CONTROLLED = {
    "control": ControlConfig(
        controllers=(
            CurriculumConfig(updates=25),
            CurriculumConfig(updates=15, quantity="backprop_depth", shape="one_minus_sqrt"),
            RateByDepthConfig(power=0.5),
            SpikeConfig(window=4, deviations=1.0, updates=3),
            PlateauConfig(improvement=0.05, patience=1, cooldown=1),
        )
    ),
    "evaluation": EvaluationConfig(every=5, depths=(1, 2), batch_rows=4, rows=8),
}


def controlled_state(config):
    names = ("rate_multiplier", "mean_depth", "backprop_depth")
    records = read_records(directory_of(config) / "metrics.jsonl")
    return final_state(config) | {
        "settings": [[record[name] for name in names] for record in records],
        "decisions": (directory_of(config) / "decisions.jsonl").read_text(),
    }


@pytest.mark.parametrize("engine", ["after_backward", long("in_backward")])
def test_a_controlled_run_resumes_bit_for_bit_in_the_middle_of_decisions(
    random_data, monkeypatch, engine
):
    config = config_for(random_data, "unbroken", **CONTROLLED, **ENGINES[engine])
    assert loop.train(config) == 0
    unbroken = controlled_state(config)
    spikes = [
        decision["update"]
        for decision in map(json.loads, unbroken["decisions"].splitlines())
        if decision["controller"] == "Spike[3]" and decision["new"] < 1
    ]
    assert spikes
    assert '"Plateau[4]"' in unbroken["decisions"]
    # The loss that jumped is read but does not count yet; the answer to it has begun.
    first = next(u for u in spikes if u > 6)
    config = config_for(random_data, "broken", **CONTROLLED, **ENGINES[engine])
    parts = 0
    for last in (first - 2, first - 1, first, first + 1):
        until(monkeypatch, last + 1)
        assert loop.train(config) == 0
        assert len(read_records(directory_of(config) / "metrics.jsonl")) == last + 1
        parts += 1
    assert loop.train(config) == 0
    assert parts == 4
    broken = controlled_state(config)
    for name in unbroken:
        assert broken[name] == unbroken[name], name
    # The applied rate is the schedule's times the multiplier.
    schedule = config_for(random_data, "plain", **ENGINES[engine])
    records = read_records(directory_of(config) / "metrics.jsonl")
    warmup = schedule.optim.warmup_updates
    for record in records[:warmup]:
        expected = 1e-2 * (record["update"] + 1) / warmup * record["rate_multiplier"]
        assert record["learning_rate"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_a_forgotten_state_of_control_is_noticed(random_data, monkeypatch):
    """The comparison above fails where the queue of records is lost."""
    config = config_for(random_data, "unbroken", **CONTROLLED)
    assert loop.train(config) == 0
    unbroken = controlled_state(config)
    monkeypatch.setattr(Control, "restore", lambda self, stored: None)
    config = config_for(random_data, "broken", **CONTROLLED)
    signal_at(monkeypatch, {12: signal.SIGTERM})
    assert loop.train(config) == 0
    assert loop.train(config) == 0
    broken = controlled_state(config)
    assert broken["decisions"] != unbroken["decisions"]
    assert broken["leaves"] != unbroken["leaves"]


def test_a_controlled_run_compiles_once(random_data, caplog):
    config = config_for(
        random_data,
        **CONTROLLED,
        run=RunConfig(name="run", directory=str(random_data.parent / "runs"), seed=78),
        training=TrainingConfig(updates=30, micro_batch_rows=2, micro_batches=2),
    )
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        assert loop.train(config) == 0
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train_step") == 1
    records = read_records(directory_of(config) / "metrics.jsonl")
    assert len({r["depth"] for r in records}) > 2
    assert len({r["backprop_depth"] for r in records}) == 2
    assert len({r["rate_multiplier"] for r in records}) > 4
    assert records[0]["mean_depth"] == 1.0
    assert records[-1]["mean_depth"] == 3.0


def test_control_may_change_at_resume_when_asked_for(random_data, monkeypatch):
    until(monkeypatch, 6)
    assert loop.train(config_for(random_data, **CONTROLLED)) == 0
    other = {
        **CONTROLLED,
        "control": ControlConfig(controllers=CONTROLLED["control"].controllers[:2]),
    }
    with pytest.raises(UserError, match=r"control.controllers: was .* \(--allow-changes control"):
        loop.train(config_for(random_data, **other))
    signal_at_read(monkeypatch, 8)
    assert loop.train(config_for(random_data, **other), allow_changes=["control"]) == 0
    records = read_records(directory_of(config_for(random_data)) / "metrics.jsonl")
    assert {record["rate_multiplier"] for record in records[6:]} == {1.0}
    assert len({record["rate_multiplier"] for record in records[:6]}) > 1


# ---------------------------------------------------------------- configuration and documentation


def test_settings_of_controllers_are_read_and_checked(tmp_path):
    text = "control: {controllers: [{kind: spike, window: 7}, {kind: plateau}]}"
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load([path])
    assert config.control.controllers == (SpikeConfig(window=7), PlateauConfig())
    for wrong, message in {
        "[{kind: spikes}]": "control.controllers",
        "[{kind: spike, windows: 7}]": "windows",
        "[{kind: curriculum}, {kind: curriculum}]": "two curricula set one quantity",
    }.items():
        with pytest.raises(UserError, match=message):
            load([path], [f"control.controllers={wrong}"])
    with pytest.raises(UserError, match="plateau reads the validation passes"):
        load([path], ["evaluation.every=0"])
    with pytest.raises(UserError, match=r"goes with model\.kind: recurrent"):
        load([path], ["control.controllers=[{kind: rate_by_depth}]", "model.kind=transformer"])
    transformer = ModelConfig(kind="transformer")
    spike = ControlConfig(controllers=(SpikeConfig(),))
    assert Control(Config(model=transformer, control=spike)).decide(0, lambda mean: 0).depth == 0


def test_the_example_of_the_documentation_runs():
    result = doctest.testfile(str(ROOT / "docs/control.md"), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
