"""A training run from its config: plan, data, checkpoint to start from, session; then the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.advice import model_warnings, schedule_warnings
from megatrain.checkpoint.copier import CheckpointCopier
from megatrain.checkpoint.drive_folders import describe_drives
from megatrain.checkpoint.resume import (
    Checkpoint,
    LostCheckpointsError,
    already_done,
    check_changes,
    find_candidates,
)
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.resolved import check_writable, write_resolved
from megatrain.data.dataset import check_ids, load_dataset
from megatrain.data.encoding import load_tokenizer, pad_token_id
from megatrain.data.loader import BatchLoader
from megatrain.data.rows_report import check_losses, source_names
from megatrain.evaluation import EvaluationSet, load_evaluation_sets
from megatrain.loop import Loop, Progress, describe_model
from megatrain.models.export import check_target
from megatrain.models.graph import num_learned_positions
from megatrain.optim.lr import ScheduleError, learning_rate_schedule, num_warmup_steps
from megatrain.plan.limits import refuse
from megatrain.plan.packing import with_packing
from megatrain.plan.planner import plan_run
from megatrain.report.history import write_plan, write_summary
from megatrain.run.activity import Activity
from megatrain.run.folder import FINAL_NAME, RunFolder
from megatrain.run.loggers import METRICS_NAME, check_loggers, last_evaluations, make_loggers
from megatrain.run.metrics import Observers, RunObserver, RunSummary
from megatrain.run.status import StatusWriter
from megatrain.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.config.schema import RunConfig


class Trainer:
    """One run of one config. Nothing is allocated or written before ``train``.

    Args:
        config: of the run.
        observer: is called at every step, evaluation, checkpoint and message.
        activity: kept current for a live view; None: an own one.
        allow_config_change: continue a checkpoint although the config now says something that alters results.
        exit_code_of: returns the exit code of the process after an error, or after a summary, for ``status.json``.

    Attributes:
        plan: there after construction.
        activity: what the run is doing.

    Raises:
        DoesNotFitError: the run cannot fit its tiers.
        ConfigError: data.max_length is more than the model's positions.
        ModelFolderError: the model is unusable.
        UnsupportedModelError: the model is unusable.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        observer: RunObserver,
        activity: Activity | None = None,
        allow_config_change: bool = False,
        exit_code_of: Callable[[BaseException | RunSummary], int] | None = None,
    ) -> None:
        self.config = config
        self.activity = activity or Activity()
        self._exit_code_of = exit_code_of
        self._loop: Loop | None = None
        self.observer = observer
        self._allow_config_change = allow_config_change
        self.plan = plan_run(config)
        self.config = config = with_packing(config, self.plan.packing)
        positions, length = num_learned_positions(self.plan.graph), config.data.max_length
        if positions is not None and length > positions:
            message = f"data.max_length = {length}, but this model has {positions} positions"
            raise ConfigError(
                config.model.model_name_or_path, [Problem("data.max_length", message, f"Write at most {positions}")]
            )

    def train(self) -> RunSummary:
        """Train from the start, or from the newest checkpoint, to the end; write ``output_dir/final``.

        Everything that can be known to fail is found before the first step; until then ``output_dir`` is untouched.

        Raises:
            ScheduleError: the warm-up is longer than the run.
            DataError: the data cannot be used.
            BeyondMachineError: this machine has less than the tiers' sizes.
            ConfigError: ``output_dir`` cannot be written, or a drive's path is no drive.
            ExportError: somebody else's files are where the model goes.
            CheckpointError: a checkpoint cannot be used or written.
            ConfigChangedError: the config is another one.
            LockedError: another run uses ``output_dir``.
            TieredError: storage failed.
            OSError: storage failed.
            NonFiniteGradientError: a gradient is NaN or infinite, and ``optimizer.nonfinite`` is ``stop``.
        """
        refuse(self.plan.objections)
        check_loggers(self.config)
        check_writable(self.config)
        check_target(self.config.output_dir / FINAL_NAME)
        self.activity.begin("reading the data")
        loader = self.make_loader()
        training = self.config.training
        num_steps = loader.num_steps(training.num_train_epochs, training.max_steps)
        learning_rate = self._learning_rate(num_steps)
        tell = self.observer.on_message
        sets = load_evaluation_sets(self.config, self.plan, self._tokenizer(), tell, loader.dataset, self._warn)
        if self.plan.packing_warning:
            self._warn(self.plan.packing_warning)
        for text in (*model_warnings(self.config, self.plan.graph), *schedule_warnings(self.config, num_steps)):
            self._warn(text)
        with ExitStack() as stack:
            folder = stack.enter_context(RunFolder(self.config.output_dir))
            status = StatusWriter(
                folder.path,
                run_name=self.config.run_name,
                activity=self.activity,
                is_paused=lambda: self._loop is not None and self._loop.is_paused(),
                exit_code_of=self._exit_code_of,
            )
            stack.enter_context(status)
            self.observer = Observers([self.observer, status])
            is_lost = False
            try:
                candidates = self._candidates(loader)
            except LostCheckpointsError as lost:
                if already_done(self.config, lost.newest, num_steps) is None:
                    raise
                candidates, is_lost = [lost.newest], True  # who has the model may have deleted the rest
            if candidates and (summary := already_done(self.config, candidates[0], num_steps)) is not None:
                self.observer.on_message(
                    f"nothing to do: this run is done, {summary.num_steps} of {num_steps} steps. To train longer raise "
                    "training.max_steps or num_train_epochs; to start anew name another output_dir"
                )
                if not is_lost:
                    self._copy_last(candidates[0])
                before = last_evaluations(self.config.output_dir / METRICS_NAME, summary.num_steps)
                summary = replace(summary, evaluations=before)
            else:
                summary = self._train(candidates, loader, num_steps, learning_rate, sets)
            self.observer.on_end(summary)
        return summary

    def _candidates(self, loader: BatchLoader) -> list[Checkpoint]:
        candidates = find_candidates(self.config, self.observer.on_message)
        if candidates:
            self._check_changes(candidates[0], loader, allow=self._allow_config_change)
        return candidates

    def _copy_last(self, checkpoint: Checkpoint) -> None:
        """Make the copy of a run that is done, if one is wanted and was not made, or was given up."""
        if not checkpoint.is_copy:
            drive_bytes = self.plan.checkpoint_bytes_on_drives
            with CheckpointCopier(self.config, drive_bytes, self.observer.on_message) as copier:
                copier.offer(checkpoint.generation, checkpoint.state.step, is_last=True)
                copier.finish()

    def _check_changes(self, checkpoint: Checkpoint, loader: BatchLoader, *, allow: bool) -> None:
        check_changes(
            self.config,
            checkpoint,
            describe_model(self.config, self.plan),
            loader.dataset.fingerprint(),
            allow=allow,
            on_notice=self.observer.on_message,
        )

    def _train(
        self,
        candidates: Sequence[Checkpoint],
        loader: BatchLoader,
        num_steps: int,
        learning_rate: Callable[[int], float],
        sets: Sequence[EvaluationSet],
    ) -> RunSummary:
        with ExitStack() as stack:
            session = stack.enter_context(Session(self.config, self.plan, self.observer.on_message, self.activity))
            checkpoint = session.prepare(candidates)
            if checkpoint is not None and checkpoint is not candidates[0]:
                # The newest one has this config, or it was allowed; this one may have been saved before it changed.
                self._check_changes(checkpoint, loader, allow=True)
            tell, drive_bytes = self.observer.on_message, self.plan.checkpoint_bytes_on_drives
            for line in describe_drives(self.config, drive_bytes):
                tell(line)
            copier = stack.enter_context(CheckpointCopier(self.config, drive_bytes, tell))
            if checkpoint is not None and checkpoint.is_own and not checkpoint.is_copy:
                copier.offer(checkpoint.generation, checkpoint.state.step)  # a kill may have cut its copy short
            write_resolved(self.config)
            continued_from = None if checkpoint is None else checkpoint.state.step
            write_plan(self.plan, self.config, continued_from)
            path = self.config.output_dir / METRICS_NAME
            evaluations = {} if continued_from is None else last_evaluations(path, continued_from)
            made = make_loggers(self.config, continued_from, self.observer.on_message)
            observers = [self.observer, *(stack.enter_context(logger) for logger in made)]
            progress = Progress.start(self.config, self.plan, loader, num_steps, session.kept)
            if checkpoint is not None:
                progress = progress.continue_from(checkpoint, loader, self.config.rows_per_step)
            self._loop = Loop(
                self.config,
                self.plan,
                session,
                copier,
                loader,
                Observers(observers),
                progress,
                learning_rate,
                evaluation_sets=sets,
                evaluations=evaluations,
            )
            summary = self._loop.run()
            write_summary(summary, self.config.output_dir)
            for logger in made:
                logger.on_end(summary)
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

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        table = self.config.model
        return load_tokenizer(
            table.tokenizer_name_or_path or table.model_name_or_path, chat_template=table.chat_template
        )

    def _warn(self, text: str) -> None:
        self.observer.on_message(f"warning: {text}")

    def make_loader(self) -> BatchLoader:
        """Return the batches of the run, from the beginning. Reads and tokenizes the data, or finds it in the cache.

        Raises:
            DataError: as ``load_dataset``, or more than ``data.max_dropped`` of a source is dropped or cut.
        """
        config = self.config
        folder = config.model.tokenizer_name_or_path or config.model.model_name_or_path
        tokenizer = self._tokenizer()
        dataset = load_dataset(config, tokenizer, self.observer.on_message)
        num_embeddings = self.plan.graph.model.get_input_embeddings().weight.shape[0]
        check_ids(dataset, num_embeddings, where=folder)
        self.observer.on_message(str(dataset.report))
        for text in check_losses(dataset.report, source_names(config.data), config.data.max_dropped):
            self._warn(text)
        return BatchLoader(
            dataset,
            micro_batch_size=self.plan.micro_batch_size,
            num_micro_batches=self.plan.num_micro_batches,
            max_length=config.data.max_length,
            packing=bool(config.data.packing),
            data_seed=config.data_seed,
            pad_token_id=pad_token_id(tokenizer),
        )
