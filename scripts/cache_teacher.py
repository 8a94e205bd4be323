"""Cache what a teacher predicts for a data directory's training tokens, or go on with it.

    python scripts/cache_teacher.py --data prepared/shakespeare --run runs/big --depth 12
    python scripts/cache_teacher.py --data prepared/ja --hf llm-jp/NAME --plan
    python scripts/cache_teacher.py --data prepared/ja --hf llm-jp/NAME --tokens 0:201326592
    python scripts/cache_teacher.py --data prepared/ja --name NAME --verify

Writes DATA/teacher-NAME, which training reads as distillation.cache; see docs/distillation.md. The
same command after an interruption, or with more --tokens, goes on. --plan loads nothing: it prints
memory, disk and time, and exits with 1 where they do not fit.
"""

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from jaxlm.cli import run_script
from jaxlm.config import read_tree
from jaxlm.console import console, new_table
from jaxlm.data.shards import DataDirectory
from jaxlm.data.teacher import covered, read_manifest
from jaxlm.distillation.caching import cache_directory, cache_teacher, verify, work_of
from jaxlm.distillation.planning import CachePlan, logits_bytes, size_of
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.distillation.teachers import context_of, load_teacher
from jaxlm.errors import UserError
from jaxlm.files import size_text
from jaxlm.memory.devices import DEVICES

SHARES = (1.0, 0.4)


def arguments() -> argparse.Namespace:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="prepared data")
    add("--run", metavar="DIR", help="the teacher: a run of jaxlm")
    add("--hf", metavar="NAME", help="the teacher: a causal language model of Hugging Face")
    add("--name", help="of the cache; default: that of the teacher")
    add("--tokens", metavar="A:B", help="range of training tokens, or B for 0:B; default: all")
    add("--k", type=int, metavar="N", help="tokens named at a position; default: 32")
    add("--dtype", choices=("float16", "float32"), help="of log-probabilities; default: float16")
    add("--length", type=int, metavar="T", help="tokens read at one time; default: the run's; 2048")
    add("--batch-rows", type=int, metavar="N", help="rows or windows a forward pass; default: 8; 1")
    add("--chunk-tokens", type=int, metavar="N", help="logits sorted at one time; default: 512")
    add("--shard-tokens", type=int, default=2**20, metavar="N", help="records of a shard")
    add("--plan", action="store_true", help="print memory, disk and time; load nothing")
    add("--device", default="rtx3090", metavar="NAME", help=f"of the plan: {', '.join(DEVICES)}")
    add("--verify", action="store_true", help="compare every checksum of a cache")
    run = result.add_argument_group("a run of jaxlm")
    run.add_argument("--update", type=int, metavar="N", help="checkpoint; default: the newest")
    run.add_argument("--depth", type=int, metavar="N", help="core steps; default: the mean depth")
    hf = result.add_argument_group("a model of Hugging Face")
    hf.add_argument("--revision", help="branch, tag or commit")
    hf.add_argument(
        "--weights", choices=("bfloat16", "float16", "float32"), help="type; default: bfloat16"
    )
    hf.add_argument("--quantization", metavar="JSON", help="of transformers.BitsAndBytesConfig")
    hf.add_argument("--device-map", help="of from_pretrained; default: auto where there is a GPU")
    hf.add_argument("--overlap", type=int, metavar="N", help="of windows; default: length / 8")
    hf.add_argument(
        "--parameters", type=float, metavar="N", help="of the plan: 32e9; default: count"
    )
    return result.parse_args()


def teacher_of(options: argparse.Namespace) -> TeacherConfig:
    """The teacher that the options describe.

    Raises:
        UserError: numbers that mean nothing, or a teacher that is none or two.
    """
    keys = [field.name for field in dataclasses.fields(TeacherConfig)]
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    for key, kind in (("update", "hf"), ("device_map", "run")):
        if getattr(options, key) is not None and getattr(options, kind) is not None:
            raise UserError(f"--{key.replace('_', '-')} does not go with --{kind}")
    if options.quantization is not None:
        given["quantization"] = quantization_of(options.quantization)
    return read_tree(TeacherConfig, given, {key: f"--{key.replace('_', '-')}" for key in given})


