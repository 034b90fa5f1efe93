"""The training run: plan, data, loop, export."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from megatrain.config.problems import ConfigError, Problem
from megatrain.config.resolved import check_writable, write_resolved
from megatrain.data.dataset import check_ids, load_dataset
from megatrain.data.loader import BatchLoader, StepBatch
from megatrain.data.tokenizer import load_tokenizer, pad_token_id
from megatrain.engine.step import StepResult
from megatrain.metrics import MetricsLog, Observers, RunInfo, RunObserver, RunSummary, StepMetrics
from megatrain.models.export import check_target
from megatrain.models.graph import num_learned_positions
from megatrain.optim import clip
from megatrain.optim.lr import ScheduleError, learning_rate_schedule, num_warmup_steps
from megatrain.plan.planner import plan_run
from megatrain.session import Session

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from tiered.events import StoreStats

#: The trained model's folder, inside output_dir.
EXPORT_NAME = "final"


class Trainer:
    """One run of one config. ``plan`` is there after construction; nothing is allocated or written before ``train``.

    Raises:
        DoesNotFitError: the run cannot fit its tiers. ConfigError: data.max_length is more than the model's positions.
        ModelFolderError, UnsupportedModelError: the model is unusable.
    """

    def __init__(self, config: RunConfig, *, observer: RunObserver) -> None:
        self.config = config
        self.observer = observer
        self.plan = plan_run(config)
        positions, length = num_learned_positions(self.plan.graph), config.data.max_length
        if positions is not None and length > positions:
            message = f"data.max_length = {length}, but this model has {positions} positions"
            raise ConfigError(
                config.model.model_name_or_path, [Problem("data.max_length", message, f"Write at most {positions}")]
            )

    def train(self) -> RunSummary:
        """Train from start to end and write the Hugging Face folder ``output_dir/final``.

        Everything that can be known to fail is found before the first step; until then ``output_dir`` is untouched.

        Raises:
            ScheduleError: the warm-up is longer than the run. DataError: the data cannot be used.
            ConfigError: ``output_dir`` cannot be written. ExportError: somebody else's files are where the model goes.
            TieredError, OSError: storage failed. NonFiniteGradientError.
        """
        check_writable(self.config)
        check_target(self.config.output_dir / EXPORT_NAME)
        loader = self._loader()
        training = self.config.training
        num_steps = loader.num_steps(training.num_train_epochs, training.max_steps)
        learning_rate = self._learning_rate(num_steps)
        with ExitStack() as stack:
            session = stack.enter_context(Session(self.config, self.plan, self.observer.on_message))
            session.prepare()
            write_resolved(self.config)
            observers = [self.observer]
            if self.config.logging.report_to == "jsonl":
                observers.append(stack.enter_context(MetricsLog(self.config.output_dir / "metrics.jsonl")))
            summary = Loop(self, session, loader, Observers(observers), num_steps, learning_rate).run()
        self.observer.on_end(summary)
        return summary

    def _learning_rate(self, num_steps: int) -> Callable[[int], float]:
        table = self.config.optimizer
        warmup = num_warmup_steps(table.warmup_steps, num_steps)
        if table.warmup_steps >= 1 and warmup >= num_steps and table.lr_scheduler_type != "constant":
            raise ScheduleError(
                f"optimizer.warmup_steps: the warm-up of {warmup} steps does not end within the {num_steps} steps of "
                "the run. Write fewer, or a fraction below 1 of all steps"
            )
        return learning_rate_schedule(
            table.lr_scheduler_type,
            table.learning_rate,
            num_steps,
            warmup,
            table.lr_scheduler_kwargs,
        )

    def _loader(self) -> BatchLoader:
        config = self.config
        folder = config.model.tokenizer_name_or_path or config.model.model_name_or_path
        tokenizer = load_tokenizer(folder, chat_template=config.model.chat_template)
        dataset = load_dataset(config, tokenizer)
        num_embeddings = self.plan.graph.model.get_input_embeddings().weight.shape[0]
        check_ids(dataset, num_embeddings, where=folder)
        self.observer.on_message(str(dataset.report))
        return BatchLoader(
            dataset,
            micro_batch_size=self.plan.micro_batch_size,
            num_micro_batches=self.plan.num_micro_batches,
            max_length=config.data.max_length,
            packing=config.data.packing,
            data_seed=config.data_seed,
            pad_token_id=pad_token_id(tokenizer),
        )


class Loop:
    """The steps of a run, and what is told about them."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        loader: BatchLoader,
        observer: RunObserver,
        num_steps: int,
        learning_rate: Callable[[int], float],
    ) -> None:
        self._config, self._plan = trainer.config, trainer.plan
        self._session, self._loader, self._observer, self._num_steps = session, loader, observer, num_steps
        self._lr = learning_rate
        self._losses: list[float] = []
        self._real_tokens = self._trained_tokens = 0

    def run(self) -> RunSummary:
        """Run all steps, then export."""
        self._plan.optimizer.warm_up()
        clip.warm_up()
        config, store = self._config, self._session.store
        places = config.rows_per_step * config.data.max_length
        name, device = config.run_name, str(self._plan.device)
        self._observer.on_start(RunInfo(name, config.task, device, config.output_dir, self._num_steps, places))
        store.wait_idle()  # what loading still writes is not part of any step
        before = store.stats()
        engine = self._session.make_engine(self._num_steps)
        start_s = time.perf_counter()
        for number in range(self._num_steps):
            step_start_s, stats = time.perf_counter(), store.stats()
            batch = next(self._loader)
            self._session.timeline.is_on = number + 1 in config.profile.trace_steps
            lr = self._lr(number)
            result = engine.step(batch.micro_batches, number=number, lr=lr)
            now_s = time.perf_counter()
            eta_s = (now_s - start_s) / (number + 1) * (self._num_steps - number - 1)
            self._tell(number, batch, result, lr, now_s - step_start_s, eta_s, store.stats() - stats)
        engine.finish_updates()
        self._write_trace()
        seconds = time.perf_counter() - start_s
        store.wait_idle()
        moved = store.stats() - before
        export_dir = self._session.export(config.output_dir / EXPORT_NAME)
        return RunSummary(
            num_steps=self._num_steps,
            first_loss=self._losses[0],
            last_loss=self._losses[-1],
            seconds=seconds,
            num_real_tokens=self._real_tokens,
            num_trained_tokens=self._trained_tokens,
            tier_peak_bytes={name: tier.high_water_bytes for name, tier in moved.tiers.items()},
            tier_capacity_bytes=dict(self._plan.budgets),
            link_bytes={name: link.num_bytes for name, link in moved.links.items()},
            written_bytes=dict(moved.written_bytes),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            export_dir=export_dir,
        )

    def _write_trace(self) -> None:
        if self._session.timeline.spans:
            path = self._session.timeline.write(self._config.output_dir / "trace.json")
            self._observer.on_message(f"timeline written to {path}: open it at https://ui.perfetto.dev")

    def _tell(
        self,
        number: int,
        batch: StepBatch,
        result: StepResult,
        lr: float,
        step_s: float,
        eta_s: float,
        window: StoreStats,
    ) -> None:
        self._losses.append(result.loss)
        self._real_tokens += batch.num_real_tokens
        self._trained_tokens += result.num_trained_tokens
        self._observer.on_step(
            StepMetrics(
                step=number + 1,
                max_steps=self._num_steps,
                epoch=batch.position.epoch + batch.position.step / self._loader.steps_per_epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                num_real_tokens=batch.num_real_tokens,
                num_trained_tokens=result.num_trained_tokens,
                step_s=step_s,
                eta_s=eta_s,
                tier_used_bytes={name: tier.used_bytes for name, tier in window.tiers.items()},
                tier_capacity_bytes={name: tier.capacity_bytes for name, tier in window.tiers.items()},
                stall_s=dict(window.stall_s),
                written_bytes=dict(window.written_bytes),
                rss_bytes=psutil.Process().memory_info().rss,
            )
        )
