"""On a GPU, steps are bit-identical with or without kept graphs and saved results.

Kept graphs do not exceed the size computed from the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakes.virtual_cuda import VirtualCuda
from megatrain.converters.spec import build_graph
from megatrain.engine.unit.saved_results import SavedResults
from megatrain.trace.trace import trace_visits
from oracles.families import VOCAB, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.planned_workspace import planned_workspace
from oracles.runners import layer_runner
from tiered import MiB

ROWS, LENGTH, NUM_MICRO_BATCHES = 4, 512, 2


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use deterministic kernels, because otherwise any two steps could differ."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def step(config: Any, dtype: torch.dtype, kept: Any, **saved: Any) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Run one step. Return its loss, gradients, and peak memory in bytes, not counting weights and gradients."""
    graph, model = build_graph(config, dtype=dtype), build_model(config, dtype).to("cuda")
    access = MemoryAccess(graph, dict(model.named_parameters()), dtype)
    access._device, access.attention_nbytes = "cuda", 8 << 20
    access._weights = {name: weight.to("cuda") for name, weight in access._weights.items()}
    del model
    runner = layer_runner(graph, access, device="cuda", kept=kept, **saved)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = runner.forward_backward([batch] * NUM_MICRO_BATCHES, seed=5)
    peak = torch.cuda.max_memory_allocated() - before
    gradients = access.finish()
    return loss, gradients, peak - sum(gradient.nbytes for gradient in gradients.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_kept_graphs_do_not_change_device_results(family: str, dtype: torch.dtype, virtual: VirtualCuda | None) -> None:
    changes = {"max_position_embeddings": 512} if family != "gpt2" else {"n_positions": 512, "resid_pdrop": 0.1}
    config = tiny_config(family, tied=False, **changes)
    graph = build_graph(config, dtype=dtype)
    trace = trace_visits(graph, ROWS, LENGTH, dtype, device="cuda" if virtual is None else "cpu")
    loss, gradients, _ = step(config, dtype, ())
    kept_loss, kept_gradients, peak = step(config, dtype, range(1000))
    assert kept_loss == loss and kept_gradients.keys() == gradients.keys()
    assert all(torch.equal(kept_gradients[name], gradients[name]) for name in gradients)
    graphs = NUM_MICRO_BATCHES * sum(visit.memory.graph_nbytes for visit in trace.visits if not visit.is_head)
    libraries_bytes = 64 * MiB if virtual is None else 0  # for the workspaces of CUDA libraries
    assert graphs / 2 < peak <= graphs + planned_workspace(graph, trace, NUM_MICRO_BATCHES) + libraries_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("what", ["saved_attention", "saved_results"])
def test_saved_results_do_not_change_device_results(
    what: str, family: str, dtype: torch.dtype, virtual: VirtualCuda | None
) -> None:
    if virtual is None and dtype == torch.float32 and what == "saved_attention":
        pytest.skip("a GPU has no fused kernel for heads that share keys in fp32: nothing could be saved")
    config = tiny_config(family, tied=False, max_position_embeddings=512)
    loss, gradients, _ = step(config, dtype, ())
    num_calls: list[int] = []
    replaying = SavedResults.replay_calls

    def counted(results: SavedResults, room: torch.Tensor, owners: Any) -> Any:
        num_calls.append(sum(call is not None for call in results._calls))
        return replaying(results, room, owners)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedResults, "replay_calls", counted)
        saved_loss, saved_gradients, _ = step(config, dtype, (), **{what: range(1, 1 + config.num_hidden_layers)})
    # Calls per layer: seven matrix products, and attention if it has a fused kernel. Without a trace, no product counts
    # as unneeded.
    is_fused = virtual is not None or dtype != torch.float32
    each = 1 if what == "saved_attention" else 7 + is_fused
    assert num_calls == [each] * config.num_hidden_layers * NUM_MICRO_BATCHES
    assert saved_loss == loss and saved_gradients.keys() == gradients.keys()
    assert all(torch.equal(saved_gradients[name], gradients[name]) for name in gradients)
