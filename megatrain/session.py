"""A planned run brought to life: the store with its tiers and blocks, weights loaded, the engine ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from megatrain.optim.base import build_segments
from megatrain.plan.planner import Plan, nvme_rates
from megatrain.precision import decode, encode
from tiered.policies import LRU, Belady
from tiered.store import TieredStore
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from tiered.tiers.base import Tier


class Session:
    """Owns the store of one run. A context manager: leaving it closes the store.

    Raises:
        LockedError: another run uses an NVMe path. TransferError: a drive has not the space it was planned to have.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self.config, self.plan = config, plan
        policy = LRU() if config.advanced.eviction_policy == "lru" else Belady()
        self._tiers = make_tiers(config, plan)
        try:
            self.store = TieredStore(self._tiers, policy)
        except BaseException:
            for tier in self._tiers:
                tier.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.store.close()

    # -- before training ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Reserve every slot, then bring in weights unit by unit and zero the optimizer state.

        Raises:
            ModelFolderError, InitializationError: the weights cannot be had.
        """
        for tier, nbytes in self.plan.placement.workspace_bytes.items():
            if nbytes:
                self.store.reserve(tier, nbytes)
        for block in self.plan.program.blocks.values():
            durable = block.kind in ("weights", "optimizer")
            home = self.plan.placement.homes[block.key]
            self.store.register(block.key, (block.num_elements,), block.dtype, home=home, durable=durable)
        self._fill_weights()
        self._zero_state()

    def _fill_weights(self) -> None:
        graph, config = self.plan.graph, self.config
        if config.model.train_from_scratch:
            for layout in graph.layouts.values():
                with self._master(layout) as master:
                    init_weights(graph.model, layout, views(master, layout), config.seed)
            return
        loader = WeightLoader(config.model.model_name_or_path, graph.model)
        for layout in graph.layouts.values():
            with self._master(layout) as master:
                loader.fill(layout, views(master, layout))
        loader.load_buffers()

    @contextmanager
    def _master(self, layout: UnitLayout) -> Iterator[torch.Tensor]:
        """Yield room for a unit's fp32 weights, zeroed; afterwards they are in its blocks."""
        weight, low = weight_key(layout.name), state_key(layout.name, "low")
        with self.store.acquire(weight, "ram", "w") as lease:
            if not weight_is_split(self.plan.graph):
                yield lease.tensor.zero_()
            else:
                nbytes = round_up(4 * layout.num_elements, PAGE_BYTES)
                self.store.reserve("ram", nbytes)
                master = torch.zeros(layout.num_elements)
                yield master
                self._encode(master, lease.tensor, low)
                del master
                self.store.reserve("ram", -nbytes)
        self._leave(weight, low)

    def _encode(self, master: torch.Tensor, high: torch.Tensor, low: str) -> None:
        if low not in self.plan.program.blocks:  # frozen weights are never updated and need no low half
            encode(master, high, torch.empty(master.shape, dtype=torch.int16))
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
        return StepEngine(
            self.store,
            plan.graph,
            plan.trace,
            plan.program,
            plan.placement.homes,
            plan.optimizer,
            device=plan.device,
            order=self.config.advanced.micro_batch_order,
            segments=lambda layout: build_segments(layout, table.weight_decay, table.weight_decay_exclude),
            max_grad_norm=table.max_grad_norm,
            seed=self.config.seed,
        )

    # -- afterwards --------------------------------------------------------------------------------------------

    @contextmanager
    def master_weights(self, layout: UnitLayout) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield a unit's fp32 master weights by full parameter name; read-only."""
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

    def export(self, folder: Path) -> Path:
        """Write the Hugging Face folder of the trained model, unit by unit."""
        self.store.set_schedule(None)
        table = self.config.export
        dtype = self.plan.graph.dtype if table.dtype == "auto" else getattr(torch, table.dtype)
        return export_model(
            self.plan.graph,
            self.master_weights,
            folder,
            dtype=dtype,
            max_shard_nbytes=table.max_shard_size,
            copy_from=Path(self.config.model.tokenizer_name_or_path or self.config.model.model_name_or_path),
        )


def make_tiers(config: RunConfig, plan: Plan) -> list[Tier]:
    """Return the tiers of a run, fast to slow, with the planned capacities."""
    tiers: list[Tier] = []
    for name, budget in plan.budgets_by_tier.items():
        if name == "gpu":
            tiers.append(GpuTier(budget.capacity_bytes, device=str(plan.device)))
        elif name == "ram":
            tiers.append(RamTier(budget.capacity_bytes, pin_memory=plan.device.type == "cuda"))
        else:
            paths = [str(table.path) for table in config.tiers.nvme]
            tiers.append(NvmeTier(paths, budget.capacity_bytes, rates=nvme_rates(config)))
    return tiers
