"""Checks of the model on single batches: is everything connected, and to nothing else?

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.models.build import Params
from jaxlm.training import step
from jaxlm.training.checks import Cause, Result, listed, result
from jaxlm.training.reach import reached
from jaxlm.training.spec import row_keys, step_spec
from jaxlm.training.trials import (
    TINY,
    Probe,
    Trials,
    by_name,
    labels,
    probe_window,
    tiny_documents,
    train_on,
)


def _reference(probe: Probe, shift: int, across: bool, padding: bool) -> tuple[float, int]:
    """Cross-entropy of the probe in NumPy: its mean, and the number of targets.

    Args:
        probe: rows and log probabilities.
        shift: how many tokens ahead the target is; 1 is right. The mask stays that of 1.
        across: also targets of another document.
        padding: also padding.
    """
    tokens, segments = probe.window["tokens"], probe.window["segment_ids"]
    t = np.arange(tokens.shape[1] - max(shift, 1))
    mask = np.ones((len(tokens), len(t)), bool)
    if not across:
        mask &= segments[:, t + 1] == segments[:, t]
    if not padding:
        mask &= segments[:, t + 1] > 0
    target = tokens[:, t + shift, None].astype(np.int64)
    taken = np.take_along_axis(probe.log_probability[:, t], target, axis=-1)[..., 0]
    return float(-taken[mask].mean()), int(mask.sum())


# What a wrong loss may be instead: shift, across, padding; cause and description.
_WRONG_LOSSES = {
    (2, False, False): ("labels_shifted", "the token after the next were the target"),
    (0, False, False): ("labels_shifted", "each token were its own target"),
    (1, True, False): ("mask_ignored", "targets of the next document carried loss"),
    (1, False, True): ("mask_ignored", "padding carried loss"),
    (1, True, True): ("mask_ignored", "padding and targets of the next document carried loss"),
}
# A shifted loss differs from its model at the ends of rows.
_SHIFTED_DIFFERENCE = 0.01


def _loss_causes(probe: Probe, limit: float) -> list[Cause]:
    """What the loss is, where it is not what it should be."""
    found, causes = probe.cross_entropy / max(probe.target_tokens, 1.0), []
    for (shift, across, padding), (key, what) in _WRONG_LOSSES.items():
        other, count = _reference(probe, shift, across, padding)
        distance = abs(found - other) / other
        if shift == 1:
            alike = distance <= limit and count == probe.target_tokens
            weight = 0.97
        else:
            alike = distance <= _SHIFTED_DIFFERENCE
            weight = 0.97 - 10 * distance
        if alike:
            text = f"the loss, {found:.4f}, is what it would be if {what}: {other:.4f}"
            causes.append(Cause(key, text, weight))
    return causes


def loss_value(of: Trials) -> Result:
    """Training's loss is the cross-entropy of the next token of the same document."""
    probe, limit = of.probe, of.settings.loss_difference
    wanted, count = _reference(probe, 1, across=False, padding=False)
    found = probe.cross_entropy / max(probe.target_tokens, 1.0)
    relative = abs(found - wanted) / wanted if math.isfinite(found) else math.inf
    first = of.trial.records[0]["tokens"]
    segments = of.windows_of_trial[0]["segment_ids"]
    expected = int(np.sum((segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)))
    passed = relative <= limit and probe.target_tokens == count and first == expected
    causes: list[Cause] = []
    if not passed:
        causes += _loss_causes(probe, limit)
        if not math.isfinite(found):
            causes.append(Cause("nonfinite", "the loss is not finite", 0.9))
        for number, right, where in (
            (probe.target_tokens, count, "of the rows made here"),
            (first, expected, "of the first update"),
        ):
            if number != right:
                text = f"{number:,.0f} positions {where} carry loss where {right:,} have a target"
                causes.append(Cause("mask_ignored" if number > right else "mask_lost", text, 0.9))
        text = f"the loss in training is {found:.4f}, the cross-entropy of its logits {wanted:.4f}"
        causes.append(Cause("loss_code", text, 0.3))
    return result(
        "loss_value",
        passed,
        f"{relative:.1e} from NumPy's; {probe.target_tokens:.0f} of {count} and "
        f"{first:,} of {expected:,} targets",
        f"<= {limit:g}, all",
        causes,
        "`loss_sums` in jaxlm/training/step.py: tokens[:, 1:] and target_mask",
        relative_difference=relative,
        targets=probe.target_tokens,
        expected_targets=count,
    )


