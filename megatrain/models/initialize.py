"""Random weights from the model's initialization rules, computed one tensor or one range at a time.

The rules run once on the meta device to record their operations on each parameter. Nearly all rules draw random numbers
in order and change each element separately. Such operations can be repeated range by range. The results are
bit-identical, and only one range is in memory at a time. All other rules run on whole tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.base.layout import UnitLayout
from megatrain.models.checkpoint_names import tied_groups
from megatrain.models.regions import Region, region_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InitializationError", "Initializer", "init_weights", "initialize_tensors"]

_aten = torch.ops.aten
#: Operations that draw random numbers in the order of the elements.
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)
#: Operations that overwrite every element.
_FILLS = (_aten.zero_.default, _aten.fill_.Scalar)
#: Element-wise in-place operations.
_CHANGES = (
    _aten.mul_.Scalar, _aten.mul_.Tensor, _aten.add_.Scalar, _aten.add_.Tensor, _aten.div_.Scalar, _aten.div_.Tensor,
    _aten.clamp_.default, _aten.erfinv_.default, _aten.neg_.default, _aten.exp_.default, _aten.sub_.Tensor,
)  # fmt: skip
#: torch draws normal numbers in groups of this size. The last group ends at the end of the tensor.
_GROUP_SIZE = 16
#: Maximum number of elements to draw per call in order to skip to a later range.
_SKIPPED_ELEMENTS = 1 << 20


class InitializationError(Exception):
    """Error for a parameter without an initialization rule. The model cannot be trained from scratch."""


def init_weights(model: PreTrainedModel, layout: UnitLayout, views: Mapping[str, Tensor], seed: int) -> None:
    """Fill the views of a layout with random weights according to the model's initialization rules.

    The numbers depend only on the seed and the modules' names, not on the order of calls or the placement. The global
    random state is restored.

    Args:
        model: Skeleton of the model. Its parameters can be on the meta device.
        layout: A layout of the model's graph.
        views: Views to fill, by full parameter name: fp32 CPU tensors with the parameters' shapes.

    Raises:
        InitializationError: Neither transformers nor torch has a rule for a parameter.
    """
    initialize_tensors(model, {entry.name: views[entry.name] for entry in layout.entries}, seed)


def initialize_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill tensors with random weights. The tensors are keyed by full parameter name. See `init_weights`."""
    from transformers import initialization

    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # elements that are still NaN at the end have no rule
    owners = _owner_names(model, tensors)
    bound_tensors = {owners[name]: tensor for name, tensor in tensors.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _bind(model, bound_tensors):
        with initialization.guard_torch_init_functions():
            for name, module, owner in _find_modules(model, bound_tensors):
                torch.manual_seed(name_seed(seed, name))
                cast("Any", owner)._init_weights(module)
        for name in sorted(name for name, tensor in bound_tensors.items() if _has_nan(tensor)):
            module_name, _, leaf = name.rpartition(".")
            torch.manual_seed(name_seed(seed, module_name))
            _reset_parameter(model.get_submodule(module_name), leaf)
    uncovered_names = sorted(name for name, tensor in tensors.items() if _has_nan(tensor))
    if uncovered_names:
        raise InitializationError(
            f"{type(model).__name__} has no rule to initialise {', '.join(uncovered_names[:4])}. "
            "Start from a folder with weights instead of train_from_scratch"
        )


class Initializer:
    """Generator of ranges of random weights, bit-identical to the weights from ``initialize_tensors``.

    Not thread-safe. Read ranges in the order of the elements. Otherwise, earlier elements must be drawn again.

    Args:
        model: Skeleton of the model. Its parameters can be on the meta device.
        names: Parameters of a layout. Those in the same module are drawn from one random sequence.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str], seed: int) -> None:
        self._model, self._names, self._seed = model, list(names), seed
        self._rules = _record_rules(model, self._names, seed)
        self._full_tensors: dict[str, Tensor] = {}

    @property
    def supports_ranges(self) -> bool:
        """Whether each range is computed separately. If not, the first read materializes all parameters."""
        return self._rules is not None

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a range of a parameter's elements, starting at element ``start``.

        Args:
            name: One of ``names``.
            start: Index of the first element.
            out: 1-D CPU tensor with the length of the range. The fp32 numbers are rounded to its dtype.

        Raises:
            InitializationError: Neither transformers nor torch has a rule for a parameter.
        """
        if self._rules is not None and (skip := start % _GROUP_SIZE):  # draw from the start of the group
            buffer = torch.empty(skip + out.numel())
            self._rules.read(name, start - skip, buffer)
            out.copy_(buffer[skip:])
            return
        if self._rules is not None:
            self._rules.read(name, start, out)
            return
        if not self._full_tensors:
            shapes = {name: self._model.get_parameter(name).shape for name in self._names}
            self._full_tensors = {name: torch.empty(shape, device="cpu") for name, shape in shapes.items()}
            initialize_tensors(self._model, self._full_tensors, self._seed)
        out.copy_(self._full_tensors[name].view(-1)[start : start + out.numel()])


@dataclass
class _Operation:
    """One operation of an initialization rule on a parameter.

    Attributes:
        function: torch function that changes its first argument in place.
        arguments: Arguments after the tensor.
        previous_draw: Previous draw in the same random sequence, or None if this draw starts from the seed.
        seed: Seed of a draw. Unused for all other operations.
        box: Region of the parameter that the operation fills, or None for the whole parameter.
        position: Index of the next element to draw, or -1 before the first draw.
        state: Generator state before ``position``, or None before the first draw.
        end_state: Generator state after the last element, or None until the last element has been drawn.
        leftover: Last elements of the parameter (fewer than ``_GROUP_SIZE``), drawn but not yet returned.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    previous_draw: _Operation | None
    seed: int
    num_elements: int
    box: Region | None = None
    position: int = -1
    state: Tensor | None = None
    end_state: Tensor | None = None
    leftover: Tensor | None = None

    def apply(self, start: int, out: Tensor) -> None:
        """Apply the operation to ``out``: a contiguous fp32 range of the parameter that starts at element ``start``."""
        if self.function in _DRAWS:
            self._draw(start, out)
        elif self.box is None:
            self.function(out, *self.arguments)
        else:
            for box in self.box.clip(start, start + out.numel()):
                view = out.as_strided(box.shape, box.target_strides, out.storage_offset() + box.target_start - start)
                self.function(view, *self.arguments)

    def _draw(self, start: int, out: Tensor) -> None:
        if self.position != start:
            if self.position < 0 or self.position > start:
                self._rewind()
            while self.position < start:
                self._draw_next(torch.empty(min(_SKIPPED_ELEMENTS, start - self.position)))
        self._draw_next(out)

    def _rewind(self) -> None:
        generator = torch.Generator()
        generator.manual_seed(self.seed)
        if self.previous_draw is not None:
            generator.set_state(self.previous_draw.state_at_end())
        self.position, self.state, self.leftover = 0, generator.get_state(), None

    def state_at_end(self) -> Tensor:
        """Draw the remaining elements. Return the generator's state after the last element."""
        if self.end_state is None:
            if self.position < 0:
                self._rewind()
            while self.position < self.num_elements:
                self._draw_next(torch.empty(min(_SKIPPED_ELEMENTS, self.num_elements - self.position)))
        assert self.end_state is not None
        return self.end_state

    def _draw_next(self, out: Tensor) -> None:
        """Draw the next elements into ``out``. Its size must be a multiple of the group size, except at the end."""
        stop = self.position + out.numel()
        tail = self.num_elements - stop
        if self.leftover is not None:
            out.copy_(self.leftover[: out.numel()])
            self.leftover = self.leftover[out.numel() :]
        else:
            assert self.state is not None and (tail == 0 or out.numel() % _GROUP_SIZE == 0), (self.name, out.numel())
            generator = torch.Generator()
            generator.set_state(self.state)
            if 0 < tail < _GROUP_SIZE:  # the last group starts in this range, and torch draws it as a whole
                buffer = torch.empty(out.numel() + tail)
                self.function(buffer, *self.arguments, generator=generator)
                out.copy_(buffer[: out.numel()])
                self.leftover = buffer[out.numel() :]
            else:
                self.function(out, *self.arguments, generator=generator)
            self.state = generator.get_state()
        self.position = stop
        if tail == 0:
            self.end_state, self.leftover = self.state, None


@dataclass
class _Rules:
    """Recorded operations of the initialization rules, by parameter, in order."""

    operations: dict[str, list[_Operation]]

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See ``Initializer.read``."""
        is_plain = out.dtype == torch.float32 and out.is_contiguous()
        result = out if is_plain else torch.empty(out.numel())
        with torch.no_grad():
            for operation in self.operations[name]:
                operation.apply(start, result)
            if not is_plain:
                out.copy_(result)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operations on meta parameters.

    Attributes:
        is_simple: Whether all recorded operations can be repeated range by range.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names  # parameter names by storage
        self.is_simple = True
        self.operations: dict[str, list[_Operation]] = {name: [] for name in names.values()}
        self._seed, self._last_draw = 0, cast("_Operation | None", None)

    def begin(self, seed: int) -> None:
        """Start recording a module's rule, which draws with this seed."""
        self._seed, self._last_draw = seed, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._name(args[0]) if args and isinstance(args[0], Tensor) else None
        if func._schema.is_mutable and name is not None:
            self._record_operation(name, func, args, kwargs or {})
        elif torch.Tag.nondeterministic_seeded in func.tags and not _is_on_meta(args, kwargs or {}):
            self.is_simple = False  # repeating the recorded operations would not draw these random numbers
        return func(*args, **(kwargs or {}))

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None

    def _record_operation(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tensor, arguments = args[0], tuple(args[1:])
        is_whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        has_numbers = all(isinstance(argument, (int, float, bool, type(None))) for argument in arguments)
        options = {key: value for key, value in kwargs.items() if value is not None}
        functions = (*_DRAWS, *_FILLS, *_CHANGES) if is_whole else _FILLS
        if func not in functions or not has_numbers or options:
            self.is_simple = False
            return
        is_draw = func in _DRAWS
        previous_draw = self._last_draw if is_draw else None
        box = None if is_whole else region_of(name, tensor, tensor)  # for example, the padding token's row
        operation = _Operation(name, func, arguments, previous_draw, self._seed, tensor.numel(), box)
        if is_draw:
            self._last_draw = operation
        if func in _CHANGES or not is_whole:
            self.operations[name].append(operation)
        else:
            self.operations[name] = [operation]  # drop earlier operations, because this one overwrites their results


def _is_on_meta(args: Any, kwargs: Mapping[str, Any]) -> bool:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors:
        return str(kwargs.get("device")) == "meta"
    return all(value.device.type == "meta" for value in tensors)


def _record_rules(model: PreTrainedModel, names: Sequence[str], seed: int) -> _Rules | None:
    """Record the rules' operations. Return None if they cannot be repeated range by range."""
    from transformers import initialization

    owners = _owner_names(model, names)
    bound_tensors = {owners[name]: torch.empty(model.get_parameter(name).shape, device="meta") for name in names}
    recorder = _Recorder({tensor.untyped_storage()._cdata: name for name, tensor in bound_tensors.items()})
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            _bind(model, bound_tensors),
            initialization.guard_torch_init_functions(),
        ):
            for name, module, owner in _find_modules(model, bound_tensors):
                recorder.begin(name_seed(seed, name))
                torch.manual_seed(name_seed(seed, name))
                with recorder:
                    cast("Any", owner)._init_weights(module)
    except (RuntimeError, NotImplementedError):
        return None  # a rule reads a tensor's values, which meta tensors do not have
    operations = {name: recorder.operations[owners[name]] for name in names}
    first_ops = [ops[0] if ops else None for ops in operations.values()]
    # If the rules leave a parameter incomplete, `reset_parameters` must fill it, so use whole tensors in this layout.
    if not recorder.is_simple or any(e is None or e.box is not None or e.function in _CHANGES for e in first_ops):
        return None
    return _Rules(operations)


def name_seed(seed: int, name: str) -> int:
    """Return the random seed for a module or tensor, computed from the run's seed and its name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.sum().isnan())  # unlike `tensor.isnan()`, a sum needs no temporary tensor of the same size


def _reset_parameter(module: nn.Module, leaf: str) -> None:
    """Reset the parameter ``leaf`` of ``module`` with ``reset_parameters``, but no other parameter of the module."""
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        return
    other_parameters = {name: value for name, value in module._parameters.items() if name != leaf and value is not None}
    for name, value in other_parameters.items():
        module._parameters[name] = nn.Parameter(torch.empty_like(value), requires_grad=False)
    try:
        reset()
    finally:
        module._parameters.update(other_parameters)


def _owner_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Map each name to its parameter's first name. The module at that name initializes the parameter."""
    owners = {name: group[0] for group in tied_groups(model) for name in group}
    return {name: owners.get(name, name) for name in names}


@contextmanager
def _bind(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Bind ``tensors`` as parameters of ``model`` in the context. Other names of tied parameters stay on meta."""
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for name, tensor in tensors.items():
            module_name, _, leaf = name.rpartition(".")
            module = model.get_submodule(module_name)
            originals.append((module, leaf, model.get_parameter(name)))
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for module, leaf, parameter in originals:
            module._parameters[leaf] = parameter


def _find_modules(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, model whose rules apply) for each module that owns ``tensors``, and for all its ancestors.

    As in transformers, children come first, because a parent's rule can change its descendants. For example, GPT-2
    scales the last projection of each block.
    """
    from transformers import PreTrainedModel

    module_names = {""}
    for name in tensors:
        parts = name.split(".")
        module_names.update(".".join(parts[:length]) for length in range(1, len(parts)))

    def visit(name: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
        if name not in module_names:
            return
        if isinstance(module, PreTrainedModel):
            owner = module
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    return visit("", model, model)
