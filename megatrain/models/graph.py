"""Division of a model into units that can be streamed, with each parameter's owner and position in blocks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.layout import UnitLayout, build_layouts, split_into_parts
from megatrain.models.passthrough import passthrough_modules
from megatrain.models.skeleton import build_skeleton, resolve_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.models.converter import InnerUnit, LayerPart, ModelConverter, WeightSource

__all__ = [
    "FreezeError",
    "ModelGraph",
    "Unit",
    "UnitKind",
    "UnsupportedModelError",
    "converted_graph",
    "find_layers",
    "find_modules",
    "find_split_mismatch",
    "graph_of",
]

UnitKind = Literal["layer", "resident", "container"]


def find_modules(
    model: PreTrainedModel, is_unit: Callable[[nn.Module], bool] = lambda module: False
) -> list[tuple[str, nn.Module, UnitKind]]:
    """Return `(path, module, kind)` for every unit, in definition order. Together, the units own all parameters.

    Each layer is a unit. Outside layers, each outermost module that directly owns parameters is a unit, for example an
    embedding, a norm or a projection. If such a module contains layers, its unit has only its direct parameters.

    Args:
        model: A skeleton, or a model with weights.
        is_unit: Function that returns whether a module is a unit although it does not directly own parameters.

    Raises:
        UnsupportedModelError: The model has no layers.
    """
    layers = find_layers(model)
    layer_ids = {id(module) for module in layers.values()}
    units: list[tuple[str, nn.Module, UnitKind]] = []
    seen_ids: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        if id(module) in seen_ids:
            return
        seen_ids.add(id(module))
        if id(module) in layer_ids:
            units.append((path, module, "layer"))
            return
        if any(parameter is not None for parameter in module._parameters.values()) or is_unit(module):
            if layer_ids.isdisjoint(map(id, module.modules())):
                units.append((path, module, "resident"))
                return
            units.append((path, module, "container"))
        for leaf, child in module.named_children():
            visit(f"{path}.{leaf}" if path else leaf, child)

    visit("", model)
    return units


def find_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the model's layers by path: the outermost modules that support activation checkpointing in transformers.

    If there are no such modules, return the items of the outermost lists of blocks with parameters.

    Raises:
        UnsupportedModelError: The model has neither such modules nor such lists.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    no_split = _no_split_modules(model)

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in no_split

    layers = {
        path: module for path, module in _find_outer(model, "", is_layer) if next(module.parameters(), None) is not None
    }
    if not layers:
        layers = dict(_find_list_items(model, ""))
    if not layers:
        raise UnsupportedModelError(
            type(model).__name__,
            "no layers were found. Looked for modules derived from transformers' GradientCheckpointingLayer, for "
            f"classes named in _no_split_modules ({', '.join(sorted(no_split)) or 'empty'}), and for an "
            "nn.ModuleList of blocks with parameters",
        )
    return layers


def _no_split_modules(model: PreTrainedModel) -> set[str]:
    """Return the class names in `_no_split_modules`, except embeddings, which are not layers."""
    embeddings = {type(module).__name__ for module in model.modules() if isinstance(module, nn.Embedding)}
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {name for name in names if "Embedding" not in name} - embeddings


def _find_outer(module: nn.Module, path: str, predicate: object) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        if callable(predicate) and predicate(child):
            yield child_path, child
        else:
            yield from _find_outer(child, child_path, predicate)


def _find_list_items(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        child_path = f"{path}.{leaf}" if path else leaf
        blocks = [block for block in child.children() if next(block.children(), None) is not None]
        if isinstance(child, nn.ModuleList) and blocks and any(next(b.parameters(), None) is not None for b in blocks):
            for index, block in child.named_children():
                yield f"{child_path}.{index}", block
        else:
            yield from _find_list_items(child, child_path)


_MAX_POSITION_OFFSET = 2  # some model families do not use the first rows of their position embedding


class FreezeError(Exception):
    """Error for a `freeze` pattern that matches no parameter, or patterns that freeze all parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Module that the engine runs as a whole. Its weights are bound only while it runs.

    Attributes:
        index: Position in `ModelGraph.units`.
        name: Path of the module in the model.
        module: The module. Its parameters are on the meta device except while the engine runs it.
        is_layer: Whether the unit is one of the model's layers, not an embedding, a norm or a head.
        layer: Path of the layer that is this unit or contains it. "" outside layers.
        params: `(dotted name inside the module, full name of the owner's parameter, name of the owner's layout)`. A
            tied parameter appears in every unit that uses it, always with the same owner.
        is_container: Whether `module` contains layers. The unit then has only the module's directly owned parameters,
            and the forward visits the unit before the units inside it.
        shares_inputs: Whether earlier units in the layer can have the same inputs. Shared inputs are saved only once.
        part: Part of a larger module that this unit runs, or None if the unit is a whole module.
    """

    index: int
    name: str
    module: nn.Module
    is_layer: bool
    params: tuple[tuple[str, str, str], ...]
    is_container: bool = False
    layer: str = ""
    shares_inputs: bool = False
    part: LayerPart | None = None

    @property
    def share(self) -> float:
        """Expected fraction of tokens that the unit processes. Below 1 if tokens are routed to it."""
        return 1.0 if self.part is None else len(self.part.rows) / self.part.total_rows


@dataclass(frozen=True, slots=True, eq=False)
class ModelGraph:
    """A model divided into units. It has no weights.

    Attributes:
        config: The original Hugging Face configuration.
        model: Skeleton with parameters on the meta device. Buffers have values, on the CPU until a runner moves them.
        units: All units in definition order. Together, they own all parameters.
        layouts: Layouts by name. Each unit that owns parameters has one or two (`<unit>`, `<unit>.frozen`).
        owner_names: Name of each tied parameter in its owner's layout, by each of the parameter's other names.
        converters: Converters that changed the skeleton. They also change its passes and exports.
        optional_units: Indices of units that a micro-batch can skip, for example because it has no images.
    """

    config: PretrainedConfig
    model: PreTrainedModel
    units: tuple[Unit, ...]
    layouts: Mapping[str, UnitLayout]
    owner_names: Mapping[str, str]
    dtype: torch.dtype
    converters: tuple[ModelConverter, ...] = ()
    optional_units: frozenset[int] = frozenset()

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the same modules and names as its folder."""
        return _enter_all([converter.plain_model() for converter in self.converters])

    def pass_context(
        self, on_dense_mask: Callable[[str], None] = lambda cause: None, *, is_compiled: bool
    ) -> AbstractContextManager[None]:
        """Return the context in which a pass runs its forward and backward. See `ModelConverter.pass_context`."""
        return _enter_all(
            [converter.pass_context(on_dense_mask, is_compiled=is_compiled) for converter in self.converters]
        )

    def export_source(self, source: WeightSource) -> WeightSource:
        """Return the source of the weights to export. ``source`` reads the weights from the blocks."""
        for converter in self.converters:
            source = converter.export_source(self, source)
        return source

    @property
    def num_parameters(self) -> int:
        """Number of parameters. Each tied parameter is counted once."""
        return sum(layout.num_parameters for layout in self.layouts.values())

    @property
    def trainable_parameters(self) -> tuple[str, ...]:
        """Full names of the trained parameters, in layout order."""
        layouts = (layout for layout in self.layouts.values() if layout.trainable)
        return tuple(dict.fromkeys(entry.parameter for layout in layouts for entry in layout.entries))

    def persistent_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers that checkpoints contain. Other buffers already have their final values."""
        checkpoint_names = self.model.state_dict(keep_vars=True)
        return tuple(name for name, _ in self.model.named_buffers() if name in checkpoint_names)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def converted_graph(
    config_or_folder: PretrainedConfig | Path | str,
    converters: Sequence[ModelConverter] = (),
    *,
    attn_implementation: str = "auto",
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    text_only: bool = False,
    is_trained: bool = True,
) -> ModelGraph:
    """Build a model's skeleton and divide it into units. No weights are read.

    Args:
        config_or_folder: A Hugging Face configuration, or a folder with `config.json`.
        converters: Converters that change the model, in this order. They must not have been used before.
        attn_implementation: Attention implementation in transformers, or "auto" for transformers' default.
        freeze: Glob patterns of parameters to freeze. A tied parameter is frozen if any of its names matches.
        trust_remote_code: Whether to run model code from the folder.
        dtype: Compute dtype of the graph.
        text_only: Whether to use the causal language model even if the folder's class also reads images.
        is_trained: Whether the model is trained. If False, all of its weights are frozen.

    Raises:
        UnsupportedModelError: The folder has no language model, the model has no layers, or quantized weights would
            have to be trained.
        FreezeError: A pattern matches no parameter, or all parameters are frozen.
    """
    is_frozen = any(converter.freezes_weights for converter in converters)
    config = resolve_config(
        config_or_folder, trust_remote_code=trust_remote_code, allow_quantized=is_frozen or not is_trained
    )
    model = build_skeleton(
        resolve_config(config, trust_remote_code=trust_remote_code),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        text_only=text_only,
        converters=converters,
    )
    if not is_trained and not is_frozen:  # a freezing converter has already frozen all parameters except its own
        model.requires_grad_(False)
    return graph_of(model, config, converters, freeze=freeze if is_trained else None, dtype=dtype)


def find_split_mismatch(graph: ModelGraph, block_keys: Collection[str]) -> str:
    """Return the first layer whose experts are split only in the graph or only in the stored blocks, or "".

    Args:
        block_keys: Keys of the blocks in a checkpoint.
    """
    names = {key.rpartition("/")[0].removesuffix(".frozen") for key in block_keys}
    for layer in dict.fromkeys(unit.layer for unit in graph.units if unit.layer):
        is_whole = any(unit.is_layer and unit.layer == layer for unit in graph.units)
        was_whole = layer in names
        if is_whole != was_whole and (was_whole or any(name.startswith(f"{layer}.") for name in names)):
            return layer
    return ""


def num_learned_positions(graph: ModelGraph) -> int | None:
    """Return the number of learned positions, or None if the model has no position embedding."""
    num_positions = getattr(graph.config, "max_position_embeddings", None)
    token_embedding = graph.model.get_input_embeddings()
    if not isinstance(num_positions, int):
        return None
    for module in graph.model.modules():
        is_position = isinstance(module, nn.Embedding) and module is not token_embedding
        if is_position and 0 <= module.num_embeddings - num_positions <= _MAX_POSITION_OFFSET:
            return num_positions
    return None


def graph_of(
    model: PreTrainedModel,
    config: PretrainedConfig,
    converters: Sequence[ModelConverter] = (),
    *,
    freeze: Sequence[str] | None,
    dtype: torch.dtype,
) -> ModelGraph:
    """Divide a skeleton into units and layouts. `freeze` patterns change `requires_grad`; None leaves it unchanged."""
    names = _names_by_parameter(model, converters)
    if freeze is not None:
        _freeze(model, names, freeze)
    units = _UnitCollector(names)

    def is_unit(module: nn.Module) -> bool:
        return any(converter.is_unit(module) for converter in converters)

    for path, module, kind in find_modules(model, is_unit):
        is_optional = any(converter.is_optional(module) for converter in converters)
        subunits: Sequence[InnerUnit] = ()
        if kind == "layer" and not is_optional:
            subunits = next((parts for converter in converters if (parts := converter.split_layer(model, module))), ())
        if not subunits:
            units.add(path, module, kind, is_optional=is_optional and kind != "container")
        for subunit in subunits:
            if subunit.part is None:
                units.add(f"{path}.{subunit.path}", subunit.module, "resident", layer=path)
            else:
                units.add_part(f"{path}.{subunit.path}", subunit.module, subunit.part, layer=path)
    owners = {alias: aliases[0] for _, aliases in names for alias in aliases[1:]}
    assert len(units.covered_names) == len(names), (len(units.covered_names), len(names), type(model).__name__)
    layouts = {layout.name: layout for layout in split_into_parts(units.layouts.values())}
    return ModelGraph(
        config, model, tuple(units.units), layouts, owners, dtype, tuple(converters), frozenset(units.optional_units)
    )


class _UnitCollector:
    """Collector of a model's units and of the layouts of their parameters.

    Args:
        names: Every parameter with all of its names. The owner's name comes first.

    Attributes:
        units: Units in the order in which they were added.
        layouts: Layouts by name. A parameter's owner is the first unit that uses it.
        covered_names: Names of all parameters that are in a layout. Tied parameters have their owner's name.
        optional_units: Indices of units that a micro-batch can skip.
    """

    def __init__(self, names: Sequence[tuple[nn.Parameter, list[str]]]) -> None:
        self._owners = {id(parameter): aliases[0] for parameter, aliases in names}
        self._layout_names: dict[str, str] = {}
        self.units: list[Unit] = []
        self.layouts: dict[str, UnitLayout] = {}
        self.covered_names: set[str] = set()
        self.optional_units: set[int] = set()

    def add(self, path: str, module: nn.Module, kind: UnitKind, *, layer: str = "", is_optional: bool = False) -> None:
        """Add one of the model's modules as a unit.

        Args:
            path: Path of the module in the model.
            layer: Path of the layer that contains the module, or "" outside layers.
            is_optional: Whether a micro-batch can skip the unit.
        """
        parameters = list(module.named_parameters(recurse=kind != "container", remove_duplicate=False))
        new_parameters: dict[str, nn.Parameter] = {}
        for _, parameter in parameters:
            if self._owners[id(parameter)] not in self._layout_names:
                new_parameters[self._owners[id(parameter)]] = parameter
        for layout in build_layouts(path, new_parameters):
            self.layouts[layout.name] = layout
            self._layout_names.update((entry.name, layout.name) for entry in layout.entries)
        self.covered_names.update(new_parameters)
        names = ((local_name, self._owners[id(parameter)]) for local_name, parameter in parameters)
        params = tuple((local_name, owner, self._layout_names[owner]) for local_name, owner in names)
        if is_optional:
            self.optional_units.add(len(self.units))
        is_layer = kind == "layer"
        unit_layer = path if is_layer else layer
        self.units.append(
            Unit(len(self.units), path, module, is_layer, params, kind == "container", unit_layer, bool(layer))
        )

    def add_part(self, path: str, module: nn.Module, part: LayerPart, *, layer: str) -> None:
        """Add a part of a module as a unit.

        Args:
            path: Path of the part, which does not exist in the model itself.
            module: Module that runs the part. It has its own parameters.
            layer: Path of the layer that contains the part.
        """
        names = {name: self._owners[id(parameter)] for name, parameter in part.parent.named_parameters(recurse=False)}
        rows = f"[{part.rows.start}:{part.rows.stop}]"
        parameters = {f"{names[name]}{rows}": parameter for name, parameter in module.named_parameters()}
        (layout,) = build_layouts(path, parameters)
        entries = tuple(
            replace(entry, part_of=name, start=part.rows.start * (entry.numel // len(part.rows)))
            for entry, name in zip(layout.entries, names.values(), strict=True)
        )
        self.layouts[path] = replace(layout, entries=entries)
        self._layout_names.update((name, path) for name in parameters)
        self.covered_names.update(names.values())
        params = tuple((local_name, name, path) for local_name, name in zip(names, parameters, strict=True))
        self.units.append(
            Unit(len(self.units), path, module, False, params, layer=layer, shares_inputs=True, part=part)
        )


def _names_by_parameter(
    model: PreTrainedModel, converters: Sequence[ModelConverter]
) -> list[tuple[nn.Parameter, list[str]]]:
    """Return every parameter with all of its plain names, in definition order. The owner's name comes first."""
    names: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), (parameter, []))[1].append(name)
    integer_names = [aliases[0] for parameter, aliases in names.values() if not parameter.is_floating_point()]
    if integer_names:
        raise UnsupportedModelError(
            type(model).__name__, f"parameters that are not floating-point numbers: {', '.join(integer_names[:4])}"
        )
    return [(parameter, [_plain_name(name, converters) for name in aliases]) for parameter, aliases in names.values()]


def _plain_name(name: str, converters: Sequence[ModelConverter]) -> str:
    for converter in reversed(converters):  # undo the last change first
        name = converter.plain_name(name)
    return name


def _freeze(model: PreTrainedModel, names: list[tuple[nn.Parameter, list[str]]], patterns: Sequence[str]) -> None:
    passthrough = passthrough_modules(model)
    for pattern in patterns:
        matches = [p for p, aliases in names if any(fnmatchcase(alias, pattern) for alias in aliases)]
        if not matches and passthrough is not None and any(fnmatchcase(name, pattern) for name in passthrough.names):
            continue  # the pattern matches pass-through tensors, which are never trained
        if not matches:
            all_names = [alias for _, aliases in names for alias in aliases]
            examples = difflib.get_close_matches(pattern, all_names, n=3, cutoff=0.3) or all_names[:3]
            text = f"model.freeze: the pattern '{pattern}' matches no parameter. Fix it; parameters are, for example, "
            raise FreezeError(text + ", ".join(examples))
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter, _ in names):
        text = f"model.freeze = {list(patterns)} leaves no parameter of {type(model).__name__} to train"
        raise FreezeError(f"{text}. Remove a pattern")
