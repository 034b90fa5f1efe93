"""A model as an ordered set of units: what is streamed, who owns which parameter, and how it lies in blocks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.layout import UnitLayout, build_layouts, in_parts
from megatrain.models.adapters import Adapters, LoraSpec, add_adapters
from megatrain.models.carried import Images, carried_modules, text_modules
from megatrain.models.experts import ExpertsPart, around, cut_experts, drop_attention_weights, part_name
from megatrain.models.skeleton import build_skeleton, resolve_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.models.hub import HubModel

__all__ = [
    "FreezeError",
    "ModelGraph",
    "ModelSpec",
    "Unit",
    "UnitKind",
    "UnsupportedModelError",
    "build_graph",
    "find_layers",
    "find_modules",
    "cut_otherwise",
]

UnitKind = Literal["layer", "resident", "container"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model is trained, and with which kernels.

    Attributes:
        folder: Hugging Face folder with config.json and safetensors.
        tokenizer_folder: that of the tokenizer.
        hub: the model on the hub that the folder is the cache of; None: the folder is the user's.
        chat_template: "auto" for the tokenizer's own, or the path of a .jinja file.
        attn_implementation: "auto", or a name that transformers knows.
        freeze: globs of parameter names that stay as they are.
        from_scratch: start from random weights; only config.json is read.
        compile_backend: of torch.compile for the layers; None: they are not compiled.
        use_liger_kernel: norms and gated MLPs by liger-kernel.
        mlp_rows: tokens that an MLP runs over at a time; 0: all of a micro-batch.
        lora: adapters that are trained in place of the model; None: there are none.
        images: whether rows may have images, and what reads them is trained.
        is_trained: False: it is only run, with all of it frozen.
        cuts_experts: fused experts that are larger than a part are several units, of some experts each.
    """

    folder: str
    tokenizer_folder: str
    chat_template: str = "auto"
    attn_implementation: str = "auto"
    freeze: tuple[str, ...] = ()
    from_scratch: bool = False
    compile_backend: str | None = None
    use_liger_kernel: bool = False
    mlp_rows: int = 0
    hub: HubModel | None = None
    lora: LoraSpec | None = None
    images: Images = "off"
    is_trained: bool = True
    cuts_experts: bool = False

    @property
    def name(self) -> str:
        """The id on the hub, or the folder."""
        return self.folder if self.hub is None else self.hub.id

    def build(self, dtype: torch.dtype) -> ModelGraph:
        """Return the graph of the model, on the meta device. Raises as :func:`build_graph`."""
        return build_graph(
            self.folder,
            attn_implementation=self.attn_implementation,
            freeze=self.freeze,
            dtype=dtype,
            text_only=self.from_scratch,
            lora=self.lora,
            images=self.images,
            is_trained=self.is_trained,
            cuts_experts=self.cuts_experts,
        )


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
        if any(parameter is not None for parameter in module._parameters.values()) or _has_adapter(module):
            if layer_ids.isdisjoint(map(id, module.modules())):
                found.append((path, module, "resident"))
                return
            found.append((path, module, "container"))
        for leaf, child in module.named_children():
            visit(f"{path}.{leaf}" if path else leaf, child)

    visit("", model)
    return found


def _has_adapter(module: nn.Module) -> bool:
    """Return whether a module is a layer of peft's around one of the model's: its parameters are used together."""
    return isinstance(module._modules.get("base_layer"), nn.Module)


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


_MAX_POSITION_OFFSET = 2  # some families leave the first rows of their position embedding unused


class FreezeError(Exception):
    """A `freeze` pattern names no parameter, or nothing is left to train."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose `forward` the engine runs itself, with weights that are only there for that time.

    Attributes:
        index: Position in `ModelGraph.units`.
        name: Path of the module in the model.
        module: The module; its parameters are on the meta device except while the engine runs it.
        is_layer: Whether it is one of the model's layers (else an embedding, norm, head, ...).
        layer: Path of the layer that it is or, where the layer is several units, is a module of; empty: of none.
        params: `(dotted name inside the module, full name of the owner's parameter, name of the owner's layout)`. A
            tied parameter appears in every unit that uses it, with the same owner.
        is_container: The unit is only the parameters that `module` owns directly, as it contains layers. They are
            visited at the very beginning of a forward.
        share: The part of its tokens that it is expected to compute with: some of a layer's experts get so many.
        shares_inputs: Its inputs may be those of units before it, in the same layer: they are saved once.
    """

    index: int
    name: str
    module: nn.Module
    is_layer: bool
    params: tuple[tuple[str, str, str], ...]
    is_container: bool = False
    layer: str = ""
    share: float = 1.0
    shares_inputs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelGraph:
    """A model without weights, ready to be streamed.

    Attributes:
        config: The Hugging Face configuration, as given.
        model: The skeleton: parameters on the meta device, buffers real (on the CPU until a runner moves them).
        units: All units in definition order; together they own every parameter.
        layouts: Block groups by name; one or two (`<unit>`, `<unit>.frozen`) for every unit that owns parameters.
        owner_of: Other name of a tied parameter -> name under which its owner's layout has it.
        dtype: What the skeleton computes in.
        adapters: LoRA layers of the skeleton, or None. Names of layouts are those of the model without them.
        image_units: Indexes of the units that only images reach: a micro-batch without any leaves them out.
    """

    config: PretrainedConfig
    model: PreTrainedModel
    units: tuple[Unit, ...]
    layouts: Mapping[str, UnitLayout]
    owner_of: Mapping[str, str]
    dtype: torch.dtype
    adapters: Adapters | None = None
    image_units: frozenset[int] = frozenset()

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which the model is as in its folder: no adapters in it, and none in its names."""
        return nullcontext() if self.adapters is None else self.adapters.detached()

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(layout.num_parameters for layout in self.layouts.values())

    @property
    def trainable_parameters(self) -> tuple[str, ...]:
        """Full names of the parameters that are trained, in layout order."""
        trained = (layout for layout in self.layouts.values() if layout.trainable)
        return tuple(dict.fromkeys(entry.parameter for layout in trained for entry in layout.entries))

    def persistent_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that a checkpoint holds; the loader fills them, the others are final already."""
        in_checkpoint = self.model.state_dict(keep_vars=True)
        return tuple(name for name, _ in self.model.named_buffers() if name in in_checkpoint)


