"""Training runs: load, train, evaluate, save, export."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, FINAL_NAME
from megatrain.base.observer import Observers, RunInfo, RunObserver, RunSummary
from megatrain.base.progress import Activity
from megatrain.base.timeline import TIMELINE_NAME
from megatrain.checkpoint.best import Best
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.locations import describe_drives
from megatrain.checkpoint.saver import Saver
from megatrain.checkpoint.state import RunState
from megatrain.config.resolved import (
    config_lines,
    with_commit,
    write_resolved,
)
from megatrain.config.schema import RunConfig
from megatrain.data.loader import BatchLoader
from megatrain.models.export import RECORD_FILE
from megatrain.optim.lr import warmup_notice
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import check_same
from megatrain.ranks.group import RankGroup
from megatrain.run.folder import LockKeeper, RunFolder, open_to_all
from megatrain.run.loggers import METRICS_NAME, last_evaluations, make_loggers
from megatrain.run.record import write_plan, write_summary
from megatrain.run.signals import RunSignals
from megatrain.run.status import StatusWriter
from megatrain.tasks.evaluation import Evaluator
from megatrain.tasks.registry import task_class
from megatrain.tasks.task import PrepareContext
from megatrain.training.consensus import Consensus, check_ranks_agree
from megatrain.training.final import FinalExport
from megatrain.training.open_run import OpenRun, StartWeights, open_run
from megatrain.training.prepare import CheckResult, Preparation, with_choices
from megatrain.training.resolve import resolve
from megatrain.training.saving import make_copier, make_writer
from megatrain.training.start import RunStart, with_kept_rules
from megatrain.training.step_report import StepMeter, add_by_key, link_bytes
from megatrain.training.weights import ExportStopped
from tiered import StoreStats

__all__ = ["Trainer", "plan_for_rank"]


def plan_for_rank(config: RunConfig, group: RankGroup) -> Plan:
    """Plan a run for this rank. This is a collective."""
    run = with_kept_rules(resolve(config))
    return plan_run(run) if group.world.is_single else plan_together(replace(run, world=group.world), group.gather)


class Trainer:
    """One run of one config. Nothing is allocated or written before ``train`` or ``open`` is called.

    ``train`` executes the run from its start, or from its newest checkpoint, to its end. Callers that control the steps
    themselves use ``open``::

        with trainer.open() as opened:
            opened.load()
            engine = opened.make_engine(num_steps=3)
            engine.step(micro_batches, number=0, lr=1e-3)

    Args:
        observer: Receives every step, evaluation, checkpoint and message. None discards them.
        plan: Plan of this config, if there already is one.
        activity: Progress shared with a live view. Default: not shared.
        allow_config_change: Whether to resume a checkpoint even if config changes alter results.
        exit_code_of: Returns the process's exit code after an error or a summary, for ``status.json``.
        group: The ranks of the run, or None for a single process.

    Attributes:
        config: The config, with the planner's choices for open keys and with the commit of a hub model.
        plan: Plan with the homes of all blocks and the traffic of each step.
        run: Resolved config from which the plan was made.
        prepared: Weights, rows, evaluation sets and learning rates. Each is created when it is first used.
        opened: The run's open store, during ``train``.
        state: Progress of the run, during ``train``.

    Raises:
        DoesNotFitError: The run does not fit in its tiers.
        ConfigError: data.max_length exceeds the model's positions.
        ModelFolderError: The model is unusable.
        UnsupportedModelError: The model is unusable.
        TypeError: ``config`` is a file name.
    """

    opened: OpenRun
    state: RunState

    def __init__(
        self,
        config: RunConfig,
        *,
        observer: RunObserver | None = None,
        plan: Plan | None = None,
        activity: Activity | None = None,
        allow_config_change: bool = False,
        exit_code_of: Callable[[BaseException | RunSummary], int] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        if isinstance(config, str | os.PathLike):
            text = f"Trainer takes a config, not the name of its file: Trainer(megatrain.load_config({str(config)!r}))"
            raise TypeError(text)
        self.group = group or RankGroup.single()
        self.plan = plan or plan_for_rank(config, self.group)
        self.run = self.plan.run
        self.config = with_commit(with_choices(config, self.run), self.run.model.hub)
        self.observer = observer or RunObserver()
        self.activity = activity or Activity()
        self.prepared = self._preparation()
        self._allow_config_change = allow_config_change
        self._exit_code_of = exit_code_of
        self._saver: Saver | None = None

    # -- the whole run -------------------------------------------------------------------------------------------------

    def train(self) -> RunSummary:
        """Train from the start, or from the newest checkpoint, to the end. Then write ``output_dir/final``.

        All predictable errors are raised before the first step, and most of them before anything is written to
        ``output_dir``.

        Returns:
            Summary of the run, with ``interrupted`` set if a signal ended the run early.

        Raises:
            ScheduleError: The warm-up is longer than the run.
            DataError: The data cannot be used.
            BeyondMachineError: The tiers' sizes exceed this machine.
            ConfigError: ``output_dir`` cannot be written, or the path of a drive is not on a drive.
            ExportError: The folder for the exported model contains other files.
            CheckpointError: A checkpoint cannot be used or written.
            ConfigChangedError: Config changes would alter the results of the run that wrote the checkpoint.
            LockedError: Another run uses ``output_dir``.
            TieredError: Storage failed.
            OSError: Storage failed.
            NonFiniteGradientError: A gradient is NaN or infinite, and ``optimizer.nonfinite`` is ``stop``. The last
                checkpoint is kept.
            KeyboardInterrupt: A second signal arrived, or the run could not save after a signal.
        """
        check_ranks_agree(self.plan, dict(config_lines(self.config)), self.group)
        lines = [each.line for each in self.prepare()]
        with self._in_folder():
            self.group.wait_for_all()  # no rank may write before rank 0 owns the folder
            # Rank 0 searches for checkpoints and reports whether steps are left. An error on rank 0 ends all ranks.
            start = self.prepared.start(self.config, self.observer.on_message, allows_changes=self._allow_config_change)
            candidates, summary = self.group.broadcast(start.find() if self.group.world.is_first else ((), None))
            if summary is None:
                weights = self.prepared.weights
                self._report_start(candidates, lines)
                with self.open(weights) as self.opened, self._resumed(start, candidates):
                    summary = self._run()
                    if self.group.world.is_first:
                        write_summary(summary, self.run.output_dir)
                    for logger in self._loggers:
                        logger.on_end(summary)
            # The status says "done" only after the store is closed without an error.
            self.observer.on_end(summary)
        return summary

    def _run(self) -> RunSummary:
        """Train, evaluate and save in a loop, then export the model."""
        self._begin()
        before = self.opened.store.stats()
        with self.signals:
            self.evaluate()
            self._begin_steps()
            while self._has_steps_left and not self.consensus.stops:
                self.train_step()
                self.signals.raise_again()
                self.saver.poll()
                if self.state.step < self.state.max_steps:
                    self.evaluate()  # the checkpoint must include this evaluation
                self.save_if_due()
            self._end_steps()
            moved_outside = self._engine.moved_bytes
            self.evaluate()
            self.save_last()
            self.opened.store.wait_idle()
            moved = self.opened.store.stats() - before
            # Evaluations also move bytes between ranks.
            moved_outside = add_by_key(moved_outside, self.evaluator.moved_bytes)
            summary = partial(self._summary, moved, add_by_key(link_bytes(moved), moved_outside))
            if self.consensus.stops:
                self._finish_copies()
                return summary(interrupted=True)
            try:
                if self.group.world.is_single:
                    self.signals.steps_are_over()
                folder = self.export()
                self.copier.finish()
            except KeyboardInterrupt as stop:
                # If only this rank received the request, raise, because the other ranks wait for its next request.
                is_known_to_all = self.group.world.is_single or isinstance(stop, ExportStopped)
                if self.saver.saved_step != self.state.step or not is_known_to_all:
                    raise
                return summary(interrupted=True)  # the next start exports the model
            return summary(export_dir=folder)

    @property
    def _has_steps_left(self) -> bool:
        return self.state.step < self.state.max_steps and not self.prepared.best.is_over(Best.of_state(self.state.best))

    def is_paused(self) -> bool:
        """Return whether the run waits for the user to free space on a drive. Thread-safe."""
        return self._saver is not None and (self._saver.is_waiting or self.opened.store.is_paused)

    # -- preparation, which writes nothing to output_dir -------------------------------------------------------

    def _preparation(self) -> Preparation:
        """Return a new ``Preparation``, which creates its parts when they are first used."""
        return Preparation(
            self.plan, self.config, lambda text: self.observer.on_message(text), gather=self.group.gather
        )

    def prepare(self) -> Iterator[CheckResult]:
        """Create and check everything that the first step needs. Yield the findings. This is a collective.

        Raises:
            Exception: The first error of a part. ``train`` lists the types.
        """
        self.prepared, group = self._preparation(), self.group
        prepared = self.prepared
        prepared.limits()
        if group.world.is_first:
            prepared.folders()
        # A finished run needs neither weights nor free space, but only the data shows whether steps are left.
        if not (self.run.output_dir / FINAL_NAME / RECORD_FILE).is_file():
            _ = prepared.weights  # raises if weights are unusable or a drive is full
        self.activity.begin("reading the data")
        # The first rank of a host writes tokenized rows to the cache. The other ranks read them from the cache.
        yield from group.one_after_the_other(lambda: list(prepared.rows()))
        fingerprint = {"the fingerprint of the rows": prepared.loader.dataset.fingerprint()}
        check_same(group.gather, "data", fingerprint, "Give all ranks the same files in [[data.train]]")
        _ = prepared.learning_rate  # raises if the warm-up is longer than the run
        yield from group.one_after_the_other(prepared.evaluated_rows)
        prepared.check_evaluations()
        yield from prepared.remarks()
        yield from prepared.warnings()

    def make_loader(self, on_message: Callable[[str], None] | None = None) -> BatchLoader:
        """Read the data from the cache or tokenize it. Return the run's batches, starting with the first step.

        Args:
            on_message: Called with the reports on rows. Default: the observer.

        Raises:
            DataError: The data cannot be used, or more than ``data.max_dropped`` of a source is dropped or cut.
        """
        prepared = self._preparation()
        for each in prepared.rows():
            (on_message or self.observer.on_message)(each.line)
        return prepared.loader

    @contextmanager
    def _in_folder(self) -> Iterator[None]:
        """On rank 0, lock ``output_dir`` and keep ``status.json`` up to date inside the context."""
        if not self.group.world.is_first:
            yield
            return
        given = self.observer
        folder = RunFolder(self.run.output_dir)
        keeper = LockKeeper(folder, lambda text: self.observer.on_message(text))
        with (
            folder,
            StatusWriter(
                folder.path,
                run_name=self.run.name,
                activity=self.activity,
                is_paused=self.is_paused,
                exit_code_of=self._exit_code_of,
                on_interval=keeper.check_lock,
            ) as status,
        ):
            self.observer = Observers([keeper, given, status])
            self.group.listen(
                on_notice=self.observer.on_message, on_failure=lambda why: status.fail(str(why), why.exit_code)
            )
            try:
                yield
            finally:
                self.observer = given

    def _report_start(self, candidates: Sequence[Checkpoint], lines: Sequence[str]) -> None:
        """Report the start. Report findings about the data only if no earlier start reported them for the same data."""
        continued = candidates[0].state if candidates else None
        if self.group.world.is_first:
            self.observer.on_ready(None if continued is None else continued.step)
            spec = self.run.checkpoint
            folders = (spec.output_dir, spec.output_dir / CHECKPOINTS_NAME, spec.output_dir / COPIES_NAME, *spec.drives)
            if everyone := open_to_all(folders):
                self.observer.on_message(f"warning: {everyone}")
        if continued is None or continued.data_fingerprint != self.prepared.loader.fingerprint():
            for text in lines:
                self.observer.on_message(text)

    # -- load ----------------------------------------------------------------------------------------------------

    def open(self, weights: StartWeights | None = None) -> AbstractContextManager[OpenRun]:
        """Return a context that opens the run's store, without blocks. It raises the same errors as ``open_run``.

        Args:
            weights: Result of ``open_weights``. If None, ``open_run`` calls ``open_weights``.
        """
        return open_run(
            self.plan,
            on_message=self.observer.on_message,
            activity=self.activity,
            group=self.group,
            weights=weights,
        )

    @contextmanager
    def _resumed(self, start: RunStart, candidates: Sequence[Checkpoint]) -> Iterator[None]:
        """Load the checkpoint's weights and state. Create the saver, the evaluator and the loggers."""
        run, plan, on_message = self.run, self.plan, self.observer.on_message
        opened = self.opened
        checkpoint = opened.load(candidates)
        start.check_loaded(checkpoint, candidates)
        drive_bytes = plan.checkpoint_bytes_on_drives
        for line in describe_drives(run.checkpoint, drive_bytes * run.world.local_size):
            on_message(line)
        # The stack exits before the store closes. The loggers close first, then the copier, which reads checkpoints.
        with ExitStack() as stack:
            self.copier = stack.enter_context(closing(make_copier(plan, self.group, on_message)))
            saved = None
            if checkpoint is not None and checkpoint.is_in_stores(run.output_dir, run.world.size):
                saved = checkpoint
                self.copier.offer(saved)  # its copy may be incomplete
            step = None if checkpoint is None else checkpoint.state.step
            if self.group.world.is_first:
                write_resolved(self.config)
                write_plan(plan, step)
            # Read the evaluations before the loggers start, because a logger removes later steps from the file.
            evaluations = {}
            if step is not None and self.group.world.is_first:
                evaluations = last_evaluations(run.output_dir / METRICS_NAME, step)
            evaluations = self.group.broadcast(evaluations)
            self._loggers = make_loggers(self.prepared.logging, step, on_message) if self.group.world.is_first else []
            for logger in self._loggers:
                stack.enter_context(logger)
            self._observers = Observers([self.observer, *self._loggers])
            record = {**opened.weights.passthrough, **self._prepare(checkpoint)}
            self.state, best = start.state(checkpoint, candidates, record)
            self._is_continued = checkpoint is not None
            self.signals = RunSignals(
                stops_after_step=run.checkpoint.table.save_on_signal,
                # The saver's wait for space does not count, because the saver checks for stops and may still save.
                is_stuck=lambda: opened.store.is_paused,
                activity=self.activity,
            )
            self.consensus = Consensus(self.group, self.signals)
            self.evaluator = Evaluator(
                self.prepared.evaluation,
                plan,
                opened.store,
                self.prepared.evaluation_sets,
                self._observers,
                timeline=opened.timeline,
                activity=self.activity,
                steps_per_epoch=self.prepared.loader.steps_per_epoch,
                max_steps=self.state.max_steps,
                should_stop=self.consensus.agree_to_stop,
                before=evaluations,
                plans=self.prepared.evaluation_plans,
                samplers=self.prepared.samplers,
            )
            self._saver = self.saver = Saver(
                run.checkpoint,
                opened.store,
                make_writer(
                    plan,
                    opened.store,
                    self.group,
                    self._observers.on_message,
                    loaded=checkpoint,
                    best=best,
                    remote_save_number=self.copier.remote_save_number,
                ),
                self._observers,
                self._checkpoint,
                self.copier,
                self.activity,
                should_stop=lambda: self.signals.stop_requested,
                written_bytes=plan.checkpoint_bytes_in_output_dir,
                steps_per_epoch=self.prepared.loader.steps_per_epoch,
                saved=saved,
            )
            yield

    def _prepare(self, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
        """Run the task's preparation for the first step. Return the record that the task adds to checkpoints."""
        context = PrepareContext(
            self.plan,
            self.opened.store,
            [self.prepared.loader, *(each.loader for each in self.prepared.evaluation_sets)],
            None if checkpoint is None else checkpoint.state.model,
            self.opened.timeline,
            self.activity,
            self.observer.on_message,
            self.group,
        )
        return task_class(self.run.task)(self.run.objective.loss).prepare(context)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _schedule_to_next_stop(self) -> None:
        """Schedule steps for the prefetcher, but only until the next evaluation or checkpoint.

        An evaluation or checkpoint applies the pending update without the forward that follows it in a step. If blocks
        were prefetched for that forward, timing would determine whether the update evicts them.
        """
        self.opened.schedule_steps(self.state.step, self._num_steps_to_next_stop)

    @property
    def _num_steps_to_next_stop(self) -> int:
        step = self.state.step
        evaluates, saves = self.evaluator.next_step(step), self.saver.next_step(step)
        return (evaluates if saves is None else min(evaluates, saves)) - step

    def _begin(self) -> None:
        """Compile the kernels and report the start of the run."""
        run, plan, state = self.run, self.plan, self.state
        self.activity.begin("compiling kernels of the optimizer")
        # The first rank compiles the kernels, and the other ranks load the compiled kernels from the cache.
        self.group.one_after_the_other(plan.warm_up)
        self._observers.on_start(
            RunInfo(run.name, self.config.task, str(plan.device), run.output_dir, state.max_steps, run.batch.num_tokens)
        )
        if self._is_continued:
            self._observers.on_message(f"continuing after step {state.step} of {state.max_steps}")
        if state.step < self._warmup_steps:
            rates = self.prepared.learning_rate(0), run.optimizer.learning_rate
            self._observers.on_message(warmup_notice(*rates, self._warmup_steps, is_start=state.step == 0))
        self.opened.store.wait_idle()  # writes from loading are not part of any step

    @property
    def _warmup_steps(self) -> int:
        return int(self.state.lr_schedule["warmup_steps"]) if self.run.optimizer.has_warmup else 0

    def _begin_steps(self) -> None:
        step, opened = self.state.step, self.opened
        self._engine = opened.make_engine(
            self._num_steps_to_next_stop, first_step=step, num_updates=self.state.num_updates
        )
        self._meter = StepMeter(
            self.plan, opened.store, self._engine, steps_per_epoch=self.prepared.loader.steps_per_epoch, first_step=step
        )

    def train_step(self) -> None:
        """Run the next step and report it."""
        number = self.state.step
        self._meter.start()
        num_ticks, num_micro_batches = len(self.plan.program.ticks), self.plan.num_micro_batches
        self.activity.begin("step", num_parts=num_ticks, num_micro_batches=num_micro_batches)
        batch = next(self.prepared.loader)
        self.opened.timeline.is_on = number + 1 in self.run.trace_steps
        lr = self.prepared.learning_rate(number)
        result = self._engine.step(batch.micro_batches, number=number, lr=lr)
        usage = self._meter.stop()
        is_due = self.saver.is_due(number + 1)
        records = self.consensus.agree(usage, is_due=is_due, is_paused=self.is_paused())
        self.state = replace(
            self.state.with_loss(result.loss),
            step=number + 1,
            num_updates=self._engine.num_updates,
            epoch=batch.position.epoch,
            epoch_step=batch.position.step,
            cursor=batch.position.cursor,
            num_real_tokens=self.state.num_real_tokens + batch.num_real_tokens,
            num_trained_tokens=self.state.num_trained_tokens + result.num_trained_tokens,
            seconds=self.state.seconds + usage.step_s,
        )
        if result.left_out:
            self._observers.on_message(
                f"step {number + 1}: the gradients of {len(result.left_out)} layers are not finite, so they were not "
                f"updated: {', '.join(result.left_out)}"
            )
        self._observers.on_step(self._meter.metrics(self.state, batch, result, lr, usage, records, self._warmup_steps))

    def _end_steps(self) -> None:
        """Apply the last step's update and write the timeline."""
        if self.consensus.is_hung_up:
            self._observers.on_message("the terminal was closed (SIGHUP): stopping after this step, and saving")
        self.activity.begin("making the last update")
        self.opened.finish_updates()
        timeline = self.opened.timeline
        if timeline.spans and self.group.world.is_first:
            path = timeline.write(self.run.output_dir / TIMELINE_NAME)
            self._observers.on_message(f"timeline written to {path}: open it at https://ui.perfetto.dev")

    # -- evaluate, save, export ----------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate if an evaluation is due, after applying the pending update. The next step starts without one."""
        if self.evaluator.is_due(self.state.step) and not self.consensus.stops:
            self.opened.finish_updates()
            self.evaluator.run(self.state.step)
            self._schedule_to_next_stop()
            self._update_best()

    def _update_best(self) -> None:
        """Compare this step's evaluation with the best one. Step 0 is skipped, because it has no checkpoint."""
        step = self.state.step
        found = {name: each for name, each in self.evaluator.latest.items() if each.step == step}
        if not self.prepared.best.is_on or step == 0 or len(found) < len(self.evaluator.names):
            return
        value = self.prepared.best.value_of(found)
        # Use rank 0's value, because the last bit of a perplexity can differ between types of CPU.
        best = self.group.broadcast(self.prepared.best.after(Best.of_state(self.state.best), step, value))
        self.state = replace(self.state, best=best.to_state())
        if self.prepared.best.is_over(best):
            self._observers.on_message(
                f"stopping early: {best.num_worse} evaluations in a row were not better than step {best.step}, "
                f"{best.metric} {best.value:.4f}"
            )

    def save_if_due(self) -> None:
        """Save if the config or a signal requests a checkpoint after this step. Training continues during the write."""
        if self.consensus.stops:
            return  # ``save_last`` saves this step
        step, best = self.state.step, Best.of_state(self.state.best)
        is_best = self.prepared.best.is_kept and best is not None and best.step == step
        is_due = is_best or self.consensus.is_due(self.saver.is_due(step))
        if (is_due and self._has_steps_left) or self.consensus.saves_at_once:
            self.signals.save_requested = False
            self.activity.begin("saving")
            self.saver.save(self.state.saved_now())
            # If a stop was requested while the ranks waited for space, run no further step, like a single process.
            self.consensus.agree_to_stop()

    def save_last(self) -> None:
        """Save after the last step or before a stop. Return when all checkpoints are on disk."""
        table = self.run.checkpoint.table
        if table.save_strategy != "no" or (self.consensus.stops and table.save_on_signal):
            self.activity.begin("saving")
            self.saver.save(self.state.saved_now(), wait=True)
        self.saver.finish()
        self.saver.copy_last()

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Apply the pending update, and begin a checkpoint inside the context. The next step starts without an update.

        The next steps are scheduled after the context, because prefetched copies could affect the checkpoint's reads.
        """
        self.opened.finish_updates()
        self.opened.store.set_schedule(None)
        yield
        self._schedule_to_next_stop()

    def _finish_copies(self) -> None:
        """Wait for the copies that are due. A further stop signal cancels them."""
        try:
            if self.group.world.is_single:  # with several ranks, cancelling would leave other ranks waiting
                self.signals.steps_are_over()
            self.copier.finish()
        except KeyboardInterrupt:
            self._observers.on_message("the copy was given up: the next start of the run makes it")

    def export(self) -> Path:
        """Write the trained model as a Hugging Face folder, unit by unit. No step can follow."""
        self.activity.begin("exporting the model")
        self.opened.end_steps()  # the export needs the memory of steps for fp32 copies
        export = FinalExport(
            self.plan, self.opened.weights, self.group, self.signals, self.activity, self._observers.on_message
        )
        return export.write(self.state.step, Best.of_state(self.state.best), self.prepared.best)

    def _summary(
        self,
        moved: StoreStats,
        link_bytes: Mapping[str, int],
        *,
        export_dir: Path | None = None,
        interrupted: bool = False,
    ) -> RunSummary:
        state = self.state
        means = state.mean_losses
        return RunSummary(
            num_steps=state.step,
            first_loss=state.first_loss,
            last_loss=state.last_loss,
            mean_losses=None if means is None else means[:2],
            num_averaged=0 if means is None else means[2],
            seconds=state.seconds,
            num_real_tokens=state.num_real_tokens,
            num_trained_tokens=state.num_trained_tokens,
            tier_peak_bytes={name: tier.high_water_bytes for name, tier in moved.tiers.items()},
            tier_capacity_bytes=dict(self.plan.budgets),
            link_bytes=link_bytes,
            link_paths={name: link.path for name, link in moved.links.items()},
            written_bytes=dict(moved.written_bytes),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            export_dir=export_dir,
            interrupted=interrupted,
            saved_step=self.saver.saved_step,
            evaluations=dict(self.evaluator.latest),
            num_processes=self.run.world.size,
        )
