from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.base.precision import decode, encode
from megatrain.optim.base import Optimizer, Segment, Update, bytes_per_parameter
from megatrain.optim.elementwise import AdamW
from megatrain.optim.threads import KernelThreads
from oracles.adamw import adamw_step

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
KINDS = ("master", "m", "v", "grad")
EDGES = np.array([0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 1e-20, 1.0, -3.0, 1e18, -1e30, 3e38, -3e38], dtype=np.float32)


def make_arrays(seed: int, size: int, edges: bool) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    arrays = {kind: generator.standard_normal(size).astype(np.float32) for kind in KINDS}
    if edges:
        arrays = {
            kind: np.where(generator.random(size) < 0.5, generator.choice(EDGES, size), array)
            for kind, array in arrays.items()
        }
    arrays["v"] = np.abs(arrays["v"])
    return arrays


def make_blocks(arrays: dict[str, np.ndarray], split_master: bool) -> dict[str, Tensor]:
    blocks = {kind: torch.from_numpy(arrays[kind].copy()) for kind in ("m", "v")}
    master = torch.from_numpy(arrays["master"].copy())
    if not split_master:
        return {"weight": master, **blocks}
    high, low = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    encode(master, high, low)
    return {"weight": high, "low": low, **blocks}


def master_of(blocks: dict[str, Tensor]) -> Tensor:
    if "low" not in blocks:
        return blocks["weight"]
    master = torch.empty(blocks["m"].numel())
    decode(blocks["weight"], blocks["low"], master)
    return master


def same_bits(left: Tensor, right: np.ndarray) -> bool:
    return np.array_equal(left.numpy().view(np.uint32), right.view(np.uint32))


