"""Counters for the memory and work of operators on fake tensors, and the FLOPs of a whole step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.device_kernels import is_gpu_stand_in
from megatrain.engine.device.flash import planned_flash
from megatrain.engine.device.work import NO_WORK, Work, moved_nbytes
from megatrain.engine.program.visit_trace import KEEP_NOTHING, Recompute, VisitTrace
from megatrain.engine.unit.arguments import tree_map
from megatrain.engine.unit.unneeded import changed_arguments

#: Function called with each operator, its arguments and its result.
Recorder = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]

_ERROR_MODE = 2  # torch's debug mode in which nondeterministic operations raise an error
_DEVICE_OP = torch.ops.prim.device.default
#: Maximum number of elements in tensors whose values the trace computes.
_MAX_NUMEL = 1 << 25
#: Operators whose values are not computed, because they would be random or uninitialized.
_RANDOM_OPS = frozenset({torch.ops.aten.rand.default, torch.ops.aten.randn.default, torch.ops.aten.empty.memory_format})


class CountingError(RuntimeError):
    """Error for an operator that the trace cannot count. The model itself is valid, but its counts would be wrong."""


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts work and live bytes of operators, and guesses values that model code reads from fake tensors.

    Attributes:
        peak_nbytes: Maximum of ``live_nbytes`` since the caller's last reset.
        work: Work of all operators since the caller's last reset.
        num_storages: Number of storages created so far.
        new_nbytes: Sizes of live storages created since the caller last cleared this dict, by storage.
        uncounted_ops: Operators without a FLOP formula, with reasons.
        on_launch: Function called with the tensors of each kernel launch that is not a torch operator, or None.
        recorder: Function called for each operator and for each such kernel launch, or None.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_launch: Callable[[Sequence[Tensor]], None] | None = None
        self.recorder: Recorder | None = None
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.work = NO_WORK
        self.uncounted_ops: dict[str, None] = {}  # ordered set
        self.current_unit = "the model"
        self.num_guesses = 0
        self._guesses: dict[str, dict[str, None]] = {}  # text -> ordered set of units
        self.new_nbytes: dict[int, int] = {}
        self.num_storages = 0
        self._live_storages: dict[int, tuple[int, int]] = {}  # storage -> bytes, index in order of creation
        self._is_paused = False
        self._values = WeakTensorKeyDictionary()  # fake tensor -> real values

    def live_nbytes_before(self, storage_index: int) -> int:
        """Return the total size of live storages that were created before the storage with this index."""
        return sum(nbytes for nbytes, index in self._live_storages.values() if index < storage_index)

    def storage_index(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor's storage in order of creation, or None if the storage is not known."""
        storage = self._live_storages.get(tensor.untyped_storage()._cdata)
        return None if storage is None else storage[1]

    def add_launch(self, work: Work, uncounted_note: str, tensors: Sequence[Tensor]) -> None:
        """Count a kernel launch that is not a torch operator.

        Args:
            uncounted_note: Description of work that cannot be counted, or "".
        """
        self.work += work
        if self.on_launch is not None:
            self.on_launch(tensors)
        if self.recorder is not None:
            self.recorder(work, tuple(tensors), {}, None)
        if uncounted_note:
            self.uncounted_ops.setdefault(uncounted_note)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the memory of tensors that are created within the context."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def set_values(self, tensor: Tensor, value: Tensor) -> None:
        """Assign the values of a real host tensor to a fake tensor. Values computed from them are then also known."""
        with _disable_current_modes():
            self._values[tensor] = value.clone()

    @contextmanager
    def within_unit(self, name: str) -> Iterator[None]:
        """Attribute guesses within the context to a unit."""
        previous, self.current_unit = self.current_unit, name
        try:
            yield
        finally:
            self.current_unit = previous

    def guess(self, reason: str) -> None:
        """Record a guessed value. Guesses with the same reason are reported together for all units."""
        self.num_guesses += 1
        self._guesses.setdefault(reason, {}).setdefault(self.current_unit)

    @property
    def guesses(self) -> tuple[str, ...]:
        """One sentence for each reason, with the first unit concerned and the number of further units."""
        return tuple(
            f"{next(iter(names))}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
            for reason, names in self._guesses.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OP and not self._values:  # autograd calls it hundreds of times per layer
            return func(*args)
        kwargs = kwargs or {}
        result = self._run_with_values(func, args, kwargs) if self._values else self._run(func, args, kwargs)
        try:
            self._count_call(func, args, kwargs, result)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise CountingError(f"{func} cannot be counted: {type(error).__name__}: {error}") from error
        if self.recorder is not None:
            self.recorder(func, args, kwargs, result)
        return result

    def _run_with_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator. If the values of all inputs are known, also compute the result's values."""
        inputs = tensors_in((args, dict(kwargs)))
        unknown_inputs = [tensor for tensor in inputs if tensor not in self._values and not _is_real(tensor)]
        if func is torch.ops.aten.index.Tensor and unknown_inputs:
            args = (args[0], self._masks_to_indexes(args[1]), *args[2:])
        if unknown_inputs or func in _RANDOM_OPS or any(tensor.numel() > _MAX_NUMEL for tensor in inputs):
            for tensor in changed_arguments(func, args, kwargs):
                self._values.pop(tensor, None)  # type: ignore[no-untyped-call]
            return self._run(func, args, kwargs)
        device = kwargs.get("device") or next((t.device for t in inputs if not _is_real(t)), None)
        with _disable_current_modes():
            real_args, real_kwargs = tree_map((args, dict(kwargs)), self._real_value)
            value = func(*real_args, **real_kwargs)
        if not tensors_in(value):
            return value
        changed_tensors = changed_arguments(func, args, kwargs)
        if changed_tensors or not _has_dynamic_shape(func):
            result = self._run(func, args, kwargs)
        else:
            result = tree_map(
                value,
                lambda item: (
                    torch.empty(item.shape, dtype=item.dtype, device=device) if isinstance(item, Tensor) else item
                ),
            )
        for fake, real in zip(tensors_in(result), tensors_in(value), strict=True):
            if not any(fake is tensor for tensor in changed_tensors) and real.numel() <= _MAX_NUMEL:
                self._values[fake] = real
        return result

    def _real_value(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self._values.get(item, item)  # type: ignore[no-untyped-call]
        return torch.device("cpu") if isinstance(item, torch.device) else item

    def _masks_to_indexes(self, indices: Sequence[Any]) -> list[Any]:
        """Replace masks with known values by the selected indexes, because a fake mask selects an unknown number."""
        indexes: list[Any] = []
        for index in indices:
            if not isinstance(index, Tensor) or index.dtype != torch.bool or index not in self._values:
                indexes.append(index)
                continue
            with _disable_current_modes():
                selections = self._values[index].nonzero().unbind(1)
            for selected in selections:
                indexes.append(torch.empty(selected.shape, dtype=torch.long, device=index.device))
                self._values[indexes[-1]] = selected
        return indexes

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator on fake tensors, or a guessed number."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if (constant := getattr(args[0], "constant", None)) is not None:
                return constant.item()
            self.guess("it reads a value that is unknown before it runs; assumed to be 0 or true")
            if args[0].dtype == torch.bool:
                return True  # lets validity checks pass
            return 0.0 if args[0].is_floating_point() else 0
        if func is aten.nonzero.default:
            self.guess("the number of nonzero elements is unknown before it runs; assumed to be the longest side")
            num_nonzero = max(args[0].shape, default=1)
            return torch.zeros(num_nonzero, args[0].dim(), dtype=torch.long, device=args[0].device)
        if func is aten.rand.default and not args[0]:
            # Layer drop skips a layer if this number is below a rate. Return 1, so that the plan covers all layers.
            return torch.tensor(1.0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # torch's fake kernel accepts only bf16; the real kernel also accepts fp32.
            with self.pause():
                bf16_args = [arg.to(torch.bfloat16) for arg in args[:2]]
                shape = func(*bf16_args, *args[2:], **kwargs).shape
            return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **kwargs)

    def _count_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        attention = AttentionCall.from_operator(func, args, kwargs)
        self.work += attention.work if attention is not None else self._estimate_work(func, args, kwargs, result)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._count_storage(item)
        if attention is not None and not self._is_paused:
            is_deterministic = torch.get_deterministic_debug_mode() == _ERROR_MODE
            device = torch.device("cuda") if is_gpu_stand_in(args[0]) else args[0].device
            nbytes = attention.workspace_nbytes(device, is_deterministic=is_deterministic, flash=planned_flash())
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + nbytes)

    def _estimate_work(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Work:
        """Return the work of a call. If torch's FLOP formula fails, record the failure; the plan then shows no MFU."""
        flops = 0
        try:
            flops = count_flops(func, args, kwargs, result)
        except Exception as error:
            self.uncounted_ops.setdefault(f"{func}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if flops:
            return Work(product_flops=flops, launches=1)
        nbytes = moved_nbytes(func, args, kwargs, result)
        return NO_WORK if nbytes is None else Work(moved_nbytes=nbytes, launches=1)

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live_storages:
            return
        nbytes = 0 if self._is_paused else storage.nbytes()
        self._live_storages[key] = nbytes, self.num_storages
        self.new_nbytes[key] = nbytes
        self.num_storages += 1
        weakref.finalize(storage, self._forget_storage, key)
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def _forget_storage(self, key: int) -> None:
        self.live_nbytes -= self._live_storages.pop(key)[0]
        self.new_nbytes.pop(key, None)


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has real values, such as a constant in model code."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def tensors_in(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    tree_map(value, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
    return tensors


def _has_dynamic_shape(func: Any) -> bool:
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(getattr(func, "tags", ())))


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one optimizer step, or 0 if some FLOPs are unknown.

    The counts include matmuls, convolutions and attention, with two FLOPs per multiply-add. Causal attention counts in
    full, as in published kernel benchmarks. The optimizer is not included.

    Attributes:
        model: FLOPs of one forward and one backward, without padding and recomputes.
        hardware: All executed FLOPs, including padding and recomputes.
    """

    model: int = 0
    hardware: int = 0


def is_counted(trace: VisitTrace) -> bool:
    """Return whether a trace has counted the FLOPs of all its operators."""
    return trace.exact and not trace.uncounted_ops and bool(trace.num_tokens)


def step_flops(
    trace: VisitTrace,
    *,
    num_positions: int,
    num_real_tokens: int,
    num_trained_tokens: int,
    recompute: Recompute = KEEP_NOTHING,
) -> StepFlops:
    """Return the FLOPs of a step, scaled from the traced micro-batch.

    The layers' FLOPs are scaled by the number of positions (``hardware``) or real tokens (``model``), and the head's by
    the number of labelled tokens. All rows count with the traced length, so attention counts too much in shorter rows.

    Args:
        num_positions: Total number of tokens, including padding.
        num_real_tokens: Number of tokens without padding.
        num_trained_tokens: Number of labelled tokens.
        recompute: Forward results kept for the backward. If the loss compares rows, no logits may be kept.
    """
    if not is_counted(trace):
        return StepFlops()
    trunk = [visit for visit in trace.visits if not visit.is_head]
    trunk_flops = sum(visit.forward.flops + visit.backward.flops for visit in trunk)
    recompute_flops = sum(visit.recompute.flops for visit in trunk)
    kept_graphs = recompute.kept_graphs
    saved_flops = sum(visit.recompute.flops for index, visit in enumerate(trace.visits) if index in kept_graphs)
    saved_flops += sum(recompute.savable_results(index, visit).work.flops for index, visit in enumerate(trace.visits))
    head_flops = trace.head.flops * num_trained_tokens
    num_recomputed = max(0, trace.head_parts - recompute.kept_parts)
    logits_flops = trace.logits_flops * num_trained_tokens * num_recomputed // trace.head_parts
    return StepFlops(
        model=((trunk_flops - recompute_flops) * num_real_tokens + head_flops) // trace.num_tokens,
        hardware=((trunk_flops - saved_flops) * num_positions + head_flops + logits_flops) // trace.num_tokens,
    )


def count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of one call to a torch operator."""
    if (attention := AttentionCall.from_operator(func, args, kwargs)) is not None:
        return attention.num_flops
    formula = _flop_formulas().get(getattr(func, "_overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Return the FLOP formulas of torch and of this file, by operator."""
    from torch.utils import flop_counter

    counter: Any = flop_counter  # the module is untyped

    return {**counter.flop_registry, torch.ops.aten._grouped_mm: _grouped_mm_flops}


def _grouped_mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped matmul, groups of rows [M, K] @ matrices [E, K, N], or of its backward."""
    rows, width = a.shape[-2:]
    num_groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * num_groups * rows * width * b.shape[-1])
