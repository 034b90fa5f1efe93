"""The open store of a run, with its weights and optimizer state.

Used by training steps and by commands that only run forward passes (``scoring``, ``generation``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.base.progress import Activity
from megatrain.base.timeline import Timeline
from megatrain.checkpoint.document import Checkpoint
from megatrain.converters.adapters import AdapterError, adapters_of
from megatrain.engine.device.environment import consume_cublas_setting, deterministic_kernels, explain_device_errors
from megatrain.engine.device.flash import flash_kernels
from megatrain.engine.device.freed_memory import keep_freed_memory, return_freed_memory
from megatrain.engine.step import StepEngine
from megatrain.models.folder import ModelFolderError
from megatrain.models.hub import fetch_weights, missing_files
from megatrain.models.load import WeightLoader, open_loader
from megatrain.plan.plan import Plan
from megatrain.plan.process import most_resident_bytes
from megatrain.plan.stepping import model_for_steps, step_recipe
from megatrain.plan.tiers import (
    check_drives,
    claim_folders,
    open_store,
    register_blocks,
    register_transient_blocks,
    reserve,
    set_schedule,
    unregister_transient_blocks,
)
from megatrain.ranks.collectives import make_collectives
from megatrain.ranks.group import RankGroup
from megatrain.training.weights import AdaptedWeights, RandomWeights, Weights, WeightSource
from tiered import RamTier, TieredStore
from tiered.units import format_duration, format_size

__all__ = ["OpenRun", "StartWeights", "inspect_weights", "open_run", "open_weights"]

_MIN_REPORTED_S = 1.0


@contextmanager
def open_run(
    plan: Plan,
    *,
    on_message: Callable[[str], None] = lambda text: None,
    activity: Activity | None = None,
    group: RankGroup | None = None,
    source: WeightSource | None = None,
    weights: StartWeights | None = None,
) -> Iterator[OpenRun]:
    """Return a context that opens a plan's store, which has no blocks yet, and closes the store on exit.

    Args:
        on_message: Called with messages for the user.
        activity: Progress shared with a live view. Default: not shared.
        group: The ranks of the run, or None for a single process.
        source: Source of the weights of a new run. Default: the source in ``weights``.
        weights: Result of ``open_weights``. If None, ``open_run`` calls ``open_weights``.

    Raises:
        ModelFolderError: The weights do not fit the model.
        DoesNotFitError: A drive has too little free space.
        LockedError: Another run uses an NVMe path.
    """
    run, group, activity = plan.run, group or RankGroup.single(), activity or Activity()
    # Run all checks that can reject the run before anything is allocated.
    weights = weights or open_weights(plan, on_message)
    if weights.loader is not None and weights.loader.origin.passthrough.names:
        on_message(str(weights.loader.origin.passthrough))
    has_all_ranks = run.world.size == group.world.size  # False if only one of the run's ranks is inspected
    if has_all_ranks:
        group.run_host_leaders_first(lambda: claim_folders(plan) if group.world.local_rank == 0 else None)
    check_drives(plan)
    if has_all_ranks:
        group.wait_for_all()  # a store removes files of dead runs, but another rank's check may still be counting them
    timeline = Timeline()
    # Each rank reports on its own drives, so the other ranks send their notices to rank 0.
    on_notice = on_message if group.world.is_first else group.notify
    # Enter `explain_device_errors` first, so that it also covers errors that are raised while the store closes.
    with (
        explain_device_errors(),
        deterministic_kernels(plan.device, type(plan.graph.model).__name__, enabled=run.is_deterministic),
        consume_cublas_setting(plan.device),
        flash_kernels(run.flash, checked_device=plan.device if run.is_deterministic else None),
        open_store(plan, on_notice=on_notice, on_event=timeline.on_event, loader=weights.loader) as store,
        _keep_freed_memory(plan, store),
    ):
        timeline.read_usage = lambda: {name: tier.used_bytes for name, tier in store.stats().tiers.items()}
        blocks = Weights(store, plan, source or weights.source, activity, on_message, group)
        yield OpenRun(plan, store, blocks, timeline, activity, on_message)


@contextmanager
def _keep_freed_memory(plan: Plan, store: TieredStore) -> Iterator[None]:
    if plan.device.type != "cpu":
        return_freed_memory()  # with a GPU, no large computation on the host could reuse freed memory
        yield
        return
    with keep_freed_memory(store, most_resident_bytes(plan)):
        yield


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Initial weights of a run, whose headers, sizes and names have been checked.

    Attributes:
        loader: Loader of the model's folder, or None for random weights.
        source: Source of all weights, including adapters.
    """

    loader: WeightLoader | None
    source: WeightSource


