"""Updates and gradient norms for blocks in device memory. Results are bit-identical to the host kernels' results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatrain.optim.average import EMA, WeightAverage
from megatrain.optim.base import (
    FORMATS,
    GRADIENT_DTYPES,
    Format,
    MatrixOptimizer,
    Segment,
    StateKind,
    Update,
    master_kinds,
)
from megatrain.optim.elementwise import MOMENTS, ElementwiseOptimizer
from megatrain.optim.moments import BLOCK_ELEMENTS as MOMENT_BLOCK_ELEMENTS
from megatrain.optim.moments import is_signed, moment_code

if TYPE_CHECKING:
    from megatrain.optim.base import Optimizer

#: Number of rows that a Triton program loads concurrently for a norm.
_UNROLLED = 16
#: Elements per piece when a norm is computed without Triton: whole blocks, with a temporary tensor of at most 32 MiB.
_PIECE_ELEMENTS = 1 << 22

__all__ = [
    "DeviceKernelError",
    "TableOptimizer",
    "TritonOptimizer",
    "TritonWeightAverage",
    "UpdateGroup",
    "UpdateTable",
    "concat_device_partials",
    "device_optimizer",
    "device_partials",
    "device_squared_norm",
    "sum_partials",
    "warm_up_norm",
]


class DeviceKernelError(RuntimeError):
    """Error for updates that a GPU cannot run, because no kernel exists or Triton is missing."""


#: A group's blocks by kind, its gradient, and the ranges to update, as in `Optimizer.update`.
UpdateGroup = tuple[Mapping[str, Tensor], Tensor, Sequence[Segment]]


@dataclass(frozen=True, slots=True)
class UpdateTable:
    """Addresses of the ranges that one kernel launch updates. The table is valid until a block moves.

    Attributes:
        rows: Address table on the device, ``[num_rows, columns]``; see `triton_kernels`.
        examples: Empty tensors that give the dtypes of the arrays, in the order of the kernel's arguments.
        segment: Settings of all ranges.
    """

    rows: Tensor
    num_programs: int
    examples: Sequence[Tensor | None]
    segment: Segment


@runtime_checkable
class TableOptimizer(Protocol):
    """Device optimizer that can update many block groups in one launch, with the same results as separate updates.

    Its updates accept an `Update.decision`.
    """

    def addresses(self, tensors: Iterable[Tensor]) -> Sequence[int]:
        """Return the addresses of tensors. A table is valid while the addresses of its blocks stay the same."""
        ...

    def make_tables(self, groups: Sequence[UpdateGroup]) -> Sequence[UpdateTable] | None:
        """Return tables for all block groups, one per combination of settings, or None if launches must be separate."""
        ...

    def update_by_tables(self, tables: Sequence[UpdateTable], update: Update) -> None:
        """Queue one step of the block groups in these tables."""
        ...


class TritonOptimizer:
    """Optimizer for flat blocks on a GPU; see `megatrain.optim.base.Optimizer` for the contract.

    Results are bit-identical to the host optimizer's results, except for NaN payloads, so either optimizer can update a
    block group. `update` differs from the contract: it queues the work on the current stream of the blocks' device, and
    returns before the work is finished.

    Args:
        host: Host optimizer. It defines the kinds of state, the scalars, and the kernel's name.

    Raises:
        DeviceKernelError: Triton is not installed, or the optimizer has no Triton kernel.
    """

    def __init__(self, host: ElementwiseOptimizer) -> None:
        self._host = host
        self._kernels = _import_kernels()
        self._rule: Any = self._kernels.RULES.get(host.kernel_name)
        if self._rule is None:
            raise DeviceKernelError(f"{host.kernel_name} has no GPU kernel. Run the updates on the host")
        self._codes_by_device: dict[torch.device, list[Tensor | None]] = {}
        self._cached_scalars: tuple[Update | None, dict[tuple[float, float], tuple[float, tuple[float, ...]]]] = (
            None,
            {},
        )

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the kinds of the host optimizer."""
        return self._host.state_kinds(split_master)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Queue one step of one block group.

        Args:
            blocks: Flat tensors by kind, all on one GPU.
            gradient: fp32 or bf16 gradient on the same GPU. Not changed.
            segments: Ranges to update, without overlap.
        """
        num_elements = gradient.numel()
        arrays, inputs = self._arrays(blocks, gradient)
        scales = [arrays.get(f"{name}_scale") for name in MOMENTS]
        codes = self._codes(gradient.device)
        block_elements = self._kernels.BLOCK_ELEMENTS
        assert gradient.is_cuda or self._kernels.IS_INTERPRETED, gradient.device
        with torch.accelerator.device_index(gradient.device.index):  # Triton launches on the current device
            for segment in segments:
                assert 0 <= segment.start <= segment.stop <= num_elements, (segment, num_elements)
                count = segment.stop - segment.start
                if count == 0:
                    continue
                assert self._host.state_dtype != "int8" or segment.start % MOMENT_BLOCK_ELEMENTS == 0, segment
                parts, scale_parts = inputs, scales
                if count < num_elements:
                    parts = [array if array is None else array[segment.start : segment.stop] for array in inputs]
                    scale_parts = [
                        scale
                        if scale is None
                        else scale[segment.start // MOMENT_BLOCK_ELEMENTS : -(-segment.stop // MOMENT_BLOCK_ELEMENTS)]
                        for scale in scales
                    ]
                rounding_key = self._host.rounding_key_at(segment, update)
                key = (0, 0, 0) if rounding_key is None else (*map(_as_int32, rounding_key[:2]), int(rounding_key[2]))
                grid = (-(-count // block_elements),)
                self._kernels.update[grid](
                    None,
                    0,
                    update.decision,
                    *parts,
                    *scale_parts,
                    *codes,
                    *key,
                    count,
                    *self._scalars(segment, update),
                    rule=self._rule,
                    block_elements=block_elements,
                    **self._kernels.LAUNCH_OPTIONS,
                )

    def addresses(self, tensors: Iterable[Tensor]) -> Sequence[int]:
        """Return the device addresses of tensors."""
        return [tensor.data_ptr() for tensor in tensors]

    def make_tables(self, groups: Sequence[UpdateGroup]) -> list[UpdateTable] | None:
        """Return tables; see `TableOptimizer`. Return None for bf16 or int8 moments or unaligned ranges."""
        if not self._host.supports_rows:
            return None
        alignment, block_elements = self._kernels.ROW_ALIGNMENT, self._kernels.BLOCK_ELEMENTS
        launches: dict[tuple[object, ...], tuple[list[list[int]], list[Tensor | None], Segment]] = {}
        for blocks, gradient, segments in groups:
            _, inputs = self._arrays(blocks, gradient)
            weight, low, *moments, grad = inputs
            row_arrays = [weight, low, grad, *moments]
            for segment in segments:
                count = segment.stop - segment.start
                addresses = [0 if array is None else array[segment.start :].data_ptr() for array in row_arrays]
                if any(value % alignment for value in (count, *addresses)):
                    return None
                settings = low is None, gradient.dtype, segment.weight_decay, segment.lr_scale
                rows, _, _ = launches.setdefault(settings, ([], inputs, segment))
                if count:
                    rows.append([count, *addresses])
        device, tables = groups[0][1].device, list[UpdateTable]()
        for rows, inputs, segment in launches.values():
            table, num_programs = _make_table(rows, block_elements, device)
            examples = [None if array is None else array.new_empty(0) for array in inputs]
            if num_programs:
                tables.append(UpdateTable(table, num_programs, examples, segment))
        return tables

    def update_by_tables(self, tables: Sequence[UpdateTable], update: Update) -> None:
        """Queue one launch for each table."""
        for table in tables:
            without_codes: list[None] = [None] * (3 * len(MOMENTS))
            with torch.accelerator.device_index(table.rows.device.index):
                self._kernels.update[(table.num_programs,)](
                    table.rows,
                    len(table.rows),
                    update.decision,
                    *table.examples,
                    *without_codes,
                    *(0, 0, 0, 0),
                    *self._scalars(table.segment, update),
                    rule=self._rule,
                    block_elements=self._kernels.BLOCK_ELEMENTS,
                    **self._kernels.LAUNCH_OPTIONS,
                )

    def _arrays(self, blocks: Mapping[str, Tensor], gradient: Tensor) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Return the kernel's arrays twice: by kind, and as a list in argument order with the gradient last."""
        arrays = {
            kind.name: _flat(kind.name, blocks[kind.name], kind.dtype, gradient, kind.granularity)
            for kind in self.state_kinds("low" in blocks)
        }
        moments = [arrays.get(name) for name in MOMENTS]
        grad = _flat("gradient", gradient, gradient.dtype, gradient)
        return arrays, [arrays["weight"], arrays.get("low"), *moments, grad]

    def _scalars(self, segment: Segment, update: Update) -> tuple[float, tuple[float, ...]]:
        """Return the kernel's scalars as Python numbers. They are cached, because most parameters share them."""
        if self._cached_scalars[0] != update:
            self._cached_scalars = (update, {})
        scalar_cache, settings = self._cached_scalars[1], (segment.weight_decay, segment.lr_scale)
        if settings not in scalar_cache:
            grad_scale, scalars = self._host.scalars(segment, update)
            scalar_cache[settings] = float(grad_scale), tuple(map(float, scalars))
        return scalar_cache[settings]

    def _codes(self, device: torch.device) -> list[Tensor | None]:
        """Return each moment's code and cells in device memory, or None for a moment without a code."""
        if device not in self._codes_by_device:
            codes: list[Tensor | None] = []
            for name in MOMENTS:
                if self._host.state_dtype != "int8" or name not in self._host.moments:
                    codes += [None, None]
                    continue
                values, borders, cells = map(torch.from_numpy, moment_code(is_signed(name)))
                codes += [torch.cat([values, borders]).to(device), cells.to(device)]
            self._codes_by_device[device] = codes
        return self._codes_by_device[device]

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile the kernel for these formats on the current device. Each format takes 1 to 2 s."""
        _warm_up(self, self._kernels, formats)


class TritonWeightAverage:
    """`WeightAverage` for flat blocks on a GPU. Queues updates and raises errors like `TritonOptimizer`."""

    def __init__(self, host: WeightAverage) -> None:
        assert isinstance(host.inner, ElementwiseOptimizer), host.inner
        self._host, self._inner = host, TritonOptimizer(host.inner)
        self._kernels = _import_kernels()

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the kinds of the host optimizer."""
        return self._host.state_kinds(split_master)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Queue one step of one block group and the update of its average; see `TritonOptimizer.update`."""
        inner_blocks = {name: block for name, block in blocks.items() if name != EMA.name}
        self._inner.update(inner_blocks, gradient, segments, update)
        kinds = (*master_kinds("low" in blocks), EMA)
        arrays = {kind.name: _flat(kind.name, blocks[kind.name], kind.dtype, gradient) for kind in kinds}
        inputs = [arrays["weight"], arrays.get("low"), arrays[EMA.name]]
        block_elements = self._kernels.BLOCK_ELEMENTS
        with torch.accelerator.device_index(gradient.device.index):
            for segment in segments:
                count = segment.stop - segment.start
                if count:
                    parts = [array if array is None else array[segment.start : segment.stop] for array in inputs]
                    self._kernels.average[(-(-count // block_elements),)](
                        *parts,
                        count,
                        float(self._host.share),
                        block_elements=block_elements,
                        **self._kernels.LAUNCH_OPTIONS,
                    )

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile the kernels for these formats on the current device."""
        _warm_up(self, self._kernels, formats)


