"""Mapping between a checkpoint's tensors and a model's parameters, in both directions.

In transformers 5, some models' parameters differ from the tensors in their files: prefixes differ, and a layer's
experts are one fused tensor. Transformers describes the differences as a list of transforms. This module first applies
the list only to names and shapes, on the meta device. The plan is complete before any weight is read or written, so
missing names and wrong shapes are detected early. Each step of the plan needs only its own tensors in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatrain.models.regions import Region, region_of, trace_regions

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform


class ConversionError(Exception):
    """Failure of a conversion by the transforms that transformers defines for the model."""


@dataclass
class Conversion:
    """One step of a conversion. It computes output tensors from input tensors.

    Attributes:
        transform: The transform from transformers, or None to copy the only source to the only target.
        sources: Input names, grouped by the pattern that matched them, in the order that the transform needs.
        targets: Outputs by name, as meta tensors.
        final_names: Final name of each output, keyed by the name that the transform returns.
        source_shapes: Shape of each input, by name.
    """

    first_target: str
    transform: Any
    sources: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    final_names: dict[str, str] = field(default_factory=dict)
    source_shapes: dict[str, torch.Size] = field(default_factory=dict)

    @property
    def source_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def run(self, read: Callable[[str], torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Convert the inputs, which ``read`` returns by name. Return the outputs by name."""
        outputs = self._convert(read, model)
        return {self.final_names[name]: value for name, value in outputs.items()}

    def regions(self, model: PreTrainedModel) -> Mapping[str, Sequence[Region]] | None:
        """Return the regions of each target, or None if the step must run on whole tensors.

        With regions, any range of a target can be computed separately. Regions exist for copies, for the usual fusing
        of experts, and for exports that split or join fused tensors.
        """
        if self.transform is None:
            ((target, value),) = self.targets.items()
            return {target: [_make_input_region(self.source_names[0], torch.empty(value.shape, device="meta"))]}
        if len(self.targets) == 1:
            ((target, value),) = self.targets.items()
            views = _find_stack_views(self, torch.empty(value.shape, device="meta"))
            if views is not None:
                return {target: [_make_input_region(name, view) for name, view in views]}
        regions = trace_regions(self.source_shapes, lambda read: self._convert(read, model))
        return None if regions is None else {self.final_names[name]: value for name, value in regions.items()}

    def trace(
        self, inputs: Mapping[str, torch.Tensor], model: PreTrainedModel, rename: Callable[[str], str] | None = None
    ) -> None:
        """Run the step on the meta device to find its targets.

        Args:
            inputs: Meta tensors by input name.
            rename: Function that returns a target's final name, or None to keep the names.

        Raises:
            ConversionError: The inputs' shapes do not fit the transform.
        """
        try:
            outputs = self._convert(inputs.__getitem__, model)
        except Exception as error:  # transforms raise various torch errors if the shapes do not fit
            shapes = ", ".join(f"{name} {list(inputs[name].shape)}" for name in self.source_names[:4])
            raise ConversionError(f"cannot make {self.first_target} from {shapes}: {error}") from error
        self.source_shapes = {name: inputs[name].shape for name in self.source_names}
        self.final_names = {name: rename(name) if rename else name for name in outputs}
        self.targets = {self.final_names[name]: value for name, value in outputs.items()}

    def _convert(self, read: Callable[[str], torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        if self.transform is None:
            return {self.first_target: read(self.source_names[0])}
        transform = deepcopy(self.transform)  # copy, because `convert` removes the collected tensors
        for pattern, names in self.sources.items():
            transform.collected_tensors[pattern] = [read(name) for name in names]
        outputs = transform.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in outputs.items()}


@dataclass
class LoadPlan:
    """Plan for loading a checkpoint into a model.

    Attributes:
        target_steps: Conversion step for each parameter and persistent buffer.
        missing: Parameters and buffers of the model that no checkpoint tensor provides.
        unexpected: Checkpoint tensors that the model does not have.
        ignored: Tensors that the model's class declares as ignorable: name in the model, by checkpoint name.
        transforms: Transforms that matched a tensor. An export applies their inverses.
    """

    target_steps: dict[str, Conversion]
    missing: list[str]
    unexpected: list[str]
    ignored: dict[str, str]
    transforms: list[WeightTransform]


def plan_load(model: PreTrainedModel, checkpoint: Mapping[str, torch.Tensor]) -> LoadPlan:
    """Return the plan for loading a checkpoint into a model. ``checkpoint`` has a meta tensor for each name.

    Raises:
        ConversionError: The tensors cannot be converted, for example because experts have different shapes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    mapping = get_model_conversion_mapping(model)
    renamings, converters, converter_by_pattern = _split_transforms(mapping)
    prefix = model.base_model_prefix
    steps: dict[str, Conversion] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # the checkpoint already uses the model's name
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if target not in state:
            unexpected[name] = target
            continue
        step = steps.setdefault(target, Conversion(target, None if pattern is None else converter_by_pattern[pattern]))
        if pattern is None and step.sources:
            raise ConversionError(f"tensors {step.source_names[0]} and {name} are both meant for {target}")
        step.sources.setdefault(pattern or name, []).append(name)
    target_steps: dict[str, Conversion] = {}
    for step in steps.values():
        step.trace(checkpoint, model)
        target_steps.update(dict.fromkeys(step.targets, step))
    extra_names = [name for name in target_steps if name not in state]
    target_steps = {name: step for name, step in target_steps.items() if name in state}
    patterns = [re.compile(pattern) for pattern in _ignored_patterns(model)]
    ignored = {  # like transformers, match the patterns against the name in the model
        name: target for name, target in unexpected.items() if any(pattern.search(target) for pattern in patterns)
    }
    return LoadPlan(
        target_steps=target_steps,
        missing=_exclude_matches(model._keys_to_ignore_on_load_missing, _find_missing(model, state, target_steps)),
        unexpected=[name for name in unexpected if name not in ignored] + extra_names,
        ignored=ignored,
        transforms=[transform for transform in mapping if transform.was_used()],
    )


def plan_export(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], load_plan: LoadPlan | None = None
) -> list[Conversion]:
    """Return the steps that convert a model's tensors to checkpoint tensors. The targets have the checkpoint's names.

    The steps invert the transforms that loaded the model. For a model without a folder, they invert the transforms of
    its model type. The result has the form that ``from_pretrained`` and other tools expect.

    Args:
        tensors: Meta tensors by name in the model.
        load_plan: Plan with which the folder was loaded, to restore its names. None for a model without a folder.

    Raises:
        ConversionError: Two tensors would have the same name, or one of the folder's names cannot be restored.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, dot_natural_key, rename_source_key

    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        # Without a folder, a dropped prefix cannot be restored. from_pretrained also accepts names without the prefix.
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [transform for transform in mapping if not isinstance(transform, PrefixChange)]
    renamings, converters, converter_by_pattern = _split_transforms(
        [transform.reverse_transform() for transform in reversed(transforms)]
    )
    steps: dict[str, Conversion] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters, reverse=True)
        step = steps.setdefault(target, Conversion(target, None if pattern is None else converter_by_pattern[pattern]))
        step.sources.setdefault(pattern or name, []).append(name)
    keys: set[str] = set()
    for step in steps.values():
        step.trace(tensors, model, lambda name: rename_source_key(name, renamings, [], reverse=True)[0])
        if load_plan is not None:
            _restore_file_names(step, load_plan, model.base_model_prefix)
        if not keys.isdisjoint(step.targets):
            raise ConversionError(f"two tensors of the model would both be named {sorted(keys & set(step.targets))[0]}")
        keys.update(step.targets)
    return list(steps.values())


