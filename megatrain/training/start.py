"""Starts a run from its model's weights or from a checkpoint, and creates the state of its first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatrain.base.observer import RunSummary
from megatrain.checkpoint.copier import open_copier
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.remote_folder import settings_at_url
from megatrain.checkpoint.resume import (
    ConfigChangedError,
    LostCheckpointsError,
    check_changes,
    download_newest,
    find_candidates,
    settings_of_newest,
)
from megatrain.checkpoint.state import ARITHMETIC, CheckpointError, RunState, installed_versions
from megatrain.config.resolved import changes_from, config_from_toml, to_toml
from megatrain.data.loader import BatchLoader
from megatrain.data.row_order import LoaderPosition
from megatrain.models.hub import missing_weights
from megatrain.models.load import open_loader
from megatrain.optim.base import is_decayed
from megatrain.plan.plan import Plan
from megatrain.plan.run_spec import RunSpec
from megatrain.run.loggers import METRICS_NAME, last_evaluations
from megatrain.run.record import summary_if_done
from megatrain.training.resolve import RunSettings, resolve_best
from megatrain.training.weights import folder_record
from tiered import checksum

__all__ = ["RunStart", "describe_model", "with_checkpoint_settings", "with_decay_checksum"]


@dataclass(frozen=True, slots=True)
class RunStart:
    """Start of a run: finds the checkpoint from which it resumes, and creates the state before its first step.

    Attributes:
        settings: Config and rules of this start, for comparison with a checkpoint.
        loader: Batches of the run. ``make_state`` moves the loader to the resumed position.
        allows_changes: Whether to resume a checkpoint even if config changes alter results.
        on_message: Called with messages for the user.
    """

    plan: Plan
    settings: RunSettings
    loader: BatchLoader
    num_steps: int
    allows_changes: bool
    on_message: Callable[[str], None]

    def find_candidates(self) -> tuple[Sequence[Checkpoint], RunSummary | None]:
        """Return the checkpoints from which to resume, preferred first, and a summary if the run is already done.

        Raises:
            CheckpointError: Checkpoints exist but cannot be used.
            ConfigChangedError: Config changes alter results.
        """
        run, are_lost = self.plan.run, False
        if run.checkpoint.table.copy_url is not None:
            download_newest(run.checkpoint, self.on_message, self._check_before_fetch)
        try:
            candidates = find_candidates(run.checkpoint, self.on_message)
        except LostCheckpointsError as error:
            # The user may have deleted the parts on drives after the model was exported.
            if self.find_summary(error.newest) is None:
                raise
            candidates, are_lost = [error.newest], True
        else:
            if candidates:
                self.check_changes(candidates[0], allow=self.allows_changes)
        summary = self.find_summary(candidates[0]) if candidates else None
        if summary is None:
            return candidates, None
        self._report_end(summary)
        if not are_lost:
            self._copy_last(candidates[0])
        return candidates, replace(
            summary, evaluations=last_evaluations(run.output_dir / METRICS_NAME, summary.num_steps)
        )

    def find_summary(self, checkpoint: Checkpoint) -> RunSummary | None:
        """Return the summary of a finished run, or None if steps or the export are missing."""
        run = self.plan.run
        return summary_if_done(checkpoint, self.num_steps, run.output_dir, run.export.dtype, self.settings.best)

    def _report_end(self, summary: RunSummary) -> None:
        """Report that the run is done, and how the user can train for more steps."""
        length = f"all {self.num_steps} steps" if summary.num_steps == self.num_steps else f"{summary.num_steps} steps"
        if summary.num_steps > self.num_steps:
            length += f", but the config requests {self.num_steps}"
        elif summary.num_steps < self.num_steps:
            length += f" of {self.num_steps}, and stopped early"
        optimizer = self.plan.run.optimizer
        changes = ""
        if optimizer.depends_on_length:
            changes = f": its learning rate ({optimizer.lr_scheduler_type}) depends on the length, so it differs "
            changes += "from one run of N steps"
        self.on_message(
            f"nothing to do: this run is done, {length}. To train on, start it "
            f"with --max-steps N --allow-config-change, N above {summary.num_steps}{changes}. To start again, name "
            "another output_dir"
        )

    def _copy_last(self, checkpoint: Checkpoint) -> None:
        """Copy a finished run's checkpoint if the config requests copies and no earlier start made this copy."""
        # Only rank 0 runs this code, but a copy into a folder needs all ranks of the checkpoint.
        if not checkpoint.is_copy and (not checkpoint.is_listed or self.plan.run.checkpoint.table.copy_url is not None):
            drive_bytes = self.plan.checkpoint.drive_bytes
            with closing(open_copier(self.plan.run.checkpoint, drive_bytes, self.on_message)) as copier:
                copier.offer(checkpoint, is_last=True)
                copier.finish()

    def _check_before_fetch(self, checkpoint: Checkpoint) -> None:
        """Check, before any download, that this run can resume from a remote checkpoint."""
        model, url = self.plan.run.model, self.plan.run.checkpoint.table.copy_url
        try:
            self.check_changes(checkpoint, allow=self.allows_changes)
            # Weights that are still to be downloaded from a hub are compared after the download.
            if not model.table.train_from_scratch and (model.hub is None or not missing_weights(model.hub)):
                folder_record(self.plan, open_loader(model.folder, self.plan.graph).origin, checkpoint)
        except (CheckpointError, ConfigChangedError) as error:
            raise type(error)(
                f"{error}\nThat checkpoint is at '{url}', and no part of it was downloaded. For a separate run, name "
                "another URL in checkpoint.save_copy"
            ) from error

    def check_changes(self, checkpoint: Checkpoint, *, allow: bool) -> None:
        """Compare the run's config, model and rows with the records of a checkpoint.

        Raises:
            ConfigChangedError: A difference alters results, and ``allow`` is False.
        """
        check_changes(
            changes_from(checkpoint.state.config_toml, self.settings.config),
            with_decay_checksum(checkpoint, self.plan),
            describe_model(self.plan),
            self.loader.fingerprint(),
            allow=allow,
            on_notice=self.on_message,
        )

    def report_loaded(self, checkpoint: Checkpoint | None, candidates: Sequence[Checkpoint]) -> None:
        """Report notable facts about the loaded checkpoint.

        Args:
            checkpoint: One of the candidates, or None for a new run.
            candidates: Result of ``find_candidates``.
        """
        if checkpoint is None:
            return
        if checkpoint is not candidates[0]:
            # ``find_candidates`` checked only the newest checkpoint, and an older one may have a different config.
            self.check_changes(checkpoint, allow=True)
        if checkpoint.state.arithmetic != ARITHMETIC:
            self.on_message(
                f"warning: the checkpoint of step {checkpoint.state.step} is from a version of this program that adds "
                "numbers in another order. Nothing is lost, but from now on, losses and weights differ in their "
                "last bits from the results of that version"
            )

    def make_state(
        self, checkpoint: Checkpoint | None, candidates: Sequence[Checkpoint], record: Mapping[str, Any]
    ) -> tuple[RunState, Checkpoint | None]:
        """Return the state before the first step, and the checkpoint of the best evaluation so far, or None.

        Also move the loader to the resumed position.

        Args:
            checkpoint: Checkpoint from which the run resumes, or None for a new run.
            candidates: Result of ``find_candidates``.
            record: Entries of ``RunState.model`` in addition to ``describe_model``.
        """
        state = self._first_state(record)
        if checkpoint is None:
            return state, None
        state = self._resumed_state(state, checkpoint.state)
        best = state.best
        if best is None or not self.settings.best.is_kept:
            return state, None
        for candidate in candidates:
            if candidate.belongs_to(self.plan.run.output_dir) and not candidate.is_copy and candidate.step == best.step:
                return state, candidate
        self.on_message(
            f"warning: the checkpoint of the best evaluation, of step {best.step}, is gone: the next one counts as the "
            "best"
        )
        return replace(state, best=None), None

    def _first_state(self, record: Mapping[str, Any]) -> RunState:
        run = self.plan.run
        return RunState(
            step=0,
            max_steps=self.num_steps,
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
                "num_steps": self.num_steps,
                "warmup_steps": run.optimizer.num_warmup_steps(self.num_steps),
            },
            config_toml=to_toml(self.settings.config),
            data_fingerprint=self.loader.fingerprint(),
            sources=self.loader.dataset.source_checksums(),
            model={**describe_model(self.plan), **record},
            run_name=run.name,
            saved_at="",
            versions=installed_versions(),
            arithmetic=ARITHMETIC,
        )

    def _resumed_state(self, state: RunState, old_state: RunState) -> RunState:
        old_rows_per_step = config_from_toml(old_state.config_toml).rows_per_step
        rows_per_step = self.plan.run.batch.num_rows
        position = _resumed_position(old_state, old_rows_per_step, rows_per_step, self.loader.steps_per_epoch)
        self.loader.seek(replace(position, cursor=old_state.cursor))
        return replace(
            state,
            step=old_state.step,
            num_updates=old_state.num_updates,
            epoch=position.epoch,
            epoch_step=position.step,
            cursor=old_state.cursor,
            num_real_tokens=old_state.num_real_tokens,
            num_trained_tokens=old_state.num_trained_tokens,
            seconds=old_state.seconds,
            first_loss=old_state.first_loss,
            last_loss=old_state.last_loss,
            first_losses=old_state.first_losses,
            last_losses=old_state.last_losses,
            best=old_state.best if self.settings.best.is_on and self._has_same_criterion(old_state) else None,
        )

    def _has_same_criterion(self, old_state: RunState) -> bool:
        """Return whether an earlier start chose its best evaluation by the same metric as this run."""
        if old_state.best is None:
            return True
        old_spec = resolve_best(config_from_toml(old_state.config_toml))
        criteria = [(spec.metric, spec.is_greater_better, spec.is_average) for spec in (old_spec, self.settings.best)]
        if criteria[0] != criteria[1]:
            self.on_message(
                f"warning: the best evaluation so far, of step {old_state.best.step}, was chosen by another "
                f"metric, {old_spec.description}: the next one counts as the best"
            )
        return criteria[0] == criteria[1]


