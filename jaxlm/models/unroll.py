"""The core's steps with gradient, forwards and backwards by hand.

Left to automatic differentiation, a loop over core steps keeps a copy of the core's weights for
each step that may be skipped, and sums their gradient over steps in the weights' dtype. Here a step
keeps the inputs of its layers and nothing else; the backward pass takes one layer of one step at a
time, computes it once more, and adds to one float32 gradient of the core. Only the steps that are
asked for are run, both ways.

Shape legend: M micro-batches, B rows of a micro-batch, T positions, D width, L core layers.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.layers import FIRST_STEP, attention_mask, fold_in, rotary_angles

# Parameters of the core as nested dicts.
CoreParams = dict[str, Any]


class Rows(NamedTuple):
    """What layers need to know of the rows of micro-batches; each leaf [M, B, ...]."""

    # int32 [M, B, T]: 0 for padding; positions see only their own segment.
    segment_ids: Array
    # int32 [M, B, T]: position within the document.
    positions: Array
    # One typed random key per row, [M, B], for dropout; None without.
    keys: Array | None


def keep(x: Any, on_host: bool) -> Any:
    """Move what the backward pass needs to where it is kept: pinned host memory, or as it is."""
    return jax.device_put(x, jax.memory.Space.Host) if on_host else x


def fetch(x: Any, on_host: bool) -> Any:
    """Bring it back."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host else x


