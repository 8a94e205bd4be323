"""Memory and speed limits of a training run on a GPU, without the GPU.

    python scripts/plan_memory.py --config configs/quickstart.yaml --device rtx3090

Compiles the run's training step for the device and prints XLA's peak with its parts, the
operations per token and the speed that the device's peak allows. Needs the extra `plan`. Sizes are
in GB of 10^9 bytes. Exit code 0: it fits; 1: it does not; 2: a mistake in the settings.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # or the GPU compiler asks for cuDNN

import argparse
from pathlib import Path
from typing import Any

import rich.table

from jaxlm.cli import add_host_budget, config_from, host_budget_of, parser, run_script, size
from jaxlm.console import console, new_table, tracked
from jaxlm.errors import UserError
from jaxlm.files import write_json
from jaxlm.memory.devices import DEVICES, Device, read_device
from jaxlm.training.planning import (
    HOST_BUDGET,
    PARTS,
    Plan,
    alternatives,
    default_budget,
    gigabytes,
    memory_table,
    plan_training,
)


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__)
    result.add_argument(
        "--device", default="rtx3090", metavar="NAME", help=f"one of {', '.join(DEVICES)}"
    )
    result.add_argument(
        "--device-file",
        metavar="FILE",
        help="another device: XLA's text description with two comment lines, '# kind: NAME' and "
        "'# peak_flops: NUMBER'",
    )
    result.add_argument(
        "--budget",
        metavar="SIZE",
        help="device memory that may be used, such as 22.6GB or 21GiB; default: 88.8 %% of it",
    )
    add_host_budget(result)
    result.add_argument("--json", metavar="FILE", help="also write the result there")
    result.add_argument(
        "--suggest", action="store_true", help="also compile settings that may take less memory"
    )
    return result.parse_intermixed_args()


def device_of(options: argparse.Namespace) -> Device:
    """The device that the options name."""
    if options.device_file is not None:
        return read_device(options.device_file)
    if options.device not in DEVICES:
        raise UserError(
            f"--device {options.device}: not known; one of {', '.join(DEVICES)}, or --device-file"
        )
    return DEVICES[options.device]


def speed_table(plan: Plan) -> rich.table.Table:
    """Operations and the bounds that follow from them."""
    without, executed = plan.flops.training / 1e9, plan.flops.executed / 1e9
    table = new_table("speed limits", "as planned", "without recomputation")
    table.add_row("GFLOP per token", f"{executed:,.4g}", f"{without:,.4g}")
    for share in (1.0, 0.8):
        speeds = [plan.tokens_per_second(share, again) for again in (True, False)]
        at = f"at {share:.0%} of {plan.device.peak_flops / 1e12:.4g} TFLOP/s"
        table.add_row(f"tokens/s {at}", *[f"{speed:,.0f}" for speed in speeds])
        table.add_row("  days per 10^9 tokens", *[f"{days(speed):,.3g}" for speed in speeds])
    return table


def days(tokens_per_second: float) -> float:
    """Days that a billion tokens take."""
    return 1e9 / tokens_per_second / 86_400


def buffer_table(plan: Plan) -> rich.table.Table:
    """The largest temporaries."""
    table = new_table("largest temporaries at the peak", "GB", "shape")
    for part, buffer in plan.largest[:6]:
        shape = ", ".join(str(n) for n in buffer.shape)
        table.add_row(PARTS[part], gigabytes(buffer.size), f"{buffer.dtype} [{shape}]")
    return table


def as_json(plan: Plan, budget: int, host_budget: int) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    return {
        "device": plan.device.kind,
        "attention": plan.config.model.attention,
        "parameters": plan.parameters,
        "mean_depth": plan.depth,
        "mean_backprop_depth": plan.backprop_depth,
        "peak_bytes": plan.peak,
        "host_peak_bytes": plan.host,
        "budget_bytes": budget,
        "host_budget_bytes": host_budget,
        "fits": fits(plan, budget, host_budget),
        "parts": plan.parts,
        "largest_temporaries": [
            {
                "part": part,
                "bytes": buffer.size,
                "dtype": buffer.dtype,
                "shape": list(buffer.shape),
                "operation": buffer.operation,
            }
            for part, buffer in plan.largest
        ],
        # Forward and backward, the numerator of MFU; and what the device does besides.
        "flops_per_token": plan.flops.training,
        "recomputed_flops_per_token": plan.flops.recomputed,
        # With recomputation, at the device's peak and at 80 % of it.
        "tokens_per_second_bound": plan.tokens_per_second(),
        "tokens_per_second_at_80_percent": plan.tokens_per_second(0.8),
        "days_per_billion_tokens_bound": days(plan.tokens_per_second()),
    }


def fits(plan: Plan, budget: int, host_budget: int) -> bool:
    """Whether a plan keeps both budgets."""
    return plan.peak <= budget and plan.host <= host_budget


def verdict(plan: Plan, budget: int, host_budget: int) -> str:
    """One line: does it fit, and by how much."""
    if fits(plan, budget, host_budget):
        return f"It fits: {gigabytes(budget - plan.peak)} GB of the budget are left."
    over = []
    if plan.peak > budget:
        over.append(f"{gigabytes(plan.peak - budget)} GB over the budget")
    if plan.host > host_budget:
        over.append(f"{gigabytes(plan.host - host_budget)} GB over the host budget")
    return f"It does not fit: {' and '.join(over)}."


def main() -> int:
    """Plan, print, and tell by the exit code whether it fits."""
    options = arguments()
    config, device = config_from(options), device_of(options)
    budget = size(options.budget, "--budget") if options.budget else default_budget(device)
    host_budget = host_budget_of(options, HOST_BUDGET)
    out = console()
    plan = plan_training(config, device)
    training = plan.config.training
    out.print(
        f"{plan.config.model.kind}, {plan.parameters:,} weights, on {device.kind} "
        f"({gigabytes(device.memory_bytes)} GB)\n"
        f"one update: {training.micro_batches} x {training.micro_batch_rows} rows of "
        f"{plan.config.data.sequence_length:,} tokens"
    )
    if plan.config.model.kind == "recurrent":
        out.print(f"depth {plan.depth:.4g} on average, {plan.backprop_depth:.4g} with gradient")
    if config.model.attention == "auto":
        out.print("attention: planned as xla; cuDNN's, which auto takes on a GPU, needs less")
    out.print(memory_table(plan, budget, host_budget))
    out.print(speed_table(plan))
    out.print(verdict(plan, budget, host_budget))
    result = as_json(plan, budget, host_budget)
    others = alternatives(plan.config)
    if not fits(plan, budget, host_budget):
        out.print(buffer_table(plan))
        if others and not options.suggest:
            out.print("Settings that may take less memory (--suggest compiles them):")
            for words, _ in others:
                out.print(f"  {words}", soft_wrap=True)
    if options.suggest:
        result["suggestions"] = []
        table = new_table("instead", "peak GB", "fits")
        for words, changed in tracked(others, "compiling", len(others)):
            other = plan_training(changed, device)
            ok = fits(other, budget, host_budget)
            table.add_row(words.replace(" ", "\n"), gigabytes(other.peak), "yes" if ok else "no")
            result["suggestions"].append({"settings": words, "peak_bytes": other.peak, "fits": ok})
        out.print(table if others else "No other setting would take less memory.")
    if options.json:
        write_json(Path(options.json), result)
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    run_script(main)
