"""Turn text into token shards, or go on with what was interrupted.

python scripts/prepare_data.py --config configs/quickstart.yaml
python scripts/prepare_data.py --config configs/quickstart.yaml --tokens 200000000
"""

from jaxlm.cli import config_from, parser, run_script
from jaxlm.console import console
from jaxlm.data.prepare import prepare


def main() -> int:
    """Prepare the data of a configuration and say what is there."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="stop once there are N training tokens; the same command with more goes on from there",
    )
    options = arguments.parse_intermixed_args()
    data = prepare(config_from(options), options.tokens)
    for name, split in data.manifest["splits"].items():
        console().print(
            f"{data.directory}/{name}: {split['documents']:,} documents, "
            f"{split['tokens']:,} tokens, {split['text_bytes']:,} bytes of text"
        )
    source = data.manifest["source"]
    if source:
        documents = source["documents"]
        skipped = ", ".join(f"{n:,} {why}" for why, n in documents["skipped"].items())
        console().print(
            f"{documents['in']:,} documents read: {documents['train']:,} train, "
            f"{documents['validation']:,} validation" + (f"; skipped: {skipped}" if skipped else "")
        )
        if not source["complete"]:
            console().print("Not all sources were read: a larger --tokens, or none, goes on.")
    return 0


if __name__ == "__main__":
    run_script(main)
