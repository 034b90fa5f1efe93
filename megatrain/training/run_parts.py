"""The parts of a training run after its weights are loaded: state, loggers, evaluator, saver and signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.base.observer import Observers, RunObserver
from megatrain.checkpoint.copier import Copier, open_copier
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.listing import ignore_damage, read_checkpoints
from megatrain.checkpoint.locations import describe_drives
from megatrain.checkpoint.saver import Saver
from megatrain.checkpoint.state import RunState
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from megatrain.config.resolved import write_resolved
from megatrain.plan.plan import Plan
from megatrain.ranks.group import RankGroup
from megatrain.ranks.record import Consensus, StepRecord
from megatrain.run.loggers import METRICS_NAME, last_evaluations, make_loggers
from megatrain.run.record import write_plan
from megatrain.run.signals import RunSignals
from megatrain.tasks.evaluation import Evaluator
from megatrain.tasks.registry import task_class
from megatrain.tasks.task import PrepareContext
from megatrain.training.open_run import OpenRun
from megatrain.training.preparation import Preparation
from megatrain.training.start import RunStart
from megatrain.training.weights import saved_shards
from tiered import TieredStore

__all__ = ["RunParts", "load_parts", "make_copier"]


@dataclass(frozen=True, slots=True)
class RunParts:
    """All objects that a training loop uses, from the end of loading until the store closes.

    Attributes:
        preparation: Plan, settings, batches, learning rates and evaluation sets.
        runtime: Open store with the loaded weights.
        observer: Observer that calls the run's observer and then the loggers.
        loggers: Observer that calls only the loggers.
        state: State of the run before the first step of this start.
        is_resumed: Whether the state comes from a checkpoint.
    """

    preparation: Preparation
    runtime: OpenRun
    observer: RunObserver
    loggers: Observers
    signals: RunSignals
    consensus: Consensus
    evaluator: Evaluator
    copier: Copier
    saver: Saver
    state: RunState
    is_resumed: bool


@contextmanager
def load_parts(
    preparation: Preparation, runtime: OpenRun, observer: RunObserver, start: RunStart, candidates: Sequence[Checkpoint]
) -> Iterator[RunParts]:
    """Load the weights and the state of a run, and create its parts. On exit, close the loggers and the copier.

    Args:
        runtime: Store without blocks.
        candidates: Result of ``start.find_candidates``.
    """
    plan, run, group, activity = preparation.plan, preparation.run, preparation.group, preparation.activity
    checkpoint = runtime.load(candidates)
    start.report_loaded(checkpoint, candidates)
    for line in describe_drives(run.checkpoint, plan.checkpoint.drive_bytes * run.world.local_size):
        observer.on_message(line)
    # The stack exits before the store closes. The loggers close first, then the copier, which reads checkpoints.
    with ExitStack() as stack:
        copier = stack.enter_context(closing(make_copier(plan, group, observer.on_message)))
        last_saved = None
        if checkpoint is not None and checkpoint.is_in_stores(run.output_dir, run.world.size):
            last_saved = checkpoint
            copier.offer(last_saved)  # an earlier start may have left its copy incomplete
        step = None if checkpoint is None else checkpoint.state.step
        loggers, evaluations = [], {}
        if group.world.is_first:
            write_resolved(preparation.settings.config)
            write_plan(plan, step)
            # Read the evaluations before the loggers start, because a logger removes later steps from the file.
            evaluations = {} if step is None else last_evaluations(run.output_dir / METRICS_NAME, step)
            loggers = make_loggers(preparation.settings.logging, step, observer.on_message)
        for logger in loggers:
            stack.enter_context(logger)
        observers = Observers([observer, *loggers])
        evaluations = group.broadcast(evaluations)
        record = {**runtime.weights.passthrough, **_prepare_task(preparation, runtime, observer, checkpoint)}
        state, best = start.make_state(checkpoint, candidates, record)
        signals = RunSignals(
            stops_after_step=run.checkpoint.table.save_on_signal,
            # The saver's wait for space does not count, because the saver checks for stops and may still save.
            is_stuck=lambda: runtime.store.is_paused,
            activity=activity,
        )
        consensus = Consensus(
            group, lambda: StepRecord(signals.stop_requested, signals.save_requested, signals.is_hung_up)
        )
        evaluator = Evaluator(
            preparation.settings.evaluation,
            plan,
            runtime.store,
            preparation.evaluation_sets,
            observers,
            timeline=runtime.timeline,
            activity=activity,
            steps_per_epoch=preparation.loader.steps_per_epoch,
            max_steps=state.max_steps,
            should_stop=consensus.agree_to_stop,
            resumed_evaluations=evaluations,
            plans=preparation.evaluation_plans,
            samplers=preparation.samplers,
        )
        saver = Saver(
            run.checkpoint,
            runtime.store,
            _make_writer(
                plan,
                runtime.store,
                group,
                observers.on_message,
                checkpoint=checkpoint,
                best=best,
                remote_save_number=copier.remote_save_number,
            ),
            observers,
            copier,
            activity,
            should_stop=lambda: signals.stop_requested,
            written_bytes=plan.checkpoint.output_dir_bytes,
            steps_per_epoch=preparation.loader.steps_per_epoch,
            saved=last_saved,
        )
        activity.is_paused = lambda: saver.is_waiting or runtime.store.is_paused
        yield RunParts(
            preparation=preparation,
            runtime=runtime,
            observer=observers,
            loggers=Observers(loggers),
            signals=signals,
            consensus=consensus,
            evaluator=evaluator,
            copier=copier,
            saver=saver,
            state=state,
            is_resumed=checkpoint is not None,
        )


def _prepare_task(
    preparation: Preparation, runtime: OpenRun, observer: RunObserver, checkpoint: Checkpoint | None
) -> Mapping[str, Any]:
    """Run the task's preparation for the first step. Return the record that the task adds to checkpoints."""
    context = PrepareContext(
        preparation.plan,
        runtime.store,
        [preparation.loader, *(dataset.loader for dataset in preparation.evaluation_sets)],
        None if checkpoint is None else checkpoint.state.model,
        preparation.activity,
        observer.on_message,
        preparation.group,
    )
    return task_class(preparation.run.task)(preparation.run.objective.loss).prepare(context)


