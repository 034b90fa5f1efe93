"""Finding the MLPs of a model's layers, whatever they are called: by trying which submodules are position-wise.

A submodule is position-wise if what it gives for a token depends on that token alone. That is tried, on a small copy of
the model with random weights: outputs and gradients for whole inputs and for pieces of them must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.models.errors import UnsupportedModelError
from megatrain.models.graph import find_layers
from megatrain.models.small import small_model

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph

__all__ = ["find_position_wise", "is_position_wise"]

_TOKENS = (2, 7)  # rows and tokens of the input that is tried
_PIECES = (1, 5, 3, 5)
_RTOL, _ATOL = 1e-3, 1e-5  # fp32 sums in another order
_FEWEST_MATRICES = 2  # into the MLP and out of it; a single projection holds little memory inside

#: What a layer consists of: (path, class) of its larger submodules. Layers of one signature are taken to be alike.
_Signature = tuple[tuple[str, str], ...]


def find_position_wise(graph: ModelGraph) -> tuple[str, ...]:
    """Return the names of the outermost position-wise submodules of the layers that hold matrices.

    Raises:
        UnsupportedModelError: there are none, or a kind of layer is missing in the small copy that they are tried on.
    """
    small = small_model(graph.config, "auto", seed=0)
    proven = _proven(small)
    names: list[str] = []
    for unit in graph.units:
        if not unit.is_layer:
            continue
        paths = proven.get(_signature(unit.module))
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


def _proven(model: Any) -> dict[_Signature, tuple[str, ...]]:
    """Return signature of a layer -> paths of the submodules in it that are position-wise."""
    layers = find_layers(model)
    calls = _calls(model, layers.values())
    found: dict[_Signature, tuple[str, ...]] = {}
    for layer in layers.values():
        found[_signature(layer)] = tuple(_outermost(layer, "", calls))
    return found


def _outermost(module: nn.Module, path: str, calls: dict[nn.Module, list[int | None]]) -> Iterator[str]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        if not _has_matrices(child):
            continue
        widths = calls.get(child, [])
        if len(widths) == 1 and widths[0] is not None and is_position_wise(child, widths[0]):
            yield child_path
        else:
            yield from _outermost(child, child_path, calls)


def _calls(model: Any, layers: Any) -> dict[nn.Module, list[int | None]]:
    """Run the model once; return for each submodule the width of each call's input, None: not one tensor in and out."""
    seen: dict[nn.Module, list[int | None]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        is_hidden = is_plain and args[0].dim() >= 2 and output.shape[:-1] == args[0].shape[:-1]
        seen.setdefault(module, []).append(args[0].shape[-1] if is_hidden else None)

    modules = [module for layer in layers for module in layer.modules() if module is not layer]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules if _has_matrices(module)]
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def is_position_wise(module: nn.Module, width: int) -> bool:
    """Return whether a module gives the same for a whole input as for its pieces, gradients included.

    Args:
        module: takes hidden states [B, S, width], with real weights on the CPU. It must draw no random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*_TOKENS, width, generator=generator)
    buffers = [buffer.clone() for buffer in module.buffers()]
    try:
        whole = _run(module, [hidden], generator.manual_seed(1))
        pieces = list(hidden.reshape(1, -1, width).split_with_sizes(_PIECES, dim=1))
        parts = _run(module, pieces, generator.manual_seed(1))
    except Exception:  # whatever it does not like about pieces, it cannot be run on them
        return False
    same = all(torch.allclose(a, b, rtol=_RTOL, atol=_ATOL) for a, b in zip(whole, parts, strict=True))
    return same and all(torch.equal(a, b) for a, b in zip(buffers, module.buffers(), strict=True))


def _run(module: nn.Module, inputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return the output [tokens, H] of some inputs one after the other, and all gradients of a random sum of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        outputs = [module(leaf) for leaf in leaves]
        out = torch.cat([output.reshape(-1, output.shape[-1]) for output in outputs])
        factors = torch.randn(out.shape, generator=generator)
        found = torch.autograd.grad((out * factors).sum(), [*leaves, *weights], allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves, *weights], found, strict=True)]
    own = torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in grads[: len(leaves)]])
    return [out.detach(), own, *grads[len(leaves) :]]


def _has_matrices(module: nn.Module) -> bool:
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= _FEWEST_MATRICES


def _signature(layer: nn.Module) -> _Signature:
    own = [(path, type(module).__name__) for path, module in layer.named_modules() if path and _has_matrices(module)]
    return (("", type(layer).__name__), *own)
