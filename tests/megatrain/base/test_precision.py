from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.precision import decode, encode, encode_high_half
from oracles.adamw import join, split

NUM_PATTERNS = 1 << 32
MAX_FINITE_BITS = 0x7F7FFFFF


def masters(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def round_trip(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    high = torch.empty(master.numel(), dtype=torch.bfloat16)
    low = torch.empty(master.numel(), dtype=torch.int16)
    decoded = torch.full_like(master, 7.0)
    encode(master, high, low)
    decode(high, low, decoded)
    return high, low, decoded


def assert_exact(bits: np.ndarray) -> None:
    master = masters(bits)
    high, low, decoded = round_trip(master)
    assert torch.equal(decoded.view(torch.int32), master.view(torch.int32))
    expected_high, expected_low = split(master.numpy())
    assert np.array_equal(high.view(torch.uint16).numpy(), expected_high)
    assert np.array_equal(low.numpy(), expected_low)


def test_a_strided_sample_of_all_patterns_and_every_edge_is_exact() -> None:
    strided = np.arange(0, NUM_PATTERNS, 4099, dtype=np.uint64)
    halves = (np.arange(1 << 16, dtype=np.uint64) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    assert_exact(np.concatenate([strided, halves.ravel().astype(np.uint64)]))


@given(st.lists(st.integers(0, NUM_PATTERNS - 1), min_size=1, max_size=50))
def test_any_pattern_is_exact(patterns: list[int]) -> None:
    assert_exact(np.array(patterns, dtype=np.uint64))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_finite_patterns_are_exact_and_rounded_to_nearest() -> None:
    num_finite, size = 0, 1 << 24
    for sign in (0, 1 << 31):
        for start in range(0, MAX_FINITE_BITS + 1, size):
            stop = min(start + size, MAX_FINITE_BITS + 1)
            master = masters(np.arange(start + sign, stop + sign, dtype=np.uint64))
            high, low, decoded = round_trip(master)
            assert torch.equal(decoded.view(torch.int32), master.view(torch.int32)), hex(start + sign)
            joined = join(high.view(torch.uint16).numpy(), low.numpy())
            assert np.array_equal(joined.view(np.uint32), master.numpy().view(np.uint32)), hex(start + sign)
            num_finite += stop - start
    assert num_finite == 4_278_190_080


def test_the_high_half_is_the_nearest_bf16_with_ties_away_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(100_000, generator=generator)
    high = torch.empty(master.numel(), dtype=torch.bfloat16)
    encode_high_half(master, high)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties], master[~ties].to(torch.bfloat16))
    tie = masters(np.array([0x3F808000, 0xBF808000], dtype=np.uint64))
    encode_high_half(tie, high[:2])
    assert high[:2].tolist() == [1.0078125, -1.0078125]  # ties-to-even would give 1.0 and -1.0


def test_high_half_is_correct_at_the_range_limits() -> None:
    patterns = [0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0x80000000]
    high, _, decoded = round_trip(masters(np.array(patterns, dtype=np.uint64)))
    assert [int(bits) for bits in high.view(torch.uint16).tolist()] == [
        0x7F7F,
        0x7F80,  # the master is finite, but rounds to infinity
        0x7F80,
        0xFF80,
        0x7FC0,
        0x8000,  # the master is NaN, but its high half is -0.0
        0x8000,
    ]
    assert decoded.view(torch.uint32).tolist() == patterns


def test_blocks_longer_than_one_conversion_are_exact() -> None:
    master = torch.randn((1 << 19) + 5, generator=torch.Generator().manual_seed(1))
    _, _, decoded = round_trip(master)
    assert torch.equal(decoded, master)


def test_halves_of_the_wrong_type_or_length_are_refused() -> None:
    master = torch.zeros(8)
    with pytest.raises(AssertionError, match="high"):
        encode(master, torch.zeros(8), torch.zeros(8, dtype=torch.int16))
    with pytest.raises(AssertionError, match="low"):
        decode(torch.zeros(8, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.int16), master)
