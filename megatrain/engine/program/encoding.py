"""Encodings of weights whose stored values differ from the values that layers compute with.

Most blocks of weights hold the values themselves (bf16 weights are the high halves of their masters). For other
weights, `StepProgram.encodings` contains an `Encoding`. The encoding lists the blocks that a visit reads. It decodes
them in the compute tier, for this visit only, so only encoded blocks are stored in tiers and moved over links.
`megatrain/models/packed.py` defines the encoding of quantized folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Encoding(Protocol):
    """Encoding of a layout's weight. Encodings that compare equal decode the same blocks in the same way."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the blocks to read, in part order; empty to read the weight's own block."""

    @property
    def nbytes(self) -> int:
        """Total bytes of the encoded blocks over all processes."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded weight."""

    def decode(self, block: Tensor, weights: Tensor) -> None:
        """Decode a leased block into ``weights``. Kernels are queued without synchronization.

        The contents of gaps between parameters are undefined.

        Args:
            block: Whole block on the compute device.
            weights: Flat output on the same device. It has the encoding's dtype and the length of the decoded block.
        """

    def decoding_bytes(self, device: torch.device) -> int:
        """Return the peak memory that ``decode`` needs in addition to ``block`` and ``weights``."""


@dataclass(frozen=True, slots=True)
class AveragedWeight:
    """Encoding that reads the fp32 average of a weight instead of the weight, and rounds it for each visit.

    Attributes:
        keys: Keys of the average's blocks, in part order.
        nbytes: Total bytes of the average's blocks over all processes.
    """

    keys: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype

    def decode(self, block: Tensor, weights: Tensor) -> None:
        weights.copy_(block)

    def decoding_bytes(self, device: torch.device) -> int:
        return 0


def decoding_bytes(encodings: Iterable[Encoding], device: torch.device) -> int:
    """Return the peak temporary memory for decoding. Weights are decoded one at a time."""
    return max((encoding.decoding_bytes(device) for encoding in encodings), default=0)
