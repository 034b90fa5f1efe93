"""MLPs that run on a few rows at a time, forward and backward, to save memory for long sequences.

A row is the hidden state of one token. If a submodule computes each row independently, it can run in pieces. Its
forward saves only the input, and its backward recomputes one piece at a time. Internal activations therefore need
memory for the rows of only one piece.

Such position-wise submodules are found by a trial run on a small copy of the model with random weights. A whole input
and its pieces must have the same outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.unit.state import RandomStates, ThreadModes, without_saved_tensors
from megatrain.engine.unit.unit_run import optional_gradients
from megatrain.engine.unit.weight_gradients import intercept_leaves, new_leaf
from megatrain.models.graph import find_layers
from megatrain.models.small import small_model

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph

__all__ = ["TiledForward", "find_position_wise", "is_position_wise", "tile_mlps"]

_TRIAL_SHAPE = (2, 7)  # shape of the trial input: sequences and tokens per sequence
_PIECE_SIZES = (1, 5, 3, 5)
_RTOL, _ATOL = 1e-3, 1e-5  # allow for fp32 sums in a different order
_MIN_MATRICES = 2  # an MLP has at least two matrices; a single projection has almost no internal activations

#: (path, class) of a layer and of its submodules with two or more matrices. Layers are matched by signature.
_Signature = tuple[tuple[str, str], ...]


def tile_mlps(graph: ModelGraph, rows: int) -> tuple[str, ...]:
    """Make the MLPs of all layers run on ``rows`` rows at a time. Return the names of the MLPs.

    Weight gradients become fp32 sums over pieces. Results therefore depend on ``rows``, but not on the placement or on
    the amount of memory.

    Args:
        graph: Graph whose modules are changed.
        rows: Maximum number of rows per piece, at least 1.

    Raises:
        UnsupportedModelError: If no submodule of a layer is position-wise, or if the trial run that finds them fails.
    """
    names = find_position_wise(graph)
    for name in names:
        module = graph.model.get_submodule(name)
        module.__dict__["forward"] = TiledForward(name, module, rows)
    return names


class TiledForward:
    """Forward of a position-wise module that runs in pieces.

    Args:
        name: Path of the module, for messages.
        module: Module that takes and returns hidden states [..., H].
        rows: Maximum number of rows per piece.
    """

    def __init__(self, name: str, module: nn.Module, rows: int) -> None:
        assert rows > 0, rows
        self.name, self._rows = name, rows
        self._forward: Callable[..., Tensor] = module.forward
        self._slots: list[tuple[dict[str, Any], str]] = [
            (m._parameters, leaf) for m in module.modules() for leaf, p in m._parameters.items() if p is not None
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the module. An input that fits in one piece is not split."""
        if hidden.numel() // hidden.shape[-1] <= self._rows:
            return self._forward(hidden)
        if not torch.is_grad_enabled():
            return self.run_pieces(hidden)
        weights = [parameters[leaf] for parameters, leaf in self._slots]
        out: Tensor = _TiledFunction.apply(self, hidden, *weights)  # type: ignore[no-untyped-call]
        return out

    def pieces(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each piece's row range and the piece: [rows, H] for a 2-D input, otherwise [1, rows, H]."""
        flat_rows = hidden.reshape(-1, hidden.shape[-1])
        for start in range(0, len(flat_rows), self._rows):
            span = slice(start, min(start + self._rows, len(flat_rows)))
            yield span, flat_rows[span] if hidden.dim() == 2 else flat_rows[span].unsqueeze(0)

    def run_piece(self, hidden: Tensor) -> Tensor:
        """Run one piece, and return its output [rows, H].

        Raises:
            UnsupportedModelError: If an output recorder collects values in the module. It would do so once per piece.
        """
        from transformers.utils.output_capturing import _active_collector

        collector = _active_collector.get() or {}
        counts = {key: len(items) for key, items in collector.items()}
        out = self._forward(hidden)
        if {key: len(items) for key, items in collector.items()} != counts:
            raise UnsupportedModelError(
                self.name,
                "model.mlp_rows runs it over a few rows at a time, but the model records what it computes inside, for "
                "instance for a router's auxiliary loss. Write mlp_rows = 0, or switch that off in config.json",
            )
        return out.reshape(-1, out.shape[-1])

    def run_pieces(self, hidden: Tensor) -> Tensor:
        """Run all pieces in the current grad mode, and concatenate the results to [..., H]."""
        out: Tensor | None = None
        for span, piece in self.pieces(hidden):
            rows = self.run_piece(piece).detach()
            if out is None:
                out = rows.new_empty(hidden.numel() // hidden.shape[-1], rows.shape[-1])
            out[span] = rows
        assert out is not None, hidden.shape
        return out.view(*hidden.shape[:-1], out.shape[-1])

    @contextmanager
    def bind(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Bind ``weights`` to the module's parameters within the context."""
        originals = [parameters[leaf] for parameters, leaf in self._slots]
        try:
            for (parameters, leaf), weight in zip(self._slots, weights, strict=True):
                parameters[leaf] = weight
            yield
        finally:
            for (parameters, leaf), weight in zip(self._slots, originals, strict=True):
                parameters[leaf] = weight


class _TiledFunction(torch.autograd.Function):
    """Autograd function that saves only a module's input and weights for the backward."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledForward, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.tiled = tiled
        ctx.random = RandomStates(hidden.device)
        ctx.random_state = ctx.random.get()
        ctx.modes = ThreadModes.current(hidden.device.type)
        ctx.save_for_backward(hidden, *weights)
        # Use grad mode, as in the recompute, because both runs must select the same kernels.
        with torch.enable_grad(), without_saved_tensors():
            return tiled.run_pieces(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tiled: TiledForward = ctx.tiled
        hidden, *weights = ctx.saved_tensors
        _, needs_hidden, *need_weights = ctx.needs_input_grad
        # Through these leaves, the backward adds each piece's matrix gradients directly to the accumulators.
        leaves = [new_leaf(w, requires_grad=need) for w, need in zip(weights, need_weights, strict=True)]
        trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        sums: list[Tensor | None] = [None] * len(trained_leaves)
        grads = grad_out.reshape(-1, grad_out.shape[-1])
        grad_hidden = hidden.new_empty(len(grads), hidden.shape[-1]) if needs_hidden else None
        with (
            ctx.modes.apply(),
            ctx.random.swap_in(ctx.random_state),
            torch.enable_grad(),
            tiled.bind(leaves),
            intercept_leaves(leaves),
        ):
            for span, piece in tiled.pieces(hidden):
                leaf = piece.detach().requires_grad_(needs_hidden)
                out = tiled.run_piece(leaf)
                inputs = [leaf, *trained_leaves] if needs_hidden else trained_leaves
                gradients = optional_gradients([out], [grads[span]], inputs)
                del out
                if grad_hidden is not None:
                    input_grad = gradients.pop(0)
                    grad_hidden[span] = 0 if input_grad is None else input_grad.reshape(-1, input_grad.shape[-1])
                _accumulate(sums, gradients)
        remaining_sums = iter(sums)
        weight_grads = [
            None
            if not leaf.requires_grad
            else None
            if (total := next(remaining_sums)) is None
            else total.to(leaf.dtype)
            for leaf in leaves
        ]
        return (None, None if grad_hidden is None else grad_hidden.view(hidden.shape), *weight_grads)


def _accumulate(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add a piece's gradients to the sums, in fp32."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        total = sums[index]
        if total is None:
            sums[index] = gradient.to(torch.float32, copy=True)  # copy, because gradients can share memory
        else:
            total.add_(gradient)


# -- find position-wise submodules --------------------------------------------------------------------------------


def find_position_wise(graph: ModelGraph) -> tuple[str, ...]:
    """Return the names of the layers' outermost position-wise submodules that have at least two matrices.

    In a model that reads images, only the text layers are searched, because images have few tokens.

    Raises:
        UnsupportedModelError: If there are no such submodules, or if a layer has no counterpart in the small copy.
    """
    small_copy = small_model(graph.config.get_text_config(), "auto", seed=0, needs_head=False)
    known_paths = _position_wise_paths(small_copy)
    names: list[str] = []
    # Remove adapters. The small copy has none, so layers with adapters would not match its layers.
    with graph.plain_model():
        for unit in graph.units:
            if not unit.is_layer or unit.index in graph.optional_units:
                continue
            paths = known_paths.get(_signature(unit.module))
            if paths is None:
                raise UnsupportedModelError(
                    unit.name,
                    "model.mlp_rows: the small copy of the model, on which MLPs are tried, has no layer like it. "
                    "Write mlp_rows = 0",
                )
            names += [f"{unit.name}.{path}" for path in paths]
    if not names:
        raise UnsupportedModelError(
            type(graph.model).__name__,
            "model.mlp_rows: no submodule of its layers computes each token by itself, so none can be run over a few "
            "rows at a time. Write mlp_rows = 0",
        )
    return tuple(names)


def _position_wise_paths(model: Any) -> dict[_Signature, tuple[str, ...]]:
    """Return the paths of position-wise submodules within a layer, by the layer's signature."""
    layers = find_layers(model)
    calls = _call_widths(model, layers.values())
    paths: dict[_Signature, tuple[str, ...]] = {}
    for layer in layers.values():
        paths[_signature(layer)] = tuple(_find_outermost(layer, "", calls))
    return paths


def _find_outermost(module: nn.Module, path: str, calls: dict[nn.Module, list[int | None]]) -> Iterator[str]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        if not _has_matrices(child):
            continue
        widths = calls.get(child, [])
        if len(widths) == 1 and widths[0] is not None and is_position_wise(child, widths[0]):
            yield child_path
        else:
            yield from _find_outermost(child, child_path, calls)


def _call_widths(model: Any, layers: Any) -> dict[nn.Module, list[int | None]]:
    """Run the model once, and return the input width of every call of each submodule.

    The width is None if the call does not take and return a single tensor of hidden states.
    """
    widths: dict[nn.Module, list[int | None]] = {}

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        is_hidden = is_plain and args[0].dim() >= 2 and output.shape[:-1] == args[0].shape[:-1]
        widths.setdefault(module, []).append(args[0].shape[-1] if is_hidden else None)

    modules = [module for layer in layers for module in layer.modules() if module is not layer]
    hooks = [module.register_forward_hook(record_call, with_kwargs=True) for module in modules if _has_matrices(module)]
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return widths


def is_position_wise(module: nn.Module, width: int) -> bool:
    """Return whether a module has the same outputs and gradients for a whole input as for its pieces.

    Args:
        module: Module with real weights on the CPU, which takes hidden states [B, S, width]. It must draw no random
            numbers.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*_TRIAL_SHAPE, width, generator=generator)
    buffers = [buffer.clone() for buffer in module.buffers()]
    try:
        whole_results = _run(module, [hidden], generator.manual_seed(1))
        pieces = list(hidden.reshape(1, -1, width).split_with_sizes(_PIECE_SIZES, dim=1))
        part_results = _run(module, pieces, generator.manual_seed(1))
    except Exception:  # a module that fails on pieces cannot run on them
        return False
    is_close = partial(torch.allclose, rtol=_RTOL, atol=_ATOL)
    return all(map(is_close, whole_results, part_results)) and all(map(torch.equal, buffers, module.buffers()))


def _run(module: nn.Module, inputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Run a module on several inputs. Return the outputs [tokens, H], and the gradients of a weighted sum of them."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        outputs = [module(leaf) for leaf in leaves]
        out = torch.cat([output.reshape(-1, output.shape[-1]) for output in outputs])
        factors = torch.randn(out.shape, generator=generator)
        gradients = torch.autograd.grad((out * factors).sum(), [*leaves, *weights], allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves, *weights], gradients, strict=True)]
    input_grad = torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in grads[: len(leaves)]])
    return [out.detach(), input_grad, *grads[len(leaves) :]]


def _has_matrices(module: nn.Module) -> bool:
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= _MIN_MATRICES


def _signature(layer: nn.Module) -> _Signature:
    entries = [(path, type(m).__name__) for path, m in layer.named_modules() if path and _has_matrices(m)]
    return (("", type(layer).__name__), *entries)
