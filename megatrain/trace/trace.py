"""Trace of one forward and backward: the visited units, and the memory and work of each visit.

The engine itself runs, but on fake tensors, which have shapes and dtypes but no memory. The tracer acts as the engine's
`BlockAccess` and reads the counters at every tick. If a model reads values (for example, to loop over the experts with
tokens), the trace guesses them and reports that byte counts are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.work import Work
from megatrain.engine.forward import PassOrder, move_buffers
from megatrain.engine.generate import GenerationRunner
from megatrain.engine.head.objective import Objective
from megatrain.engine.program.visit_trace import VisitMemory, VisitTrace
from megatrain.engine.unit.arguments import tree_map
from megatrain.models.skeleton import is_multimodal, single_document_rows
from megatrain.trace.kernel_work import count_kernel_launches
from megatrain.trace.tracer import Tracer

if TYPE_CHECKING:
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel

    from megatrain.models.graph import ModelGraph

_NUM_TRACED_PIECES = 2  # pieces of the head: the first starts the gradient, the second adds to it
_IMAGES_UNCOUNTED = "images: their number per step is unknown before the run"
_LOSS_NBYTES = 4  # bytes of the loss per piece, kept until the step ends


def trace_visits(
    graph: ModelGraph,
    batch_size: int,
    seq_len: int,
    compute_dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    head_rows: int | None = None,
    head_columns: int | None = None,
    objective: Objective | None = None,
    padded: bool = True,
    is_compiled: bool = False,
    example: Mapping[str, Tensor] | None = None,
    top_k: int | None = None,
) -> VisitTrace:
    """Trace a micro-batch of `batch_size` x `seq_len` tokens, each with a label.

    Args:
        device: Compute device, which determines kernels and workspaces. The trace allocates no memory on it.
        padded: Whether rows can have padding or several documents. If False, each row is one document.
        is_compiled: Whether layers are compiled. If not, a row with several documents can count like a single document.
        example: Micro-batch of this size with images, on the host. Model code reads the numbers and sizes of images
            from it. None for text only.
        top_k: Number of likeliest tokens to score in a trace without a backward. None to trace forward and backward.

    Raises:
        UnsupportedModelError: If the model cannot be streamed.
    """
    device = _add_device_index(torch.device(device))
    num_tokens, objective = batch_size * seq_len, objective or Objective()
    with _fake_buffers(graph.model, device) as fake_mode:
        order = PassOrder(head_rows=head_rows, head_columns=head_columns)
        tracer = Tracer(graph, compute_dtype, device, order=order, objective=objective, is_compiled=is_compiled)
        with fake_mode, tracer.counts:
            with tracer.counts.pause():
                ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
                batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
            # Count pixels (outside of the pause), because they are live during the whole step.
            for name, value in (example or {}).items():
                batch[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
                tracer.counts.set_values(batch[name], value)
            with tracer.counts.pause():
                # Trace only a few pieces of the head. All pieces have the same cost, so the rest is added below.
                num_rows = min(num_tokens, _NUM_TRACED_PIECES * tracer.runner.head.rows) or num_tokens
                rows = torch.zeros(num_rows, dtype=torch.long, device=device)
                loss = objective.loss.for_micro_batch({}, objective.loss.synthetic_inputs(num_rows, device), None)
            with _count_run(tracer, graph.model, "text" if example is None else "images", padded=padded):
                if top_k is None:
                    tracer.runner.run_pass({0: batch}, {0: (rows, rows)}, {0: loss}, num_tokens, 0)
                else:
                    list(tracer.runner.score_pass({0: batch}, {0: (rows, rows)}, top_k, 1.0))
    trace = tracer.trace()
    if top_k is not None:
        trace = replace(trace, logits_flops=0)  # without a backward, logits are computed once
    trace = _scale_head(trace, num_rows, num_tokens, objective.loss.row_nbytes)
    return trace if example is None else replace(trace, uncounted_ops=(*trace.uncounted_ops, _IMAGES_UNCOUNTED))


def trace_generation(
    graph: ModelGraph,
    batch_size: int,
    seq_len: int,
    *,
    device: torch.device | str = "cpu",
) -> tuple[VisitTrace, dict[int, int]]:
    """Trace a forward that fills the model's cache with `batch_size` x `seq_len` tokens.

    Args:
        batch_size: Number of prompts in a micro-batch.
        seq_len: Total number of tokens in a prompt and its completion.

    Returns:
        A trace without a head phase, and the size of each visit's cache in bytes, by visit.

    Raises:
        UnsupportedModelError: If the model cannot generate text, or cannot generate it with streamed weights.
    """
    from transformers import DynamicCache

    device = _add_device_index(torch.device(device))
    if not graph.model.can_generate():
        raise UnsupportedModelError(type(graph.model).__name__, "it has no head that generates text")
    with _fake_buffers(graph.model, device) as fake_mode:
        tracer = Tracer(graph, graph.dtype, device)
        runner = GenerationRunner(graph, tracer, device=device, bounds=tracer.runner.bounds)
        cache = DynamicCache(config=graph.config.get_text_config(decoder=True))
        with fake_mode, tracer.counts:
            with tracer.counts.pause():
                ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

            def forward() -> Any:
                return graph.model(**batch, past_key_values=cache, use_cache=True, logits_to_keep=1)

            with _count_run(tracer, graph.model, "text"):
                try:
                    runner.run([forward], [cache], [0])
                except TypeError as error:
                    name = type(graph.model).__name__
                    raise UnsupportedModelError(name, f"its forward does not run with a cache ({error})") from error
    visits, counts = tuple(tracer.trunk_visits()), tracer.counts
    trace = VisitTrace(visits, 0, 0, counts.guesses, tuple(counts.uncounted_ops), num_tokens=batch_size * seq_len)
    return trace, runner.kept_nbytes


def _add_device_index(device: torch.device) -> torch.device:
    """Return the device with an index. Otherwise, operators on fake tensors would query the driver for the index."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@contextmanager