def open_weights(plan: Plan, on_message: Callable[[str], None] = lambda text: None) -> StartWeights:
    """Check the headers, sizes and names of a run's weights without reading them. Download a missing hub model.

    Args:
        on_message: Called after each downloaded file.

    Raises:
        ModelFolderError: The weights do not fit the model.
        AdapterError: The adapter's folder does not fit the model.
    """
    graph, model, seed = plan.graph, plan.run.model, plan.run.seed
    if model.table.train_from_scratch:
        return StartWeights(None, RandomWeights(graph.model, seed))
    if model.hub is not None:
        fetch_weights(model.hub, lambda file: on_message(str(file)))
    loader = open_loader(model.folder, graph)
    if adapters_of(graph) is None:
        return StartWeights(loader, loader)
    folder = None if model.lora is None else model.lora.adapter_name_or_path
    return StartWeights(loader, AdaptedWeights(graph, loader, seed, folder))


def inspect_weights(plan: Plan) -> tuple[str, Exception | None]:
    """Return a message about tensors that an export copies, and the error raised by opening the weights, or None.

    A plan needs no weights, so a folder without weights causes neither an error nor a download.
    """
    model = plan.run.model
    folder = Path(model.folder)
    if model.hub is None:
        has_files = any(folder.glob("*.safetensors*"))
    else:
        has_files = not missing_files(model.hub)
    if model.table.train_from_scratch or not has_files:
        return "", None
    try:
        loader = open_weights(plan).loader
    except (ModelFolderError, AdapterError, OSError) as error:
        return "", error
    assert loader is not None
    passthrough = loader.origin.passthrough
    return (f"{passthrough}; they take no memory" if passthrough.names else ""), None


class OpenRun:
    """The open store of a plan. Used by one thread.

    Args:
        store: Store without blocks.
        on_message: Called with messages for the user.

    Attributes:
        store: Store, which contains all blocks after ``load``.
        engine: Latest engine from ``make_engine``, or None before the first call and after ``end_steps``.
    """

    def __init__(
        self,
        plan: Plan,
        store: TieredStore,
        weights: Weights,
        timeline: Timeline,
        activity: Activity,
        on_message: Callable[[str], None],
    ) -> None:
        self.plan, self.store, self.weights, self.timeline = plan, store, weights, timeline
        self.engine: StepEngine | None = None
        self._activity, self._on_message = activity, on_message

    def load(self, candidates: Sequence[Checkpoint] = ()) -> Checkpoint | None:
        """Load weights and optimizer state with ``Weights.load``, then reserve memory for training steps."""
        reserve(self.store, self.plan.placement.generation_bytes)
        register_blocks(self.store, self.plan, durable=True)
        checkpoint = self.weights.load(candidates)
        if isinstance(source := self.weights.source, AdaptedWeights):
            self._on_message(source.describe(checkpoint))
        # Loading uses this memory for the fp32 copy of a unit, so reserve it only after loading. Otherwise, a run that
        # fits could run out of memory while it starts.
        register_transient_blocks(self.store, self.plan)
        self._report_memory()
        return checkpoint

    def _report_memory(self) -> None:
        """Report how long it took to make RAM resident and page-locked, if it took at least a second."""
        ram = self.store.tier("ram")
        if not isinstance(ram, RamTier) or ram.populate_s + ram.pin_s < _MIN_REPORTED_S:
            return
        pin_text = f", page-locked in {format_duration(ram.pin_s)}" if ram.pin_s >= _MIN_REPORTED_S / 10 else ""
        self._on_message(
            f"RAM: {format_size(ram.made_bytes)} made resident in {format_duration(ram.populate_s)}{pin_text}"
        )

    def make_engine(self, num_steps: int, *, first_step: int = 0, num_updates: int = 0) -> StepEngine:
        """Create an engine on the loaded store, and schedule ``num_steps`` steps for the prefetcher.

        Args:
            num_steps: Number of consecutive steps.
            first_step: Number of finished steps.
            num_updates: Number of finished steps that updated the weights.
        """
        plan = self.plan
        self.schedule_steps(first_step, num_steps)
        # `make_collectives` uses the default group of torch.distributed, which this rank has already joined.
        engine = StepEngine(
            self.store,
            model_for_steps(plan),
            step_recipe(plan),
            collectives=make_collectives(plan.run.world, plan.program.compute_tier),
            timeline=self.timeline,
            activity=self._activity,
        )
        engine.num_updates = num_updates
        self.engine = engine
        return engine

    def schedule_steps(self, first_step: int, num_steps: int) -> None:
        """Schedule steps for the prefetcher. The first of these steps starts without a pending update."""
        schedule = self.plan.program.schedule(self.plan.placement.homes, num_steps, first_step=first_step)
        set_schedule(self.store, schedule, self.plan.run.advanced.prefetch_bytes)

    def finish_updates(self) -> None:
        """Apply the update that the last step left pending."""
        if self.engine is not None:
            self.engine.finish_updates()

    def end_steps(self) -> None:
        """Apply the pending update and release the memory of training steps. Keep weights and optimizer state."""
        self.finish_updates()
        self.engine = None
        self.store.set_schedule(None)
        unregister_transient_blocks(self.store, self.plan)
