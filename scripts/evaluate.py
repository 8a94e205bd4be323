"""Evaluate a run's checkpoint on its validation split, at any depths.

python scripts/evaluate.py --run runs/quickstart --depths 1,3,6,12 --json result.json
"""

import argparse
from pathlib import Path

from jaxlm.cli import run_script
from jaxlm.console import console, progress
from jaxlm.data.pipeline import rows_of, validation_stream
from jaxlm.errors import UserError
from jaxlm.evaluation.evaluate import evaluate, number_of_batches, unigram_cross_entropy
from jaxlm.evaluation.report import evaluation_json, evaluation_table
from jaxlm.files import finite, write_json
from jaxlm.training.loading import load_run


def _depths(text: str) -> tuple[int, ...]:
    depths = tuple(int(part) for part in text.split(","))
    if min(depths) < 1:
        raise ValueError
    return depths


def main() -> int:
    """Evaluate what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run")
    parser.add_argument("--update", type=int, metavar="N", help="checkpoint; default the newest")
    parser.add_argument(
        "--depths", metavar="N,N,...", help="core steps; default the run's evaluation.depths"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()

    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UserError(f"--json: the folder {arguments.json.parent} does not exist")
    run = load_run(arguments.run, arguments.update)
    config = run.config
    try:
        depths = _depths(arguments.depths) if arguments.depths else config.evaluation.depths
    except ValueError:
        raise UserError(
            f"--depths: expected numbers from 1 like 1,3,6, found '{arguments.depths}'"
        ) from None
    data = run.data
    rows = rows_of(validation_stream(data, config.data), config.data)
    recurrent = config.model.kind == "recurrent"
    batches = number_of_batches(
        rows, None, config.evaluation.batch_rows, depths if recurrent else depths[:1]
    )
    with progress("Evaluating", batches) as on_batch:
        evaluations = evaluate(
            config.model,
            run.params,
            rows,
            depths=depths,
            batch_rows=config.evaluation.batch_rows,
            chunk_tokens=config.loss.chunk_tokens,
            token_bytes=data.token_bytes(),
            text_prefix=data.text_prefix,
            on_batch=on_batch,
        )
    unigram = unigram_cross_entropy(data, validation_stream(data, config.data))
    title = f"Validation of {arguments.run} after update {run.update}"
    console().print(evaluation_table(evaluations, title))
    console().print(f"Unigram cross-entropy of the validation tokens: {unigram:.4f}")
    if arguments.json is not None:
        write_json(arguments.json, finite(evaluation_json(evaluations, unigram, run.update)))
    return 0


if __name__ == "__main__":
    run_script(main)
