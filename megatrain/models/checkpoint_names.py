"""Maps the tensors of a checkpoint to the parameters of a model, and back.

Transformers 5 keeps some models in another form than their files: prefixes differ, and the experts of a layer are one
fused tensor. It publishes the differences as a list of transforms. This module applies the list to names and shapes
only (on the meta device). The result is a complete plan before any weight is read or written. Missing names and wrong
shapes are known at once, and each step can run alone with only the tensors that it needs.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatrain.models.regions import Region, aliasing, region_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform


class ConversionError(Exception):
    """Tensors do not fit the conversion that transformers prescribes for them."""


@dataclass
class Conversion:
    """One step from input tensors to output tensors, with the names on both sides.

    Attributes:
        sources: input names by the pattern that matched them, in the order that the transform needs.
        targets: shape and dtype by output name, as a tensor on the meta device.
        transform: None for a plain copy of the only source to the only target.
        final_names: final name by the name that the transform gives an output.
        source_shapes: shapes by input name.
    """

    first_target: str
    transform: Any  # a WeightTransform of transformers, or None
    sources: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    final_names: dict[str, str] = field(default_factory=dict)
    source_shapes: dict[str, torch.Size] = field(default_factory=dict)

    @property
    def source_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def run(self, read: Callable[[str], torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the outputs by name; ``read`` returns an input, which is freed as soon as it is used."""
        outputs = self._convert(read, model)
        return {self.final_names[name]: value for name, value in outputs.items()}

    def regions(self, model: PreTrainedModel) -> Mapping[str, Sequence[Region]] | None:
        """Return the regions that make each target; None if a step does more than move elements.

        With regions, every target can be made a range at a time. They cover copies, the usual fusing of experts, and
        splits and joins of fused tensors for an export.
        """
        if self.transform is None:
            ((target, made),) = self.targets.items()
            return {target: [_put(self.source_names[0], torch.empty(made.shape, device="meta"))]}
        if len(self.targets) == 1:
            ((target, made),) = self.targets.items()
            places = _places_in_stack(self, torch.empty(made.shape, device="meta"))
            if places is not None:
                return {target: [_put(name, place) for name, place in places]}
        found = aliasing(self.source_shapes, lambda read: self._convert(read, model))
        return None if found is None else {self.final_names[name]: made for name, made in found.items()}

    def trace(
        self, inputs: Mapping[str, torch.Tensor], model: PreTrainedModel, rename: Callable[[str], str] | None = None
    ) -> None:
        """Find the targets from ``inputs`` on meta; ``rename`` returns their final names.

        Raises:
            ConversionError: the inputs do not fit together.
        """
        try:
            outputs = self._convert(inputs.__getitem__, model)
        except Exception as error:  # the transforms raise various torch errors for shapes that do not fit
            listed = ", ".join(f"{name} {list(inputs[name].shape)}" for name in self.source_names[:4])
            raise ConversionError(f"cannot make {self.first_target} of {listed}: {error}") from error
        self.source_shapes = {name: inputs[name].shape for name in self.source_names}
        self.final_names = {name: rename(name) if rename else name for name in outputs}
        self.targets = {self.final_names[name]: value for name, value in outputs.items()}

    def _convert(self, read: Callable[[str], torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        if self.transform is None:
            return {self.first_target: read(self.source_names[0])}
        transform = deepcopy(self.transform)  # the conversion consumes its collected tensors
        for pattern, names in self.sources.items():
            transform.collected_tensors[pattern] = [read(name) for name in names]
        outputs = transform.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in outputs.items()}


@dataclass
class LoadPlan:
    """The mapping from a checkpoint to a model.

    Attributes:
        by_target: conversion step by parameter or persistent buffer.
        missing: names of the model that no tensor of the checkpoint makes.
        unexpected: names of the checkpoint without a place in the model.
        ignorable: names in the model by names of the checkpoint that transformers drops silently: the model lacks
            these tensors, as its class declares.
        transforms: those that matched; the inverse conversion of an export needs them.
    """

    by_target: dict[str, Conversion]
    missing: list[str]
    unexpected: list[str]
    ignorable: dict[str, str]
    transforms: list[WeightTransform]


def plan_load(model: PreTrainedModel, checkpoint: Mapping[str, torch.Tensor]) -> LoadPlan:
    """Return the plan that fills ``model`` from tensors of these names, shapes and dtypes (on meta).

    Raises:
        ConversionError: the tensors cannot be converted, e.g. experts of different shapes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    places: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    mapping = get_model_conversion_mapping(model)
    renamings, converters, by_pattern = _split(mapping)
    prefix = model.base_model_prefix
    steps: dict[str, Conversion] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, places)
        if target not in places and name in places:  # the file already uses the module's name
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=places)
        if target not in places:
            unexpected[name] = target
            continue
        step = steps.setdefault(target, Conversion(target, None if pattern is None else by_pattern[pattern]))
        if pattern is None and step.sources:
            raise ConversionError(f"tensors {step.source_names[0]} and {name} are both meant for {target}")
        step.sources.setdefault(pattern or name, []).append(name)
    by_target: dict[str, Conversion] = {}
    for step in steps.values():
        step.trace(checkpoint, model)
        by_target.update(dict.fromkeys(step.targets, step))
    unplaced = [name for name in by_target if name not in places]
    by_target = {name: step for name, step in by_target.items() if name in places}
    patterns = [re.compile(pattern) for pattern in _ignored_unexpected(model)]
    ignorable = {  # transformers matches the new name
        name: target for name, target in unexpected.items() if any(pattern.search(target) for pattern in patterns)
    }
    return LoadPlan(
        by_target=by_target,
        missing=_without(model._keys_to_ignore_on_load_missing, _missing(model, places, by_target)),
        unexpected=[name for name in unexpected if name not in ignorable] + unplaced,
        ignorable=ignorable,
        transforms=[transform for transform in mapping if transform.was_used()],
    )


def plan_export(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], loaded: LoadPlan | None = None
) -> list[Conversion]:
    """Return the steps that turn module tensors (names, shapes, dtypes; on meta) into checkpoint tensors.

    They invert the transforms that loaded the model, or else the transforms of its type. So the folder has the form
    that ``from_pretrained`` and other tools expect. The targets of all steps are the names in the file.

    Args:
        loaded: the plan that loaded a folder; then every tensor gets its name in that folder.

    Raises:
        ConversionError: two tensors would have one name, or a name of the folder cannot be restored.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, dot_natural_key, rename_source_key

    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        # Without a folder, a dropped prefix cannot be restored; from_pretrained accepts both forms.
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [transform for transform in mapping if not isinstance(transform, PrefixChange)]
    renamings, converters, by_pattern = _split([transform.reverse_transform() for transform in reversed(transforms)])
    steps: dict[str, Conversion] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters, reverse=True)
        step = steps.setdefault(target, Conversion(target, None if pattern is None else by_pattern[pattern]))
        step.sources.setdefault(pattern or name, []).append(name)
    used: set[str] = set()
    for step in steps.values():
        step.trace(tensors, model, lambda name: rename_source_key(name, renamings, [], reverse=True)[0])
        if loaded is not None:
            _take_names_of_files(step, loaded, model.base_model_prefix)
        if not used.isdisjoint(step.targets):
            raise ConversionError(f"two tensors of the model would both be named {sorted(used & set(step.targets))[0]}")
        used.update(step.targets)
    return list(steps.values())


