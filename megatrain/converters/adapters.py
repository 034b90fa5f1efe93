"""LoRA: adapters in a model with frozen weights, and adapter folders in peft's format.

peft injects its layers into the skeleton, so peft's code selects modules and computes scaling, dropout and DoRA. The
engine streams adapter weights like all other weights. A unit has one trained block with adapters and one frozen block
with the model's weights. Adapters do not change the names of the model's weights, for example
``model.layers.0.self_attn.q_proj.weight``. Adapter weights have the same names as in the adapter file, for example
``model.layers.0.self_attn.q_proj.lora_A.weight``.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.base.layout import entries_within
from megatrain.base.limited import LimitError, run_limited
from megatrain.converters.multimodal import non_text_modules
from megatrain.models.checkpoint_names import tied_groups
from megatrain.models.converter import ConvertedGraph, ModelConverter, ModelSettings, ReadMaster, WeightSource
from megatrain.models.export import (
    ExportTargetError,
    ShardWriter,
    atomic_folder,
    check_target,
    copy_tokenizer,
    plan_file,
    write_record,
)
from megatrain.models.folder import ADAPTER_CONFIG, ModelFolderError, TensorFile, join_names
from megatrain.models.initialize import name_seed
from megatrain.models.internals import is_conv1d
from megatrain.models.passthrough import passthrough_modules
from megatrain.models.task_head import head_modules, head_of
from tiered.errors import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.converters.multimodal import Images
    from megatrain.models.graph import ModelGraph
    from megatrain.models.table import LoraConfig

__all__ = [
    "ADAPTER_WEIGHTS",
    "AdapterError",
    "AdapterWeights",
    "Adapters",
    "adapters_of",
    "export_adapter",
    "find_base_model",
    "read_adapter_settings",
]

ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Prefix that peft adds to all names in adapter files.
FILE_PREFIX = "base_model.model."
_MAX_REASON_LENGTH = 300
_ADAPTER_NAME = "default"  # name of the adapter in peft's layers


class AdapterError(Exception):
    """Error for adapters that cannot be created, or an adapter folder that cannot be used."""


def _peft_config(table: LoraConfig) -> Any:
    """Return peft's ``LoraConfig``.

    Raises:
        AdapterError: If peft is not installed or refuses the settings, or if the folder has no usable settings.
    """
    peft = _import_peft()
    if table.adapter_name_or_path is not None:
        config = read_adapter_settings(table.adapter_name_or_path)
        config.lora_dropout = table.lora_dropout
        config.inference_mode = False
        return config
    modules = table.target_modules
    try:
        return peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=table.r,
            lora_alpha=int(table.lora_alpha) if table.lora_alpha.is_integer() else table.lora_alpha,
            lora_dropout=table.lora_dropout,
            target_modules=None if modules == "auto" else modules if isinstance(modules, str) else list(modules),
            exclude_modules=list(table.exclude_modules) or None,
            modules_to_save=list(table.modules_to_save) or None,
            layers_to_transform=list(table.layers_to_transform) or None,
            rank_pattern=dict(table.rank_pattern),
            alpha_pattern=dict(table.alpha_pattern),
            use_rslora=table.use_rslora,
            use_dora=table.use_dora,
            init_lora_weights=table.init_lora_weights,
            target_parameters=list(table.target_parameters) or None,
        )
    except (ValueError, TypeError) as error:
        raise AdapterError(f"[lora]: peft refuses these settings: {_summarize_error(error)}") from error


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise AdapterError(f"[lora] needs the package peft ({error}). Install it: {install_command('lora')}") from error
    return peft


def _summarize_error(error: Exception) -> str:
    # Remove the module tree that peft prints in double parentheses.
    text = " ".join(re.sub(r"\(\s*\(.*\)\s*\)", "", str(error), flags=re.DOTALL).split()).rstrip(".")
    return text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]} ..."


@dataclass(frozen=True, slots=True)
class _PeftLayer:
    """Peft layer in a model. ``parent._modules[leaf]`` is ``layer``, which wraps ``base``.

    Experts have one nested peft layer per weight, so there can be other peft layers between ``layer`` and ``base``.
    """

    path: str
    parent: nn.Module
    leaf: str
    layer: Any
    base: nn.Module


class Adapters(ModelConverter):
    """Converter that adds LoRA layers to a graph, and maps tensor names between the graph and adapter files.

    Args:
        table: Config table ``[lora]``.

    Attributes:
        config: peft's ``LoraConfig`` with the selected modules. ``convert`` sets this and the other attributes.
        names: Names of all trained tensors, in adapters and in ``modules_to_save``.
        num_layers: Number of modules with adapters.
    """

    freezes_weights = True

    def __init__(self, table: LoraConfig, images: Images = "off") -> None:
        self._table, self._images = table, images

    @classmethod
    def for_model(cls, settings: ModelSettings) -> Adapters | None:
        """Return a converter if the run has adapters."""
        return None if settings.lora is None else cls(settings.lora, settings.table.images)

    def convert(self, model: PreTrainedModel) -> None:
        """Inject LoRA layers into a skeleton, and freeze all weights except those in ``modules_to_save``.

        In a model that reads images, only the language model gets adapters. Trained image modules are saved in full.
        If the config specifies an adapter folder, the folder determines the modules.

        Raises:
            AdapterError: If no module matches, or if a module or a setting is not supported.
        """
        non_text = _non_text_paths(model, self._images)
        self.config = _add_adapters(model, self._table, self._images, non_text)
        self._find_layers(model)
        key = _selecting_key(self._table)
        for path, layer in self._layers.items():
            _check_layer(key, path, layer)
            if hasattr(layer, "parameter_name"):
                layer.__dict__["forward"] = partial(_run_adapted_module, layer)
            for name, parameter in layer.named_parameters():
                if not name.startswith("base_layer."):
                    parameter.data = parameter.data.to(model.dtype)
        _train_modules(model, list(self.config.modules_to_save or ()), self)
        self.names = tuple(self.plain_name(name) for name, p in model.named_parameters() if p.requires_grad)
        self.adapter_names = frozenset(name for name in self.names if self.layer_of(name) is not None)
        prefixes = tuple(f"{path}." for path in non_text)
        if self._images == "trained" and not any(name.startswith(prefixes) for name in self.names):
            raise AdapterError(
                f'{key} has no weights for the image modules, but model.images = "trained" trains them. Write '
                'model.images = "frozen"'
            )

    def _find_layers(self, model: PreTrainedModel) -> None:
        from peft.tuners.lora import LoraLayer

        self._peft_layers: list[_PeftLayer] = []
        self._layers: dict[str, Any] = {}  # peft layers by path, including nested layers
        self._path_by_weight: dict[str, str] = {}  # path of the peft layer that adapts a weight, by weight name
        for path, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            parent_path, _, leaf = path.rpartition(".")
            if leaf != "base_layer":
                parent = model.get_submodule(parent_path)
                self._peft_layers.append(_PeftLayer(path, parent, leaf, module, module.get_base_layer()))
            self._layers[path] = module
            self._path_by_weight[f"{self._peft_layers[-1].path}.{getattr(module, 'parameter_name', 'weight')}"] = path
        self.num_layers = len(self._layers)
        self._paths = {peft_layer.path for peft_layer in self._peft_layers}

    def is_unit(self, module: nn.Module) -> bool:
        """Return whether a module is a peft layer, which forms one unit with the module that it wraps."""
        return isinstance(module._modules.get("base_layer"), nn.Module)

    def plain_name(self, name: str) -> str:
        """Return the name that a model tensor has without adapters, or an adapter tensor's name in adapter files."""
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if path in self._paths:
                depth = next(index for index, part in enumerate(parts[end:]) if part != "base_layer")
                suffix = parts[end + depth :]
                if not suffix[0].startswith("lora_"):
                    return ".".join([path, *suffix])
                if suffix[0] == "lora_magnitude_vector":
                    suffix = suffix[:1]
                return ".".join([path, *["base_layer"] * depth, *(part for part in suffix if part != _ADAPTER_NAME)])
        return name

    def layer_of(self, name: str) -> Any:
        """Return the peft layer that owns an adapter tensor, or None for a tensor of the model."""
        path, _, suffix = name.rpartition(".lora_")
        return self._layers.get(path) if suffix else None

    @contextmanager
    def plain_model(self) -> Iterator[None]:
        """Remove the adapters within the context, so that modules and their names match the model folder."""
        for peft_layer in self._peft_layers:
            peft_layer.parent._modules[peft_layer.leaf] = peft_layer.base
        try:
            yield
        finally:
            for peft_layer in self._peft_layers:
                peft_layer.parent._modules[peft_layer.leaf] = peft_layer.layer

    # -- weights of new adapters -----------------------------------------------------------------------------------

    def initialize(self, views: Mapping[str, Tensor], base_weights: Mapping[str, Tensor], seed: int) -> None:
        """Initialize adapter tensors by peft's rules. Random values depend only on the seed and each tensor's name.

        Args:
            views: fp32 tensors to fill, by name.
            base_weights: fp32 weights, by module name, of the modules that `dora_modules` returns. They set magnitudes.
        """
        for name, view in views.items():
            kind = name.rpartition(".lora_")[2].partition(".")[0]
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            with torch.no_grad():
                if kind == "A" and self.config.init_lora_weights == "gaussian":
                    view.normal_(std=1 / view.shape[0], generator=generator)
                elif kind == "A":
                    nn.init.kaiming_uniform_(view, a=math.sqrt(5), generator=generator)
                elif kind == "embedding_B":
                    view.normal_(generator=generator)
                elif kind == "magnitude_vector":
                    layer = self.layer_of(name)
                    weight = base_weights[name.rpartition(".lora_")[0]]
                    # B is zero, so the initial magnitudes are the norms of the weight's rows.
                    rows = weight.T if getattr(layer, "fan_in_fan_out", False) else weight
                    view.copy_(torch.linalg.norm(rows, dim=1))
                else:
                    view.zero_()

    def dora_modules(self, names: Sequence[str]) -> list[str]:
        """Return the DoRA modules whose base weights `initialize` needs for the adapter tensors ``names``."""
        return [name.rpartition(".lora_")[0] for name in names if name.endswith(".lora_magnitude_vector")]

    # -- merging -----------------------------------------------------------------------------------------------------

    def adapter_tensors(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapter tensors that change a weight. Empty if the weight has no adapter."""
        path = self._path_by_weight.get(name)
        if path is None:
            return ()
        parameters = self._layers[path].named_parameters(prefix=path)
        return tuple(self.plain_name(local) for local, _ in parameters if not local.startswith(f"{path}.base_layer."))

    def merge(self, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Merge an adapter into a weight, like peft's ``merge_and_unload``, and return the result in fp32.

        Args:
            name: Name of a weight that has an adapter.
            weight: The weight without the adapter.
            tensors: All tensors that ``adapter_tensors`` lists, by name.
        """
        path = self._path_by_weight[name]
        layer = self._layers[path]
        entries: list[tuple[dict[str, Any], str, Tensor]] = [
            (layer.get_base_layer()._parameters, name.rpartition(".")[2], weight.detach().float().clone())
        ]
        for local_name, _ in layer.named_parameters():
            if not local_name.startswith("base_layer."):
                module_path, _, leaf = local_name.rpartition(".")
                value = tensors[self.plain_name(f"{path}.{local_name}")].float()
                entries.append((layer.get_submodule(module_path)._parameters, leaf, value))
        originals = [registry[leaf] for registry, leaf, _ in entries]
        try:
            for registry, leaf, value in entries:
                registry[leaf] = nn.Parameter(value, requires_grad=False)
            with torch.no_grad():
                layer.merge()
                registry, leaf, _ = entries[0]
                merged_weight: Tensor = registry[leaf].data
        finally:
            for (registry, leaf, _), value in zip(entries, originals, strict=True):
                registry[leaf] = value
            layer.merged_adapters.clear()
            layer._caches.clear()
        return merged_weight

    def export_source(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return a source of weights that merges the adapters. It needs RAM for one additional weight.

        Raises:
            ExportTargetError: If `check_merge` fails.
        """
        self.check_merge(graph)
        return _merged_source(graph, self, source)

    def check_merge(self, graph: ConvertedGraph) -> None:
        """Check that the adapters can be merged into the model's weights.

        Raises:
            ExportTargetError: If a module with an adapter shares its weight with another module.
        """
        with self.plain_model():
            tied_names = {name: names for names in tied_groups(graph.model) for name in names}
        for weight in self._path_by_weight:
            other_names = [name for name in tied_names.get(weight, ()) if name != weight]
            if other_names:
                raise ExportTargetError(
                    f"the adapter of {weight} cannot be merged: {other_names[0]} is the same tensor, and would change "
                    "with it. Export the adapter alone (export.merge = false), or leave that module out"
                )

    def settings(self, base_model: str) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``.

        Args:
            base_model: Folder or hub id of the model.
        """
        values: dict[str, Any] = self.config.to_dict()
        values.update(base_model_name_or_path=base_model, inference_mode=True)
        return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that have adapters."""
        return tuple(peft_layer.path for peft_layer in self._peft_layers)


def adapters_of(graph: ModelGraph) -> Adapters | None:
    """Return the adapters of a graph, or None if it has no adapters."""
    return next((converter for converter in graph.converters if isinstance(converter, Adapters)), None)


def _selecting_key(table: LoraConfig) -> str:
    """Return the config key that determines which modules get adapters."""
    folder = table.adapter_name_or_path
    return f"lora.adapter_name_or_path ({folder})" if folder else "lora.target_modules"


def _non_text_paths(model: PreTrainedModel, images: Images) -> list[str]:
    """Return the paths of modules that get no adapters because they do not read text."""
    passthrough = passthrough_modules(model)
    return list(passthrough.paths) if passthrough is not None else non_text_modules(model) if images != "off" else []


def _add_adapters(model: PreTrainedModel, table: LoraConfig, images: Images, non_text: Sequence[str]) -> Any:
    """Inject peft's layers into a skeleton. Return peft's config with the selected modules."""
    peft = _import_peft()
    config, is_new = _peft_config(table), table.adapter_name_or_path is None
    _check_patterns(config, [name for name, _ in model.named_modules()], table)
    _check_supported(config, model)
    if non_text and (is_new or passthrough_modules(model) is not None):
        config.exclude_modules = _extend_excluded(config.exclude_modules, non_text)
    head = head_of(model)
    # A new head starts from random weights, so it must be trained and saved.
    if head is not None and is_new:
        config.task_type = "SEQ_CLS"
        config.exclude_modules = _extend_excluded(config.exclude_modules, head_modules(model))
        config.modules_to_save = [*(config.modules_to_save or ()), *head_modules(model)]
    if images == "trained" and is_new:
        config.modules_to_save = [*(config.modules_to_save or ()), *non_text_modules(model, audio=False)]
    saved_modules = config.modules_to_save
    # Hide these modules from peft, which would copy them. The engine trains them in place.
    config.modules_to_save = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore peft's warnings about tied weights and about transformers
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER_NAME, low_cpu_mem_usage=True)
        except ValueError as error:
            raise AdapterError(
                f"{_selecting_key(table)}: {_summarize_error(error)}. {type(model).__name__} has e.g. "
                f"{_example_module_names(model)}"
            ) from error
    vars(model).pop("peft_config", None)  # otherwise transformers would treat the model as a peft model
    config.modules_to_save = list(saved_modules or ()) or None
    return config


_MODULE_NAME = re.compile(r"[\w.]+")


def _check_patterns(config: Any, names: Sequence[str], table: LoraConfig) -> None:
    """Check the patterns in peft's settings with a time limit, because untrusted adapters can contain slow patterns.

    Raises:
        AdapterError: If a pattern is invalid or takes too long.
    """
    layers = config.layers_pattern or ()
    templates: dict[str, Sequence[str]] = {  # values that peft inserts into each of its pattern templates
        "{}": [value for value in (config.target_modules, config.exclude_modules) if isinstance(value, str)],
        r"(?:^|.*?\.){}\.(?P<idx>\d+)\.": [layers] if isinstance(layers, str) else layers,
        r"(^|.*\.){}($|\..*)": config.modules_to_save or (),
        r"(.*\.)?({})$": [*(config.rank_pattern or ()), *(config.alpha_pattern or ())],
    }
    pairs = [(t, value) for t, values in templates.items() for value in values if not _MODULE_NAME.fullmatch(value)]
    patterns = [template.replace("{}", value) for template, value in pairs if value != "all-linear"]
    if not patterns:
        return

    def match_all() -> str:
        for pattern in patterns:
            try:
                expression = re.compile(pattern)
            except (re.error, RecursionError) as error:
                return f"{pattern!r} is not a regular expression: {error}"
            for name in names:
                expression.fullmatch(name)
                expression.match(name)
        return ""

    file = "" if table.adapter_name_or_path is None else f" ({Path(table.adapter_name_or_path, ADAPTER_CONFIG)})"
    try:
        problem = run_limited(match_all)
    except LimitError as error:
        example = max(patterns, key=len)
        problem = f"{example if len(example) < 200 else f'{example[:200]} ...'!r} cannot be matched: {error}"
    if problem:
        raise AdapterError(f"{_selecting_key(table)}{file}: {problem}. List the names of the modules instead")


def _check_layer(key: str, path: str, layer: Any) -> None:
    """Raise an error if the module that an adapter wraps is not supported."""
    base = layer.get_base_layer()
    if not (hasattr(layer, "parameter_name") or isinstance(base, nn.Linear | nn.Embedding) or is_conv1d(base)):
        raise AdapterError(
            f"{key}: {path} is a {type(base).__name__}; only linear layers and embeddings get adapters. Leave it out"
        )
    if layer.lora_variant and isinstance(base, nn.Embedding):
        raise AdapterError(f"lora.use_dora: {path} is an embedding. Leave it out of target_modules")


def _extend_excluded(excluded: Any, paths: Sequence[str]) -> str:
    """Return peft's ``exclude_modules`` extended by the modules at ``paths`` and their submodules."""
    patterns = [rf"({'|'.join(map(re.escape, paths))})(\..*)?"]
    if isinstance(excluded, str):
        patterns.append(f"({excluded})")
    elif excluded:
        patterns.append(rf"(.*\.)?({'|'.join(map(re.escape, sorted(excluded)))})")
    return "|".join(patterns)


def _run_adapted_module(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module whose parameter has an adapter. This function replaces the forward of peft's ``ParamWrapper``.

    peft's forward registers a parametrization, which needs an ``nn.Parameter``, but the parameter is a leased view.
    """
    parameters, name = layer.get_base_layer()._parameters, layer.parameter_name
    weight = parameters[name]
    if layer.num_experts > 1:
        a, b, scaling = layer.get_delta_factors(_ADAPTER_NAME)
        parameters[name] = torch.baddbmm(weight, a, b, alpha=scaling)
    else:
        parameters[name] = weight + layer.get_delta_weight(_ADAPTER_NAME)
    try:
        return layer.base_layer(*args, **kwargs)
    finally:
        parameters[name] = weight


def _check_supported(config: Any, model: PreTrainedModel) -> None:
    """Raise an error that names the unsupported peft features in a config."""
    features = {
        "bias": config.bias != "none",
        "lora_bias": config.lora_bias,
        "trainable_token_indices": config.trainable_token_indices is not None,
        "layer_replication": config.layer_replication is not None,
        "alora_invocation_tokens": config.alora_invocation_tokens is not None,
        "use_qalora": config.use_qalora,
    }
    for name in ("use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config"):
        features[name] = getattr(config, name, None) is not None
    used_features = [name for name, is_used in features.items() if is_used]
    if used_features:
        raise AdapterError(f"[lora]: {join_names(used_features)} of peft is not supported. Leave it out")
    if not (isinstance(config.init_lora_weights, bool) or config.init_lora_weights == "gaussian"):
        raise AdapterError(
            f'lora.init_lora_weights = {config.init_lora_weights!r} is not supported. Write true or "gaussian"; or '
            "initialize the adapter with peft and set its folder: lora.adapter_name_or_path"
        )


def _example_module_names(model: PreTrainedModel) -> str:
    suffixes = {
        name.rpartition(".")[2]: None for name, m in model.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)
    }
    return join_names(list(suffixes), limit=8)


def _train_modules(model: PreTrainedModel, suffixes: Sequence[str], adapters: Adapters) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for suffix in suffixes:
        matches = [(path, m) for path, m in model.named_modules() if path.endswith(suffix)]
        if not matches:
            raise AdapterError(f"lora.modules_to_save: no module's name ends in '{suffix}'. An example is lm_head")
        for path, module in matches:
            if any(adapted_path == path or adapted_path.startswith(f"{path}.") for adapted_path in adapters.modules):
                raise AdapterError(
                    f"lora.modules_to_save: {path} also has adapters. Remove it from one of the two keys"
                )
            for parameter in module.parameters():
                other_names = [name for name in names[id(parameter)] if not name.startswith(f"{path}.")]
                if other_names:
                    raise AdapterError(
                        f"lora.modules_to_save: {path} shares its weight with {other_names[0]}, which would also be "
                        "trained but not saved. Leave it out, or give it adapters: lora.target_modules"
                    )
                parameter.requires_grad_(True)


def _merged_source(graph: ConvertedGraph, adapters: Adapters, source: WeightSource) -> WeightSource:
    layouts = {entry.name: layout for layout in graph.layouts.values() for entry in layout.entries}
    entries = {entry.name: entry for layout in graph.layouts.values() for entry in layout.entries}

    @contextmanager
    def open_merged(layout: UnitLayout) -> Iterator[ReadMaster]:
        tensor_names = {entry.name: adapters.adapter_tensors(entry.name) for entry in layout.entries}
        other_layouts = {layouts[name].name: layouts[name] for names in tensor_names.values() for name in names}
        with ExitStack() as stack:
            read = stack.enter_context(source(layout))
            readers = {name: stack.enter_context(source(other_layout)) for name, other_layout in other_layouts.items()}
            cache: dict[str, Tensor] = {}  # holds at most one merged weight

            def read_entry(entry: TensorEntry, read: ReadMaster) -> Tensor:
                return read(entry.offset, entry.offset + entry.numel).view(entry.shape)

            def merge_entry(entry: TensorEntry) -> Tensor:
                if entry.name not in cache:
                    cache.clear()
                    tensors = {
                        name: read_entry(entries[name], readers[layouts[name].name])
                        for name in tensor_names[entry.name]
                    }
                    cache[entry.name] = adapters.merge(entry.name, read_entry(entry, read), tensors).view(-1)
                return cache[entry.name]

            def read_merged(start: int, stop: int) -> Tensor:
                out = read(start, stop)
                for entry, begin, end in entries_within(layout, start, stop):
                    if tensor_names[entry.name]:
                        out = out.clone()  # `out` may be a view of the block, which must not change
                        out[entry.offset + begin - start : entry.offset + end - start] = merge_entry(entry)[begin:end]
                return out

            yield read_merged

    return open_merged


# -- folders of adapters -----------------------------------------------------------------------------------------------


def find_base_model(folder: Path) -> str:
    """Return the folder or hub name of an adapter's base model.

    Raises:
        AdapterError: If the adapter specifies no base model, or a folder that does not exist.
    """
    path = folder / ADAPTER_CONFIG
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        model = None
    if not isinstance(model, str) or not model:
        raise AdapterError(f"{path} specifies no base model. Export the run again")
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise AdapterError(f"{folder}: its base model is gone: {model}. Restore it, or write its new path into {path}")
    return model


def read_adapter_settings(folder: Path | str) -> Any:
    """Return peft's ``LoraConfig`` from an adapter folder.

    Raises:
        AdapterError: If the folder has no adapter settings, or if the adapter is not LoRA.
    """
    peft = _import_peft()
    path = Path(folder, ADAPTER_CONFIG)
    prefix = "lora.adapter_name_or_path: "
    if not Path(folder).is_dir():
        problem = "is not a folder" if Path(folder).exists() else "does not exist"
        raise AdapterError(f"{prefix}{folder} {problem}. Name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{prefix}{path} is missing. Name a folder that peft wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{prefix}{path} cannot be read as JSON ({error}). Copy it again") from error
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "LORA":
        raise AdapterError(f"{prefix}{path} is an adapter of type {kind!r}; this program trains LoRA")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.LoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"{prefix}{path}: peft cannot use it: {_summarize_error(error)}. Copy it again") from error


_BASE_LAYER = ".base_layer.weight"
_OLD_MAGNITUDE = re.compile(r"\.lora_magnitude_vector(\.weight)?$")


class AdapterWeights:
    """Tensors in an adapter folder, under the names that `Adapters` uses.

    Raises:
        AdapterError: If the file is missing or damaged, or was written for a different model or different settings.
    """

    def __init__(self, folder: Path | str, adapters: Adapters, shapes: Mapping[str, Sequence[int]]) -> None:
        location = f"lora.adapter_name_or_path: {Path(folder, ADAPTER_WEIGHTS)}"
        if not Path(folder, ADAPTER_WEIGHTS).is_file():
            has_pickle = Path(folder, "adapter_model.bin").is_file()
            advice = (
                " The folder has a pickle file, which is not supported: save it again with a newer peft"
                if has_pickle
                else ""
            )
            raise AdapterError(f"{location} is missing.{advice or ' Name a folder that peft wrote'}")
        try:
            self._file = TensorFile(Path(folder, ADAPTER_WEIGHTS))
        except ModelFolderError as error:
            raise AdapterError(f"lora.adapter_name_or_path: {error}") from error
        self._file_names = {
            _OLD_MAGNITUDE.sub(".lora_magnitude_vector", name.removeprefix(FILE_PREFIX)): name
            for name in self._file.records
        }
        #: Names of base weights that peft saved with embedding adapters: name in the file, by name in the model.
        self.base_copies = {
            name.replace(_BASE_LAYER, ".weight"): name
            for name in self._file_names
            if name.endswith(_BASE_LAYER) and name not in adapters.names
        }
        missing = sorted(set(adapters.names) - set(self._file_names))
        unknown = sorted(set(self._file_names) - set(adapters.names) - set(self.base_copies.values()))
        if missing or unknown:
            text = f"{len(missing)} tensors are missing: {join_names(missing, 3)}" if missing else ""
            text += "; " if missing and unknown else ""
            text += f"{len(unknown)} do not exist in the model: {join_names(unknown, 3)}" if unknown else ""
            raise AdapterError(f"{location}: {text}. Is it an adapter of this model?")
        for name in adapters.names:
            record = self._file.records[self._file_names[name]]
            if tuple(record.shape) != tuple(shapes[name]):
                raise AdapterError(
                    f"{location}: {name} has shape {list(record.shape)}, but {list(shapes[name])} in the model. "
                    "Is it an adapter of this model?"
                )

    def check_base(self, name: str, weight: Tensor) -> None:
        """Check that a weight of the model equals its copy in the adapter file.

        Raises:
            AdapterError: If they differ, which means that the copy was trained or resized. peft would load the copy.
        """
        copy = self._file.read(self._file_names[self.base_copies[name]])
        if copy.shape != weight.shape or not torch.equal(weight.to(copy.dtype), copy):
            raise AdapterError(
                f"lora.adapter_name_or_path: {name} differs between the file and the model's folder. Use the model "
                "that the adapter was trained on, or merge it with peft into that model"
            )

    def fill(self, views: Mapping[str, Tensor]) -> None:
        """Read tensors from the folder into CPU tensors of any floating-point dtype."""
        for name, view in views.items():
            view.copy_(self._file.read(self._file_names[name]))
            if not bool(torch.isfinite(view).all()):
                raise AdapterError(f"lora.adapter_name_or_path: {name} contains infinite values or NaN")


def export_adapter(
    graph: ModelGraph,
    source: WeightSource,
    out_dir: Path | str,
    *,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
    copy_from: Path | str | None = None,
    record: Mapping[str, int] | None = None,
) -> Path:
    """Export a graph's adapters to a folder that peft can load, including the tokenizer's files.

    Args:
        source: Function that returns a context in which one layout's master weights can be read.
        out_dir: New folder; see `export_model`.
        base_model: Folder or hub id of the base model, for ``adapter_config.json``.
        dtype: Dtype of the exported adapters.
        copy_from: Folder with the tokenizer's files.
        record: Additional keys for ``export.json``.

    Returns:
        Absolute path of the finished folder.

    Raises:
        ExportError: For the reasons listed in `export_model`.
    """
    adapters = adapters_of(graph)
    assert adapters is not None
    out = Path(out_dir).absolute()
    check_target(out)
    layouts = [layout for layout in graph.layouts.values() if layout.trainable]
    shapes = {entry.name: entry.shape for layout in layouts for entry in layout.entries}
    tensors = {f"{FILE_PREFIX}{name}": torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    shards = [plan_file(ADAPTER_WEIGHTS, list(tensors), tensors)]
    with atomic_folder(out, shards) as partial_folder:
        writer = ShardWriter(partial_folder, shards, tensors)
        for layout in layouts:
            with source(layout) as read:
                for entry in layout.entries:
                    writer.write(f"{FILE_PREFIX}{entry.name}", partial(_read_at_offset, read, entry.offset))
        settings = json.dumps(adapters.settings(base_model), indent=2, sort_keys=True)
        (partial_folder / ADAPTER_CONFIG).write_text(settings + "\n", encoding="utf-8")
        copy_tokenizer([] if copy_from is None else [Path(copy_from)], partial_folder)
        writer.finish()
        writer.verify(TensorFile(partial_folder / ADAPTER_WEIGHTS))
        write_record(partial_folder, dtype, writer.checksums, record or {})
    return out


def _read_at_offset(read: ReadMaster, offset: int, start: int, stop: int) -> Tensor:
    return read(offset + start, offset + stop)
