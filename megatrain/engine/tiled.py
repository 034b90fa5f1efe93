"""Position-wise submodules run over a few rows at a time, forward and backward, for long sequences.

A row is the hidden state of one token. What a submodule computes inside is there for the rows of one piece only: the
forward keeps its input, and the backward runs each piece again before it takes that piece's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megatrain.engine.suspend import RandomStates, ThreadModes
from megatrain.models.errors import UnsupportedModelError
from megatrain.models.position_wise import find_position_wise

if TYPE_CHECKING:
    from torch import nn

    from megatrain.models.graph import ModelGraph

__all__ = ["TiledForward", "tile_mlps"]


def tile_mlps(graph: ModelGraph, rows: int) -> tuple[str, ...]:
    """Let the MLPs of all layers run over ``rows`` rows at a time; return their names.

    Their weights' gradients are sums over pieces, in fp32, rounded once: other bits than without, the same ones
    wherever blocks live and whatever memory there is.

    Args:
        graph: changed.
        rows: at least 1; a part of the numbers.

    Raises:
        UnsupportedModelError: no submodule of the layers is position-wise, or it cannot be tried.
    """
    names = find_position_wise(graph)
    for name in names:
        module = graph.model.get_submodule(name)
        module.__dict__["forward"] = TiledForward(name, module, rows)
    return names


class TiledForward:
    """The forward of one position-wise module.

    Args:
        name: of the module, for messages.
        module: takes and returns hidden states [..., H].
        rows: of a piece.
    """

    def __init__(self, name: str, module: nn.Module, rows: int) -> None:
        assert rows > 0, rows
        self.name, self._rows = name, rows
        self._whole: Callable[..., Tensor] = module.forward
        self._slots: list[tuple[dict[str, Any], str]] = [
            (m._parameters, leaf) for m in module.modules() for leaf, p in m._parameters.items() if p is not None
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the module; what has no more rows than a piece runs as a whole."""
        if hidden.numel() // hidden.shape[-1] <= self._rows:
            return self._whole(hidden)
        if not torch.is_grad_enabled():
            return self.in_pieces(hidden)
        weights = [parameters[leaf] for parameters, leaf in self._slots]
        out: Tensor = _TiledFunction.apply(self, hidden, *weights)  # type: ignore[no-untyped-call]
        return out

    def pieces(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each piece and the piece, shaped as the module takes it: [1, rows, H], or [rows, H]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        for start in range(0, len(flat), self._rows):
            part = slice(start, min(start + self._rows, len(flat)))
            yield part, flat[part] if hidden.dim() == 2 else flat[part].unsqueeze(0)

    def piece(self, hidden: Tensor) -> Tensor:
        """Run one piece; return its rows [rows, H].

        Raises:
            UnsupportedModelError: something inside tells the model about the tokens, and would do so once per piece.
        """
        from transformers.utils.output_capturing import _active_collector

        collector = _active_collector.get() or {}
        before = {key: len(items) for key, items in collector.items()}
        out = self._whole(hidden)
        if {key: len(items) for key, items in collector.items()} != before:
            raise UnsupportedModelError(
                self.name,
                "model.mlp_rows runs it over a few rows at a time, but the model records what it computes inside, for "
                "instance for a router's auxiliary loss. Write mlp_rows = 0, or switch that off in config.json",
            )
        return out.reshape(-1, out.shape[-1])

    def in_pieces(self, hidden: Tensor) -> Tensor:
        """Run all pieces, in the current grad mode, and put them together: [..., H]."""
        out: Tensor | None = None
        for part, piece in self.pieces(hidden):
            rows = self.piece(piece).detach()
            if out is None:
                out = rows.new_empty(hidden.numel() // hidden.shape[-1], rows.shape[-1])
            out[part] = rows
        assert out is not None, hidden.shape
        return out.view(*hidden.shape[:-1], out.shape[-1])

    @contextmanager
    def bound(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Put ``weights`` into the module for a time."""
        saved = [parameters[leaf] for parameters, leaf in self._slots]
        try:
            for (parameters, leaf), weight in zip(self._slots, weights, strict=True):
                parameters[leaf] = weight
            yield
        finally:
            for (parameters, leaf), weight in zip(self._slots, saved, strict=True):
                parameters[leaf] = weight


class _TiledFunction(torch.autograd.Function):
    """Keeps a module's input and nothing else."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledForward, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.tiled = tiled
        ctx.random = RandomStates(hidden.device, enabled=not isinstance(hidden, FakeTensor))
        ctx.random_state = ctx.random.get()
        ctx.modes = ThreadModes.current(hidden.device.type)
        ctx.save_for_backward(hidden, *weights)
        # In grad mode as the backward's run, for the same kernels; what autograd would keep is dropped.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _unpack_dropped):
            return tiled.in_pieces(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tiled: TiledForward = ctx.tiled
        hidden, *weights = ctx.saved_tensors
        _, needs_hidden, *need_weights = ctx.needs_input_grad
        leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, need_weights, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sums: list[Tensor | None] = [None] * len(wanted)
        grads = grad_out.reshape(-1, grad_out.shape[-1])
        grad_hidden = hidden.new_empty(len(grads), hidden.shape[-1]) if needs_hidden else None
        with _as_in_forward(ctx), tiled.bound(leaves):
            for part, piece in tiled.pieces(hidden):
                leaf = piece.detach().requires_grad_(needs_hidden)
                out = tiled.piece(leaf)
                inputs = [leaf, *wanted] if needs_hidden else wanted
                found = list(torch.autograd.grad(out, inputs, grads[part], allow_unused=True))
                del out
                if grad_hidden is not None:
                    own = found.pop(0)
                    grad_hidden[part] = 0 if own is None else own.reshape(-1, own.shape[-1])
                _accumulate(sums, found)
        totals = iter(sums)
        own_grads = [
            None if not leaf.requires_grad else None if (total := next(totals)) is None else total.to(leaf.dtype)
            for leaf in leaves
        ]
        return (None, None if grad_hidden is None else grad_hidden.view(hidden.shape), *own_grads)


def _accumulate(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add a piece's gradients to the sums, in fp32."""
    for index, gradient in enumerate(found):
        if gradient is None:
            continue
        total = sums[index]
        if total is None:
            sums[index] = gradient.to(torch.float32, copy=True)  # a gradient may share memory with others
        else:
            total.add_(gradient)


@contextmanager
def _as_in_forward(ctx: Any) -> Iterator[None]:
    """Run with the random stream and the autocast of the forward."""
    outer, random_state = ThreadModes.current(ctx.modes.autocast[-1][0]), ctx.random.get()
    ctx.modes.restore()
    ctx.random.set(ctx.random_state)
    try:
        with torch.enable_grad():
            yield
    finally:
        ctx.random.set(random_state)
        outer.restore()


def _drop(tensor: Tensor) -> None:
    """Keep nothing: each piece is run again in the backward."""


def _unpack_dropped(_: object) -> Tensor:
    raise AssertionError("the graph of a piece's first run was used; only its recompute has one")
