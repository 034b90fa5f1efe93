"""Loader of a Hugging Face folder's weights into flat blocks, one range at a time.

The caller owns the memory and chooses the range of a block. The loader itself needs RAM for one small piece of a
tensor. A conversion from the files to the model that does more than stack, join, cut and transpose needs RAM for all of
its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from megatrain.base.layout import TensorEntry, UnitLayout, entries_within
from megatrain.models import folder
from megatrain.models.checkpoint_names import Conversion, ConversionError, LoadPlan, plan_export, plan_load, tied_groups
from megatrain.models.folder import PLAIN_ADVICE, ModelFolder, ModelFolderError, join_names, read_config_json
from megatrain.models.graph import ModelGraph
from megatrain.models.initialize import Initializer
from megatrain.models.internals import is_conv1d
from megatrain.models.passthrough import PassthroughTensors, passthrough_modules
from megatrain.models.regions import Region, read_regions
from megatrain.models.task_head import head_of, other_class_advice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAME_MODEL = "Do config.json and the weights belong together? Copy or download both from the same model"


@dataclass(frozen=True)
class Origin:
    """Facts that an export needs about the folder from which a model was loaded.

    Attributes:
        plan: Plan with which the folder was loaded.
        passthrough: Tensors that an export copies.
        trained: Names of the model's tensors that an export writes, including every name of a tied tensor in the files.
    """

    folder: ModelFolder
    plan: LoadPlan
    passthrough: PassthroughTensors
    trained: tuple[str, ...]


def open_loader(folder: Path | str, graph: ModelGraph) -> WeightLoader:
    """Return a loader for a graph's weights, without adapters. Raises the errors of `WeightLoader`.

    Use the loader only inside ``graph.plain_model()``.
    """
    with graph.plain_model():
        return WeightLoader(folder, graph.model)


class WeightLoader:
    """Loader of a model's parameters and persistent buffers from a folder. Not thread-safe.

    Before the loader reads weights, it checks all names, shapes and dtypes. It rejects a folder if a tensor would be
    neither loaded nor copied by an export, or if an export could not restore a name.

    Args:
        path: A Hugging Face folder that contains safetensors files.
        model: Skeleton built from the folder's config. Its parameters can be on the meta device. As in transformers,
            the loader stores the folder's transforms in the model, because an export inverts them.

    Attributes:
        origin: Facts about the folder that an export needs.
        largest_extra_nbytes: Peak memory so far, in bytes. The caller's memory is not counted.

    Raises:
        ModelFolderError: A parameter is missing, the model lacks one of the folder's tensors, a shape or dtype does not
            fit, or the folder is damaged.
    """

    def __init__(self, path: Path | str, model: PreTrainedModel) -> None:
        self._folder = ModelFolder(path)
        self._model = model
        self._largest_conversion_nbytes = 0
        self._regions: dict[int, Mapping[str, Sequence[Region]] | None] = {}
        self._last_conversion: tuple[Conversion, Mapping[str, Tensor]] | None = None
        self._last_initializer: tuple[UnitLayout, Initializer] | None = None
        records = self._folder.records
        meta_tensors = {
            name: torch.empty(record.shape, dtype=record.dtype, device="meta") for name, record in records.items()
        }
        passthrough = passthrough_modules(model)
        with passthrough.registered() if passthrough is not None else nullcontext():
            try:
                plan = plan_load(model, meta_tensors)
            except ConversionError as error:
                raise ModelFolderError(self._folder.path, f"{error}. {_SAME_MODEL}") from error
            self._steps = plan.target_steps
            self._check_names(plan)
            self._check_shapes()
        self._aliases = {name: names for names in tied_groups(model) for name in names}
        self._check_tied()
        cast("Any", model)._weight_conversions = plan.transforms
        self.origin = self._classify_tensors(plan)

    @property
    def largest_extra_nbytes(self) -> int:
        return max(self._largest_conversion_nbytes, self._folder.largest_piece_nbytes)

    def fill(self, layout: UnitLayout, views: Mapping[str, Tensor]) -> None:
        """Load all parameters of a layout.

        Args:
            layout: A layout of the model's graph.
            views: Views to fill, by full parameter name: contiguous CPU tensors with the parameters' shapes, in any
                floating-point dtype.

        Raises:
            ModelFolderError: A file cannot be read, or a weight is infinite or NaN.
        """
        for entry in layout.entries:
            self._fill_range(layout, entry, 0, views[entry.name].view(-1))
        self._last_conversion = None

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        """Load a range of a layout's block into ``out``. Elements between parameters are unchanged.

        Read the ranges in order, because the loader keeps only the result of the latest whole-tensor conversion.

        Args:
            layout: A layout of the model's graph.
            start: First element of the range in the block.
            out: 1-D contiguous CPU tensor with the length of the range, in any floating-point dtype.

        Raises:
            ModelFolderError: A file cannot be read, or a weight is infinite or NaN.
        """
        stop = start + out.numel()
        for entry, begin, end in entries_within(layout, start, stop):
            self._fill_range(layout, entry, begin, out[entry.offset + begin - start : entry.offset + end - start])
        if stop >= layout.num_elements:
            self._last_conversion = None

    def _fill_range(self, layout: UnitLayout, entry: TensorEntry, start: int, out: Tensor) -> None:
        """Fill ``out`` with a parameter's elements, starting at element ``start``."""
        step, start = self._find_step(entry.parameter), entry.start + start
        with torch.no_grad():
            if step is None:  # the folder may lack this parameter; transformers then initializes it
                self._get_initializer(layout).read(entry.parameter, start, out)
            else:
                self._run_step(step, entry.parameter, start, out)
            self._check_finite(entry.parameter, out)

    def _get_initializer(self, layout: UnitLayout) -> Initializer:
        if self._last_initializer is None or self._last_initializer[0] is not layout:
            names = [entry.parameter for entry in layout.entries if self._find_step(entry.parameter) is None]
            self._last_initializer = layout, Initializer(self._model, names, seed=0)
        return self._last_initializer[1]

    def regions(self, name: str) -> Sequence[Region] | None:
        """Return the regions of the folder's tensors that form a parameter. The tensors are not read.

        Returns:
            The regions, or None if the conversion must run on whole tensors or the folder lacks the parameter.
        """
        step = self._find_step(name)
        if step is None:
            return None
        regions = self._find_regions(step)
        return None if regions is None else regions[self._find_target(step, name)]

    def _find_target(self, step: Conversion, name: str) -> str:
        target: str = next(alias for alias in (name, *self._aliases.get(name, ())) if alias in step.targets)
        return target

    def _find_regions(self, step: Conversion) -> Mapping[str, Sequence[Region]] | None:
        if id(step) not in self._regions:
            self._regions[id(step)] = step.regions(self._model)
        return self._regions[id(step)]

    def _has_transposed_source(self, step: Conversion) -> bool:
        """Return whether a source is quantized in transposed order. Such a source must be read as a whole."""
        decoders = (self._folder.records[source].decoder for source in step.source_names)
        return any(decoder is not None and decoder.is_transposed for decoder in decoders)

    def load_buffers(self) -> None:
        """Load the persistent buffers into the model, in the model's dtypes."""
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for name in self._model.state_dict(keep_vars=True):
            step = self._find_step(name)
            if name in parameters or step is None:
                continue
            module_name, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(module_name)
            buffer = module._buffers[leaf]
            assert buffer is not None, name
            if buffer.device.type == "meta":
                module._buffers[leaf] = buffer = torch.empty_like(buffer, device="cpu")
            self._run_step(step, name, 0, buffer.view(-1))

    def _find_step(self, name: str) -> Conversion | None:
        for alias in (name, *self._aliases.get(name, ())):
            if alias in self._steps:
                return self._steps[alias]
        return None

    def _run_step(self, step: Conversion, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with elements of a model tensor, starting at ``start``. The tensor is a target of ``step``."""
        target, regions = (
            self._find_target(step, name),
            None if self._has_transposed_source(step) else self._find_regions(step),
        )
        if regions is not None:
            itemsize = max(self._folder.records[source].dtype.itemsize for source in step.source_names)
            read_regions(regions[target], start, out, self._folder.read_span, max(1, folder.PIECE_BYTES // itemsize))
            return
        if self._last_conversion is None or self._last_conversion[0] is not step:
            self._last_conversion = None  # free the previous result before the next conversion
            outputs = step.run(self._folder.read, self._model)
            nbytes = sum(self._folder.records[source].nbytes for source in step.source_names)
            nbytes += sum(value.nbytes for value in outputs.values())
            self._largest_conversion_nbytes = max(self._largest_conversion_nbytes, nbytes)
            self._last_conversion = step, outputs
        out.copy_(self._last_conversion[1][target].reshape(-1)[start : start + out.numel()])

    def _classify_tensors(self, plan: LoadPlan) -> Origin:
        """Classify the folder's tensors as trained or pass-through. Check that an export can restore all of them."""
        modules = passthrough_modules(self._model)
        paths, passthrough_names = (modules.paths, modules.names) if modules is not None else ((), frozenset())
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        owners: dict[str, str] = {}
        trained: list[str] = []
        for step in {id(step): step for step in plan.target_steps.values()}.values():
            params = [target for target in step.targets if target in parameters]
            if params and len(params) < len(step.targets):
                buffer = next(target for target in step.targets if target not in parameters)
                text = f"tensor {step.source_names[0]} has a trained part ({params[0]}) and an untrained one ({buffer})"
                raise ModelFolderError(self._folder.path, f"{text}. Such a model is not supported")
            trained += params
            for name in () if params else step.source_names:
                owners[name] = _owner(step.first_target, paths) if step.first_target in passthrough_names else "buffers"
        head = head_of(self._model)
        other_heads = {name for name in plan.ignored if head is not None and head.is_excluded(plan.ignored[name])}
        owners.update((name, _owner(name, ())) for name in plan.ignored if name not in other_heads)
        names = tuple(name for name in self._folder.records if name in owners)
        origin = Origin(self._folder, plan, PassthroughTensors(self._folder, names, owners), tuple(sorted(trained)))
        state = self._model.state_dict(keep_vars=True)
        try:
            steps = plan_export(self._model, {name: state[name].to("meta") for name in trained}, plan)
        except ConversionError as error:
            raise ModelFolderError(self._folder.path, f"{error}. Such a folder is not supported") from error
        restored_names = {target for step in steps for target in step.targets}
        lost_names = sorted(self._folder.records.keys() - restored_names - set(names) - other_heads)
        if lost_names:
            text = f"{len(lost_names)} tensors could not be restored by an export: {join_names(lost_names)}"
            raise ModelFolderError(self._folder.path, f"{text}. Such a folder is not supported")
        return origin

    def _check_names(self, plan: LoadPlan) -> None:
        missing, unexpected = plan.missing, plan.unexpected
        model_class = type(self._model).__name__
        if missing:
            text = f"{len(missing)} tensors of {model_class} are missing: {join_names(missing)}"
            if unexpected:
                text += f"; {len(unexpected)} tensors have no place in it: {join_names(unexpected)}"
            raise ModelFolderError(self._folder.path, f"{text}. {self._explain_other_tensors()}")
        if unexpected:
            raise ModelFolderError(
                self._folder.path,
                f"{len(unexpected)} tensors have no place in {model_class} and would be lost: "
                f"{join_names(unexpected)}. {self._explain_other_tensors()}",
            )

    def _explain_other_tensors(self) -> str:
        """Return a likely reason why a folder's tensors differ from the language model's tensors, with the remedy."""
        names = read_config_json(self._folder.path).get("architectures") or ()
        return other_class_advice(map(str, names)) or _SAME_MODEL

    def _check_shapes(self) -> None:
        state = self._model.state_dict(keep_vars=True)
        for name, step in self._steps.items():
            target, tensor = step.targets[name], state[name]
            source = self._folder.records[step.source_names[0]]
            # Check the module's type, because a transposed square weight would have the right shape.
            if source.decoder is not None and is_conv1d(self._model.get_submodule(name.rpartition(".")[0])):
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} is quantized, but {name} is the weight of a Conv1D. Such weights are stored "
                    f"transposed, which is not supported. {PLAIN_ADVICE}",
                )
            if target.shape != tensor.shape:
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} gives {name} the shape {list(target.shape)}, "
                    f"but config.json requires {list(tensor.shape)}. {_SAME_MODEL}",
                )
            if tensor.is_floating_point() and not target.is_floating_point():
                raise ModelFolderError(
                    source.file,
                    f"tensor {source.name} has dtype {str(target.dtype).removeprefix('torch.')}, but the model has "
                    "floating-point weights (a quantized model?). Use the original model",
                )

    def _check_tied(self) -> None:
        """Reject files that contain different values for tensors that the config ties."""
        for names in tied_groups(self._model):
            sources = [self._steps[name].source_names[0] for name in names if name in self._steps]
            for source in sources[1:]:
                if not self._has_equal_values(sources[0], source):
                    raise ModelFolderError(
                        self._folder.path,
                        f"config.json ties {sources[0]} and {source}, but the files contain different values. "
                        'Set "tie_word_embeddings": false in config.json to train them separately',
                    )

    def _has_equal_values(self, name: str, other_name: str) -> bool:
        record, other_record = self._folder.records[name], self._folder.records[other_name]
        if (record.shape, record.dtype) != (other_record.shape, other_record.dtype):
            return False
        pairs = zip(self._folder.pieces(name), self._folder.pieces(other_name), strict=True)
        return all(torch.equal(left, right) for (_, left), (_, right) in pairs)

    def _check_finite(self, name: str, view: Tensor) -> None:
        if view.numel() == 0:
            return
        minimum, maximum = torch.aminmax(view)
        if not (torch.isfinite(minimum) and torch.isfinite(maximum)):
            step = self._find_step(name)
            path = self._folder.records[step.source_names[0]].file if step else self._folder.path
            raise ModelFolderError(path, f"parameter {name} contains infinite values or NaN. Use an undamaged model")


def _owner(name: str, paths: tuple[str, ...]) -> str:
    """Return the owner of a pass-through tensor, for messages: a module in ``paths`` or a prefix of the name."""
    for path in paths:
        if name == path or name.startswith(f"{path}."):
            return path
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: index + 1] if index is not None else parts[:-1] or parts)
