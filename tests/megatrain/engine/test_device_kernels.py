"""Tests of a step's GPU kernels without a GPU: Triton's interpreter runs the kernels, and its compiler accepts them."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.base.layout import build_layout, views_of_parts
from megatrain.engine.device import device_kernels
from megatrain.engine.head.cross_entropy import RunningSoftmax
from megatrain.engine.unit.weight_gradients import GradientAccumulator

KERNELS = "megatrain.engine.device.triton_kernels"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def forget_kernels() -> None:
    """Remove the kernels' module from ``sys.modules`` and from its package, where ``from ... import`` would find it."""
    package, _, name = KERNELS.rpartition(".")
    sys.modules.pop(KERNELS, None)
    vars(importlib.import_module(package)).pop(name, None)


def import_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the kernels' module again. After the test, ``monkeypatch`` restores the previous import."""
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    package, _, name = KERNELS.rpartition(".")
    monkeypatch.delattr(importlib.import_module(package), name, raising=False)
    return importlib.import_module(KERNELS)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels in Triton's interpreter, on host tensors."""
    pytest.importorskip("triton")  # imported first, as the variable would permanently change triton's own functions
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = import_kernels(monkeypatch)
    monkeypatch.setattr(device_kernels, "_kernels", lambda: kernels)
    monkeypatch.setattr(device_kernels, "are_usable", lambda tensor: True)
    yield
    forget_kernels()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield import_kernels(monkeypatch)
    forget_kernels()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of very different magnitudes, so that the order of a sum changes the result."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.rand(*shape, generator=generator).pow(8)).to(dtype)


# -- rows added to a matrix -----------------------------------------------------------------------------------------

WORDS, WIDTH = 50, 12
#: Borders of parts: none, borders between rows, and borders within rows.
BORDERS = [(), (17 * WIDTH, 34 * WIDTH), (100, 205, 333)]


def matrix_in_parts(borders: tuple[int, ...]) -> tuple[GradientAccumulator, list[Tensor]]:
    layout = build_layout("unit", [("w", torch.Size((WORDS, WIDTH)))], True)
    ends = [0, *borders, layout.num_elements]
    parts = [range(start, stop) for start, stop in itertools.pairwise(ends)]
    blocks = [torch.full((len(part),), torch.nan) for part in parts]
    return GradientAccumulator(views_of_parts(blocks, parts, layout), set()), blocks


def sum_of(borders: tuple[int, ...], dtype: torch.dtype, ignored: int | None, index_dtype: torch.dtype) -> Tensor:
    """Return the gradient sum of two micro-batches, as for an embedding: some rows repeat."""
    sink, blocks = matrix_in_parts(borders)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        indexes = torch.randint(0, WORDS, (40,), generator=generator).clamp_(max=30).to(index_dtype)
        rows = random(WIDTH, 40, seed=seed, dtype=dtype).t()  # rows with strided columns
        sink.add_rows("w", indexes[::2], rows[::2], ignored)
        sink.add_rows("w", indexes[1::2], rows[1::2].contiguous(), ignored)
    return torch.cat(blocks)[: WORDS * WIDTH].view(WORDS, WIDTH)


def index_add(dtype: torch.dtype, ignored: int | None) -> Tensor:
    """Compute the same sum with torch's ``index_add_``, row after row."""
    total = torch.zeros(WORDS, WIDTH)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        indexes = torch.randint(0, WORDS, (40,), generator=generator).clamp_(max=30)
        rows = random(WIDTH, 40, seed=seed, dtype=dtype).t().float()
        for first in (0, 1):
            own, at = rows[first::2], indexes[first::2]
            keep = torch.ones_like(at, dtype=torch.bool) if ignored is None else at != ignored
            total.index_add_(0, at[keep], own[keep])
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [None, 30])
def test_rows_added_on_the_host_match_one_index_add_bitwise(dtype: torch.dtype, ignored: int | None) -> None:
    for borders in BORDERS:
        assert torch.equal(sum_of(borders, dtype, ignored, torch.long), index_add(dtype, ignored)), borders


