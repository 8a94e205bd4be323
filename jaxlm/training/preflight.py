"""Trials before a long run: is everything connected as the configuration says?

A check is one small function of :class:`Trials`, which makes what several of them need once. All
are listed in CHECKS. A failed check says which causes its figures speak for, the likeliest first.
"""

from collections.abc import Callable, Iterable

from jaxlm.training import preflight_memory, preflight_model, preflight_trial
from jaxlm.training.checks import Check, Result
from jaxlm.training.preflight_control import check_control
from jaxlm.training.preflight_data import (
    check_duplicates,
    check_ids,
    check_targets,
    check_tokenizer,
)
from jaxlm.training.trials import Trials


def ids(of: Trials) -> Result:
    """See preflight_data."""
    return check_ids(of.data, of.vocabulary, of.settings.data_tokens)


def targets(of: Trials) -> Result:
    """See preflight_data."""
    return check_targets(of.config, of.data, of.windows)


def duplicates(of: Trials) -> Result:
    """See preflight_data."""
    return check_duplicates(of.config, of.data)


def tokenizer(of: Trials) -> Result:
    """See preflight_data."""
    found, of.samples = check_tokenizer(of.config, of.data)
    return found


def control(of: Trials) -> Result:
    """See preflight_control."""
    return check_control(of.config)


# In the order in which they are made: what costs least, and what most others hang on, first.
CHECKS: tuple[Check[Trials], ...] = (
    Check("memory", preflight_memory.memory),
    Check("ids", ids),
    Check("targets", targets),
    Check("duplicates", duplicates),
    Check("tokenizer", tokenizer),
    Check("control", control),
    Check("connected", preflight_model.connected),
    Check("gradients", preflight_model.gradients),
    Check("causality", preflight_model.causality),
    Check("loss_value", preflight_model.loss_value),
    Check("overfit", preflight_model.overfit),
    Check("initial_loss", preflight_trial.initial_loss),
    Check("loss_falls", preflight_trial.loss_falls),
    Check("updated", preflight_trial.updated),
    Check("learning_rate", preflight_trial.learning_rate),
    Check("depth_order", preflight_trial.depth_order),
    Check("checkpoint", preflight_trial.checkpoint),
    Check("resume", preflight_trial.resume),
    Check("data_wait", preflight_trial.data_wait),
    Check("speed", preflight_trial.speed),
)


class Preflight(Trials):
    """A configuration to be checked."""

    checks = CHECKS


def run_checks(
    of: Preflight, names: Iterable[str], advance: Callable[[int, str], None]
) -> list[Result]:
    """Make checks in their order.

    Args:
        of: the configuration.
        names: of CHECKS.
        advance: called with (1, name) after each.
    """
    wanted, found = set(names), []
    for check in CHECKS:
        if check.name in wanted:
            found.append(of.result(check.name))
            advance(1, check.name)
    return found