def _resumed_position(
    state: RunState, old_rows_per_step: int, rows_per_step: int, steps_per_epoch: int
) -> LoaderPosition:
    """Return the data position at which to resume, or the nearest position after a change of batch size or data."""
    step = state.epoch_step * old_rows_per_step // rows_per_step
    if step >= steps_per_epoch:
        return LoaderPosition(state.epoch + 1, 0)
    return LoaderPosition(state.epoch, step)


def with_checkpoint_settings(run: RunSpec) -> RunSpec:
    """Return the run, with unset settings copied from the checkpoint from which it resumes.

    The settings are the number of lanes, the tokens per micro-batch, Muon's treatment of fused parameters, and the
    kernels of liger and flash attention. They affect the plan, so call this function before planning.
    """
    settings = settings_of_newest(run.output_dir, run.checkpoint.table.resume_from_checkpoint)
    if settings is None and run.checkpoint.table.copy_url is not None:  # there is no local checkpoint
        settings = settings_at_url(run.checkpoint.table.copy_url)
    if run.optimizer.optim == "muon" and run.optimizer.muon_fused == "auto":
        rule = "parts" if settings is None else settings.muon_fused
        run = replace(run, optimizer=run.optimizer.model_copy(update={"muon_fused": rule}))
    if settings is None:
        return run
    batch = run.batch
    lanes = settings.num_lanes if batch.num_lanes is None else batch.num_lanes
    tokens = batch.target_tokens if settings.micro_batch_tokens is None else settings.micro_batch_tokens
    run = replace(run, batch=replace(batch, num_lanes=lanes, target_tokens=tokens))
    is_auto = run.model.table.use_liger_kernel == "auto"
    run = run.with_kernels(use_liger_kernel=settings.uses_liger) if is_auto else run
    return run.with_kernels(flash_attention=settings.flash) if run.model.table.flash_attention == "auto" else run