class AddedRowCounter(TorchDispatchMode):
    """Mode that counts the rows passed to `index_add_`."""

    num_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.num_rows += len(args[3])
        return func(*args, **(kwargs or {}))


def test_each_row_is_added_to_only_one_part() -> None:
    sink, _ = matrix_in_parts(BORDERS[1])
    indexes = torch.arange(WORDS).flip(0)
    with AddedRowCounter() as added:
        sink.add_rows("w", indexes, random(WORDS, WIDTH), 4)
    assert added.num_rows == WORDS - 1


@pytest.mark.parametrize(
    ("dtype", "ignored", "borders", "index_dtype"),
    [
        (torch.bfloat16, None, BORDERS[2], torch.long),
        (torch.float32, 30, BORDERS[1], torch.int32),
        (torch.float16, 0, BORDERS[0], torch.long),
    ],
)
def test_interpreted_kernels_add_rows_with_the_host_s_bits(
    interpreter: None,
    dtype: torch.dtype,
    ignored: int | None,
    borders: tuple[int, ...],
    index_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_kernels, "_BLOCK_COLUMNS", 8)  # several kernel programs per row, the last one not full
    assert torch.equal(sum_of(borders, dtype, ignored, index_dtype), index_add(dtype, ignored))


@pytest.mark.parametrize("num_rows", [1, 64, 200])
def test_interpreted_groups_are_a_stable_sort(interpreter: None, num_rows: int) -> None:
    indexes = torch.randint(0, 40, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    order, index, count = device_kernels.row_groups(indexes)
    values, expected = indexes.sort(stable=True)
    assert torch.equal(order.long(), expected) and torch.equal(index.long(), values)
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), values[1:] != values[:-1]])
    assert torch.equal(count[is_first].long(), values.unique_consecutive(return_counts=True)[1])
    assert not count[~is_first].any()


def test_interpreted_kernels_look_rows_up_in_parts(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "_BLOCK_COLUMNS", 8)
    indexes = torch.randint(0, WORDS + 3, (40,), generator=torch.Generator().manual_seed(1))
    matrix, found = random(WORDS, WIDTH), torch.full((40, WIDTH), torch.nan)
    for held in (range(17), range(17, 34), range(34, WORDS)):
        device_kernels.copy_rows(found, held, matrix[held.start : held.stop], indexes)
    is_word = indexes < WORDS
    assert is_word.any() and not is_word.all()
    assert torch.equal(found[is_word], matrix[indexes[is_word]])
    assert found[~is_word].isnan().all()  # a NaN stops the step