def _take_names_of_files(step: Conversion, loaded: LoadPlan, prefix: str) -> None:
    """Give the outputs of an export step their names and shapes in the folder."""
    steps = [loaded.by_target[name] for name in step.source_names if name in loaded.by_target]
    if not steps:
        return  # no file had it: transformers allows it to be absent
    shapes = {name: shape for loading in steps for name, shape in loading.source_shapes.items()}
    new_names = {}
    for name, value in step.targets.items():
        with_or_without = {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}  # from_pretrained accepts both
        found = [other for other in with_or_without if other in shapes]
        if step.transform is None and len(shapes) == 1:
            found = list(shapes)  # a plain copy, even if a renaming has lost the name
        if len(found) == 1 and shapes[found[0]] == value.shape:
            new_names[name] = found[0]
    if len(new_names) != len(shapes) or set(new_names.values()) != set(shapes):
        given = [name for name in shapes if name not in new_names.values()] or list(shapes)
        raise ConversionError(
            f"{given[0]} could not be restored by an export: transformers writes {', '.join(step.targets)} for it"
        )
    step.final_names = {name: new_names[final] for name, final in step.final_names.items()}
    step.targets = {new_names[name]: value for name, value in step.targets.items()}


def _put(name: str, place: torch.Tensor) -> Region:
    """Return the region of a whole input that becomes ``place`` of an output on meta."""
    return region_of(name, torch.empty(place.shape, device="meta"), place)


def _places_in_stack(step: Conversion, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = getattr(step.transform, "operations", [])
    kinds = [type(operation) for operation in operations]
    if kinds == [MergeModulelist] and len(step.sources) == 1:
        (names,) = step.sources.values()
        return list(zip(names, whole.unbind(operations[0].dim), strict=True))
    if kinds != [MergeModulelist, Concatenate] or len(step.sources) < 2:
        return None
    groups = [step.sources[pattern] for pattern in step.transform.source_patterns if pattern in step.sources]
    places: list[tuple[str, torch.Tensor]] = []
    start, joint, stacked = 0, operations[1].dim, operations[0].dim
    for names in groups:
        shape = list(step.source_shapes[names[0]])
        shape.insert(stacked if stacked >= 0 else len(shape) + 1 + stacked, len(names))
        part = whole.narrow(joint, start, shape[joint])
        start += shape[joint]
        places += zip(names, part.unbind(stacked), strict=True)
    return places


def tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of each set of parameters or buffers that are one tensor; the name in files comes first."""
    by_identity: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(value), []).append(name)
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    groups = [names for names in by_identity.values() if len(names) > 1]
    return [sorted(names, key=lambda name: name in declared) for names in groups]


def _split(transforms: list[WeightTransform]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    return renamings, converters, {pattern: entry for entry in converters for pattern in entry.source_patterns}


def _missing(model: PreTrainedModel, places: Mapping[str, torch.Tensor], found: Mapping[str, Any]) -> list[str]:
    missing = {name for name in places if name not in found}
    for names in tied_groups(model):
        if any(name in found for name in names):
            missing.difference_update(names)
    return sorted(missing)


def _ignored_unexpected(model: PreTrainedModel) -> list[str]:
    """Return the patterns of names that transformers drops silently, from old or larger checkpoints."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _without(patterns: Iterable[str] | None, names: list[str]) -> list[str]:
    expressions = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(expression.search(name) for expression in expressions)]
