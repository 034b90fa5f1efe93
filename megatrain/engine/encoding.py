"""Encodings: forms of a weight in its blocks that differ from the numbers that layers compute with.

Most blocks hold their weights themselves (bf16 weights are the high halves of their masters). For other weights,
`StepProgram.encodings` has an `Encoding`: the blocks that a visit reads, and the function that makes the weight from
them in the compute tier, for that visit only. So tiers and links carry the stored form, and the engine does not depend
on any form. `megatrain/models/packed.py` has the packed bytes of quantized folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AveragedWeight", "Encoding", "decoding_bytes"]


class Encoding(Protocol):
    """Encoding of one layout's weight in blocks. A value: equal encodings read equal blocks in the same way."""

    @property
    def keys(self) -> Sequence[str]:
        """Blocks read in place of the weight's own, one for each part of its state; empty for its own block."""

    @property
    def nbytes(self) -> int:
        """Size of these blocks together, over all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that layers compute in."""

    def decode(self, block: Tensor, weights: Tensor) -> None:
        """Write the weights of a leased block. Kernels are queued without synchronization.

        Gaps between parameters need not be written.

        Args:
            block: Whole block, on the compute device.
            weights: Flat output, of ``dtype``, on the same device, as long as the decoded block.
        """

    def decoding_bytes(self, device: torch.device) -> int:
        """Return the peak bytes that ``decode`` allocates in addition to block and weights."""


@dataclass(frozen=True, slots=True)
class AveragedWeight:
    """fp32 averages of a weight from the optimizer, read in place of the weight and rounded for each visit.

    Attributes:
        keys: Blocks of the averages, one for each part of the layout's state.
        nbytes: Size of these blocks together, over all ranks.
    """

    keys: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype

    def decode(self, block: Tensor, weights: Tensor) -> None:
        weights.copy_(block)

    def decoding_bytes(self, device: torch.device) -> int:
        return 0


def decoding_bytes(encodings: Iterable[Encoding], device: torch.device) -> int:
    """Return the peak bytes of decoding in addition to blocks and weights. Weights are decoded one after the other."""
    return max((encoding.decoding_bytes(device) for encoding in encodings), default=0)