def sums_like(params: Any) -> Any:
    """Zeros in float32 (or wider) for the gradients of parameters."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def add_to(sums: Any, grads: Any) -> Any:
    """Sums plus gradients, in the dtype of the sums."""
    return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)


def apply_layer(
    block: nnx.GraphDef,
    config: ModelConfig,
    params: Any,
    x_BTD: Array,
    rows: Rows,
    purpose: int | Array,
    number: int | Array,
) -> Array:
    """One layer on one micro-batch: `rows` without M, `number` counts through the whole model."""
    mask = attention_mask(rows.segment_ids)
    angles = rotary_angles(rows.positions, config.head_size, config.rope_base)
    keys_B = None if rows.keys is None else fold_in(fold_in(rows.keys, purpose), number)
    return nnx.merge(block, params)(x_BTD, mask, angles, keys_B)


@dataclass(frozen=True)
class CoreSteps:
    """Static description of the gradient steps of a core."""

    config: ModelConfig
    # Graphs of the injection, of one layer, and of the state's norm (None with sandwich norms).
    injection: nnx.GraphDef
    block: nnx.GraphDef
    norm: nnx.GraphDef | None
    # Number that the core's first layer has in the whole model.
    first_layer: int
    # Static bound of the number of gradient steps.
    max_steps: int
    # Keep the inputs of layers in pinned host memory.
    on_host: bool = False

    def _inject(self, params: Any, s_BTD: Array, e_BTD: Array) -> Array:
        return nnx.merge(self.injection, params)(s_BTD, e_BTD)

    def _normalise(self, params: Any, x_BTD: Array) -> Array:
        return x_BTD if self.norm is None else nnx.merge(self.norm, params)(x_BTD)

    def _layer(self, params: Any, x_BTD: Array, rows: Rows, step: Array, number: Array) -> Array:
        purpose, number = FIRST_STEP + step, self.first_layer + number
        return apply_layer(self.block, self.config, params, x_BTD, rows, purpose, number)

    def forward(
        self, params: CoreParams, s_M: Array, e_M: Array, rows: Rows, first: Array, steps: Array
    ) -> tuple[Array, Any]:
        """Take `steps` core steps, the first of which has the number `first` in the whole loop.

        Args:
            params: of the core.
            s_M: state, [M, B, T, D].
            e_M: the prelude's output, [M, B, T, D].
            rows: of all micro-batches.
            first: traced int32.
            steps: traced int32, at most `max_steps`.

        Returns:
            The state after the steps, and what :meth:`backward` needs of them.
        """
        blocks = params["stack"]["blocks"]
        layers = jnp.arange(jax.tree.leaves(blocks)[0].shape[0])

        def real(s_M: Array, j: Array) -> tuple[Array, Any]:
            injection = params.get("injection", {})
            x_M = jax.lax.map(lambda a: self._inject(injection, *a), (s_M, e_M))

            @jax.named_scope("layer")
            def layer(x_M: Array, scanned: Any) -> tuple[Array, Array]:
                block, number = scanned
                y_M = jax.lax.map(
                    lambda a: self._layer(block, a[0], a[1], first + j, number), (x_M, rows)
                )
                return y_M, x_M

            x_M, inputs_LM = jax.lax.scan(layer, x_M, (blocks, layers))
            norm = params.get("state_norm", {})
            after_M = jax.lax.map(lambda x: self._normalise(norm, x), x_M)
            return after_M, (inputs_LM, x_M)

        @jax.named_scope("gradient_step")
        def step(s_M: Array, j: Array) -> tuple[Array, Any]:
            nothing = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(real, s_M, j)[1]
            )
            s_M, kept = jax.lax.cond(j < steps, real, lambda s_M, j: (s_M, nothing), s_M, j)
            return s_M, keep(kept, self.on_host)

        end_M, (inputs, outputs) = jax.lax.scan(step, s_M, jnp.arange(self.max_steps))
        return end_M, (keep(s_M, self.on_host), inputs, outputs)

    def backward(
        self,
        params: CoreParams,
        saved: Any,
        ds_M: Array,
        e_M: Array,
        rows: Rows,
        first: Array,
        steps: Array,
    ) -> tuple[Array, Array, CoreParams]:
        """Gradients of the state before the steps, of `e_M`, and of the parameters (float32)."""
        blocks = params["stack"]["blocks"]
        injection, norm = params.get("injection", {}), params.get("state_norm", {})
        layers = jnp.arange(jax.tree.leaves(blocks)[0].shape[0])

        @jax.named_scope("gradient_step")
        def back(i: Array, carry: Any) -> Any:
            ds_M, de_M, block_grads, injection_grads, norm_grads = carry
            j = steps - 1 - i
            start_M, inputs, outputs = saved

            def output(j: Array) -> Array:
                one_M = jax.lax.dynamic_index_in_dim(outputs, j, keepdims=False)
                return fetch(one_M, self.on_host)

            # The state before a step is the normalised output of the step before.
            y_M = output(j)
            before_M = jax.lax.map(
                lambda x: self._normalise(norm, x), output(jnp.maximum(j - 1, 0))
            )
            s_M = jnp.where(j == 0, fetch(start_M, self.on_host), before_M)

            def back_norm(grads: Any, scanned: Any) -> tuple[Any, Array]:
                y_BTD, ds_BTD = scanned
                own, dx_BTD = jax.vjp(self._normalise, norm, y_BTD)[1](ds_BTD)
                return add_to(grads, own), dx_BTD

            norm_grads, dx_M = jax.lax.scan(back_norm, norm_grads, (y_M, ds_M))

            @jax.named_scope("layer")
            def back_layer(carry: Any, scanned: Any) -> tuple[Any, None]:
                dx_M, block_grads = carry
                number, block = scanned
                # One layer's inputs of one step, straight out of where all of them are kept.
                start = (j, number.astype(j.dtype), *[jnp.zeros((), j.dtype)] * (inputs.ndim - 2))
                sizes = (1, 1, *inputs.shape[2:])
                x_M = fetch(jax.lax.dynamic_slice(inputs, start, sizes), self.on_host)[0, 0]

                def micro_batch(grads: Any, scanned: Any) -> tuple[Any, Array]:
                    x_BTD, dx_BTD, rows_B = scanned

                    def of(block: Any, x_BTD: Array) -> Array:
                        return self._layer(block, x_BTD, rows_B, first + j, number)

                    own, dx_BTD = jax.vjp(of, block, x_BTD)[1](dx_BTD)
                    return add_to(grads, own), dx_BTD

                one = jax.tree.map(
                    lambda g: jax.lax.dynamic_index_in_dim(g, number, keepdims=False), block_grads
                )
                one, dx_M = jax.lax.scan(micro_batch, one, (x_M, dx_M, rows))
                block_grads = jax.tree.map(
                    lambda grads, g: jax.lax.dynamic_update_index_in_dim(grads, g, number, 0),
                    block_grads,
                    one,
                )
                return (dx_M, block_grads), None

            (dx_M, block_grads), _ = jax.lax.scan(
                back_layer, (dx_M, block_grads), (layers, blocks), reverse=True
            )

            def back_injection(grads: Any, scanned: Any) -> tuple[Any, Any]:
                s_BTD, e_BTD, dx_BTD = scanned
                _, pull = jax.vjp(self._inject, injection, s_BTD, e_BTD)
                own, ds_BTD, de_BTD = pull(dx_BTD)
                return add_to(grads, own), (ds_BTD, de_BTD)

            injection_grads, (ds_M, more_M) = jax.lax.scan(
                back_injection, injection_grads, (s_M, e_M, dx_M)
            )
            return ds_M, de_M + more_M, block_grads, injection_grads, norm_grads

        start = (ds_M, jnp.zeros_like(e_M), *map(sums_like, (blocks, injection, norm)))
        ds_M, de_M, block_grads, injection_grads, norm_grads = jax.lax.fori_loop(
            0, steps, back, start
        )
        grads: CoreParams = {"stack": {"blocks": block_grads}}
        if "injection" in params:
            grads["injection"] = injection_grads
        if "state_norm" in params:
            grads["state_norm"] = norm_grads
        return ds_M, de_M, grads


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def unroll(
    core: CoreSteps,
    params: CoreParams,
    s_BTD: Array,
    e_BTD: Array,
    rows: Rows,
    first: Array,
    steps: Array,
) -> Array:
    """The state after `steps` gradient steps of one micro-batch (M = 1), differentiable.

    Gradient flows to `params`, `s_BTD` and `e_BTD`; the other arguments are as for
    :meth:`CoreSteps.forward`.
    """
    return core.forward(params, s_BTD[None], e_BTD[None], rows, first, steps)[0][0]


def _unroll_forward(core, params, s_BTD, e_BTD, rows, first, steps):
    s_M, saved = core.forward(params, s_BTD[None], e_BTD[None], rows, first, steps)
    return s_M[0], (params, saved, e_BTD, rows, first, steps)


def _unroll_backward(core, residuals, ds_BTD):
    params, saved, e_BTD, rows, first, steps = residuals
    ds_M, de_M, grads = core.backward(params, saved, ds_BTD[None], e_BTD[None], rows, first, steps)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return grads, ds_M[0], de_M[0], None, None, None


unroll.defvjp(_unroll_forward, _unroll_backward)
