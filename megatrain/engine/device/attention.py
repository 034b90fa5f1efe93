"""FLOPs and workspace of torch's fused attention kernels, computed from the shapes of a call.

Up to release 2.11, torch's own FLOP formulas raise an error if keys have fewer heads than queries. torch has no
formulas for workspace. Kernels allocate workspace internally, so it is not visible with fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.flash import FlashKernels
from megatrain.engine.device.work import Work
from tiered.units import round_up

Backend = Literal["flash", "efficient", "cudnn", "other"]

#: Backend of each operator (name without "_backward"), and the axis of the heads in queries, keys and values.
_OPERATORS: Mapping[str, tuple[Backend, int]] = {
    "_scaled_dot_product_flash_attention": ("flash", 1),  # [B, H, S, D]
    "_scaled_dot_product_efficient_attention": ("efficient", 1),
    "_scaled_dot_product_cudnn_attention": ("cudnn", 1),
    "_scaled_dot_product_flash_attention_for_cpu": ("other", 1),
    "_scaled_dot_product_fused_attention_overrideable": ("other", 1),
    "_flash_attention": ("flash", -2),  # [B, S, H, D], or [S, H, D] for concatenated rows
    "_efficient_attention": ("efficient", -2),
    "_cudnn_attention": ("cudnn", 1),
}

#: Flash attention pads rows to multiples of 128, and head widths to multiples of 32, or to 256 if they exceed 192.
FLASH_ROWS = 128
_FLASH_WIDTH, _FLASH_ROUNDED_WIDTH, _FLASH_MAX_WIDTH = 32, 192, 256
#: For FA3 and FA4: head widths with deterministic kernels in both packages, minimum number of rows per block, and
#: maximum number of ranges into which the keys are split.
_PACKAGE_WIDTHS, _PACKAGE_BLOCK, _PACKAGE_SPLITS = (64, 96, 128), 64, 128
#: Largest and smallest block of the memory-efficient kernels, in rows and columns. If heads are wider than the largest
#: block, gradients of keys and values need workspace. For narrower heads, registers hold these gradients.
_EFFICIENT_BLOCK, _MIN_EFFICIENT_BLOCK = 128, 64
#: Maximum number of thread blocks that share the keys in nondeterministic kernels.
_EFFICIENT_SPLITS = 200
_FLOAT_NBYTES = 4
#: Number of multiprocessors of an H100 or H200, for plans that are made without a GPU.
_NUM_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a fused attention operator.

    Attributes:
        num_queries: Total number of query tokens.
        num_keys: Total number of key tokens.
        longest_keys: Number of key tokens in the longest sequence.
        width: Head width of queries and keys.
        value_width: Head width of values.
        itemsize: Bytes per element of the queries.
        is_ragged: Whether sequences of different lengths are concatenated.
        num_copied_bytes: Bytes of inputs that the kernel first copies to a different memory layout.
        is_causal: Whether the kernel skips keys that come after the query.
        has_dropout: Whether the kernel applies dropout to the scores.
    """

    backend: Backend
    is_backward: bool
    num_rows: int
    num_heads: int
    num_key_heads: int
    num_queries: int
    num_keys: int
    longest_keys: int
    width: int
    value_width: int
    itemsize: int
    is_ragged: bool = False
    num_copied_bytes: int = 0
    is_causal: bool = False
    has_dropout: bool = False

    @classmethod
    def from_operator(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall | None:
        """Return a description of an operator call, or None if the operator is not fused attention."""
        name = getattr(getattr(func, "_overloadpacket", None), "__name__", "")
        base = name.removesuffix("_backward").removesuffix("_forward")
        if base not in _OPERATORS:
            return None
        backend, heads_axis = _OPERATORS[base]
        params = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        params |= kwargs
        query, key, value = params["query"], params["key"], params["value"]
        starts = next((item for name in ("cum_seq_q", "cu_seqlens_q") if (item := params.get(name)) is not None), None)
        longest = next((item for name in ("max_k", "max_seqlen_k") if (item := params.get(name)) is not None), None)
        num_heads, num_key_heads = query.shape[heads_axis], key.shape[heads_axis]
        is_ragged = starts is not None and heads_axis < 0
        num_rows = starts.numel() - 1 if starts is not None and is_ragged else query.shape[0]
        num_keys = key.numel() // (num_key_heads * key.shape[-1])
        is_backward = name.endswith("_backward")
        inputs = [params.get(name) for name in ("grad_out", "grad_out_", "out")] if is_backward else []
        return cls(
            backend=backend,
            is_backward=is_backward,
            num_rows=num_rows,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            num_queries=query.numel() // (num_heads * query.shape[-1]),
            num_keys=num_keys,
            longest_keys=int(longest) if is_ragged and longest is not None else num_keys // num_rows,
            width=query.shape[-1],
            value_width=value.shape[-1],
            itemsize=query.element_size(),
            is_ragged=is_ragged,
            num_copied_bytes=sum(_copied_bytes(tensor, heads_axis) for tensor in inputs if tensor is not None),
            is_causal=bool(params.get("is_causal", params.get("custom_mask_type"))),
            has_dropout=bool(params.get("dropout_p", 0.0)),
        )

    @property
    def num_flops(self) -> int:
        """FLOPs for all pairs of tokens. A causal mask does not reduce the FLOPs, as in published kernel benchmarks.

        The forward has two matmuls: the scores, and the scores times the values. The backward has five: the scores
        again, and the gradients of scores, values, queries and keys. Ragged sequences all count the longest one's keys.
        """
        num_pairs = self.num_heads * self.num_queries * self.longest_keys
        if self.is_backward:
            return 2 * num_pairs * (3 * self.width + 2 * self.value_width)
        return 2 * num_pairs * (self.width + self.value_width)

    @property
    def work(self) -> Work:
        """Work of the call. A causal kernel skips half of all pairs."""
        flops = self.num_flops
        return Work(attention_flops=flops, skipped_flops=flops // 2 if self.is_causal else 0, launches=1)

    def workspace_nbytes(self, device: torch.device, *, is_deterministic: bool, flash: FlashKernels = "FA2") -> int:
        """Return the size of the workspace that the kernel allocates on a CUDA device; 0 on other devices.

        Except with FA3, a forward's own workspace counts as 0: it is negligible if rows are long enough to occupy the
        GPU. Many short sequences need several calls, each for at most half of the results, and memory to join them.

        Args:
            is_deterministic: Whether the kernel must add numbers in the same order in every run.

        Raises:
            UnsupportedModelError: If the FA3 or FA4 kernels do not support the call.
        """
        if device.type != "cuda":
            return 0
        if self.backend == "flash" and flash != "FA2":
            return self._package_nbytes(flash, is_deterministic)
        if not self.is_backward:
            return self._results_nbytes // 2 if self.is_ragged else 0
        if self.backend == "efficient":
            return self.num_copied_bytes + self._efficient_nbytes(is_deterministic)
        if self.backend == "flash":
            return self.num_copied_bytes + self._flash_nbytes(_num_multiprocessors(device) if is_deterministic else 0)
        # cuDNN does not document its workspace, but its backward needs the same buffers as flash attention.
        return self._flash_nbytes(0) if self.backend == "cudnn" else 0

    def _package_nbytes(self, flash: FlashKernels, is_deterministic: bool) -> int:
        """Return an upper bound for the workspace of FA3 or FA4, whose block sizes depend on architecture and mask.

        The backward needs fp32 query gradients, two sums per row, and counters that order the additions. If several
        query heads share a key head, it also needs fp32 gradients of keys and values. The forward of FA3 splits the
        keys if there are too few query blocks to occupy the GPU and the kernel need not be deterministic. Partial
        results then need memory.
        """
        if self.width not in _PACKAGE_WIDTHS or self.value_width != self.width or self.has_dropout:
            raise UnsupportedModelError(
                f'model.flash_attention = "{flash}"',
                f"its kernels support head widths {', '.join(map(str, _PACKAGE_WIDTHS))} without dropout, but "
                f"the model has head widths {self.width} and {self.value_width}"
                f'{" with dropout" if self.has_dropout else ""}. Write flash_attention = "FA2"',
            )
        copied_bytes = self._results_nbytes // 2 if self.is_ragged else 0
        num_padded = self.num_rows + 1 if self.is_ragged else self.num_rows
        num_queries = self.num_queries + num_padded * FLASH_ROWS
        if not self.is_backward:
            num_blocks = self.num_rows * self.num_heads * -(-self.num_queries // (self.num_rows * FLASH_ROWS))
            if flash != "FA3" or is_deterministic or num_blocks >= _NUM_MULTIPROCESSORS:
                return copied_bytes
            num_splits = min(_PACKAGE_SPLITS, -(-self.longest_keys // _PACKAGE_BLOCK))
            return copied_bytes + num_splits * num_queries * self.num_heads * (self.value_width + 1) * _FLOAT_NBYTES
        num_values = num_queries * self.num_heads * (self.width + 2)
        length = self.longest_keys  # torch does not pass the longest length to FA4, which assumes the total length
        if self.is_ragged and flash == "FA4":
            length = max(self.num_queries, self.num_keys)
        counters = self.num_rows * (length // _PACKAGE_BLOCK + 4)
        num_values += counters * self.num_heads
        if self.num_key_heads != self.num_heads:
            num_keys = self.num_keys + num_padded * 2 * FLASH_ROWS
            num_values += self.num_key_heads * (num_keys * (self.width + self.value_width) + 2 * counters)
        return self.num_copied_bytes + copied_bytes + num_values * _FLOAT_NBYTES

    def _flash_nbytes(self, num_multiprocessors: int) -> int:
        """Return the workspace of FA2: fp32 query gradients, row sums, and expanded gradients of keys and values.

        For ragged sequences, the result is the larger of two cases: the given lengths, and the shortest lengths that
        the engine combines into one call (`Documents.groups`).

        Args:
            num_multiprocessors: Number of multiprocessors that share the keys; 0 if the kernel is nondeterministic.
        """
        num_splits = max(1, -(-num_multiprocessors // (self.num_rows * self.num_heads)))
        rows = self.num_rows * round_up(self.num_queries // self.num_rows, FLASH_ROWS)
        if self.is_ragged:
            rows = self.num_queries + self.num_rows * FLASH_ROWS
            num_splits = max(num_splits, -(-2 * self.num_queries // rows))
        width = round_up(self.width, _FLASH_WIDTH) if self.width <= _FLASH_ROUNDED_WIDTH else _FLASH_MAX_WIDTH
        sum_bytes = rows * self.num_heads * _FLOAT_NBYTES
        expanded_bytes = 0
        if self.num_key_heads != self.num_heads:
            expanded_bytes = self.num_keys * self.num_heads * (self.width + self.value_width) * self.itemsize
        copied_bytes = self._results_nbytes // 2 if self.is_ragged else 0
        return num_splits * rows * self.num_heads * width * _FLOAT_NBYTES + sum_bytes + expanded_bytes + copied_bytes

    @property
    def _results_nbytes(self) -> int:
        """Size in bytes of a forward's output, or of the input gradients of a backward."""
        num_queries, num_keys = self.num_queries * self.num_heads, self.num_keys * self.num_key_heads
        if not self.is_backward:
            return num_queries * self.value_width * self.itemsize
        return (num_queries * self.width + num_keys * (self.width + self.value_width)) * self.itemsize

    def _efficient_nbytes(self, is_deterministic: bool) -> int:
        """Return the efficient backward's workspace: fp32 query gradients, row sums, gradients outside registers."""
        block, num_pairs = _EFFICIENT_BLOCK, self.num_rows * self.num_heads
        rows = round_up(self.longest_keys if self.is_ragged else self.num_queries // self.num_rows, block)
        num_values = rows * round_up(self.width, block) + rows
        if self.itemsize == _FLOAT_NBYTES:  # fp32 needs the product of output and gradient, but no accumulators
            num_values += rows * self.value_width
        elif max(self.width, self.value_width) > block:
            num_splits = 1
            if not is_deterministic:
                num_splits = min(-(-self.longest_keys // _MIN_EFFICIENT_BLOCK), max(1, _EFFICIENT_SPLITS // num_pairs))
            num_values += num_splits * block * (round_up(self.width, block) + round_up(self.value_width, block))
        return num_pairs * num_values * _FLOAT_NBYTES


def _copied_bytes(tensor: Tensor, heads_axis: int) -> int:
    """Return the size of a copy in which tokens come before heads, or 0 if the tensor already has this layout."""
    tokens_first = tensor.transpose(1, 2) if heads_axis == 1 else tensor
    return 0 if tokens_first.is_contiguous() else tensor.numel() * tensor.element_size()


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if not torch.cuda.is_available():
        return _NUM_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
