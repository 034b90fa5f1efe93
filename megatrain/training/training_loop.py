"""The training loop: steps, with evaluations and checkpoints between them, and the final export."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatrain.base.observer import RunInfo, RunSummary
from megatrain.base.timeline import TIMELINE_NAME
from megatrain.engine.step import StepEngine
from megatrain.optim.lr import warmup_notice
from megatrain.plan.stepping import warm_up
from megatrain.training.final import FinalExport
from megatrain.training.run_parts import RunParts
from megatrain.training.step_report import StepMeter, add_by_key, link_bytes
from megatrain.training.weights import ExportStopped
from tiered import StoreStats

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Loop that trains a run from its current state to its last step. Used once, by one thread.

    Attributes:
        state: Progress of the run, replaced after each step and each evaluation.
    """

    def __init__(self, parts: RunParts) -> None:
        self.parts, self.state = parts, parts.state
        self._preparation, self._runtime, self._observer = parts.preparation, parts.runtime, parts.observer
        self._plan, self._run = parts.preparation.plan, parts.preparation.run
        self._best = parts.preparation.settings.best
        self._group, self._activity = parts.preparation.group, parts.preparation.activity
        self._consensus, self._signals = parts.consensus, parts.signals
        self._evaluator, self._saver, self._copier = parts.evaluator, parts.saver, parts.copier

    def run(self) -> RunSummary:
        """Train, evaluate and save in a loop, then export the model. Return the summary of the run."""
        self._begin()
        start_stats = self._runtime.store.stats()
        with self._signals:
            self.evaluate()
            engine, meter = self._begin_steps()
            while self._has_steps_left and not self._consensus.must_stop:
                self.train_step(engine, meter)
                self._signals.reraise_interrupt()
                self._saver.poll()
                if self.state.step < self.state.max_steps:
                    self.evaluate()  # the checkpoint must include this evaluation
                self.save_if_due()
            self._end_steps()
            rank_bytes = engine.moved_bytes
            self.evaluate()
            self.save_last()
            self._runtime.store.wait_idle()
            stats = self._runtime.store.stats() - start_stats
            # Evaluations also move bytes between ranks.
            rank_bytes = add_by_key(rank_bytes, self._evaluator.moved_bytes)
            summary = partial(self._summary, stats, add_by_key(link_bytes(stats), rank_bytes))
            if self._consensus.must_stop:
                self._finish_copies()
                return summary(interrupted=True)
            try:
                if self._group.world.is_single:
                    self._signals.end_steps()
                folder = self.export()
                self._copier.finish()
            except KeyboardInterrupt as stop:
                # If only this rank received the signal, raise, because the others still wait for data from this rank.
                is_known_to_all = self._group.world.is_single or isinstance(stop, ExportStopped)
                if self._saver.saved_step != self.state.step or not is_known_to_all:
                    raise
                return summary(interrupted=True)  # the next start exports the model
            return summary(export_dir=folder)

    @property
    def _has_steps_left(self) -> bool:
        return self.state.step < self.state.max_steps and not self._best.is_over(self.state.best)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _schedule_to_next_stop(self) -> None:
        """Schedule steps for the prefetcher, but only until the next evaluation or checkpoint.

        An evaluation or checkpoint applies the pending update without the forward that follows it in a step. If blocks
        were prefetched for that forward, timing would determine whether the update evicts them.
        """
        self._runtime.schedule_steps(self.state.step, self._num_steps_to_next_stop)

    @property
    def _num_steps_to_next_stop(self) -> int:
        step = self.state.step
        next_evaluation, next_save = self._evaluator.next_step(step), self._saver.next_step(step)
        return (next_evaluation if next_save is None else min(next_evaluation, next_save)) - step

    def _begin(self) -> None:
        """Compile the kernels and report the start of the run."""
        run, state = self._run, self.state
        self._activity.begin("compiling kernels of the optimizer")
        # The first rank compiles the kernels, and the other ranks load the compiled kernels from the cache.
        self._group.run_host_leaders_first(partial(warm_up, self._plan))
        device = str(self._plan.device)
        self._observer.on_start(
            RunInfo(run.name, run.task, device, run.output_dir, state.max_steps, run.batch.num_tokens)
        )
        if self.parts.is_resumed:
            self._observer.on_message(f"continuing after step {state.step} of {state.max_steps}")
        if state.step < self._warmup_steps:
            rates = self._preparation.learning_rate(0), run.optimizer.learning_rate
            self._observer.on_message(warmup_notice(*rates, self._warmup_steps, is_start=state.step == 0))
        self._runtime.store.wait_idle()  # writes from loading are not part of any step

    @property
    def _warmup_steps(self) -> int:
        return int(self.state.lr_schedule["warmup_steps"]) if self._run.optimizer.has_warmup else 0

    def _begin_steps(self) -> tuple[StepEngine, StepMeter]:
        """Create an engine and a meter for its steps, and schedule the first steps."""
        step, runtime, steps_per_epoch = self.state.step, self._runtime, self._preparation.loader.steps_per_epoch
        engine = runtime.make_engine(self._num_steps_to_next_stop, first_step=step, num_updates=self.state.num_updates)
        return engine, StepMeter(self._plan, runtime.store, engine, steps_per_epoch=steps_per_epoch, first_step=step)

    def train_step(self, engine: StepEngine, meter: StepMeter) -> None:
        """Run the next step and report it."""
        step = self.state.step
        meter.start()
        num_ticks, num_micro_batches = len(self._plan.program.ticks), self._run.batch.num_micro_batches
        self._activity.begin("step", num_parts=num_ticks, num_micro_batches=num_micro_batches)
        batch = next(self._preparation.loader)
        self._runtime.timeline.is_recording = step + 1 in self._run.trace_steps
        lr = self._preparation.learning_rate(step)
        result = engine.step(batch.micro_batches, step_index=step, lr=lr)
        usage = meter.stop()
        is_due = self._saver.is_due(step + 1)
        records = self._consensus.gather_records(usage.record(is_paused=self._activity.is_paused()), is_due=is_due)
        self.state = replace(
            self.state.with_loss(result.loss),
            step=step + 1,
            num_updates=engine.num_updates,
            epoch=batch.position.epoch,
            epoch_step=batch.position.step,
            cursor=batch.position.cursor,
            num_real_tokens=self.state.num_real_tokens + batch.num_real_tokens,
            num_trained_tokens=self.state.num_trained_tokens + result.num_trained_tokens,
            seconds=self.state.seconds + usage.step_s,
        )
        if layers := result.skipped_layers:
            self._observer.on_message(
                f"step {step + 1}: the gradients of {len(layers)} layers are not finite, so they were not "
                f"updated: {', '.join(layers)}"
            )
        self._observer.on_step(meter.metrics(self.state, batch, result, lr, usage, records, self._warmup_steps))

    def _end_steps(self) -> None:
        """Apply the last step's update and write the timeline."""
        if self._consensus.is_hung_up:
            self._observer.on_message("the terminal was closed (SIGHUP): stopping after this step, and saving")
        self._activity.begin("making the last update")
        self._runtime.finish_updates()
        timeline = self._runtime.timeline
        if timeline.spans and self._group.world.is_first:
            path = timeline.write(self._run.output_dir / TIMELINE_NAME)
            self._observer.on_message(f"timeline written to {path}: open it at https://ui.perfetto.dev")

    # -- evaluate, save, export ----------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """If an evaluation is due, apply the pending update and evaluate. The next step then has no pending update."""
        if self._evaluator.is_due(self.state.step) and not self._consensus.must_stop:
            self._runtime.finish_updates()
            self._evaluator.run(self.state.step)
            self._schedule_to_next_stop()
            self._update_best()

    def _update_best(self) -> None:
        """Compare this step's evaluation with the best one. Step 0 is skipped, because it has no checkpoint."""
        step = self.state.step
        latest = self._evaluator.latest_evaluations
        evaluations = {name: metrics for name, metrics in latest.items() if metrics.step == step}
        if not self._best.is_on or step == 0 or len(evaluations) < len(self._evaluator.names):
            return
        value = self._best.value_of(evaluations)
        # Use rank 0's value, because the last bit of a perplexity can differ between types of CPU.
        best = self._group.broadcast(self._best.after(self.state.best, step, value))
        self.state = replace(self.state, best=best)
        if self._best.is_over(best):
            self._observer.on_message(
                f"stopping early: {best.num_worse} evaluations in a row were not better than step {best.step}, "
                f"{best.metric} {best.value:.4f}"
            )

    def save_if_due(self) -> None:
        """Save if the config or a signal requests a checkpoint after this step. Training continues during the write."""
        if self._consensus.must_stop:
            return  # ``save_last`` saves this step
        step, best = self.state.step, self.state.best
        is_best = self._best.is_kept and best is not None and best.step == step
        is_due = is_best or self._consensus.is_due(self._saver.is_due(step))
        if (is_due and self._has_steps_left) or self._consensus.must_save_now:
            self._signals.save_requested = False
            self._activity.begin("saving")
            self._saver.save(self.state.with_save_time(), self._checkpoint)
            # If a stop was requested while the ranks waited for space, no further step runs, as in a single process.
            self._consensus.agree_to_stop()

    def save_last(self) -> None:
        """Save after the last step or before a stop. Return when all checkpoints are on disk."""
        table = self._run.checkpoint.table
        if table.save_strategy != "no" or (self._consensus.must_stop and table.save_on_signal):
            self._activity.begin("saving")
            self._saver.save(self.state.with_save_time(), self._checkpoint, wait=True)
        self._saver.finish()
        self._saver.copy_last()

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Return a context in which a checkpoint begins. On entry, apply the pending update. On exit, schedule steps.

        Steps are scheduled only after the context, because prefetched copies could affect the checkpoint's reads.
        """
        self._runtime.finish_updates()
        self._runtime.store.set_schedule(None)
        yield
        self._schedule_to_next_stop()

    def _finish_copies(self) -> None:
        """Wait for the copies that are due. A further stop signal cancels them."""
        try:
            if self._group.world.is_single:  # with several ranks, cancelling would leave other ranks waiting
                self._signals.end_steps()
            self._copier.finish()
        except KeyboardInterrupt:
            self._observer.on_message("the copy was given up: the next start of the run makes it")

    def export(self) -> Path:
        """Write the trained model as a Hugging Face folder, unit by unit. No step can run afterwards."""
        self._activity.begin("exporting the model")
        self._runtime.end_steps()  # the export needs the memory of steps for fp32 copies
        export = FinalExport(
            self._plan, self._runtime.weights, self._group, self._signals, self._activity, self._observer.on_message
        )
        return export.write(self.state.step, self.state.best, self._best)

    def _summary(
        self,
        stats: StoreStats,
        link_bytes: Mapping[str, int],
        *,
        export_dir: Path | None = None,
        interrupted: bool = False,
    ) -> RunSummary:
        return replace(
            self.state.summary(),
            tier_peak_bytes={name: tier.high_water_bytes for name, tier in stats.tiers.items()},
            tier_capacity_bytes=dict(self._plan.budgets),
            link_bytes=link_bytes,
            link_paths={name: link.path for name, link in stats.links.items()},
            written_bytes=dict(stats.written_bytes),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            export_dir=export_dir,
            interrupted=interrupted,
            saved_step=self._saver.saved_step,
            evaluations=dict(self._evaluator.latest_evaluations),
            num_processes=self._run.world.size,
        )
