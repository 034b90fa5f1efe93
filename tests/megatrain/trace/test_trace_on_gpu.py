"""Traces for plans with a GPU use fake GPU tensors, are exact, and include the allocations of attention kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils import flop_counter

from fakes.fake_cuda import fake_cuda
from megatrain.converters.spec import build_graph
from megatrain.engine.device import attention
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.environment import deterministic_kernels
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.plan import traced
from megatrain.trace.counting import CountingError, CountingMode, StepFlops, count_flops, step_flops
from megatrain.trace.trace import trace_generation, trace_visits
from megatrain_tier_cli.main import command_group
from oracles.families import tiny_config
from oracles.tiered_run import config_text, write_tiny_model
from tiered import GB, GiB, MiB

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _on_gpu() -> Iterator[None]:
    with fake_cuda():
        yield


@pytest.fixture(autouse=True)
def _multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 132)


def trace_of(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> VisitTrace:
    config = options.pop("config", None) or tiny_config(family, tied=False)
    length = options.pop("length", 64)
    return trace_visits(build_graph(config, dtype=dtype), 1, length, dtype, **{"device": "cuda", **options})


@pytest.mark.parametrize(
    ("family", "dtype", "padded"),
    [
        ("llama", torch.bfloat16, False),
        ("llama", torch.bfloat16, True),
        ("gemma2", torch.float32, True),
        ("qwen3_moe", torch.bfloat16, False),
    ],
)
def test_trace_is_exact_without_device_allocations(family: str, dtype: torch.dtype, padded: bool) -> None:
    graph = build_graph(tiny_config(family, tied=False), dtype=dtype)
    buffers = {name: (id(buffer), buffer.clone()) for name, buffer in graph.model.named_buffers()}
    trace = trace_visits(graph, 1, 64, dtype, device="cuda", padded=padded)
    assert (trace.exact, trace.guesses, trace.uncounted_ops) == (True, (), ())
    on_cpu = trace_visits(graph, 1, 64, dtype, padded=padded)
    assert [visit.saved_inputs for visit in trace.visits] == [visit.saved_inputs for visit in on_cpu.visits]
    assert all(visit.forward.flops > 0 for visit in trace.visits if graph.units[visit.unit].is_layer)
    for name, buffer in graph.model.named_buffers():
        assert id(buffer) == buffers[name][0] and torch.equal(buffer, buffers[name][1]) and buffer.device.type == "cpu"


def test_generation_trace_uses_a_fake_cache() -> None:
    """The cache for keys and values is also fake, so a trace takes no memory for it."""
    graph = build_graph(tiny_config("llama"), dtype=torch.bfloat16, is_trained=False)
    (trace, nbytes), (on_cpu, same) = (trace_generation(graph, 2, 16, device=name) for name in ("cuda", "cpu"))
    # Keys and values of two rows of 16 tokens, two heads of 8 numbers each, in bf16.
    assert nbytes == same and set(nbytes.values()) == {2 * 2 * 16 * 2 * 8 * 2}
    assert trace.exact and [visit.unit for visit in trace.visits] == [visit.unit for visit in on_cpu.visits]


def call(name: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Any, tuple[Any, ...]]:
    """Return an attention backward and its arguments up to the output.

    Args:
        shapes: Shapes of queries, keys and values: [batch, heads, tokens, width]."""
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    out = torch.empty_like(query).transpose(1, 2).contiguous().transpose(1, 2)
    func = getattr(aten, f"_scaled_dot_product_{name}_backward").default
    bias = [None] if name == "efficient_attention" else []
    return func, (out, query, key, value, *bias, out)


def hidden(name: str, *shapes: tuple[int, ...], is_deterministic: bool, **options: Any) -> int:
    found = AttentionCall.from_operator(*call(name, *shapes, **options), {})
    assert found is not None
    return found.workspace_nbytes(CUDA, is_deterministic=is_deterministic)


@pytest.mark.parametrize(
    ("rows", "length", "in_order", "in_any_order", "expanded"),
    [
        (16, 1024, 0.23, 0.23, 0.23),
        (1, 32 * 1024, 2.35, 0.47, 0.47),
        (1, 128 * 1024, 9.4, 1.9, 1.9),
        (1, 512 * 1024, 37.6, 7.5, 7.5),
    ],
)
def test_flash_attention_backward_allocations(
    rows: int, length: int, in_order: float, in_any_order: float, expanded: float
) -> None:
    """The kernel allocates fp32 query gradients for each split, and key and value gradients for all 28 heads.

    The shapes belong to a 7B model on 132 multiprocessors. The expected sizes in GB were derived from the kernel's
    source.
    """
    heads, few = (rows, 28, length, 128), (rows, 4, length, 128)
    for is_deterministic, expected in ((True, in_order), (False, in_any_order)):
        alike = hidden("flash_attention", heads, heads, heads, is_deterministic=is_deterministic)
        grouped = hidden("flash_attention", heads, few, few, is_deterministic=is_deterministic)
        assert alike / GB == pytest.approx(expected, rel=0.04)
        assert (grouped - alike) / GB == pytest.approx(expanded, rel=0.04)


def test_allocations_of_other_attention_backwards() -> None:
    heads, few = (1, 28, 32 * 1024, 128), (1, 4, 32 * 1024, 128)
    sums = 28 * 32 * 1024 * 4
    in_fp32 = sums * 128
    for is_deterministic in (True, False):
        # In 16 bits, there is no fp32 product of output and gradient. Sums of keys and values stay in registers.
        assert hidden("efficient_attention", heads, heads, heads, is_deterministic=is_deterministic) == in_fp32 + sums
        single = hidden(
            "efficient_attention", heads, heads, heads, is_deterministic=is_deterministic, dtype=torch.float32
        )
        assert single == 2 * in_fp32 + sums
    assert hidden("cudnn_attention", heads, few, few, is_deterministic=False) == pytest.approx(2 * in_fp32, rel=0.01)
    wide = (1, 4, 4096, 256)
    ordered, free = (hidden("efficient_attention", *[wide] * 3, is_deterministic=flag) for flag in (True, False))
    assert ordered < free <= 50 * ordered  # each of the 4 heads splits its keys among up to 50 thread blocks
    assert hidden("flash_attention_for_cpu", heads, few, few, is_deterministic=True) == 0
    func, (_, *others) = call("flash_attention", few, few, few)
    crossed = torch.empty(few, dtype=torch.bfloat16, device="meta")  # heads come before tokens, so it is copied
    found = AttentionCall.from_operator(func, (crossed, *others), {})
    assert found is not None and found.num_copied_bytes == crossed.nbytes
    assert (
        AttentionCall.from_operator(func, (crossed, *others), {}).workspace_nbytes(
            torch.device("cpu"), is_deterministic=True
        )
        == 0
    )  # type: ignore[union-attr]


def test_flash_attention_flops_of_packed_rows_of_different_lengths() -> None:
    query, key = (torch.empty(1000, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    starts = torch.tensor([0, 300, 1000])
    forward = (query, key, key, starts, starts, 700, 700)
    backward = (query, query, key, key, query, query, starts, starts, 700, 700)
    one, other = aten._flash_attention_forward.default, aten._flash_attention_backward.default
    assert count_flops(one, forward, {}, None) == 2 * 8 * 1000 * 700 * 128
    assert count_flops(other, backward, {}, None) == 2 * 8 * 1000 * 700 * 5 * 64
    found = AttentionCall.from_operator(other, backward, {})
    assert found is not None and (found.num_rows, found.num_keys) == (2, 1000)
    rows = 1000 + 2 * 128
    expanded = 2 * 1000 * 8 * 64 * 2
    copied = 1000 * (8 + 2 + 2) * 64 * 2 // 2  # half of the gradients, to join the results of several calls
    hidden = 9 * rows * 8 * 64 * 4 + rows * 8 * 4 + expanded + copied
    assert found.workspace_nbytes(CUDA, is_deterministic=True) == hidden
    least = 2 * 1000 * 8 * 64 * 4
    assert least <= found.workspace_nbytes(CUDA, is_deterministic=False) < 2 * least, "the maximum of a call"


def test_plan_includes_flash_attention_memory() -> None:
    """Deterministic kernels need more memory, because queries of 4 heads are split among 33 blocks."""
    length = 512
    free = trace_of(length=length, padded=False)
    with deterministic_kernels(CUDA, "Model"):
        ordered = trace_of(length=length, padded=False)
    one_split = length * 4 * 32 * 4  # the head size 8 is rounded up to 32
    for visit, other in zip(ordered.visits, free.visits, strict=True):
        if visit.backward.flops and visit.unit in (2, 3, 4):
            assert (
                visit.memory.backward_nbytes
                > 33 * one_split
                > visit.memory.backward_nbytes - other.memory.backward_nbytes
                > 20 * one_split
            )
            assert (
                one_split < other.memory.backward_nbytes < 4 * one_split
                and visit.memory.forward_nbytes == other.memory.forward_nbytes
            )


@pytest.fixture
def _formulas_of_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's formulas refuse different numbers of heads for keys and queries, as in torch 2.11."""
    forward, backward = flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count

    def checked_forward(query: Any, key: Any, value: Any) -> Any:
        assert query[1] == key[1] == value[1], "heads"
        return forward(query, key, value)

    def checked_backward(grad: Any, query: Any, key: Any, value: Any) -> Any:
        assert grad[1] == query[1] == key[1] == value[1], "heads"
        return backward(grad, query, key, value)

    monkeypatch.setattr(flop_counter, "sdpa_flop_count", checked_forward)
    monkeypatch.setattr(flop_counter, "sdpa_backward_flop_count", checked_backward)