def _warm_up(optimizer: TritonOptimizer | TritonWeightAverage, kernels: ModuleType, formats: Iterable[Format]) -> None:
    device = "cpu" if kernels.IS_INTERPRETED else "cuda"
    # Triton specializes kernels for lengths that are multiples of 16, so compile for both kinds of length.
    size = MOMENT_BLOCK_ELEMENTS + 17
    segments = (Segment(0, MOMENT_BLOCK_ELEMENTS, 0.0), Segment(MOMENT_BLOCK_ELEMENTS, size, 0.0))
    for split_master, dtype in formats:
        blocks = {
            kind.name: torch.zeros(kind.elements_for(size), dtype=kind.dtype, device=device)
            for kind in optimizer.state_kinds(split_master)
        }
        gradient, update = torch.zeros(size, dtype=dtype, device=device), Update(step=1, lr=0.0)
        optimizer.update(blocks, gradient, segments, update)
        if not isinstance(optimizer, TritonOptimizer):
            continue
        decision_update = replace(update, decision=torch.zeros(2, device=device))
        optimizer.update(blocks, gradient, segments, decision_update)
        if tables := optimizer.make_tables([(blocks, gradient, segments[:1])]):
            optimizer.update_by_tables(tables, update)
            optimizer.update_by_tables(tables, decision_update)


