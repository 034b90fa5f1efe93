"""The steps of a run, with checkpoints between them, what is told about them, and the export at the end."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil

from megatrain.checkpoint.copier import CheckpointCopier
from megatrain.checkpoint.resume import Checkpoint, continued_position
from megatrain.checkpoint.saver import Saver
from megatrain.checkpoint.state import RunState, installed_versions, now_text
from megatrain.config.resolved import config_from_toml, to_toml
from megatrain.data.loader import BatchLoader, StepBatch
from megatrain.engine.step import StepEngine, StepResult
from megatrain.engine.trace import step_flops
from megatrain.evaluation import EvaluationSet, Evaluator
from megatrain.optim.lr import num_warmup_steps
from megatrain.run.folder import FINAL_NAME
from megatrain.run.metrics import EvaluationMetrics, RunInfo, RunObserver, RunSummary, StepMetrics
from megatrain.run.signals import RunSignals
from megatrain.run.timeline import FILE_NAME as TIMELINE_NAME
from tiered import checksum

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from megatrain.plan.plan import Plan
    from megatrain.session import Session
    from tiered import StoreStats

#: Steps that the mean time of a step is taken over: the newest, as the first ones compile and fill caches.
_MEAN_OF_STEPS = 20


class Progress:
    """Where a run stands, as ``RunState``, kept current step by step."""

    def __init__(self, state: RunState, *, is_continued: bool = False) -> None:
        self.state = state
        self.is_continued = is_continued
        self.saved_step = state.step if is_continued else None
        self.saved_generation: int | None = None

    @classmethod
    def start(
        cls, config: RunConfig, plan: Plan, loader: BatchLoader, num_steps: int, kept: Mapping[str, Any]
    ) -> Progress:
        """Return the beginning of a run.

        Args:
            kept: ``Session.kept``.
        """
        return cls(
            RunState(
                step=0,
                max_steps=num_steps,
                num_updates=0,
                epoch=0,
                epoch_step=0,
                num_real_tokens=0,
                num_trained_tokens=0,
                seconds=0.0,
                first_loss=None,
                last_loss=None,
                seed=config.seed,
                data_seed=config.data_seed,
                lr_schedule={
                    "type": config.optimizer.lr_scheduler_type,
                    "learning_rate": config.optimizer.learning_rate,
                    "num_steps": num_steps,
                    "warmup_steps": num_warmup_steps(config.optimizer.warmup_steps, num_steps),
                },
                config_toml=to_toml(config),
                data_fingerprint=loader.dataset.fingerprint(),
                model={**describe_model(config, plan), **kept},
                run_name=config.run_name,
                saved_at="",
                versions=installed_versions(),
            )
        )

    def continue_from(self, checkpoint: Checkpoint, loader: BatchLoader, rows_per_step: int) -> Progress:
        """Return this run at a checkpoint, and let the loader go on there."""
        before = checkpoint.state
        rows_before = config_from_toml(before.config_toml).rows_per_step
        position = continued_position(before, rows_before, rows_per_step, loader.steps_per_epoch)
        loader.seek(position)
        state = replace(
            self.state,
            step=before.step,
            num_updates=before.num_updates,
            epoch=position.epoch,
            epoch_step=position.step,
            num_real_tokens=before.num_real_tokens,
            num_trained_tokens=before.num_trained_tokens,
            seconds=before.seconds,
            first_loss=before.first_loss,
            last_loss=before.last_loss,
            first_losses=before.first_losses,
            last_losses=before.last_losses,
        )
        progress = Progress(state, is_continued=True)
        is_there = checkpoint.is_own and not checkpoint.is_copy
        progress.saved_step = before.step if is_there else None
        progress.saved_generation = checkpoint.generation if is_there else None
        return progress

    def count(self, batch: StepBatch, result: StepResult, num_updates: int, step_s: float) -> None:
        """Take in one step."""
        before = self.state
        self.state = replace(
            before.with_loss(result.loss),
            step=before.step + 1,
            num_updates=num_updates,
            epoch=batch.position.epoch,
            epoch_step=batch.position.step,
            num_real_tokens=before.num_real_tokens + batch.num_real_tokens,
            num_trained_tokens=before.num_trained_tokens + result.num_trained_tokens,
            seconds=before.seconds + step_s,
        )


def describe_model(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return ``RunState.model``: what is trained, and what else decides about its arithmetic."""
    graph = plan.graph
    return {
        "name": config.model.model_name_or_path,
        "class": type(graph.model).__name__,
        "num_parameters": graph.num_parameters,
        "dtype": str(graph.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "attention": graph.model.config._attn_implementation,
        "config_xxh3_64": checksum(Path(config.model.model_name_or_path, "config.json").read_bytes()),
    }


class Loop:
    """Runs what is left of a run.

    Args:
        session: prepared.
        copier: of this run; whoever made it closes it.
        loader: at the position of ``progress``.
        learning_rate: number of a step, from 0 -> its rate.
        evaluation_sets: held-out rows.
        evaluations: the last one of each set before the run is continued.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        session: Session,
        copier: CheckpointCopier,
        loader: BatchLoader,
        observer: RunObserver,
        progress: Progress,
        learning_rate: Callable[[int], float],
        evaluation_sets: Sequence[EvaluationSet] = (),
        evaluations: Mapping[str, EvaluationMetrics] = MappingProxyType({}),
    ) -> None:
        self._config, self._plan = config, plan
        self._session, self._loader, self._observer = session, loader, observer
        self._progress, self._lr, self._copier = progress, learning_rate, copier
        self._num_steps = progress.state.max_steps
        self._first_step = progress.state.step
        self._activity = session.activity
        self._signals = RunSignals(
            stops_after_step=config.checkpoint.save_on_signal,
            # While it waits for space for a checkpoint, the saver itself looks for a stop, and may still save.
            is_stuck=lambda: session.store.is_paused,
            activity=session.activity,
        )
        is_warmed_up = config.optimizer.lr_scheduler_type != "constant"  # transformers' has no warm-up
        self._warmup_steps = int(progress.state.lr_schedule["warmup_steps"]) if is_warmed_up else 0
        self._step_seconds: deque[float] = deque(maxlen=_MEAN_OF_STEPS)
        self._saver = Saver(
            config,
            session.store,
            observer,
            self._begin_checkpoint,
            copier,
            should_stop=lambda: self._signals.stop_requested,
            written_bytes=plan.checkpoint_bytes_in_output_dir,
            steps_per_epoch=loader.steps_per_epoch,
            saved_step=progress.saved_step,
            saved_generation=progress.saved_generation,
        )
        self._evaluator = Evaluator(
            config,
            session,
            evaluation_sets,
            observer,
            steps_per_epoch=loader.steps_per_epoch,
            max_steps=self._num_steps,
            should_stop=lambda: self._signals.stop_requested,
            before=evaluations,
        )

    def run(self) -> RunSummary:
        """Run the steps that are left, then export; or less, if somebody asks for a stop."""
        self._activity.begin("compiling kernels of the optimizer")
        self._plan.warm_up()
        config, store = self._config, self._session.store
        places = config.rows_per_step * config.data.max_length
        name, device = config.run_name, str(self._plan.device)
        self._observer.on_start(RunInfo(name, config.task, device, config.output_dir, self._num_steps, places))
        if self._progress.is_continued:
            self._observer.on_message(f"continuing after step {self._first_step} of {self._num_steps}")
        self._say_warmup()
        store.wait_idle()  # what loading still writes is not part of any step
        before = store.stats()
        with self._signals:
            self._evaluate()
            engine = self._session.make_engine(
                self._steps_to_evaluation,
                first_step=self._first_step,
                num_updates=self._progress.state.num_updates,
            )
            self._run_steps(engine)
            if self._signals.is_hung_up:
                self._observer.on_message("the terminal was closed (SIGHUP): stopping after this step, and saving")
            self._activity.begin("making the last update")
            engine.finish_updates()
            self._write_trace()
            self._evaluate()
            self._save_at_the_end()
            store.wait_idle()
            moved = store.stats() - before
            if self._signals.stop_requested:
                self._finish_copies()
                return self._summary(moved, interrupted=True)
            return self._export(moved)

    def _say_warmup(self) -> None:
        """Say what the first learning rate is: it is 0 in transformers' schedules, which users do not expect."""
        if self._first_step >= self._warmup_steps:
            return
        first, peak = self._lr(0), self._config.optimizer.learning_rate
        text = f"warm-up: the learning rate rises from {first:.3g} to {peak:.3g} over {self._warmup_steps} steps"
        if first == 0.0 and self._first_step == 0:
            text += "; the first one changes no weights, as in transformers"
        self._observer.on_message(text)

    def is_paused(self) -> bool:
        """Whether the run waits for somebody to free space on a drive."""
        return self._session.store.is_paused or self._saver.is_waiting

    def _export(self, moved: StoreStats) -> RunSummary:
        step = self._progress.state.step
        self._activity.begin("exporting the model")
        self._signals.steps_are_over()
        try:
            folder = self._session.export(self._config.output_dir / FINAL_NAME, {"step": step})
            self._copier.finish()
        except KeyboardInterrupt:
            if self._saver.saved_step != step:
                raise
            return self._summary(moved, interrupted=True)
        return self._summary(moved, export_dir=folder)

    def _finish_copies(self) -> None:
        """Wait for the copies that are due, unless somebody asks for a stop once more: what is saved is saved."""
        self._signals.steps_are_over()
        try:
            self._copier.finish()
        except KeyboardInterrupt:
            self._observer.on_message("the copy was given up: the next start of the run makes it")

    def _run_steps(self, engine: StepEngine) -> None:
        start_s = time.perf_counter()
        for number in range(self._first_step, self._num_steps):
            if self._signals.stop_requested:
                return
            metrics = self._run_step(engine, number)
            eta_s = (time.perf_counter() - start_s) / (number + 1 - self._first_step) * (self._num_steps - number - 1)
            self._observer.on_step(replace(metrics, eta_s=eta_s))
            self._saver.poll()
            self._evaluate_and_save(number + 1)

    def _evaluate_and_save(self, done: int) -> None:
        """Do what is due between two steps; evaluate first: who continues from the checkpoint need not do it again."""
        if self._signals.stop_requested:
            return
        if done < self._num_steps:
            self._evaluate()
        if (self._saver.is_due(done) and done < self._num_steps) or self._signals.save_requested:
            self._signals.save_requested = False
            self._activity.begin("saving")
            self._saver.save(self._state())

    def _run_step(self, engine: StepEngine, number: int) -> StepMetrics:
        start_s, stats = time.perf_counter(), self._session.store.stats()
        micro_batches = self._plan.num_micro_batches
        self._activity.begin("step", num_parts=len(self._plan.program.ticks), num_micro_batches=micro_batches)
        batch = next(self._loader)
        self._session.timeline.is_on = number + 1 in self._config.profile.trace_steps
        lr = self._lr(number)
        result = engine.step(batch.micro_batches, number=number, lr=lr)
        step_s, moved = time.perf_counter() - start_s, self._session.store.stats() - stats
        self._step_seconds.append(step_s)
        self._progress.count(batch, result, engine.num_updates, step_s)
        return self._metrics(batch, result, lr, step_s, moved)

    def _begin_checkpoint(self) -> None:
        """Make the update that is pending; the steps that follow start as the first one does, with none."""
        self._session.finish_updates()
        self._session.schedule(self._progress.state.step, self._steps_to_evaluation)

    @property
    def _steps_to_evaluation(self) -> int:
        """Steps to the next evaluation: the prefetcher looks no further, so that nothing waits through it."""
        step = self._progress.state.step
        return self._evaluator.next_step(step) - step

    def _evaluate(self) -> None:
        """Evaluate if it is time to; the steps that follow start as after a checkpoint."""
        step = self._progress.state.step
        if self._evaluator.is_due(step) and not self._signals.stop_requested:
            self._session.finish_updates()
            self._evaluator.run(step)
            self._session.schedule(step, self._steps_to_evaluation)

    def _save_at_the_end(self) -> None:
        is_on = self._config.checkpoint.save_strategy != "no"
        if is_on or (self._signals.stop_requested and self._config.checkpoint.save_on_signal):
            self._activity.begin("saving")
            self._saver.save(self._state(), wait=True)
        self._saver.finish()
        self._saver.copy_last()

    def _state(self) -> RunState:
        return replace(self._progress.state, saved_at=now_text())

    def _summary(self, moved: StoreStats, *, export_dir: Path | None = None, interrupted: bool = False) -> RunSummary:
        state = self._progress.state
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
            tier_capacity_bytes=dict(self._plan.budgets),
            link_bytes={name: link.num_bytes for name, link in moved.links.items()},
            link_paths={name: link.path for name, link in moved.links.items()},
            written_bytes=dict(moved.written_bytes),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            export_dir=export_dir,
            interrupted=interrupted,
            saved_step=self._saver.saved_step,
            evaluations=dict(self._evaluator.latest),
        )

    def _write_trace(self) -> None:
        if self._session.timeline.spans:
            path = self._session.timeline.write(self._config.output_dir / TIMELINE_NAME)
            self._observer.on_message(f"timeline written to {path}: open it at https://ui.perfetto.dev")

    def _metrics(
        self, batch: StepBatch, result: StepResult, lr: float, step_s: float, moved: StoreStats
    ) -> StepMetrics:
        position = batch.position
        flops = step_flops(
            self._plan.trace,
            num_places=sum(micro_batch["input_ids"].numel() for micro_batch in batch.micro_batches),
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            kept=self._plan.program.kept,
        )
        return StepMetrics(
            step=self._progress.state.step,
            max_steps=self._num_steps,
            epoch=position.epoch + position.step / self._loader.steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            step_s=step_s,
            eta_s=0.0,
            mean_step_s=sum(self._step_seconds) / len(self._step_seconds),
            warmup_steps=self._warmup_steps,
            tier_used_bytes={name: tier.used_bytes for name, tier in moved.tiers.items()},
            tier_capacity_bytes={name: tier.capacity_bytes for name, tier in moved.tiers.items()},
            stall_s=dict(moved.stall_s),
            written_bytes=dict(moved.written_bytes),
            link_bytes={name: link.num_bytes for name, link in moved.links.items()},
            rss_bytes=psutil.Process().memory_info().rss,
            model_flops=flops.model,
            hardware_flops=flops.hardware,
        )
