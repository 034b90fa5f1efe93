"""Floating-point operations of a step: those that the model asks for, and those that the hardware did."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from megatrain.engine.attention import AttentionCall

if TYPE_CHECKING:
    from megatrain.engine.trace import VisitTrace

__all__ = ["StepFlops", "count_flops", "step_flops"]

_NO_FLOPS = 0


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of one optimizer step; 0 where the trace cannot tell.

    Matrix products, convolutions and attention are counted, two for each multiplication and addition; causal attention
    in full, as kernels are rated; the optimizer not.

    Attributes:
        model: of one forward and one backward of the tokens that are not padding.
        hardware: of all that was computed: the second forward of layers that are recomputed and the padding too.
    """

    model: int = _NO_FLOPS
    hardware: int = _NO_FLOPS


def step_flops(
    trace: VisitTrace,
    *,
    num_places: int,
    num_real_tokens: int,
    num_trained_tokens: int,
    kept: Container[int] = (),
) -> StepFlops:
    """Return the FLOPs of a step from those of the micro-batch that was traced.

    Layers cost the same for each place of a row, the head for each trained token; attention costs what it does in rows
    of the traced length, and so less than is counted where rows are shorter.

    Args:
        trace: of the model.
        num_places: tokens of all micro-batches, padding included.
        num_real_tokens: of them without padding; with a label.
        num_trained_tokens: of them without padding; with a label.
        kept: visits whose graphs are kept: they are not run again.
    """
    if not trace.exact or trace.uncounted or not trace.num_tokens:
        return StepFlops()
    trunk = [visit for visit in trace.visits if not visit.is_head]
    forward = sum(visit.forward_flops for visit in trunk)
    backward = sum(visit.backward_flops for visit in trunk)
    again = sum(visit.forward_flops for visit in trunk if visit.has_backward)
    saved = sum(v.forward_flops for n, v in enumerate(trace.visits) if n in kept and v.has_backward and not v.is_head)
    head = trace.head_flops * num_trained_tokens
    return StepFlops(
        model=((forward + backward - again) * num_real_tokens + head) // trace.num_tokens,
        hardware=((forward + backward - saved) * num_places + head) // trace.num_tokens,
    )


def count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of one call of a torch operator."""
    if (attention := AttentionCall.of(func, args, kwargs)) is not None:
        return attention.num_flops
    formula = _formulas().get(getattr(func, "_overloadpacket", None))
    return _NO_FLOPS if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Return operator -> formula: torch's, and those of operators that it has none for."""
    from torch.utils import flop_counter

    counter: Any = flop_counter  # its functions carry no types

    return {**counter.flop_registry, torch.ops.aten._grouped_mm: _grouped_mm}


def _grouped_mm(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Products of groups of rows [M, K] with one matrix each [E, K, N], or what their backward makes of it."""
    rows, inner = a.shape[-2:]
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * groups * rows * inner * b.shape[-1])
