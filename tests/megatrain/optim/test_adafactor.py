from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.layout import UnitLayout, build_layout
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import Optimizer, Update, build_segments, bytes_per_parameter
from megatrain.optim.threads import KernelThreads
from oracles.adafactor import adafactor_step
from oracles.blocks import (
    changed_halves,
    gradient_block,
    master_blocks,
    master_of,
    random_array,
    same_bits,
    update_on,
)

SHAPES = {
    "model.norm.weight": (100,),
    "model.scale": (),
    "model.up.weight": (33, 129),
    "model.row.weight": (1, 700),
    "model.column.weight": (300, 1),
    "model.experts.weight": (3, 20, 40),
    "model.conv.weight": (50, 1, 4),
}


def layout_of(shapes: dict[str, tuple[int, ...]]) -> UnitLayout:
    return build_layout("layer", shapes.items(), trainable=True)


def kept(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return int(np.prod(shape))
    return int(np.prod(shape[:-2])) * (shape[-2] + shape[-1])


def check_against_reference(
    shapes: dict[str, tuple[int, ...]],
    *,
    seed: int,
    palette: str,
    split_master: bool,
    grad_dtype: torch.dtype,
    num_threads: int,
    num_steps: int = 2,
    grad_scale: float = 0.7,
) -> None:
    layout, generator = layout_of(shapes), np.random.default_rng(seed)
    optimizer = Adafactor()
    kinds = optimizer.state_kinds(split_master)
    segments = build_segments(layout, 0.1, (), kinds=kinds)
    master = random_array(generator, layout.num_elements, palette)
    blocks = master_blocks(master, split_master)
    blocks["v"] = torch.zeros(kinds[-1].num_elements(layout))
    expected, moments = master.copy(), np.zeros(blocks["v"].numel(), np.float32)
    for step in range(1, num_steps + 1):
        grad, read = gradient_block(random_array(generator, layout.num_elements, palette), grad_dtype)
        update_on(optimizer, num_threads, blocks, grad, segments, Update(step, 1e-2, grad_scale))
        for entry, segment in zip(layout.entries, segments, strict=True):
            part = slice(segment.start, segment.stop)
            start = segment.state_starts["v"]
            own = slice(start, start + kept(entry.shape))
            with np.errstate(all="ignore"):
                expected[part], moments[own] = adafactor_step(
                    expected[part],
                    moments[own],
                    read[part],
                    entry.shape,
                    step=step,
                    lr=1e-2,
                    weight_decay=segment.weight_decay,
                    grad_scale=grad_scale,
                )
        assert same_bits(blocks["v"].numpy(), moments)
        assert same_bits(master_of(blocks), expected)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 32),
    palette=st.sampled_from(["normal", "finite", "everything"]),
    split_master=st.booleans(),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_threads=st.integers(1, 8),
    shape=st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 200)),
        st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 70)),
    ),
)
def test_bits_equal_the_reference_for_any_shape_and_thread_count(
    seed: int,
    palette: str,
    split_master: bool,
    grad_dtype: torch.dtype,
    num_threads: int,
    shape: tuple[int, ...],
) -> None:
    check_against_reference(
        {**SHAPES, "model.drawn.weight": shape},
        seed=seed,
        palette=palette,
        split_master=split_master,
        grad_dtype=grad_dtype,
        num_threads=num_threads,
    )


@pytest.mark.parametrize("shape", [(2100, 600), (3, 800, 1400), (1_100_000,), (1, 1_100_000), (70, 20_000)])
def test_parameters_longer_than_one_range_match_the_reference(shape: tuple[int, ...]) -> None:
    check_against_reference(
        {"model.large.weight": shape},
        seed=1,
        palette="normal",
        split_master=True,
        grad_dtype=torch.float32,
        num_threads=4,
        num_steps=1,
    )


