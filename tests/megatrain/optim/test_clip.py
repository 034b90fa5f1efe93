from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.optim.clip import (
    clip_coefficient,
    decide_on_device,
    global_norm,
    gradient_scale,
    squared_norm,
    squared_norms,
    sum_gradients,
)
from megatrain.optim.threads import KernelThreads
from oracles import adamw as reference


def random_gradient(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-20, 18, (size,), generator=generator)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 200_000), st.integers(1, 8))
def test_norm_matches_reference_bitwise_for_any_thread_count(seed: int, size: int, num_threads: int) -> None:
    gradient, threads = random_gradient(seed, size), KernelThreads(num_threads)
    assert squared_norm(gradient, threads) == reference.squared_norm(gradient.numpy())
    threads.close()


def test_many_blocks_are_added_in_order_by_several_threads() -> None:
    gradient, one, many = random_gradient(9, 1_000_003), KernelThreads(1), KernelThreads(3)
    assert (
        squared_norm(gradient)
        == squared_norm(gradient, one)
        == squared_norm(gradient, many)
        == reference.squared_norm(gradient.numpy())
    )
    many.close()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 300_000), max_size=6), st.integers(1, 8))
def test_batched_norms_match_single_norms_bitwise(sizes: list[int], num_threads: int) -> None:
    threads = KernelThreads(num_threads)
    gradients = [random_gradient(seed, size) for seed, size in enumerate(sizes)]
    mixed = [gradient.bfloat16() if seed % 2 else gradient for seed, gradient in enumerate(gradients)]
    assert squared_norms(mixed, threads) == [squared_norm(gradient) for gradient in mixed]
    threads.close()


def test_the_norm_equals_the_exact_one_to_fp64_accuracy() -> None:
    parts = [random_gradient(seed, 10_000) for seed in range(3)]
    exact = math.sqrt(math.fsum(value * value for part in parts for value in part.tolist()))
    assert global_norm(squared_norm(part, KernelThreads(1)) for part in parts) == pytest.approx(exact, rel=1e-14)


def test_the_largest_finite_gradients_have_a_finite_norm() -> None:
    gradient = torch.full((100_000,), torch.finfo(torch.float32).max)
    assert math.isfinite(squared_norm(gradient, KernelThreads(1)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 65_535, 65_536, 100_000])
def test_single_nonfinite_element_is_detected(value: float, position: int) -> None:
    gradient = torch.zeros(100_001)
    gradient[position] = value
    assert not math.isfinite(global_norm([1.0, squared_norm(gradient, KernelThreads(1))]))


def test_clip_coefficient_matches_torch() -> None:
    for norm_of_gradient, max_grad_norm in ((5.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.0, 1.0), (123.0, 0.3)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([norm_of_gradient])
        torch.nn.utils.clip_grad_norm_([parameter], max_grad_norm)
        expected = parameter.grad.item()
        coefficient = np.float32(clip_coefficient(norm_of_gradient, max_grad_norm))
        assert norm_of_gradient * coefficient == pytest.approx(expected, rel=2e-7)
    assert clip_coefficient(5.0, 0.0) == 1.0


def test_nonfinite_norm_has_no_clip_coefficient() -> None:
    with pytest.raises(AssertionError, match="nan"):
        clip_coefficient(math.nan, 1.0)


def test_nonfinite_norm_is_used_only_with_ignore() -> None:
    for norm in (math.nan, math.inf):
        assert gradient_scale(norm, 1.0, "stop") is None and gradient_scale(norm, 1.0, "skip") is None
    assert gradient_scale(math.inf, 1.0, "ignore") == 0.0
    assert gradient_scale(5.0, 1.0, "stop") == clip_coefficient(5.0, 1.0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_gradients_of_use_sites_add_up(num_threads: int) -> None:
    total, addend, threads = random_gradient(1, 2_200_000), random_gradient(2, 2_200_000), KernelThreads(num_threads)
    expected = total + addend
    sum_gradients(total, addend, threads)
    threads.close()
    assert torch.equal(total, expected)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 70_000))
def test_norm_of_bf16_gradients_matches_their_values(seed: int, size: int) -> None:
    gradient = random_gradient(seed, size).to(torch.bfloat16)
    assert squared_norm(gradient) == squared_norm(gradient.float())


def test_bf16_gradients_are_added_in_fp32_and_rounded_as_torch_rounds() -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for addend in (torch.ones_like(patterns), patterns.flip(0).contiguous(), torch.zeros_like(patterns)):
        total = patterns.clone()
        expected = (total.float() + addend.float()).to(torch.bfloat16)
        sum_gradients(total, addend)
        assert torch.equal(total.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(total[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def test_a_bf16_gradient_can_be_added_to_an_fp32_one() -> None:
    total, addend = torch.full((1000,), 1e-3), torch.full((1000,), 1.0, dtype=torch.bfloat16)
    sum_gradients(total, addend)
    assert torch.equal(total, torch.full((1000,), 1e-3) + 1.0)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 3.7])
@pytest.mark.parametrize("nonfinite", ["stop", "skip", "ignore"])
def test_device_clip_decision_matches_the_host_bitwise(max_grad_norm: float, nonfinite: Any) -> None:
    """The tested norms are around the limit, zero, or not finite."""
    generator = np.random.default_rng(2)
    norms = [*(generator.lognormal(size=5) * 10.0**power for power in range(-6, 7))]
    norms += [np.array([1.0, math.inf]), np.array([math.nan, 1.0]), np.zeros(2)]
    for squares in norms:
        decision = decide_on_device(list(torch.from_numpy(squares)), max_grad_norm, nonfinite)
        expected = gradient_scale(global_norm(squares.tolist()), max_grad_norm, nonfinite)
        assert decision.dtype == torch.float32 and bool(decision[1]) is (expected is not None)
        if expected is not None:
            np.testing.assert_equal(decision[0].numpy(), np.float32(expected))