def token_range(text: str | None) -> tuple[int, int] | None:
    """The range that --tokens names."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if found is None:
        raise UserError(f"--tokens {text}: expected a range such as 0:201326592")
    return int(found[1] or 0), int(found[2])


def quantization_of(text: str) -> dict[str, Any]:
    """The settings that --quantization holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"--quantization: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError('--quantization: expected an object such as {"load_in_4bit": true}')
    return value


def plan(options: argparse.Namespace, teacher: TeacherConfig, data: DataDirectory) -> int:
    """Print what the cache takes; returns 1 where memory or disk is short."""
    if options.device not in DEVICES:
        raise UserError(f"--device {options.device}: not known; one of {', '.join(DEVICES)}")
    directory, form = cache_directory(data, teacher.cache_name), teacher.form(data.vocabulary_size)
    context, size = context_of(teacher), size_of(teacher)
    logits = logits_bytes(teacher, size, form.vocabulary_size)
    work = work_of(directory, data.stream("train"), context, token_range(options.tokens))
    left = work.left
    device = DEVICES[options.device]
    found = CachePlan(size, device, form, left.tokens, left.records, logits)
    free = shutil.disk_usage(data.directory).free
    screen = console()
    screen.print(
        f"{directory}: {left.records:,} records to make, {found.tokens:,} tokens to read "
        f"({context.describe()['kind']} of {context.length:,}, {teacher.rows} at a time)"
    )
    table = new_table(f"weights of {size.parameters / 1e9:,.3g} billion", "GB", f"{device.kind}")
    for name, weights in size.memory.items():
        fits = "fits" if found.form_fits(name) else "does not fit"
        asked = " (as asked for)" if name == size.form else ""
        table.add_row(name + asked, f"{weights / 1e9:,.2f}", fits)
    table.add_row("logits of a pass", f"{logits / 1e9:,.2f}", "")
    screen.print(table)
    screen.print(
        f"Disk: {size_text(found.disk)} ({form.bytes_per_token} bytes a token, k = {form.k}); "
        f"{size_text(free)} are free"
    )
    days = " or ".join(f"{found.days(share):.3g} days at {share:.0%}" for share in SHARES)
    screen.print(f"Time: {found.flops:.3g} FLOP, {days} of {device.peak_flops / 1e12:.3g} TFLOP/s")
    return 0 if found.fits and found.disk <= free else 1


def main() -> int:
    """Do what the arguments ask for."""
    options = arguments()
    if options.shard_tokens < 1:
        raise UserError(f"--shard-tokens {options.shard_tokens}: expected a number from 1")
    data = DataDirectory(options.data)
    if options.verify:
        if options.name is None:
            raise UserError("--verify: name the cache with --name")
        cache = verify(data, cache_directory(data, options.name))
        print(f"{cache.directory}: whole; {cache.describe()}")
        return 0
    teacher = teacher_of(options)
    if teacher.k > data.vocabulary_size:
        raise UserError(f"--k {teacher.k}: the vocabulary has {data.vocabulary_size:,} entries")
    if options.plan:
        return plan(options, teacher, data)
    directory, form = cache_directory(data, teacher.cache_name), teacher.form(data.vocabulary_size)
    cache_teacher(
        data,
        load_teacher(teacher, data, options.update, options.device_map),
        directory,
        form,
        token_range(options.tokens),
        options.shard_tokens,
    )
    first, stop = covered(read_manifest(directory))
    print(f"{directory}: positions {first:,} to {stop:,}, {form.bytes_per_token} bytes each")
    print(f"Train with distillation.cache={directory}")
    return 0


if __name__ == "__main__":
    run_script(main)
