"""Partition of a module into units: repeated layers, and all other modules that own parameters.

In the engine, Hugging Face's classes define the layers. The engine runs a unit's forward, so a unit of
``megatrain.models.graph`` owns all parameters inside. An offloaded module can be of any class. Hooks hold the weights
that each module's forward reads. Outside of layers, a unit thus contains only parameters that one module owns directly.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from megatrain.base.layout import UnitLayout, build_layouts
from megatrain.embed.absent_parameters import holder_of
from megatrain.engine.program.block_keys import gradient_key, weight_key
from megatrain.ranks.dtensors import is_dtensor

#: Name of the part that contains the outermost module's direct parameters. No submodule can have this name.
ROOT = "(root)"
#: Weak references to the optimizers of ordinary parameters.
_OPTIMIZERS: Any = WeakIdKeyDictionary()
_TRAINED_DTYPES = (torch.float32, torch.bfloat16)


class OffloadError(ValueError):
    """A module or setting is incompatible with offloading. The message contains the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Parameters of a unit that share a block: they have the same dtype, and all are trained or all are frozen.

    Attributes:
        name: Name of the offloaded module in the store.
        parameters: Parameters by full name.
    """

    name: str
    layout: UnitLayout
    dtype: torch.dtype
    parameters: dict[str, nn.Parameter]

    @property
    def weight_key(self) -> str:
        """Key of the weight block."""
        return weight_key(self.root)

    @property
    def gradient_key(self) -> str:
        """Key of the gradient block."""
        return gradient_key(self.root, 0)

    @property
    def root(self) -> str:
        """Unique name of the part, which contains only characters that are allowed in keys."""
        return f"{self.name}/" + re.sub(r"[^A-Za-z0-9_.]", lambda found: f"-{ord(found[0]):x}-", self.layout.name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight block."""
        return self.layout.num_elements * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient block; 0 if the part is frozen."""
        return self.layout.num_elements * torch.float32.itemsize if self.layout.trainable else 0


@dataclass(frozen=True, slots=True, eq=False)
class UnitPart:
    """A module whose forward needs weights, and the parts that contain these weights.

    Attributes:
        name: Path of the module.
        parts: Parts of this unit, and parts of other units that contain parameters tied to this unit.
    """

    name: str
    module: nn.Module
    parts: tuple[Part, ...]


def parts_of(units: Iterable[UnitPart]) -> list[Part]:
    """Return the parts of all units in definition order, each part once."""
    return list(dict.fromkeys(part for unit in units for part in unit.parts))


def enclosing_parts(unit: UnitPart, units: Iterable[UnitPart]) -> list[Part]:
    """Return the parts of a unit and of its enclosing modules. All of them are needed at the same time."""
    return parts_of(other for other in units if other.name == "" or f"{unit.name}.".startswith(f"{other.name}."))


def partition(model: nn.Module, name: str, leave: Sequence[str] = ()) -> list[UnitPart]:
    """Return the units of a module in definition order. Together they contain all parameters to offload.

    The items of lists (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) are units if they contain modules.
    Outside of these items, each module that directly owns parameters is a unit. A parameter belongs to the first unit
    that uses it.

    Args:
        name: Name of the module in the store.
        leave: Globs of parameter names. Matching parameters stay ordinary.

    Raises:
        OffloadError: There is nothing to offload, a dtype has no master weights, or a parameter is already in a store.
    """
    parameters = {path: p for path, p in model.named_parameters() if not any(fnmatchcase(path, glob) for glob in leave)}
    for path, parameter in parameters.items():
        _check_parameter(path, parameter)
    _check_no_aliases(parameters)
    names = {id(parameter): path for path, parameter in parameters.items()}
    if not names:
        raise OffloadError(
            f"{type(model).__name__} has no parameters to offload" + (f" besides {leave}" if leave else "")
        )
    parts_by_id: dict[int, Part] = {}
    units = []
    for path, module, is_whole in _iter_units(model, ""):
        members = {id(p): p for p in module.parameters(recurse=is_whole) if id(p) in names}
        if not members:
            continue
        own_parameters = {names[key]: parameter for key, parameter in members.items() if key not in parts_by_id}
        for part in _make_parts(name, path or ROOT, own_parameters):
            parts_by_id.update((id(parameter), part) for parameter in part.parameters.values())
        parts = tuple(dict.fromkeys(parts_by_id[key] for key in members))
        units.append(UnitPart(path, module, parts))
    return units


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if holder_of(parameter) is not None:
        raise OffloadError(f"{name} is already in a store, because megatrain.offload was called before")
    if is_dtensor(parameter):
        raise OffloadError(
            f"{name} is sharded (DTensor), so torch gathers its weights. Leave the module ordinary, and keep the "
            "optimizer's state in the store: megatrain.TieredAdamW(model.parameters(), store=store)"
        )
    if not parameter.is_floating_point():
        raise OffloadError(f'{name} has the dtype {parameter.dtype}. Leave it out: leave=["{name}"]')
    if parameter.requires_grad and parameter.dtype not in _TRAINED_DTYPES:
        raise OffloadError(
            f"{name} is trained in {parameter.dtype}, but master weights exist only for float32 and bfloat16. First "
            "convert the model: model.to(torch.bfloat16)"
        )
    reference = _OPTIMIZERS.get(parameter)
    optimizer = None if reference is None else reference()
    if optimizer is not None and optimizer.groups:
        raise OffloadError(
            f"{name} already belongs to a {type(optimizer).__name__}. First call megatrain.offload(model, store), "
            "then create the optimizer with model.parameters()"
        )


def record_optimizer(parameters: Iterable[nn.Parameter], optimizer: Any) -> None:
    """Record the optimizer of ordinary parameters. A parameter with state in a store can no longer be offloaded."""
    reference = weakref.ref(optimizer)
    for parameter in parameters:
        _OPTIMIZERS[parameter] = reference


def _check_no_aliases(parameters: dict[str, nn.Parameter]) -> None:
    """Raise an error if two parameters share memory. In the store they would silently become independent."""
    spans = []
    for name, parameter in parameters.items():
        if parameter.device.type != "meta" and parameter.numel():
            start = parameter.data_ptr()
            length = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            spans.append((parameter.device.type, start, start + length * parameter.element_size(), name))
    spans.sort()
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < stop:
            raise OffloadError(
                f"{name} and {other} are two parameters that share memory. Tie them by assigning one parameter to both "
                f"modules: module.{other.rpartition('.')[2]} = the other module's parameter"
            )


def _iter_units(module: nn.Module, path: str, *, is_layer: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (path, module, whether the unit includes all submodules) for each unit."""
    if is_layer:
        yield path, module, True
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield path, module, False
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    layers = _layers_of(module) if is_list else frozenset[str]()
    for leaf, child in module.named_children():
        yield from _iter_units(child, f"{path}.{leaf}" if path else leaf, is_layer=leaf in layers)


