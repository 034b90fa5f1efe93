"""A training run: load, train, evaluate, save, export."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil
import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, FINAL_NAME
from megatrain.base.observer import Observers, RunInfo, RunObserver, RunSummary, StepMetrics
from megatrain.base.progress import Activity
from megatrain.base.timeline import TIMELINE_NAME, Timeline
from megatrain.checkpoint.best import Best, MetricError
from megatrain.checkpoint.copier import CheckpointCopier
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.drive_folders import describe_drives
from megatrain.checkpoint.resume import (
    LostCheckpointsError,
    already_done,
    check_changes,
    continued_position,
    find_candidates,
    is_not_after,
    lanes_of_newest,
)
from megatrain.checkpoint.saver import Saver
from megatrain.checkpoint.state import ARITHMETIC, RunState, installed_versions, now_text
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from megatrain.config.resolved import (
    changes_from,
    check_writable,
    config_from_toml,
    config_lines,
    to_toml,
    with_commit,
    with_lanes,
    with_packing,
    write_resolved,
)
from megatrain.converters.adapters import adapters_of, export_adapter
from megatrain.converters.liger import apply_liger_kernels
from megatrain.data.dataset import TokenDataset, check_ids, load_dataset
from megatrain.data.encoding import load_tokenizer, pad_token_id
from megatrain.data.loader import BatchLoader, StepBatch
from megatrain.data.rows_report import DataError, check_losses
from megatrain.data.scores import TeacherScores, tokenizer_checksum
from megatrain.engine.environment import (
    deterministic_kernels,
    device_errors_explained,
    give_back_freed_memory,
)
from megatrain.engine.ranked import describe_collectives
from megatrain.engine.step import StepEngine, StepResult
from megatrain.engine.trace import step_flops
from megatrain.export import export_checkpoint
from megatrain.models.carried import CARRIED_CHECKSUM
from megatrain.models.export import check_target, export_dtype, export_model
from megatrain.models.graph import ModelGraph, num_learned_positions
from megatrain.models.hub import fetch_weights
from megatrain.models.load import WeightLoader, open_loader
from megatrain.optim.base import decays
from megatrain.optim.lr import make_schedule
from megatrain.plan.limits import refuse
from megatrain.plan.planner import plan_run
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import Collectives
from megatrain.ranks.group import RankGroup
from megatrain.ranks.record import Agreed, StepRecord
from megatrain.resolve import resolve, resolve_best, resolve_evaluation, resolve_logging
from megatrain.run.folder import RunFolder, open_to_all
from megatrain.run.loggers import METRICS_NAME, check_loggers, last_evaluations, make_loggers
from megatrain.run.record import write_plan, write_summary
from megatrain.run.signals import RunSignals
from megatrain.run.status import StatusWriter
from megatrain.tasks.advice import model_warnings, schedule_warnings
from megatrain.tasks.evaluation import Evaluator, load_evaluation_sets, make_samplers, plans_of_evaluations
from megatrain.tasks.reference import RECORD, Reference
from megatrain.tiers import (
    check_drives,
    claim_folders,
    open_store,
    register_blocks,
    register_transient_blocks,
    reserve,
    set_schedule,
    unregister_transient_blocks,
)
from megatrain.weights import (
    AdaptedWeights,
    ExportStopped,
    GatheredWeights,
    RandomWeights,
    Weights,
    WeightSource,
    saved_places,
)
from tiered import RamTier, checksum
from tiered.units import format_duration, format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.checkpoint.best import BestSpec
    from megatrain.config.schema import RunConfig
    from megatrain.converters.spec import ModelSpec
    from megatrain.models.converter import WeightSource as ExportSource
    from megatrain.plan.plan import Plan, RunSpec
    from megatrain.tasks.evaluation import EvaluationSet
    from tiered import StoreStats, TieredStore

__all__ = ["Trainer"]

#: Steps in the mean time of a step: the newest ones, as the first compile kernels and fill caches.
_MEAN_OF_STEPS = 20
_WORTH_TELLING_S = 1.0


Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class MovedByLink:
    """What links moved.

    Attributes:
        num_bytes: ``"ram->nvme"`` -> bytes.
        busy_s: Seconds with at least one transfer under way.
    """

    num_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)


def _planned(run: RunSpec, group: RankGroup) -> Plan:
    """Plan a run of this rank. A collective."""
    return plan_run(run) if group.world.is_single else plan_together(replace(run, world=group.world), group.gather)


class Trainer:
    """One run of one config. Nothing is allocated or written before ``train``, or ``open``.

    ``train`` is the run from its start, or from its newest checkpoint, to its end. Its parts serve callers that take
    steps themselves::

        with trainer.open():
            trainer.load()
            engine = trainer.make_engine(num_steps=3)
            engine.step(micro_batches, number=0, lr=1e-3)

    Args:
        config: of the run.
        observer: is called at every step, evaluation, checkpoint and message; None: nothing is.
        plan: of this config, if it is made already.
        activity: kept current for a live view; None: an own one.
        allow_config_change: continue a checkpoint although the config now says something that alters results.
        exit_code_of: returns the exit code of the process after an error, or after a summary, for ``status.json``.
        group: the ranks of the run; None: this process is alone.

    Attributes:
        config: of the run, with ``data.packing`` as the model allows it, and the commit of a model on the hub.
        plan: of the run.
        run: its values.
        activity: what the run is doing.
        store: from ``open`` on, all blocks.
        weights: from ``open`` on, those of the store.
        timeline: from ``open`` on, of the steps during which it is on.
        state: while ``train`` runs, where the run stands.

    Raises:
        DoesNotFitError: the run cannot fit its tiers.
        ConfigError: data.max_length is more than the model's positions.
        ModelFolderError: the model is unusable.
        UnsupportedModelError: the model is unusable.
    """

    store: TieredStore
    weights: Weights
    timeline: Timeline
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
        self.group = group or RankGroup.single()
        self.plan = plan or _planned(with_kept_lanes(resolve(config)), self.group)
        self.run = self.plan.run
        config = with_packing(with_lanes(config, self.run.num_lanes), self.run.data.table.packing)
        self.config = with_commit(config, self.run.model.hub)
        self.observer = observer or RunObserver()
        self.activity = activity or Activity()
        self._allow_config_change = allow_config_change
        self._exit_code_of = exit_code_of
        self._evaluation, self._logging = resolve_evaluation(self.config), resolve_logging(self.config)
        self._best = resolve_best(self.config)
        self._engine: StepEngine | None = None
        self._saver: Saver | None = None
        self._agreed = Agreed()
        self._moved_before = MovedByLink()  # beside blocks, up to the last step
        self._told_at_start: list[str] = []
        check_positions(self.run.model, self.run.batch.max_length, self.plan.graph)

    # -- the run -------------------------------------------------------------------------------------------------

    def train(self) -> RunSummary:
        """Train from the start, or from the newest checkpoint, to the end; write ``output_dir/final``.

        Everything that can be known to fail is found before the first step; until then ``output_dir`` is untouched.

        Returns:
            What the run did; ``interrupted`` where a signal ended it early.

        Raises:
            ScheduleError: the warm-up is longer than the run.
            DataError: the data cannot be used.
            BeyondMachineError: this machine has less than the tiers' sizes.
            ConfigError: ``output_dir`` cannot be written, or a drive's path is no drive.
            ExportError: other files are where the model goes.
            CheckpointError: a checkpoint cannot be used or written.
            ConfigChangedError: the config is another one.
            LockedError: another run uses ``output_dir``.
            TieredError: storage failed.
            OSError: storage failed.
            NonFiniteGradientError: a gradient is NaN or infinite, and ``optimizer.nonfinite`` is ``stop``. What is
                saved is the last checkpoint.
            KeyboardInterrupt: a second signal, or one that the run could not save after.
        """
        self._check_ranks()
        self._check()
        self._load_data()
        with self._in_folder():
            self.group.wait_for_all()  # nothing is written before rank 0 owns the folder
            # Rank 0 looks, and says whether there is anything to do; a problem that it finds ends all.
            found = self._find_checkpoints() if self.group.world.is_first else ((), None)
            candidates, summary = self.group.broadcast(found)
            if summary is None:
                self._tell_of_start(candidates)
                with self.open(), self._resumed(candidates):
                    summary = self._run()
                    if self.group.world.is_first:
                        write_summary(summary, self.run.output_dir)
                    for logger in self._loggers:
                        logger.on_end(summary)
            # The status says "done" only after the store is closed without an error.
            self.observer.on_end(summary)
        return summary

    def _run(self) -> RunSummary:
        """Train, evaluate, save, export: the loop."""
        self._begin()
        before = self.store.stats()
        with self.signals:
            self.evaluate()
            self._begin_steps()
            while self._has_steps_left and not self._stops:
                self.train_step()
                self.saver.poll()
                if self.state.step < self.state.max_steps:
                    self.evaluate()  # before the checkpoint: a run that continues from it has the evaluation already
                self.save_if_due()
            self._end_steps()
            assert self._engine is not None
            moved_beside = self._engine.moved_bytes
            self.evaluate()
            self.save_last()
            self.store.wait_idle()
            moved = self.store.stats() - before
            moved_beside = _added(moved_beside, self.evaluator.moved_bytes)  # of ranks, that of evaluations
            summary = partial(self._summary, moved, _added(_link_bytes(moved), moved_beside))
            if self._stops:
                self._finish_copies()
                return summary(interrupted=True)
            try:
                if self.group.world.is_single:
                    self.signals.steps_are_over()
                folder = self.export()
                self.copier.finish()
            except KeyboardInterrupt as stop:
                # Of several ranks the others must know of it, too: they wait for what this one asks them next.
                is_known_to_all = self.group.world.is_single or isinstance(stop, ExportStopped)
                if self.saver.saved_step != self.state.step or not is_known_to_all:
                    raise
                return summary(interrupted=True)  # the next start exports
            return summary(export_dir=folder)

    @property
    def _has_steps_left(self) -> bool:
        return self.state.step < self.state.max_steps and not self._best.is_over(Best.of_state(self.state.best))

    @property
    def _stops(self) -> bool:
        """Whether the run ends after its step. With several ranks, as they agreed at the end of the last one."""
        return self.signals.stop_requested if self.group.world.is_single else self._agreed.stops

    def _agree_to_stop(self) -> bool:
        """Return whether the run is to end: whether any of its ranks was asked to by now. A collective."""
        if not self.group.world.is_single:
            stops = any(self.group.gather(self._agreed.stops or self.signals.stop_requested))
            self._agreed = replace(self._agreed, stops=stops)
        return self._stops

    def is_paused(self) -> bool:
        """Whether the run waits for a person to free space on a drive. Thread-safe."""
        return self._saver is not None and (self._saver.is_waiting or self.store.is_paused)

    # -- before anything is written ------------------------------------------------------------------------------

    def _check(self) -> None:
        refuse(self.plan.objections)
        self._evaluation_plans = plans_of_evaluations(self._evaluation, self.plan)
        if self.group.world.is_first:
            check_loggers(self._logging)
            check_writable(self.config)
            check_target(self.run.output_dir / FINAL_NAME)
        if self.run.export.merge and (adapters := adapters_of(self.plan.graph)) is not None:
            adapters.check_merge(self.plan.graph)

    def _check_ranks(self) -> None:
        """Make sure that all ranks have the same config, model and program.

        Raises:
            WorldError: names what differs.
        """
        if self.group.world.is_single:
            return
        advice = "Give all ranks the same files and options"
        self.group.check_same("config", dict(config_lines(self.config)), advice)
        model = {name: str(value) for name, value in describe_model(self.plan).items()}
        self.group.check_same("model", model, "Give all ranks the same model folder, and the same kind of machine")
        # Collectives are matched by their order, which is that of the ticks. Micro-batches and homes may differ.
        Collectives().check_alike(
            "program of a step", describe_collectives(self.plan.program, self.run.batch.num_micro_batches)
        )

    def _load_data(self) -> None:
        """Read the rows to train and to evaluate on; make the learning-rate schedule; warn of what is seldom meant."""
        run, plan = self.run, self.plan
        self.activity.begin("reading the data")
        # The first rank of a host tokenizes into the cache; the others find it there.
        told = self._told_at_start
        self.loader = self.group.one_after_the_other(lambda: self.make_loader(told.append))
        fingerprint = {"the fingerprint of the rows": self.loader.dataset.fingerprint()}
        self.group.check_same("data", fingerprint, "Give all ranks the same files in [[data.train]]")
        self._num_steps = self.loader.num_steps(run.num_epochs, run.max_steps)
        self._learning_rate = make_schedule(run.optimizer, self._num_steps)
        self._evaluation_sets: Sequence[EvaluationSet] = self.group.one_after_the_other(
            lambda: load_evaluation_sets(
                self._evaluation,
                plan,
                tokenizer_of(run.model),
                told.append,
                self.loader.dataset,
                lambda text: told.append(f"warning: {text}"),
            )
        )
        self._samplers = make_samplers(
            self._evaluation,
            self._evaluation_plans,
            self._evaluation_sets,
            tokenizer_of(run.model),
            self.group.gather,
        )
        try:
            self._best.check(self._evaluation.evaluations_of(each.name for each in self._evaluation_sets))
        except MetricError as error:
            raise _unknown_metric(self._best, error) from error
        warnings = [plan.packing_warning] if plan.packing_warning else []
        for text in (
            *warnings,
            *model_warnings(run.model, run.batch.max_length, run.optimizer, plan.graph),
            *schedule_warnings(run.optimizer, self._num_steps),
        ):
            told.append(f"warning: {text}")

    def make_loader(self, tell: Callable[[str], None] | None = None) -> BatchLoader:
        """Return the batches of the run, from the beginning. Reads and tokenizes the data, or finds it in the cache.

        Args:
            tell: called with what became of the rows; None: the observer is.

        Raises:
            DataError: as ``load_dataset``, or more than ``data.max_dropped`` of a source is dropped or cut.
        """
        data, tokenizer = self.run.data, tokenizer_of(self.run.model)
        dataset = load_dataset(data, tokenizer, self.observer.on_message)
        check_token_ids(self.run.model, dataset, self.plan.graph)
        try:
            losses = check_losses(dataset.report, data.source_names, data.table.max_dropped)
        except DataError:
            self.observer.on_message(str(dataset.report))  # why rows were dropped
            raise
        tell = tell or self.observer.on_message
        for text in (str(dataset.report), *(f"warning: {text}" for text in losses)):
            tell(text)
        return make_loader(self.plan, dataset, tokenizer)

    def tell(self, text: str) -> None:
        """Tell the user of something that concerns this process alone: the drives of a rank are its own."""
        if self.group.world.is_first:
            self.observer.on_message(text)
        else:
            self.group.notify(text)

    def _warn(self, text: str) -> None:
        self.observer.on_message(f"warning: {text}")

    @contextmanager
    def _in_folder(self) -> Iterator[None]:
        """Own ``output_dir``, with its ``status.json`` among the observers: rank 0 does."""
        if not self.group.world.is_first:
            yield
            return
        given = self.observer
        with (
            RunFolder(self.run.output_dir) as folder,
            StatusWriter(
                folder.path,
                run_name=self.run.name,
                activity=self.activity,
                is_paused=self.is_paused,
                exit_code_of=self._exit_code_of,
            ) as status,
        ):
            self.observer = Observers([given, status])
            self.group.listen(
                on_notice=self.observer.on_message, on_failure=lambda why: status.fail(str(why), why.exit_code)
            )
            try:
                yield
            finally:
                self.observer = given

    def _tell_of_start(self, candidates: Sequence[Checkpoint]) -> None:
        """Say what is trained, and what of the data is seldom meant: a run that goes on has said so at its start."""
        continued = candidates[0].state if candidates else None
        if self.group.world.is_first:
            self.observer.on_ready(None if continued is None else continued.step)
            spec = self.run.checkpoint
            folders = (spec.output_dir, spec.output_dir / CHECKPOINTS_NAME, spec.output_dir / COPIES_NAME, *spec.drives)
            if everyone := open_to_all(folders):
                self._warn(everyone)
        if continued is None or continued.data_fingerprint != self.loader.fingerprint():
            for text in self._told_at_start:
                self.observer.on_message(text)

    def _find_checkpoints(self) -> tuple[Sequence[Checkpoint], RunSummary | None]:
        """Return the checkpoints to start from, best first, and the summary of a run that has nothing left to do."""
        run, are_lost = self.run, False
        try:
            candidates = find_candidates(run.checkpoint, self.observer.on_message)
        except LostCheckpointsError as lost:
            # The user may have deleted them once there was the model.
            if already_done(lost.newest, self._num_steps, run.output_dir, run.export.dtype, self._best) is None:
                raise
            candidates, are_lost = [lost.newest], True
        else:
            if candidates:
                self._check_changes(candidates[0], allow=self._allow_config_change)
        summary = None
        if candidates:
            summary = already_done(candidates[0], self._num_steps, run.output_dir, run.export.dtype, self._best)
        if summary is None:
            return candidates, None
        done = f"all {self._num_steps} steps" if summary.num_steps == self._num_steps else f"{summary.num_steps} steps"
        if summary.num_steps > self._num_steps:
            done += f", and the config asks for {self._num_steps}"
        elif summary.num_steps < self._num_steps:
            done += f" of {self._num_steps}, and stopped early"
        changes = ""
        if run.optimizer.depends_on_length:
            changes = f": its learning rate ({run.optimizer.lr_scheduler_type}) depends on the length, so it differs "
            changes += "from one run of N steps"
        self.observer.on_message(
            f"nothing to do: this run is done, {done}. To train on, start it "
            f"with --max-steps N --allow-config-change, N above {summary.num_steps}{changes}. To start anew, name "
            "another output_dir"
        )
        if not are_lost:
            self._copy_last(candidates[0])
        return candidates, replace(
            summary, evaluations=last_evaluations(run.output_dir / METRICS_NAME, summary.num_steps)
        )

    def _check_changes(self, checkpoint: Checkpoint, *, allow: bool) -> None:
        check_changes(
            changes_from(checkpoint.state.config_toml, self.config),
            with_decays(checkpoint, self.plan),
            describe_model(self.plan),
            self.loader.fingerprint(),
            allow=allow,
            on_notice=self.observer.on_message,
        )

    def _copy_last(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint of a run that is done, if the config wants it and an earlier start did not."""
        if not checkpoint.is_copy and not checkpoint.is_listed:  # else all its ranks are to copy, and this one is alone
            drive_bytes = self.plan.checkpoint_bytes_on_drives
            with CheckpointCopier(self.run.checkpoint, drive_bytes, self.observer.on_message) as copier:
                copier.offer(checkpoint, is_last=True)
                copier.finish()

    # -- load ----------------------------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Open the store of the run, without blocks; leaving closes it.

        Raises:
            ModelFolderError: the weights do not fit the model.
            DoesNotFitError: a drive has too little free space.
            LockedError: another run uses an NVMe path.
        """
        run, plan = self.run, self.plan
        give_back_freed_memory()
        # Everything that can be refused is looked at before anything is allocated.
        if run.model.hub is not None and not run.model.from_scratch:
            fetch_weights(run.model.hub, lambda file: self.observer.on_message(str(file)))
        loader = None if run.model.from_scratch else open_loader(run.model.folder, plan.graph)
        source = self._weight_source(loader)
        if run.model.use_liger_kernel:
            apply_liger_kernels(plan.graph.model, with_mlps=not run.model.mlp_rows)
        is_with_all = run.world.size == self.group.world.size  # else one rank is looked at, alone
        if is_with_all:
            self.group.one_after_the_other(self._claim_folders)
        check_drives(plan)
        if is_with_all:
            self.group.wait_for_all()  # a store that opens removes files of dead runs, which other ranks count
        self.timeline = Timeline()
        notice, model_type = self.tell, type(plan.graph.model).__name__
        # The store closes first, while errors of the device are still explained.
        with (
            device_errors_explained(),
            deterministic_kernels(plan.device, model_type, enabled=run.is_deterministic),
            open_store(plan, on_notice=notice, on_event=self.timeline.on_event, loader=loader) as self.store,
        ):
            store = self.store
            self.timeline.read_usage = lambda: {name: tier.used_bytes for name, tier in store.stats().tiers.items()}
            self.weights = Weights(self.store, plan, source, self.activity, self.observer.on_message, self.group)
            yield self

    def _claim_folders(self) -> None:
        if self.group.world.local_rank == 0:
            claim_folders(self.plan)

    def _weight_source(self, loader: WeightLoader | None) -> WeightSource:
        graph, spec = self.plan.graph, self.run.model
        if loader is None:
            return RandomWeights(graph.model, self.run.seed)
        if loader.origin.carried.names:
            self.observer.on_message(str(loader.origin.carried))
        if adapters_of(graph) is None:
            return loader
        source = AdaptedWeights(graph, loader, self.run.seed, None if spec.lora is None else spec.lora.folder)
        self.observer.on_message(str(source))
        return source

    def load(self, candidates: Sequence[Checkpoint] = ()) -> Checkpoint | None:
        """Fill weights and optimizer state unit by unit, then reserve what only steps need.

        Args:
            candidates: checkpoints to start from, best first; one that is damaged is reported and passed over.

        Returns:
            The checkpoint that was loaded; None: the run starts from the model's weights.

        Raises:
            ModelFolderError: the weights cannot be read.
            InitializationError: the model cannot initialize its weights.
            CheckpointError: no candidate is whole, or the model's folder no longer keeps the tensors that the run began
                with.
        """
        placement = self.plan.placement
        reserve(self.store, placement.generation_bytes)
        register_blocks(self.store, self.plan, durable=True)
        checkpoint = self.weights.load(candidates)
        # Only now: the fp32 copy of a unit that is loaded takes the room that its gradient has in a step, so that a run
        # that fits also starts.
        register_transient_blocks(self.store, self.plan)
        self._tell_of_memory()
        return checkpoint

    def _tell_of_memory(self) -> None:
        """Say what RAM took to be made resident and page-locked, if that is worth knowing."""
        ram = self.store.tier("ram")
        if not isinstance(ram, RamTier) or ram.populate_s + ram.pin_s < _WORTH_TELLING_S:
            return
        pinned = f", page-locked in {format_duration(ram.pin_s)}" if ram.pin_s >= _WORTH_TELLING_S / 10 else ""
        self.observer.on_message(
            f"RAM: {format_size(ram.made_bytes)} made resident in {format_duration(ram.populate_s)}{pinned}"
        )

    @contextmanager
    def _resumed(self, candidates: Sequence[Checkpoint]) -> Iterator[None]:
        """Load, and put the run at the step of its checkpoint, with all that saves, evaluates and reports its steps."""
        run, plan, tell = self.run, self.plan, self.observer.on_message
        checkpoint = self.load(candidates)
        if checkpoint is not None and checkpoint is not candidates[0]:
            # The newest one has this config, or it was allowed; this one may have been saved before it changed.
            self._check_changes(checkpoint, allow=True)
        if checkpoint is not None and checkpoint.state.arithmetic != ARITHMETIC:
            self._warn(
                f"the checkpoint of step {checkpoint.state.step} is of a version of this program that adds numbers in "
                "another order. Nothing of it is lost; from here on, losses and weights differ in their last bits from "
                "what that version would have computed"
            )
        drive_bytes = plan.checkpoint_bytes_on_drives
        for line in describe_drives(run.checkpoint, drive_bytes * run.world.local_size):
            tell(line)
        # Left in the reverse order, and before the store: loggers, then the copier, which reads checkpoints.
        with ExitStack() as stack:
            self.copier = stack.enter_context(self._make_copier())
            saved = None
            if checkpoint is not None and checkpoint.is_in_stores(run.output_dir, run.world.size):
                saved = checkpoint
                self.copier.offer(saved)  # a kill may have cut its copy short
            step = None if checkpoint is None else checkpoint.state.step
            if self.group.world.is_first:
                write_resolved(self.config)
                write_plan(plan, step)
            # Before the loggers: one of them drops what the file has of later steps.
            evaluations = {}
            if step is not None and self.group.world.is_first:
                evaluations = last_evaluations(run.output_dir / METRICS_NAME, step)
            evaluations = self.group.broadcast(evaluations)
            self._loggers = make_loggers(self._logging, step, tell) if self.group.world.is_first else []
            for logger in self._loggers:
                stack.enter_context(logger)
            self._observers = Observers([self.observer, *self._loggers])
            self._ask_reference(checkpoint)
            self.state = self._first_state() if checkpoint is None else self._continued_state(checkpoint.state)
            self._is_continued = checkpoint is not None
            self.signals = RunSignals(
                stops_after_step=run.checkpoint.table.save_on_signal,
                # While it waits for space for a checkpoint, the saver itself looks for a stop, and may still save.
                is_stuck=lambda: self.store.is_paused,
                activity=self.activity,
            )
            self.evaluator = Evaluator(
                self._evaluation,
                plan,
                self.store,
                self._evaluation_sets,
                self._observers,
                timeline=self.timeline,
                activity=self.activity,
                steps_per_epoch=self.loader.steps_per_epoch,
                max_steps=self.state.max_steps,
                should_stop=self._agree_to_stop,
                before=evaluations,
                plans=self._evaluation_plans,
                samplers=self._samplers,
            )
            self._saver = self.saver = Saver(
                run.checkpoint,
                self.store,
                self._make_writer(checkpoint, self._find_best(candidates)),
                self._observers,
                self._begin_checkpoint,
                self.copier,
                self.activity,
                should_stop=lambda: self.signals.stop_requested,
                written_bytes=plan.checkpoint_bytes_in_output_dir,
                steps_per_epoch=self.loader.steps_per_epoch,
                saved=saved,
            )
            yield

    def _find_best(self, candidates: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation so far. Where it is gone, the next one is compared with none."""
        best = Best.of_state(self.state.best)
        if best is None or not self._best.is_kept:
            return None
        for each in candidates:
            if each.is_of(self.run.output_dir) and not each.is_copy and each.step == best.step:
                return each
        self._warn(
            f"the checkpoint of the best evaluation, of step {best.step}, is gone: the next one counts as the best"
        )
        self.state = replace(self.state, best=None)
        return None

    def _make_copier(self) -> CheckpointCopier:
        drive_bytes = sum(self.group.gather(self.plan.checkpoint_bytes_on_drives))  # homes may differ between ranks
        rank, gather = self.run.world.rank, self.group.gather
        return CheckpointCopier(self.run.checkpoint, drive_bytes, self.observer.on_message, rank, gather)

    def _make_writer(self, loaded: Checkpoint | None, best: Checkpoint | None) -> CheckpointWriter:
        run, tell = self.run, self._observers.on_message
        path = run.output_dir / CHECKPOINTS_NAME
        folder = CheckpointFolder(path, run.world.rank, self.group.gather, run.checkpoint.table.save_total_limit, tell)
        folder.best = best
        return CheckpointWriter(
            folder,
            self.store,
            lanes=run.num_lanes,
            elements={key: place.num_elements for key, place in saved_places(self.plan).items()},
            is_past=lambda each: loaded is None or not loaded.is_of(run.output_dir) or is_not_after(each, loaded),
        )

    def _ask_reference(self, checkpoint: Checkpoint | None) -> None:
        """Have the loaders know what the model that the run starts from says of their answers, if the loss asks."""
        preference = self.run.objective.preference
        self._reference_record: Mapping[str, Any] = {}
        if preference is None or not preference.needs_reference:
            return
        known = None if checkpoint is None else checkpoint.state.model.get(RECORD, {})
        reference = Reference(
            self.plan,
            self.store,
            timeline=self.timeline,
            activity=self.activity,
            on_message=self.observer.on_message,
            known=known,
            group=self.group,
        )
        reference.give([self.loader, *(each.loader for each in self._evaluation_sets)])
        self._reference_record = {RECORD: reference.record}

    def _first_state(self) -> RunState:
        run = self.run
        return RunState(
            step=0,
            max_steps=self._num_steps,
            num_updates=0,
            epoch=0,
            epoch_step=0,
            num_real_tokens=0,
            num_trained_tokens=0,
            seconds=0.0,
            first_loss=None,
            last_loss=None,
            seed=run.seed,
            data_seed=run.data.seed,
            lr_schedule={
                "type": run.optimizer.lr_scheduler_type,
                "learning_rate": run.optimizer.learning_rate,
                "num_steps": self._num_steps,
                "warmup_steps": run.optimizer.num_warmup_steps(self._num_steps),
            },
            config_toml=to_toml(self.config),
            data_fingerprint=self.loader.fingerprint(),
            model={**describe_model(self.plan), **self.weights.carried, **self._reference_record},
            run_name=run.name,
            saved_at="",
            versions=installed_versions(),
            arithmetic=ARITHMETIC,
        )

    def _continued_state(self, before: RunState) -> RunState:
        """Return this run's state at a step of an earlier start, and let the loader go on there."""
        rows_before = config_from_toml(before.config_toml).rows_per_step
        position = continued_position(before, rows_before, self.run.batch.num_rows, self.loader.steps_per_epoch)
        self.loader.seek(position)
        return replace(
            self._first_state(),
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
            best=before.best if self._best.is_on and self._is_judged_alike(before) else None,
        )

    def _is_judged_alike(self, before: RunState) -> bool:
        """Return whether the best evaluation of an earlier start was found by the figure that decides now."""
        if before.best is None:
            return True
        then = resolve_best(config_from_toml(before.config_toml))
        figures = [(each.metric, each.is_greater_better, each.is_average) for each in (then, self._best)]
        if figures[0] != figures[1]:
            self._warn(
                f"the best evaluation so far was that of step {Best(**before.best).step} by another figure, "
                f"{then.described}: the next one counts as the best"
            )
        return figures[0] == figures[1]

    # -- steps ---------------------------------------------------------------------------------------------------

    def make_engine(self, num_steps: int, *, first_step: int = 0, num_updates: int = 0) -> StepEngine:
        """Return an engine on the loaded store, and give the prefetcher the schedule of ``num_steps`` steps.

        Args:
            first_step: steps done before.
            num_updates: those of them whose gradient was used.
        """
        plan = self.plan
        self._schedule_steps(first_step, num_steps)
        self._engine = StepEngine(
            self.store,
            plan.for_steps,
            plan.recipe(),
            collectives=plan.collectives(),
            timeline=self.timeline,
            activity=self.activity,
        )
        self._engine.num_updates = num_updates
        self._moved_before = MovedByLink()
        return self._engine

    def finish_updates(self) -> None:
        """Make the update that the last step left to the next one."""
        if self._engine is not None:
            self._engine.finish_updates()

    def _schedule_steps(self, first_step: int, num_steps: int) -> None:
        """Give the prefetcher steps, the first of which finds nothing to update."""
        schedule = self.plan.program.schedule(self.plan.placement.homes, num_steps, first_step=first_step)
        set_schedule(self.store, schedule, self.run.prefetch_bytes)

    def _schedule_to_next_stop(self) -> None:
        """Give the prefetcher the steps up to the next evaluation or checkpoint, and no more.

        There the pending update is made without the forward that it stands beside in a step: what was fetched ahead for
        that one would have to make way for the update, or not, by who is faster.
        """
        self._schedule_steps(self.state.step, self._num_steps_to_next_stop)

    @property
    def _num_steps_to_next_stop(self) -> int:
        step = self.state.step
        evaluates, saves = self.evaluator.next_step(step), self.saver.next_step(step)
        return (evaluates if saves is None else min(evaluates, saves)) - step

    def _begin(self) -> None:
        """Compile the kernels, and report the start."""
        run, plan, state = self.run, self.plan, self.state
        self.activity.begin("compiling kernels of the optimizer")
        self.group.one_after_the_other(plan.warm_up)  # compiled kernels are kept in a cache
        self._observers.on_start(
            RunInfo(run.name, self.config.task, str(plan.device), run.output_dir, state.max_steps, run.batch.num_tokens)
        )
        if self._is_continued:
            self._observers.on_message(f"continuing after step {state.step} of {state.max_steps}")
        self._report_warmup()
        self.store.wait_idle()  # what loading still writes is not part of any step

    def _report_warmup(self) -> None:
        """Report the first learning rate: it is 0 in transformers' schedules, which users do not expect."""
        step, peak = self.state.step, self.run.optimizer.learning_rate
        if step >= self._warmup_steps:
            return
        first = self._learning_rate(0)
        text = f"warm-up: the learning rate rises from {first:.3g} to {peak:.3g} over "
        text += f"{self._warmup_steps} step{'s' if self._warmup_steps != 1 else ''}"
        if first == 0.0 and step == 0:
            text += "; the first one changes no weights, as in transformers"
        self._observers.on_message(text)

    @property
    def _warmup_steps(self) -> int:
        return int(self.state.lr_schedule["warmup_steps"]) if self.run.optimizer.has_warmup else 0

    def _begin_steps(self) -> None:
        step = self.state.step
        self.make_engine(self._num_steps_to_next_stop, first_step=step, num_updates=self.state.num_updates)
        self._first_step, self._start_s = step, time.perf_counter()
        self._step_seconds = deque[float](maxlen=_MEAN_OF_STEPS)

    def train_step(self) -> None:
        """Run the next step, and report it."""
        assert self._engine is not None
        number, start_s, before = self.state.step, time.perf_counter(), self.store.stats()
        num_ticks, num_micro_batches = len(self.plan.program.ticks), self.plan.num_micro_batches
        self.activity.begin("step", num_parts=num_ticks, num_micro_batches=num_micro_batches)
        batch = next(self.loader)
        self.timeline.is_on = number + 1 in self.run.trace_steps
        lr = self._learning_rate(number)
        result = self._engine.step(batch.micro_batches, number=number, lr=lr)
        step_s, moved = time.perf_counter() - start_s, self.store.stats() - before
        links = self._links(moved)
        records = self._agree(step_s, moved, links)
        self.state = replace(
            self.state.with_loss(result.loss),
            step=number + 1,
            num_updates=self._engine.num_updates,
            epoch=batch.position.epoch,
            epoch_step=batch.position.step,
            num_real_tokens=self.state.num_real_tokens + batch.num_real_tokens,
            num_trained_tokens=self.state.num_trained_tokens + result.num_trained_tokens,
            seconds=self.state.seconds + step_s,
        )
        self._step_seconds.append(step_s)
        if result.left_out:
            self._observers.on_message(
                f"step {number + 1}: the gradients of {len(result.left_out)} layers are not finite, these were not "
                f"updated: {', '.join(result.left_out)}"
            )
        self._observers.on_step(self._metrics(batch, result, lr, step_s, moved, links, records))

    def _agree(self, step_s: float, moved: StoreStats, links: MovedByLink) -> Sequence[StepRecord]:
        """Exchange records at the end of a step: all ranks stop or save after the same one. Return those of all."""
        if self.group.world.is_single:
            return ()
        is_due = self.group.world.is_first and self.saver.is_due(self.state.step + 1)
        record = StepRecord(
            stops=self.signals.stop_requested,
            saves=self.signals.save_requested or is_due,
            is_hung_up=self.signals.is_hung_up,
            is_paused=self.is_paused(),
            step_s=step_s,
            tier_used_bytes={name: tier.used_bytes for name, tier in moved.tiers.items()},
            stall_s=dict(moved.stall_s),
            link_bytes=links.num_bytes,
            written_bytes=dict(moved.written_bytes),
            rss_bytes=psutil.Process().memory_info().rss,
        )
        records = self.group.gather(record)
        self._agreed = Agreed.of(records)
        return records

    def _links(self, moved: StoreStats) -> MovedByLink:
        """Return what each link moved in the last step: blocks, and what the engine moves beside them."""
        assert self._engine is not None
        now = MovedByLink(self._engine.moved_bytes, self._engine.moving_s)
        before, self._moved_before = self._moved_before, now
        return MovedByLink(
            _added(_link_bytes(moved), _added(now.num_bytes, before.num_bytes, -1)),
            _added({name: link.busy_s for name, link in moved.links.items()}, _added(now.busy_s, before.busy_s, -1)),
        )

    def _metrics(
        self,
        batch: StepBatch,
        result: StepResult,
        lr: float,
        step_s: float,
        moved: StoreStats,
        links: MovedByLink,
        records: Sequence[StepRecord],
    ) -> StepMetrics:
        state, position = self.state, batch.position
        flops = step_flops(
            self.plan.trace,
            num_places=sum(micro_batch["input_ids"].numel() for micro_batch in batch.micro_batches),
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            kept=self.plan.program.kept,
            kept_parts=0 if self.run.objective.preference is not None else self.plan.program.kept_parts,
            saved_attention=self.plan.program.saved_attention,
        )
        each_s = (time.perf_counter() - self._start_s) / (state.step - self._first_step)
        return StepMetrics(
            step=state.step,
            max_steps=state.max_steps,
            epoch=position.epoch + position.step / self.loader.steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            step_s=step_s,
            eta_s=each_s * (state.max_steps - state.step),
            mean_step_s=sum(self._step_seconds) / len(self._step_seconds),
            warmup_steps=self._warmup_steps,
            tier_used_bytes={name: tier.used_bytes for name, tier in moved.tiers.items()},
            tier_capacity_bytes={name: tier.capacity_bytes for name, tier in moved.tiers.items()},
            stall_s=dict(moved.stall_s),
            written_bytes=dict(moved.written_bytes),
            link_bytes=records[0].link_bytes if records else links.num_bytes,
            ranks=[record.figures() for record in records],
            link_busy_s=links.busy_s,
            rss_bytes=psutil.Process().memory_info().rss,
            model_flops=flops.model,
            hardware_flops=flops.hardware,
            preferences=result.preferences,
        )

    def _end_steps(self) -> None:
        """Make the last update, and write the timeline."""
        if self.signals.is_hung_up or self._agreed.is_hung_up:
            self._observers.on_message("the terminal was closed (SIGHUP): stopping after this step, and saving")
        self.activity.begin("making the last update")
        self.finish_updates()
        if self.timeline.spans and self.group.world.is_first:
            path = self.timeline.write(self.run.output_dir / TIMELINE_NAME)
            self._observers.on_message(f"timeline written to {path}: open it at https://ui.perfetto.dev")

    # -- evaluate, save, export ----------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate if it is due; the steps that follow start as after a checkpoint."""
        if self.evaluator.is_due(self.state.step) and not self._stops:
            self.finish_updates()
            self.evaluator.run(self.state.step)
            self._schedule_to_next_stop()
            self._compare()

    def _compare(self) -> None:
        """Note whether the evaluation of this step is the best one. Before the first step there is nothing to keep."""
        step = self.state.step
        found = {name: each for name, each in self.evaluator.latest.items() if each.step == step}
        if not self._best.is_on or step == 0 or len(found) < len(self.evaluator.names):
            return
        try:
            value = self._best.value_of(found)
        except MetricError as error:
            raise _unknown_metric(self._best, error) from error
        # Rank 0's: a perplexity may differ in its last bit on another kind of processor.
        best = self.group.broadcast(self._best.after(Best.of_state(self.state.best), step, value))
        self.state = replace(self.state, best=best.to_state())
        if self._best.is_over(best):
            self._observers.on_message(
                f"stopping early: {best.num_worse} evaluations in a row were not better than that of step {best.step}, "
                f"{best.metric} {best.value:.4f}"
            )

    def save_if_due(self) -> None:
        """Save if the config, or a signal, asks for it after this step; training goes on while it is written."""
        if self._stops:
            return  # ``save_last`` does
        step = self.state.step
        if self.group.world.is_single:
            is_due = self.saver.is_due(step) or self._is_best_at(step)
            saves = (is_due and self._has_steps_left) or self.signals.save_requested
        else:
            saves = (self._agreed.saves or self._is_best_at(step)) and self._has_steps_left
        if saves:
            self.signals.save_requested = False
            self.activity.begin("saving")
            self.saver.save(self._state_now())
            # A stop may have come while the ranks waited for room: no step follows, as in a run of one process.
            self._agree_to_stop()

    def _is_best_at(self, step: int) -> bool:
        """Whether the checkpoint of this step is to be kept as the best one."""
        best = Best.of_state(self.state.best)
        return self._best.is_kept and best is not None and best.step == step

    def save_last(self) -> None:
        """Save after the last step, or before a stop, and wait until all checkpoints are on disk."""
        table = self.run.checkpoint.table
        if table.save_strategy != "no" or (self._stops and table.save_on_signal):
            self.activity.begin("saving")
            self.saver.save(self._state_now(), wait=True)
        self.saver.finish()
        self.saver.copy_last()

    def _begin_checkpoint(self) -> None:
        """Make the pending update; the steps that follow start as the first one does, with none."""
        self.finish_updates()
        self._schedule_to_next_stop()

    def _state_now(self) -> RunState:
        return replace(self.state, saved_at=now_text())

    def _finish_copies(self) -> None:
        """Wait for the copies that are due; another signal gives them up."""
        try:
            if self.group.world.is_single:  # of several ranks the others wait for what this one copies
                self.signals.steps_are_over()
            self.copier.finish()
        except KeyboardInterrupt:
            self._observers.on_message("the copy was given up: the next start of the run makes it")

    def end_steps(self) -> None:
        """Release what only steps need; weights and optimizer state stay. Makes the pending update."""
        self.finish_updates()
        self._engine = None
        self.store.set_schedule(None)
        unregister_transient_blocks(self.store, self.plan)

    def export(self) -> Path:
        """Write the Hugging Face folder of the trained model, unit by unit. No step can follow."""
        self.activity.begin("exporting the model")
        self.end_steps()  # its room serves the fp32 copy of the unit that is written
        best = Best.of_state(self.state.best)
        if self._best.is_kept and best is not None and (self._best.is_average or best.step != self.state.step):
            return self._export_by_first(partial(self._export_saved, best))
        if self.group.world.is_single:
            return self._export(self.weights.exported)
        gathered = GatheredWeights(self.weights, self.plan, self.group, lambda: self.signals.stop_requested)
        if self.group.world.is_first:
            with gathered.served():
                return self._export(gathered.exported)
        if not gathered.serve():
            raise ExportStopped
        return self.run.output_dir / FINAL_NAME

    def _export_by_first(self, export: Callable[[], Path]) -> Path:
        """Have rank 0 export something that it can read alone; the others wait for it."""
        if self.group.world.is_single:
            return export()
        folder: Path | None = None
        if self.group.world.is_first:
            with contextlib.suppress(KeyboardInterrupt):
                if not self.signals.stop_requested:
                    self.signals.steps_are_over()  # from now on the next stop raises
                    folder = export()
        folder = self.group.broadcast(folder)
        if folder is None:
            raise ExportStopped
        return folder

    def _export_saved(self, best: Best) -> Path:
        """Write the model of the best evaluation, from its checkpoint."""
        run = self.run
        what = "the average of the weights" if self._best.is_average else "the model"
        self._observers.on_message(
            f"exporting {what} of step {best.step}, the best one: {best.metric} {best.value:.4f}"
        )
        return export_checkpoint(
            run.output_dir,
            run.output_dir / FINAL_NAME,
            step=best.step,
            dtype=export_dtype(run.export, run.dtype),
            max_shard_size=run.export.max_shard_size,
            merge=run.export.merge,
            ema=self._best.is_average,
            overwrite=True,
            on_progress=lambda unit, done, total: self.activity.moved_in_all(done, total),
        )

    def _export(self, exported: ExportSource) -> Path:
        run = self.run
        if adapters_of(self.plan.graph) is not None and not run.export.merge:
            return export_adapter(
                self.plan.graph,
                exported,
                run.output_dir / FINAL_NAME,
                base_model=run.model.name,
                dtype=export_dtype(run.export, run.dtype),
                copy_from=Path(run.model.tokenizer_folder),
                record={"step": self.state.step},
            )
        return export_model(
            self.plan.graph,
            exported,
            run.output_dir / FINAL_NAME,
            dtype=export_dtype(run.export, run.dtype),
            max_shard_nbytes=run.export.max_shard_size,
            copy_from=Path(run.model.tokenizer_folder),
            record={"step": self.state.step},
            origin=self.weights.source.origin,
            carried_checksum=self.weights.carried.get(CARRIED_CHECKSUM),
            on_bytes=self.activity.moved_in_all,
        )

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


