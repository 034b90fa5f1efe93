"""Weights and optimizer state in the blocks of a run: loaded, made, zeroed, and read back as fp32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatrain.checkpoint.catalog import search_paths
from megatrain.checkpoint.state import CheckpointError
from megatrain.engine.program import kind_of_key, weight_key
from megatrain.engine.step import weight_is_split
from megatrain.models.carried import CARRIED_CHECKSUM
from megatrain.models.initialize import init_weights
from megatrain.models.layout import UnitLayout, views
from megatrain.plan.placement import DURABLE_KINDS
from megatrain.precision import decode, encode, high_half
from megatrain.run.activity import Activity
from tiered import GenerationReader
from tiered.errors import CorruptBlockError, GenerationError
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from megatrain.checkpoint.resume import Checkpoint
    from megatrain.models.load import Origin
    from megatrain.plan.plan import Plan
    from tiered import TieredStore

__all__ = ["RandomWeights", "WeightSource", "Weights"]


class WeightSource(Protocol):
    """Where the weights of a run that starts anew come from: ``WeightLoader`` or ``RandomWeights``."""

    def fill(self, layout: UnitLayout, views: Mapping[str, Tensor]) -> None:
        """Write every parameter of a layout into its view: full name -> zeroed fp32 tensor of its shape."""

    def load_buffers(self) -> None:
        """Fill the persistent buffers of the model."""

    @property
    def origin(self) -> Origin | None:
        """The folder that they come from, with what an export needs to know of it."""


class RandomWeights:
    """Weights as the model's own initialization draws them, a function of the seed and the parameter's name."""

    origin = None

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model, self._seed = model, seed

    def fill(self, layout: UnitLayout, views: Mapping[str, Tensor]) -> None:
        init_weights(self._model, layout, views, self._seed)

    def load_buffers(self) -> None:
        """Nothing to do: the model made its buffers itself."""


class Weights:
    """The durable blocks of a run, unit by unit. Used by the thread that trains.

    At most one unit's fp32 copy exists at a time, beside the blocks.

    Args:
        store: has the durable blocks of the plan.
        source: of weights for a run that starts anew.
        on_notice: called with why a checkpoint cannot be used.

    Attributes:
        carried: record of the tensors that stay in the model's folder, for ``RunState.model``; known after ``load``.
    """

    def __init__(
        self,
        store: TieredStore,
        plan: Plan,
        source: WeightSource,
        activity: Activity,
        on_notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.source = source
        self.carried: Mapping[str, Any] = {}
        self._store, self._plan, self._activity, self._on_notice = store, plan, activity, on_notice
        self._is_split = weight_is_split(plan.graph)

    # -- before training -----------------------------------------------------------------------------------------

    def load(self, candidates: Sequence[Checkpoint] = ()) -> Checkpoint | None:
        """Fill weights and optimizer state.

        Args:
            candidates: checkpoints to start from, best first; one that is damaged is reported and passed over.

        Returns:
            The checkpoint that was loaded; None: the source's weights were, with state of zeros.

        Raises:
            ModelFolderError: the weights cannot be read.
            InitializationError: the model cannot initialize its weights.
            CheckpointError: no candidate is whole, or the tensors that the model's folder keeps are no longer those
                that the run began with.
        """
        checkpoint = self._load_first_whole(candidates) if candidates else None
        self.carried = self._carried_record(checkpoint)
        if checkpoint is None:
            self._fill()
            self._zero_state()
        self.source.load_buffers()
        return checkpoint

    def _load_first_whole(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        self._activity.begin("loading the checkpoint")
        problem: Exception | None = None
        for checkpoint in candidates:
            try:
                self._load_blocks(checkpoint)
            except (CorruptBlockError, GenerationError) as error:
                problem = problem or error
                self._on_notice(f"{checkpoint} cannot be used: {error}")
            else:
                return checkpoint
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in '{candidates[0].path}' can be used; the newest: {problem}"
        )

    def _load_blocks(self, checkpoint: Checkpoint) -> None:
        if checkpoint.is_own and not checkpoint.is_copy:
            self._store.load(checkpoint.generation)
            return
        reader = GenerationReader(checkpoint.path, checkpoint.generation, search_paths(checkpoint.path))
        for key, block in self._plan.program.blocks.items():
            if block.kind in DURABLE_KINDS:
                with self._store.acquire(key, "ram", "w") as lease:
                    reader.read(key, lease.tensor)
                self._evict(key)

    def _carried_record(self, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
        origin = self.source.origin
        if origin is None or not origin.carried.names:
            return {}
        carried, record = origin.carried, origin.carried.record()
        before = {} if checkpoint is None else checkpoint.state.model
        if before.get(CARRIED_CHECKSUM, record[CARRIED_CHECKSUM]) != record[CARRIED_CHECKSUM]:
            raise CheckpointError(
                f"{carried.folder.path}: {carried}, but they are no longer those that {checkpoint} began with. "
                "Bring the original files back, or name another output_dir"
            )
        return record

    def _fill(self) -> None:
        layouts = self._plan.graph.layouts.values()
        self._activity.begin("making random weights" if self.source.origin is None else "loading weights")
        for number, layout in enumerate(layouts):
            self._activity.come_to(number, unit=layout.name, num_parts=len(layouts))
            with self._new_master(layout) as master:
                self.source.fill(layout, views(master, layout))

    @contextmanager
    def _new_master(self, layout: UnitLayout) -> Iterator[Tensor]:
        """Yield a unit's fp32 weights, zeroed; afterwards they are in its blocks."""
        weight = weight_key(layout.name)
        with self._store.acquire(weight, "ram", "w") as lease:
            if not self._is_split:
                yield lease.tensor.zero_()
            else:
                with self._room_for_master(layout):
                    master = torch.zeros(layout.num_elements)
                    yield master
                    self._encode(master, lease.tensor, layout)
                    del master  # before its room is given back
        self._evict(weight)

    @contextmanager
    def _room_for_master(self, layout: UnitLayout) -> Iterator[None]:
        nbytes = round_up(4 * layout.num_elements, PAGE_BYTES) if self._is_split else 0
        self._store.reserve("ram", nbytes)
        try:
            yield
        finally:
            self._store.reserve("ram", -nbytes)

    def _encode(self, master: Tensor, high: Tensor, layout: UnitLayout) -> None:
        for part, low in self._low_parts(layout):
            inside = slice(part.start, part.stop)
            if low is None:
                high_half(master[inside], high[inside])
                continue
            with self._store.acquire(low, "ram", "w") as lease:
                encode(master[inside], high[inside], lease.tensor)
            self._evict(low)

    def _low_parts(self, layout: UnitLayout) -> Iterator[tuple[range, str | None]]:
        """Yield the parts of a layout, each with its low half: frozen weights are never updated and have none."""
        program = self._plan.program
        for part, key in zip(program.parts_of(layout), program.state_keys(layout, "low"), strict=True):
            yield part, key if key in program.blocks else None

    def _zero_state(self) -> None:
        for block in self._plan.program.blocks.values():
            if block.kind == "optimizer" and kind_of_key(block.key) != "low":
                with self._store.acquire(block.key, "ram", "w") as lease:
                    lease.tensor.zero_()
                self._evict(block.key)

    def _evict(self, *keys: str) -> None:
        for key in keys:
            if self._plan.placement.homes[key] != "ram":
                self._store.evict(key, "ram")

    # -- afterwards ----------------------------------------------------------------------------------------------

    @contextmanager
    def master(self, layout: UnitLayout) -> Iterator[Mapping[str, Tensor]]:
        """Yield a unit's fp32 master weights by full parameter name; read-only. No update may be pending."""
        weight = weight_key(layout.name)
        with self._store.acquire(weight, "ram", "r") as lease:
            if not self._is_split:
                yield views(lease.tensor, layout)
            else:
                master = torch.empty(layout.num_elements)
                for part, low in self._low_parts(layout):
                    inside = slice(part.start, part.stop)
                    if low is None:
                        master[inside] = lease.tensor[inside]
                        continue
                    with self._store.acquire(low, "ram", "r") as low_lease:
                        decode(lease.tensor[inside], low_lease.tensor, master[inside])
                    self._evict(low)
                yield views(master, layout)
        self._evict(weight)

    @contextmanager
    def exported(self, layout: UnitLayout) -> Iterator[Mapping[str, Tensor]]:
        """Yield as ``master``, for an export: its fp32 copy counts in RAM, and ``activity`` says which unit it is."""
        names = list(self._plan.graph.layouts)
        self._activity.come_to(names.index(layout.name), unit=layout.name, num_parts=len(names))
        with self._room_for_master(layout), self.master(layout) as weights:
            yield weights
