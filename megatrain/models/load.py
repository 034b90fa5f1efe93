"""Loads weights of a Hugging Face folder into flat blocks, a range at a time, with the model's names and shapes.

The caller owns the memory and chooses the elements of a block. In addition, loading takes RAM for one small piece of a
tensor, however large the tensor is. If the model keeps weights in another form than its files, a conversion that does
more than stack, join, cut and transpose takes RAM for all its tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from megatrain.base.layout import entries_within
from megatrain.models import folder
from megatrain.models.checkpoint_names import Conversion, ConversionError, LoadPlan, plan_export, plan_load, tied_groups
from megatrain.models.folder import PLAIN_ADVICE, ModelFolder, ModelFolderError, read_config_json, some
from megatrain.models.initialize import Initializer
from megatrain.models.internals import is_conv1d
from megatrain.models.passthrough import PassthroughTensors, passthrough_modules
from megatrain.models.regions import Region, read_regions
from megatrain.models.task_head import head_of, ways_of_other_classes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.models.graph import ModelGraph


_SAME_MODEL = "Do config.json and the weights belong together? Copy or download both of one and the same model"


@dataclass(frozen=True)
class Origin:
    """The folder that a model was loaded from, as needed by an export.

    Attributes:
        plan: mapping from the files to the model.
        passthrough: tensors that an export copies.
        trained: model tensors that an export writes, under each name that a file has.
    """

    folder: ModelFolder
    plan: LoadPlan
    passthrough: PassthroughTensors
    trained: tuple[str, ...]


def open_loader(folder: Path | str, graph: ModelGraph) -> WeightLoader:
    """Return the loader of a graph's weights, without adapters. Raises as `WeightLoader`.

    Use it on the model only inside ``graph.plain_model()``.
    """
    with graph.plain_model():
        return WeightLoader(folder, graph.model)


class WeightLoader:
    """Fills the parameters and persistent buffers of one model from one folder.

    Checks everything that names, shapes and dtypes reveal, before it reads the first weight. Each tensor of the folder
    is loaded, copied by the export, or refused; and an export can restore all of their names.

    Args:
        path: a Hugging Face folder with safetensors.
        model: the skeleton built from the folder's config; its parameters may be on the meta device. It keeps the
            transforms that the folder needed, as in transformers, for the export.

    Attributes:
        origin: the folder's data for an export.
        largest_extra_nbytes: peak bytes so far, without the caller's views.

    Raises:
        ModelFolderError: a parameter is missing, a tensor has no place, a shape or dtype does not fit, or the folder is
            damaged.

    Not thread-safe: one thread at a time.
    """

    def __init__(self, path: Path | str, model: PreTrainedModel) -> None:
        self._folder = ModelFolder(path)
        self._model = model
        self._largest_conversion_nbytes = 0
        self._regions: dict[int, Mapping[str, Sequence[Region]] | None] = {}
        self._converted: tuple[Conversion, Mapping[str, Tensor]] | None = None
        self._absent: tuple[UnitLayout, Initializer] | None = None
        records = self._folder.records
        on_meta = {
            name: torch.empty(record.shape, dtype=record.dtype, device="meta") for name, record in records.items()
        }
        passthrough = passthrough_modules(model)
        with passthrough.registered() if passthrough is not None else nullcontext():
            try:
                plan = plan_load(model, on_meta)
            except ConversionError as error:
                raise ModelFolderError(self._folder.path, f"{error}. {_SAME_MODEL}") from error
            self._steps = plan.by_target
            self._check_names(plan)
            self._check_shapes()
        self._aliases = {name: names for names in tied_groups(model) for name in names}
        self._check_tied()
        cast("Any", model)._weight_conversions = plan.transforms
        self.origin = self._account(plan)

    @property
    def largest_extra_nbytes(self) -> int:
        return max(self._largest_conversion_nbytes, self._folder.largest_piece_nbytes)

    def fill(self, layout: UnitLayout, views: Mapping[str, Tensor]) -> None:
        """Copy every parameter of ``layout`` into its view.

        Args:
            layout: a layout of the graph that the model belongs to.
            views: contiguous CPU tensor of the parameter's shape and any floating dtype, by full parameter name;
                written completely.

        Raises:
            ModelFolderError: a file cannot be read, or a weight is infinite or not a number.
        """
        for entry in layout.entries:
            self._fill_range(layout, entry, 0, views[entry.name].view(-1))
        self._converted = None

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        """Copy a range of the block of ``layout`` into ``out``; elements between parameters are unchanged.

        Read ranges in order: a whole conversion is kept until another conversion is needed, or until the block ends.

        Args:
            layout: a layout of the graph that the model belongs to.
            start: first element of the range in the block.
            out: 1-D contiguous CPU tensor of any floating dtype, as long as the range.

        Raises:
            ModelFolderError: a file cannot be read, or a weight is infinite or not a number.
        """
        stop = start + out.numel()
        for entry, first, last in entries_within(layout, start, stop):
            self._fill_range(layout, entry, first, out[entry.offset + first - start : entry.offset + last - start])
        if stop >= layout.num_elements:
            self._converted = None

    def _fill_range(self, layout: UnitLayout, entry: TensorEntry, start: int, out: Tensor) -> None:
        """Fill ``out`` with the elements of a parameter from ``start`` on."""
        step, start = self._step(entry.parameter), entry.first + start
        with torch.no_grad():
            if step is None:  # transformers allows it to be absent, and initialises it
                self._initializer(layout).read(entry.parameter, start, out)
            else:
                self._run(step, entry.parameter, start, out)
            self._check_finite(entry.parameter, out)

    def _initializer(self, layout: UnitLayout) -> Initializer:
        if self._absent is None or self._absent[0] is not layout:
            absent = [entry.parameter for entry in layout.entries if self._step(entry.parameter) is None]
            self._absent = layout, Initializer(self._model, absent, seed=0)
        return self._absent[1]

    def regions(self, name: str) -> Sequence[Region] | None:
        """Return the regions of the folder's tensors that make a parameter; reads nothing.

        Returns:
            None if the conversion does more than move elements, or if the folder lacks the parameter.
        """
        step = self._step(name)
        if step is None:
            return None
        regions = self._regions_of(step)
        return None if regions is None else regions[self._target(step, name)]

    def _target(self, step: Conversion, name: str) -> str:
        found: str = next(alias for alias in (name, *self._aliases.get(name, ())) if alias in step.targets)
        return found

    def _regions_of(self, step: Conversion) -> Mapping[str, Sequence[Region]] | None:
        if id(step) not in self._regions:
            self._regions[id(step)] = step.regions(self._model)
        return self._regions[id(step)]

    def _is_turned(self, step: Conversion) -> bool:
        """Return whether a source is quantized in transposed order: then it is read as a whole."""
        decoders = (self._folder.records[source].decoder for source in step.source_names)
        return any(decoder is not None and decoder.is_transposed for decoder in decoders)

    def load_buffers(self) -> None:
        """Load the persistent buffers of the folder into the model, in the dtypes of the model."""
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name in self._model.state_dict(keep_vars=True):
            step = self._step(name)
            if name in parameters or step is None:
                continue
            module_name, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(module_name)
            buffer = module._buffers[leaf]
            assert buffer is not None, name
            if buffer.device.type == "meta":
                module._buffers[leaf] = buffer = torch.empty_like(buffer, device="cpu")
            self._run(step, name, 0, buffer.view(-1))

    def _step(self, name: str) -> Conversion | None:
        for alias in (name, *self._aliases.get(name, ())):
            if alias in self._steps:
                return self._steps[alias]
        return None

    def _run(self, step: Conversion, name: str, start: int, out: Tensor) -> None:
        """Make the elements from ``start`` on of a model tensor that ``step`` makes."""
        target, regions = self._target(step, name), None if self._is_turned(step) else self._regions_of(step)
        if regions is not None:
            largest = max(self._folder.records[source].dtype.itemsize for source in step.source_names)
            read_regions(regions[target], start, out, self._folder.read_span, max(1, folder.PIECE_BYTES // largest))
            return
        if self._converted is None or self._converted[0] is not step:
            self._converted = None  # free it before the following conversion
            outputs = step.run(self._folder.read, self._model)
            held = sum(self._folder.records[source].nbytes for source in step.source_names)
            held += sum(value.nbytes for value in outputs.values())
            self._largest_conversion_nbytes = max(self._largest_conversion_nbytes, held)
            self._converted = step, outputs
        out.copy_(self._converted[1][target].reshape(-1)[start : start + out.numel()])

    def _account(self, plan: LoadPlan) -> Origin:
        """Classify the folder's tensors as trained or pass-through; check that an export can restore all of them."""
        modules = passthrough_modules(self._model)
        paths, passthrough_names = (modules.paths, modules.names) if modules is not None else ((), frozenset())
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        owners: dict[str, str] = {}
        trained: list[str] = []
        for step in {id(step): step for step in plan.by_target.values()}.values():
            inside = [target for target in step.targets if target in parameters]
            if inside and len(inside) < len(step.targets):
                outside = next(target for target in step.targets if target not in parameters)
                text = f"tensor {step.source_names[0]} makes {inside[0]}, which is trained, and {outside}, which is not"
                raise ModelFolderError(self._folder.path, f"{text}. Such a model is not supported")
            trained += inside
            for name in () if inside else step.source_names:
                owners[name] = _owner(step.first_target, paths) if step.first_target in passthrough_names else "buffers"
        head = head_of(self._model)
        other_heads = {name for name in plan.ignorable if head is not None and head.is_left_out(plan.ignorable[name])}
        owners.update((name, _owner(name, ())) for name in plan.ignorable if name not in other_heads)
        names = tuple(name for name in self._folder.records if name in owners)
        origin = Origin(self._folder, plan, PassthroughTensors(self._folder, names, owners), tuple(sorted(trained)))
        places = self._model.state_dict(keep_vars=True)
        try:
            steps = plan_export(self._model, {name: places[name].to("meta") for name in trained}, plan)
        except ConversionError as error:
            raise ModelFolderError(self._folder.path, f"{error}. Such a folder is not supported") from error
        given_back = {target for step in steps for target in step.targets}
        lost = sorted(self._folder.records.keys() - given_back - set(names) - other_heads)
        if lost:
            text = f"{len(lost)} tensors could not be restored by an export: {some(lost)}"
            raise ModelFolderError(self._folder.path, f"{text}. Such a folder is not supported")
        return origin

    def _check_names(self, plan: LoadPlan) -> None:
        missing, unexpected = plan.missing, plan.unexpected
        model_class = type(self._model).__name__
        if missing:
            text = f"{len(missing)} tensors of {model_class} are missing: {some(missing)}"
            if unexpected:
                text += f"; {len(unexpected)} tensors have no place in it: {some(unexpected)}"
            raise ModelFolderError(self._folder.path, f"{text}. {self._why_others()}")
        if unexpected:
            raise ModelFolderError(
                self._folder.path,
                f"{len(unexpected)} tensors have no place in {model_class} and would be lost: {some(unexpected)}. "
                f"{self._why_others()}",
            )

    def _why_others(self) -> str:
        """Return why a folder has other tensors than the language model, and the remedy."""
        names = read_config_json(self._folder.path).get("architectures") or ()
        return ways_of_other_classes(map(str, names)) or _SAME_MODEL

    def _check_shapes(self) -> None:
        places = self._model.state_dict(keep_vars=True)
        for name, step in self._steps.items():
            made, place = step.targets[name], places[name]
            source = self._folder.records[step.source_names[0]]
            # Check the module, not the shape: a square weight would pass and be transposed.
            if source.decoder is not None and is_conv1d(self._model.get_submodule(name.rpartition(".")[0])):
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} is quantized, and {name} is the weight of a Conv1D: such weights are stored "
                    f"transposed, which is not read. {PLAIN_ADVICE}",
                )
            if made.shape != place.shape:
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} gives {name} the shape {list(made.shape)}, "
                    f"config.json asks for {list(place.shape)}. {_SAME_MODEL}",
                )
            if place.is_floating_point() and not made.is_floating_point():
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} holds {str(made.dtype).removeprefix('torch.')} numbers where the model has "
                    "floating-point weights (a quantized model?). Take the original model",
                )

    def _check_tied(self) -> None:
        """Refuse files with different values for tensors that the config ties."""
        for names in tied_groups(self._model):
            stored = [self._steps[name].source_names[0] for name in names if name in self._steps]
            for other in stored[1:]:
                if not self._equal(stored[0], other):
                    raise ModelFolderError(
                        self._folder.path,
                        f"config.json ties {stored[0]} and {other}, but the files hold different values. "
                        'Set "tie_word_embeddings": false in config.json to train them apart',
                    )

    def _equal(self, name: str, other: str) -> bool:
        first, second = self._folder.records[name], self._folder.records[other]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        pairs = zip(self._folder.pieces(name), self._folder.pieces(other), strict=True)
        return all(torch.equal(left, right) for (_, left), (_, right) in pairs)

    def _check_finite(self, name: str, view: Tensor) -> None:
        if view.numel() == 0:
            return
        low, high = torch.aminmax(view)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            step = self._step(name)
            path = self._folder.records[step.source_names[0]].file if step else self._folder.path
            raise ModelFolderError(path, f"parameter {name} holds infinite values or NaN. Take an undamaged model")


def _owner(name: str, paths: tuple[str, ...]) -> str:
    """Return the owner of a pass-through tensor for messages: a module, or a prefix of its name."""
    for path in paths:
        if name == path or name.startswith(f"{path}."):
            return path
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)
