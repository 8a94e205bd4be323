"""What PyTorch's optimizers make of the same weights and gradients: the figures the tests compare.

    pip install torch==2.13.0
    python tests/references/torch_optimizers.py tests/testdata/torch_optimizers.npz

PyTorch is not needed to run the tests: its results are kept in the file, and this program makes
them again. Gradients do not depend on the weights, so that 20 updates compare the optimizers alone.
"""

import sys

import numpy as np

STEPS = 20
# Names that end in "kernel" decay in jaxlm's own runs too.
SHAPES = {"matrix_kernel": (6, 5), "tall_kernel": (40, 33), "vector_kernel": (7,)}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ADAFACTOR = {"lr": 1e-2, "weight_decay": 0.1}
MAX_NORM = 1.0


def weights() -> dict[str, np.ndarray]:
    """Float64 weights, of different scale in each leaf."""
    rng = np.random.default_rng(0)
    scales = {"matrix_kernel": 1.0, "tall_kernel": 0.02, "vector_kernel": 3.0}
    return {name: scales[name] * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """Float64 gradients of one update; their norm is on both sides of `MAX_NORM`."""
    rng = np.random.default_rng(1000 + step)
    scale = 10.0 ** (step % 3 - 3)
    return {name: scale * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def main(path: str) -> None:
    """Train with each optimizer in float32 and float64, and keep the weights."""
    import torch

    makers = {
        "adamw": lambda params: torch.optim.AdamW(params, **ADAMW),
        "adamw_clipped": lambda params: torch.optim.AdamW(params, **ADAMW),
        "adafactor": lambda params: torch.optim.Adafactor(params, **ADAFACTOR),
    }
    results = {}
    for dtype in (torch.float32, torch.float64):
        for name, make in makers.items():
            params = {k: torch.tensor(v).to(dtype).requires_grad_() for k, v in weights().items()}
            optimizer = make(params.values())
            for step in range(STEPS):
                for key, g in gradients(step).items():
                    params[key].grad = torch.tensor(g).to(dtype)
                if name == "adamw_clipped":
                    # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; here without the 1e-6.
                    norm = torch.nn.utils.get_total_norm([p.grad for p in params.values()])
                    for p in params.values():
                        p.grad.mul_(torch.clamp(MAX_NORM / norm, max=1.0))
                optimizer.step()
            for key, p in params.items():
                results[f"{name}/{str(dtype).split('.')[1]}/{key}"] = p.detach().numpy()
    np.savez(path, **results)
    print(f"PyTorch {torch.__version__}: {len(results)} arrays written to {path}")


if __name__ == "__main__":
    main(sys.argv[1])
