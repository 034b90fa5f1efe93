"""Attention's results saved for the recompute: a recompute's bits, no kernel run twice, the bytes of the trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.attention import AttentionCall
from megatrain.engine.forward import LayerRunner, StepLoss
from megatrain.engine.trace import trace_visits
from megatrain.models.graph import build_graph
from oracles.families import FAMILIES, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess

ALL = range(1000)
SEED = 11
DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout"), 0.2)
Batches = Sequence[Mapping[str, torch.Tensor]]
Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Kernels(TorchDispatchMode):
    """Counts the forwards of attention kernels that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = AttentionCall.of(func, args, kwargs or {})
        self.num_forwards += call is not None and not call.is_backward
        return func(*args, **(kwargs or {}))


def whole_rows(num_batches: int = 2, num_rows: int = 2, length: int = 16) -> Batches:
    ids = torch.randint(3, 90, (num_batches, num_rows, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)} for each in ids]


class Side:
    """One step of a model, whose visits save attention or do not."""

    def __init__(
        self,
        config: Any,
        saved: Any,
        batches: Batches,
        *,
        dtype: torch.dtype = torch.float32,
        nbytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        graph = build_graph(config, dtype=dtype)
        self.access = MemoryAccess(graph, dict(build_model(config, dtype, ()).named_parameters()), dtype)
        self.access.attention_nbytes = nbytes
        runner = LayerRunner(
            graph, self.access, device="cpu", compute_dtype=dtype, saved_attention=saved, head_rows=4, **options
        )
        with Kernels() as kernels:
            self.loss: StepLoss = runner.forward_backward(batches, seed=SEED)
        self.gradients: Gradients = self.access.finish()
        self.num_forwards = kernels.num_forwards


def compare(config: Any, batches: Batches | None = None, *, saved: Any = ALL, **options: Any) -> tuple[Side, Side]:
    """Return a step without and one with saved attention, after seeing that they have the same bits."""
    batches = whole_rows() if batches is None else batches
    again, side = Side(config, (), batches, **options), Side(config, saved, batches, **options)
    assert side.loss == again.loss
    assert side.gradients.keys() == again.gradients.keys() and again.gradients
    for name, gradient in again.gradients.items():
        assert torch.equal(side.gradients[name], gradient), name
    return again, side


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_saved_and_recomputed_are_the_same_bits(family: str) -> None:
    again, side = compare(tiny_config(family, tied=False), padded_batches())
    assert side.num_forwards == again.num_forwards == 0 or side.num_forwards < again.num_forwards