def test_rows_are_grouped_once_for_all_parts(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    row_groups = device_kernels.row_groups
    monkeypatch.setattr(device_kernels, "row_groups", lambda given: calls.append(len(given)) or row_groups(given))
    sink, _ = matrix_in_parts(BORDERS[1])
    indexes = torch.tensor([3, 20, 3])
    for _ in range(2):
        sink.add_rows("w", indexes, random(3, WIDTH))
    assert calls == [3]


def test_plan_counts_kernel_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced tensors have no contents, so no kernel is launched and Triton need not be installed."""
    monkeypatch.setattr(device_kernels, "are_usable", lambda tensor: True)
    monkeypatch.setattr(device_kernels, "_kernels", None)
    with FakeTensorMode():
        groups = device_kernels.row_groups(torch.zeros(9, dtype=torch.long))
        assert groups.shape == (3, 9) and groups.dtype == torch.int32
        device_kernels.add_rows(torch.zeros(4, 2), range(4), torch.zeros(9, 2), groups, None)


# -- cross entropy of a part of the vocabulary ----------------------------------------------------------------------

NUM_WORDS, ROWS, NUM_ITEMS = 50, 9, 7
PARTS = (0, 13, 26, 39)
#: Smoothing, z-loss, whether rows have weights, and whether the first vocabulary entries are masked.
LOSSES = [(0.0, 0.0, False, False), (0.1, 1e-3, False, False), (0.0, 0.0, True, False), (0.0, 0.0, False, True)]


def logits_of(dtype: torch.dtype, *, is_masked: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(ROWS, NUM_WORDS, generator=generator)).to(dtype)
    if is_masked:
        logits[:, :20] = -torch.inf
    return logits, torch.randint(20, NUM_WORDS, (ROWS,), generator=generator)


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, z_loss: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return torch's loss and gradient for the full logits, in fp64."""
    whole = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * whole.logsumexp(1).square()
    loss = losses.sum() / NUM_ITEMS
    (gradient,) = torch.autograd.grad(loss if weights is None else (losses * weights).sum(), whole)
    return loss.detach(), gradient


def in_parts(
    logits: Tensor, labels: Tensor, smoothing: float, z_loss: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    softmax = RunningSoftmax(labels, NUM_WORDS, NUM_ITEMS, smoothing, z_loss)
    if weights is not None:
        softmax.weigh(weights)
    parts = list(zip(logits.split(13, 1), PARTS, strict=True))
    for part, start in parts:
        softmax.add(part, start)
    gradients = [softmax.gradient(part, start) for part, start in parts]
    assert all(each.dtype == logits.dtype and each.is_contiguous() for each in gradients)
    return softmax.loss(), torch.cat(gradients, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "z_loss", "is_weighed", "is_masked"), LOSSES)
def test_interpreted_kernels_compute_loss_and_gradient(
    interpreter: None,
    dtype: torch.dtype,
    smoothing: float,
    z_loss: float,
    is_weighed: bool,
    is_masked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_kernels, "_BLOCK_LOGITS", 8)
    monkeypatch.setattr(device_kernels, "_BLOCK_COLUMNS", 8)
    logits, labels = logits_of(dtype, is_masked=is_masked)
    weights = torch.linspace(-1, 2, ROWS) if is_weighed else None
    loss, gradient = in_parts(logits, labels, smoothing, z_loss, weights)
    expected_loss, expected = cross_entropy(logits, labels, smoothing, z_loss, weights)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 2e-5  # the interpreter truncates; the machine code rounds
    torch.testing.assert_close(gradient.double(), expected, rtol=rounding, atol=1e-7)


def test_row_gradient_does_not_depend_on_other_rows(interpreter: None) -> None:
    logits, labels = logits_of(torch.float32, is_masked=False)
    _, together = in_parts(logits, labels, 0.0, 0.0, None)
    one_by_one = [in_parts(logits[[row]], labels[[row]], 0.0, 0.0, None)[1] for row in range(ROWS)]
    assert torch.equal(together, torch.cat(one_by_one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unaligned_rows_match_aligned_rows_bitwise(
    interpreter: None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has 48 entries, a multiple of 16 bytes. Unaligned rows, and reads of single entries, give the same bits."""
    logits, labels = logits_of(dtype, is_masked=False)
    labels = labels.clamp(max=47)
    aligned, anywhere = logits[:, :48].contiguous(), logits[:, :48]
    softmaxes = [RunningSoftmax(labels, 48, NUM_ITEMS) for _ in range(3)]

    def made(softmax: RunningSoftmax, part: Tensor) -> tuple[Tensor, Tensor]:
        softmax.add(part, 0)
        return softmax.gradient(part, 0), softmax.loss()

    expected = made(softmaxes[0], aligned)
    assert all(torch.equal(*pair) for pair in zip(expected, made(softmaxes[1], anywhere), strict=True))
    monkeypatch.setattr(device_kernels, "_vector_size", lambda *matrices: 1)
    assert all(torch.equal(*pair) for pair in zip(expected, made(softmaxes[2], anywhere), strict=True))


def test_nan_logits_make_a_nan_loss(interpreter: None) -> None:
    logits, labels = logits_of(torch.float32, is_masked=False)
    logits[3, 30] = torch.nan
    assert in_parts(logits, labels, 0.0, 0.0, None)[0].isnan()


class Operators(TorchDispatchMode):
    """Mode that records torch operators whose results have at least the size of a part's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= ROWS * 13:
            self.found.append(func.overloadpacket.__name__)
        return result


def test_only_the_gradient_of_a_part_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan counts the memory that a step on a GPU would use. Tensors without contents reach no kernel."""
    monkeypatch.setattr(device_kernels, "are_usable", lambda tensor: True)
    monkeypatch.setattr(device_kernels, "_kernels", None)
    with FakeTensorMode():
        labels, part = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, 13, dtype=torch.bfloat16)
        softmax = RunningSoftmax(labels, 13, NUM_ITEMS)
        with Operators() as operators:
            softmax.add(part, 0)
            gradient = softmax.gradient(part, 0)
    assert operators.found == ["empty"] and gradient.dtype == part.dtype


# -- machine code ---------------------------------------------------------------------------------------------------


def ptx_of(kernels: ModuleType, name: str, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """Compile a kernel for compute capability 9.0, and return its PTX. Arguments are i32 by default."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    kernel = getattr(kernels, name)
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=target, options={**kernels.LAUNCH_OPTIONS, **options})
    assert compiled.asm["cubin"], "ptxas takes it"
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("bits", ["*i32", "*i64"])
def test_compiled_group_rows_uses_no_local_memory(kernels: ModuleType, bits: str) -> None:
    blocks = {"block_rows": device_kernels._BLOCK_ROWS, "block_compared": device_kernels._BLOCK_COMPARED}
    ptx = ptx_of(kernels, "group_rows", {"indexes": bits, "groups": "*i32"}, blocks)
    assert not re.search(r"\bld\.local|\bst\.local", ptx)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_machine_code_adds_rows_one_by_one(kernels: ModuleType, dtype: str) -> None:
    """The code adds one row at a time: it has no sums of several rows, no products, no atomics and no flush to zero."""
    types = {"target": "*fp32", "rows": f"*{dtype}", "groups": "*i32"}
    ptx = ptx_of(kernels, "add_rows", types, {"block_columns": device_kernels._BLOCK_COLUMNS})
    found = re.findall(r"^\s+(?:@\S+ )?((?:add|sub|mul|fma|mad)\S*\.f32)\b", ptx, re.MULTILINE)
    elements = device_kernels._BLOCK_COLUMNS // (32 * kernels.LAUNCH_OPTIONS["num_warps"])
    assert found and set(found) <= {"add.f32", "add.rn.f32"} and len(found) % elements == 0
    assert "ftz" not in ptx and "atom" not in ptx and "red." not in ptx


def test_addresses_of_added_rows_have_64_bits(kernels: ModuleType) -> None:
    """A transposed gradient of 419,431 tokens and 5,120 columns has elements beyond 2**31."""
    types = {"target": "*fp32", "rows": "*bf16", "groups": "*i32"}
    ptx = ptx_of(kernels, "add_rows", types, {"block_columns": device_kernels._BLOCK_COLUMNS})
    assert not re.search(r"mul\.lo\.[su]32|mad\.lo\.[su]32", ptx) and re.search(r"mul(\.wide\.s32|\.lo\.s64)", ptx)


#: Number of elements in 16 bytes, which a thread loads or stores at once.
UNITS = {"fp32": 4, "bf16": 8, "fp16": 8}


def column_instructions(ptx: str, bits: int) -> set[str]:
    """Return the instructions that load or store columns, either 16 bytes or one element at a time."""
    return set(re.findall(rf"(?:ld|st)\.global\.(?:v4\.b32|b{bits})\b", ptx))


@pytest.mark.parametrize("unit", [1, 8])
def test_a_look_up_is_compiled(kernels: ModuleType, unit: int) -> None:
    types = {"out": "*bf16", "rows": "*fp32", "indexes": "*i64"}
    constants = {"block_columns": device_kernels._BLOCK_COLUMNS, "unit": unit}
    ptx = ptx_of(kernels, "copy_rows", types, constants)
    assert "cvt.rn.bf16" in ptx or "cvt.rn.bf16x2" in ptx
    assert column_instructions(ptx, 16) == (
        {"st.global.b16"} if unit == 1 else {"ld.global.v4.b32", "st.global.v4.b32"}
    )


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("has_totals", [False, True])
@pytest.mark.parametrize("has_vectors", [False, True])
def test_sums_of_logits_are_compiled(kernels: ModuleType, dtype: str, has_totals: bool, has_vectors: bool) -> None:
    types = {"logits": f"*{dtype}", "labels": "*i64"}
    types |= dict.fromkeys(("max_logits", "exp_sums", "label_logits", "logit_sums"), "*fp32")
    constants = {"block_columns": device_kernels._BLOCK_LOGITS, "unit": UNITS[dtype] if has_vectors else 1}
    constants |= {} if has_totals else {"logit_sums": None}
    ptx = ptx_of(kernels, "add_logits", types, constants, num_warps=device_kernels._LOGIT_WARPS)
    assert ("ld.global.v4.b32" in ptx) is has_vectors
    assert "atom" not in ptx and not re.search(r"\bld\.local|\bst\.local", ptx)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("has_vectors", [False, True])
def test_a_gradient_of_logits_is_compiled(kernels: ModuleType, dtype: str, is_weighed: bool, has_vectors: bool) -> None:
    types = {"logits": f"*{dtype}", "gradient": f"*{dtype}", "labels": "*i64"}
    types |= dict.fromkeys(("log_sums", "weights"), "*fp32")
    types |= dict.fromkeys(("divisor", "z_factor", "share", "label_weight"), "fp32")
    constants = {"block_columns": device_kernels._BLOCK_COLUMNS, "unit": UNITS[dtype] if has_vectors else 1}
    constants |= {} if is_weighed else {"weights": None}
    ptx = ptx_of(kernels, "logits_gradient", types, constants)
    if has_vectors:
        assert column_instructions(ptx, 16) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert "atom" not in ptx and not re.search(r"\bld\.local|\bst\.local", ptx)
    assert is_weighed or "div.rn.f32" in ptx  # `/` would be an approximation
    assert dtype == "fp32" or f"cvt.rn.{dtype.replace('fp', 'f')}" in ptx  # round to nearest


def test_kernels_are_not_specialized_on_addresses_or_sizes(kernels: ModuleType) -> None:
    """Otherwise a different placement could run different code, with a different order of additions."""
    floats = {"divisor", "z_factor", "share", "label_weight"}  # floats are never specialized
    kernels_by_name = {name: each for name, each in vars(kernels).items() if hasattr(each, "params") and name[0] != "_"}
    assert kernels_by_name.keys() == {"add_rows", "copy_rows", "logits_gradient", "group_rows", "add_logits"}
    for name in kernels_by_name:
        params = [param for param in getattr(kernels, name).params if not param.is_constexpr]
        assert {param.name for param in params if not param.do_not_specialize} <= floats, name


def test_threads_load_16_bytes_if_columns_and_addresses_allow() -> None:
    vector_size = device_kernels._vector_size
    assert [vector_size(torch.zeros(2, 24, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)] == [8, 4]
    assert vector_size(torch.zeros(2, 24), torch.zeros(2, 24, dtype=torch.bfloat16)) == 8
    assert vector_size(torch.zeros(2, 26)) == 1
    rows = torch.zeros(8, 16)  # torch aligns memory to 64 bytes
    assert [device_kernels._is_aligned(rows[:, start:]) for start in (0, 4, 1)] == [True, True, False]
    assert not device_kernels._is_aligned(torch.zeros(8, 15))
