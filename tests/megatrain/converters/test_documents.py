"""Attention within documents matches Hugging Face on separate documents, without memory quadratic in the row length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fakes.fake_cuda import fake_cuda
from megatrain.converters import documents
from megatrain.converters.documents import DocumentMask, Documents, attention_by_documents
from megatrain.converters.spec import build_graph
from megatrain.engine.device import attention
from megatrain.trace.trace import trace_visits
from oracles.families import VOCAB, tiny_config
from oracles.huggingface import build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

#: Document lengths in each row of a micro-batch. Some documents are longer than the sliding window of 4 tokens.
ROWS = ((1, 5, 3, 9), (12, 2, 4))


def packed_rows(rows: Sequence[Sequence[int]] = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB, (len(rows), sum(rows[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    labels = ids.clone()
    labels[positions == 0] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def one_by_one(packed: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each document that has labels as a separate micro-batch, without a mask or positions."""
    found = []
    for ids, labels, positions in zip(packed["input_ids"], packed["labels"], packed["position_ids"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, stop in itertools.pairwise(begins):
            found.append({"input_ids": ids[None, start:stop], "labels": labels[None, start:stop]})
    return [item for item in found if (item["labels"] != -100).any()]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the caller of each request for a dense mask."""
    found: list[str] = []
    plain = DocumentMask.materialize

    def noting(mask: DocumentMask, where: str) -> Tensor:
        found.append(where)
        return plain(mask, where)

    monkeypatch.setattr(DocumentMask, "materialize", noting)
    return found


def engine_step(config: Any, micro_batches: Sequence[Mapping[str, Tensor]], **options: Any) -> tuple[float, Any]:
    model, graph = build_model(config), build_graph(config)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu", **options)
    return runner.forward_backward(micro_batches, seed=3).loss, access.finish()


def assert_near(expected: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= max(noise, 1e-5 * float(gradient.abs().max())), (name, error)


FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi3",
    "olmo2",
    "cohere2",
    "granite",
    "smollm3",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_match_separate_documents(family: str, dense: list[str]) -> None:
    config = tiny_config(family)
    expected = train_step(build_model(config), one_by_one(packed_rows()), 3)
    loss, gradients = engine_step(config, [packed_rows()])
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)
    assert not dense, "no mask was made"


def test_windows_longer_than_a_piece_and_documents_of_several_pieces(dense: list[str]) -> None:
    rows = ((1300, 236), (131, 1405))
    config = tiny_config("qwen2", sliding_window=130, max_window_layers=0, max_position_embeddings=2048)
    expected = train_step(build_model(config), one_by_one(packed_rows(rows)), 3)
    loss, gradients = engine_step(config, [packed_rows(rows)])
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)
    assert not dense


@pytest.mark.parametrize("rows", [ROWS, ((3, 9),)])
def test_dropout_masks_match_hugging_face(rows: Sequence[Sequence[int]], dense: list[str]) -> None:
    """Dropout needs random numbers for the whole row, so a dense mask is made."""
    config, batches = tiny_config("llama", attention_dropout=0.3), [packed_rows(rows)]
    expected = train_step(build_model(config), batches, 3)
    loss, gradients = engine_step(config, batches)
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)
    assert dense


def test_layers_that_modify_their_mask_get_a_dense_mask(monkeypatch: pytest.MonkeyPatch, dense: list[str]) -> None:
    """The layers turn the mask into a bias on scores, so they get a dense mask, and the trace reports it."""
    config = tiny_config("llama")
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def biased(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        length = query.shape[2]
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
        bias = torch.zeros_like(distance, dtype=query.dtype).sub(0.1 * distance)
        return plain(module, query, key, value, torch.where(allowed, bias, float("-inf")), **options)

    from transformers.models.llama import modeling_llama

    class Biased:
        def get_interface(self, name: str, default: Any) -> Any:
            return biased

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Biased())
    expected = train_step(build_model(config), one_by_one(packed_rows()), 3)
    loss, gradients = engine_step(config, [packed_rows()])
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)
    assert dense
    trace = trace_visits(build_graph(config), 1, 64, torch.float32)
    assert trace.exact and trace.dense_masks == ("where",)


def test_left_padding_and_unknown_mask_patterns_get_dense_masks() -> None:
    """Padding after a text needs no dense mask. Padding elsewhere needs one, and so do unrecognized mask patterns."""
    with attention_by_documents():
        make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

        def mask(function: Any, padding: list[list[bool]] | None = None) -> Tensor | None:
            marks = None if padding is None else torch.tensor(padding)
            found: Tensor | None = make(
                batch_size=1, q_length=4, kv_length=4, mask_function=function, attention_mask=marks
            )
            return found

        causal = masking_utils.causal_mask_function
        behind = mask(causal, [[True, True, False, False]])
        assert isinstance(behind, DocumentMask) and behind.documents.lengths == (2, 2)
        for padding in ([[False, True, True, True]], [[True, False, True, True]]):
            before = mask(causal, padding)
            assert type(before) is Tensor and before.shape == (1, 1, 4, 4)
        either = masking_utils.or_masks(causal, masking_utils.sliding_window_overlay(2))
        assert type(mask(masking_utils.and_masks(causal, either))) is Tensor or mask(causal) is None
        chunks = masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.long))
        assert type(make(batch_size=1, q_length=4, kv_length=4, mask_function=chunks, local_size=2)) is Tensor
        assert mask(causal) is None
        windowed = make(
            batch_size=1, q_length=4, kv_length=4, local_size=2,
            mask_function=masking_utils.sliding_window_causal_mask_function(2),
        )  # fmt: skip
        assert isinstance(windowed, DocumentMask) and windowed.documents.window == 2
        assert torch.equal(windowed & True, torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)[None, None])
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask, "transformers is as it was"
    assert not masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping and not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_renamed_transformers_functions_fall_back_to_dense_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "sliding_window_overlay")
    config, noted = tiny_config("llama"), list[str]()
    expected = train_step(build_model(config), one_by_one(packed_rows()), 3)
    loss, _ = engine_step(config, [packed_rows()], context=lambda: attention_by_documents(noted.append))
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert noted == ["a mask of an unknown kind"]


# -- one kernel call for many documents, with a CPU version of torch's flash attention operators -----------------------


def probabilities(query: Tensor, key: Tensor, left: int, scale: float) -> Tensor:
    """Return the attention probabilities of one sequence: [heads, tokens, tokens]."""
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    allowed = (distance >= 0) & ((distance <= left) | (left < 0))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1)


def sequences(starts: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield each sequence's slice of every tensor, with keys and values repeated for each query head."""
    heads = tensors[0].shape[1]
    for start, stop in itertools.pairwise(starts.tolist()):
        yield [part[start:stop].repeat_interleave(heads // part.shape[1], 1) for part in tensors]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Register CPU flash attention operators. Yield a list that records the number of sequences in each call."""
    found: list[int] = []

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        other: Tensor,
        longest: int,
        *args: Any,
        **options: Any,
    ) -> Any:
        assert starts.dtype == torch.int32 and longest == int(starts.diff().max()) and starts[-1] == len(query)
        assert options["window_size_right"] == 0 and args[2] == (options["window_size_left"] < 0)  # is_causal
        found.append(len(starts) - 1)
        left, scale = options["window_size_left"], options["scale"] or 1 / math.sqrt(query.shape[-1])
        parts = sequences(starts, query, key, value)
        out = torch.cat([torch.einsum("hqk,khd->qhd", probabilities(q, k, left, scale), v) for q, k, v in parts])
        sums = torch.zeros(query.shape[1], len(query))
        return out, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        starts: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        left, scale = options["window_size_left"], options["scale"] or 1 / math.sqrt(query.shape[-1])
        found: list[list[Tensor]] = [[], [], []]
        for q, k, v, own, grad in sequences(starts, query, key, value, out, grad_out):
            weights = probabilities(q, k, left, scale)
            through = torch.einsum("qhd,khd->hqk", grad, v) - (grad * own).sum(-1).T[:, :, None]
            scores = weights * through * scale
            found[0].append(torch.einsum("hqk,khd->qhd", scores, k))
            for parts, each in zip(
                found[1:],
                (torch.einsum("hqk,qhd->khd", scores, q), torch.einsum("hqk,qhd->khd", weights, grad)),
                strict=True,
            ):
                parts.append(each.unflatten(1, (key.shape[1], -1)).sum(2))
        return tuple(torch.cat(parts) for parts in found)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(documents, "_has_varlen", lambda *args: True)
    yield found
    library._destroy()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_kernel_for_all_documents(family: str, calls: list[int], dense: list[str]) -> None:
    """Covers grouped heads, windows, the scale, and more documents than one call may have."""
    config = tiny_config(family)
    expected = train_step(build_model(config), one_by_one(packed_rows()), 3)
    calls.clear()
    loss, gradients = engine_step(config, [packed_rows()])
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)
    assert set(calls) == {1} and not dense  # with 36 tokens, a call may have only one document
    calls.clear()
    rows = ((100, 56, 100), (20, 230, 6))
    config = tiny_config(family, max_position_embeddings=256)
    expected = train_step(build_model(config), one_by_one(packed_rows(rows)), 3)
    calls.clear()
    loss, gradients = engine_step(config, [packed_rows(rows)])
    assert set(calls) == {4, 2}
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert_near(expected.gradients, gradients)


def test_documents_are_cut_into_calls_that_take_bounded_workspace() -> None:
    found = Documents(2, 512, (5,) * 100 + (12,) + (512,), None, torch.device("cpu")).groups
    assert [len(starts) - 1 for _, _, starts in found] == [8] * 12 + [6]
    assert sum(tokens.stop - tokens.start for tokens, _, _ in found) == 1024
    assert found[-1][1] == 512


@pytest.mark.parametrize("is_there", [False, True])
def test_a_plan_for_a_gpu_counts_the_kernel(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 64k packed tokens needs as much memory as one document of 64k tokens, and no 64k x 64k mask.

    The layer is as large as in a 7B model. A GPU in the planning machine changes what torch's queries return.
    """
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 132)
    config = tiny_config(
        "qwen2", tied=False, hidden_size=3584, intermediate_size=18944, num_hidden_layers=1, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=1024, max_position_embeddings=65536, use_sliding_window=False,
    )  # fmt: skip
    length, peaks = 65536, {}
    with fake_cuda():
        if is_there and not torch.cuda.is_available():
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
            monkeypatch.setattr(torch.version, "cuda", "13.0")
        for padded in (False, True):
            graph = build_graph(config, dtype=torch.bfloat16)
            trace = trace_visits(graph, 1, length, torch.bfloat16, device="cuda", padded=padded)
            assert trace.exact and not trace.dense_masks and not trace.uncounted_ops
            peaks[padded] = max(visit.memory.backward_nbytes for visit in trace.visits)
            assert length < max(visit.memory.retained_nbytes for visit in trace.visits) < length * length / 10
    assert peaks[True] == pytest.approx(peaks[False], rel=0.05)
