"""Loads and initializes a run's weights and optimizer state, and reads the fp32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.base.layout import TensorEntry, UnitLayout, entries_within
from megatrain.base.precision import MASTER_ELEMENTS, encode, encode_high_half
from megatrain.base.progress import Activity
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.state import CheckpointError
from megatrain.converters.adapters import AdapterError, AdapterWeights, adapters_of
from megatrain.engine.program.block_keys import key_kind, stored_parts, weight_key
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.tape.updates import has_split_weights
from megatrain.models.converter import ReadMaster
from megatrain.models.folder import BASE_CHECKSUM
from megatrain.models.graph import ModelGraph, find_split_mismatch
from megatrain.models.in_place import FolderSource, FrozenBlock, frozen_blocks
from megatrain.models.initialize import Initializer
from megatrain.models.load import Origin, WeightLoader
from megatrain.models.passthrough import PASSTHROUGH_CHECKSUM
from megatrain.optim.average import EMA
from megatrain.optim.base import StateKind
from megatrain.plan.plan import Plan
from megatrain.ranks.group import RankGroup
from megatrain.training.weight_parts import decode_master, overlaps
from tiered import Lease, TieredStore
from tiered.errors import CorruptBlockError, GenerationError
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Maximum number of elements to copy at a time. The copy is so small that its memory is not reserved.
_COPY_ELEMENTS = 1 << 20
#: Special (layout, start, stop) messages from the reading rank: it needs no more ranges, or a stop was requested.
_FINISHED, _STOPPED = ("", 0, 0), ("", 0, 1)

__all__ = [
    "AdaptedWeights",
    "ExportStopped",
    "GatheredWeights",
    "RandomWeights",
    "SavedShard",
    "WeightSource",
    "Weights",
    "saved_shards",
]


class WeightSource(Protocol):
    """Source of the weights of a new run: ``WeightLoader``, ``RandomWeights`` or ``AdaptedWeights``."""

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        """Fill ``out``, a 1-D fp32 tensor of zeros, with a layout's elements, beginning with element ``start``.

        Ranges are consecutive, from the first element of the block to the last. ``start`` is a multiple of 1024.
        """

    def load_buffers(self) -> None:
        """Fill the model's persistent buffers."""

    @property
    def origin(self) -> Origin | None:
        """Folder of the weights, with all facts that an export needs."""


class RandomWeights:
    """Weights from the model's own initialization. They depend only on the seed and the parameter's name."""

    origin = None

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._current: tuple[list[str], Initializer] | None = None

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        names = [entry.parameter for entry in layout.entries]
        if self._current is None or self._current[0] != names:  # consecutive reads are for the same module
            self._current = names, Initializer(self._model, names, self._seed)
        for entry, part_start, part_stop in entries_within(layout, start, start + out.numel()):
            target = out[entry.offset + part_start - start : entry.offset + part_stop - start]
            self._current[1].read(entry.parameter, entry.start + part_start, target)

    def load_buffers(self) -> None:
        """Do nothing, because the model has already created its buffers."""