def _fake_buffers(model: nn.Module, device: torch.device) -> Iterator[FakeTensorMode]:
    """Replace a model's buffers by fake tensors on the compute device within the context. Yield the fake mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    originals = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        with fake_mode:
            move_buffers(model, device)
        yield fake_mode
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)


@contextmanager
def _count_run(
    tracer: Tracer, model: PreTrainedModel, inputs: Literal["text", "images"], *, padded: bool = True
) -> Iterator[None]:
    """Count the work of kernels and explain the model's errors within the context. Close the tracer on exit."""
    with (
        _support_scalar_lists(),
        count_kernel_launches(tracer.counts.add_launch),
        nullcontext() if padded else single_document_rows(),
        _explain_failures(model, inputs),
    ):
        yield
    tracer.close()


@contextmanager
def _support_scalar_lists() -> Iterator[None]:
    """Support ``torch.tensor([scalars])`` for fake scalars. torch reads the scalars' values without a dispatch.

    A ``TorchFunctionMode`` would not work: torch disables modes while a torch function runs, and a forward may be
    suspended inside one.
    """
    original = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, list | tuple):
            data = tree_map(data, lambda item: item.item() if isinstance(item, Tensor) else item)
        return original(data, *args, **kwargs)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = original


@contextmanager
def _explain_failures(model: PreTrainedModel, inputs: Literal["text", "images"]) -> Iterator[None]:
    """Convert errors of a multimodal model to an ``UnsupportedModelError`` with a remedy."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # each model family raises different errors
        if not is_multimodal(model):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"only text can be trained, but its forward does not run on text alone ({reason}). Use a text model"
        if inputs == "images":
            problem = (
                f"its forward cannot be planned with the output of the folder's image processor ({reason}). Compare "
                'the processor\'s files with the published model, or write model.images = "off"'
            )
        raise UnsupportedModelError(type(model).__name__, problem) from error


def _scale_head(trace: VisitTrace, num_rows: int, num_tokens: int, row_nbytes: int) -> VisitTrace:
    """Scale the head of a trace from ``num_rows`` traced rows to ``num_tokens`` rows.

    The recompute of logits in the second pass is not counted. The last part of the vocabulary needs no recompute.
    """
    recompute_flops = trace.logits_flops * num_tokens * (trace.head_parts - 1) // trace.head_parts
    num_added = -(-(num_tokens - num_rows) // (trace.head_rows or num_tokens))
    nbytes = _LOSS_NBYTES * num_added + row_nbytes * num_tokens
    head = trace.head
    num_traced = -(-num_rows // (trace.head_rows or num_tokens))
    head = Work(
        product_flops=head.product_flops * num_tokens // num_rows - recompute_flops,
        attention_flops=head.attention_flops * num_tokens // num_rows,
        skipped_flops=head.skipped_flops * num_tokens // num_rows,
        moved_nbytes=head.moved_nbytes * num_tokens // num_rows,
        launches=head.launches * (num_traced + num_added) // num_traced,
    )

    def add_rows(memory: VisitMemory) -> VisitMemory:
        peaks = {"forward_nbytes": memory.forward_nbytes + nbytes, "backward_nbytes": memory.backward_nbytes + nbytes}
        return replace(memory, **peaks)

    visits = tuple(replace(visit, memory=add_rows(visit.memory)) if visit.is_head else visit for visit in trace.visits)
    return replace(
        trace,
        visits=visits,
        num_tokens=num_tokens,
        head_nbytes=trace.head_nbytes + nbytes,
        head=head,
        logits_flops=trace.logits_flops * num_tokens,
    )