def build_graph(
    config_or_folder: PretrainedConfig | Path | str,
    *,
    attn_implementation: str = "auto",
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    text_only: bool = False,
    lora: LoraSpec | None = None,
    images: Images = "off",
    is_trained: bool = True,
    cuts_experts: bool = False,
) -> ModelGraph:
    """Build a model's skeleton and find its units; no weight is read and no parameter takes memory.

    Args:
        config_or_folder: A Hugging Face configuration, or a folder with `config.json`.
        attn_implementation: As in transformers; "auto" leaves the choice to it.
        freeze: Globs over full parameter names (any name of a tied one): no gradient, no optimizer state.
        trust_remote_code: Allow model code that comes with the model.
        dtype: What the model computes in; a `LayerRunner` of the graph uses the same.
        text_only: Take the causal language model where the folder is of a class that reads images as well.
        lora: Adapters, to train or only to run; the model's own weights are frozen then.
        images: As in `build_skeleton`.
        is_trained: False: it is only run; its own weights are frozen.
        cuts_experts: As in `ModelSpec`.

    Raises:
        UnsupportedModelError: no language model, no layers, or quantized weights.
        FreezeError: a pattern matches nothing, or everything is frozen.
        AdapterError: the model has no place for such adapters.
    """
    config = resolve_config(
        config_or_folder, trust_remote_code=trust_remote_code, takes_quantized=lora is not None or not is_trained
    )
    model = build_skeleton(
        resolve_config(config, trust_remote_code=trust_remote_code),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        text_only=text_only,
        images=images,
    )
    adapters = None if lora is None else add_adapters(model, lora, images)
    if not is_trained and adapters is None:  # beside adapters they are frozen as it is, in layouts of their own
        model.requires_grad_(False)
    return graph_of(
        model,
        config,
        freeze=freeze if is_trained else None,
        dtype=dtype,
        adapters=adapters,
        reads_images=images != "off",
        cuts_experts=cuts_experts,
    )


def cut_otherwise(graph: ModelGraph, stored: Collection[str]) -> str:
    """Return a layer whose experts stored blocks have in parts and the graph has not, or the other way; "": none.

    Args:
        graph: of the model.
        stored: keys of blocks.
    """
    names = {key.rpartition("/")[0].removesuffix(".frozen") for key in stored}
    for layer in dict.fromkeys(unit.layer for unit in graph.units if unit.layer):
        is_whole = any(unit.is_layer and unit.layer == layer for unit in graph.units)
        was_whole = layer in names
        if is_whole != was_whole and (was_whole or any(name.startswith(f"{layer}.") for name in names)):
            return layer
    return ""


def num_learned_positions(graph: ModelGraph) -> int | None:
    """Return how many positions the model has learned embeddings for; None where it computes positions."""
    most = getattr(graph.config, "max_position_embeddings", None)
    words = graph.model.get_input_embeddings()
    if not isinstance(most, int):
        return None
    for module in graph.model.modules():
        is_other = isinstance(module, nn.Embedding) and module is not words
        if is_other and 0 <= module.num_embeddings - most <= _MAX_POSITION_OFFSET:
            return most
    return None


