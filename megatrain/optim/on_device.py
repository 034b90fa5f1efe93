"""Updates of blocks in the memory of a compute device, with the bits of the host's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update
from megatrain.optim.elementwise import ElementwiseOptimizer

if TYPE_CHECKING:
    from megatrain.optim.base import Optimizer

__all__ = [
    "DeviceKernelError",
    "TritonOptimizer",
    "device_optimizer",
]


class DeviceKernelError(RuntimeError):
    """Updates on a GPU are impossible: there is no kernel, or Triton is missing."""


class TritonOptimizer:
    """An optimizer over flat blocks on a GPU; see `megatrain.optim.base.Optimizer` for the contract.

    Same bits as the host's optimizer, so a block group may be updated here or there; only the payload of a NaN depends
    on the processor. Unlike the contract, `update` queues the work on the current stream of the blocks' device and
    returns before it is done.

    Args:
        host: The host's optimizer: its kinds of state, its scalars, and the name of its kernel.

    Raises:
        DeviceKernelError: Triton is not installed, or this optimizer has no kernel here.
    """

    def __init__(self, host: ElementwiseOptimizer) -> None:
        self._host = host
        self._kernels = _import_kernels()
        self._kernel: Any = getattr(self._kernels, host.kernel_name, None)
        if self._kernel is None:
            raise DeviceKernelError(
                f"there is no kernel of {host.kernel_name} for a GPU: let the host make the updates"
            )

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the kinds of the host's optimizer."""
        return self._host.state_kinds(split_master)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Queue one step of one block group.

        Args:
            blocks: The flat tensor of each kind, all on one GPU.
            gradient: Likewise; fp32 or bf16; unchanged.
            segments: Ranges to update, without overlap.
            update: Numbers of the step.
        """
        num_elements = gradient.numel()
        kinds = {kind.name: kind.dtype for kind in self.state_kinds("low" in blocks)}
        known = {name: _flat(name, blocks[name], dtype, gradient) for name, dtype in kinds.items()}
        state = [None if kind is None else known[kind.name] for kind in self._host.state_arguments]
        flats = [known["weight"], known.get("low"), *state, _flat("gradient", gradient, gradient.dtype, gradient)]
        block_elements = self._kernels.BLOCK_ELEMENTS
        assert gradient.is_cuda or self._kernels.IS_INTERPRETED, gradient.device
        with torch.accelerator.device_index(gradient.device.index):  # launches go to the current device
            for segment in segments:
                assert 0 <= segment.start <= segment.stop <= num_elements, (segment, num_elements)
                count = segment.stop - segment.start
                if count == 0:
                    continue
                parts = [flat if flat is None else flat[segment.start : segment.stop] for flat in flats]
                scalars = [
                    scalar if isinstance(scalar, bool) else float(scalar)
                    for scalar in self._host.scalars(segment, update)
                ]
                grid = (-(-count // block_elements),)
                self._kernel[grid](
                    *parts, count, *scalars, block_elements=block_elements, **self._kernels.LAUNCH_OPTIONS
                )

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile the kernel for these kinds of master and gradient, on the current device: 1 to 2 s each."""
        device = "cpu" if self._kernels.IS_INTERPRETED else "cuda"
        # A length that 16 divides and one that it does not: the kernel is compiled for each.
        segments = (Segment(0, 16, 0.0), Segment(16, 33, 0.0))
        for split_master, dtype in formats:
            blocks = {
                kind.name: torch.zeros(33, dtype=kind.dtype, device=device) for kind in self.state_kinds(split_master)
            }
            self.update(blocks, torch.zeros(33, dtype=dtype, device=device), segments, Update(step=1, lr=0.0))


def _import_kernels() -> ModuleType:
    """Import the kernels, and with them Triton, only in runs that update on a GPU."""
    try:
        from megatrain.optim import triton_kernels
    except ImportError as error:
        raise DeviceKernelError(
            f"updates on a GPU need Triton, which cannot be imported ({error}). PyTorch's builds for CUDA bring it "
            "along: install one of them, or let the host make the updates"
        ) from error
    return triton_kernels


def _flat(name: str, tensor: Tensor, dtype: torch.dtype, gradient: Tensor) -> Tensor:
    """Return a block as the kernel takes it: bf16 as its 16 bits."""
    tensor = tensor.detach()
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.device == gradient.device, (name, tensor.device, gradient.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == gradient.numel(), (name, tensor.numel(), gradient.numel())
    return tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor


def device_optimizer(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """Return the optimizer for blocks on a device, with the same bits as the host's.

    Args:
        optimizer: The host's.
        device: Of the blocks: a CUDA device, or the CPU that emulates one (`advanced.emulate_gpu`).

    Raises:
        DeviceKernelError: This optimizer runs on the host alone; the text says why.
    """
    if not isinstance(optimizer, ElementwiseOptimizer):
        raise DeviceKernelError(f"{type(optimizer).__name__} has no kernel for a GPU")
    return optimizer if device.type == "cpu" else TritonOptimizer(optimizer)