def test_ten_steps_stay_close_to_transformers() -> None:
    layout, generator = layout_of(SHAPES), torch.Generator().manual_seed(5)
    start = torch.randn(layout.num_elements, generator=generator) * 0.05
    segments = {
        entry.name: segment for entry, segment in zip(layout.entries, build_segments(layout, 0.1, ()), strict=True)
    }
    parameters = {
        entry.name: torch.nn.Parameter(start[entry.offset : entry.offset + entry.numel].reshape(entry.shape).clone())
        for entry in layout.entries
    }
    twin = transformers.Adafactor(
        [{"params": [p], "weight_decay": segments[name].weight_decay} for name, p in parameters.items()],
        lr=1e-3,
        scale_parameter=False,
        relative_step=False,
    )
    optimizer = Adafactor(threads=KernelThreads(1))
    kinds = optimizer.state_kinds(False)
    blocks = {"weight": start.clone(), "v": torch.zeros(kinds[-1].num_elements(layout))}
    for step in range(1, 11):
        grad = torch.randn(layout.num_elements, generator=generator)
        grad *= 10.0 ** torch.randint(-6, 2, (layout.num_elements,), generator=generator)
        for entry in layout.entries:
            parameters[entry.name].grad = grad[entry.offset : entry.offset + entry.numel].reshape(entry.shape).clone()
        twin.step()
        optimizer.update(blocks, grad, build_segments(layout, 0.1, (), kinds=kinds), Update(step, 1e-3))
    for entry in layout.entries:
        mine = blocks["weight"][entry.offset : entry.offset + entry.numel].reshape(entry.shape)
        assert torch.allclose(mine, parameters[entry.name].detach(), rtol=1e-5, atol=2e-8), entry.name


def test_state_is_a_thousandth_of_the_parameters() -> None:
    layout = layout_of({"model.up.weight": (4096, 1024), "model.down.weight": (1024, 4096)})
    optimizer = Adafactor()
    assert isinstance(optimizer, Optimizer)
    for split_master in (False, True):
        kinds = optimizer.state_kinds(split_master)
        assert bytes_per_parameter(kinds) == 4
        assert 4 < bytes_per_parameter(kinds, layout) < 4.01
    assert kinds[-1].num_elements(layout) == 2 * (4096 + 1024)
    assert kinds[-1].starts(layout) == {"model.up.weight": 0, "model.down.weight": 5120}


def test_padding_and_unsegmented_parameters_are_unchanged() -> None:
    layout = layout_of(SHAPES)
    optimizer = Adafactor()
    kinds = optimizer.state_kinds(False)
    blocks = {"weight": torch.ones(layout.num_elements), "v": torch.zeros(kinds[-1].num_elements(layout))}
    chosen = [segment for segment in build_segments(layout, 0.0, (), kinds=kinds) if segment.shape == (33, 129)]
    optimizer.update(blocks, torch.ones(layout.num_elements), chosen, Update(1, 1e-2))
    (segment,) = chosen
    moved = (blocks["weight"] != 1).nonzero().flatten()
    assert moved.min() == segment.start and moved.max() == segment.stop - 1 and len(moved) == 33 * 129
    touched = blocks["v"].nonzero().flatten()
    assert touched.min() == segment.state_starts["v"] and len(touched) == 33 + 129


def test_zero_gradient_changes_no_weights() -> None:
    layout = layout_of({"model.up.weight": (8, 8), "model.norm.weight": (8,)})
    optimizer = Adafactor()
    kinds = optimizer.state_kinds(False)
    blocks = {"weight": torch.ones(layout.num_elements), "v": torch.zeros(kinds[-1].num_elements(layout))}
    segments = build_segments(layout, 0.0, (), kinds=kinds)
    for step in (1, 2, 3):
        optimizer.update(blocks, torch.zeros(layout.num_elements), segments, Update(step, 1e-2))
    assert torch.equal(blocks["weight"], torch.ones(layout.num_elements))


def test_state_that_does_not_fit_is_refused() -> None:
    layout = layout_of({"model.up.weight": (8, 8)})
    optimizer = Adafactor()
    segments = build_segments(layout, 0.0, (), kinds=optimizer.state_kinds(False))
    blocks = {"weight": torch.ones(layout.num_elements), "v": torch.zeros(15)}
    with pytest.raises(AssertionError, match="Segment"):
        optimizer.update(blocks, torch.zeros(layout.num_elements), segments, Update(1, 1e-2))


@pytest.mark.parametrize("shape", [(), (256, 256)], ids=["vector", "matrix"])
def test_halves_are_rounded_alike_at_every_tie(shape: tuple[int, ...]) -> None:
    assert changed_halves(Adafactor(threads=KernelThreads(1)), shape=shape) == []
