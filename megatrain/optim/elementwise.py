"""AdamW, Lion and SGD: elementwise updates, one rule each, over ranges of a block, for both kinds of master."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, GRADIENT_DTYPES, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.moments import BLOCK_ELEMENTS, code_of, is_signed, moment_kinds, rounding_key
from megatrain.optim.table import StateDtype
from megatrain.optim.threads import KernelThreads, cut

__all__ = [
    "MOMENTS",
    "SGD",
    "AdamW",
    "Array",
    "ElementwiseOptimizer",
    "Lion",
    "flat_block",
    "flat_gradient",
    "flat_master",
]

Array = np.ndarray[Any, Any]
Scalars = tuple[np.float32, tuple[np.float32, ...]]
MOMENTS = ("m", "v")
"""Moments in the kernels of every elementwise optimizer; an optimizer passes None for a moment that it lacks."""

#: Empty arrays, from which numba infers the types of a kernel's arguments.
_EXAMPLES: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.int16: np.empty(0, np.int16),
}
_WHOLE: tuple[Array, Array | None] = (_EXAMPLES[torch.float32], None)
_SPLIT: tuple[Array, Array | None] = (_EXAMPLES[torch.bfloat16], _EXAMPLES[torch.int16])


class ElementwiseOptimizer(ABC):
    """An optimizer over flat CPU blocks that updates each element separately.

    A subclass names its kernels and its moments, some of `MOMENTS`, and computes the scalars of the kernels. See
    `megatrain.optim.base.Optimizer` for the contract.

    Moments in bf16 are rounded stochastically, so the mean of many roundings is the exact number. The random bits
    depend only on seed, step, parameter name and element index. Moments in int8 are bytes of a code
    (`moments.code_of`), in blocks of 256 elements with a shared scale, and segments begin at multiples of 256.
    Arithmetic is always in fp32, and the weight is updated with the new moments before they are rounded.

    Args:
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """

    def __init__(
        self, threads: KernelThreads | None = None, state_dtype: StateDtype = "float32", seed: int = 0
    ) -> None:
        self.threads = KernelThreads() if threads is None else threads
        self.state_dtype: StateDtype = state_dtype if self.moments else "float32"
        self.seed = seed
        self.state: tuple[StateKind, ...] = tuple(
            kind for name in self.moments for kind in moment_kinds(name, self.state_dtype)
        )
        self._last_scalars: tuple[object, Scalars] = (None, (np.float32(0.0), ()))

    @property
    @abstractmethod
    def kernel_name(self) -> str:
        """Name of its rule in `megatrain.optim.kernels.UPDATES` and `triton_kernels.RULES`."""

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the moments, in the order of `MOMENTS`. Available before `__init__` of this class."""

    @property
    def has_rows(self) -> bool:
        """Whether `rows_call` can be used; rows have no columns for keys and scales."""
        return self.state_dtype == "float32"

    @abstractmethod
    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Return the scalars of the rule for one segment, computed in fp64."""

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the master and the state."""
        return (*master_kinds(split_master), *self.state)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`."""
        num_elements = gradient.numel()
        arrays: dict[str, Array | None] = dict(zip(("weight", "low"), flat_master(blocks, num_elements), strict=True))
        for kind in self.state:
            length = kind.elements_for(num_elements)
            arrays[kind.name] = flat_block(kind.name, blocks[kind.name], kind.dtype, length)
        self.threads.run(self.calls(arrays, flat_gradient(gradient), segments, update))

    def calls(
        self, arrays: Mapping[str, Array | None], gradient: Array, segments: Sequence[Segment], update: Update
    ) -> Iterator[Callable[[], None]]:
        """Yield the kernel calls of an update; they may run in any order, on any thread, and concurrently with others.

        Args:
            arrays: by kind, from `flat_master` and `flat_block`.
            gradient: from `flat_gradient`.
        """
        from megatrain.optim import kernels  # late: importing numba takes half a second, and only updates need it

        assert update.step >= 1, update.step
        in_bytes = self.state_dtype == "int8"
        of_this = kernels.UPDATES[self.kernel_name]
        flats = [arrays["weight"], arrays["low"], *(arrays.get(name) for name in MOMENTS), gradient]
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= gradient.size, (segment, gradient.size)
            assert not in_bytes or segment.start % BLOCK_ELEMENTS == 0, segment
            scalars = self.scalars(segment, update)
            for start, stop in cut(segment.start, segment.stop):
                weight, low, m, v, grad = (flat if flat is None else flat[start:stop] for flat in flats)
                if in_bytes:
                    scales = slice(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS))
                    moments = tuple(
                        (codes, arrays[f"{name}_scale"][scales], code_of(is_signed(name)))  # type: ignore[index]
                        for name, codes in zip(MOMENTS, (m, v), strict=True)
                        if codes is not None
                    )
                    yield partial(of_this.in_bytes, weight, low, moments, grad, *scalars)
                else:
                    key = self.rounding(segment, update, start - segment.start)
                    yield partial(of_this.update, weight, low, m, v, grad, key, *scalars)

    def rounding(self, segment: Segment, update: Update, start: int = 0) -> tuple[Any, ...] | None:
        """Return the key of the random bits for a segment from its element `start` on, or None without rounding."""
        if self.state_dtype != "bfloat16":
            return None
        return (*rounding_key(self.seed, update.step, segment.name), np.int64(segment.first + start))

    @property
    def rows_kinds(self) -> tuple[str, ...]:
        """State kinds in the column order of an address table, before gradient and size; an unused one has 0."""
        return ("weight", "low", *MOMENTS)

    def rows_call(
        self, split_master: bool, gradient: torch.dtype, segment: Segment, update: Update
    ) -> Callable[[Any], None]:
        """Return the function that updates the parameters of some rows with equal settings; on any thread.

        Args:
            split_master: As in `state_kinds`.
            gradient: dtype of the gradients.
            segment: settings of all rows; its range is ignored.
        """
        from megatrain.optim import kernels

        assert self.has_rows, self.state_dtype
        moments = [_EXAMPLES[torch.float32] if name in self.moments else None for name in MOMENTS]
        likes = [*master_examples(split_master), *moments, _EXAMPLES[gradient]]
        kernel, scalars = kernels.UPDATES[self.kernel_name].rows, self.scalars(segment, update)
        return lambda rows: kernel(rows, *likes, *scalars)

    def scalars(self, segment: Segment, update: Update) -> Scalars:
        """Return the factor on gradients and the scalars of the rule, each rounded to fp32 once.

        Caches the last result, which most parameters share.
        """
        wanted = (segment.weight_decay, segment.lr_scale, update)
        known, scalars = self._last_scalars
        if known != wanted:
            rounded = tuple(np.float32(number) for number in self.coefficients(segment, update))
            scalars = (np.float32(update.grad_scale), rounded)
            self._last_scalars = (wanted, scalars)  # a single assignment, so other threads see both or neither
        return scalars

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernel for these kinds of master and gradient."""
        for split_master, dtype in formats:
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in self.state_kinds(split_master)}
            self.update(blocks, torch.zeros(1, dtype=dtype), (Segment(0, 1, 0.0),), Update(step=1, lr=0.0))


def master_examples(split_master: bool) -> tuple[Array, Array | None]:
    """Return empty arrays `(weight, low)` with the dtypes of a master, for kernels that receive addresses."""
    return _SPLIT if split_master else _WHOLE


def flat_master(blocks: Mapping[str, Tensor], num_elements: int) -> tuple[Array, Array | None]:
    """Return the arrays `(weight, low)` of a master; `low` is None if the weight is fp32."""
    kinds = master_kinds("low" in blocks)
    flats = [flat_block(kind.name, blocks[kind.name], kind.dtype, num_elements) for kind in kinds]
    return flats[0], flats[1] if len(flats) > 1 else None


def flat_gradient(gradient: Tensor) -> Array:
    """Return a gradient block's memory as numpy: fp32, or the bits of bf16."""
    assert gradient.dtype in GRADIENT_DTYPES, gradient.dtype
    return flat_block("gradient", gradient, gradient.dtype, gradient.numel())


def flat_block(name: str, tensor: Tensor, dtype: torch.dtype, num_elements: int) -> Array:
    """Return a block's memory as numpy; bf16 becomes its 16 bits, because numpy lacks it.

    Args:
        name: Kind of the block, for assertions.
        tensor: 1-D contiguous CPU tensor.
    """
    tensor = tensor.detach()
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.device.type == "cpu", (name, tensor.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == num_elements, (name, tensor.numel(), num_elements)
    flat: Array = (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()
    return flat


class AdamW(ElementwiseOptimizer):
    """AdamW over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 12 bytes per parameter.

    8 with moments in bf16, 6.03 in int8: see `ElementwiseOptimizer`.

    Each element goes through these operations, each one rounded to fp32, as in `torch.optim.AdamW` (foreach=False)::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + ((1 - beta2) * g) * g
        w = w - ((lr / (1 - beta1**step)) * m) / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    torch's kernels fuse some products and sums, so they may differ by the last bit of an operation.

    Args:
        beta1: Decay of the mean of gradients, at least 0 and below 1.
        beta2: Decay of the mean of squared gradients, at least 0 and below 1.
        eps: Added to the denominator.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
        seed: Seed of the rounding of moments in bf16.
    """

    kernel_name = "adamw"

    moments = ("m", "v")

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        *,
        threads: KernelThreads | None = None,
        state_dtype: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        assert 0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0, (beta1, beta2, eps)
        super().__init__(threads, state_dtype, seed)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Return `(decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2**step), eps, step_size)`."""
        lr = update.lr * segment.lr_scale
        return (
            1.0 - lr * segment.weight_decay,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            (1.0 - self.beta2**update.step) ** 0.5,
            self.eps,
            lr / (1.0 - self.beta1**update.step),
        )


class Lion(ElementwiseOptimizer):
    """Lion over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 8 bytes per parameter.

    Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (2023). Each element goes through these
    operations, each one rounded to fp32::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        w = w - lr * sign(m * beta1 + g * (1 - beta1))
        m = m * beta2 + g * (1 - beta2)

    The sign of zero, and of NaN, is zero.

    Args:
        beta1: Weight of the momentum in the direction, at least 0 and below 1.
        beta2: Decay of the momentum, at least 0 and below 1.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
        seed: Seed of the rounding of moments in bf16.
    """

    kernel_name = "lion"

    moments = ("m",)

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.99,
        *,
        threads: KernelThreads | None = None,
        state_dtype: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        assert 0 <= beta1 < 1 and 0 <= beta2 < 1, (beta1, beta2)
        super().__init__(threads, state_dtype, seed)
        self.beta1, self.beta2 = beta1, beta2

    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Return `(decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)`."""
        lr = update.lr * segment.lr_scale
        return (
            1.0 - lr * segment.weight_decay,
            self.beta1,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            lr,
        )


class SGD(ElementwiseOptimizer):
    """SGD over flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. 4 or 8 bytes per parameter.

    Each element goes through these operations, each one rounded to fp32, as in `torch.optim.SGD` without dampening::

        g = grad * grad_scale + w * weight_decay
        m = m * momentum + g
        w = w - m * lr                      # with nesterov: w - (g + m * momentum) * lr

    torch's kernels fuse some products and sums, so they may differ by the last bit of an operation.

    Args:
        momentum: Decay of the sum of gradients, at least 0 and below 1; 0 keeps no state.
        nesterov: Step along the gradient plus the decayed sum instead of along the sum. Needs momentum.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
        seed: Seed of the rounding of moments in bf16.
    """

    def __init__(
        self,
        momentum: float = 0.9,
        nesterov: bool = False,
        *,
        threads: KernelThreads | None = None,
        state_dtype: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        assert 0 <= momentum < 1 and (momentum > 0 or not nesterov), (momentum, nesterov)
        self.momentum, self.nesterov = momentum, nesterov
        super().__init__(threads, state_dtype, seed)

    @property
    def kernel_name(self) -> str:
        """`nesterov`, or `sgd` with plain momentum or none."""
        return "nesterov" if self.nesterov else "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """`m`; none without momentum."""
        return ("m",) if self.momentum else ()

    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Return `(decay, momentum, lr)`."""
        return (segment.weight_decay, self.momentum, update.lr * segment.lr_scale)
