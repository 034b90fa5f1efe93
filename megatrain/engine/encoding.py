"""Encodings: weights stored in another form than the values that layers compute with.

Most blocks of weights hold the values themselves (bf16 weights are the high halves of their masters). For other
weights, `StepProgram.encodings` has an `Encoding`. It lists the blocks that a visit reads, and decodes them in the
compute tier for this visit only. Tiers and links carry the stored form, and the engine is independent of the form.
`megatrain/models/packed.py` defines the encoding of quantized folders.
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
    """Encoding of one layout's weight in blocks. Equal encodings decode the same blocks in the same way."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the blocks to read, one per part of the layout's state; empty to read the weight's own block."""

    @property
    def nbytes(self) -> int:
        """Total bytes of the encoded blocks over all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded weight."""

    def decode(self, block: Tensor, weights: Tensor) -> None:
        """Decode a leased block into ``weights``. Kernels are queued without synchronization.

        The contents of gaps between parameters are undefined.

        Args:
            block: Whole block on the compute device.
            weights: Flat output of ``dtype`` on the same device, as long as the decoded block.
        """

    def decoding_bytes(self, device: torch.device) -> int:
        """Return the peak bytes that ``decode`` allocates in addition to ``block`` and ``weights``."""


@dataclass(frozen=True, slots=True)
class AveragedWeight:
    """Encoding that reads the optimizer's fp32 average instead of the weight, and rounds it for each visit.

    Attributes:
        keys: Keys of the blocks of the average, one per part of the layout's state.
        nbytes: Total bytes of these blocks over all ranks.
    """

    keys: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype

    def decode(self, block: Tensor, weights: Tensor) -> None:
        weights.copy_(block)

    def decoding_bytes(self, device: torch.device) -> int:
        return 0


def decoding_bytes(encodings: Iterable[Encoding], device: torch.device) -> int:
    """Return the peak bytes of decoding in addition to blocks and weights. Weights are decoded one at a time."""
    return max((encoding.decoding_bytes(device) for encoding in encodings), default=0)