def reference(
    arrays: dict[str, np.ndarray], segments: Sequence[Segment], update: Update
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    master, m, v = arrays["master"].copy(), arrays["m"].copy(), arrays["v"].copy()
    for segment in segments:
        part = slice(segment.start, segment.stop)
        with np.errstate(all="ignore"):
            master[part], m[part], v[part] = adamw_step(
                master[part],
                m[part],
                v[part],
                arrays["grad"][part],
                step=update.step,
                lr=update.lr * segment.lr_scale,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=EPS,
                weight_decay=segment.weight_decay,
                grad_scale=update.grad_scale,
            )
    return master, m, v


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 32),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    num_threads=st.integers(1, 8),
    split_master=st.booleans(),
    edges=st.booleans(),
    step=st.integers(1, 10_000),
    grad_scale=st.sampled_from([1.0, 0.37, 1e-6]),
)
def test_bits_equal_the_reference_for_any_cut_and_thread_count(
    seed: int, cuts: list[int], num_threads: int, split_master: bool, edges: bool, step: int, grad_scale: float
) -> None:
    arrays = make_arrays(seed, 5000, edges)
    if edges:  # a non-finite master is never trained, so keep weights away from overflow
        arrays["master"] = np.clip(arrays["master"], -1e30, 1e30)
        arrays["grad"] = np.clip(arrays["grad"], -1e18, 1e18)
        arrays["m"], arrays["v"] = np.clip(arrays["m"], -1e18, 1e18), np.clip(arrays["v"], 0, 1e36)
    bounds = sorted({0, 5000, *cuts})
    segments = [
        Segment(start, stop, weight_decay=0.1 * (index % 2), lr_scale=1.0 + index)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    update = Update(step=step, lr=LR, grad_scale=grad_scale)
    blocks = make_blocks(arrays, split_master)
    threads = KernelThreads(num_threads)
    AdamW(*BETAS, EPS, threads=threads).update(blocks, torch.from_numpy(arrays["grad"]), segments, update)
    threads.close()
    master, m, v = reference(arrays, segments, update)
    assert np.isfinite(master).all()
    assert same_bits(blocks["m"], m)
    assert same_bits(blocks["v"], v)
    assert same_bits(master_of(blocks), master)


@pytest.mark.parametrize("split_master", [False, True])
def test_blocks_longer_than_one_range_use_all_threads_and_keep_their_bits(split_master: bool) -> None:
    arrays = make_arrays(3, 2_200_001, edges=False)
    segments, update = [Segment(0, 2_200_001, 0.1)], Update(step=3, lr=1e-3)
    threads = KernelThreads(4)
    blocks = make_blocks(arrays, split_master)
    AdamW(*BETAS, EPS, threads=threads).update(blocks, torch.from_numpy(arrays["grad"]), segments, update)
    assert sum(thread.name.startswith("optimizer") for thread in threading.enumerate()) >= 1
    threads.close()
    master, m, v = reference(arrays, segments, update)
    assert same_bits(master_of(blocks), master)
    assert same_bits(blocks["m"], m) and same_bits(blocks["v"], v)


def test_elements_outside_all_segments_keep_their_values() -> None:
    arrays = make_arrays(4, 3000, edges=False)
    blocks = make_blocks(arrays, split_master=True)
    AdamW(*BETAS, EPS).update(
        blocks, torch.from_numpy(arrays["grad"]), [Segment(1024, 2000, 0.1)], Update(step=1, lr=1e-2)
    )
    master = master_of(blocks).numpy()
    changed = master != arrays["master"]
    assert changed[1024:2000].mean() > 0.99
    assert not changed[:1024].any() and not changed[2000:].any()
    assert same_bits(blocks["m"][:1024], arrays["m"][:1024]) and same_bits(blocks["v"][2000:], arrays["v"][2000:])


def test_twenty_steps_stay_within_one_ulp_per_step_of_torch() -> None:
    """torch fuses product and sum in `lerp` and `addcmul`, so each rounds once less, and the last bits differ."""
    size, num_steps, lr = 20_000, 20, 1e-3
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(size, generator=generator) * 0.05
    parameter = torch.nn.Parameter(start.clone())
    twin = torch.optim.AdamW(
        [parameter],
        lr=lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        foreach=False,
        fused=False,
    )
    blocks = {"weight": start.clone(), "m": torch.zeros(size), "v": torch.zeros(size)}
    ours = AdamW(*BETAS, EPS)
    for step in range(1, num_steps + 1):
        grad = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 2, (size,), generator=generator)
        parameter.grad = grad.clone()
        twin.step()
        ours.update(blocks, grad, [Segment(0, size, DECAY)], Update(step, lr))
    # ulp of the weight or of the update, whichever is larger: if the two cancel, the ulp of the result is too small
    scale = torch.maximum(parameter.detach().abs(), torch.tensor(lr))
    ulp = torch.nextafter(scale, torch.tensor(torch.inf)) - scale
    worst = ((blocks["weight"] - parameter.detach()).abs() / ulp).max().item()
    assert worst <= num_steps, worst
    # if gradients cancel, their mean keeps the rounding error of the largest gradient, here about 40
    assert torch.allclose(blocks["m"], twin.state[parameter]["exp_avg"], rtol=1e-6, atol=40 * 2**-23)
    assert torch.allclose(blocks["v"], twin.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_small_updates_accumulate_in_the_split_master() -> None:
    """At lr 1e-6, a bf16 weight of 1 would never change, because the nearest bf16 number is 0.0039 away."""
    master = torch.ones(1024)
    blocks = make_blocks(
        {"master": master.numpy(), "m": np.zeros(1024, np.float32), "v": np.zeros(1024, np.float32)}, True
    )
    optimizer = AdamW()
    for step in range(1, 101):
        optimizer.update(blocks, torch.ones(1024), [Segment(0, 1024, 0.0)], Update(step, 1e-6))
    assert torch.allclose(master_of(blocks), torch.full((1024,), 1 - 1e-4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split_master", [False, True])
def test_state_takes_twelve_bytes_per_parameter(split_master: bool) -> None:
    optimizer = AdamW(*BETAS, EPS)
    kinds = optimizer.state_kinds(split_master)
    assert isinstance(optimizer, Optimizer)
    assert bytes_per_parameter(kinds) == 12
    assert [kind.name for kind in kinds] == (["weight", "low", "m", "v"] if split_master else ["weight", "m", "v"])


def test_padding_of_zeros_stays_zero() -> None:
    blocks = {kind: torch.zeros(1024) for kind in ("weight", "m", "v")}
    AdamW(*BETAS, EPS).update(blocks, torch.zeros(1024), [Segment(0, 1024, 0.1)], Update(step=1, lr=1.0))
    assert all(not block.any() for block in blocks.values())


def test_blocks_that_do_not_fit_are_refused() -> None:
    optimizer, update = AdamW(*BETAS, EPS), Update(step=1, lr=1e-3)
    blocks = {kind: torch.zeros(64) for kind in ("weight", "m", "v")}
    with pytest.raises(AssertionError, match="Segment"):
        optimizer.update(blocks, torch.zeros(64), [Segment(0, 65, 0.0)], update)
    with pytest.raises(AssertionError, match="'m'"):
        optimizer.update({**blocks, "m": torch.zeros(63)}, torch.zeros(64), [Segment(0, 64, 0.0)], update)
    with pytest.raises(AssertionError, match="bfloat16"):
        optimizer.update({**blocks, "m": torch.zeros(64, dtype=torch.bfloat16)}, torch.zeros(64), [], update)
