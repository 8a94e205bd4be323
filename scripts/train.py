"""Train a model, or continue an interrupted run; then evaluate it and write a report.

python scripts/train.py --config configs/quickstart.yaml
python scripts/train.py --config configs/quickstart.yaml run.name=wide model.width=256
"""

from jaxlm.cli import config_from, parser, run_script
from jaxlm.training.loop import train


def main() -> int:
    """Run what the arguments describe."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue although horizon, schedule, learning rate or depth distribution changed; "
        "the change is recorded in the run",
    )
    arguments.add_argument(
        "--until-update",
        type=int,
        metavar="N",
        help="stop after N updates of the horizon, saved and without a report; data for the later "
        "ones need not be there yet",
    )
    parsed = arguments.parse_intermixed_args()
    return train(config_from(parsed), parsed.allow_changes, parsed.until_update)


if __name__ == "__main__":
    run_script(main)