def _make_table(rows: Sequence[Sequence[int]], block_elements: int, device: torch.device) -> tuple[Tensor, int]:
    """Return an address table for kernels, and the number of programs that the table needs, without a host sync.

    Args:
        rows: Rows in the order of `triton_kernels.ROW_COLUMNS`: number of elements, then addresses.
    """
    num_programs, width = 0, len(_import_kernels().ROW_COLUMNS)
    table_rows = list[list[int]]()
    for row in rows:
        table_rows.append([num_programs, *row, *(0 for _ in range(width - 1 - len(row)))])
        num_programs += -(-row[0] // block_elements)
    table = torch.tensor(table_rows, dtype=torch.int64).reshape(-1, width)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, num_programs


def _import_kernels() -> ModuleType:
    """Import the kernels. Only runs that update on a GPU call this function, because it imports Triton."""
    try:
        from megatrain.optim import triton_kernels
    except ImportError as error:
        raise DeviceKernelError(
            f"updates on a GPU need Triton, which cannot be imported ({error}). Install a CUDA build of PyTorch, which "
            "includes Triton, or run the updates on the host"
        ) from error
    return triton_kernels


def _as_int32(bits: int) -> int:
    """Convert 32 bits to a signed number, so that Triton passes it as int32 instead of as a wider integer."""
    return (int(bits) ^ 0x80000000) - 0x80000000


def _flat(name: str, tensor: Tensor, dtype: torch.dtype, gradient: Tensor, granularity: int = 1) -> Tensor:
    """Return a block in the kernel's format. bf16 is passed as int16."""
    tensor = tensor.detach()
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.device == gradient.device, (name, tensor.device, gradient.device)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == -(-gradient.numel() // granularity), (name, tensor.numel(), gradient.numel())
    return tensor.view(torch.int16) if dtype == torch.bfloat16 else tensor


def device_optimizer(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """Return the optimizer for blocks on a device. Its results are bit-identical to the host optimizer's results.

    Args:
        optimizer: Host optimizer.
        device: Device of the blocks: a CUDA device, or a CPU device that emulates one (`advanced.emulate_gpu`).

    Raises:
        DeviceKernelError: The optimizer runs only on the host. The message gives the reason.
    """
    inner = optimizer.inner if isinstance(optimizer, WeightAverage) else optimizer
    if isinstance(inner, MatrixOptimizer):
        raise DeviceKernelError(f"for {type(inner).__name__}, the GPU computes only the matrix products")
    if not isinstance(inner, ElementwiseOptimizer):
        raise DeviceKernelError(f"{type(inner).__name__} has no GPU kernel")
    if device.type == "cpu":
        return optimizer
    return TritonWeightAverage(optimizer) if isinstance(optimizer, WeightAverage) else TritonOptimizer(inner)


def device_squared_norm(gradient: Tensor) -> Tensor:
    """Return the fp64 sum of squares of a block group's gradient, as a scalar on its device, without a host sync.

    The result is bit-identical to `clip.squared_norm`. With Triton, it takes two launches and reads the
    gradient once. Without Triton, it takes more than a thousand small launches.

    Args:
        gradient: 1-D contiguous fp32 or bf16 tensor, padding (zeros) included.
    """
    return sum_partials(device_partials(gradient))


def device_partials(gradient: Tensor) -> Tensor:
    """Return the fp64 sum of squares of every `kernels.NORM_BLOCK_ELEMENTS` elements, [blocks] on the same device."""
    from megatrain.optim.kernels import NORM_BLOCK_ELEMENTS, NORM_LANES

    grad, triton_kernels = gradient.detach(), _kernels_for(gradient)
    if triton_kernels is None:
        return _partials_in_torch(grad, NORM_BLOCK_ELEMENTS, NORM_LANES)
    return _partials_in_triton(triton_kernels, grad, None, -(-grad.numel() // NORM_BLOCK_ELEMENTS))


def _partials_in_triton(kernels: ModuleType, gradient: Tensor, table: Tensor | None, num_programs: int) -> Tensor:
    """Return the partial sums of `gradient`, or of all gradients in `table`, which have the same dtype and device."""
    from megatrain.optim.kernels import NORM_BLOCK_ELEMENTS, NORM_LANES

    grad = _flat("gradient", gradient, gradient.dtype, gradient)
    partials = torch.empty(num_programs, dtype=torch.float64, device=grad.device)
    if num_programs:
        with torch.accelerator.device_index(grad.device.index):
            kernels.squared_norms[(num_programs,)](
                table,
                0 if table is None else len(table),
                grad,
                partials,
                grad.numel() if table is None else 0,
                block_elements=NORM_BLOCK_ELEMENTS,
                num_lanes=NORM_LANES,
                unroll=_UNROLLED,
                num_warps=1,
            )
    return partials


#: Cached tables, by addresses and lengths of gradients. Gradients rarely move between steps.
_norm_tables: OrderedDict[tuple[object, ...], tuple[Tensor, int]] = OrderedDict()
_MAX_NORM_TABLES = 1024


def concat_device_partials(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated `device_partials` of several gradients, with one launch if possible."""
    from megatrain.optim.kernels import NORM_BLOCK_ELEMENTS

    triton_kernels, first_part = _kernels_for(parts[0]), parts[0]
    addresses = [part.data_ptr() for part in parts] if triton_kernels is not None else []
    is_aligned = not any(address % triton_kernels.ROW_ALIGNMENT for address in addresses) if triton_kernels else False
    if len(parts) == 1 or triton_kernels is None or not is_aligned:
        return torch.cat([device_partials(part) for part in parts])
    key = first_part.device, first_part.dtype, *addresses, *map(len, parts)
    if key not in _norm_tables:
        rows = [(len(part), 0, 0, address) for part, address in zip(parts, addresses, strict=True) if len(part)]
        _norm_tables[key] = _make_table(rows, NORM_BLOCK_ELEMENTS, first_part.device)
        if len(_norm_tables) > _MAX_NORM_TABLES:
            _norm_tables.popitem(last=False)
    _norm_tables.move_to_end(key)
    table, num_programs = _norm_tables[key]
    return _partials_in_triton(triton_kernels, first_part, table, num_programs)


def sum_partials(partials: Tensor) -> Tensor:
    """Add fp64 numbers sequentially, and return the sum as a scalar on their device."""
    total = torch.zeros((), dtype=torch.float64, device=partials.device)
    triton_kernels = _kernels_for(partials)
    if triton_kernels is None:
        for partial in partials.unbind():
            total += partial
    elif len(partials):
        with torch.accelerator.device_index(partials.device.index):
            triton_kernels.sum_in_order[(1,)](partials, total, len(partials), num_warps=1)
    return total


def warm_up_norm(device: torch.device) -> None:
    """Compile the kernels of `device_squared_norm` for a CUDA device."""
    if device.type == "cuda" and _kernels_or_none() is not None:
        for dtype in GRADIENT_DTYPES:
            zeros = torch.zeros(1, dtype=dtype, device=device)
            device_squared_norm(zeros)
            concat_device_partials([zeros, zeros])


def _kernels_for(tensor: Tensor) -> ModuleType | None:
    """Return the kernels if they can run on a tensor's device, otherwise None."""
    kernels = _kernels_or_none()
    return kernels if kernels is not None and (tensor.is_cuda or kernels.IS_INTERPRETED) else None


@cache
def _kernels_or_none() -> ModuleType | None:
    try:
        return _import_kernels()
    except DeviceKernelError:
        return None


def _partials_in_torch(gradient: Tensor, block_elements: int, num_lanes: int) -> Tensor:
    """Return a gradient's partial sums, added in the same order as in the Triton kernel."""
    sums: list[Tensor] = []
    for piece in torch.split(gradient, max(block_elements, _PIECE_ELEMENTS // block_elements * block_elements)):
        count = -(-piece.numel() // block_elements)
        squares = torch.zeros(count * block_elements, dtype=torch.float64, device=gradient.device)
        squares[: piece.numel()] = piece
        rows = squares.square_().view(count, block_elements // num_lanes, num_lanes)
        lanes = torch.zeros(count, num_lanes, dtype=torch.float64, device=gradient.device)
        for row in range(-(-min(piece.numel(), block_elements) // num_lanes)):  # all later rows are zeros
            lanes += rows[:, row]
        partials = torch.zeros(count, dtype=torch.float64, device=gradient.device)
        for lane in range(num_lanes):
            partials += lanes[:, lane]
        sums.append(partials)
    return torch.cat(sums)