def make_copier(plan: Plan, group: RankGroup, on_message: Callable[[str], None]) -> Copier:
    """Create the copier for all ranks' checkpoints. This is a collective.

    Args:
        on_message: Called with messages for the user.
    """
    drive_bytes = sum(group.gather(plan.checkpoint.drive_bytes))  # homes may differ between ranks
    return open_copier(plan.run.checkpoint, drive_bytes, on_message, plan.run.world.rank, group.gather)


def _make_writer(
    plan: Plan,
    store: TieredStore,
    group: RankGroup,
    on_message: Callable[[str], None],
    *,
    checkpoint: Checkpoint | None,
    best: Checkpoint | None,
    remote_save_number: int = 0,
) -> CheckpointWriter:
    """Create this rank's checkpoint writer, which cooperates with the other ranks' writers.

    Args:
        on_message: Called with messages for the user.
        checkpoint: Checkpoint from which the run resumes, or None for a new run.
        best: Checkpoint of the best evaluation so far, or None. It is never pruned.
        remote_save_number: Largest save number among the copies at the run's URL, or 0.
    """
    run = plan.run
    path = run.output_dir / CHECKPOINTS_NAME
    folder = CheckpointFolder(path, run.world.rank, group.gather, run.checkpoint.table.save_total_limit, on_message)
    folder.best = best
    copies = folder.run_on_first_rank(lambda: read_checkpoints(run.output_dir / COPIES_NAME, ignore_damage))
    return CheckpointWriter(
        folder,
        store,
        lanes=run.num_lanes,
        elements={key: place.num_elements for key, place in saved_shards(plan).items()},
        is_past=lambda each: (
            checkpoint is None or not checkpoint.belongs_to(run.output_dir) or each.is_not_newer_than(checkpoint)
        ),
        save_number=max(remote_save_number, *(copy.save_number for copy in copies), 0),
        is_new_run=checkpoint is None,
    )
