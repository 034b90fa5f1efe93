"""A planned run brought to life: the store with its tiers and blocks, weights loaded, the engine ready."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.checkpoint.catalog import search_paths
from megatrain.checkpoint.drive_folders import write_readme
from megatrain.checkpoint.resume import Checkpoint
from megatrain.checkpoint.state import CheckpointError
from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.engine.environment import deterministic_kernels, device_errors_explained
from megatrain.engine.objective import Objective
from megatrain.engine.program import state_key, weight_key
from megatrain.engine.step import StepEngine, weight_is_split
from megatrain.engine.visit import LayerCompiler
from megatrain.models.carried import CARRIED_CHECKSUM
from megatrain.models.export import export_model
from megatrain.models.initialize import init_weights
from megatrain.models.layout import UnitLayout, views
from megatrain.models.liger import LigerCrossEntropy, apply_liger_kernels
from megatrain.models.load import WeightLoader
from megatrain.optim.factory import segment_builder
from megatrain.plan.machine import existing_parent, own_drive_bytes
from megatrain.plan.placement import DURABLE_KINDS, MIN_GENERATIONS, DoesNotFitError
from megatrain.plan.plan import Plan
from megatrain.precision import decode, encode, high_half
from megatrain.run.activity import Activity
from megatrain.run.timeline import Timeline
from tiered import LRU, Belady, GenerationReader, GpuTier, NvmeTier, RamTier, TieredStore
from tiered.errors import CorruptBlockError, GenerationError
from tiered.ext import files_below, plan_chunks
from tiered.units import PAGE_BYTES, format_size, round_up

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.config.schema import RunConfig
    from tiered import Schedule, Tier


class Session:
    """Owns the store of one run. A context manager: leaving it closes the store.

    Args:
        on_notice: told what a person should know about the drives, from any thread.

    Attributes:
        store: holds all blocks.
        timeline: of the steps during which it is on.
        activity: what is being done now.
        kept: what ``RunState.model`` is to tell of tensors that stay in the model's folder; known after ``prepare``.

    Raises:
        ModelFolderError: the weights do not fit the model.
        DoesNotFitError: a drive has too little free space.
        LockedError: another run uses an NVMe path. Nothing is allocated before these are known.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        on_notice: Callable[[str], None] | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.activity = activity or Activity()
        self._on_notice = on_notice or (lambda text: None)
        self.timeline = Timeline()
        self._contexts = ExitStack()
        self._engine: StepEngine | None = None
        self._layout_numbers = {name: number for number, name in enumerate(plan.graph.layouts)}
        self._weights: WeightLoader | None = None
        self.kept: Mapping[str, Any] = {}
        if not config.model.train_from_scratch:
            self._weights = WeightLoader(config.model.model_name_or_path, plan.graph.model)
            if self._weights.origin.carried.names:
                self._on_notice(str(self._weights.origin.carried))
        if config.model.use_liger_kernel:
            apply_liger_kernels(plan.graph.model, with_mlps=not config.model.mlp_rows)
        check_drives(config, plan)
        policy = LRU() if config.advanced.eviction_policy == "lru" else Belady()
        self._tiers = make_tiers(config, plan, on_notice)
        try:
            self.store = TieredStore(
                self._tiers,
                policy,
                path=str(config.output_dir / CHECKPOINTS_NAME),
                keep_generations=config.checkpoint.save_total_limit,
                on_full=config.tiers.on_disk_full,
                on_notice=on_notice,
                on_event=self.timeline.on_event,
            )
        except BaseException:
            for tier in self._tiers:
                tier.close()
            raise
        for table in config.tiers.nvme:
            write_readme(table.path, config.output_dir / CHECKPOINTS_NAME)

    def __enter__(self) -> Session:
        model_type = type(self.plan.graph.model).__name__
        is_deterministic = self.config.full_determinism
        with ExitStack() as contexts:
            contexts.enter_context(device_errors_explained())
            contexts.enter_context(deterministic_kernels(self.plan.device, model_type, enabled=is_deterministic))
            contexts.push(self.store)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)

    # -- before training ---------------------------------------------------------------------------------------

    def prepare(self, candidates: Sequence[Checkpoint] = ()) -> Checkpoint | None:
        """Bring in weights and optimizer state unit by unit, then reserve what only steps need.

        The fp32 copy of a unit that is on its way in takes the room that its gradient has in a step: so a run that
        fits also starts.

        Args:
            candidates: checkpoints to start from, best first; one that is damaged is named and passed over.

        Returns:
            The checkpoint that the run goes on from; None: it starts from the model's weights.

        Raises:
            ModelFolderError: the weights cannot be had.
            InitializationError: the weights cannot be had.
            CheckpointError: no candidate is whole, or the model's folder no longer keeps the tensors that the run began
                with.
        """
        for tier, nbytes in self.plan.placement.generation_bytes.items():
            if nbytes:
                self.store.reserve(tier, nbytes)
        self._register(durable=True)
        checkpoint = self._load(candidates) if candidates else None
        self.kept = self._describe_carried(checkpoint)
        if checkpoint is None:
            self._fill_weights()
            self._zero_state()
        elif self._weights is not None:
            self._weights.load_buffers()
        self._register(durable=False)
        for tier, nbytes in self.plan.placement.workspace_bytes.items():
            if nbytes:
                self.store.reserve(tier, nbytes)
        return checkpoint

    def _describe_carried(self, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
        if self._weights is None or not self._weights.origin.carried.names:
            return {}
        kept = self._weights.origin.carried
        record = kept.record()
        before = {} if checkpoint is None else checkpoint.state.model
        if before.get(CARRIED_CHECKSUM, record[CARRIED_CHECKSUM]) != record[CARRIED_CHECKSUM]:
            raise CheckpointError(
                f"{kept.folder.path}: {kept}, but they are no longer those that {checkpoint} began with. Bring the "
                "original files back, or name another output_dir"
            )
        return record

    def _load(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        problem: Exception | None = None
        for checkpoint in candidates:
            try:
                self._load_one(checkpoint)
            except (CorruptBlockError, GenerationError) as error:
                problem = problem or error
                self._on_notice(f"{checkpoint} cannot be used: {error}")
            else:
                return checkpoint
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in '{candidates[0].path}' can be used; the newest: {problem}"
        )

    def _load_one(self, checkpoint: Checkpoint) -> None:
        self.activity.begin("loading the checkpoint")
        if checkpoint.is_own and not checkpoint.is_copy:
            self.store.load(checkpoint.generation)
            return
        reader = GenerationReader(checkpoint.path, checkpoint.generation, search_paths(checkpoint.path))
        for key, block in self.plan.program.blocks.items():
            if block.kind in DURABLE_KINDS:
                with self.store.acquire(key, "ram", "w") as lease:
                    reader.read(key, lease.tensor)
                self._leave(key)

    def _register(self, *, durable: bool) -> None:
        for block in self.plan.program.blocks.values():
            if (block.kind in DURABLE_KINDS) == durable:
                home = self.plan.placement.homes[block.key]
                self.store.register(block.key, (block.num_elements,), block.dtype, home=home, durable=durable)

    def _fill_weights(self) -> None:
        graph, config = self.plan.graph, self.config
        self.activity.begin("making random weights" if self._weights is None else "loading weights")
        num_layouts = len(graph.layouts)
        if self._weights is None:
            for number, layout in enumerate(graph.layouts.values()):
                self.activity.come_to(number, unit=layout.name, num_parts=num_layouts)
                with self._master(layout) as master:
                    init_weights(graph.model, layout, views(master, layout), config.seed)
            return
        for number, layout in enumerate(graph.layouts.values()):
            self.activity.come_to(number, unit=layout.name, num_parts=num_layouts)
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

    def schedule(self, first_step: int, num_steps: int) -> None:
        """Tell the prefetcher that ``num_steps`` steps follow, the first of which finds nothing to update."""
        self.set_schedule(self.plan.program.schedule(self.plan.placement.homes, num_steps, first_step=first_step))

    def set_schedule(self, schedule: Schedule) -> None:
        """Tell the prefetcher what follows, to be fetched as far ahead as the config says."""
        prefetch = self.config.advanced.prefetch
        self.store.set_schedule(None)
        self.store.advance(schedule.start - 1)  # the ticks of what was before are no place in this one
        self.store.set_schedule(schedule, lookahead_bytes=prefetch if isinstance(prefetch, int) else None)

    def make_engine(self, num_steps: int, *, first_step: int = 0, num_updates: int = 0) -> StepEngine:
        """Return the engine, with the prefetcher told the schedule of ``num_steps`` steps.

        Args:
            first_step: steps done before.
            num_updates: those of them whose gradient was used.
        """
        plan, table = self.plan, self.config.optimizer
        self.schedule(first_step, num_steps)
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
            objective=Objective.of(self.config.training),
            compiler=LayerCompiler.of(self.config.model),
            cross_entropy=LigerCrossEntropy.of(self.config.model),
            timeline=self.timeline,
            device_optimizer=plan.device_optimizer,
            activity=self.activity,
        )
        self._engine.num_updates = num_updates
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
        self.activity.come_to(self._layout_numbers[layout.name], unit=layout.name, num_parts=len(self._layout_numbers))
        with self._room_for_master(layout), self.master_weights(layout) as weights:
            yield weights

    def export(self, folder: Path, record: Mapping[str, int] | None = None) -> Path:
        """Write the Hugging Face folder of the trained model, unit by unit. No step can follow.

        Args:
            record: what else to write into the folder's record.
        """
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
            record=record,
            origin=None if self._weights is None else self._weights.origin,
            carried_checksum=self.kept.get(CARRIED_CHECKSUM),
        )