class AdaptedWeights:
    """The weights in a model's folder, with new or existing adapters.

    Args:
        loader: Reader of the base model's weights.
        seed: Seed for new adapters.
        folder: Folder of existing adapters, or None for new adapters.

    Raises:
        AdapterError: The adapters in the folder belong to a different model.
    """

    def __init__(self, graph: ModelGraph, loader: WeightLoader, seed: int, folder: str | None) -> None:
        adapters = adapters_of(graph)
        assert adapters is not None
        self._graph, self._adapters, self._loader, self._seed = graph, adapters, loader, seed
        self._entries = {entry.name: entry for layout in graph.layouts.values() for entry in layout.entries}
        shapes = {name: self._entries[name].shape for name in adapters.names}
        self._folder = folder
        self._saved_adapters = None if folder is None else AdapterWeights(folder, adapters, shapes)
        self._plain_layouts: dict[str, UnitLayout] = {}  # layouts without the adapters' entries
        self._cached_tensor: tuple[str, Tensor] | None = None
        if self._saved_adapters is not None:
            for name in self._saved_adapters.base_copies:
                if graph.owner_names.get(name, name) not in self._entries:
                    raise AdapterError(f"lora.adapter_name_or_path: {name} has no place in the model")
                self._saved_adapters.check_base(name, self._base_weight(name))

    def describe(self, checkpoint: Checkpoint | None) -> str:
        """Return a message that describes the adapters.

        Args:
            checkpoint: The loaded checkpoint, or None for a new run.
        """
        numel = sum(self._entries[name].numel for name in self._adapters.names)
        share = numel / self._graph.num_parameters
        origin = "new" if self._folder is None else f"from {self._folder}"
        if checkpoint is not None:
            origin = f"from {checkpoint}"
        modules = f"{self._adapters.num_layers} module{'s' if self._adapters.num_layers != 1 else ''}"
        return f"LoRA: {numel:,} trained parameters ({share:.2%}), adapters of {modules} ({origin})"

    @property
    def origin(self) -> Origin:
        """The model's folder."""
        return self._loader.origin

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        """Write elements of a layout's block to ``out``, as in ``WeightSource``."""
        names = self._adapters.adapter_names if self._saved_adapters is None else frozenset(self._adapters.names)
        for entry, part_start, part_stop in entries_within(layout, start, start + out.numel()):
            if entry.name in names:
                target = out[entry.offset + part_start - start : entry.offset + part_stop - start]
                target.copy_(self._adapter_tensor(entry).view(-1)[part_start:part_stop])
        if layout.name not in self._plain_layouts:
            entries = tuple(entry for entry in layout.entries if entry.name not in names)
            self._plain_layouts[layout.name] = replace(layout, entries=entries)
        if self._plain_layouts[layout.name].entries:
            with self._graph.plain_model():
                self._loader.read(self._plain_layouts[layout.name], start, out)

    def _adapter_tensor(self, entry: TensorEntry) -> Tensor:
        """Return a tensor that is not in the model's folder. It is cached until another tensor is needed."""
        if self._cached_tensor is None or self._cached_tensor[0] != entry.name:
            tensor = torch.zeros(entry.shape)
            if self._saved_adapters is not None:
                self._saved_adapters.fill({entry.name: tensor})
            else:
                modules = self._adapters.dora_modules([entry.name])
                base = {module: self._base_weight(f"{module}.weight") for module in modules}
                self._adapters.initialize({entry.name: tensor}, base, self._seed)
            self._cached_tensor = entry.name, tensor
        return self._cached_tensor[1]

    def _base_weight(self, name: str) -> Tensor:
        entry = replace(self._entries[self._graph.owner_names.get(name, name)], offset=0)
        weight = torch.zeros(entry.shape)
        with self._graph.plain_model():
            self._loader.fill(UnitLayout("", (entry,), entry.numel, False), {entry.name: weight})
        return weight

    def frozen_block(self, layout: UnitLayout) -> FrozenBlock | None:
        """Return the location of a frozen block's bytes in the folder, or None if the bytes need a conversion."""
        with self._graph.plain_model():
            return frozen_blocks(self._loader, [layout], self._graph.dtype).get(layout.name)

    def load_buffers(self) -> None:
        """Fill the model's persistent buffers."""
        with self._graph.plain_model():
            self._loader.load_buffers()