def connected(of: Trials) -> Result:
    """Every parameter reaches the loss of the traced program, and gradient reaches it."""
    config = of.config
    updates = config.training.updates
    assert updates is not None
    spec = step_spec(config, of.vocabulary, updates)
    shapes = jax.eval_shape(lambda: step.init_state(spec).params)
    window = probe_window(of.vocabulary, seed=0)
    keys = row_keys(0, 0, jnp.arange(len(window["tokens"])))

    def loss(params: Params, window: dict[str, Array], depth: Array, k: Array) -> Array:
        return step.loss_sums(spec, params, window, keys, depth, k)[0]

    arguments = (shapes, window, jnp.int32(1), jnp.int32(1))
    used, _, depth, _ = reached(loss, *arguments)
    differentiated = reached(loss, *arguments, gradient=True)[0]
    used, differentiated = by_name(used), by_name(differentiated)
    unused = {n: [not x for x in parts] for n, parts in used.items()}
    blocked = {
        n: [u and not d for u, d in zip(used[n], differentiated[n], strict=True)] for n in used
    }
    dead, cut = (
        [label for n, parts in kind.items() if any(parts) for label in labels(n, parts)]
        for kind in (unused, blocked)
    )
    ignored = of.recurrent and not depth.all()
    causes = []
    if dead:
        text = f"the loss does not use {listed(dead)}: built, but left out of the forward pass"
        causes.append(Cause("detached", text, 0.98))
    if cut:
        text = f"{listed(cut)}: used, but no gradient flows back (stop_gradient)"
        causes.append(Cause("frozen", text, 0.98))
    if ignored:
        text = "the loss does not depend on the number of core steps: depth is ignored"
        causes.append(Cause("depth_ignored", text, 0.98))
    return result(
        "connected",
        not causes,
        f"{len(used) - len({x.split(' (')[0] for x in (*dead, *cut)})} of {len(used)} parameters"
        + (f"; not {listed([*dead, *cut])}" if dead or cut else ""),
        "all",
        causes,
        "`__call__` of the model in jaxlm/models; is each layer of the stack applied?",
        unused=dead,
        without_gradient=cut,
    )


def gradients(of: Trials) -> Result:
    """Every parameter gets a finite gradient; zero is told apart from detached."""
    probe = of.probe

    def marked(kind: dict[str, list[bool]], wanted: bool) -> list[str]:
        parts = {name: [x == wanted for x in values] for name, values in kind.items()}
        return [label for n, p in parts.items() if any(p) for label in labels(n, p)]

    bad, zero = marked(probe.finite, wanted=False), marked(probe.zero, wanted=True)
    detached = of.result("connected").numbers
    cut = {*detached["unused"], *detached["without_gradient"]}
    merely = [name for name in zero if name not in cut]
    causes = []
    if bad:
        text = f"the gradient of {len(bad)} parameters is not finite: {listed(bad)}"
        if math.isfinite(probe.cross_entropy):
            text += "; the loss is: a derivative at a point where there is none (0/0, sqrt(0))"
        causes.append(Cause("nonfinite", text, 0.98))
    if cut & set(zero):
        causes += of.upstream("connected")
    if merely:
        text = (
            f"the gradient of {listed(merely)} is zero on two batches though the loss uses it: "
            f"multiplied by zero, rounded away, or saturated"
        )
        causes.append(Cause("zero_gradient", text, 0.9))
    count = len(probe.finite)
    return result(
        "gradients",
        not causes,
        f"finite for {count - len({b.split(' (')[0] for b in bad})} of {count}; zero: "
        f"{listed(zero) or 'none'}",
        "finite, not zero",
        causes,
        "the first module named, with jax.config.update('jax_debug_nans', True)",
        nonfinite=bad,
        zero=zero,
    )


