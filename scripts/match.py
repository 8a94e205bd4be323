"""Find the Transformer that a recurrent-depth model can be compared with fairly.

    python scripts/match.py --config configs/quickstart.yaml

Prints, for equal stored parameters and for equal training FLOPs, the settings to add to the same
command line of train.py.
"""

import dataclasses
from typing import Literal

import rich.table

from jaxlm.cli import config_from, parser, run_script
from jaxlm.console import console
from jaxlm.data.pipeline import open_sources, training_windows
from jaxlm.data.prepare import ensure_prepared
from jaxlm.errors import UserError
from jaxlm.models.match import matching_transformer, stored_parameters, training_flops
from jaxlm.training.loop import resolve_config


def main() -> int:
    """Print the recurrent model and its two baselines."""
    config = config_from(parser(__doc__).parse_intermixed_args())
    if config.model.kind != "recurrent":
        raise UserError("model.kind: only a recurrent model is matched with a Transformer")
    data = ensure_prepared(config)
    windows = training_windows(
        open_sources(config.data, data),
        config.data,
        config.training.micro_batches,
        config.training.micro_batch_rows,
    )
    config = resolve_config(config, data, windows)
    assert config.training.updates is not None
    updates = config.training.updates
    table = rich.table.Table(title=f"{config.run.name} and Transformers to compare it with")
    for name in ("model", "stored parameters", "training GFLOP/token"):
        table.add_column(name, justify="left" if name == "model" else "right")
    table.add_row(
        "recurrent",
        f"{stored_parameters(config.model):,}",
        f"{training_flops(config, updates) / 1e9:.5g}",
    )
    settings = []
    choices: tuple[Literal["parameters", "flops"], ...] = ("parameters", "flops")
    for by in choices:
        try:
            model = matching_transformer(config, by, updates)
        except ValueError as error:
            raise UserError(str(error)) from None
        matched = dataclasses.replace(config, model=model)
        table.add_row(
            f"transformer, equal {by}",
            f"{stored_parameters(model):,}",
            f"{training_flops(matched, updates) / 1e9:.5g}",
        )
        settings.append(
            f"equal {by}: model.kind=transformer model.transformer.layers="
            f"{model.transformer.layers} model.feed_forward={model.feed_forward}"
        )
    console().print(table)
    for line in settings:
        console().print(line, soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_script(main)
