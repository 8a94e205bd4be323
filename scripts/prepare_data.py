"""Turn text into token shards.

python scripts/prepare_data.py --config configs/quickstart.yaml
"""

from jaxlm.cli import config_from, parser, run_script
from jaxlm.console import console
from jaxlm.data.prepare import prepare


def main() -> int:
    """Prepare the data of a configuration and say what is there."""
    config = config_from(parser(__doc__).parse_intermixed_args())
    data = prepare(config)
    for name, split in data.manifest["splits"].items():
        console().print(
            f"{data.directory}/{name}: {split['documents']:,} documents, "
            f"{split['tokens']:,} tokens, {split['text_bytes']:,} bytes of text"
        )
    return 0


if __name__ == "__main__":
    run_script(main)
