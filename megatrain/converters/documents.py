"""Attention within the documents of a row, without an [S, S] mask.

transformers describes a mask as functions of two positions and, for sdpa, converts it to a [rows, 1, S, S] tensor. This
converter attaches a pattern to these functions: causal, a window, or boundaries between documents. If a mask consists
of such patterns, it becomes a `DocumentMask`, which holds only the lengths of the documents. sdpa attention then runs
on each document (`_attend_documents`), or as one kernel for all documents if the device supports it
(`_attend_varlen`). Any other use of the mask first creates the dense tensor. Models with custom attention therefore
stay correct, but save no memory.

No rule depends on the model class. See docs/decisions/0026-attention-by-documents.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megatrain.engine.device.attention import FLASH_ROWS
from megatrain.engine.device.device_kernels import is_gpu_stand_in
from megatrain.engine.unit.absent_weights import METADATA_QUERIES
from megatrain.models.converter import ModelConverter

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["AttentionByDocuments", "DocumentMask", "Documents", "attention_by_documents"]

#: Minimum tokens per piece of a document longer than the attention window. Smaller pieces would need more masks.
_MIN_WINDOW_TOKENS = 512
#: Limits of ``_attend_varlen``: dtypes, maximum and multiple of the head dimension, minimum compute capability.
_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM, _HEAD_MULTIPLE, _MIN_CAPABILITY = 256, 8, 8


class AttentionByDocuments(ModelConverter):
    """Converter that makes passes compute attention per document if the model's mask allows this."""

    def pass_context(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        """Return the context of a pass. Compiled layers need [S, S] masks, which the context only reports."""
        return attention_by_documents(on_dense_mask, enabled=not is_compiled)


@dataclass(frozen=True)
class Documents:
    """Documents of a micro-batch, and the attention window. Tokens attend only to tokens in the same document.

    Attributes:
        num_rows: Number of rows in the micro-batch.
        row_tokens: Number of tokens per row, including padding.
        lengths: Number of tokens in each document, in row order. No document crosses the end of a row.
        window: Number of tokens to which each token attends, including itself; None for all earlier tokens.
        device: Device of the model's tensors.
    """

    num_rows: int
    row_tokens: int
    lengths: tuple[int, ...]
    window: int | None
    device: torch.device

    @cached_property
    def groups(self) -> tuple[tuple[slice, int, Tensor], ...]:
        """Token slice, maximum length and starts of each group of documents. The kernel is called once per group.

        The starts are an int32 tensor, which is copied to the device without a host sync.
        """
        tokens = self.num_rows * self.row_tokens
        # Limit the documents per call, because the backward needs workspace for at least FLASH_ROWS rows per document.
        group_size = max(1, tokens // FLASH_ROWS)
        groups: list[tuple[slice, int, Tensor]] = []
        start = 0
        for index in range(0, len(self.lengths), group_size):
            lengths = self.lengths[index : index + group_size]
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            if self.device.type == "cuda" and not isinstance(starts, FakeTensor):  # fake tensors cannot be pinned
                starts = starts.pin_memory()
            groups.append(
                (slice(start, start + sum(lengths)), max(lengths), starts.to(self.device, non_blocking=True)),
            )
            start += sum(lengths)
        return tuple(groups)


class DocumentMask(Tensor):
    """Mask [rows, 1, S, S] that is not materialized and has only shape, dtype, device and documents.

    An operation on the mask materializes the dense tensor.
    """

    documents: Documents
    _make_dense: Callable[[], Tensor]
    _on_dense: Callable[[str], None]

    @classmethod
    def from_documents(
        cls, documents: Documents, make_dense: Callable[[], Tensor], on_dense: Callable[[str], None]
    ) -> DocumentMask:
        """Return a mask that separates these documents.

        Args:
            on_dense: Function called with the reason before a dense mask is created.
        """
        shape = (documents.num_rows, 1, documents.row_tokens, documents.row_tokens)
        mask: DocumentMask = Tensor._make_wrapper_subclass(
            cls, shape, strides=(0, 0, 0, 0), dtype=torch.bool, device=documents.device
        )
        mask.documents, mask._make_dense, mask._on_dense = documents, make_dense, on_dense
        return mask

    def materialize(self, operation: str) -> Tensor:
        """Report that `operation` needs a dense mask, and return a new one."""
        self._on_dense(operation)
        return self._make_dense()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"DocumentMask({tuple(self.shape)}, {len(self.documents.lengths)} documents)"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _METADATA_QUERIES:
                return func(*args, **(kwargs or {}))
            return func(*_materialize(args, name), **_materialize(kwargs or {}, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_materialize(args, str(func)), **_materialize(kwargs or {}, str(func)))


_METADATA_QUERIES = METADATA_QUERIES | {"__get__", "__repr__", "untyped_storage"}


def _materialize(value: Any, operation: str) -> Any:
    """Return an operation's arguments with dense masks in place of `DocumentMask` objects."""
    if isinstance(value, DocumentMask):
        return value.materialize(operation)
    if isinstance(value, tuple | list):
        return type(value)([_materialize(item, operation) for item in value])
    if isinstance(value, dict):
        return {key: _materialize(item, operation) for key, item in value.items()}
    return value


# -- patterns of masks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Attention pattern of a mask function from transformers. A function without one has an unknown pattern.

    Attributes:
        is_causal: Whether no token attends to later tokens.
        window: Number of tokens to which each token attends, including itself.
        boundaries: Index of each token's document in its row, [rows, S].
    """

    is_causal: bool = False
    window: int | None = None
    boundaries: Tensor | None = None


def _get_pattern(function: Any) -> _Pattern | None:
    from transformers import masking_utils

    if function is vars(masking_utils).get("causal_mask_function"):
        return _Pattern(is_causal=True)
    pattern: _Pattern | None = getattr(function, "pattern", None)
    return pattern


def _attach_pattern(function: Any, pattern: _Pattern | None) -> Any:
    if pattern is not None:
        function.pattern = pattern
    return function


def _intersect_patterns(functions: tuple[Any, ...]) -> _Pattern | None:
    """Return the pattern of an intersection of mask functions, or None if it is unknown."""
    patterns = [_get_pattern(function) for function in functions]
    known = [pattern for pattern in patterns if pattern is not None]
    if len(known) < len(patterns):
        return None
    windows = [pattern.window for pattern in known if pattern.window is not None]
    boundaries = [pattern.boundaries for pattern in known if pattern.boundaries is not None]
    if len(boundaries) > 1:
        return None
    return _Pattern(any(p.is_causal for p in known), min(windows, default=None), boundaries[0] if boundaries else None)


#: Functions of transformers that compose masks. `_OPTIONAL_COMPOSER` exists only in newer releases.
_COMPOSERS = ("and_masks", "sliding_window_overlay", "packed_sequence_mask_function")
_OPTIONAL_COMPOSER = "remap_positions_for_packed_sequence"


def _mask_functions() -> dict[str, Callable[..., Any]]:
    """Return replacements, by name, for transformers' functions that compose masks. The composed masks have patterns.

    It makes no difference whether a window counts positions in the row or in the document, because tokens attend only
    to their own document. If transformers lacks one of these functions, nothing is replaced, and patterns are unknown.
    """
    from transformers import masking_utils

    namespace: Any = vars(masking_utils)
    if not namespace.keys() >= {*_COMPOSERS, "causal_mask_function"}:
        return {}
    original_and_masks, original_overlay, original_packed = (namespace[name] for name in _COMPOSERS)
    original_remap = namespace.get(_OPTIONAL_COMPOSER)

    def and_masks(*functions: Any) -> Any:
        return _attach_pattern(original_and_masks(*functions), _intersect_patterns(functions))

    def overlay(window: int) -> Any:
        return _attach_pattern(original_overlay(window), _Pattern(window=window))

    def pack(boundaries: Tensor) -> Any:
        return _attach_pattern(original_packed(boundaries), _Pattern(boundaries=boundaries))

    def remap(function: Any, positions: Tensor) -> Any:
        return _attach_pattern(original_remap(function, positions), _get_pattern(function))

    replacements: dict[str, Callable[..., Any]] = dict(zip(_COMPOSERS, (and_masks, overlay, pack), strict=True))
    return replacements if original_remap is None else {**replacements, _OPTIONAL_COMPOSER: remap}


@contextmanager
def attention_by_documents(
    on_dense: Callable[[str], None] = lambda reason: None, *, enabled: bool = True
) -> Iterator[None]:
    """Make models with sdpa attention compute attention per document in the context. Not thread-safe.

    Args:
        on_dense: Function called with the reason whenever a dense mask is created.
        enabled: Whether to compute attention per document. If False, dense masks are only reported.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks, attentions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    namespace = vars(masking_utils)
    replacements = _mask_functions() if enabled else {}
    originals = {name: namespace[name] for name in replacements}
    make_mask, attend = masks["sdpa"], attentions["sdpa"]
    sdpa_mask = (
        _wrap_mask_function(make_mask, on_dense) if enabled else _add_report(make_mask, "compiled layers", on_dense)
    )
    interfaces: list[tuple[Any, str, Callable[..., Any]]] = [
        (masks, "eager", _add_report(masks["eager"], "eager attention", on_dense)),
        (masks, "sdpa", sdpa_mask),
        (attentions, "sdpa", _wrap_attention(attend) if enabled else attend),
    ]
    local_functions = [(interface, name, interface._local_mapping.get(name)) for interface, name, _ in interfaces]
    try:
        namespace.update(replacements)
        for interface, name, replacement in interfaces:
            interface[name] = replacement
        yield
    finally:
        namespace.update(originals)
        for interface, name, function in local_functions:
            if function is None:
                del interface[name]
            else:
                interface[name] = function


def _add_report(make: Callable[..., Any], reason: str, on_dense: Callable[[str], None]) -> Callable[..., Any]:
    def run_with_report(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        if mask is not None:
            on_dense(reason)
        return mask

    return run_with_report


def _wrap_mask_function(make_mask: Callable[..., Any], on_dense: Callable[[str], None]) -> Callable[..., Any]:
    """Wrap transformers' sdpa mask function so that it returns a `DocumentMask` if the mask's pattern is known."""
    signature = inspect.signature(make_mask)
    make_with_report = _add_report(make_mask, "a mask of an unknown kind", on_dense)

    def make(*args: Any, **kwargs: Any) -> Tensor | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        documents = _find_documents(bound.arguments)
        if documents is not None:
            return DocumentMask.from_documents(documents, lambda: cast("Tensor", make_mask(*args, **kwargs)), on_dense)
        mask: Tensor | None = make_with_report(*args, **kwargs)
        return mask

    return make


#: Arguments of transformers' mask function that `_find_documents` needs.
_REQUIRED_ARGUMENTS = {"mask_function", "use_vmap", "batch_size", "q_length", "kv_length", "q_offset", "kv_offset"}
_REQUIRED_ARGUMENTS |= {"attention_mask", "device"}


def _find_documents(args: Mapping[str, Any]) -> Documents | None:
    """Return the documents that a mask separates, or None if its pattern is not supported or no mask is needed."""
    from transformers import masking_utils

    if not args.keys() >= _REQUIRED_ARGUMENTS:
        return None
    pattern = _get_pattern(args["mask_function"])
    if pattern is None or not pattern.is_causal or args["use_vmap"]:
        return None
    num_rows, length, padding = args["batch_size"], args["q_length"], args["attention_mask"]
    if length != args["kv_length"] or length < 2 or _is_shifted(args["q_offset"]) or _is_shifted(args["kv_offset"]):
        return None
    window = pattern.window if pattern.window is not None and pattern.window < length else None
    if padding is not None and pattern.boundaries is not None:
        return None
    document_marks = padding if pattern.boundaries is None else pattern.boundaries
    lengths, is_split = (length,) * num_rows, False
    # In a trace, assume documents as long as their rows, because these need the most memory.
    if isinstance(document_marks, FakeTensor):
        is_split = bool(masking_utils.is_tracing(document_marks))
    elif document_marks is not None:
        if document_marks.shape != (num_rows, length):
            return None
        values = np.asarray(document_marks.tolist())  # uses the tensor's copy on the host if it has one
        if padding is not None and not _ends_in_padding(values):
            return None
        lengths = tuple(length for row in values for length in _run_lengths(row))
        is_split = len(lengths) > num_rows
    if window is None and not is_split:
        return None  # sdpa needs no mask for whole rows
    return Documents(num_rows, length, lengths, window, torch.device(args["device"]))


def _is_shifted(offset: Any) -> bool:
    return not isinstance(offset, int) or offset != 0


def _ends_in_padding(rows: npt.NDArray[Any]) -> bool:
    """Return whether all padding comes after the text, so that no text token attends to padding."""
    is_text = rows.astype(np.int8)
    return bool(is_text[:, 0].all() and (np.diff(is_text) <= 0).all())


def _run_lengths(row: npt.NDArray[Any]) -> list[int]:
    """Return the lengths of runs of equal values."""
    ends = [*(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)]
    return [end - start for start, end in pairwise([0, *ends])]


# -- attention -------------------------------------------------------------------------------------------------------


def _wrap_attention(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' sdpa attention so that it runs on each document if the mask is a `DocumentMask`."""
    known_names = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
    option_names = inspect.signature(sdpa).parameters.keys() - known_names | {"softcap"}

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        has_option = any(kwargs.get(name) is not None for name in option_names)  # for example a bias or a soft cap
        # With dropout, run whole rows, because calls per document would draw different random numbers.
        if (
            has_option
            or dropout
            or not isinstance(attention_mask, DocumentMask)
            or not _fits(attention_mask.documents, query, key)
        ):
            result: tuple[Tensor, None] = sdpa(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
            return result
        documents = attention_mask.documents
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [tokens, heads, width]
        if _has_varlen(query, key, value):
            out = _attend_varlen(q, k, v, documents, scaling)
        else:

            def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                output: Tensor = sdpa(module, q, k, v, mask, scaling=scaling, is_causal=True)[0]
                return output

            out = _attend_documents(q, k, v, documents, attend)
        return out.view(documents.num_rows, documents.row_tokens, *out.shape[1:]), None

    return attention


def _fits(documents: Documents, query: Tensor, key: Tensor) -> bool:
    shapes = {(tensor.shape[0], tensor.shape[2]) for tensor in (query, key)}
    return shapes == {(documents.num_rows, documents.row_tokens)}


def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, attend: Callable[..., Tensor]
) -> Tensor:
    """Run attention on each document separately, as transformers does without packing.

    Use `split` and `cat`, because the gradient of a slice would be as large as the sliced tensor.

    Args:
        query: Queries [tokens, heads, width]. `key` and `value` have the same layout.
        attend: transformers' attention for tensors [1, heads, tokens, width].
    """
    lengths = list(documents.lengths)
    outputs: list[Tensor] = []
    for parts in zip(*(torch.split(tensor, lengths) for tensor in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        window = documents.window
        if window is None or q.shape[2] <= window:
            outputs.append(attend(q, k, v, None)[0])
        else:
            outputs += _attend_windows(q, k, v, window, attend)
    return torch.cat(outputs)


def _attend_windows(q: Tensor, k: Tensor, v: Tensor, window: int, attend: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Run windowed attention in pieces. Each piece includes the keys of the `window - 1` tokens before it."""
    rows = max(window, _MIN_WINDOW_TOKENS)
    past = k[:, :, :0], v[:, :, :0]
    for queries, keys, values in zip(*(torch.split(tensor, rows, dim=2) for tensor in (q, k, v)), strict=True):
        num_past, num_queries = past[0].shape[2], queries.shape[2]
        distance = torch.arange(num_past, num_past + num_queries, device=q.device)[:, None]
        distance = distance - torch.arange(num_past + num_queries, device=q.device)
        mask = (distance >= 0) & (distance < window)
        inputs = [torch.cat([past_part, part], dim=2) for past_part, part in zip(past, (keys, values), strict=True)]
        yield attend(queries, *inputs, mask[None, None])[0]
        start = keys.shape[2] - window + 1
        past = keys[:, :, start:], values[:, :, start:]


# -- one kernel for all documents ------------------------------------------------------------------------------------


def _has_varlen(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's variable-length flash attention supports these tensors."""
    width = query.shape[-1]
    return (
        (query.device.type == "cuda" or is_gpu_stand_in(query))
        and query.dtype in _VARLEN_DTYPES
        and width == key.shape[-1] == value.shape[-1] <= _MAX_HEAD_DIM
        and width % _HEAD_MULTIPLE == 0
        and query.shape[1] % key.shape[1] == 0
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and _has_flash(query)
    )


def _has_flash(query: Tensor) -> bool:
    if is_gpu_stand_in(query) or (isinstance(query, FakeTensor) and not torch.cuda.is_available()):
        return True  # plans without a GPU assume flash attention
    is_nvidia = torch.version.hip is None and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(query.device)[0] >= _MIN_CAPABILITY


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None) -> Tensor:
    """Run attention on all documents, [tokens, heads, width]. Deterministic if torch's deterministic mode is on."""
    out: Tensor = _Varlen.apply(query, key, value, documents, scale)  # type: ignore[no-untyped-call]
    return out


class _Varlen(torch.autograd.Function):
    """torch's flash attention over concatenated sequences. torch's own wrapper (2.10) does not support windows."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None
    ) -> Tensor:
        window = documents.window
        ctx.documents, ctx.is_causal = documents, window is None
        ctx.options = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,  # the kernel does not count the token itself
            "window_size_right": 0,
        }
        outputs: list[Tensor] = []
        saved_tensors: list[Tensor] = []
        for tokens, max_length, starts in documents.groups:
            q, k, v = query[tokens], key[tokens], value[tokens]
            out, logsumexp, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
                q, k, v, starts, starts, max_length, max_length, 0.0, ctx.is_causal, False, **ctx.options
            )
            outputs.append(out)
            saved_tensors += [logsumexp, rng_state, unused]
        output = _join_tensors(outputs)
        ctx.save_for_backward(query, key, value, output, *saved_tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *saved_tensors = ctx.saved_tensors
        grad_out, group_grads = grad_out.contiguous(), list[tuple[Tensor, ...]]()
        for index, (tokens, max_length, starts) in enumerate(ctx.documents.groups):
            logsumexp, rng_state, unused = saved_tensors[3 * index : 3 * index + 3]
            q, k, v = query[tokens], key[tokens], value[tokens]
            group_grads.append(
                torch.ops.aten._flash_attention_backward(
                    grad_out[tokens], q, k, v, out[tokens], logsumexp, starts, starts, max_length, max_length, 0.0,
                    ctx.is_causal, rng_state, unused, **ctx.options,
                )
            )  # fmt: skip
        return (*(_join_tensors(gradients) for gradients in zip(*group_grads, strict=True)), None, None)


def _join_tensors(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
