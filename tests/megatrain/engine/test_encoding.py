"""Encodings of weights in blocks: averages, and an encoding that the engine does not know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.engine.program.encoding import AveragedWeight, Encoding, decoding_bytes


@dataclass(frozen=True)
class EighthBytes:
    """Encoding of weights that are multiples of an eighth, with one byte each. Only this class defines it."""

    nbytes: int
    dtype: torch.dtype
    keys: tuple[str, ...] = ()

    def decode(self, block: Tensor, weights: Tensor) -> None:
        weights.copy_(block.view(torch.int8)).div_(8)

    def decoding_bytes(self, device: torch.device) -> int:
        return 12


def test_custom_encoding_needs_only_one_class() -> None:
    encoding: Encoding = EighthBytes(4, torch.bfloat16)
    weights = torch.empty(4, dtype=encoding.dtype)
    encoding.decode(torch.tensor([8, -4, 0, 1], dtype=torch.int8).view(torch.uint8), weights)
    assert weights.tolist() == [1.0, -0.5, 0.0, 0.125]


def test_averages_are_rounded() -> None:
    encoding: Encoding = AveragedWeight(("layers/ema",), 8, torch.bfloat16)
    weights = torch.empty(2, dtype=torch.bfloat16)
    encoding.decode(torch.tensor([1.0, 1 + 2**-9]), weights)
    assert weights.tolist() == [1.0, 1.0]


def test_decoding_scratch_fits_the_largest_encoding() -> None:
    device = torch.device("cpu")
    averaged, eighths = AveragedWeight(("layers/ema",), 8, torch.bfloat16), EighthBytes(4, torch.bfloat16)
    assert decoding_bytes((), device) == 0
    assert decoding_bytes((averaged, eighths, eighths), device) == 12