@pytest.mark.usefixtures("_formulas_of_2_11")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_grouped_queries_are_counted_without_torch_formulas(device: str) -> None:
    grouped, alike = (
        trace_of(config=tiny_config("llama", tied=False, num_key_value_heads=heads), device=device, padded=False)
        for heads in (2, 4)
    )
    assert (grouped.guesses, grouped.uncounted_ops) == ((), ())
    # The grouped key and value projections of a layer have 2 x 16 x 32 fewer weights. Attention is the same.
    assert alike.visits[2].forward.flops - grouped.visits[2].forward.flops == 2 * 64 * (2 * 16 * 32)
    assert step_flops(grouped, num_positions=64, num_real_tokens=64, num_trained_tokens=64).model > 0


@pytest.mark.parametrize(
    "name", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
def test_grouped_query_flops_match_repeated_keys(name: str) -> None:
    heads, few = (3, 8, 40, 16), (3, 2, 50, 16)
    value = (3, 2, 50, 24)
    func, (out, query, key, values, *_) = call(name, heads, few, value)
    wide = (3, 8, 40, 24)
    repeated = [(3, 8, *shape[2:]) for shape in (few, value)]
    forward = getattr(aten, f"_scaled_dot_product_{name}").default
    assert count_flops(forward, (query, key, values), {}, None) == flop_counter.sdpa_flop_count(heads, *repeated)
    expected = flop_counter.sdpa_backward_flop_count(wide, heads, *repeated)
    assert count_flops(func, (out, query, key, values), {}, None) == expected


def test_failing_flop_formula_does_not_fail_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace_of()

    def failing(func: Any, *args: Any) -> int:
        assert func is not aten.silu.default, "no such shape"
        return 1

    monkeypatch.setattr("megatrain.trace.counting.count_flops", failing)
    trace = trace_of()
    assert trace.exact and trace.uncounted_ops == ("aten.silu.default: AssertionError: no such shape",)
    assert [visit.memory.backward_nbytes for visit in trace.visits] == [
        visit.memory.backward_nbytes for visit in whole.visits
    ]
    assert step_flops(trace, num_positions=64, num_real_tokens=64, num_trained_tokens=64) == StepFlops(0, 0)


def test_counting_error_is_raised_instead_of_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    count = CountingMode._count_storage

    def failing(ledger: CountingMode, tensor: torch.Tensor) -> None:
        assert not (ledger.current_unit == "model.layers.1" and tensor.dim() == 4), "counted twice"
        count(ledger, tensor)

    monkeypatch.setattr(CountingMode, "_count_storage", failing)
    with pytest.raises(CountingError, match=r"aten\..* cannot be counted: AssertionError: counted twice"):
        trace_of()


@pytest.fixture
def gpu_with_1_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a GPU with 1 GiB of memory (unless there is one), without Liger's kernels installed."""
    monkeypatch.setattr(traced, "has_liger_kernels", lambda: False)  # they only run on a GPU
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GiB, GiB))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(is_integrated=0))


