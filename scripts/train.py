"""Train a model, or continue an interrupted run; then evaluate it and write a report.

python scripts/train.py --config configs/quickstart.yaml
python scripts/train.py --config configs/quickstart.yaml run.name=wide model.width=256
"""

from jaxlm.cli import config_from, parser, run_script
from jaxlm.errors import UserError
from jaxlm.training.loop import train
from jaxlm.training.resume import ON_REQUEST


def main() -> int:
    """Run what the arguments describe."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--allow-changes",
        default="",
        metavar="NAME[,NAME]",
        help=f"continue although settings of these kinds changed ({', '.join(ON_REQUEST)}), and "
        "record the change in the run; horizon is what takes a run to more tokens",
    )
    arguments.add_argument(
        "--until-update",
        type=int,
        metavar="N",
        help="stop after N updates of the horizon, saved and without a report; data for the later "
        "ones need not be there yet",
    )
    parsed = arguments.parse_intermixed_args()
    allowed = tuple(name for name in parsed.allow_changes.split(",") if name)
    for name in allowed:
        if name not in ON_REQUEST:
            known = ", ".join(ON_REQUEST)
            raise UserError(f"--allow-changes {name}: not a kind of change; one of {known}")
    return train(config_from(parsed), allowed, parsed.until_update)


if __name__ == "__main__":
    run_script(main)
