"""Checks a config before a run, without training or writing anything.

``refuse_early`` raises the first error that can be found without the model. ``check_run`` checks every part even if
other parts have errors, so that one call reports every mistake.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from megatrain.base.errors import ConfigError, ModelFolderError
from megatrain.base.names import FINAL_NAME
from megatrain.base.owner import find_owner
from megatrain.checkpoint.locations import describe_drives
from megatrain.checkpoint.resume import LostCheckpointsError, check_changes, find_candidates
from megatrain.config.advice import model_warnings
from megatrain.config.load import load_config, salvage
from megatrain.config.resolved import changes_from, config_from_toml, is_by_contents, with_values
from megatrain.config.schema import RunConfig
from megatrain.data.rows_report import DataError, check_losses
from megatrain.data.sources import is_hub_name, source_files
from megatrain.data.stream import changed_sources, open_dataset
from megatrain.data.table import DatasetConfig
from megatrain.data.token_dataset import TokenDataset
from megatrain.machine import file_systems
from megatrain.machine.resources import resolve_compute_dtype
from megatrain.machine.this_machine import THIS_MACHINE
from megatrain.models.export import check_target
from megatrain.models.folder import ModelFolder, join_names, read_config
from megatrain.models.graph import ModelGraph
from megatrain.models.hub import missing_weights
from megatrain.models.load import open_loader
from megatrain.optim.lr import ScheduleError, schedule_warnings
from megatrain.plan.limits import drive_paths, find_objections
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.tiers import check_drives, check_folders
from megatrain.plan.traced import check_positions
from megatrain.run.loggers import check_loggers
from megatrain.tasks.registry import task_class
from megatrain.training.check_result import EXPECTED_ERRORS, CheckResult
from megatrain.training.preparation import Preparation
from megatrain.training.resolve import (
    RunSettings,
    resolve,
    resolve_checkpoint,
    resolve_data,
    resolve_logging,
    resolve_model,
    resolve_tiers,
)
from megatrain.training.rows import check_token_ids, tokenizer_of
from megatrain.training.start import RunStart, with_checkpoint_settings
from tiered import checksum
from tiered.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["check_run", "plan_one_rank", "refuse_early"]

_BAD_ROW_HINT = 'data.bad_rows = "error" would end the run there. Fix or remove it, or write bad_rows = "drop"'

T = TypeVar("T")
#: A check that yields findings and returns an object that later checks need.
Check = Generator[CheckResult, None, T]


def refuse_early(config: RunConfig, *, allow_config_change: bool = False) -> None:
    """Raise errors that can be found without the model. Planning a large model takes minutes, so this runs first.

    Raises:
        DataError: A file of rows does not exist.
        CheckpointError: The config refers to a missing checkpoint, or forbids resuming although a checkpoint exists.
        ConfigChangedError: The config would resume a checkpoint with different results.
    """
    for error in _path_errors(config, (*config.data.train, *config.data.eval)):
        raise error
    try:
        candidates = find_candidates(resolve_checkpoint(config), lambda text: None)
    except LostCheckpointsError:
        return  # a finished run needs no checkpoint, and an unfinished run raises this error later
    if not candidates or allow_config_change:
        return
    state = candidates[0].state
    old_config, new_config = config_from_toml(state.config_toml), config
    # Keys that depend on the model are compared after the model is loaded.
    if "packing" not in config.data.model_fields_set:
        new_config = with_values(new_config, {"data.packing": old_config.data.packing})
    if config.model.revision is None:
        new_config = with_values(new_config, {"model.revision": old_config.model.revision})
    # The model determines which parameters the globs match, so the globs are compared later.
    new_config = with_values(new_config, {"optimizer.weight_decay_exclude": old_config.optimizer.weight_decay_exclude})
    changes = changes_from(state.config_toml, new_config)
    device = THIS_MACHINE.resolve_device(config.device)
    dtype = resolve_compute_dtype(config.precision.compute_dtype, device)
    model_facts = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    model_config = Path(config.model.model_name_or_path, "config.json")
    if model_config.is_file():
        model_facts["config_xxh3_64"] = checksum(model_config.read_bytes())

    def find_other_changes() -> list[str]:
        """Return further differences that can be found without tokenizing rows."""
        is_streamed = config.data.streaming
        # Streams have checksums of shards, which cannot be compared with checksums of files.
        sources = state.sources if old_config.data.streaming == is_streamed else ()
        compared_keys = {
            f"data.train.{index}.path"
            for index, source in enumerate(config.data.train)
            if sources and (is_streamed or not is_hub_name(source.path))
        }
        lines = [
            f"{change} (if the contents differ)"
            for change in changes.free
            if is_by_contents(change) and change.key not in compared_keys
        ]
        return [*lines, *changed_sources(config.data, sources)]

    check_changes(
        changes,
        candidates[0],
        model_facts,
        state.data_fingerprint,
        allow=False,
        on_notice=lambda text: None,
        find_others=find_other_changes,
    )


def _path_errors(config: RunConfig, sources: Sequence[DatasetConfig]) -> Iterator[DataError]:
    """Yield an error for each source without files. Shards of streams are listed only when the streams are opened."""
    for source in sources:
        if not is_hub_name(source.path) and not (config.data.streaming and source in config.data.train):
            try:
                source_files(source.path, source.subset, source.split)
            except DataError as error:
                yield error


def plan_one_rank(config: RunConfig) -> Plan:
    """Plan a run without starting processes. With several processes, plan the rank with the most tokens."""
    run, size = with_checkpoint_settings(resolve(config)), config.distributed.processes
    return plan_run(run if size == 1 else run.as_busiest_rank(size))


def check_run(
    path: Path,
    extra_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    on_progress: Callable[[str, float], None] = lambda what, share: None,
    *,
    read_weights: bool = True,
) -> Iterator[CheckResult]:
    """Read a config like :func:`megatrain.config.load_config`, check all its parts, and yield the findings.

    Args:
        on_progress: Called with the name of the next part and 0, or with its progress and the share that is done.
        read_weights: Whether to read all weights of the model to find NaN and infinite values.
    """
    try:
        loaded = load_config(path, extra_files, overrides)
    except ConfigError as error:
        config, more_problems = (None, []) if overrides else salvage(path, extra_files, error.problems)
        for problem in (*error.problems, *more_problems):
            yield CheckResult("config", "problem", f"{problem.where or path}: {problem}", "config")
        if config is not None:
            yield from _RunCheck(config, on_progress).check_parts(is_complete=False, read_weights=False)
        else:
            yield CheckResult("rest", "note", "not checked: model, data, plan and checkpoints need a valid config")
        return
    yield CheckResult("config", "ok", f"{path}: no mistakes")
    for warning in loaded.warnings:
        yield CheckResult("config", "note", warning)
    yield from _RunCheck(loaded.config, on_progress).check_parts(is_complete=True, read_weights=read_weights)


@dataclass(frozen=True, slots=True)
class _CheckedModel:
    """Model built without weights.

    Attributes:
        is_plannable: Whether the compute device exists, and no row exceeds the model's positions.
        weight_names: Tensors that a run reads from the model's folder.
    """

    graph: ModelGraph
    is_plannable: bool
    weight_names: Sequence[str] = ()


class _RunCheck:
    """Checks of the parts of a config. A mistake in one part does not prevent the checks of other parts.

    The check of each part yields findings, and returns the objects that later checks need.
    """

    def __init__(self, config: RunConfig, on_progress: Callable[[str, float], None]) -> None:
        data = config.data.model_copy(update={"cache_dir": "none", "bad_rows": "drop"})
        self._user_data = {"bad_rows": config.data.bad_rows, "cache_dir": config.data.cache_dir}
        self._config = config.model_copy(update={"data": data})
        self._on_progress = on_progress

    def _check_part(self, subject: str, check: Check[T]) -> Check[T | None]:
        self._on_progress(subject, 0.0)
        return (yield from _catch_errors(subject, check))

    def check_parts(self, *, is_complete: bool, read_weights: bool) -> Iterator[CheckResult]:
        """Yield the findings about each part, including an error that ends the check of a part.

        Args:
            is_complete: Whether the config is complete. If wrong keys were removed from it, no plan is made.
            read_weights: As for :func:`check_run`.
        """
        yield from self._check_part("loggers", self._check_loggers())
        device = yield from self._check_part("model", self._check_device())
        model = None if device is None else (yield from _catch_errors("model", self._check_model(device)))
        tokenizer = yield from self._check_part("tokenizer", self._read_tokenizer(model))
        dataset = yield from self._check_part("data", self._check_rows(model, tokenizer))
        if is_complete:
            preparation = yield from self._check_part("plan", self._check_plan(model, dataset))
            if tokenizer is not None and preparation is not None:
                yield from self._check_part("eval data", self._check_evaluation_rows(preparation, dataset))
            yield from self._check_part("drives", self._check_drives(device, preparation))
            yield from self._check_part("disk", self._check_disk(preparation))
            step_preparation = yield from self._check_part("steps", self._check_steps(preparation, dataset))
            yield from self._check_part("checkpoints", self._check_checkpoints(preparation, step_preparation))
        if tokenizer is None or not is_complete or preparation is None:
            for error in _path_errors(self._config, self._config.data.eval):
                yield CheckResult.from_error("eval data", error)
        if read_weights and model is not None and model.weight_names:
            # This check takes longest, so it comes last.
            yield from self._check_part("weights", self._check_weights(model.weight_names))
        if not is_complete:
            yield CheckResult("plan", "note", "not made before the config is valid")

    def _check_loggers(self) -> Check[None]:
        try:
            check_loggers(resolve_logging(self._config))
        except ConfigError as error:
            yield from _problem_findings("loggers", error)

    def _check_device(self) -> Check[torch.device]:
        resolve_model(self._config)  # raises if the hub has no such model
        device_name = self._config.device
        device = THIS_MACHINE.resolve_device("auto" if device_name == "cuda" else device_name)
        if device_name == "cuda" and device.type != "cuda":
            text = 'device = "cuda", but there is no CUDA device here. Write "auto" or "cpu"'
            yield CheckResult("device", "problem", text, "config")
        return device

    def _check_model(self, device: torch.device) -> Check[_CheckedModel]:
        dtype = resolve_compute_dtype(self._config.precision.compute_dtype, device)
        graph = resolve_model(self._config).build(dtype)
        model = _CheckedModel(graph, is_plannable=self._config.device != "cuda" or device.type == "cuda")
        return (yield from _catch_errors("model", self._check_folder(model))) or model

    def _check_folder(self, checked_model: _CheckedModel) -> Check[_CheckedModel]:
        """Check the model's folder and positions."""
        config, model, graph, names = self._config, resolve_model(self._config), checked_model.graph, list[str]()
        size = f"{type(graph.model).__name__}, {graph.num_parameters / 1e6:,.1f} M parameters"
        if config.model.train_from_scratch:
            yield CheckResult("model", "ok", f"{size}, from random weights")
        elif model.hub is not None and (missing := missing_weights(model.hub)):
            nbytes = format_size(sum(missing.values()))
            text = f"{size}; `run` fetches {nbytes} of weights in {_count(len(missing), 'file')} into {model.folder}"
            yield CheckResult("model", "ok", text)
        else:
            passthrough = open_loader(model.folder, graph).origin.passthrough
            records = ModelFolder(model.folder).records
            files = {record.file for record in records.values()}
            nbytes = format_size(sum(record.nbytes for record in records.values()))
            text = f"{size}: all {len(records)} tensors exist, {nbytes} in {_count(len(files), 'file')}"
            yield CheckResult("model", "ok", text)
            names = [name for name in records if name not in set(passthrough.names)]
            if passthrough.names:
                yield CheckResult("model", "note", f"{passthrough}. An export copies them: keep this folder")
        is_plannable = checked_model.is_plannable
        try:
            check_positions(model, config.data.max_length, graph)
        except ConfigError as error:
            yield from _problem_findings("model", error)
            is_plannable = False
        for text in model_warnings(model, config.data.max_length, config.optimizer, graph):
            yield CheckResult("model", "warning", text)
        return replace(checked_model, is_plannable=is_plannable, weight_names=names)

    def _read_tokenizer(self, checked_model: _CheckedModel | None) -> Check[PreTrainedTokenizerFast | None]:
        table = self._config.model
        try:
            model = resolve_model(self._config)
            if checked_model is None and table.tokenizer_name_or_path in (None, table.model_name_or_path):
                read_config(model.folder)  # transformers also reads config.json for the tokenizer
        except ModelFolderError:
            yield CheckResult("tokenizer", "note", "not checked before the model's config.json is valid")
            return None
        tokenizer = tokenizer_of(model)
        template = "with a chat template" if tokenizer.chat_template else "without a chat template"
        yield CheckResult("tokenizer", "ok", f"{len(tokenizer):,} tokens, {template}")
        return tokenizer

    def _check_rows(
        self, model: _CheckedModel | None, tokenizer: PreTrainedTokenizerFast | None
    ) -> Check[TokenDataset | None]:
        if tokenizer is None:
            for error in _path_errors(self._config, self._config.data.train):
                yield CheckResult.from_error("data", error)
            yield CheckResult("data", "note", "rows are not checked without a tokenizer")
            return None
        try:
            dataset = open_dataset(resolve_data(self._config), tokenizer)
        except DataError as error:
            yield from self._check_sources(error, tokenizer)
            return None
        yield from _catch_errors("data", self._row_findings(dataset, model))
        return dataset

    def _row_findings(self, dataset: TokenDataset, model: _CheckedModel | None) -> Check[None]:
        if model is not None:
            check_token_ids(resolve_model(self._config), dataset, model.graph)
        summary = str(dataset.report).splitlines()[0]
        note = "; the trained part of each row was checked" if self._config.task != "pretrain" else ""
        yield CheckResult("data", "ok", f"{summary}{note}")
        yield from self._row_remarks("data", dataset)
        if self._user_data["bad_rows"] == "drop":
            data = resolve_data(self._config)
            for text in check_losses(dataset.report, data.source_names, data.table.max_dropped):
                yield CheckResult("data", "warning", text)

    def _check_sources(self, error: DataError, tokenizer: PreTrainedTokenizerFast) -> Check[None]:
        """Open each source separately, so that an error in one source does not hide errors in other sources."""
        sources, findings = self._config.data.train, list[CheckResult]()
        for source in sources if len(sources) > 1 else ():
            try:
                open_dataset(resolve_data(self._config, [source]), tokenizer)
            except DataError as source_error:
                findings.append(CheckResult.from_error("data", source_error))
        yield from findings or [CheckResult.from_error("data", error)]

    def _row_remarks(self, subject: str, dataset: TokenDataset, name: str = "") -> Check[None]:
        """Yield findings about the rows of a data set: findings of the task, then omitted rows.

        Args:
            subject: Part of the run, as in ``CheckResult``.
            dataset: Rows of the data set.
            name: Prefix of each text.
        """
        report, is_strict = dataset.report, self._user_data["bad_rows"] == "error"
        for finding in task_class(self._config.task).findings(self._config.task_table, dataset):
            yield CheckResult(subject, finding.severity, f"{name}{finding.text}")
        if report.empty_files is not None and is_strict:
            yield CheckResult(subject, "problem", f"{name}{report.empty_files.skip_message}. {_BAD_ROW_HINT}", "data")
        omissions = [
            f"{_count(group.count, 'row')} dropped: {group.reason} (first: {group.example})" for group in report.dropped
        ]
        if report.num_untrained:
            count = _count(report.num_untrained, "row")
            omissions.append(f"{count} without a trained token (first: {report.first_untrained})")
        for text in omissions:
            if is_strict:
                yield CheckResult(subject, "problem", f"{name}{text}. {_BAD_ROW_HINT}", "data")
            else:
                yield CheckResult(subject, "note", f"{name}{text}")
        for group in report.untrained_turns:
            text = f"{_count(group.count, 'turn')} not trained: {group.reason} (first: {group.example})"
            yield CheckResult(subject, "note", f"{name}{text}")
        for severity, text in report.remarks():
            yield CheckResult(subject, severity, f"{name}{text}")

    def _check_plan(self, model: _CheckedModel | None, dataset: TokenDataset | None) -> Check[Preparation | None]:
        if model is None or not model.is_plannable:
            yield CheckResult("plan", "note", "not made without a model and a device for it")
            return None
        plan = plan_one_rank(self._config)
        preparation = Preparation(plan, RunSettings.from_config(self._config, plan.run), dataset=dataset)
        yield from preparation.plan_notes()
        used = {tier: nbytes for tier, nbytes in plan.totals.items() if nbytes}
        sizes = ", ".join(f"{tier} {format_size(n)} of {format_size(plan.budgets[tier])}" for tier, n in used.items())
        yield CheckResult("plan", "ok", f"fits: {sizes}")
        return preparation

    def _check_evaluation_rows(self, preparation: Preparation, dataset: TokenDataset | None) -> Check[None]:
        has_split = self._config.data.val_size is not None and dataset is not None
        if not (has_split or self._config.data.eval):
            return
        for finding in sorted(preparation.check_evaluation_rows(), key=lambda each: each.severity == "warning"):
            yield replace(finding, text=finding.text.splitlines()[0]) if finding.severity == "ok" else finding
        for evaluation_set in preparation.evaluation_sets if self._config.data.eval else ():
            yield from self._row_remarks("eval data", evaluation_set.loader.dataset, f"{evaluation_set.name}: ")
        preparation.check_evaluations()

    def _check_drives(self, device: torch.device | None, preparation: Preparation | None) -> Check[None]:
        """Yield findings about each NVMe path's drive and about configured resources that this machine lacks."""
        tiers = resolve_tiers(self._config)
        for path in drive_paths(tiers.table.nvme):
            yield CheckResult("drive", "ok", str(path))
        if device is None:
            return
        for objection in find_objections(tiers, device) if preparation is None else preparation.plan.objections:
            subject = "drive" if objection.key.startswith("tiers.nvme") else "tiers"
            if objection.refuses:
                yield CheckResult(subject, "problem", str(objection), "fit" if objection.kind == "size" else "config")
            else:
                yield CheckResult(subject, "warning", str(objection))

    def _check_disk(self, preparation: Preparation | None) -> Check[None]:
        folders = {"output_dir": self._config.output_dir}
        folders |= {f"tiers.nvme.{index}.path": table.path for index, table in enumerate(self._config.tiers.nvme)}
        parents = {key: file_systems.existing_parent(folder) for key, folder in folders.items()}
        unusable = {key: parent for key, parent in parents.items() if not _can_hold_files(parent)}
        for key, parent in unusable.items():
            text = f"{key}: cannot write in {parent}, for {folders[key]}. Write another folder"
            yield CheckResult("disk", "problem", text, "config")
        check_target(self._config.output_dir / FINAL_NAME)
        check_folders(resolve_checkpoint(self._config))
        if preparation is None or unusable:
            return
        check_drives(preparation.plan)
        count = self._config.checkpoint.save_total_limit if self._config.checkpoint.is_on else 0
        contents = f"the run and {_count(count, 'checkpoint')}" if count else "the run"
        yield CheckResult("disk", "ok", f"enough free for {contents}")

    def _check_steps(self, preparation: Preparation | None, dataset: TokenDataset | None) -> Check[Preparation | None]:
        """Check the number of steps and the learning rate. Return the preparation if its batches exist."""
        if preparation is None or dataset is None:
            return None
        steps_per_epoch = preparation.loader.steps_per_epoch
        try:
            _ = preparation.learning_rate  # raises if the warm-up is longer than the run
        except ScheduleError as error:
            yield CheckResult.from_error("steps", error)
        for text in schedule_warnings(preparation.run.optimizer, preparation.num_steps):
            yield CheckResult("steps", "warning", text)
        epochs = preparation.num_steps / steps_per_epoch
        text = f"{_count(preparation.num_steps, 'step')}, {epochs:.4g} epoch{'s' if epochs != 1 else ''}"
        yield CheckResult("steps", "ok", f"{text} of {_count(steps_per_epoch, 'step')} each")
        return preparation

    def _check_checkpoints(self, preparation: Preparation | None, step_preparation: Preparation | None) -> Check[None]:
        spec, notices = resolve_checkpoint(self._config), list[str]()
        owner = find_owner(spec.output_dir)
        if owner is not None:
            yield CheckResult("checkpoints", "note", f"output_dir is in use: {owner.text} is training there")
        drive_bytes = 0 if preparation is None else preparation.plan.checkpoint.drive_bytes
        yield from (CheckResult("checkpoints", "note", text) for text in describe_drives(spec, drive_bytes))
        start = None if step_preparation is None else self._make_start(step_preparation, notices.append)
        try:
            candidates = find_candidates(spec, notices.append)
        except LostCheckpointsError as error:
            if start is None or start.find_summary(error.newest) is None:
                raise
            yield CheckResult("checkpoints", "note", "the run is done, and its checkpoints were lost with a drive")
            return
        yield from map(_notice_finding, notices)
        if not candidates:
            yield CheckResult("checkpoints", "ok", "no checkpoint: the run starts from the model")
            return
        if start is None:
            yield CheckResult("checkpoints", "note", f"{candidates[0]}: not compared without model and data")
            return
        notices.clear()
        start.check_changes(candidates[0], allow=False)
        yield from map(_notice_finding, notices)
        if start.find_summary(candidates[0]) is not None:
            yield CheckResult("checkpoints", "note", "the run is done: raise the number of steps to train longer")
        yield CheckResult("checkpoints", "ok", f"continues from {candidates[0]}")

    def _make_start(self, preparation: Preparation, on_message: Callable[[str], None]) -> RunStart:
        """Return a ``RunStart`` for the user's unchanged config, to find and compare checkpoints."""
        settings = preparation.settings
        data = settings.config.data.model_copy(update=self._user_data)
        settings = replace(settings, config=settings.config.model_copy(update={"data": data}))
        return RunStart(preparation.plan, settings, preparation.loader, preparation.num_steps, False, on_message)

    def _check_weights(self, names: Sequence[str]) -> Check[None]:
        folder = ModelFolder(resolve_model(self._config).folder)

        def report_progress(done: int, total: int) -> None:
            self._on_progress(f"weights, {format_size(done)} of {format_size(total)}", done / total)

        bad_names = folder.find_nonfinite(names, report_progress)
        if bad_names:
            files = dict.fromkeys(str(folder.records[name].file) for name in bad_names)
            tensors = f"{_count(len(bad_names), 'tensor')} ({join_names(bad_names, 3)})"
            text = f"{tensors} hold NaN or infinite values, in {join_names(list(files), 2)}. Take an undamaged model"
            yield CheckResult("weights", "problem", text, "config")
        else:
            yield CheckResult("weights", "ok", "all are finite numbers")


def _catch_errors(subject: str, check: Check[T]) -> Check[T | None]:
    """Yield a check's findings and return its result. Convert an expected error to a finding, and return None."""
    try:
        return (yield from check)
    except EXPECTED_ERRORS as error:
        yield CheckResult.from_error(subject, error)
        return None


def _notice_finding(text: str) -> CheckResult:
    warning = text.removeprefix("warning: ")
    return CheckResult("checkpoints", "note" if warning == text else "warning", warning)


def _problem_findings(subject: str, error: ConfigError) -> Iterator[CheckResult]:
    return (CheckResult(subject, "problem", str(problem), "config") for problem in error.problems)


def _can_hold_files(folder: Path) -> bool:
    """Return whether files can be created in a folder. The kernel's pseudo file systems have size 0."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).total > 0


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"
