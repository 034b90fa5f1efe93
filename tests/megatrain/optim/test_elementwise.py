"""AdamW, Lion and SGD match their references bit for bit, for every kind of master and gradient, and match torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.optim.base import Optimizer, Segment, Update, bytes_per_parameter
from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
from megatrain.optim.threads import RANGE_ELEMENTS, KernelThreads
from oracles.adamw import adamw_step
from oracles.blocks import (
    changed_halves,
    cut_segments,
    gradient_block,
    master_blocks,
    master_of,
    random_array,
    same_bits,
    update_on,
)
from oracles.lion import lion_step, sgd_step

NAMES = ("adamw", "lion", "sgd", "sgd-nesterov", "sgd-plain")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class State:
    """Master and state of an optimizer, as fp32 arrays."""

    master: Any
    kept: dict[str, Any]


def make_optimizer(name: str) -> ElementwiseOptimizer:
    if name == "adamw":
        return AdamW(threads=KernelThreads(1))
    if name == "lion":
        return Lion(threads=KernelThreads(1))
    momentum = 0.0 if name == "sgd-plain" else 0.9
    return SGD(momentum, nesterov=name == "sgd-nesterov", threads=KernelThreads(1))


def reference_step(name: str, state: State, grad: Any, segments: Sequence[Segment], update: Update) -> None:
    for segment in segments:
        part = slice(segment.start, segment.stop)
        options = {
            "lr": update.lr * segment.lr_scale,
            "weight_decay": segment.weight_decay,
            "grad_scale": update.grad_scale,
        }
        own = {kind: array[part] for kind, array in state.kept.items()}
        with np.errstate(all="ignore"):
            if name == "adamw":
                new = adamw_step(
                    state.master[part],
                    own["m"],
                    own["v"],
                    grad[part],
                    step=update.step,
                    beta1=0.9,
                    beta2=0.95,
                    eps=1e-8,
                    **options,
                )
            elif name == "lion":
                new = lion_step(state.master[part], own["m"], grad[part], beta1=0.9, beta2=0.99, **options)
            else:
                new = sgd_step(
                    state.master[part],
                    own.get("m"),
                    grad[part],
                    momentum=0.9,
                    nesterov=name == "sgd-nesterov",
                    **options,
                )
        state.master[part] = new[0]
        for kind, array in zip(state.kept, new[1:], strict=False):
            state.kept[kind][part] = array


@settings(max_examples=150)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 1 << 32),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    num_threads=st.integers(1, 8),
    split_master=st.booleans(),
    grad_dtype=st.sampled_from(DTYPES),
    palette=st.sampled_from(["normal", "finite", "everything"]),
    step=st.integers(1, 10_000),
    grad_scale=st.sampled_from([1.0, 0.37, 1e-6]),
)
def test_bits_equal_the_reference(
    name: str,
    seed: int,
    cuts: list[int],
    num_threads: int,
    split_master: bool,
    grad_dtype: torch.dtype,
    palette: str,
    step: int,
    grad_scale: float,
) -> None:
    size, generator = 5000, np.random.default_rng(seed)
    optimizer = make_optimizer(name)
    state = State(
        random_array(generator, size, palette),
        {kind.name: random_array(generator, size, palette) for kind in optimizer.state},
    )
    if "v" in state.kept:
        state.kept["v"] = np.abs(state.kept["v"])
    blocks = master_blocks(state.master, split_master)
    blocks.update({kind: torch.from_numpy(array.copy()) for kind, array in state.kept.items()})
    grad, read = gradient_block(random_array(generator, size, palette), grad_dtype)
    segments, update = cut_segments(cuts, size), Update(step, 1e-3, grad_scale)
    update_on(optimizer, num_threads, blocks, grad, segments, update)
    reference_step(name, state, read + np.float32(0), segments, update)  # -0 counts as 0
    assert same_bits(master_of(blocks), state.master)
    for kind, array in state.kept.items():
        assert same_bits(blocks[kind].numpy(), array), kind


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split_master", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_blocks_longer_than_one_range_match_the_reference(
    name: str, split_master: bool, grad_dtype: torch.dtype
) -> None:
    size, generator = 2 * RANGE_ELEMENTS + 1025, np.random.default_rng(3)
    optimizer = make_optimizer(name)
    state = State(random_array(generator, size), {kind.name: np.zeros(size, np.float32) for kind in optimizer.state})
    blocks = master_blocks(state.master, split_master)
    blocks.update({kind: torch.zeros(size) for kind in state.kept})
    grad, read = gradient_block(random_array(generator, size), grad_dtype)
    segments, update = [Segment(0, size, 0.1)], Update(1, 1e-3)
    update_on(optimizer, 4, blocks, grad, segments, update)
    reference_step(name, state, read + np.float32(0), segments, update)  # -0 counts as 0
    assert same_bits(master_of(blocks), state.master)
    assert all(same_bits(blocks[kind].numpy(), array) for kind, array in state.kept.items())


@pytest.mark.parametrize("cut", [1024, 2048, 3072])
@pytest.mark.parametrize("name", NAMES)
def test_block_updated_in_pieces_matches_whole_update_bitwise(name: str, cut: int) -> None:
    size, generator = 4096, np.random.default_rng(5)
    optimizer = make_optimizer(name)
    master, grad = random_array(generator, size), torch.from_numpy(random_array(generator, size))
    kinds = [kind.name for kind in optimizer.state]
    whole = {**master_blocks(master, True), **{kind: torch.ones(size) for kind in kinds}}
    pieces = {kind: block.clone() for kind, block in whole.items()}
    optimizer.update(whole, grad, [Segment(0, size, 0.1)], Update(3, 1e-3))
    for start, stop in ((0, cut), (cut, size)):
        part = {kind: block[start:stop] for kind, block in pieces.items()}
        optimizer.update(part, grad[start:stop], [Segment(0, stop - start, 0.1)], Update(3, 1e-3))
    assert all(torch.equal(whole[kind], pieces[kind]) for kind in whole)


@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "sgd-plain"])
def test_fifty_steps_of_sgd_stay_close_to_torch(name: str) -> None:
    size, generator, optimizer = 10_000, torch.Generator().manual_seed(5), make_optimizer(name)
    start = torch.randn(size, generator=generator) * 0.05
    parameter = torch.nn.Parameter(start.clone())
    momentum = 0.0 if name == "sgd-plain" else 0.9
    twin = torch.optim.SGD(
        [parameter], lr=1e-2, momentum=momentum, nesterov=name == "sgd-nesterov", weight_decay=0.1, foreach=False
    )
    blocks = {"weight": start.clone(), **{kind.name: torch.zeros(size) for kind in optimizer.state}}
    for step in range(1, 51):
        grad = torch.randn(size, generator=generator)
        parameter.grad = grad.clone()
        twin.step()
        optimizer.update(blocks, grad, [Segment(0, size, 0.1)], Update(step, 1e-2))
    assert torch.allclose(blocks["weight"], parameter.detach(), rtol=1e-5, atol=1e-6)
    if momentum:
        assert torch.allclose(blocks["m"], twin.state[parameter]["momentum_buffer"], rtol=1e-5, atol=1e-5)


def test_lion_moves_every_weight_by_the_learning_rate_and_none_without_a_gradient() -> None:
    optimizer = make_optimizer("lion")
    blocks = {"weight": torch.ones(4), "m": torch.zeros(4)}
    grad = torch.tensor([1e-30, -5.0, 0.0, -0.0])
    optimizer.update(blocks, grad, [Segment(0, 4, 0.0)], Update(1, 0.25))
    assert blocks["weight"].tolist() == [0.75, 1.25, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "nbytes"), [("adamw", 12), ("lion", 8), ("sgd", 8), ("sgd-nesterov", 8), ("sgd-plain", 4)]
)
def test_bytes_per_parameter(name: str, nbytes: int) -> None:
    optimizer = make_optimizer(name)
    assert isinstance(optimizer, Optimizer)
    assert {bytes_per_parameter(optimizer.state_kinds(split)) for split in (False, True)} == {nbytes}


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_zeros_stays_zero(name: str) -> None:
    optimizer = make_optimizer(name)
    blocks = {kind.name: torch.zeros(1024, dtype=kind.dtype) for kind in optimizer.state_kinds(True)}
    optimizer.update(blocks, torch.zeros(1024), [Segment(0, 1024, 0.1)], Update(step=1, lr=1.0))
    assert all(not block.any() for block in blocks.values())


@pytest.mark.parametrize("name", NAMES)
def test_updates_do_not_depend_on_earlier_updates(name: str) -> None:
    """Segments may differ only in their rate, and updates with the same step number only in rate or gradient scale."""
    used, generator = make_optimizer(name), np.random.default_rng(5)
    kinds, master = [kind.name for kind in used.state], random_array(generator, 64)
    grad = torch.from_numpy(random_array(generator, 64))
    updates = (Update(2, 1e-3), Update(2, 1e-2), Update(2, 1e-2, 0.5), Update(3, 1e-2, 0.5))
    layouts = ([Segment(0, 64, 0.1)], [Segment(0, 16, 0.1), Segment(16, 64, 0.1, lr_scale=2.0)])
    for segments, update in itertools.product(layouts, updates):
        found, expected = ({**master_blocks(master, False), **{kind: torch.ones(64) for kind in kinds}} for _ in "ab")
        used.update(found, grad, segments, update)
        for segment in segments:
            make_optimizer(name).update(expected, grad, [segment], update)
        assert all(torch.equal(found[kind], expected[kind]) for kind in expected), update


@pytest.mark.parametrize("name", NAMES)
def test_halves_are_rounded_alike_at_every_tie(name: str) -> None:
    assert changed_halves(make_optimizer(name)) == []


def test_a_gradient_of_another_type_is_refused() -> None:
    optimizer = make_optimizer("lion")
    blocks = {"weight": torch.zeros(8), "m": torch.zeros(8)}
    with pytest.raises(AssertionError, match="float16"):
        optimizer.update(blocks, torch.zeros(8, dtype=torch.float16), [Segment(0, 8, 0.0)], Update(1, 1e-3))
    with pytest.raises(AssertionError, match="'m'"):
        optimizer.update({**blocks, "m": torch.zeros(7)}, torch.zeros(8), [Segment(0, 8, 0.0)], Update(1, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_gradient_counts_as_zero(dtype: torch.dtype) -> None:
    """A sum of -0 becomes 0 if zeros are added to it, but not if they are skipped. Both must give the same update."""
    masters = []
    for zero in (0.0, -0.0):
        weight = torch.full((64,), -0.0)
        make_optimizer("sgd-plain").update(
            {"weight": weight}, torch.full((64,), zero, dtype=dtype), (Segment(0, 64, 0.0),), Update(1, 1e-3)
        )
        masters.append(weight)
    assert torch.equal(torch.signbit(masters[0]), torch.signbit(masters[1]))