def _layers_of(items: nn.Module) -> frozenset[str]:
    """Return the names of a list's items that are layers. All other items are stages of layers or have no submodules.

    If one item of a list is recognized as a stage, similar items are also treated as stages. In a UNet, for example,
    only stages with attention are recognized directly, but stages without attention must also be split.
    """
    candidates = {leaf: item for leaf, item in items.named_children() if _has_children(item)}
    stages = {leaf for leaf, item in candidates.items() if _has_list_with(_has_grandchildren, item)}
    if stages:
        stages |= {leaf for leaf, item in candidates.items() if _has_list_with(_has_children, item)}
    return frozenset(candidates.keys() - stages)


def _has_list_with(is_match: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """Return whether a module contains a list with an item for which ``is_match`` returns True."""
    return any(
        isinstance(child, nn.ModuleList | nn.Sequential) and any(map(is_match, child.children()))
        for child in module.modules()
        if child is not module
    )


def _has_children(module: nn.Module) -> bool:
    """Return whether a module has submodules."""
    return next(_iter_children(module), None) is not None


def _has_grandchildren(module: nn.Module) -> bool:
    """Return whether a module has nested submodules. This is true for layers, but not for experts and heads."""
    return any(map(_has_children, _iter_children(module)))


def _iter_children(module: nn.Module) -> Iterator[nn.Module]:
    """Return a module's submodules without peft's adapters, so that adapters do not change the partition."""
    while hasattr(type(module), "get_base_layer"):
        base: nn.Module = module.get_base_layer()  # type: ignore[operator]
        if base is module:
            break
        module = base
    return module.children()


def _make_parts(name: str, path: str, own_parameters: dict[str, nn.Parameter]) -> list[Part]:
    parts = []
    for layout in build_layouts(path, own_parameters, by_dtype=True):
        parameters = {entry.name: own_parameters[entry.name] for entry in layout.entries}
        parts.append(Part(name, layout, own_parameters[layout.entries[0].name].dtype, parameters))
    return parts