def describe_model(plan: Plan) -> Mapping[str, Any]:
    """Return ``RunState.model``, which describes the model and the settings that affect its arithmetic."""
    graph, folder = plan.graph, plan.run.model.folder
    # On a CPU, the number of threads affects the last bits of matmuls and sums.
    threads = {"threads": torch.get_num_threads()} if plan.device.type == "cpu" else {}
    return {
        "name": plan.run.model.name,
        "class": type(graph.model).__name__,
        "num_parameters": graph.num_parameters,
        "dtype": str(graph.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "attention": graph.model.config._attn_implementation,
        "micro_batch_tokens": plan.run.batch.target_tokens,
        "config_xxh3_64": checksum(Path(folder, "config.json").read_bytes()),
        "decays": _decays_checksum(plan, plan.run.optimizer.weight_decay_exclude),
        **threads,
    }


def with_decay_checksum(checkpoint: Checkpoint, plan: Plan) -> Checkpoint:
    """Add the checksum of parameters with weight decay to an older checkpoint that does not record it.

    The checksum is derived from the globs in the checkpoint's config. In older versions, vectors never decayed.
    """
    model = checkpoint.state.model
    if "decays" in model:
        return checkpoint
    exclude = config_from_toml(checkpoint.state.config_toml).optimizer.weight_decay_exclude
    decay_checksum = _decays_checksum(plan, exclude or ("",))  # the empty glob matches no name
    return replace(checkpoint, meta={**checkpoint.meta, "model": {**model, "decays": decay_checksum}})


def _decays_checksum(plan: Plan, exclude: Sequence[str]) -> str:
    """Return a checksum over the names of all trained parameters that have weight decay."""
    entries = [entry for layout in plan.graph.layouts.values() if layout.trainable for entry in layout.entries]
    names = {entry.parameter for entry in entries if is_decayed(entry, exclude)}
    return checksum("\n".join(sorted(names)).encode())
