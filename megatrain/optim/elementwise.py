"""Elementwise optimizers on the CPU for fp32 masters and split masters: AdamW, Lion and SGD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, GRADIENT_DTYPES, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.moments import BLOCK_ELEMENTS, is_signed, moment_code, moment_kinds, rounding_key
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
"""Moment arguments of the kernels, in order. An optimizer passes None for a moment that it lacks."""

#: Empty arrays that give numba the types of a kernel's arguments.
_EXAMPLES: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.int16: np.empty(0, np.int16),
}
_FP32_MASTER: tuple[Array, Array | None] = (_EXAMPLES[torch.float32], None)
_SPLIT_MASTER: tuple[Array, Array | None] = (_EXAMPLES[torch.bfloat16], _EXAMPLES[torch.int16])


class ElementwiseOptimizer(ABC):
    """Base class of optimizers that update each element of flat CPU blocks separately.

    A subclass names its kernel and its moments (a subset of `MOMENTS`), and computes the kernel's scalars. See
    `megatrain.optim.base.Optimizer` for the contract.

    Moments in bf16 are rounded stochastically, so their expected value is exact. The random bits depend only on seed,
    step, parameter name and element index. int8 moments are indices into a code (`moments.moment_code`). Each block of
    256 elements has one scale, so segments begin at multiples of 256. Arithmetic is always in fp32. The weight is
    updated with the new moments before they are rounded.

    Args:
        threads: Compute threads. None creates one thread per usable CPU.
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
        """Name of the rule in `megatrain.optim.kernels.UPDATES` and `triton_kernels.RULES`."""

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the moments, in the order of `MOMENTS`. `ElementwiseOptimizer.__init__` reads this property."""

    @property
    def supports_rows(self) -> bool:
        """Whether `make_row_update` supports the moments. They must be fp32, because rows have no keys or scales."""
        return self.state_dtype == "float32"

    @abstractmethod
    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Compute the scalars that the rule gets for a segment, in fp64."""

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the state kinds of the master and the moments."""
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
        self.threads.run(self.kernel_calls(arrays, flat_gradient(gradient), segments, update))

    def kernel_calls(
        self, arrays: Mapping[str, Array | None], gradient: Array, segments: Sequence[Segment], update: Update
    ) -> Iterator[Callable[[], None]]:
        """Yield an update's kernel calls. They can run in any order, on any thread, and concurrently.

        Args:
            arrays: Results of `flat_master` and `flat_block`, by kind.
            gradient: Result of `flat_gradient`.
        """
        from megatrain.optim import kernels  # imported late, because importing numba takes half a second

        assert update.step >= 1, update.step
        is_int8 = self.state_dtype == "int8"
        rule_kernels = kernels.UPDATES[self.kernel_name]
        inputs = [arrays["weight"], arrays["low"], *(arrays.get(name) for name in MOMENTS), gradient]
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= gradient.size, (segment, gradient.size)
            assert not is_int8 or segment.start % BLOCK_ELEMENTS == 0, segment
            scalars = self.scalars(segment, update)
            for start, stop in cut(segment.start, segment.stop):
                weight, low, m, v, grad = (array if array is None else array[start:stop] for array in inputs)
                if is_int8:
                    scales = slice(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS))
                    moments = tuple(
                        (codes, arrays[f"{name}_scale"][scales], moment_code(is_signed(name)))  # type: ignore[index]
                        for name, codes in zip(MOMENTS, (m, v), strict=True)
                        if codes is not None
                    )
                    yield partial(rule_kernels.int8, weight, low, moments, grad, *scalars)
                else:
                    key = self.rounding_key_at(segment, update, start - segment.start)
                    yield partial(rule_kernels.update, weight, low, m, v, grad, key, *scalars)

    def rounding_key_at(self, segment: Segment, update: Update, start: int = 0) -> tuple[Any, ...] | None:
        """Return the key for the random bits of a segment from element `start`, or None without stochastic rounding."""
        if self.state_dtype != "bfloat16":
            return None
        return (*rounding_key(self.seed, update.step, segment.name), np.int64(segment.param_start + start))

    @property
    def row_kinds(self) -> tuple[str, ...]:
        """State kinds, in the column order of an address table. Unused columns are 0. Gradient and size follow."""
        return ("weight", "low", *MOMENTS)

    def make_row_update(
        self, split_master: bool, gradient: torch.dtype, segment: Segment, update: Update
    ) -> Callable[[Any], None]:
        """Return a function that updates the parameters in rows of an address table. Any thread can call it.

        Args:
            gradient: Dtype of the gradients.
            segment: Settings for all rows. The segment's range is ignored.
        """
        from megatrain.optim import kernels

        assert self.supports_rows, self.state_dtype
        moments = [_EXAMPLES[torch.float32] if name in self.moments else None for name in MOMENTS]
        examples = [*master_examples(split_master), *moments, _EXAMPLES[gradient]]
        kernel, scalars = kernels.UPDATES[self.kernel_name].rows, self.scalars(segment, update)
        return lambda rows: kernel(rows, *examples, *scalars)

    def scalars(self, segment: Segment, update: Update) -> Scalars:
        """Return the gradient factor and the rule's scalars, each rounded to fp32 once.

        The last result is cached, because most parameters have the same scalars.
        """
        key = (segment.weight_decay, segment.lr_scale, update)
        cached_key, scalars = self._last_scalars
        if cached_key != key:
            coefficients = tuple(np.float32(scalar) for scalar in self.coefficients(segment, update))
            scalars = (np.float32(update.grad_scale), coefficients)
            self._last_scalars = (key, scalars)  # atomic, so other threads never see a mismatched pair
        return scalars

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernel for these formats."""
        for split_master, dtype in formats:
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in self.state_kinds(split_master)}
            self.update(blocks, torch.zeros(1, dtype=dtype), (Segment(0, 1, 0.0),), Update(step=1, lr=0.0))


