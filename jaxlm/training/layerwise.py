"""One update without a full gradient: the optimizer runs on each layer as its gradient is ready.

All micro-batches of the window go through a layer before any goes through the next, forwards and
backwards. Between the passes only the inputs of layers are kept, on the device or in pinned host
memory. On the way back a layer's gradient is summed over the micro-batches in float32, divided by
the window's target tokens, and given to the optimizer with that layer's slice of the parameters and
of the optimizer's state, which are written back in place. What never exists is the gradient of
more than one layer: an update of 7 billion bf16 weights fits into 24 GB. The recurrent core, whose
layers run many times, keeps one float32 sum for the whole of it through its gradient steps.

The result is that of step.py's update_after_backward, up to the order of sums, with three
exceptions. Clipping by the global norm needs the norm before the first layer changes: `two_pass`
goes backwards twice and is exact, `previous_norm` uses the norm of the update before. A gradient
that turns out not to be finite after the head costs its layer this update, not the whole update.
And the parameters outside of stacks (embedding, head, norms, injection) are updated last, together.

Sources: LOMO (Lv et al. 2023) and AdaLomo (2023) fuse backward pass and update; "vertical
scheduling" (GreedySnake, 2025) runs all micro-batches of a layer before the next.

Shape legend: M micro-batches, B rows of a micro-batch, T positions, D width, L layers of a stack.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx, traverse_util
from jax import Array

from jaxlm.losses import LossSums, cross_entropy_gradients, target_mask
from jaxlm.models.build import Params, apply
from jaxlm.models.layers import attention_mask, dropout, fold_in, rotary_angles
from jaxlm.models.recurrent import EMBEDDING_DROPOUT, FIRST_STEP, LAYERS, RecurrentDepthLM
from jaxlm.optim import global_norm, to_float32
from jaxlm.training.spec import Outcome, StepSpec, Window, row_keys
from jaxlm.training.state import TrainState

# Parameters, gradients and optimizer state by the path of their leaf.
Flat = dict[Any, Array]


def _flatten(tree: Any) -> Flat:
    return cast(Flat, traverse_util.flatten_dict(tree))


def _nested(flat: Flat) -> Params:
    return cast(Params, traverse_util.unflatten_dict(flat))


def _state_leaves(state: optax.OptState) -> Flat:
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(state)}


class LayerOptimizer:
    """Runs an optax transform on some parameters of a model at a time.

    The transform must be leaf-local: what it makes of one leaf, and of one layer of a stack, must
    not depend on the others. The state of a group of parameters has the same paths as in the
    state of all; what no parameter owns (counts, rates) is the same for every group and advances
    once per update.
    """

    def __init__(self, transform: optax.GradientTransformationExtraArgs):
        self.transform = transform
        self.shared = set(_state_leaves(jax.eval_shape(transform.init, {})))

    def owned(self, params: Params) -> list[str]:
        """Paths of the state that belongs to these parameters."""
        state = _state_leaves(jax.eval_shape(self.transform.init, params))
        return [path for path in state if path not in self.shared]

    def update(
        self, params: Params, state: Flat, grads: Params, first_layer: int | Array = 0
    ) -> tuple[Params, Flat]:
        """New parameters and state of a group; `state` holds its own leaves and the shared ones."""
        structure = jax.eval_shape(self.transform.init, params)
        leaves = [state[path] for path in _state_leaves(structure)]
        full = jax.tree.unflatten(jax.tree.structure(structure), leaves)
        updates, full = self.transform.update(grads, full, params, first_layer=first_layer)
        return cast(Params, optax.apply_updates(params, updates)), _state_leaves(full)


def refuse_unless_layer_local(
    transform: optax.GradientTransformation, params: Params, name: str
) -> None:
    """Raise ValueError for a transform that cannot run layer by layer.

    It is tried on small arrays under the paths of `params`: changing the gradient of one leaf, or
    of one layer of a stack, must not change what happens to any other.

    Args:
        transform: the optimizer, without the engine's own clipping.
        params: parameters of a model, or their shapes; stacks are below ``blocks``.
        name: what to call the optimizer in the error.
    """
    key = jax.random.key(0)

    def small(path: tuple, p: Any, number: int) -> Array:
        stacked = "blocks" in jax.tree_util.keystr(path)
        shape = (
            (2, *[min(n, 48) for n in p.shape[1:]]) if stacked else [min(n, 48) for n in p.shape]
        )
        return jax.random.normal(jax.random.fold_in(key, number), shape).astype(p.dtype)

    def tree(number: int) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, p: small(path, p, number), params)

    weights, grads = tree(0), tree(1)
    transform = optax.with_extra_args_support(transform)
    state = transform.init(weights)
    for path, leaf in _state_leaves(state).items():
        if "blocks" in path and (leaf.ndim == 0 or leaf.shape[0] != 2):
            raise ValueError(
                f"{name} keeps state of shape {leaf.shape} for a stack of 2 layers ({path}): it "
                "cannot be cut into layers, which training.update: in_backward needs"
            )
    update = jax.jit(transform.update)
    before = _flatten(update(grads, state, weights)[0])
    flat = _flatten(grads)
    for changed in flat:
        # Of a stack only the first layer's gradient changes, a thousandfold.
        factor = jnp.ones(flat[changed].shape, flat[changed].dtype)
        layered = "blocks" in changed
        factor = factor.at[0].set(1000) if layered else factor * 1000
        other = _nested({**flat, changed: flat[changed] * factor})
        after = _flatten(update(other, state, weights)[0])
        for path in flat:
            one, two = before[path], after[path]
            if path == changed:
                one, two = (one[1:], two[1:]) if layered else (one, one)
            if not bool(jnp.array_equal(one, two)):
                raise ValueError(
                    f"{name} lets the update of {'/'.join(path)} depend on the gradient of "
                    f"{'/'.join(changed)}: training.update: in_backward, where these do not exist "
                    "together, cannot run it"
                )


class _Rows(NamedTuple):
    """Micro-batches, each leaf [M, B, ...]."""

    tokens: Array
    targets: Array
    mask: Array
    segment_ids: Array
    positions: Array
    keys: Array


class _Total(NamedTuple):
    """What the backward pass carries from layer to layer beside the activations."""

    # Sum of squares of all gradients so far, and of all changes to weights; float32.
    grad_square: Array
    update_square: Array
    # Layers whose gradient was not finite, int32.
    kept_layers: Array


def update_in_backward(
    spec: StepSpec,
    transform: optax.GradientTransformationExtraArgs,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
) -> Outcome:
    """Take one update; arguments as for `train_step`."""
    rows = _rows(spec, state, window)
    # Known before anything is computed, which is what makes the sums exact.
    tokens = jnp.maximum(jnp.sum(rows.mask), 1).astype(jnp.float32)
    passes = _Passes(spec, state.params, rows, depth, backprop)
    x_M, saved = passes.forward()
    sums, dx_M, head_grads = passes.head(x_M)
    total = sums.cross_entropy + spec.loss.z_loss * sums.squared_log_partition
    finite = jnp.isfinite(total) & jnp.isfinite(global_norm(head_grads))
    finite &= jnp.all(jnp.isfinite(dx_M))
    applied = finite & (sums.target_tokens > 0)

    optimizer = LayerOptimizer(transform)
    old = _state_leaves(state.opt_state)
    (norm_path,) = [path for path in old if path.endswith(".norm")]
    scale = jnp.ones((), jnp.float32)
    if spec.optim.clip == "two_pass":
        writer = _Writer(optimizer, state, tokens, scale, applied, write=False)
        norm = jnp.sqrt(passes.backward(saved, dx_M, head_grads, writer).grad_square)
        scale = _clip_scale(norm, spec.optim.max_norm)
    elif spec.optim.clip == "previous_norm":
        scale = _clip_scale(old[norm_path], spec.optim.max_norm)

    writer = _Writer(optimizer, state, tokens, scale, applied, write=True)
    outcome = passes.backward(saved, dx_M, head_grads, writer)
    norm = jnp.sqrt(outcome.grad_square)
    writer.state[norm_path] = jnp.where(applied & jnp.isfinite(norm), norm, old[norm_path])
    opt_state = jax.tree.unflatten(
        jax.tree.structure(state.opt_state), [writer.state[path] for path in old]
    )
    return Outcome(
        params=_nested(writer.params),
        opt_state=opt_state,
        total=total,
        sums=sums,
        grad_norm=jnp.where(finite, norm, jnp.nan),
        update_norm=jnp.sqrt(outcome.update_square),
        finite=finite,
        applied=applied,
        kept_layers=jnp.where(applied, outcome.kept_layers, 0),
    )


def _clip_scale(norm: Array, max_norm: float) -> Array:
    clip = jnp.isfinite(norm) & (norm > max_norm)
    return jnp.where(clip, max_norm / jnp.where(clip, norm, 1.0), 1.0)


def _rows(spec: StepSpec, state: TrainState, window: Window) -> _Rows:
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))
    tokens = window["tokens"].astype(jnp.int32)
    return _Rows(
        tokens=tokens[..., :-1],
        targets=tokens[..., 1:],
        mask=target_mask(window["segment_ids"]),
        segment_ids=window["segment_ids"][..., :-1],
        positions=window["positions"][..., :-1],
        keys=keys.reshape(micro_batches, rows),
    )


class _Writer:
    """Parameters and optimizer state in the course of the backward pass.

    Args:
        optimizer: runs on groups of parameters.
        state: before the update.
        tokens: target tokens of the window.
        scale: factor of all gradients, from clipping.
        applied: whether anything is to change.
        write: static; without, norms are taken and nothing else.
    """

    def __init__(
        self,
        optimizer: LayerOptimizer,
        state: TrainState,
        tokens: Array,
        scale: Array,
        applied: Array,
        write: bool,
    ):
        self.optimizer = optimizer
        self.params = _flatten(state.params)
        self.old_state = _state_leaves(state.opt_state)
        self.state = dict(self.old_state)
        self.tokens, self.scale, self.applied, self.write = tokens, scale, applied, write

    def stack(self, name: tuple[str, ...]) -> tuple[Flat, Flat]:
        """Parameters and own state of the stack at a path, each leaf [L, ...]."""
        params = {path: p for path, p in self.params.items() if path[: len(name)] == name}
        owned = self.optimizer.owned(_nested(params)) if self.write else []
        return params, {path: self.state[path] for path in owned}

    def apply(
        self, total: _Total, params: Flat, owned: Flat, grads: Flat, first_layer: int | Array = 0
    ) -> tuple[_Total, Flat, Flat]:
        """Update some parameters from gradient sums; a gradient that is not finite keeps them."""
        grads = {path: g / self.tokens for path, g in grads.items()}
        square = _square(grads)
        good = jnp.isfinite(square)
        total = total._replace(
            grad_square=total.grad_square + jnp.where(good, square, 0),
            kept_layers=total.kept_layers + jnp.where(good, 0, 1),
        )
        if not self.write:
            return total, params, owned
        nest = _nested
        scaled = nest({path: g * self.scale.astype(g.dtype) for path, g in grads.items()})
        shared = {path: self.old_state[path] for path in self.optimizer.shared}
        new, state = self.optimizer.update(nest(params), {**owned, **shared}, scaled, first_layer)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(self.applied & good & jnp.isfinite(new), new, old)

        changed = jax.tree.map(choose, _flatten(new), params)
        change = jax.tree.map(jnp.subtract, to_float32(changed), to_float32(params))
        total = total._replace(update_square=total.update_square + _square(change))
        return total, changed, {path: choose(state[path], owned[path]) for path in owned}

    def advance(self, params: Flat) -> None:
        """Move counts and rates on, once per update and whatever became of single layers."""
        nested = _nested(params)
        owned = {path: self.old_state[path] for path in self.optimizer.owned(nested)}
        shared = {path: self.old_state[path] for path in self.optimizer.shared}
        zeros = jax.tree.map(jnp.zeros_like, to_float32(nested))
        _, state = self.optimizer.update(nested, {**owned, **shared}, zeros)
        for path in shared:
            self.state[path] = jnp.where(self.applied, state[path], self.old_state[path])


class _Passes:
    """Forward and backward pass of a window through one model."""

    def __init__(self, spec: StepSpec, params: Params, rows: _Rows, depth: Array, backprop: Array):
        self.spec, self.config, self.params, self.rows = spec, spec.model, params, rows
        self.model = apply(spec.model, params)
        self.backprop = jnp.asarray(backprop, jnp.int32)
        self.free_steps = jnp.asarray(depth, jnp.int32) - self.backprop
        self.recurrent = isinstance(self.model, RecurrentDepthLM)
        self.flat = _flatten(params)

    # ------------------------------------------------------------------ pieces of the model

    def _part(self, *name: str) -> dict[str, Any]:
        """Parameters below a path; empty for a part without any."""
        tree: Any = self.params
        for word in name:
            tree = tree.get(word, {})
        return tree

    def _module(self, *name: str) -> Callable[..., Any]:
        """A function of a part's parameters and inputs."""
        module: Any = self.model
        for word in name:
            module = getattr(module, word)
        graph = nnx.split(module)[0]
        return lambda params, *inputs: nnx.merge(graph, params)(*inputs)

    def _layer(self, *name: str) -> Callable[..., Array]:
        """A function of one layer's parameters, input, rows, purpose and number in its stack."""
        stack: Any = self.model
        for word in name:
            stack = getattr(stack, word)
        block, first = self._module(*name, "blocks"), stack.first_layer

        def layer(params: Params, x_BTD: Array, rows: _Rows, purpose: Any, number: Any) -> Array:
            mask = attention_mask(rows.segment_ids)
            angles = rotary_angles(rows.positions, self.config.head_size, self.config.rope_base)
            keys_B = fold_in(fold_in(rows.keys, purpose), first + number)
            return block(params, x_BTD, mask, angles, keys_B)

        return layer

    def _embed(self, params: Params, rows: _Rows) -> Array:
        x_BTD = self._module("embedding")(params, rows.tokens)
        return dropout(x_BTD, self.config.dropout, fold_in(rows.keys, EMBEDDING_DROPOUT))

    # ------------------------------------------------------------------ keeping layers' inputs

    def _keep(self, x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Host) if self._on_host else x

    def _fetch(self, x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Device) if self._on_host else x

    @property
    def _on_host(self) -> bool:
        return self.spec.block_inputs == "host"

    # ------------------------------------------------------------------ forward

    def forward(self) -> tuple[Array, dict[str, Any]]:
        """The last layer's output [M, B, T, D], and what the backward pass needs."""
        saved: dict[str, Any] = {}
        x_M = jax.lax.map(lambda rows: self._embed(self._part("embedding"), rows), self.rows)
        if not self.recurrent:
            x_M, saved["stack"] = self._forward_stack(("stack",), x_M)
            return x_M, saved
        x_M, saved["prelude"] = self._forward_stack(("prelude",), x_M)
        saved["prelude_out"] = x_M
        e_M = x_M
        if self.config.norm == "pre":
            norm = self._module("prelude_norm")
            e_M = jax.lax.map(lambda x: norm(self._part("prelude_norm"), x), x_M)
        saved["e"] = e_M
        s_M, saved["core"] = self._forward_core(e_M)
        x_M, saved["coda"] = self._forward_stack(("coda",), s_M)
        return x_M, saved

    def _forward_stack(self, name: tuple[str, ...], x_M: Array) -> tuple[Array, Array]:
        layer, blocks = self._layer(*name), self._part(*name, "blocks")

        def step(x_M: Array, scanned: Any) -> tuple[Array, Array]:
            params, number = scanned
            y_M = jax.lax.map(lambda a: layer(params, *a, LAYERS, number), (x_M, self.rows))
            return y_M, self._keep(x_M)

        return jax.lax.scan(step, x_M, (blocks, jnp.arange(_length(blocks))))

    def _forward_core(self, e_M: Array) -> tuple[Array, Any]:
        """The state after all steps, and the inputs of the gradient steps' layers."""
        core = self._module("core")
        params = self._part("core")

        def free(scanned: Any) -> Array:
            e_BTD, rows = scanned
            mask = attention_mask(rows.segment_ids)
            angles = rotary_angles(rows.positions, self.config.head_size, self.config.rope_base)
            start_BTD = self.model.initial_state(e_BTD, rows.keys)  # pyright: ignore[reportAttributeAccessIssue]

            def step(i: Array, s_BTD: Array) -> Array:
                keys_B = fold_in(rows.keys, FIRST_STEP + i)
                return core(params, s_BTD, e_BTD, mask, angles, keys_B)

            return jax.lax.fori_loop(0, self.free_steps, step, start_BTD)

        inject, norm = self._module("core", "injection"), self._state_norm()
        layer, blocks = self._layer("core", "stack"), self._part("core", "stack", "blocks")

        def real(s_M: Array, j: Array) -> tuple[Array, Any]:
            injection = self._part("core", "injection")
            x_M = jax.lax.map(lambda a: inject(injection, *a), (s_M, e_M))

            def step(x_M: Array, scanned: Any) -> tuple[Array, Array]:
                params, number = scanned
                purpose = FIRST_STEP + self.free_steps + j
                y_M = jax.lax.map(lambda a: layer(params, *a, purpose, number), (x_M, self.rows))
                return y_M, x_M

            x_M, inputs = jax.lax.scan(step, x_M, (blocks, jnp.arange(_length(blocks))))
            after_M = jax.lax.map(lambda x: norm(self._part("core", "state_norm"), x), x_M)
            return after_M, (s_M, inputs)

        def gradient_step(s_M: Array, j: Array) -> tuple[Array, Any]:
            nothing = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(real, s_M, j)[1]
            )
            s_M, kept = jax.lax.cond(j < self.backprop, real, lambda s_M, j: (s_M, nothing), s_M, j)
            return s_M, self._keep(kept)

        s_M = jax.lax.map(free, (e_M, self.rows))
        return jax.lax.scan(gradient_step, s_M, jnp.arange(self.spec.max_backprop_depth))

    def _state_norm(self) -> Callable[[Params, Array], Array]:
        if self.config.norm == "pre":
            return self._module("core", "state_norm")
        return lambda params, x: x

    # ------------------------------------------------------------------ head

    def head(self, x_M: Array) -> tuple[LossSums, Array, Flat]:
        """Loss sums; gradients of the hidden states [M, B, T, D], and of final norm and head."""
        norm = self._module("final_norm")
        table = self._part("embedding" if self.config.tie_embeddings else "output")["table"]
        scale = self._part("final_norm")
        wide = jnp.promote_types(table.dtype, jnp.float32)

        def micro_batch(carry: Any, scanned: Any) -> tuple[Any, Array]:
            sums, norm_grads, table_grad = carry
            x_BTD, rows = scanned
            hidden_BTD, pull = jax.vjp(norm, scale, x_BTD)
            parts, hidden_grad_ND, table_grad = cross_entropy_gradients(
                hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
                table,
                rows.targets.reshape(-1),
                rows.mask.reshape(-1),
                table_grad,
                chunk_tokens=self.spec.loss.chunk_tokens,
                z_loss=self.spec.loss.z_loss,
            )
            grads, dx_BTD = pull(hidden_grad_ND.reshape(hidden_BTD.shape))
            norm_grads = _add(norm_grads, grads)
            return (jax.tree.map(jnp.add, sums, parts), norm_grads, table_grad), dx_BTD

        zero = jnp.zeros((), jnp.promote_types(x_M.dtype, jnp.float32))
        start = (LossSums(*[zero] * 5), _zeros(scale), jnp.zeros(table.shape, wide))
        (sums, norm_grads, table_grad), dx_M = jax.lax.scan(micro_batch, start, (x_M, self.rows))
        name = "embedding" if self.config.tie_embeddings else "output"
        return (
            sums,
            dx_M,
            {("final_norm", "scale"): norm_grads["scale"], (name, "table"): table_grad},
        )

    # ------------------------------------------------------------------ backward

    def backward(
        self, saved: dict[str, Any], dx_M: Array, head_grads: Flat, writer: _Writer
    ) -> _Total:
        """Go back through all layers; parameters and state are left in the writer."""
        zero = jnp.zeros((), jnp.float32)
        total = _Total(zero, zero, jnp.zeros((), jnp.int32))
        rest = dict(head_grads)
        if self.recurrent:
            total, dx_M = self._backward_stack(("coda",), saved["coda"], dx_M, total, writer)
            total, de_M = self._backward_core(saved, dx_M, rest, total, writer)
            dx_M = de_M
            if self.config.norm == "pre":
                scale = self._part("prelude_norm")
                norm = self._module("prelude_norm")

                def back(grads: Any, scanned: Any) -> tuple[Any, Array]:
                    x_BTD, de_BTD = scanned
                    own, dx_BTD = jax.vjp(norm, scale, x_BTD)[1](de_BTD)
                    return _add(grads, own), dx_BTD

                grads, dx_M = jax.lax.scan(back, _zeros(scale), (saved["prelude_out"], de_M))
                rest[("prelude_norm", "scale")] = grads["scale"]
            total, dx_M = self._backward_stack(("prelude",), saved["prelude"], dx_M, total, writer)
        else:
            total, dx_M = self._backward_stack(("stack",), saved["stack"], dx_M, total, writer)
        self._backward_embedding(dx_M, rest)
        params = {path: writer.params[path] for path in rest}
        nested = _nested(params)
        owned = {path: writer.state[path] for path in writer.optimizer.owned(nested)}
        total, params, owned = writer.apply(total, params, owned, rest)
        writer.params |= params
        writer.state |= owned
        if writer.write:
            writer.advance({("final_norm", "scale"): self.flat[("final_norm", "scale")]})
        return total

    def _backward_embedding(self, dx_M: Array, rest: Flat) -> None:
        """Add the gradient of looking tokens up to that of the table."""
        path = ("embedding", "table")
        table = self.flat[path]

        def back(grad: Array, scanned: Any) -> tuple[Array, None]:
            rows, dx_BTD = scanned
            _, pull = jax.vjp(lambda table: self._embed({"table": table}, rows), table)
            return grad + pull(dx_BTD)[0].astype(grad.dtype), None

        start = rest.get(path)
        if start is None:
            start = jnp.zeros(table.shape, jnp.promote_types(table.dtype, jnp.float32))
        rest[path] = jax.lax.scan(back, start, (self.rows, dx_M))[0]

    def _backward_stack(
        self, name: tuple[str, ...], inputs_LM: Array, dx_M: Array, total: _Total, writer: _Writer
    ) -> tuple[_Total, Array]:
        layer, prefix = self._layer(*name), (*name, "blocks")
        params, owned = writer.stack(prefix)

        def back(carry: Any, scanned: Any) -> tuple[Any, None]:
            dx_M, total, params, owned = carry
            number, x_M = scanned
            one = _slice(params, number)
            block = _nest(one, prefix)

            def micro_batch(grads: Any, scanned: Any) -> tuple[Any, Array]:
                x_BTD, dx_BTD, rows = scanned
                _, pull = jax.vjp(lambda p, x: layer(p, x, rows, LAYERS, number), block, x_BTD)
                own, dx_BTD = pull(dx_BTD)
                return _add(grads, own), dx_BTD

            grads, dx_M = jax.lax.scan(
                micro_batch, _zeros(block), (self._fetch(x_M), dx_M, self.rows)
            )
            grads = {path: g[None] for path, g in _unnest(grads, prefix).items()}
            total, new, state = writer.apply(
                total, one, _slice(owned, number), grads, first_layer=number
            )
            return (dx_M, total, _put(params, new, number), _put(owned, state, number)), None

        layers = jnp.arange(inputs_LM.shape[0])
        (dx_M, total, params, owned), _ = jax.lax.scan(
            back, (dx_M, total, params, owned), (layers, inputs_LM), reverse=True
        )
        writer.params |= params
        writer.state |= owned
        return total, dx_M

    def _backward_core(
        self, saved: dict[str, Any], ds_M: Array, rest: Flat, total: _Total, writer: _Writer
    ) -> tuple[_Total, Array]:
        """Gradients of all gradient steps, then the update of the core's layers."""
        prefix = ("core", "stack", "blocks")
        inject, norm = self._module("core", "injection"), self._state_norm()
        layer, blocks = self._layer("core", "stack"), self._part(*prefix)
        injection, norm_scale = self._part("core", "injection"), self._part("core", "state_norm")
        e_M, last = saved["e"], _length(blocks) - 1

        def back(i: Array, carry: Any) -> Any:
            ds_M, de_M, block_grads, injection_grads, norm_grads = carry
            j = self.backprop - 1 - i
            s_M, inputs_LM = self._fetch(
                jax.tree.map(
                    lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), saved["core"]
                )
            )
            purpose = FIRST_STEP + self.free_steps + j

            def back_layer(carry: Any, scanned: Any) -> tuple[Any, None]:
                dx_M, block_grads, norm_grads = carry
                number, params, x_M = scanned

                def apply_layer(params, norm_scale, x_BTD, rows):
                    y_BTD = layer(params, x_BTD, rows, purpose, number)
                    return jnp.where(number == last, norm(norm_scale, y_BTD), y_BTD)

                def micro_batch(grads: Any, scanned: Any) -> tuple[Any, Array]:
                    x_BTD, dx_BTD, rows = scanned

                    def of(params: Params, norm_scale: Params, x_BTD: Array) -> Array:
                        return apply_layer(params, norm_scale, x_BTD, rows)

                    _, pull = jax.vjp(of, params, norm_scale, x_BTD)
                    *own, dx_BTD = pull(dx_BTD)
                    return _add(grads, tuple(own)), dx_BTD

                start = (_index(block_grads, number), norm_grads)
                (grads, norm_grads), dx_M = jax.lax.scan(micro_batch, start, (x_M, dx_M, self.rows))
                grads = jax.tree.map(lambda g: g[None], grads)
                return (dx_M, _put(block_grads, grads, number), norm_grads), None

            (dx_M, block_grads, norm_grads), _ = jax.lax.scan(
                back_layer,
                (ds_M, block_grads, norm_grads),
                (jnp.arange(last + 1), blocks, inputs_LM),
                reverse=True,
            )

            def back_injection(grads: Any, scanned: Any) -> tuple[Any, Any]:
                s_BTD, e_BTD, dx_BTD = scanned
                own, ds_BTD, de_BTD = jax.vjp(inject, injection, s_BTD, e_BTD)[1](dx_BTD)
                return _add(grads, own), (ds_BTD, de_BTD)

            injection_grads, (ds_M, more_M) = jax.lax.scan(
                back_injection, injection_grads, (s_M, e_M, dx_M)
            )
            return ds_M, de_M + more_M, block_grads, injection_grads, norm_grads

        start = (
            ds_M,
            jnp.zeros_like(e_M),
            _zeros(blocks),
            _zeros(injection),
            _zeros(norm_scale),
        )
        ds_M, de_M, block_grads, injection_grads, norm_grads = jax.lax.fori_loop(
            0, self.backprop, back, start
        )
        if self.config.recurrent.initial_state == "prelude":
            # Without free steps, gradient also reaches the start.
            de_M += jnp.where(self.free_steps > 0, jnp.zeros_like(ds_M), ds_M)
        rest |= _unnest(injection_grads, ("core", "injection"))
        rest |= _unnest(norm_grads, ("core", "state_norm"))

        params, owned = writer.stack(prefix)
        grads_L = _unnest(block_grads, prefix)

        def update(carry: Any, number: Array) -> tuple[Any, None]:
            total, params, owned = carry
            total, new, state = writer.apply(
                total,
                _slice(params, number),
                _slice(owned, number),
                _slice(grads_L, number),
                first_layer=number,
            )
            return (total, _put(params, new, number), _put(owned, state, number)), None

        (total, params, owned), _ = jax.lax.scan(
            update, (total, params, owned), jnp.arange(last + 1)
        )
        writer.params |= params
        writer.state |= owned
        return total, de_M


def _square(tree: Any) -> Array:
    return jnp.square(global_norm(tree)).astype(jnp.float32)


def _length(blocks: Params) -> int:
    return jax.tree.leaves(blocks)[0].shape[0]


def _zeros(params: Any) -> Any:
    """Float32 (or wider) sums for the gradients of parameters."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def _add(sums: Any, grads: Any) -> Any:
    return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)


def _index(stacked: Any, number: Array) -> Any:
    """One layer of each leaf, without its axis."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stacked)


def _slice(stacked: Any, number: Array) -> Any:
    """One layer of each leaf, [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), stacked)


def _put(stacked: Any, one: Any, number: Array) -> Any:
    """Write one layer [1, ...] of each leaf back in place."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=number, axis=0)
    return jax.tree.map(put, stacked, one)


def _nest(one: Flat, prefix: tuple[str, ...]) -> Params:
    """A layer's parameters as its block has them: nested, without prefix and layer axis."""
    return _nested({path[len(prefix) :]: p[0] for path, p in one.items()})


def _unnest(grads: Params, prefix: tuple[str, ...]) -> Flat:
    """Gradients by full path."""
    return {(*prefix, *path): g for path, g in _flatten(grads).items()}
