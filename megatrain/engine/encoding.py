"""How blocks hold a weight where they do not hold the numbers that layers compute with.

Most weights lie in their blocks as they are (of bf16 weights the high halves of their masters). For others
`StepProgram.encodings` has an `Encoding`: which blocks are read in a visit, and what makes the weight of them in the
compute tier, where it lives for that visit alone. So tiers and links carry the stored form, and no code of the engine
knows which forms there are: packed bytes of quantized folders are `megatrain/models/packed.py`.
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
    """How blocks hold the weight of one layout. A value: equal encodings read equal blocks alike."""

    @property
    def keys(self) -> Sequence[str]:
        """Blocks that are read in the place of the weight's own, one for each part of its state; none: its own one."""

    @property
    def nbytes(self) -> int:
        """Size of these blocks together, of all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers compute in."""

    def decode(self, block: Tensor, weights: Tensor) -> None:
        """Write the weights that a leased block holds. Kernels are queued, and nothing waits for them.

        What lies between parameters may be left as it is.

        Args:
            block: Whole, on the compute device.
            weights: Flat, of ``dtype``, on the same device, as long as what the block stands for; written.
        """

    def decoding_bytes(self, device: torch.device) -> int:
        """Return what ``decode`` allocates at once beside block and weights."""


@dataclass(frozen=True, slots=True)
class AveragedWeight:
    """Averages that the optimizer keeps of a weight in fp32, read in its place and rounded for each visit.

    Attributes:
        keys: Blocks of the averages, one for each part of the layout's state.
        nbytes: Size of these blocks together, of all ranks.
    """

    keys: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype

    def decode(self, block: Tensor, weights: Tensor) -> None:
        weights.copy_(block)

    def decoding_bytes(self, device: torch.device) -> int:
        return 0


def decoding_bytes(encodings: Iterable[Encoding], device: torch.device) -> int:
    """Return what decoding takes at once beside blocks and weights: weights are decoded one after the other."""
    return max((encoding.decoding_bytes(device) for encoding in encodings), default=0)
