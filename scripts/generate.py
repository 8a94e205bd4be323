"""Continue a prompt with a run's model, at any depth.

python scripts/generate.py --run runs/quickstart --prompt "To be" --depth 6
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.cli import run_script
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.errors import UserError
from jaxlm.evaluation.generate import generate
from jaxlm.training.loading import load_run


def main() -> int:
    """Print the prompt and its continuation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run")
    parser.add_argument("--update", type=int, metavar="N", help="checkpoint; default the newest")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--depth", type=int, help="core steps; default the mean training depth")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="new tokens; default fills the context"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample among the K likeliest; 0 is all"
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    arguments = parser.parse_args()

    run = load_run(arguments.run, arguments.update)
    data = run.data
    path = data.tokenizer_path()
    if path is None:
        raise UserError(f"{data.directory}: has no tokenizer, so there is no text to generate")
    tokenizer = read_tokenizer(path, data.manifest["end_token"], data.manifest["begin_token"])
    prompt = tokenizer.encode_prompt(arguments.prompt)
    if prompt.size == 0:
        # Training never shows what follows the end of a document: documents are kept apart.
        raise UserError("--prompt: is empty; give the model some text to continue")
    context = run.config.data.sequence_length
    new = context - prompt.size if arguments.tokens is None else arguments.tokens
    if new < 1 or prompt.size + new > context:
        raise UserError(
            f"the prompt has {prompt.size} tokens and {new} new ones are asked for; together at "
            f"least one more than the prompt, at most the {context} that the model was trained on"
        )
    depth = round(run.config.depth.mean) if arguments.depth is None else arguments.depth
    if depth < 1 or arguments.temperature < 0 or arguments.top_k < 0:
        raise UserError("--depth must be at least 1, --temperature and --top-k at least 0")
    buffer = np.zeros(prompt.size + new, np.int32)
    buffer[: prompt.size] = prompt
    tokens, count = generate(
        run.config.model,
        run.params,
        jnp.asarray(buffer),
        jnp.asarray(prompt.size),
        jnp.asarray(tokenizer.end_id),
        jax.random.key(arguments.seed),
        depth=jnp.asarray(depth),
        temperature=jnp.asarray(arguments.temperature, jnp.float32),
        top_k=jnp.asarray(arguments.top_k),
    )
    print(tokenizer.decode(np.asarray(tokens)[: int(count)]))
    return 0


if __name__ == "__main__":
    run_script(main)
