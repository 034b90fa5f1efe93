"""A planned run brought to life: the store with its tiers and blocks, weights loaded, the engine ready."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.engine.program import state_key, weight_key
from megatrain.engine.step import StepEngine, weight_is_split
from megatrain.models.export import export_model
from megatrain.models.initialize import init_weights
from megatrain.models.layout import UnitLayout, views
from megatrain.models.load import WeightLoader
from megatrain.optim.factory import segment_builder
from megatrain.plan.machine import existing_parent
from megatrain.plan.planner import Plan
from megatrain.plan.solve import DoesNotFitError
from megatrain.precision import decode, encode, high_half
from megatrain.timeline import Timeline
from tiered.policies import LRU, Belady
from tiered.store import TieredStore
from tiered.tiers.directory import reusable_bytes
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.tiers.stripe import plan_chunks
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.config.schema import RunConfig
    from tiered.tiers.base import Tier

#: Kinds of blocks whose contents outlive a step.
DURABLE_KINDS = ("weights", "optimizer")


class Session:
    """Owns the store of one run. A context manager: leaving it closes the store.

    Args:
        on_notice: told what a person should know about the drives, from any thread.

    Attributes:
        store: holds all blocks. timeline: of the steps during which it is on.

    Raises:
        ModelFolderError: the weights do not fit the model. DoesNotFitError: a drive has too little free space.
        LockedError: another run uses an NVMe path. Nothing is allocated before these are known.
    """

    def __init__(self, config: RunConfig, plan: Plan, on_notice: Callable[[str], None] | None = None) -> None:
        self.config, self.plan = config, plan
        self.timeline = Timeline()
        self._engine: StepEngine | None = None
        self._weights: WeightLoader | None = None
        if not config.model.train_from_scratch:
            self._weights = WeightLoader(config.model.model_name_or_path, plan.graph.model)
        check_drives(config, plan)
        policy = LRU() if config.advanced.eviction_policy == "lru" else Belady()
        self._tiers = make_tiers(config, plan, on_notice)
        try:
            self.store = TieredStore(self._tiers, policy, on_event=self.timeline.on_event)
        except BaseException:
            for tier in self._tiers:
                tier.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.__exit__(kind, error, trace)

    # -- before training ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bring in weights unit by unit and zero the optimizer state, then reserve what only steps need.

        The fp32 copy of a unit that is on its way in takes the room that its gradient has in a step: so a run that
        fits also starts.

        Raises:
            ModelFolderError, InitializationError: the weights cannot be had.
        """
        self._register(durable=True)
        self._fill_weights()
        self._zero_state()
        self._register(durable=False)
        for tier, nbytes in self.plan.placement.workspace_bytes.items():
            if nbytes:
                self.store.reserve(tier, nbytes)

    def _register(self, *, durable: bool) -> None:
        for block in self.plan.program.blocks.values():
            if (block.kind in DURABLE_KINDS) == durable:
                home = self.plan.placement.homes[block.key]
                self.store.register(block.key, (block.num_elements,), block.dtype, home=home, durable=durable)

    def _fill_weights(self) -> None:
        graph, config = self.plan.graph, self.config
        if self._weights is None:
            for layout in graph.layouts.values():
                with self._master(layout) as master:
                    init_weights(graph.model, layout, views(master, layout), config.seed)
            return
        for layout in graph.layouts.values():
            with self._master(layout) as master:
                self._weights.fill(layout, views(master, layout))
        self._weights.load_buffers()

    @contextmanager
    def _master(self, layout: UnitLayout) -> Iterator[torch.Tensor]:
        """Yield room for a unit's fp32 weights, zeroed; afterwards they are in its blocks."""
        weight, low = weight_key(layout.name), state_key(layout.name, "low")
        with self.store.acquire(weight, "ram", "w") as lease:
            if not weight_is_split(self.plan.graph):
                yield lease.tensor.zero_()
            else:
                with self._room_for_master(layout):
                    master = torch.zeros(layout.num_elements)
                    yield master
                    self._encode(master, lease.tensor, low)
                    del master
        self._leave(weight, low)

    @contextmanager
    def _room_for_master(self, layout: UnitLayout) -> Iterator[None]:
        nbytes = round_up(4 * layout.num_elements, PAGE_BYTES) if weight_is_split(self.plan.graph) else 0
        self.store.reserve("ram", nbytes)
        try:
            yield
        finally:
            self.store.reserve("ram", -nbytes)

    def _encode(self, master: torch.Tensor, high: torch.Tensor, low: str) -> None:
        if low not in self.plan.program.blocks:  # frozen weights are never updated and need no low half
            high_half(master, high)
            return
        with self.store.acquire(low, "ram", "w") as lease:
            encode(master, high, lease.tensor)

    def _zero_state(self) -> None:
        for block in self.plan.program.blocks.values():
            if block.kind == "optimizer" and not block.key.endswith("/low"):
                with self.store.acquire(block.key, "ram", "w") as lease:
                    lease.tensor.zero_()
                self._leave(block.key)

    def _leave(self, *keys: str) -> None:
        for key in keys:
            if key in self.plan.program.blocks and self.plan.placement.homes[key] != "ram":
                self.store.evict(key, "ram")

    # -- training ----------------------------------------------------------------------------------------------

    def make_engine(self, num_steps: int) -> StepEngine:
        """Return the engine, with the prefetcher told the schedule of ``num_steps`` steps."""
        plan, table = self.plan, self.config.optimizer
        prefetch = self.config.advanced.prefetch
        self.store.set_schedule(
            plan.program.schedule(plan.placement.homes, num_steps),
            lookahead_bytes=prefetch if isinstance(prefetch, int) else None,
        )
        self._engine = StepEngine(
            self.store,
            plan.graph,
            plan.trace,
            plan.program,
            plan.placement.homes,
            plan.placement.stays,
            plan.optimizer,
            device=plan.device,
            order=self.config.advanced.micro_batch_order,
            segments=segment_builder(table, plan.optimizer, split_master=weight_is_split(plan.graph)),
            max_grad_norm=table.max_grad_norm,
            nonfinite=table.nonfinite,
            seed=self.config.seed,
            timeline=self.timeline,
        )
        return self._engine

    # -- afterwards --------------------------------------------------------------------------------------------

    @contextmanager
    def master_weights(self, layout: UnitLayout) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield a unit's fp32 master weights, after the last step's update, by full parameter name; read-only."""
        self.finish_updates()
        weight, low = weight_key(layout.name), state_key(layout.name, "low")
        with self.store.acquire(weight, "ram", "r") as lease:
            if not weight_is_split(self.plan.graph):
                yield views(lease.tensor, layout)
            elif low not in self.plan.program.blocks:
                yield views(lease.tensor.float(), layout)
            else:
                master = torch.empty(layout.num_elements)
                with self.store.acquire(low, "ram", "r") as low_lease:
                    decode(lease.tensor, low_lease.tensor, master)
                yield views(master, layout)
        self._leave(weight, low)

    def finish_updates(self) -> None:
        """Make the update that the last step left to the next one."""
        if self._engine is not None:
            self._engine.finish_updates()

    def _end_training(self) -> None:
        """Give back what only steps need; weights and optimizer state stay."""
        self.finish_updates()
        self._engine = None
        self.store.set_schedule(None)
        blocks = self.plan.program.blocks.values()
        self.store.unregister(*(block.key for block in blocks if block.kind not in DURABLE_KINDS))
        for tier, nbytes in self.plan.placement.workspace_bytes.items():
            self.store.reserve(tier, -nbytes)

    @contextmanager
    def _exported_weights(self, layout: UnitLayout) -> Iterator[Mapping[str, torch.Tensor]]:
        with self._room_for_master(layout), self.master_weights(layout) as weights:
            yield weights

    def export(self, folder: Path) -> Path:
        """Write the Hugging Face folder of the trained model, unit by unit. No step can follow."""
        self._end_training()
        table = self.config.export
        dtype = self.plan.graph.dtype if table.dtype == "auto" else getattr(torch, table.dtype)
        return export_model(
            self.plan.graph,
            self._exported_weights,
            folder,
            dtype=dtype,
            max_shard_nbytes=table.max_shard_size,
            copy_from=Path(self.config.model.tokenizer_name_or_path or self.config.model.model_name_or_path),
        )


def make_tiers(config: RunConfig, plan: Plan, on_notice: Callable[[str], None] | None = None) -> list[Tier]:
    """Return the tiers of a run, fast to slow, with the planned capacities."""
    tiers: list[Tier] = []
    for name, budget in plan.budgets_by_tier.items():
        if name == "gpu":
            tiers.append(GpuTier(budget.capacity_bytes, device=str(plan.device)))
        elif name == "ram":
            tiers.append(RamTier(budget.capacity_bytes, pin_memory=plan.device.type == "cuda"))
        else:
            tiers.append(
                NvmeTier(
                    [str(table.path) for table in config.tiers.nvme],
                    budget.capacity_bytes,
                    rates=plan.nvme_rates,
                    chunk_bytes=config.advanced.file_size,
                    engine=config.tiers.engine,
                    verify=config.tiers.verify,
                    on_full=config.tiers.on_disk_full,
                    on_notice=on_notice,
                    max_written_bytes=[table.max_written for table in config.tiers.nvme],
                )
            )
    return tiers


def check_drives(config: RunConfig, plan: Plan) -> None:
    """Refuse drives that have less free space than the plan puts on them; files of earlier runs are free space.

    Raises:
        DoesNotFitError: with the bytes that the drive would need.
    """
    rates = tuple(plan.nvme_rates)
    needs = Counter[int]()
    for key, block in plan.program.blocks.items():
        if plan.placement.homes[key] == "nvme":
            cut = plan_chunks(block.nbytes, rates, config.advanced.file_size)
            needs.update({path: cut.chunk_bytes * count for path, count in Counter(cut.path_of_chunk).items()})
    drives: dict[int, list[int]] = {}
    for number, table in enumerate(config.tiers.nvme):
        drives.setdefault(existing_parent(table.path).stat().st_dev, []).append(number)
    for numbers in drives.values():
        paths = [config.tiers.nvme[number].path for number in numbers]
        have = shutil.disk_usage(existing_parent(paths[0])).free + sum(reusable_bytes(path) for path in paths)
        need = sum(needs[number] for number in numbers)
        if need > have:
            advice = f"That is the free space of the drive of {paths[0]}. Free some, or name another drive."
            raise DoesNotFitError("nvme", need, have, advice)