@pytest.mark.usefixtures("gpu_with_1_gib")
@pytest.mark.parametrize("is_exact", [True, False])
def test_command_reports_if_the_plan_is_exact(is_exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = config_text(tmp_path, write_tiny_model(tmp_path / "model"), device="cuda", gpu="256MiB", nvme=0)
    (tmp_path / "run.toml").write_text(text)
    if not is_exact:
        reads = torch.nn.functional.silu

        def reading(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return reads(hidden, *args, **options) * (1 if hidden.sum() >= 0 else 2)

        monkeypatch.setattr(torch.nn.functional, "silu", reading)
    runner = CliRunner()
    plain, as_json = (
        runner.invoke(command_group, ["plan", str(tmp_path / "run.toml"), *more]) for more in ((), ("--json",))
    )
    assert plain.exit_code == as_json.exit_code == 0, plain.output
    found = json.loads(as_json.stdout)
    said = "the workspace is estimated: model.layers.0 and 3 more: it reads a value that is unknown before it runs"
    assert ("logits; exact" in plain.stdout, said in plain.stdout.replace("\n", " ")) == (is_exact, not is_exact)
    if not torch.cuda.is_available():
        room = "768.0 MiB of free GPU memory are outside of the tier; libraries are allowed 102.4 MiB"
        assert room in found["messages"] and room in plain.stdout.replace("\n", " ")
    assert found["workspace_is_exact"] is is_exact and len(found["guesses"]) == (0 if is_exact else 1)
    assert MiB < next(row for row in found["rows"] if row["kind"] == "workspace")["bytes"]["gpu"] < 4 * MiB


@pytest.mark.usefixtures("gpu_with_1_gib")
@pytest.mark.parametrize(
    ("num_failing", "size", "refuses"), [(4, "", True), (4, "60%", False), (3, "", False)], ids=["all", "sized", "some"]
)
def test_size_is_not_chosen_if_no_layer_was_traced(
    num_failing: int, size: str, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that cannot be traced are planned as if they computed nothing, so an automatic size would be too small."""
    text = config_text(tmp_path, write_tiny_model(tmp_path / "model"), device="cuda", gpu=size, nvme=0)
    (tmp_path / "run.toml").write_text(text)
    inside, silu = CountingMode.within_unit, torch.nn.functional.silu
    names: list[str] = []

    def noting(counts: CountingMode, name: str) -> Any:
        names.append(name)
        return inside(counts, name)

    def failing(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if names and names[-1] in [f"model.layers.{number}" for number in range(num_failing)]:
            raise RuntimeError("no such kernel for fake tensors")
        return silu(hidden, *args, **options)

    monkeypatch.setattr(CountingMode, "within_unit", noting)
    monkeypatch.setattr(torch.nn.functional, "silu", failing)
    done = CliRunner().invoke(command_group, ["plan", str(tmp_path / "run.toml"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    objections = [each for each in found["objections"] if each["key"] == "tiers.gpu.size"]
    assert bool(objections) is refuses and found["fits_this_machine"] is not refuses
    assert len(found["guesses"]) == 1 and f" and {num_failing - 1} more" in found["guesses"][0]
    if refuses:
        assert objections[0]["kind"] == "place" and "none of them could be traced" in objections[0]["text"]
        assert "no such kernel for fake tensors" in objections[0]["text"] and '"60%"' in objections[0]["advice"]


@pytest.mark.parametrize("padded", [False, True])
def test_bytes_saved_by_attention(padded: bool) -> None:
    """Attention saves its output and sums and almost nothing else, both for whole rows and for documents."""
    config = tiny_config("llama", tied=False)
    trace = trace_of(config=config, length=512, padded=padded)
    layers = [visit for visit in trace.visits if visit.saved_inputs and visit.attention.nbytes]
    assert len(layers) == config.num_hidden_layers
    for visit in layers:
        results = 512 * (config.hidden_size * 2 + config.num_attention_heads * 4)
        assert 0 <= visit.attention.nbytes - results <= 4 * 512
        assert (
            visit.attention.work.flops == 2 * visit.attention.work.skipped_flops == 4 * 512 * 512 * config.hidden_size
        )
