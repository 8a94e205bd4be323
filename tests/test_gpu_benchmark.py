"""benchmarks/gpu.py on a CPU: figures that fit together, its imports, its errors."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import long

from jaxlm.config import load
from jaxlm.data.pipeline import PackedRows
from jaxlm.data.shards import TokenStream
from jaxlm.errors import UserError
from jaxlm.models.flops import FlopsPerToken

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"

# Flax itself imports rich: it is there once, then forgotten and refused like the others.
BLOCKED = """
import runpy, sys
import flax.nnx

NAMES = {"grain", "orbax", "tokenizers", "tensorboardX", "rich", "matplotlib"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ImportError(f"the benchmark must not import {name}")

for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def tiny_yaml(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: {kind: transformer, vocabulary_size: 64, width: 32, heads: 4, feed_forward: 64,\n"
        "  transformer: {layers: 2},\n"
        "  recurrent: {prelude_layers: 1, core_layers: 1, coda_layers: 1}}\n"
        "data: {sequence_length: 8}\ntraining: {micro_batch_rows: 3, micro_batches: 2}\n"
        "depth: {mean: 3, maximum: 4, backprop: 2}\nloss: {chunk_tokens: 8}\n"
        "optim: {name: adafactor, clip: rms}\n"
    )
    return path


@pytest.fixture
def gpu():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(gpu, monkeypatch):
    """Run the script in this process, without the variable that --cap sets afterwards."""
    monkeypatch.setenv(gpu.FRACTION, "")

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
        return gpu.main()

    return call


@pytest.mark.parametrize(
    ("before", "words", "parts"),
    [
        (["-c", BLOCKED], [], {"forward", "backward", "optimizer"}),
        long(
            [],
            ["model.kind=recurrent", "training.update=in_backward"],
            {"forward", "backward_and_optimizer"},
        ),
    ],
)
def test_figures_fit_together(tiny_yaml, tmp_path, before, words, parts):
    path = tmp_path / "result.json"
    options = ("--config", tiny_yaml, "--updates", "3", "--json", path)
    done = subprocess.run(
        [sys.executable, *before, SCRIPT, *options, *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["overrides"] == words
    assert result["measuring"] is None
    assert result["left_out"] == []
    assert (result["device"], result["platform"], result["jax"]) == ("cpu", "cpu", jax.__version__)
    assert result["environment"]["JAX_PLATFORMS"] == "cpu"
    assert "tokens a second" in done.stdout

    assert len(result["seconds"]) == 3
    assert sorted(result["seconds"])[1] == result["seconds_median"]
    assert result["seconds_min"] <= result["seconds_median"] <= result["seconds_max"]
    assert result["tokens"] == 2 * 3 * 8
    rate = result["tokens_per_second"]
    assert rate * result["seconds_median"] == pytest.approx(result["tokens"])
    assert 3 < result["loss"] < 6  # of 64 tokens: 4.16 at the start

    assert result["training_flops_per_second"] == pytest.approx(rate * result["flops_per_token"])
    assert result["executed_flops_per_second"] / result["training_flops_per_second"] == (
        pytest.approx(result["executed_flops_per_token"] / result["flops_per_token"])
    )
    assert result["peak_flops"] is result["mfu"] is result["hardware_utilisation"] is None
    assert min(result["product_flops_per_second"].values()) > 0

    # Weights and their update at least; nothing waits on the host.
    assert result["planned_bytes"] > 4 * result["parameters"] > 4 * 2 * 32 * (4 * 32 + 3 * 64)
    assert result["planned_host_bytes"] == 0
    assert result["peak_bytes"] is None  # a CPU keeps no statistics

    assert set(result["shares"]) == parts
    assert sum(result["shares"].values()) == pytest.approx(1)
    forward = result["shares"]["forward"] * result["seconds_median"]
    assert forward == pytest.approx(result["forward_seconds"])
    depths = (3, 2) if "model.kind=recurrent" in words else (0, 0)
    assert (result["depth"], result["backprop_depth"]) == depths


def test_utilisation_is_of_the_peak(gpu):
    flops = FlopsPerToken(forward=2e9, backward=4e9, recomputed=1e9)
    speeds = gpu.speeds(seconds=2.0, tokens=1000, flops=flops, peak=7e12)
    assert speeds["tokens_per_second"] == 500
    assert speeds["mfu"] == pytest.approx(500 * 6e9 / 7e12)
    assert speeds["hardware_utilisation"] == pytest.approx(500 * 7e9 / 7e12)


def test_shares_are_differences(gpu):
    assert gpu.shares(10, 2, 7) == {"forward": 0.2, "backward": 0.5, "optimizer": 0.3}
    assert gpu.shares(10, 2, None) == {"forward": 0.2, "backward_and_optimizer": 0.8}


def test_a_window_is_as_the_pipeline_gives_it(gpu, tiny_yaml):
    config = load([tiny_yaml], ["model.vocabulary_size=100000"])
    window = gpu.random_window(config)
    tokens = np.arange(48, dtype=np.uint32)
    rows = PackedRows(TokenStream([tokens], [np.array([48])]), sequence_length=8)
    read = rows.read(np.array([0, 1, 2, 3, 4, -1]))
    expected = {name: x.reshape(2, 3, *x.shape[1:]) for name, x in read.items()}
    assert {k: (x.shape, x.dtype) for k, x in window.items()} == {
        k: (x.shape, x.dtype) for k, x in expected.items()
    }
    for name in ("segment_ids", "positions", "block"):  # the first row is full
        np.testing.assert_array_equal(window[name][0, 0], expected[name][0, 0])
    assert 50_000 < window["tokens"].max() < 100_000


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("cap", "mebibytes", "expected"),
    [
        ("24GB", [24_576], 0.9313),  # an RTX 3090
        ("24GB", [143_771], 0.1591),  # an H200: 23.985 GB
        ("16GiB", [24_576, 32_768], 0.5),  # the larger one decides
        ("24GB", [16_384], 0.95),  # a card that is smaller than the cap
    ],
)
def test_the_cap_as_a_share_of_the_card(gpu, cap, mebibytes, expected):
    cards = [f"{n} MiB, Some card, 1980 MHz, 350.00 W, 570.1" for n in mebibytes]
    size = gpu.bytes_of(cap)
    assert gpu.memory_fraction(size, cards) == expected
    assert expected * max(mebibytes) * 2**20 <= size


def test_the_cap_is_set_and_reported(gpu, run, tiny_yaml, tmp_path, monkeypatch, capsys):
    """With a stand-in for nvidia-smi; and no time for anything but the compilation."""
    card = "143771 MiB, NVIDIA H200, 1980 MHz, 700.00 W, 570.1"
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{card}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "result.json"
    options = ("--cap", "24GB", "--seconds", "0", "--updates", "4", "--json", path)
    assert run("--config", tiny_yaml, "optim.rounding=nearest", *options) == 0
    result = json.loads(path.read_text())
    assert result["nvidia_smi"] == [card]
    assert result["cap_bytes"] == 24 * 10**9
    assert result["environment"][gpu.FRACTION] == "0.1591"
    printed = capsys.readouterr().out
    assert f"{gpu.FRACTION}=0.1591" in printed
    assert card in printed
    assert result["left_out"] == [
        "4 of 4 updates",
        "products of size 128",
        "products of size 256",
        "forward pass by itself",
        "gradients by themselves",
    ]
    assert all(name in printed for name in result["left_out"])
    assert result["planned_bytes"] > 0
    assert result["seconds"] == []
    assert result["shares"] is result["tokens_per_second"] is None


def test_out_of_memory_is_one_line(gpu, run, tiny_yaml, tmp_path, monkeypatch, capsys):
    def compilation(spec, inputs, result):
        result["planned_bytes"], result["planned_host_bytes"] = 23_456_000_000, 0
        raise jax.errors.JaxRuntimeError(message)

    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte"
    monkeypatch.setattr(gpu, "measure_compilation", compilation)
    path = tmp_path / "result.json"
    assert run("--config", tiny_yaml, "loss.chunk_tokens=4", "--json", path) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: out of memory (compilation): {tiny_yaml} loss.chunk_tokens=4, cap none, step "
        "planned at 23.456 GB on the device and 0.000 GB of pinned host memory"
    )
    assert json.loads(path.read_text())["measuring"] == "compilation"
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        run("--config", tiny_yaml)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.vocabulary_size=null",), r"model.vocabulary_size is null: set it"),
        (("--cap", "lots"), r"--cap lots: expected a size such as 24GB or 22GiB"),
        (("--cap", "0GB"), r"--cap 0GB: expected a size"),
        (("--cap", "24GB"), r"--cap: nvidia-smi does not say how much memory the card has; set"),
        (("--updates", "0"), r"--updates 0: at least 1"),
    ],
)
def test_mistakes_are_one_line(gpu, run, tiny_yaml, monkeypatch, words, message):
    monkeypatch.setattr(gpu, "nvidia_smi", list)
    with pytest.raises(UserError, match=message) as error:
        run("--config", tiny_yaml, *words)
    assert "\n" not in str(error.value)
