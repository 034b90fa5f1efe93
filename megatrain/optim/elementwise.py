"""What optimizers share whose elements never meet: one kernel over ranges of a block, on any kind of master."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, GRADIENT_DTYPES, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.threads import KernelThreads, cut

__all__ = ["Array", "ElementwiseOptimizer", "flat_block", "flat_gradient", "flat_master"]

Array = np.ndarray[Any, Any]

#: Arrays of each dtype as the kernels see it.
_EXAMPLES: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.int16: np.empty(0, np.int16),
}
_WHOLE: tuple[Array, Array | None] = (_EXAMPLES[torch.float32], None)
_SPLIT: tuple[Array, Array | None] = (_EXAMPLES[torch.bfloat16], _EXAMPLES[torch.int16])


class ElementwiseOptimizer(ABC):
    """An optimizer over flat CPU blocks whose kernel takes `(weight, low, *state, grad, *scalars)`.

    A subclass names its kernel and its state and computes the scalars; see `megatrain.optim.base.Optimizer` for the
    contract of the methods.

    Args:
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """

    kernel_name: ClassVar[str]
    """Name of the loop in `megatrain.optim.kernels`."""

    def __init__(self, threads: KernelThreads | None = None) -> None:
        self.threads = KernelThreads() if threads is None else threads
        self._last_scalars: tuple[object, tuple[Any, ...]] = (None, ())

    @property
    @abstractmethod
    def state(self) -> tuple[StateKind, ...]:
        """What is kept besides the master, in the order of the kernel's arguments."""

    @abstractmethod
    def scalars(self, segment: Segment, update: Update) -> tuple[Any, ...]:
        """Return the kernel's scalars for one segment: computed in fp64, rounded to fp32 once."""

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
            arrays[kind.name] = flat_block(kind.name, blocks[kind.name], kind.dtype, num_elements)
        self.threads.run(self.calls(arrays, flat_gradient(gradient), segments, update))

    def calls(
        self, arrays: Mapping[str, Array | None], gradient: Array, segments: Sequence[Segment], update: Update
    ) -> Iterator[Callable[[], None]]:
        """Yield the calls that make up an update: in any order, on any threads, beside those of other updates.

        Args:
            arrays: by kind, as `flat_master` and `flat_block` give them.
            gradient: as `flat_gradient` gives it.
        """
        from megatrain.optim import kernels  # numba takes half a second to import: only a run that updates pays it

        assert update.step >= 1, update.step
        kernel: Callable[..., None] = getattr(kernels, self.kernel_name)
        flats = [arrays["weight"], arrays["low"], *(arrays[kind.name] for kind in self.state)]
        flats += [None] * (self.num_state_arguments - len(self.state))
        flats.append(gradient)
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= gradient.size, (segment, gradient.size)
            scalars = self._scalars_now(segment, update)
            for start, stop in cut(segment.start, segment.stop):
                if stop - start < gradient.size:
                    yield partial(kernel, *(flat if flat is None else flat[start:stop] for flat in flats), *scalars)
                else:
                    yield partial(kernel, *flats, *scalars)

    @property
    def rows_kinds(self) -> tuple[str | None, ...]:
        """What the columns of a table of rows hold the addresses of; gradient and size follow. None: nothing."""
        missing = self.num_state_arguments - len(self.state)
        return ("weight", "low", *(kind.name for kind in self.state), *(None for _ in range(missing)))

    def rows_call(
        self, split_master: bool, gradient: torch.dtype, segment: Segment, update: Update
    ) -> Callable[[Any], None]:
        """Return what updates the parameters of some rows that share their settings; on any thread.

        Args:
            split_master: see `state_kinds`.
            gradient: dtype of the gradients.
            segment: how all of them are updated; its range does not matter.
        """
        from megatrain.optim import kernels

        weight, low = _SPLIT if split_master else _WHOLE
        likes = [weight, low, *(_EXAMPLES[kind.dtype] for kind in self.state)]
        likes += [None] * (self.num_state_arguments - len(self.state))
        likes.append(_EXAMPLES[gradient])
        kernel: Callable[..., None] = getattr(kernels, f"{self.kernel_name}_rows")
        scalars = self._scalars_now(segment, update)
        return lambda rows: kernel(rows, *likes, scalars)

    def _scalars_now(self, segment: Segment, update: Update) -> tuple[Any, ...]:
        """Return ``scalars``, those of the last call where nothing has changed: most parameters share them."""
        wanted = (segment.weight_decay, segment.lr_scale, update)
        known, scalars = self._last_scalars
        if known != wanted:
            scalars = self.scalars(segment, update)
            self._last_scalars = (wanted, scalars)  # one assignment: other threads see both or neither
        return scalars

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernel for these kinds of master and gradient."""
        for split_master, dtype in formats:
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in self.state_kinds(split_master)}
            self.update(blocks, torch.zeros(1, dtype=dtype), (Segment(0, 1, 0.0),), Update(step=1, lr=0.0))

    @property
    def num_state_arguments(self) -> int:
        """State arguments of the kernel; those beyond `state` are None."""
        return len(self.state)


def flat_master(blocks: Mapping[str, Tensor], num_elements: int) -> tuple[Array, Array | None]:
    """Return `(weight, low)` as the kernels take a master: `low` is None where the weight is fp32."""
    kinds = master_kinds("low" in blocks)
    flats = [flat_block(kind.name, blocks[kind.name], kind.dtype, num_elements) for kind in kinds]
    return flats[0], flats[1] if len(flats) > 1 else None


def flat_gradient(gradient: Tensor) -> Array:
    """Return a gradient block's memory as numpy: fp32, or the bits of bf16."""
    assert gradient.dtype in GRADIENT_DTYPES, gradient.dtype
    return flat_block("gradient", gradient, gradient.dtype, gradient.numel())


def flat_block(name: str, tensor: Tensor, dtype: torch.dtype, num_elements: int) -> Array:
    """Return a block's memory as numpy; bf16, which numpy lacks, as its 16 bits.

    Args:
        name: Kind of the block, for what is said when it does not fit.
        tensor: 1-D contiguous CPU tensor.
        dtype: What it must hold.
        num_elements: How long it must be.
    """
    tensor = tensor.detach()
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.device.type == "cpu", (name, tensor.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == num_elements, (name, tensor.numel(), num_elements)
    flat: Array = (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()
    return flat