def folder_record(plan: Plan, origin: Origin | None, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Return the checksums of tensors that a checkpoint leaves in the model's folder, for ``RunState.model``.

    Args:
        origin: The model's folder, or None if the weights come from another source.
        checkpoint: Checkpoint from which the run resumes, or None.

    Raises:
        CheckpointError: The folder has changed since the checkpoint's run began.
    """
    if origin is None:
        return {}
    old_record, record = {} if checkpoint is None else checkpoint.state.model, dict[str, Any]()
    passthrough = origin.passthrough
    if passthrough.names:
        record |= passthrough.record()
        if old_record.get(PASSTHROUGH_CHECKSUM, record[PASSTHROUGH_CHECKSUM]) != record[PASSTHROUGH_CHECKSUM]:
            raise CheckpointError(
                f"{passthrough.folder.path}: {passthrough}, but they are no longer those that {checkpoint} began with. "
                "Bring the original files back, or name another output_dir"
            )
    if any(block.in_folder for block in plan.program.blocks.values()):
        record[BASE_CHECKSUM] = origin.folder.fingerprint()
        if old_record.get(BASE_CHECKSUM, record[BASE_CHECKSUM]) != record[BASE_CHECKSUM]:
            raise CheckpointError(
                f"{origin.folder.path}: its weights are no longer those that {checkpoint} began with, which holds only "
                "the trained weights. Bring the original files back, or name another output_dir"
            )
    return record


class Weights:
    """Access to a run's durable blocks, unit by unit, for the training thread.

    In addition to the blocks, at most ``MASTER_ELEMENTS`` of a unit's fp32 master exist at a time.

    Args:
        store: Store with the plan's durable blocks.
        source: Source of the weights of a new run.
        on_notice: Called with the reason if a checkpoint cannot be used.
        group: Ranks that load the same checkpoint. Each rank loads its shards.

    Attributes:
        passthrough: Record of the tensors that stay in the model's folder, for ``RunState.model``. Set by ``load``.
    """

    def __init__(
        self,
        store: TieredStore,
        plan: Plan,
        source: WeightSource,
        activity: Activity,
        on_notice: Callable[[str], None],
        group: RankGroup,
    ) -> None:
        self.source = source
        self._group = group
        self.passthrough: Mapping[str, Any] = {}
        self._store, self._plan, self._activity, self._on_notice = store, plan, activity, on_notice
        self._is_split = has_split_weights(plan.graph)

    # -- before training -----------------------------------------------------------------------------------------

    def load(self, candidates: Sequence[Checkpoint] = ()) -> Checkpoint | None:
        """Fill the store's blocks with weights and optimizer state.

        Args:
            candidates: Checkpoints to start from, preferred first. Damaged checkpoints are reported and skipped.

        Returns:
            The loaded checkpoint, or None if the weights come from the source and the state from ``_initialize_state``.

        Raises:
            ModelFolderError: The weights cannot be read.
            InitializationError: The model cannot initialize its weights.
            CheckpointError: No candidate is intact, or tensors in the model's folder have changed since the run began.
        """
        checkpoint = self._load_first_intact(candidates) if candidates else None
        self.passthrough = folder_record(self._plan, self.source.origin, checkpoint)
        layouts = self._plan.graph.layouts.values()
        if checkpoint is None:
            self._fill(list(layouts))
            self._initialize_state()
        else:
            self._fill([layout for layout in layouts if self._first_block(layout).in_folder])
        self.source.load_buffers()
        return checkpoint

    def _load_first_intact(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        problem: str | None = None
        for checkpoint in candidates:
            self._activity.begin("loading the checkpoint", num_bytes=self._durable_bytes)
            error_text: str | None = None
            try:
                self._load_blocks(checkpoint)
            except (CorruptBlockError, GenerationError) as error:
                error_text = str(error)
            # If a checkpoint is damaged on one rank, no rank uses it. All ranks must resume from the same step.
            reasons = list(dict.fromkeys(text for text in self._group.gather(error_text) if text is not None))
            if not reasons:
                return checkpoint
            problem = problem or reasons[0]
            for text in reasons:
                self._on_notice(f"{checkpoint} cannot be used: {text}")
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in '{candidates[0].folder}' can be used; the newest: {problem}"
        )

    def _load_blocks(self, checkpoint: Checkpoint) -> None:
        program = self._plan.program
        saved_blocks = {key: block for key, block in program.blocks.items() if block.is_saved}
        reader = CheckpointReader(checkpoint)
        self._check_formats(checkpoint, reader)
        is_local = checkpoint.is_in_stores(self._plan.run.output_dir, program.sharding.shards.size)
        if is_local and saved_blocks.keys() == reader.blocks.keys():
            rank_checkpoint = checkpoint.ranks[program.sharding.shards.rank]
            self._store.load(rank_checkpoint.generation, on_bytes=self._activity.add_bytes)
            return
        shards = saved_shards(self._plan)
        for key, block in saved_blocks.items():
            with self._open_for_writing(key) as tensor:
                if key not in shards:  # state that does not have one element per weight
                    reader.read(key, tensor)
                else:
                    shard = shards[key]
                    out = tensor[: len(shard.owned)]
                    tensor[len(shard.owned) :].zero_()
                    if block.kind == "weights":
                        _read_weight(reader, key, shard.start + shard.owned.start, out)
                    else:
                        _read_elements(reader, key, shard.owned.start, out)

    def _check_formats(self, checkpoint: Checkpoint, reader: CheckpointReader) -> None:
        """Raise an error if saved state is missing or in a different format. Replacing it would change results."""
        if layer := find_split_mismatch(self._plan.graph, reader.blocks):
            is_split = self._plan.run.model.table.split_experts
            raise CheckpointError(
                f"{checkpoint} has the experts of {layer} {'whole' if is_split else 'in parts'}, but this run has "
                f"model.split_experts = {str(is_split).lower()}: this changes the order of sums. Write "
                f"model.split_experts = {str(not is_split).lower()}, or export the checkpoint and start a new run from "
                "the exported model"
            )
        for key, block in self._plan.program.blocks.items():
            record = reader.blocks.get(key)
            dtype = str(block.dtype).removeprefix("torch.")
            if key_kind(key) == EMA.name and record is None:
                raise CheckpointError(
                    f"{checkpoint} has no average of the weights, which optimizer.ema_decay needs. Write "
                    "ema_decay = 0; or start a new run from its exported model, whose average begins there"
                )
            if block.kind == "optimizer" and key_kind(key) != "low" and record is not None and record.dtype != dtype:
                formats = {"uint8": "int8"}
                raise CheckpointError(
                    f"{checkpoint} holds the optimizer's moments in {formats.get(record.dtype, record.dtype)}, and "
                    f'optimizer.state_dtype is "{formats.get(dtype, dtype)}". Write that format; or start a new '
                    "run from its exported model, whose moments begin at zero"
                )

    def _first_block(self, layout: UnitLayout) -> BlockPlan:
        """Return a weight's first block. All blocks of a weight have the same properties."""
        return self._plan.program.blocks[self._plan.program.weight_keys(layout)[0]]

    def _fill(self, layouts: Sequence[UnitLayout]) -> None:
        action = "making random weights" if self.source.origin is None else "loading weights"
        self._activity.begin(action, num_bytes=self._durable_bytes)
        for index, layout in enumerate(layouts):
            self._activity.begin_part(index, unit=layout.name, num_parts=len(layouts))
            home = self._plan.placement.homes[self._first_block(layout).key]
            if not self._plan.budgets_by_tier[home].is_read_only:  # each use reads the weights from a read-only home
                self._fill_layout(layout)

    def _fill_packed(self, layout: UnitLayout) -> None:
        """Fill a packed block with the bytes from the model's folder."""
        assert isinstance(self.source, AdaptedWeights), "only the base of adapters may be quantized"
        block, key = self.source.frozen_block(layout), weight_key(layout.name)
        assert block is not None and block.packing is not None, layout.name
        with self._open_for_writing(key) as tensor:
            for read_part in FolderSource({key: block}, self._plan.graph.dtype).parts(key):
                read_part(tensor)

    def _fill_layout(self, layout: UnitLayout) -> None:
        if layout.name in self._plan.program.encodings:
            self._fill_packed(layout)
            return
        weights, low_parts = self._weight_parts(layout), list(self._low_parts(layout))
        max_elements = max(len(part) for part, _ in weights)
        with self._reserve_master(max_elements):
            buffer = torch.empty(min(max_elements, MASTER_ELEMENTS) if self._is_split else 0)
            for index, (part, weight) in enumerate(weights):
                with self._open_for_writing(weight) as tensor:
                    tensor[len(part) :].zero_()  # padding, if the shard is longer than its part
                    if not self._is_split:
                        for span in _split_range(part):
                            target = tensor[span.start - part.start : span.stop - part.start]
                            self.source.read(layout, span.start, target.zero_())
                    else:
                        weight_lows = low_parts[index : index + 1] if len(low_parts) == len(weights) else low_parts
                        self._fill_halves(layout, part, tensor, weight_lows, buffer)

    def _fill_halves(
        self,
        layout: UnitLayout,
        weight_range: range,
        high_halves: Tensor,
        low_parts: Sequence[tuple[range, str | None]],
        buffer: Tensor,
    ) -> None:
        """Fill one block with the high halves of a weight, and other blocks with the low halves."""
        for part, low_key in low_parts:
            with nullcontext() if low_key is None else self._open_for_writing(low_key) as tensor:
                if tensor is not None:
                    tensor[len(part) :].zero_()
                for span in _split_range(part):
                    master = buffer[: len(span)].zero_()
                    self.source.read(layout, span.start, master)
                    target = high_halves[span.start - weight_range.start : span.stop - weight_range.start]
                    if tensor is None:
                        encode_high_half(master, target)
                    else:
                        encode(master, target, tensor[span.start - part.start : span.stop - part.start])

    def _weight_parts(self, layout: UnitLayout) -> list[tuple[range, str]]:
        """Return the blocks of a weight, each with its range of elements."""
        program = self._plan.program
        return list(zip(program.owned_weight_parts(layout), program.weight_keys(layout), strict=True))

    def _low_parts(self, layout: UnitLayout) -> Iterator[tuple[range, str | None]]:
        """Yield a layout's parts, each with the key of its low half, or with None for a frozen layout."""
        program = self._plan.program
        for part, key in zip(program.owned_layout_parts(layout), program.state_keys(layout, "low"), strict=True):
            yield part, key if key in program.blocks else None

    @contextmanager
    def _reserve_master(self, num_elements: int) -> Iterator[None]:
        nbytes = round_up(4 * min(num_elements, MASTER_ELEMENTS), PAGE_BYTES) if self._is_split else 0
        self._store.reserve("ram", nbytes)
        try:
            yield
        finally:
            self._store.reserve("ram", -nbytes)

    def _initialize_state(self) -> None:
        """Fill optimizer state with zeros. Kinds that begin as weights (EMA) are filled with the loaded weights."""
        program = self._plan.program
        copied_kinds = {
            kind.name for kind in self._plan.traced.optimizer.state_kinds(self._is_split) if kind.begins_as_weight
        }
        for block in program.blocks.values():
            if block.kind == "optimizer" and key_kind(block.key) not in {"low", *copied_kinds}:
                with self._open_for_writing(block.key) as tensor:
                    tensor.zero_()
        for layout in self._plan.graph.layouts.values():
            for kind in copied_kinds:
                pairs = zip(program.owned_layout_parts(layout), program.state_keys(layout, kind), strict=True)
                parts = [(part, key) for part, key in pairs if key in program.blocks]
                if parts:
                    with self.master(layout) as read_master:
                        self._copy_master(read_master, parts)

    def _copy_master(self, read_master: ReadMaster, parts: Sequence[tuple[range, str]]) -> None:
        for part, key in parts:
            with self._open_for_writing(key) as tensor:
                for span in _split_range(part, _COPY_ELEMENTS):
                    tensor[span.start - part.start : span.stop - part.start] = read_master(span.start, span.stop)
                tensor[len(part) :].zero_()

    @property
    def _durable_bytes(self) -> int:
        return sum(block.nbytes for block in self._plan.program.blocks.values() if block.is_saved)

    @contextmanager
    def _open_for_writing(self, key: str) -> Iterator[Tensor]:
        """Yield a block's memory in RAM for writing. On exit, move the block to its home and report its bytes."""
        with self._store.acquire(key, "ram", "w") as lease:
            yield lease.tensor
        self._evict_streamed(key)
        self._activity.add_bytes(self._plan.program.blocks[key].nbytes)

    def _evict_streamed(self, key: str) -> None:
        if self._plan.placement.homes[key] != "ram":
            self._store.evict(key, "ram")

    # -- afterwards ----------------------------------------------------------------------------------------------

    @contextmanager
    def master(self, layout: UnitLayout) -> Iterator[ReadMaster]:
        """Yield a reader for ranges of a unit's fp32 master weights. No update may be pending."""
        if layout.name in self._plan.program.encodings:
            yield partial(self._read_packed, layout)
            return
        weights, low_parts = self._weight_parts(layout), list(self._low_parts(layout))
        with (
            _LastBlockLease(self._store, self._evict_streamed) as current_weight,
            _LastBlockLease(self._store, self._evict_streamed) as current_low,
        ):

            def read_high(start: int, stop: int) -> Tensor:
                """Return elements of the weight. The result is a view if all of them are in one block."""
                ranges = [(key, source) for key, source, _ in overlaps(weights, start, stop)]
                if len(ranges) == 1:
                    return current_weight.tensor(ranges[0][0])[ranges[0][1]]
                # Copy each range, because the next lease may reuse the memory.
                return torch.cat([current_weight.tensor(key)[source].clone() for key, source in ranges])

            def read(start: int, stop: int) -> Tensor:
                weight = read_high(start, stop)
                if not self._is_split:
                    return weight
                return decode_master(weight, low_parts, start, lambda low, inside: current_low.tensor(low)[inside])

            yield read

    def _read_packed(self, layout: UnitLayout, start: int, stop: int) -> Tensor:
        """Return elements of a packed layout from the model's folder, rounded to the compute dtype."""
        values = torch.zeros(stop - start)
        self.source.read(layout, start, values)
        if self._is_split:
            rounded = torch.empty(stop - start, dtype=torch.bfloat16)
            encode_high_half(values, rounded)
            values.copy_(rounded)
        return values

    @contextmanager
    def export_reader(self, layout: UnitLayout) -> Iterator[ReadMaster]:
        """Yield the reader of ``master`` for an export. Also reserve RAM for fp32 copies, and report progress."""
        names = list(self._plan.graph.layouts)
        self._activity.begin_part(names.index(layout.name), unit=layout.name, num_parts=len(names))
        with self._reserve_master(layout.num_elements), self.master(layout) as read_master:
            yield read_master


class ExportStopped(KeyboardInterrupt):
    """Stop request during an export by several ranks. All ranks raise this error."""


class GatheredWeights:
    """The sharded weights of a multi-process run. Rank 0 reads ranges, and all other ranks send their shards.

    Args:
        plan: Plan of this rank.
        should_stop: Function that returns whether a stop was requested. Rank 0 calls it before each read.
    """

    def __init__(self, weights: Weights, plan: Plan, group: RankGroup, should_stop: Callable[[], bool]) -> None:
        self._weights, self._plan, self._group, self._should_stop = weights, plan, group, should_stop

    @contextmanager
    def end_serving_on_exit(self) -> Iterator[None]:
        """On rank 0, end the other ranks' calls of ``serve`` on exit. An error in the context ends the whole run."""
        yield
        self._group.broadcast(_FINISHED)

    def serve(self) -> bool:
        """On a rank other than 0, send this rank's elements of the ranges that rank 0 reads, until rank 0 has finished.

        Returns:
            False if a stop was requested before rank 0 had read all ranges.
        """
        with ExitStack() as stack:
            current_name, read_master = "", None
            while True:
                name, start, stop = self._group.broadcast(_FINISHED)
                if not name:
                    return (name, start, stop) != _STOPPED
                if name != current_name:
                    stack.close()
                    current_name = name
                    read_master = stack.enter_context(self._weights.export_reader(self._plan.graph.layouts[name]))
                assert read_master is not None
                for span in self._owned_slices(self._group.world.rank, name, start, stop):
                    self._group.send(read_master(start + span.start, start + span.stop).contiguous(), 0)

    @contextmanager
    def export_reader(self, layout: UnitLayout) -> Iterator[ReadMaster]:
        """On rank 0, yield a reader that gathers each range. After a stop request, it raises ``ExportStopped``."""
        with self._weights.export_reader(layout) as read_shard:

            def read(start: int, stop: int) -> Tensor:
                if self._should_stop():  # the other ranks are waiting for the next range, so rank 0 can end them
                    self._group.broadcast(_STOPPED)
                    raise ExportStopped
                self._group.broadcast((layout.name, start, stop))
                master = torch.empty(stop - start)
                for rank in range(self._group.world.size):
                    for span in self._owned_slices(rank, layout.name, start, stop):
                        if rank == 0:
                            master[span] = read_shard(start + span.start, start + span.stop)
                        else:
                            self._group.receive(master[span], rank)
                return master

            yield read

    def _owned_slices(self, rank: int, name: str, start: int, stop: int) -> Iterator[slice]:
        """Yield the slices of a range that contain the elements of ``rank``."""
        program, layout = self._plan.program, self._plan.graph.layouts[name]
        owned_parts = [(program.sharding.shards.owned_range(part, rank), "") for part in program.weight_parts(layout)]
        for _, _, target in overlaps(owned_parts, start, stop):
            yield target


class _LastBlockLease:
    """Context manager that holds a lease on the block that was read last.

    Args:
        evict: Function that evicts a block's copy if the block's home is not RAM.
    """

    def __init__(self, store: TieredStore, evict: Callable[[str], None]) -> None:
        self._store, self._evict_streamed = store, evict
        self._lease: Lease | None = None
        self._key = ""

    def __enter__(self) -> _LastBlockLease:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lease is not None:
            self._lease.release()
            self._evict_streamed(self._key)
            self._lease = None

    def tensor(self, key: str) -> Tensor:
        """Return a block's contents, which are valid until the next call for another block."""
        if self._lease is None or self._key != key:
            self.__exit__()
            self._lease, self._key = self._store.acquire(key, "ram", "r"), key
        return self._lease.tensor


@dataclass(frozen=True, slots=True)
class SavedShard:
    """This rank's shard of a block, or the whole block in a single process.

    Attributes:
        start: Index in the layout at which the whole block starts.
        num_elements: Number of elements of the whole block.
        owned: Range of the whole block's elements that this rank owns.
    """

    start: int
    num_elements: int
    owned: range


def saved_shards(plan: Plan) -> dict[str, SavedShard]:
    """Return the shards of saved blocks, by key. In a single process, state that is stored per parameter is omitted."""
    program, shards_by_key = plan.program, dict[str, SavedShard]()

    def add(keys: Sequence[str], parts: Sequence[range], shards: Sequence[range], kind: StateKind | None) -> None:
        for key, part, owned in zip(keys, parts, shards, strict=True):
            if key in program.blocks and program.blocks[key].is_saved:
                size = 1 if kind is None else kind.granularity
                span = range((owned.start - part.start) // size, -(-(owned.stop - part.start) // size))
                shards_by_key[key] = SavedShard(part.start, -(-len(part) // size), span)

    for layout in plan.graph.layouts.values():
        weights = program.weight_parts(layout), program.owned_weight_parts(layout)
        add(program.weight_keys(layout), *weights, None)
        for kind in plan.traced.optimizer.state_kinds(has_split_weights(plan.graph)):
            if kind.name == "weight":
                continue
            parts, owned = program.layout_parts(layout), program.owned_layout_parts(layout)
            if kind.elements_of is not None and not kind.has_weight_layout(layout):
                if program.sharding.shards.is_local:
                    continue
                parts = [range(kind.num_elements(layout))]  # the state of the layout is one block, sharded separately
                owned = [program.sharding.shards.owned_range(parts[0])]
            add(program.state_keys(layout, kind.name), parts, owned, kind)
    return shards_by_key


def _read_weight(reader: CheckpointReader, key: str, start: int, out: Tensor) -> None:
    """Read a range of a weight. The checkpoint may divide the weight into different blocks than this run does."""
    weight = weight_key(key.rpartition("/")[0])
    parts = stored_parts(weight, reader.blocks) or [(range(start, start + out.numel()), key)]  # fails if missing
    for block, source, target in overlaps(parts, start, start + out.numel()):
        _read_elements(reader, block, source.start, out[target])


def _read_elements(reader: CheckpointReader, key: str, start: int, out: Tensor) -> None:
    """Read a range of a block, a few pieces at a time.

    Raises:
        GenerationError: The block has a different dtype, or is too short.
    """
    spec, size = reader.spec(key), out.element_size()
    if spec.dtype != out.dtype or start + out.numel() > spec.num_elements:
        raise GenerationError(
            f"block '{key}' is {spec.num_elements} elements of {spec.dtype}, not {start + out.numel()} of {out.dtype}"
        )
    step = reader.piece_bytes // size
    # Split the range at the boundaries of pieces, so that each piece is read only once.
    bounds = [start, *range(start // step * step + step, start + out.numel(), step), start + out.numel()]
    for begin, end in pairwise(bounds):
        data = reader.read_range(key, begin * size, end * size)
        out[begin - start : end - start] = data.view(out.dtype)


def _split_range(elements: range, max_elements: int = MASTER_ELEMENTS) -> Iterator[range]:
    """Split a range into consecutive ranges of at most ``max_elements`` elements."""
    for start in range(elements.start, elements.stop, max_elements):
        yield range(start, min(start + max_elements, elements.stop))
