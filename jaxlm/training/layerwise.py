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

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx, traverse_util
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike

from jaxlm.losses import (
    LossSums,
    TeacherRecords,
    cross_entropy_gradients,
    target_mask,
    zero_sums,
)
from jaxlm.models.build import Params, apply
from jaxlm.models.layers import (
    EMBEDDING_DROPOUT,
    FIRST_STEP,
    LAYERS,
    attention_mask,
    dropout,
    fold_in,
    rotary_angles,
)
from jaxlm.models.recurrent import RecurrentDepthLM
from jaxlm.models.unroll import Rows, add_to, apply_layer, fetch, keep, sums_like
from jaxlm.optim import clip_scale, global_norm, to_float32
from jaxlm.training.spec import Outcome, StepSpec, Window, optimised_loss, row_keys, teacher_of
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

    Args:
        transform: the optimizer.
        rate_multiplier: factor of the scheduled learning rate.
    """

    def __init__(
        self,
        transform: optax.GradientTransformationExtraArgs,
        rate_multiplier: ArrayLike = 1.0,
    ):
        self.transform, self.rate_multiplier = transform, rate_multiplier
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
        updates, full = self.transform.update(
            grads, full, params, first_layer=first_layer, rate_multiplier=self.rate_multiplier
        )
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


class _Window(NamedTuple):
    """Micro-batches, each leaf [M, B, ...]."""

    tokens: Array
    targets: Array
    mask: Array
    rows: Rows
    teacher: TeacherRecords | None


class _Total(NamedTuple):
    """What the backward pass carries from layer to layer beside the activations."""

    # Sum of squares of all gradients so far, of all changes to weights, and of those to the
    # recurrent core's weights; float32 or wider.
    grad_square: Array
    update_square: Array
    core_update_square: Array
    # Layers whose gradient was not finite, int32.
    kept_layers: Array


def update_in_backward(
    spec: StepSpec,
    transform: optax.GradientTransformationExtraArgs,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
    rate_multiplier: ArrayLike,
) -> Outcome:
    """Take one update; arguments as for `train_step`."""
    micro_batches = _micro_batches(spec, state, window)
    # Known before anything is computed, which is what makes the sums exact.
    tokens = jnp.maximum(jnp.sum(micro_batches.mask), 1).astype(jnp.float32)
    passes = _Passes(spec, state.params, micro_batches, depth, backprop)
    x_M, saved = passes.forward()
    sums, dx_M, head_grads = passes.head(x_M)
    total = optimised_loss(spec, sums)
    finite = jnp.isfinite(total) & jnp.isfinite(global_norm(head_grads))
    finite &= jnp.all(jnp.isfinite(dx_M))
    applied = finite & (sums.target_tokens > 0)

    optimizer = LayerOptimizer(transform, rate_multiplier)
    old = _state_leaves(state.opt_state)
    (norm_path,) = [path for path in old if path.endswith(".norm")]
    scale = jnp.ones(())
    if spec.optim.clip == "two_pass":
        writer = _Writer(optimizer, state, tokens, scale, applied, write=False)
        norm = jnp.sqrt(passes.backward(saved, dx_M, head_grads, writer).grad_square)
        scale = clip_scale(norm, spec.optim.max_norm)
        # The same values; of the ones before, which the loops wrote back to, this was the last use.
        state = replace(state, params=_nested(writer.params))
    elif spec.optim.clip == "previous_norm":
        scale = clip_scale(old[norm_path], spec.optim.max_norm)

    writer = _Writer(optimizer, state, tokens, scale, applied, write=True)
    outcome = passes.backward(saved, dx_M, head_grads, writer)
    norm = jnp.sqrt(outcome.grad_square)
    writer.state[norm_path] = jnp.where(
        applied & jnp.isfinite(norm), norm.astype(jnp.float32), old[norm_path]
    )
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
        core_update_norm=jnp.sqrt(outcome.core_update_square),
        finite=finite,
        applied=applied,
        kept_layers=jnp.where(applied, outcome.kept_layers, 0),
    )


def _micro_batches(spec: StepSpec, state: TrainState, window: Window) -> _Window:
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))
    tokens = window["tokens"].astype(jnp.int32)
    return _Window(
        tokens=tokens[..., :-1],
        targets=tokens[..., 1:],
        mask=target_mask(window["segment_ids"]),
        rows=Rows(
            segment_ids=window["segment_ids"][..., :-1],
            positions=window["positions"][..., :-1],
            keys=keys.reshape(micro_batches, rows),
        ),
        teacher=teacher_of(window),
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

    def below(self, prefix: tuple[str, ...]) -> Flat:
        """Parameters below a path."""
        return {path: p for path, p in self.params.items() if path[: len(prefix)] == prefix}

    def owned(self, params: Flat) -> Flat:
        """The optimizer's state of these parameters; none where nothing is written."""
        if not self.write:
            return {}
        return {path: self.state[path] for path in self.optimizer.owned(_nested(params))}

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
            # Written back as they are, or XLA would turn whole stacks, in copies, for their use in
            # the backward pass; the barrier keeps it from leaving the write out.
            return total, jax.lax.optimization_barrier(params), owned
        scaled = _nested({path: g * self.scale.astype(g.dtype) for path, g in grads.items()})
        shared = {path: self.old_state[path] for path in self.optimizer.shared}
        new, state = self.optimizer.update(
            _nested(params), {**owned, **shared}, scaled, first_layer
        )

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(self.applied & good & jnp.isfinite(new), new, old)

        changed = jax.tree.map(choose, _flatten(new), params)
        change = jax.tree.map(jnp.subtract, to_float32(changed), to_float32(params))
        core = {path: c for path, c in change.items() if path[0] == "core"}
        total = total._replace(
            update_square=total.update_square + _square(change),
            core_update_square=total.core_update_square + _square(core),
        )
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

    def __init__(
        self, spec: StepSpec, params: Params, window: _Window, depth: Array, backprop: Array
    ):
        self.spec, self.config, self.params, self.window = spec, spec.model, params, window
        self.rows = window.rows
        self.model = apply(spec.model, params)
        self.on_host = spec.block_inputs == "host"
        self.steps = jnp.asarray(backprop, jnp.int32)
        self.free_steps = jnp.asarray(depth, jnp.int32) - self.steps
        self.flat = _flatten(params)
        self.core = None
        if isinstance(self.model, RecurrentDepthLM):
            self.core = self.model.gradient_steps(spec.max_backprop_depth, self.on_host)

    # ------------------------------------------------------------------ pieces of the model

    def _module(self, name: str) -> Callable[..., Any]:
        """A function of a part's parameters and inputs."""
        graph = nnx.split(getattr(self.model, name))[0]
        return lambda params, *inputs: nnx.merge(graph, params)(*inputs)

    def _layer(self, name: str) -> Callable[..., Array]:
        """A function of one layer's parameters, its input, its rows, and its number in a stack."""
        stack = getattr(self.model, name)
        block, first = nnx.split(stack.blocks)[0], stack.first_layer
        return lambda params, x_BTD, rows, number: apply_layer(
            block, self.config, params, x_BTD, rows, LAYERS, first + number
        )

    def _embed(self, params: Params, tokens: Array, keys_B: Array) -> Array:
        x_BTD = self._module("embedding")(params, tokens)
        return dropout(x_BTD, self.config.dropout, fold_in(keys_B, EMBEDDING_DROPOUT))

    # ------------------------------------------------------------------ forward

    def forward(self) -> tuple[Array, dict[str, Any]]:
        """The last layer's output [M, B, T, D], and what the backward pass needs."""
        saved: dict[str, Any] = {}
        x_M = jax.lax.map(
            lambda a: self._embed(self.params["embedding"], *a),
            (self.window.tokens, self.rows.keys),
        )
        if self.core is None:
            x_M, saved["stack"] = self._forward_stack("stack", x_M)
            return x_M, saved
        x_M, saved["prelude"] = self._forward_stack("prelude", x_M)
        saved["prelude_out"], e_M = keep(x_M, self.on_host), x_M
        if self.config.norm == "pre":
            norm = self._module("prelude_norm")
            e_M = jax.lax.map(lambda x: norm(self.params["prelude_norm"], x), x_M)
        saved["e"] = e_M
        s_M = self._free_steps(e_M)
        s_M, saved["core"] = self.core.forward(
            self.params["core"], s_M, e_M, self.rows, self.free_steps, self.steps
        )
        x_M, saved["coda"] = self._forward_stack("coda", s_M)
        return x_M, saved

    def _forward_stack(self, name: str, x_M: Array) -> tuple[Array, Array]:
        layer, blocks = self._layer(name), self.params[name]["blocks"]

        def step(x_M: Array, scanned: Any) -> tuple[Array, Array]:
            params, number = scanned
            y_M = jax.lax.map(lambda a: layer(params, *a, number), (x_M, self.rows))
            return y_M, keep(x_M, self.on_host)

        layers = jnp.arange(jax.tree.leaves(blocks)[0].shape[0])
        return jax.lax.scan(step, x_M, (blocks, layers))

    def _free_steps(self, e_M: Array) -> Array:
        """The state after the core steps without gradient."""
        model = self.model
        assert isinstance(model, RecurrentDepthLM)
        graph = nnx.split(model.core)[0]

        def of_micro_batch(scanned: Any) -> Array:
            e_BTD, rows = scanned
            mask = attention_mask(rows.segment_ids)
            angles = rotary_angles(rows.positions, self.config.head_size, self.config.rope_base)

            def step(i: Array, s_BTD: Array) -> Array:
                core, keys_B = nnx.merge(graph, self.params["core"]), rows.keys
                return core(s_BTD, e_BTD, mask, angles, fold_in(keys_B, FIRST_STEP + i))

            start_BTD = model.initial_state(e_BTD, rows.keys)
            return jax.lax.fori_loop(0, self.free_steps, step, start_BTD)

        return jax.lax.map(of_micro_batch, (e_M, self.rows))

    def head(self, x_M: Array) -> tuple[LossSums, Array, Flat]:
        """Loss sums; gradients of the hidden states [M, B, T, D], and of final norm and head."""
        norm, scale = self._module("final_norm"), self.params["final_norm"]
        name = "embedding" if self.config.tie_embeddings else "output"
        table = self.params[name]["table"]

        def micro_batch(carry: Any, scanned: Any) -> tuple[Any, Array]:
            sums, norm_grads, table_grad = carry
            x_BTD, targets, mask, teacher = scanned
            hidden_BTD, pull = jax.vjp(norm, scale, x_BTD)
            parts, hidden_grad_ND, table_grad = cross_entropy_gradients(
                hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
                table,
                targets.reshape(-1),
                mask.reshape(-1),
                table_grad,
                chunk_tokens=self.spec.loss.chunk_tokens,
                weights=self.spec.loss_weights,
                teacher=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), teacher),
                temperature=self.spec.temperature,
            )
            grads, dx_BTD = pull(hidden_grad_ND.reshape(hidden_BTD.shape))
            sums = jax.tree.map(jnp.add, sums, parts)
            return (sums, add_to(norm_grads, grads), table_grad), dx_BTD

        wide = jnp.promote_types(x_M.dtype, jnp.float32)
        sums = zero_sums(wide, self.window.teacher is not None)
        start = (sums, sums_like(scale), sums_like(table))
        scanned = (x_M, self.window.targets, self.window.mask, self.window.teacher)
        (sums, norm_grads, table_grad), dx_M = jax.lax.scan(micro_batch, start, scanned)
        grads = {("final_norm", "scale"): norm_grads["scale"], (name, "table"): table_grad}
        return sums, dx_M, grads

    # ------------------------------------------------------------------ backward

    def backward(
        self, saved: dict[str, Any], dx_M: Array, head_grads: Flat, writer: _Writer
    ) -> _Total:
        """Go back through all layers; parameters and state are left in the writer."""
        zero = jnp.zeros((), jnp.result_type(float))
        total = _Total(zero, zero, zero, jnp.zeros((), jnp.int32))
        rest = dict(head_grads)
        if self.core is None:
            total, dx_M = self._backward_stack("stack", saved["stack"], dx_M, total, writer)
        else:
            total, dx_M = self._backward_stack("coda", saved["coda"], dx_M, total, writer)
            total, dx_M = self._backward_core(saved, dx_M, rest, total, writer)
            dx_M = self._backward_prelude_norm(saved["prelude_out"], dx_M, rest)
            total, dx_M = self._backward_stack("prelude", saved["prelude"], dx_M, total, writer)
        self._backward_embedding(dx_M, rest)
        params = {path: writer.params[path] for path in rest}
        total, params, owned = writer.apply(total, params, writer.owned(params), rest)
        writer.params |= params
        writer.state |= owned
        if writer.write:
            writer.advance({("final_norm", "scale"): self.flat[("final_norm", "scale")]})
        return total

    def _backward_stack(
        self, name: str, inputs_LM: Array, dx_M: Array, total: _Total, writer: _Writer
    ) -> tuple[_Total, Array]:
        layer, prefix = self._layer(name), (name, "blocks")
        params = writer.below(prefix)

        def back(carry: Any, scanned: Any) -> tuple[Any, None]:
            dx_M, total, params, owned = carry
            number, x_M = scanned
            one = _slice(params, number)
            block = _nested({path[len(prefix) :]: p[0] for path, p in one.items()})

            def micro_batch(grads: Any, scanned: Any) -> tuple[Any, Array]:
                x_BTD, dx_BTD, rows = scanned
                _, pull = jax.vjp(lambda p, x: layer(p, x, rows, number), block, x_BTD)
                own, dx_BTD = pull(dx_BTD)
                return add_to(grads, own), dx_BTD

            grads, dx_M = jax.lax.scan(
                micro_batch, sums_like(block), (fetch(x_M, self.on_host), dx_M, self.rows)
            )
            grads = {(*prefix, *path): g[None] for path, g in _flatten(grads).items()}
            total, new, state = writer.apply(total, one, _slice(owned, number), grads, number)
            return (dx_M, total, _put(params, new, number), _put(owned, state, number)), None

        layers = jnp.arange(inputs_LM.shape[0])
        (dx_M, total, params, owned), _ = jax.lax.scan(
            back,
            (dx_M, total, params, writer.owned(params)),
            (layers, inputs_LM),
            reverse=True,
        )
        writer.params |= params
        writer.state |= owned
        return total, dx_M

    def _backward_core(
        self, saved: dict[str, Any], ds_M: Array, rest: Flat, total: _Total, writer: _Writer
    ) -> tuple[_Total, Array]:
        """Gradients of all gradient steps, then the update of the core's layers."""
        assert self.core is not None
        ds_M, de_M, nested = self.core.backward(
            self.params["core"],
            saved["core"],
            ds_M,
            saved["e"],
            self.rows,
            self.free_steps,
            self.steps,
        )
        if self.config.recurrent.initial_state == "prelude":
            # Without free steps, gradient also reaches the start.
            de_M += jnp.where(self.free_steps > 0, jnp.zeros_like(ds_M), ds_M)
        grads = {("core", *path): g for path, g in _flatten(nested).items()}
        prefix = ("core", "stack", "blocks")
        params = writer.below(prefix)
        rest |= {path: g for path, g in grads.items() if path not in params}
        grads = {path: grads[path] for path in params}

        def update(carry: Any, number: Array) -> tuple[Any, None]:
            total, params, owned = carry
            one, own, sums = (_slice(flat, number) for flat in (params, owned, grads))
            total, new, state = writer.apply(total, one, own, sums, number)
            return (total, _put(params, new, number), _put(owned, state, number)), None

        layers = jnp.arange(next(iter(params.values())).shape[0])
        (total, params, owned), _ = jax.lax.scan(
            update, (total, params, writer.owned(params)), layers
        )
        writer.params |= params
        writer.state |= owned
        return total, de_M

    def _backward_prelude_norm(self, x_M: Array, de_M: Array, rest: Flat) -> Array:
        if self.config.norm != "pre":
            return de_M
        norm, scale = self._module("prelude_norm"), self.params["prelude_norm"]
        x_M = fetch(x_M, self.on_host)

        def micro_batch(grads: Any, scanned: Any) -> tuple[Any, Array]:
            x_BTD, de_BTD = scanned
            own, dx_BTD = jax.vjp(norm, scale, x_BTD)[1](de_BTD)
            return add_to(grads, own), dx_BTD

        grads, dx_M = jax.lax.scan(micro_batch, sums_like(scale), (x_M, de_M))
        rest[("prelude_norm", "scale")] = grads["scale"]
        return dx_M

    def _backward_embedding(self, dx_M: Array, rest: Flat) -> None:
        """Add the gradient of looking tokens up to that of the table."""
        path = ("embedding", "table")
        table = self.flat[path]

        def micro_batch(grad: Array, scanned: Any) -> tuple[Array, None]:
            dx_BTD, tokens, keys_B = scanned
            _, pull = jax.vjp(lambda table: self._embed({"table": table}, tokens, keys_B), table)
            return grad + pull(dx_BTD)[0].astype(grad.dtype), None

        start = rest[path] if path in rest else sums_like(table)
        scanned = (dx_M, self.window.tokens, self.rows.keys)
        rest[path] = jax.lax.scan(micro_batch, start, scanned)[0]


def _square(tree: Any) -> Array:
    return jnp.square(global_norm(tree)).astype(jnp.result_type(float))


def _slice(stacked: Any, number: Array) -> Any:
    """One layer of each leaf, [1, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), stacked)


def _put(stacked: Any, one: Any, number: Array) -> Any:
    """Write one layer [1, ...] of each leaf back in place.

    The layer's layout is pinned: a gradient may come out transposed, and XLA would rather hold the
    whole stack transposed, in a copy, than turn one layer.
    """

    def put(stack: Array, layer: Array) -> Array:
        rows_first = Layout(major_to_minor=tuple(range(layer.ndim)))
        layer = with_layout_constraint(layer, rows_first)
        return jax.lax.dynamic_update_slice_in_dim(stack, layer, number, axis=0)

    return jax.tree.map(put, stacked, one)