def make_tiers(config: RunConfig, plan: Plan, on_notice: Callable[[str], None] | None = None) -> list[Tier]:
    """Return the tiers of a run, fast to slow, with the planned capacities."""
    tiers: list[Tier] = []
    for name, budget in plan.budgets_by_tier.items():
        if name == "gpu":
            alignment = budget.slot_bytes(1)
            tiers.append(GpuTier(budget.capacity_bytes, device=str(plan.device), alignment_bytes=alignment))
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
                    past_ram=bool(budget.direct_to),
                    verify=config.tiers.verify,
                    on_full=config.tiers.on_disk_full,
                    on_notice=on_notice,
                    max_written_bytes=[table.max_written for table in config.tiers.nvme],
                )
            )
    return tiers


def check_drives(config: RunConfig, plan: Plan) -> None:
    """Refuse drives that have less free space than the plan puts on them; files of earlier runs are free space.

    On the drive of ``output_dir`` ``checkpoint.min_free_disk`` counts as well: without it no save would ever begin.

    Raises:
        DoesNotFitError: with the bytes that the drive would need.
    """
    table, checkpoints = config.checkpoint, config.output_dir / CHECKPOINTS_NAME
    generations = max(table.save_total_limit, MIN_GENERATIONS) if table.is_on else 0
    needs = _drive_needs(config, plan, generations)
    owned = {each.path: own_drive_bytes(each.path, checkpoints) for each in config.tiers.nvme}
    own_files = [*files_below(checkpoints), *files_below(config.output_dir / COPIES_NAME)]
    sizes = {status.st_ino: status.st_blocks * 512 for status in (file.lstat() for file in own_files)}
    owned[checkpoints] = sum(sizes.values())  # copies may be links to the same files
    drives: dict[int, list[Path]] = {}
    for path in needs:
        drives.setdefault(existing_parent(path).stat().st_dev, []).append(path)
    for paths in drives.values():
        have = shutil.disk_usage(existing_parent(paths[0])).free + sum(owned[path] for path in paths)
        need = sum(needs[path] for path in paths)
        if need > have:
            tier = "output_dir" if paths == [checkpoints] else "nvme"
            advice = f"That is the free space of the drive of {paths[0]}. Free some, or name another drive."
            on_drives = any(path != checkpoints for path in paths)
            if generations and (on_drives or plan.checkpoint_bytes_in_output_dir):
                advice += f" {generations} checkpoints are part of it: lower checkpoint.save_total_limit."
            if checkpoints in paths and plan.copies and plan.checkpoint_bytes_on_drives:
                size = format_size(plan.copies * plan.checkpoint_bytes_on_drives)
                advice += f" {size} of it are for whole copies: checkpoint.save_copy."
            if checkpoints in paths and table.min_free_disk:
                advice += f" {format_size(table.min_free_disk)} of it stay free: checkpoint.min_free_disk."
            raise DoesNotFitError(tier, need, have, advice)


def _drive_needs(config: RunConfig, plan: Plan, generations: int) -> Counter[Path]:
    """Return path -> bytes that the run may come to hold there."""
    rates, paths = tuple(plan.nvme_rates), [table.path for table in config.tiers.nvme]
    needs = Counter[Path]()
    for key, block in plan.program.blocks.items():
        if plan.placement.homes[key] == "nvme":
            cut = plan_chunks(block.nbytes, rates, config.advanced.file_size)
            sets = 1 + (generations if block.kind in DURABLE_KINDS else 0)
            for path_index, count in Counter(cut.path_of_chunk).items():
                needs[paths[path_index]] += sets * cut.chunk_bytes * count
    if generations:
        in_output_dir = generations * plan.checkpoint_bytes_in_output_dir + config.checkpoint.min_free_disk
        in_output_dir += plan.copies * plan.checkpoint_bytes_on_drives
        needs[config.output_dir / CHECKPOINTS_NAME] += in_output_dir
    return needs
