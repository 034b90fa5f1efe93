"""Tests of the GPU kernels without a GPU. Most tests need Triton, which CPU builds of torch do not include."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.optim import on_device
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import FORMATS, Optimizer, Segment, Update
from megatrain.optim.clip import partial_squares, squared_norm
from megatrain.optim.on_device import DeviceKernelError, TritonOptimizer, UpdateGroup, device_squared_norm
from oracles.blocks import (
    GRAD_SCALES,
    HOSTS,
    PALETTES,
    SHAPES,
    SHAPES_OF_BLOCKS,
    SMALL_HOSTS,
    alike,
    differing_blocks,
    gradient_block,
    master_blocks,
    random_array,
)

KERNELS = "megatrain.optim.triton_kernels"


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the kernels' module, so that it is imported again. ``monkeypatch`` restores it after the test."""
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    monkeypatch.delattr(sys.modules["megatrain.optim"], KERNELS.rsplit(".", 1)[1], raising=False)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Run kernels in Triton's interpreter, on host tensors."""
    pytest.importorskip("triton")
    forget_kernels(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield importlib.import_module(KERNELS)
    sys.modules.pop(KERNELS)
    vars(sys.modules["megatrain.optim"]).pop(KERNELS.rpartition(".")[2], None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    forget_kernels(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield importlib.import_module(KERNELS)
    sys.modules.pop(KERNELS)
    vars(sys.modules["megatrain.optim"]).pop(KERNELS.rpartition(".")[2], None)


def test_missing_triton_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceKernelError, match=r"updates on a GPU need Triton.*run the updates on the host"):
        TritonOptimizer(HOSTS["adamw"])


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize(("split_master", "grad_dtype"), FORMATS)
def test_interpreted_bits_equal_the_host_kernel(
    interpreter: ModuleType, split_master: bool, grad_dtype: torch.dtype, palette: str, name: str
) -> None:
    assert interpreter.IS_INTERPRETED
    for size, cuts in SHAPES:
        for grad_scale in GRAD_SCALES:
            differing = differing_blocks(
                HOSTS[name],
                TritonOptimizer(HOSTS[name]),
                "cpu",
                size=size,
                cuts=cuts,
                split_master=split_master,
                grad_dtype=grad_dtype,
                palette=palette,
                grad_scale=grad_scale,
            )
            assert differing == [], (size, grad_scale)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(("split_master", "grad_dtype"), FORMATS)
def test_interpreted_bits_of_tables_equal_the_host_kernel(
    interpreter: ModuleType, split_master: bool, grad_dtype: torch.dtype, name: str
) -> None:
    """Two launches update three groups of blocks with two weight decays. Their ranges need 1 to 3 kernel programs."""
    host, made, generator = HOSTS[name], TritonOptimizer(HOSTS[name]), np.random.default_rng(7)
    update, expected, groups = (
        Update(step=3, lr=0.05, grad_scale=0.37),
        list[dict[str, torch.Tensor]](),
        list[UpdateGroup](),
    )
    palette = "everything"
    for size, cuts in ((16, ()), (3072, (2064,)), (1040, (1024,))):
        blocks = master_blocks(random_array(generator, size, palette), split_master)
        blocks |= {kind.name: torch.from_numpy(random_array(generator, size).copy()).abs() for kind in host.state}
        gradient, _ = gradient_block(random_array(generator, size, palette), grad_dtype)
        bounds = (0, *cuts, size)
        segments = [
            Segment(start, stop, weight_decay=0.1 * (number == 0))
            for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        groups.append((blocks, gradient, segments))
        copies = {kind: block.clone() for kind, block in blocks.items()}
        host.update(copies, gradient, segments, update)
        expected.append(copies)
    tables = made.make_tables(groups)
    assert tables is not None and [len(table.rows) for table in tables] == [3, 2]
    with np.errstate(all="ignore"):
        made.update_by_tables(tables, update)
    for (blocks, *_), copies in zip(groups, expected, strict=True):
        assert all(alike(block, copies[kind]) for kind, block in blocks.items())


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adamw, bfloat16", "adamw, int8", "lion, int8", "sgd, int8"])
def test_interpreted_kernels_apply_the_clip_decision(interpreter: ModuleType, name: str) -> None:
    """A factor in a tensor gives the same bits as the number itself. A decision against the update changes no block."""
    host = {**HOSTS, **SMALL_HOSTS}[name]
    made, generator = TritonOptimizer(host), np.random.default_rng(3)
    first = master_blocks(random_array(generator, 512), True)
    first |= {kind.name: torch.zeros(kind.elements_for(512), dtype=kind.dtype) for kind in host.state}
    gradient, segments = torch.from_numpy(random_array(generator, 512)), [Segment(0, 512, 0.1)]
    update = Update(step=2, lr=0.1, grad_scale=float(np.float32(0.3)))
    expected = {kind: block.clone() for kind, block in first.items()}
    made.update(expected, gradient, segments, update)
    assert not torch.equal(expected["low"], first["low"])
    for is_used in (True, False):
        blocks = [{kind: block.clone() for kind, block in first.items()} for _ in range(2)]
        decided = replace(update, grad_scale=7.0, decision=torch.tensor([0.3, float(is_used)]))
        made.update(blocks[0], gradient, segments, decided)
        if tables := made.make_tables([(blocks[1], gradient, segments)]):
            made.update_by_tables(tables, decided)
        for found in blocks if tables else blocks[:1]:
            wanted = expected if is_used else first
            assert all(torch.equal(found[kind], wanted[kind]) for kind in wanted)


def test_ranges_unfit_for_tables_are_updated_one_by_one(interpreter: ModuleType) -> None:
    assert interpreter.ROW_ALIGNMENT == 16
    blocks = {kind: torch.zeros(64) for kind in ("weight", "m", "v")}
    adamw = TritonOptimizer(HOSTS["adamw"])
    assert adamw.make_tables([(blocks, torch.zeros(64), [Segment(0, 64, 0.0)])])
    for start, stop in ((0, 63), (8, 24), (1, 17)):
        groups: list[UpdateGroup] = [(blocks, torch.zeros(64), [Segment(start, stop, 0.0)])]
        assert (adamw.make_tables(groups) is not None) is ((start, stop) == (8, 24)), (start, stop)
    small = TritonOptimizer(SMALL_HOSTS["adamw, int8"])
    assert small.make_tables([(blocks, torch.zeros(64), [Segment(0, 64, 0.0)])]) is None


@pytest.mark.parametrize("name", SMALL_HOSTS)
@pytest.mark.parametrize(("palette", "split_master"), [("normal", False), ("everything", True)])
def test_interpreted_bits_of_small_moments_equal_the_host_kernel(
    interpreter: ModuleType, name: str, palette: str, split_master: bool
) -> None:
    assert interpreter.IS_INTERPRETED
    for size, cuts in SHAPES_OF_BLOCKS:
        differing = differing_blocks(
            SMALL_HOSTS[name],
            TritonOptimizer(SMALL_HOSTS[name]),
            "cpu",
            size=size,
            cuts=cuts,
            split_master=split_master,
            grad_dtype=torch.bfloat16 if split_master else torch.float32,
            palette=palette,
            grad_scale=0.37,
        )
        assert differing == [], size


@pytest.mark.parametrize(("palette", "split_master"), [("normal", False), ("everything", True)])
def test_interpreted_bits_of_an_average_equal_the_host_kernel(
    interpreter: ModuleType, palette: str, split_master: bool
) -> None:
    host = WeightAverage(HOSTS["lion"], 0.9)
    made = on_device.device_optimizer(host, torch.device("cuda"))
    made.warm_up([(split_master, torch.float32)])
    for size, cuts in SHAPES:
        differing = differing_blocks(
            host,
            made,
            "cpu",
            size=size,
            cuts=cuts,
            split_master=split_master,
            grad_dtype=torch.float32,
            palette=palette,
            grad_scale=0.37,
        )
        assert differing == [], size


def test_triton_kernel_keeps_the_host_kernel_contract(interpreter: ModuleType) -> None:
    assert interpreter.IS_INTERPRETED
    optimizer, update = TritonOptimizer(HOSTS["adamw"]), Update(step=1, lr=1e-2)
    assert isinstance(optimizer, Optimizer)
    optimizer.warm_up()
    assert [kind.name for kind in optimizer.state_kinds(True)] == ["weight", "low", "m", "v"]
    blocks = {kind: torch.ones(64) for kind in ("weight", "m", "v")}
    optimizer.update(blocks, torch.ones(64), [Segment(16, 16, 0.1), Segment(16, 40, 0.1)], update)
    for block in blocks.values():
        assert (block[:16] == 1).all() and (block[40:] == 1).all()
    assert (blocks["weight"][16:40] < 1).all()
    with pytest.raises(AssertionError, match="Segment"):
        optimizer.update(blocks, torch.zeros(64), [Segment(0, 65, 0.0)], update)
    with pytest.raises(AssertionError, match="'m'"):
        optimizer.update({**blocks, "m": torch.zeros(63)}, torch.zeros(64), [], update)
    with pytest.raises(AssertionError, match="bfloat16"):
        optimizer.update({**blocks, "m": torch.zeros(64, dtype=torch.bfloat16)}, torch.zeros(64), [], update)


def test_warm_up_compiles_the_requested_kernels(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, torch.dtype, list[int]]] = []

    def note(self: Any, blocks: Any, gradient: torch.Tensor, segments: Any, update: Update) -> None:
        lengths = [segment.stop - segment.start for segment in segments]
        seen.append(("low" in blocks, gradient.dtype, lengths))

    monkeypatch.setattr(TritonOptimizer, "update", note)
    TritonOptimizer(HOSTS["adamw"]).warm_up([(True, torch.bfloat16)])
    # Triton compiles separate kernels for lengths that are multiples of 16, and for factors that the device decides.
    assert seen == [(True, torch.bfloat16, [256, 17])] * 2
    TritonOptimizer(HOSTS["adamw"]).warm_up()
    assert {entry[:2] for entry in seen} == set(FORMATS)


#: Lengths that end within a row of lanes, at the end of a row, at the end of a block, and after several blocks.
NORM_SIZES = (1, 63, 64, 8077, 65_536, 131_072 + 65)


def assert_norms_match_host(sizes: Sequence[int], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(4)
    for size in sizes:
        # Numbers of very different magnitudes, so that the order of sums matters, at an unaligned address.
        gradient = (torch.randn(size + 1, generator=generator) * torch.rand(size + 1, generator=generator).pow(20)).to(
            dtype
        )[1:]
        found = device_squared_norm(gradient.to(device))
        assert found.shape == () and found.device.type == device
        assert float(found) == squared_norm(gradient), size
    assert float(device_squared_norm(torch.zeros(0, dtype=dtype, device=device))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_norms_have_the_host_s_bits(
    interpreter: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_kernels_or_none", lambda: interpreter)
    monkeypatch.setattr(on_device, "_partials_in_torch", None)
    # Few sizes, because the interpreter takes seconds per block.
    assert_norms_match_host((65_536 + 8077,) if dtype == torch.float32 else (77,), dtype, "cpu")


@pytest.mark.slow
def test_interpreted_norms_of_several_parts_have_the_host_s_bits(
    interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned parts share one launch, and unaligned parts take one launch each."""
    monkeypatch.setattr(on_device, "_kernels_or_none", lambda: interpreter)
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(size, generator=generator).exp().bfloat16() for size in (65_536, 640, 77)]
    for given in (parts, [torch.cat([part[:1], part])[1:] for part in parts]):
        found = on_device.concat_device_partials(given)
        assert torch.equal(found, torch.cat([partial_squares(part) for part in parts]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_without_triton_have_the_host_s_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_kernels_or_none", lambda: None)
    monkeypatch.setattr(on_device, "_PIECE_ELEMENTS", 65_536)
    assert_norms_match_host(NORM_SIZES, dtype, "cpu")
    for value in (torch.inf, torch.nan):
        assert str(float(device_squared_norm(torch.tensor([1.0, value, 2.0], dtype=dtype)))) == str(value)


def test_norms_are_compiled_for_a_gpu(kernels: ModuleType) -> None:
    """Products and sums use fp64. Fusing them changes nothing, because squares of fp32 numbers are exact in fp64."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    for kind in ("*fp32", "*i16"):
        signature = {"grad": kind, "partials": "*fp64", "num_rows": "i32", "num_elements": "i64"}
        constants = {"rows": None, "block_elements": 65_536, "num_lanes": 64, "unroll": 16}
        source = triton.compiler.ASTSource(
            kernels.squared_norms, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
        )
        ptx = triton.compile(source, target=target, options={"num_warps": 1}).asm["ptx"]
        assert "f64" in ptx and not re.search(r"(add|mul|fma)\.(rn\.|ftz\.)*f32", ptx)
        assert ptx.count("ld.global") >= 16, "loads of 16 rows are in flight at once"


#: An update with arbitrary numbers.
STEP = Segment(0, 16, 0.1), Update(step=1, lr=0.1)
#: Number of operations per element, counted from the lines of the numba loops.
PER_ELEMENT = {
    "adamw": {"mul": 7, "add": 4, "sub": 2, "div.rn": 2, "sqrt.rn": 1},
    "lion": {"mul": 6, "add": 3, "sub": 1},
    "sgd": {"mul": 4, "add": 3, "sub": 1},
    "sgd, nesterov": {"mul": 5, "add": 4, "sub": 1},
    "sgd without momentum": {"mul": 3, "add": 2, "sub": 1},
}


def operations(
    kernels: ModuleType, form: str, split_master: bool, grad_dtype: torch.dtype, *, has_rows: bool, **options: Any
) -> Counter[str]:
    """Return the count of each fp32 operation in the PTX for compute capability 9.0."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    bits, host = {torch.float32: "*fp32", torch.bfloat16: "*i16"}, HOSTS[form]
    kernel = kernels.update
    signature: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    signature |= {"weight": "*i16" if split_master else "*fp32", "low": "*i16"} | dict.fromkeys(host.moments, "*fp32")
    signature |= {"grad": bits[grad_dtype], "rows": "*i64", "decision": "*fp32", "grad_scale": "fp32"}
    signature |= {"scalars": ("fp32",) * len(host.scalars(*STEP)[1])}
    constants: dict[str, Any] = {"block_elements": kernels.BLOCK_ELEMENTS, "rule": kernels.RULES[host.kernel_name]}
    constants |= {} if split_master else {"low": None}
    constants |= dict.fromkeys({"m", "v"} - set(host.moments))
    constants |= dict.fromkeys(("m_scale", "v_scale", "signed", "signed_cells", "unsigned", "unsigned_cells"))
    constants |= {} if has_rows else {"rows": None, "decision": None}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=target, options={**kernels.LAUNCH_OPTIONS, **options}).asm["ptx"]
    if has_rows:
        wide = set(re.findall(r"(?:ld|st)\.global\S*", ptx))
        numbers = {"ld.global.b64", "ld.global.b32"}  # loads of a table and a decision; all others have 16 bytes
        assert wide <= {*numbers, "ld.global.v4.b32", "st.global.v4.b32"}
    return Counter(re.findall(r"^\s+(?:@\S+ )?([a-z]+(?:\.[a-z0-9]+)*)\.f32\b", ptx, re.MULTILINE))


@pytest.mark.parametrize("form", HOSTS)
@pytest.mark.parametrize(("split_master", "grad_dtype"), FORMATS)
@pytest.mark.parametrize("has_rows", [False, True])
def test_machine_code_rounds_every_operation_to_nearest(
    kernels: ModuleType, split_master: bool, grad_dtype: torch.dtype, form: str, has_rows: bool
) -> None:
    found = operations(kernels, form, split_master, grad_dtype, has_rows=has_rows)
    # Without a modifier, these three also round to nearest; the others must state it.
    arithmetic = Counter({name: found[name] + found[f"{name}.rn"] for name in ("mul", "add", "sub")})
    passing = ("mul", "add", "sub", "ld", "st", "mov", "setp", "selp", "neg")  # those after `sub` do not round
    others = {name for name in found if name.split(".")[0] not in passing}
    arithmetic.update({name: found[name] for name in others})
    assert not any("ftz" in name or "approx" in name for name in found), found
    elements = kernels.BLOCK_ELEMENTS // (32 * kernels.LAUNCH_OPTIONS["num_warps"])
    assert arithmetic == {name: elements * count for name, count in PER_ELEMENT[form].items()}


def test_without_the_launch_option_operations_would_be_fused(kernels: ModuleType) -> None:
    assert operations(kernels, "adamw", True, torch.float32, has_rows=False, enable_fp_fusion=True)["fma.rn"] > 0
