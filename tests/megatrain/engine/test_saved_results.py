"""With saved results, a recompute is bit-identical, runs no attention kernel twice, and needs the traced bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatrain.converters.spec import build_graph
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.unit.saved_results import SavedResults
from megatrain.models.graph import ModelGraph
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import StepLoss, layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = range(1000)
SEED = 11
DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout"), 0.2)
Batches = Sequence[Mapping[str, torch.Tensor]]
Gradients = dict[str, torch.Tensor]


class Kernels(TorchDispatchMode):
    """Mode that counts matrix products, and forwards of attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = AttentionCall.from_operator(func, args, kwargs or {})
        self.num_forwards += call is not None and not call.is_backward
        self.num_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def whole_rows(num_batches: int = 2, num_rows: int = 2, length: int = 16) -> Batches:
    ids = torch.randint(3, 90, (num_batches, num_rows, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)} for each in ids]


class Side:
    """Loss, gradients and kernel counts of one step. The visits in ``saved`` save their results."""

    def __init__(
        self,
        config: Any,
        saved: Any,
        batches: Batches,
        *,
        dtype: torch.dtype = torch.float32,
        nbytes: int = 1 << 20,
        change: Callable[[ModelGraph], None] = lambda graph: None,
        with_products: bool = False,
        **options: Any,
    ) -> None:
        graph = build_graph(config, dtype=dtype)
        change(graph)
        self.access = MemoryAccess(graph, dict(build_model(config, dtype, ()).named_parameters()), dtype)
        self.access.attention_nbytes = nbytes
        kinds = {"saved_results" if with_products else "saved_attention": saved}
        runner = layer_runner(graph, self.access, device="cpu", head_rows=4, **kinds, **options)
        with Kernels() as kernels:
            self.loss: StepLoss = runner.forward_backward(batches, seed=SEED)
        self.gradients: Gradients = self.access.finish()
        self.num_forwards, self.num_products = kernels.num_forwards, kernels.num_products


def compare(config: Any, batches: Batches | None = None, *, saved: Any = ALL, **options: Any) -> tuple[Side, Side]:
    """Run one step without saved results and one with them. Check that they are bit-identical, and return both."""
    batches = whole_rows() if batches is None else batches
    again, side = Side(config, (), batches, **options), Side(config, saved, batches, **options)
    assert side.loss == again.loss
    assert side.gradients.keys() == again.gradients.keys() and again.gradients
    for name, gradient in again.gradients.items():
        assert torch.equal(side.gradients[name], gradient), name
    return again, side


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("with_products", [False, True])
def test_saved_and_recomputed_results_are_bit_identical(with_products: bool, family: str) -> None:
    again, side = compare(tiny_config(family, tied=False), padded_batches(), with_products=with_products)
    assert 2 * side.num_forwards == again.num_forwards, "none is recomputed"
    # A backward has twice the products of a forward. Without recomputed products, about three of four are left.
    if with_products:
        assert 0.6 * again.num_products < side.num_products < again.num_products
    else:
        assert side.num_products == again.num_products


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_each_product_of_a_layer_runs_once(order: str) -> None:
    """Each matrix has three products: for the output, and for the gradients of input and weight. Each runs once."""
    config, batches = tiny_config("llama", tied=False), whole_rows()
    trace = trace_visits(build_graph(config), 2, 16, torch.float32, padded=False)
    again, side = compare(config, batches, with_products=True, order=order, trace=trace)
    per_layer = 2 * config.num_hidden_layers  # for both micro-batches
    assert again.num_products - side.num_products == 6 * per_layer, "the seventh is left out in both"
    assert again.num_forwards == 2 * side.num_forwards
    plain = compare(config, batches, with_products=True, order=order)[1]
    assert plain.num_products == side.num_products, "without a trace it is also saved"
    (nbytes,) = {visit.results.nbytes for visit in trace.visits} - {0}
    short = compare(config, batches, with_products=True, order=order, trace=trace, nbytes=nbytes - 1)[1]
    assert short.num_products == side.num_products + per_layer and short.num_forwards == side.num_forwards


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_each_kernel_runs_once(order: str) -> None:
    config = tiny_config("llama", tied=False)
    again, side = compare(config, order=order)
    assert again.num_forwards == 2 * side.num_forwards == 2 * 2 * config.num_hidden_layers
    again, side = compare(config, saved={2}, order=order)
    assert side.num_forwards == again.num_forwards - 2


def test_bfloat16() -> None:
    again, side = compare(tiny_config("llama", tied=False), dtype=torch.bfloat16)
    assert again.num_forwards == 2 * side.num_forwards


def test_recompute_repeats_dropout_masks() -> None:
    """Dropout is within attention, whose kernel then runs again, or only after attention."""
    compare(tiny_config("gpt2", tied=False, **DROPOUT))
    behind = {**DROPOUT, "attn_pdrop": 0.0}
    again, side = compare(tiny_config("gpt2", tied=False, **behind))
    compare(tiny_config("gpt2", tied=False, **DROPOUT), with_products=True)
    assert again.num_forwards == 2 * side.num_forwards


def test_trace_reports_the_bytes_of_saved_results() -> None:
    """If the space is too small, because rows have several documents, only the results that fit are saved."""
    config, batches = tiny_config("llama", tied=False), whole_rows(length=48)
    trace = trace_visits(build_graph(config), 2, 48, torch.float32, padded=False)
    sizes = {visit.attention.nbytes for visit in trace.visits} - {0}
    assert len(sizes) == 1
    nbytes = sizes.pop()
    again, side = compare(config, batches, nbytes=nbytes)
    assert again.num_forwards == 2 * side.num_forwards
    again, side = compare(config, batches, nbytes=nbytes - 1)
    assert again.num_forwards == side.num_forwards
    by_documents, in_part = compare(config, padded_batches(), nbytes=1024)
    assert by_documents.num_forwards / 2 < in_part.num_forwards < by_documents.num_forwards


def test_a_unit_that_checkpoints_itself() -> None:
    """The unit runs its attention again within its backward, where saved results are not used."""
    config = tiny_config("llama", tied=False)

    def checkpointing(graph: ModelGraph) -> None:
        attention = graph.units[2].module.self_attn
        forward = attention.forward
        attention.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    compare(config, change=checkpointing)
    compare(config, change=checkpointing, with_products=True)


def test_call_with_other_arguments_is_not_replayed() -> None:
    """A saved result answers only a call with the same shapes and arguments."""
    query, key = (torch.randn(1, 2, length, 8) for length in (6, 6))
    results, room = SavedResults(), torch.zeros(4096, dtype=torch.uint8)
    attend = torch.nn.functional.scaled_dot_product_attention
    with results.save_calls(room, {}):
        causal = attend(query, key, key, is_causal=True)
    room.zero_()  # a replayed result is now zero
    with results.replay_calls(room, {}):
        assert torch.equal(attend(query, key, key), attend(query, key, key))
    with results.replay_calls(room, {}):
        assert not attend(query, key, key, is_causal=True).any() and causal.any()
    with results.replay_calls(room, {}):
        longer = torch.cat([query, query], dim=2)
        assert attend(longer, longer, longer, is_causal=True).any()
