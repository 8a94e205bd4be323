"""Muon for the matrices that are named, Adam for the rest."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxlm.optim.rules import path_name


def muon(
    learning_rate: optax.ScalarOrSchedule,
    matrices: optax.Params | Callable[[optax.Params], optax.Params],
    *,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: optax.MaskOrFn = None,
    momentum_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon` with explicit labels, for stacked layers, at AdamW's rates and decay.

    Where it differs from calling `optax.contrib.muon` directly:
      1. Parameters are told by label, not by their number of axes: a stack of layers [L, m, n] is
         L matrices, and an embedding or output head is none.
      2. Updates have a root mean square of 0.2 (Liu et al.), so that one learning rate serves
         matrices and the rest, and one that suits AdamW suits Muon.
      3. Decay is the same for both groups, under one mask: `optax.contrib.muon` has no mask for its
         Adam group, so that decay there would pull norm scales to zero.

    Both groups use Nesterov's form of momentum, as in optax.

    Args:
        learning_rate: rate or schedule.
        matrices: which parameters are orthogonalised, a tree of bools or a function of the
            parameters that gives one; the last two axes are the matrix, those before are layers.
        beta: decay rate of Muon's momentum.
        b1: decay rate of Adam's first moment.
        b2: decay rate of Adam's second moment.
        eps: added to denominators.
        weight_decay: decoupled, multiplied by the learning rate.
        mask: which parameters decay, a tree of bools or a function of the parameters; None is all.
        momentum_dtype: storage type of first moments; None is the parameters'.

    Returns:
        A transform; `params` must be given to `update`.

    Raises:
        ValueError: a parameter called a matrix has fewer than two axes, by name (at `init`).

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import match_rules, muon
        >>> rules = [("embedding", False), ("kernel", True), ("scale", False)]
        >>> tx = muon(1e-2, lambda params: match_rules(params, rules))
        >>> params = {"kernel": jnp.ones((2, 8, 4)), "embedding": jnp.ones((16, 8))}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["kernel"].shape
        (2, 8, 4)

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
        Liu et al., "Muon is Scalable for LLM Training", 2025.
    """

    def dimensions(params: optax.Params) -> optax.Params:
        labels = matrices(params) if callable(matrices) else matrices

        def leaf(path: tuple, p: jax.Array, label: bool):
            if label and p.ndim < 2:
                raise ValueError(f"{path_name(path)} of shape {p.shape} is not a matrix")
            return optax.contrib.MuonDimensionNumbers(-2, -1) if label else None

        return jax.tree_util.tree_map_with_path(leaf, params, labels)

    return optax.chain(
        optax.contrib.muon(
            -1.0,  # a direction: decay and rate follow for both groups alike
            beta=beta,
            eps=eps,
            adam_b1=b1,
            adam_b2=b2,
            consistent_rms=0.2,
            mu_dtype=jnp.dtype(momentum_dtype) if momentum_dtype is not None else None,
            muon_weight_dimension_numbers=dimensions,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