def graph_of(
    model: PreTrainedModel,
    config: PretrainedConfig,
    *,
    freeze: Sequence[str] | None,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    reads_images: bool = False,
    cuts_experts: bool = False,
) -> ModelGraph:
    """Find the units and layouts of a skeleton; its parameters' `requires_grad` is set by `freeze`, None: as it is."""
    names = _names_by_parameter(model)
    if adapters is not None:
        names = [(parameter, [adapters.plain_name(name) for name in aliases]) for parameter, aliases in names]
    if freeze is not None:
        _freeze(model, names, freeze)
    owner = {id(parameter): aliases[0] for parameter, aliases in names}
    num_elements = sum(parameter.numel() for parameter, _ in names)
    units: list[Unit] = []
    layouts: dict[str, UnitLayout] = {}
    layout_of: dict[str, str] = {}
    covered: set[str] = set()

    def add(path: str, module: nn.Module, kind: UnitKind, *, of_layer: str = "") -> None:
        parameters = list(module.named_parameters(recurse=kind != "container", remove_duplicate=False))
        own: dict[str, nn.Parameter] = {}
        for _, parameter in parameters:
            if owner[id(parameter)] not in layout_of:
                own[owner[id(parameter)]] = parameter
        for layout in build_layouts(path, own):
            layouts[layout.name] = layout
            layout_of.update((entry.name, layout.name) for entry in layout.entries)
        covered.update(own)
        params = tuple(
            (local, owner[id(parameter)], layout_of[owner[id(parameter)]]) for local, parameter in parameters
        )
        is_layer = kind == "layer"
        layer = path if is_layer else of_layer
        unit = Unit(
            len(units), path, module, is_layer, params, kind == "container", layer, shares_inputs=bool(of_layer)
        )
        units.append(unit)

    def add_part(path: str, whole: nn.Module, part: ExpertsPart, layer: str) -> None:
        inside = {name: owner[id(parameter)] for name, parameter in whole.named_parameters(recurse=False)}
        rows = f"[{part.experts.start}:{part.experts.stop}]"
        own = {f"{inside[name]}{rows}": parameter for name, parameter in part.named_parameters()}
        (layout,) = build_layouts(path, own)
        entries = tuple(
            replace(entry, part_of=name, first=part.experts.start * (entry.numel // len(part.experts)))
            for entry, name in zip(layout.entries, inside.values(), strict=True)
        )
        layouts[path] = replace(layout, entries=entries)
        layout_of.update((name, path) for name in own)
        covered.update(inside.values())
        params = tuple((local, name, path) for local, name in zip(inside, own, strict=True))
        share = len(part.experts) / part.num_all
        units.append(Unit(len(units), path, part, False, params, layer=layer, share=share, shares_inputs=True))

    text = {id(module) for module in text_modules(model)} if reads_images else set()
    for path, module, kind in find_modules(model):
        may_cut = cuts_experts and kind == "layer" and (not reads_images or id(module) in text)
        cut = cut_experts(module, num_elements) if may_cut else []
        if not cut:
            add(path, module, kind)
            continue
        drop_attention_weights(model, module)
        parts_of = {id(each.module): each.parts for each in cut}
        for local, child in around(module, [each.module for each in cut]):
            for number, part in enumerate(parts_of.get(id(child), ())):
                add_part(part_name(f"{path}.{local}", number), child, part, path)
            if id(child) not in parts_of:
                add(f"{path}.{local}", child, "resident", of_layer=path)
    owner_of = {alias: aliases[0] for _, aliases in names for alias in aliases[1:]}
    assert len(covered) == len(names), (len(covered), len(names), type(model).__name__)
    layouts = {layout.name: layout for layout in in_parts(layouts.values())}
    image_units = frozenset(
        unit.index
        for unit in units
        if reads_images
        and not unit.is_container
        and not isinstance(unit.module, ExpertsPart)  # only text's are cut
        and id(unit.module) not in text
    )
    return ModelGraph(config, model, tuple(units), layouts, owner_of, dtype, adapters, image_units)


def _names_by_parameter(model: PreTrainedModel) -> list[tuple[nn.Parameter, list[str]]]:
    """Return every parameter with all its names, the owner's name first: the first in definition order."""
    names: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), (parameter, []))[1].append(name)
    integer = [aliases[0] for parameter, aliases in names.values() if not parameter.is_floating_point()]
    if integer:
        raise UnsupportedModelError(
            type(model).__name__, f"parameters that are not floating-point numbers: {', '.join(integer[:4])}"
        )
    return list(names.values())


def _freeze(model: PreTrainedModel, names: list[tuple[nn.Parameter, list[str]]], patterns: Sequence[str]) -> None:
    carried = carried_modules(model)
    for pattern in patterns:
        matched = [p for p, aliases in names if any(fnmatchcase(alias, pattern) for alias in aliases)]
        if not matched and carried is not None and any(fnmatchcase(name, pattern) for name in carried.names):
            continue  # never trained
        if not matched:
            everything = [alias for _, aliases in names for alias in aliases]
            close = difflib.get_close_matches(pattern, everything, n=3, cutoff=0.3) or everything[:3]
            text = f"model.freeze: the pattern '{pattern}' matches no parameter. Write one that does; there are e.g. "
            raise FreezeError(text + ", ".join(close))
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter, _ in names):
        text = f"model.freeze = {list(patterns)} leaves no parameter of {type(model).__name__} to train"
        raise FreezeError(f"{text}. Leave some of it out")
