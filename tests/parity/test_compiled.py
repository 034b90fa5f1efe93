"""`model.compile`: one graph per kind of layer, equal results in any placement, and an error that names the layer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.compiled_layers import LayerCompiler
from megatrain.trace.trace import trace_visits
from oracles.memory_access import MemoryAccess
from oracles.runners import StepRunner, layer_runner
from oracles.tiered_run import TieredRun, config_text, run_config

NUM_STEPS = 3
ALL_NVME = {"placement": "\n".join(f'{kind} = ["nvme"]' for kind in ("weights", "gradients", "optimizer"))}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    # The first torch.compile in a process turns this validation off.
    validates = torch.distributions.Distribution._validate_args
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()
    torch.distributions.Distribution._validate_args = validates


def num_graphs() -> int:
    return int(dynamo.utils.counters["stats"]["unique_graphs"])


def run(folder: Path, model: Path, keys: str, **tables: Any) -> TieredRun:
    text = config_text(folder, model, **tables)
    return run_config(text.replace("[data]", f"{keys}\n[data]", 1), folder, num_steps=NUM_STEPS)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_one_graph_for_all_layers(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    keys, precision = 'compile = true\ncompile_backend = "aot_eager"', f'compute_dtype = "{dtype}"'
    compiled = run(tmp_path / "compiled", tiny_model, keys, nvme=0, precision=precision)
    num_layers = sum(unit.is_layer for unit in compiled.plan.graph.units)
    assert num_layers > 1 and num_graphs() == 1  # shared by the forward and recompute of all layers and steps
    plain = run(tmp_path / "plain", tiny_model, "", nvme=0, precision=precision)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns when it compiles its first kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_inductor_kernels_match_eager_layers(tiny_model: Path, tmp_path: Path) -> None:
    compiled = run(tmp_path / "ram", tiny_model, "compile = true", nvme=0)
    on_nvme = run(tmp_path / "nvme", tiny_model, "compile = true", ram="7MiB", **ALL_NVME)
    assert (on_nvme.losses, on_nvme.digests) == (compiled.losses, compiled.digests)
    plain = run(tmp_path / "plain", tiny_model, "", nvme=0)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert compiled.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)


def prepared(
    family: str, compiler: LayerCompiler | None, kept: Any = (), **values: Any
) -> tuple[StepRunner, MemoryAccess, dict[str, torch.Tensor]]:
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, vocab_size=96, max_position_embeddings=64, pad_token_id=0, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    graph = build_graph(config, attn_implementation="sdpa")
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    trace = trace_visits(graph, 2, 32, torch.float32)
    runner = layer_runner(graph, access, device="cpu", trace=trace, compiler=compiler, kept=kept)
    ids = torch.randint(3, 90, (2, 32))
    return runner, access, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def gradients(family: str, compiler: LayerCompiler | None, **values: Any) -> dict[str, torch.Tensor]:
    runner, access, batch = prepared(family, compiler, **values)
    runner.forward_backward([batch])
    return access.finish()


@pytest.mark.slow
def test_keeping_graphs_of_compiled_layers_is_bit_identical(tiny_model: Path, tmp_path: Path) -> None:
    keys = 'compile = true\ncompile_backend = "aot_eager"'
    kept = run(tmp_path / "kept", tiny_model, keys, nvme=0)
    again = run(tmp_path / "again", tiny_model, keys, nvme=0, training='recompute = "full"')
    assert (
        kept.plan.program.recompute.kept_graphs
        and kept.plan.kept_bytes
        and not again.plan.program.recompute.kept_graphs
    )
    assert (kept.losses, kept.grad_norms, kept.digests) == (again.losses, again.grad_norms, again.digests)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns when it compiles its first kernels
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")),
    ],
)
def test_compiled_layers_save_no_more_bytes_than_traced(backend: str) -> None:
    """The trace runs uncompiled layers. Compiled layers must not save more for the backward than uncompiled ones."""
    kinds = ["sliding_attention", "full_attention"] * 2
    for family, values in {"llama": {}, "gemma3_text": {"sliding_window": 8, "layer_types": kinds}}.items():
        runner, access, batch = prepared(family, LayerCompiler(backend), kept=range(99), **values)
        graph = build_graph(runner._graph.config, attn_implementation="sdpa")
        traced = [
            v.memory.graph_nbytes
            for v in trace_visits(graph, 2, 32, torch.float32).visits
            if graph.units[v.unit].is_layer
        ]
        taken = [saved_nbytes(bound) for bound in runner.bounds if bound.unit.is_layer]
        runner.forward_backward([batch])
        access.finish()
        for nbytes, most in zip(taken, traced, strict=True):
            assert 0 < nbytes[0] <= most, family
            assert len(nbytes) == 1, "nothing is recomputed"


def saved_nbytes(bound: BoundUnit) -> list[int]:
    """Return a list to which each forward of a layer appends the bytes that autograd saved, excluding weights."""
    forward, found = bound.forward, list[int]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        weights = {parameter.untyped_storage()._cdata for parameter in bound.unit.module.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = forward(*args, **kwargs)
        found.append(sum(nbytes for storage, nbytes in saved.items() if storage not in weights))
        return value

    bound.forward = counting
    return found


def test_evaluations_are_compiled() -> None:
    plain, _, batch = prepared("llama", None)
    compiled, _, _ = prepared("llama", LayerCompiler("aot_eager"))
    for _ in range(2):
        assert compiled.evaluate([batch]).terms == pytest.approx(plain.evaluate([batch]).terms, rel=1e-5)
        compiled.forward_backward([batch])
    assert num_graphs() == 2  # one with gradients, one without


@pytest.mark.slow
def test_each_kind_of_layer_gets_a_separate_graph() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    values = {"sliding_window": 8, "layer_types": kinds}
    plain = gradients("gemma3_text", None, **values)
    compiled = gradients("gemma3_text", LayerCompiler("aot_eager"), **values)
    assert num_graphs() == 2
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_error_names_the_layer_with_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def looking(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) if x.sum().item() > -1e9 else x

    monkeypatch.setattr(LlamaMLP, "forward", looking)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 \(LlamaDecoderLayer\).* model\.compile = false"):
        gradients("llama", LayerCompiler("aot_eager"))


def test_error_names_a_backend_that_fails_in_the_backward() -> None:
    def failing(module: Any, inputs: Any) -> Any:
        raise dynamo.exc.BackendCompilerFailed(failing, RuntimeError("no kernel for this"), None)  # as inductor does

    def backend(module: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda m, _: make_boxed_func(m.forward), bw_compiler=failing)(module, inputs)

    with pytest.raises(UnsupportedModelError, match=r"model\.layers\..*no kernel for this"):
        gradients("llama", LayerCompiler(backend))  # type: ignore[arg-type]