def _link_bytes(moved: StoreStats) -> dict[str, int]:
    return {name: link.num_bytes for name, link in moved.links.items()}


def _added(numbers: Mapping[str, Number], others: Mapping[str, Number], factor: int = 1) -> dict[str, Number]:
    """Return numbers with others added to those of the same name."""
    return {name: numbers.get(name, 0) + factor * others.get(name, 0) for name in {**numbers, **others}}


def _unknown_metric(spec: BestSpec, error: MetricError) -> ConfigError:
    key = "evaluation.metric_for_best_model"
    return ConfigError("the config", [Problem(key, f'{key} = "{spec.metric}", but {error}', "Write one of them")])


# -- parts of a run that a checkup looks at too --------------------------------------------------------------------


def check_positions(model: ModelSpec, max_length: int, graph: ModelGraph) -> None:
    """Refuse rows that are longer than the positions which the model has learned.

    Raises:
        ConfigError: names data.max_length.
    """
    positions = num_learned_positions(graph)
    if positions is not None and max_length > positions:
        message = f"data.max_length = {max_length}, but this model has {positions} positions"
        problem = Problem("data.max_length", message, f"Write at most {positions}")
        raise ConfigError(model.name, [problem])


def tokenizer_of(model: ModelSpec) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run."""
    return load_tokenizer(model.tokenizer_folder, chat_template=model.chat_template)


def check_token_ids(model: ModelSpec, dataset: TokenDataset, graph: ModelGraph) -> None:
    """Refuse rows with tokens that the model has no embedding for.

    Raises:
        DataError: the tokenizer is not the model's.
    """
    check_ids(dataset, graph.model.get_input_embeddings().weight.shape[0], where=model.tokenizer_folder)


def make_loader(plan: Plan, dataset: TokenDataset, tokenizer: PreTrainedTokenizerFast) -> BatchLoader:
    """Return the batches of a run, from the beginning.

    Raises:
        DataError: a teacher's scores are not those of the data, or are damaged.
    """
    data, teacher = plan.run.data, None
    if data.scores is not None:
        vocab_size = plan.graph.config.get_text_config().vocab_size
        teacher = TeacherScores(data.scores, plan.run.objective.teacher_k, vocab_size)
        teacher.check_covers(dataset, tokenizer_checksum(tokenizer))
    return BatchLoader(
        dataset,
        micro_batch_size=plan.micro_batch_size,
        num_micro_batches=plan.num_micro_batches,
        max_length=plan.run.batch.max_length,
        packing=bool(plan.run.data.table.packing),
        data_seed=plan.run.data.seed,
        pad_token_id=pad_token_id(tokenizer),
        images=plan.run.data.image_processor(tokenizer),
        teacher=teacher,
    )


def with_kept_lanes(run: RunSpec) -> RunSpec:
    """Return a run with the lanes of the checkpoint that it continues, where the config leaves them open.

    Before the plan, as open sums of lanes take memory.
    """
    if run.batch.num_lanes is not None:
        return run
    kept = lanes_of_newest(run.output_dir, run.checkpoint.table.resume_from_checkpoint)
    return replace(run, batch=replace(run.batch, num_lanes=kept))


def describe_model(plan: Plan) -> Mapping[str, Any]:
    """Return ``RunState.model``: what is trained, and what else decides about its arithmetic."""
    graph, folder = plan.graph, plan.run.model.folder
    # A CPU's matrix products and sums have other last bits with another number of threads.
    threads = {"threads": torch.get_num_threads()} if plan.device.type == "cpu" else {}
    return {
        "name": plan.run.model.name,
        "class": type(graph.model).__name__,
        "num_parameters": graph.num_parameters,
        "dtype": str(graph.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "attention": graph.model.config._attn_implementation,
        "config_xxh3_64": checksum(Path(folder, "config.json").read_bytes()),
        "decays": _decays(plan, plan.run.optimizer.weight_decay_exclude),
        **threads,
    }


def _decays(plan: Plan, exclude: Sequence[str]) -> str:
    """Return a checksum of the names of the parameters that weight decay applies to."""
    entries = [entry for layout in plan.graph.layouts.values() if layout.trainable for entry in layout.entries]
    names = {entry.parameter for entry in entries if decays(entry, exclude)}
    return checksum("\n".join(sorted(names)).encode())


def with_decays(checkpoint: Checkpoint, plan: Plan) -> Checkpoint:
    """Return a checkpoint that says which parameters decayed; those of before this was noted are told by their globs.

    Then vectors never decayed, also where nothing was excluded.
    """
    model = checkpoint.state.model
    if "decays" in model:
        return checkpoint
    exclude = config_from_toml(checkpoint.state.config_toml).optimizer.weight_decay_exclude
    decayed = _decays(plan, exclude or ("",))  # names nothing, but is not empty
    return replace(checkpoint, meta={**checkpoint.meta, "model": {**model, "decays": decayed}})
