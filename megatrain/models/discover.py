"""Finding the modules that a model is streamed by: its layers, and whatever else owns parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from torch import nn

from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["UnitKind", "find_layers", "find_modules"]

UnitKind = Literal["layer", "resident", "container"]


def find_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module, UnitKind]]:
    """Return `(path, module, kind)` of every unit in definition order; together they own all parameters.

    Layers first decide; what owns parameters outside of them is taken as the outermost module that owns some
    directly: an embedding, a norm, a projection. A module that owns some and also contains layers is a unit of those
    parameters alone.

    Raises:
        UnsupportedModelError: no layers.
    """
    layers = find_layers(model)
    layer_ids = {id(module) for module in layers.values()}
    found: list[tuple[str, nn.Module, UnitKind]] = []
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if id(module) in layer_ids:
            found.append((path, module, "layer"))
            return
        if any(parameter is not None for parameter in module._parameters.values()):
            if layer_ids.isdisjoint(map(id, module.modules())):
                found.append((path, module, "resident"))
                return
            found.append((path, module, "container"))
        for leaf, child in module.named_children():
            visit(f"{path}.{leaf}" if path else leaf, child)

    visit("", model)
    return found


def find_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the model's layers by path: the outermost modules that Hugging Face promises can be run again.

    Raises:
        UnsupportedModelError: neither those nor any list of blocks with parameters exist.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    no_split = _no_split_modules(model)

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in no_split

    layers = {
        path: module for path, module in _outermost(model, "", is_layer) if next(module.parameters(), None) is not None
    }
    if not layers:
        layers = dict(_items_of_outermost_lists(model, ""))
    if not layers:
        raise UnsupportedModelError(
            type(model).__name__,
            "no layers were found. Looked for modules derived from transformers' GradientCheckpointingLayer, for "
            f"classes named in _no_split_modules ({', '.join(sorted(no_split)) or 'empty'}), and for an "
            "nn.ModuleList of blocks with parameters",
        )
    return layers


def _no_split_modules(model: PreTrainedModel) -> set[str]:
    """Return the class names in `_no_split_modules`, leaving out embeddings, which are no layers."""
    embeddings = {type(module).__name__ for module in model.modules() if isinstance(module, nn.Embedding)}
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {name for name in names if "Embedding" not in name} - embeddings


def _outermost(module: nn.Module, path: str, matches: object) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        if callable(matches) and matches(child):
            yield child_path, child
        else:
            yield from _outermost(child, child_path, matches)


def _items_of_outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        blocks = [block for block in child.children() if next(block.children(), None) is not None]
        if isinstance(child, nn.ModuleList) and blocks and any(next(b.parameters(), None) is not None for b in blocks):
            for number, block in child.named_children():
                yield f"{child_path}.{number}", block
        else:
            yield from _items_of_outermost_lists(child, child_path)
