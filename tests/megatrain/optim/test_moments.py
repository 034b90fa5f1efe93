"""Moments in bf16 and int8 match a numpy oracle bit for bit, for any cuts, and their codes match other libraries."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.base.layout import build_layout
from megatrain.optim.base import Segment, Update, bytes_per_parameter
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.moments import StateDtype, decode_moments, encode_moments, moment_code
from megatrain.optim.threads import KernelThreads
from oracles.adamw import adamw_step
from oracles.blocks import random_array, same_bits, update_on
from oracles.moments import decode_blocks, dynamic_code, encode_blocks, random_bits, round_stochastically

SIZE, SEED = 5003, 7
SEGMENTS = ((0, 2048, "a"), (2048, 3000, "b"), (3072, SIZE, "c"))


def new_blocks(optimizer: Any, size: int, split: bool = False) -> dict[str, Tensor]:
    return {kind.name: torch.zeros(kind.elements_for(size), dtype=kind.dtype) for kind in optimizer.state_kinds(split)}


def gradients(steps: int, size: int = SIZE) -> list[Any]:
    generator = np.random.default_rng(3)
    scales = np.float32(0.1) ** np.arange(6, dtype=np.float32)
    return [random_array(generator, size) * generator.choice(scales, size) for _ in range(steps)]


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_moments_match_the_oracle_bitwise(state_dtype: StateDtype) -> None:
    optimizer = AdamW(threads=KernelThreads(1), state_dtype=state_dtype, seed=SEED)
    blocks = new_blocks(optimizer, SIZE)
    weight = np.zeros(SIZE, np.float32)
    m, v = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for step, gradient in enumerate(gradients(4), 1):
        segments = [Segment(start, stop, 0.1, name=name, param_start=10**10) for start, stop, name in SEGMENTS]
        optimizer.update(blocks, torch.from_numpy(gradient), segments, Update(step, 1e-2, 0.5))
        for start, stop, name in SEGMENTS:
            part = slice(start, stop)
            weight[part], new_m, new_v = adamw_step(
                weight[part],
                m[part],
                v[part],
                gradient[part],
                step=step,
                lr=1e-2,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1,
                grad_scale=0.5,
            )
            if state_dtype == "bfloat16":
                bits = random_bits(SEED, step, name, range(10**10, 10**10 + stop - start))
                m[part], v[part] = round_stochastically(new_m, bits & 0xFFFF), round_stochastically(new_v, bits >> 16)
            else:
                m[part] = decode_blocks(*encode_blocks(new_m, True), True)
                v[part] = decode_blocks(*encode_blocks(new_v, False), False)
    kept = {kind: blocks[kind].float() for kind in ("m", "v")}
    if state_dtype == "int8":
        kept = {kind: decode_moments(blocks[kind], blocks[f"{kind}_scale"], kind == "m") for kind in ("m", "v")}
    for found, expected in ((blocks["weight"], weight), (kept["m"], m), (kept["v"], v)):
        for start, stop, _ in SEGMENTS:
            assert same_bits(found.numpy()[start:stop], expected[start:stop])


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", [AdamW, Lion, SGD])
def test_moments_are_bit_identical_for_any_split_and_thread_count(kind: Any, state_dtype: StateDtype) -> None:
    size = (1 << 20) + 70_000  # longer than one range of the kernel threads
    optimizer = kind(state_dtype=state_dtype, seed=SEED)
    blocks = new_blocks(optimizer, size)
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1))
    whole = Segment(0, size, 0.1, name="layer.weight")
    update_on(optimizer, 1, blocks, gradient, [whole], Update(1, 1e-3))
    expected = {name: block.clone() for name, block in blocks.items()}
    parts = new_blocks(optimizer, size)
    sizes = {each.name: each.granularity for each in optimizer.state_kinds(False)}
    for part in (range(65_536), range(65_536, 65_536 * 3), range(65_536 * 3, size)):
        own = {name: block[part.start // sizes[name] : -(-part.stop // sizes[name])] for name, block in parts.items()}
        update_on(optimizer, 2, own, gradient[part.start : part.stop], [whole.within(part)], Update(1, 1e-3))
    assert all(torch.equal(expected[name], parts[name]) for name in expected)
    assert any(len(block.unique()) > 100 for block in parts.values()), "something was updated"


def test_stochastic_rounding_is_unbiased() -> None:
    """With random rounding, the mean of stored moments stays exact. Rounding to nearest would change it by over 1%."""
    optimizer = AdamW(beta1=0.999, threads=KernelThreads(1), state_dtype="bfloat16")
    size, blocks = 65_536, new_blocks(AdamW(state_dtype="bfloat16"), 65_536)
    for step in range(1, 101):
        update = Update(step, 0.0)
        optimizer.update(blocks, torch.ones(size), [Segment(0, size, 0.0, name="w")], update)
    exact = 1 - 0.999**100
    assert float(blocks["m"].double().mean()) == pytest.approx(exact, rel=1e-4)
    assert len(blocks["m"].unique()) > 2
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(100):
        nearest = nearest.float().lerp(torch.ones(()), 0.001).to(torch.bfloat16)
    assert abs(float(nearest) - exact) > 0.01 * exact


@pytest.mark.parametrize("signed", [True, False])
def test_codes_round_to_the_nearest_number(signed: bool) -> None:
    values, _, _ = moment_code(signed)
    assert values == pytest.approx(dynamic_code(signed), rel=2e-7, abs=0)
    numbers = random_array(np.random.default_rng(0), 3000) ** 3
    numbers = numbers if signed else np.abs(numbers)
    codes, scales = encode_moments(torch.from_numpy(numbers), signed)
    expected, expected_scales = encode_blocks(numbers, signed)
    assert (codes.numpy() == expected).all() and (scales.numpy() == expected_scales).all()
    optimizer = SGD(momentum=0.5, threads=KernelThreads(1), state_dtype="int8")
    if signed:  # the kernel rounds as the host function does
        blocks = new_blocks(optimizer, numbers.size)
        optimizer.update(blocks, torch.from_numpy(numbers), [Segment(0, 3000, 0.0)], Update(1, 0.0))
        assert torch.equal(blocks["m"], codes) and torch.equal(blocks["m_scale"], scales)


def test_nonfinite_values_affect_only_their_block() -> None:
    optimizer = AdamW(threads=KernelThreads(1), state_dtype="int8")
    for value in (torch.nan, torch.inf):
        blocks, gradient = new_blocks(optimizer, 1024), torch.ones(1024)
        gradient[300] = value
        for step in (1, 2):
            optimizer.update(blocks, gradient, [Segment(0, 1024, 0.0)], Update(step, 1e-2))
        scales = blocks["m_scale"]
        assert not scales[1].isfinite() and scales[[0, 2, 3]].isfinite().all()
        assert blocks["weight"][512:].isfinite().all() and not blocks["weight"][256:512].isfinite().all()


def test_bytes_per_parameter() -> None:
    layout = build_layout("layer", [("w", (256, 256)), ("b", (256,))], True)
    for state_dtype, nbytes in (("float32", 12), ("bfloat16", 8), ("int8", 6 + 8 / 256)):
        kinds = AdamW(state_dtype=state_dtype).state_kinds(True)  # type: ignore[arg-type]
        assert bytes_per_parameter(kinds) == nbytes
        assert bytes_per_parameter(kinds, layout) == pytest.approx(nbytes, rel=0.02)
    assert [kind.name for kind in SGD(momentum=0.0, state_dtype="int8").state_kinds(False)] == ["weight"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_quantization_code_matches_the_library(library: str) -> None:
    names = {"bitsandbytes": "bitsandbytes.functional", "torchao": "torchao.optim.quant_utils"}
    pytest.importorskip(library)
    module = importlib.import_module(names[library])
    for signed in (True, False):
        theirs = module.create_dynamic_map(signed)
        assert moment_code(signed)[0] == pytest.approx(np.asarray(theirs, np.float32), rel=1e-6, abs=0)