def master_examples(split_master: bool) -> tuple[Array, Array | None]:
    """Return empty arrays `(weight, low)`, from which kernels that get addresses infer a master's dtypes."""
    return _SPLIT_MASTER if split_master else _FP32_MASTER


def flat_master(blocks: Mapping[str, Tensor], num_elements: int) -> tuple[Array, Array | None]:
    """Return a master's arrays `(weight, low)`. `low` is None if the weight is fp32."""
    kinds = master_kinds("low" in blocks)
    arrays = [flat_block(kind.name, blocks[kind.name], kind.dtype, num_elements) for kind in kinds]
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def flat_gradient(gradient: Tensor) -> Array:
    """Return a gradient block's memory as a numpy array: fp32, or bf16 bits."""
    assert gradient.dtype in GRADIENT_DTYPES, gradient.dtype
    return flat_block("gradient", gradient, gradient.dtype, gradient.numel())


def flat_block(name: str, tensor: Tensor, dtype: torch.dtype, num_elements: int) -> Array:
    """Return a block's memory as a numpy array. bf16 becomes uint16, because numpy has no bf16.

    Args:
        name: Kind of the block, for assertions.
        tensor: 1-D contiguous CPU tensor.
    """
    tensor = tensor.detach()
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.device.type == "cpu", (name, tensor.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == num_elements, (name, tensor.numel(), num_elements)
    array: Array = (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()
    return array


class AdamW(ElementwiseOptimizer):
    """AdamW for flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract.

    It takes 12 bytes per parameter, 8 with bf16 moments, and 6.03 with int8 moments.

    Each element is updated as in `torch.optim.AdamW` (foreach=False), with each operation rounded to fp32::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + ((1 - beta2) * g) * g
        w = w - ((lr / (1 - beta1**step)) * m) / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    torch's kernels fuse some products and sums, so they can differ in the last bit of an operation.

    Args:
        beta1: Decay of the mean of gradients, at least 0 and below 1.
        beta2: Decay of the mean of squared gradients, at least 0 and below 1.
        threads: Compute threads. None creates one thread per usable CPU.
        seed: Seed for rounding bf16 moments.
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
    """Lion for flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract. It takes 8 bytes per parameter.

    Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (2023). Each element is updated as
    follows, with each operation rounded to fp32::

        g = grad * grad_scale
        w = w * (1 - lr * weight_decay)
        w = w - lr * sign(m * beta1 + g * (1 - beta1))
        m = m * beta2 + g * (1 - beta2)

    sign(0) and sign(NaN) are 0.

    Args:
        beta1: Weight of the momentum in the update direction, at least 0 and below 1.
        beta2: Decay of the momentum, at least 0 and below 1.
        threads: Compute threads. None creates one thread per usable CPU.
        seed: Seed for rounding bf16 moments.
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
    """SGD for flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract.

    It takes 8 bytes per parameter, or 4 without momentum. Each element is updated as in `torch.optim.SGD` without
    dampening, with each operation rounded to fp32::

        g = grad * grad_scale + w * weight_decay
        m = m * momentum + g
        w = w - m * lr                      # with nesterov: w - (g + m * momentum) * lr

    torch's kernels fuse some products and sums, so they can differ in the last bit of an operation.

    Args:
        momentum: Decay of the sum of gradients, at least 0 and below 1. If 0, there is no state.
        nesterov: Whether to step along the gradient plus the decayed sum, instead of along the sum. Requires momentum.
        threads: Compute threads. None creates one thread per usable CPU.
        seed: Seed for rounding bf16 moments.
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
        """Name of the rule: `nesterov`, or `sgd` with plain or no momentum."""
        return "nesterov" if self.nesterov else "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments: `m`, or none if momentum is 0."""
        return ("m",) if self.momentum else ()

    def coefficients(self, segment: Segment, update: Update) -> tuple[float, ...]:
        """Return `(decay, momentum, lr)`."""
        return (segment.weight_decay, self.momentum, update.lr * segment.lr_scale)