def _restore_file_names(step: Conversion, load_plan: LoadPlan, prefix: str) -> None:
    """Rename an export step's outputs to their names in the folder. The shapes must be equal."""
    steps = [load_plan.target_steps[name] for name in step.source_names if name in load_plan.target_steps]
    if not steps:
        return  # the folder lacks this tensor; transformers accepts such folders
    shapes = {name: shape for load_step in steps for name, shape in load_step.source_shapes.items()}
    new_names = {}
    for name, value in step.targets.items():
        candidates = {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}  # from_pretrained accepts all of them
        matches = [candidate for candidate in candidates if candidate in shapes]
        if step.transform is None and len(shapes) == 1:
            matches = list(shapes)  # a plain copy has one file name, even if a renaming has lost it
        if len(matches) == 1 and shapes[matches[0]] == value.shape:
            new_names[name] = matches[0]
    if len(new_names) != len(shapes) or set(new_names.values()) != set(shapes):
        lost_names = [name for name in shapes if name not in new_names.values()] or list(shapes)
        raise ConversionError(
            f"{lost_names[0]} could not be restored by an export: transformers writes {', '.join(step.targets)} for it"
        )
    step.final_names = {name: new_names[final_name] for name, final_name in step.final_names.items()}
    step.targets = {new_names[name]: value for name, value in step.targets.items()}


def _make_input_region(name: str, view: torch.Tensor) -> Region:
    """Return the region that maps a whole input to ``view``, a view of an output on the meta device."""
    return region_of(name, torch.empty(view.shape, device="meta"), view)


def _find_stack_views(step: Conversion, output: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = getattr(step.transform, "operations", [])
    kinds = [type(operation) for operation in operations]
    if kinds == [MergeModulelist] and len(step.sources) == 1:
        (names,) = step.sources.values()
        return list(zip(names, output.unbind(operations[0].dim), strict=True))
    if kinds != [MergeModulelist, Concatenate] or len(step.sources) < 2:
        return None
    groups = [step.sources[pattern] for pattern in step.transform.source_patterns if pattern in step.sources]
    views: list[tuple[str, torch.Tensor]] = []
    start, join_dim, stack_dim = 0, operations[1].dim, operations[0].dim
    for names in groups:
        shape = list(step.source_shapes[names[0]])
        shape.insert(stack_dim if stack_dim >= 0 else len(shape) + 1 + stack_dim, len(names))
        part = output.narrow(join_dim, start, shape[join_dim])
        start += shape[join_dim]
        views += zip(names, part.unbind(stack_dim), strict=True)
    return views


def tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of each group of tied parameters or buffers. The name used in files comes first."""
    names_by_id: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names_by_id.setdefault(id(value), []).append(name)
    tied_names = getattr(model, "all_tied_weights_keys", None) or {}
    groups = [names for names in names_by_id.values() if len(names) > 1]
    return [sorted(names, key=lambda name: name in tied_names) for names in groups]


def _split_transforms(transforms: list[WeightTransform]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    return renamings, converters, {pattern: entry for entry in converters for pattern in entry.source_patterns}


def _find_missing(model: PreTrainedModel, state: Mapping[str, torch.Tensor], steps: Mapping[str, Any]) -> list[str]:
    missing = {name for name in state if name not in steps}
    for names in tied_groups(model):
        if any(name in steps for name in names):
            missing.difference_update(names)
    return sorted(missing)


def _ignored_patterns(model: PreTrainedModel) -> list[str]:
    """Return patterns for the tensor names that transformers ignores because old or larger checkpoints contain them."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _exclude_matches(patterns: Iterable[str] | None, names: list[str]) -> list[str]:
    expressions = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(expression.search(name) for expression in expressions)]