def causality(of: Trials) -> Result:
    """Outputs do not depend on later tokens, on other documents, or on padding."""
    window = probe_window(of.vocabulary, seed=0)
    width = window["tokens"].shape[1]
    middle, first, real = width // 2, width // 3, width // 2
    other = dict(window, tokens=window["tokens"].copy())
    change = probe_window(of.vocabulary, seed=3)["tokens"]
    other["tokens"][0, middle:] = change[0, middle:]
    other["tokens"][1, :first] = change[1, :first]
    other["tokens"][2, real:] = np.uint16(1)
    mean = round(of.config.depth.mean)
    depths = sorted({1, mean, 2 * mean}) if of.recurrent else [1]
    worst = {"later tokens": 0.0, "another document": 0.0, "padding": 0.0}
    limit = of.settings.causality
    look = "`attention_mask` and the call of attention in jaxlm/models/layers.py"
    reacts = math.inf
    worst_depth = depths[0]
    for depth in depths:
        before, after = of.hidden(window, depth), of.hidden(other, depth)
        if not (np.isfinite(before).all() and np.isfinite(after).all()):
            text = f"outputs at depth {depth} are not finite"
            cause = Cause("nonfinite", text, 0.9)
            return result("causality", False, text, f"<= {limit:g}", [cause], look)
        difference = np.abs(after - before).max(axis=-1) / np.abs(before).max()
        found = {
            "later tokens": difference[0, :middle].max(),
            "another document": difference[1, first:].max(),
            "padding": difference[2, :real].max(),
        }
        if max(found.values()) > max(worst.values()):
            worst_depth = depth
        worst = {key: max(worst[key], float(found[key])) for key in worst}
        # Beyond the changed tokens themselves: the last one sees the others.
        reacts = min(reacts, float(difference[0, middle:].min()))
    texts = {
        "later tokens": ("leak", "outputs change with later tokens: the causal mask is missing"),
        "another document": ("segments", "outputs change with another document of the row"),
        "padding": ("padding_seen", "outputs change with what stands in the padding"),
    }
    causes = [
        Cause(key, f"{text} (by {worst[kind]:.1e} at depth {worst_depth})", 0.97)
        for kind, (key, text) in texts.items()
        if not worst[kind] <= limit
    ]
    if reacts == 0.0:
        causes.append(Cause("blind", "outputs do not change with the tokens before them", 0.8))
    largest = max(worst.values())
    return result(
        "causality",
        not causes,
        f"{largest:.1e} at depths {', '.join(map(str, depths))}",
        f"<= {limit:g}",
        causes,
        look,
        **{key.replace(" ", "_"): value for key, value in worst.items()},
    )


def _lowest(losses: Sequence[float | None]) -> float:
    return min((x for x in losses if x is not None), default=math.inf)


def overfit(of: Trials) -> Result:
    """Two tiny documents are learnt by heart."""
    config, settings = of.small, of.settings
    epochs, goal = settings.overfit_epochs, settings.overfit_loss
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout=0.0),
        data=dataclasses.replace(config.data, sequence_length=TINY, buckets=()),
        training=dataclasses.replace(
            config.training, updates=epochs + 1, micro_batches=1, micro_batch_rows=2
        ),
        optim=dataclasses.replace(
            config.optim,
            schedule="constant",
            warmup_updates=min(config.optim.warmup_updates, epochs // 10),
            decay_updates=0,
            end_learning_rate=0.0,
        ),
    )
    spec = step_spec(config, of.vocabulary, epochs + 1)
    window = tiny_documents(of.vocabulary)

    class Same:
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return window

    # A rate for weeks may be low for 60 updates: whether it fits the run is not asked here.
    by_factor: dict[float, tuple[float | None, ...]] = {}
    for factor in (1.0, 10.0, 0.1):
        by_factor[factor] = train_on(spec, config, Same(), epochs + 1, factor)
        if _lowest(by_factor[factor]) < goal:
            break
    factor = min(by_factor, key=lambda factor: _lowest(by_factor[factor]))
    found = by_factor[factor]
    lowest = _lowest(found)
    causes: list[Cause] = []
    reached_at = next((i for i, x in enumerate(found) if x is not None and x < goal), None)
    if reached_at is None:
        causes += of.upstream("gradients", "connected", "loss_value", "causality")
        told = ", ".join(f"{_lowest(one):.3g} at {f:g} x" for f, one in by_factor.items())
        if factor != 1.0:
            key, word = ("rate_low", "low") if factor > 1 else ("rate_high", "high")
            text = f"the loss gets to {told} the rate: the learning rate is too {word}"
            causes.append(Cause(key, text, 0.6))
        text = f"the loss gets to {told} the rate: model too small, or optimizer not wired up"
        causes.append(Cause("capacity", text, 0.15))
    start = found[0] if found[0] is not None else math.nan
    return result(
        "overfit",
        reached_at is not None,
        f"{start:.2f} to {lowest:.3f}"
        + f" in {epochs if reached_at is None else reached_at} epochs"
        + ("" if factor == 1.0 else f" at {factor:g} times the rate"),
        f"< {goal:g} in {epochs} epochs",
        causes,
        "optim.learning_rate; grad_norm and update_norm of the first updates",
        start=start,
        lowest=lowest,
        epochs=reached_at,
    )
