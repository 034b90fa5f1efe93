"""Training runs: plan, prepare, start or resume, train, and export."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.base.observer import Observers, RunObserver, RunSummary
from megatrain.base.progress import Activity
from megatrain.checkpoint.document import Checkpoint
from megatrain.config.resolved import config_lines
from megatrain.config.schema import RunConfig
from megatrain.data.loader import BatchLoader
from megatrain.engine.tape.ranked import program_properties
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import check_same
from megatrain.ranks.group import RankGroup
from megatrain.run.folder import LockKeeper, RunFolder, describe_world_writable
from megatrain.run.record import write_summary
from megatrain.run.status import StatusWriter
from megatrain.training.open_run import OpenRun, open_run
from megatrain.training.preparation import Preparation
from megatrain.training.resolve import RunSettings, resolve
from megatrain.training.run_parts import load_parts
from megatrain.training.start import RunStart, describe_model, with_checkpoint_settings
from megatrain.training.training_loop import TrainingLoop

__all__ = ["Trainer", "plan_for_rank"]


def plan_for_rank(config: RunConfig, group: RankGroup) -> Plan:
    """Plan a run for this rank. This is a collective."""
    run = with_checkpoint_settings(resolve(config))
    return plan_run(run) if group.world.is_single else plan_together(replace(run, world=group.world), group.gather)


def _check_ranks_agree(plan: Plan, config: RunConfig, group: RankGroup) -> None:
    """Check that all ranks have the same config, model and program. This is a collective.

    Raises:
        WorldError: The ranks differ. The message shows the difference.
    """
    if group.world.is_single:
        return
    check_same(group.gather, "config", dict(config_lines(config)), "Give all ranks the same files and options")
    model = {name: str(value) for name, value in describe_model(plan).items()}
    check_same(group.gather, "model", model, "Give all ranks the same model folder, and the same kind of machine")
    # Ranks match collectives by their order, which is the order of ticks. Micro-batches and homes can differ.
    check_same(group.gather, "program of a step", program_properties(plan.program, plan.run.batch.num_micro_batches))


class Trainer:
    """A training run of a config. Nothing is allocated or written before ``train`` or ``open`` is called.

    ``train`` executes the run from its start, or from its newest checkpoint, to its end. Callers that control the steps
    themselves use ``open``::

        with trainer.open() as runtime:
            runtime.load()
            engine = runtime.make_engine(num_steps=3)
            engine.step(micro_batches, step_index=0, lr=1e-3)

    Args:
        observer: Receiver of every step, evaluation, checkpoint and message. None discards them.
        plan: Plan of this config, or None to create it.
        activity: Progress shared with a live view. Default: not shared.
        allow_config_change: Whether to resume a checkpoint even if config changes alter results.
        exit_code_of: Function that returns the process's exit code after an error or a summary, for ``status.json``.
        group: The ranks of the run, or None for a single process.

    Attributes:
        config: The config, with the planner's choices for unset keys and with the commit of a hub model.
        plan: Plan with the homes of all blocks and the traffic of each step.
        run: Resolved config from which the plan was made.

    Raises:
        DoesNotFitError: The run does not fit in its tiers.
        ConfigError: data.max_length exceeds the model's positions.
        ModelFolderError: The model is unusable.
        UnsupportedModelError: The model cannot be trained.
        TypeError: ``config`` is a file name.
    """

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
        self._settings = RunSettings.from_config(config, self.run)
        self.config = self._settings.config
        self.observer = observer or RunObserver()
        self.activity = activity or Activity()
        self._allow_config_change = allow_config_change
        self._exit_code_of = exit_code_of

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
            ConfigError: ``output_dir`` cannot be written, or an NVMe path is not on a drive.
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
        _check_ranks_agree(self.plan, self.config, self.group)
        preparation = self.prepare()
        findings = list(preparation.create_parts())
        with ExitStack() as stack:
            observer = self.observer
            if self.group.world.is_first:
                folder = stack.enter_context(RunFolder(self.run.output_dir))
                keeper = LockKeeper(folder, lambda text: observer.on_message(text))
                status = stack.enter_context(
                    StatusWriter(
                        folder.path,
                        run_name=self.run.name,
                        activity=self.activity,
                        exit_code_of=self._exit_code_of,
                        on_interval=keeper.check_lock,
                    )
                )
                observer = Observers([keeper, self.observer, status])
                self.group.listen(
                    on_notice=observer.on_message, on_failure=lambda why: status.fail(str(why), why.exit_code)
                )
            self.group.wait_for_all()  # no rank may write before rank 0 owns the folder
            summary = self._train(preparation, observer, [finding.line for finding in findings])
            # The status says "done" only after the store is closed without an error.
            observer.on_end(summary)
        return summary

    def _train(self, preparation: Preparation, observer: RunObserver, lines: Sequence[str]) -> RunSummary:
        """Find the checkpoint to start from, and train. ``lines`` are the findings about the run."""
        group, report = self.group, observer.on_message
        start = RunStart(
            self.plan, self._settings, preparation.loader, preparation.num_steps, self._allow_config_change, report
        )
        # Rank 0 searches for checkpoints and reports whether steps are left. An error on rank 0 ends all ranks.
        candidates, summary = group.broadcast(start.find_candidates() if group.world.is_first else ((), None))
        if summary is not None:
            return summary
        weights = preparation.weights
        self._report_start(observer, candidates, preparation.loader, lines)
        with (
            open_run(self.plan, on_message=report, activity=self.activity, group=group, weights=weights) as runtime,
            load_parts(preparation, runtime, observer, start, candidates) as parts,
        ):
            summary = TrainingLoop(parts).run()
            if group.world.is_first:
                write_summary(summary, self.run.output_dir)
            parts.loggers.on_end(summary)
        return summary

    def open(self) -> AbstractContextManager[OpenRun]:
        """Return a context that opens the run's store without blocks. See ``open_run`` for errors."""
        return open_run(self.plan, on_message=self.observer.on_message, activity=self.activity, group=self.group)

    def prepare(self) -> Preparation:
        """Return a new ``Preparation``, which creates the parts of the run when they are first used."""
        report = self.observer.on_message
        return Preparation(self.plan, self._settings, report, group=self.group, activity=self.activity)

    def make_loader(self) -> BatchLoader:
        """Read the data from the cache or tokenize it. Return the run's batches, starting with the first step.

        Raises:
            DataError: The data cannot be used, or more than ``data.max_dropped`` of a source is dropped or cut.
        """
        preparation = self.prepare()
        for finding in preparation.check_rows():
            self.observer.on_message(finding.line)
        return preparation.loader

    def _report_start(
        self, observer: RunObserver, candidates: Sequence[Checkpoint], loader: BatchLoader, lines: Sequence[str]
    ) -> None:
        """Report the start. Report findings about the data only if no earlier start reported them for the same data."""
        old_state = candidates[0].state if candidates else None
        if self.group.world.is_first:
            observer.on_ready(None if old_state is None else old_state.step)
            spec = self.run.checkpoint
            folders = (spec.output_dir, spec.output_dir / CHECKPOINTS_NAME, spec.output_dir / COPIES_NAME, *spec.drives)
            if warning := describe_world_writable(folders):
                observer.on_message(f"warning: {warning}")
        if old_state is None or old_state.data_fingerprint != loader.fingerprint():
            for text in lines:
                observer.on_message(text)
