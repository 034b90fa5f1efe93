"""Checks and prepares a run before its first step, with findings about each part.

``Preparation`` creates the parts of a planned run: weights, rows, evaluation sets and learning rates. A run ends at the
first error. ``check_run`` checks every part even if other parts have errors, so that one call reports every mistake. It
does not train, and it writes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.base.errors import ConfigError, ModelFolderError, UnsupportedModelError
from megatrain.base.names import FINAL_NAME
from megatrain.base.owner import living_owner
from megatrain.checkpoint.locations import describe_drives
from megatrain.checkpoint.resume import ConfigChangedError, LostCheckpointsError, check_changes, find_candidates
from megatrain.checkpoint.state import CheckpointError
from megatrain.config.advice import model_warnings
from megatrain.config.load import load_config, salvage
from megatrain.config.resolved import (
    changes_from,
    check_writable,
    config_from_toml,
    is_by_contents,
    to_toml,
    with_commit,
    with_decided,
    with_values,
)
from megatrain.config.schema import RunConfig
from megatrain.converters.adapters import AdapterError, adapters_of
from megatrain.data.loader import BatchLoader
from megatrain.data.rows_report import DataError, check_losses
from megatrain.data.sources import is_hub_name, source_files
from megatrain.data.stream import changed_sources, open_dataset
from megatrain.data.token_dataset import TokenDataset
from megatrain.machine import file_systems
from megatrain.machine.resources import resolve_compute_dtype
from megatrain.machine.this_machine import THIS_MACHINE
from megatrain.models.checkpoint_names import ConversionError
from megatrain.models.export import ExportError, check_target
from megatrain.models.folder import ModelFolder, join_names, read_config
from megatrain.models.graph import FreezeError, ModelGraph
from megatrain.models.hub import missing_weights
from megatrain.models.initialize import InitializationError
from megatrain.models.internals import TransformersVersionError
from megatrain.models.load import open_loader
from megatrain.optim.lr import ScheduleError, make_schedule, schedule_warnings
from megatrain.optim.plugins import OptimizerError
from megatrain.plan.limits import drive_paths, find_objections, refuse
from megatrain.plan.plan import Plan, RunSpec
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.tiers import check_drives, check_folders
from megatrain.plan.traced import check_positions
from megatrain.run.loggers import check_loggers
from megatrain.tasks.evaluation import (
    EvaluatedWeights,
    EvaluationSet,
    Sampler,
    load_evaluation_sets,
    make_samplers,
    plans_of_evaluations,
)
from megatrain.tasks.registry import task_class
from megatrain.training.open_run import StartWeights, open_weights
from megatrain.training.resolve import (
    resolve,
    resolve_best,
    resolve_checkpoint,
    resolve_data,
    resolve_evaluation,
    resolve_logging,
    resolve_model,
    resolve_tiers,
)
from megatrain.training.rows import check_token_ids, make_loader, tokenizer_of
from megatrain.training.start import RunStart, with_kept_rules
from tiered import checksum
from tiered.errors import TieredError, UnusableDirectoryError
from tiered.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CheckResult", "Preparation", "check_run", "plan_one_rank", "refuse_early", "with_choices"]

#: Category of a problem: the config or the model, memory and drives, the data, or a storage failure.
Kind = Literal["config", "fit", "data", "failed"]
_KIND_OF: tuple[tuple[tuple[type[Exception], ...], Kind], ...] = (
    ((DoesNotFitError,), "fit"),
    ((LostCheckpointsError,), "failed"),
    ((DataError,), "data"),
    (
        (
            ConfigError, ModelFolderError, UnsupportedModelError, FreezeError, ConversionError, InitializationError,
            OptimizerError, ScheduleError, AdapterError, ExportError, CheckpointError, ConfigChangedError,
            UnusableDirectoryError, TransformersVersionError,
        ),
        "config",
    ),
    ((TieredError, OSError), "failed"),
)  # fmt: skip
_ENDS_THE_RUN = 'data.bad_rows = "error" would end the run there. Fix or remove it, or write bad_rows = "drop"'
_EXPECTED = tuple(error for errors, _ in _KIND_OF for error in errors)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A finding about one part of a run.

    Attributes:
        subject: Part of the run.
        severity: "ok", "note", "warning" (the run would start, but may not do what the user wants) or "problem" (the
            run would not start, or would end with an error).
        text: The facts, and a remedy if there is a problem.
        kind: Category of the problem, or None if there is no problem.
    """

    subject: str
    severity: Literal["ok", "note", "warning", "problem"]
    text: str
    kind: Kind | None = None

    @classmethod
    def of_error(cls, subject: str, error: Exception) -> CheckResult:
        """Return the finding that reports an expected error."""
        kind = next(kind for errors, kind in _KIND_OF if isinstance(error, errors))
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return cls(subject, "problem", text, kind)

    @property
    def line(self) -> str:
        """The finding as a message that a run prints."""
        return f"warning: {self.text}" if self.severity == "warning" else self.text


def with_choices(config: RunConfig, run: RunSpec) -> RunConfig:
    """Return the config with the planner's choices for all keys that the config leaves open."""
    fused = run.optimizer.muon_fused
    choices = {
        "training.gradient_lanes": run.num_lanes,
        "optimizer.muon_fused": "parts" if fused == "auto" else fused,
        "model.use_liger_kernel": run.uses_liger,
        "model.flash_attention": run.flash,
    }
    return with_values(with_decided(config, choices), {"data.packing": run.data.table.packing})


def plan_one_rank(config: RunConfig) -> Plan:
    """Plan a run without starting processes. With several processes, plan for the rank with the most tokens."""
    run, size = with_kept_rules(resolve(config)), config.distributed.processes
    return plan_run(run if size == 1 else run.as_fullest_rank(size))


class Preparation:
    """The parts that a planned run needs before its first step. Each part is cached when it is first used.

    Methods check parts or yield findings about parts. A run calls them in the order of this class, cheap checks first.

    Args:
        config: Config of the run, with the plan's choices.
        on_message: Called with messages for the user while a part is created.
        gather: Collective that all-gathers one number per process.
        dataset: Training rows, if they are already read and checked.
    """

    def __init__(
        self,
        plan: Plan,
        config: RunConfig,
        on_message: Callable[[str], None] = lambda text: None,
        *,
        gather: Callable[[int], Sequence[int]] = lambda number: [number],
        dataset: TokenDataset | None = None,
    ) -> None:
        self.plan, self.run = plan, plan.run
        self.evaluation, self.logging = resolve_evaluation(config), resolve_logging(config)
        self.best = resolve_best(config)
        self._config, self._on_message, self._gather = config, on_message, gather
        if dataset is not None:
            self.dataset = dataset

    @cached_property
    def evaluation_plans(self) -> Mapping[EvaluatedWeights, Plan]:
        """Plans of evaluation passes, by the weights to evaluate."""
        return plans_of_evaluations(self.evaluation, self.plan)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokenizer of the model."""
        return tokenizer_of(self.run.model)

    def limits(self) -> None:
        """Check that this machine has the configured sizes and drives, and that evaluations and the export can work."""
        refuse(self.plan.objections)
        _ = self.evaluation_plans  # raises if a pass does not fit
        if self.run.export.merge and (adapters := adapters_of(self.plan.graph)) is not None:
            adapters.check_merge(self.plan.graph)

    def folders(self) -> None:
        """Check that all loggers are installed and all folders are writable, without leaving files."""
        check_loggers(self.logging)
        check_writable(self._config)
        check_target(self.run.output_dir / FINAL_NAME)

    @cached_property
    def weights(self) -> StartWeights:
        """Initial weights. Before they are opened, the drives' folders and free space are checked."""
        check_drives(self.plan)
        check_folders(self.run.checkpoint)
        return open_weights(self.plan, self._on_message)

    @cached_property
    def dataset(self) -> TokenDataset:
        """Training rows, from the cache or newly tokenized."""
        dataset = open_dataset(self.run.data, self.tokenizer, self._on_message)
        check_token_ids(self.run.model, dataset, self.plan.graph)
        return dataset

    def rows(self) -> Iterator[CheckResult]:
        """Yield a report on the training rows, and a warning for each source that lost many rows.

        Raises:
            DataError: More than ``data.max_dropped`` of a source is dropped or cut.
        """
        data, report = self.run.data, self.dataset.report
        try:
            losses = check_losses(report, data.source_names, data.table.max_dropped)
        except DataError:
            self._on_message(str(report))  # the report states why rows were dropped
            raise
        yield CheckResult("data", "ok", str(report))
        yield from (CheckResult("data", "warning", text) for text in losses)

    @cached_property
    def loader(self) -> BatchLoader:
        """Batches of the run. ``RunStart.state`` moves this loader to a checkpoint's position."""
        return make_loader(self.plan, self.dataset, self.tokenizer)

    @cached_property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        return self.loader.num_steps(self.run.num_epochs, self.run.max_steps)

    @cached_property
    def learning_rate(self) -> Callable[[int], float]:
        """Learning rate by step.

        Raises:
            ScheduleError: The warm-up is longer than the run.
        """
        return make_schedule(self.run.optimizer, self.num_steps)

    @cached_property
    def _evaluated(self) -> tuple[Sequence[EvaluationSet], Sequence[CheckResult]]:
        found: list[CheckResult] = []
        sets = load_evaluation_sets(
            self.evaluation,
            self.plan,
            self.tokenizer,
            lambda text: found.append(CheckResult("eval data", "ok", text)),
            None if self.run.data.table.val_size is None else self.dataset,
            lambda text: found.append(CheckResult("eval data", "warning", text)),
        )
        return sets, found

    @property
    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """Evaluation rows."""
        return self._evaluated[0]

    def evaluated_rows(self) -> Sequence[CheckResult]:
        """Return the findings about the evaluation rows."""
        return self._evaluated[1]

    @cached_property
    def samplers(self) -> Mapping[EvaluatedWeights, Sampler]:
        """Samplers that continue evaluation rows, by the weights that they use."""
        return make_samplers(self.evaluation, self.evaluation_plans, self.evaluation_sets, self.tokenizer, self._gather)

    def check_evaluations(self) -> None:
        """Check that samples fit in memory, and that evaluations have the metric that selects the best evaluation."""
        _ = self.samplers  # raises if samples do not fit
        self.best.check(self.evaluation.evaluations_of(each.name for each in self.evaluation_sets))

    def remarks(self) -> Iterator[CheckResult]:
        """Yield notes about choices of the plan that users rarely expect."""
        if self.plan.traced.flash_note:
            yield CheckResult("plan", "note", self.plan.traced.flash_note)
        if self.plan.traced.packing_warning:
            yield CheckResult("plan", "warning", self.plan.traced.packing_warning)

    def warnings(self) -> Iterator[CheckResult]:
        """Yield warnings about settings of the model and the learning rate that users rarely intend."""
        run = self.run
        for text in (
            *model_warnings(run.model, run.batch.max_length, run.optimizer, self.plan.graph),
            *schedule_warnings(run.optimizer, self.num_steps),
        ):
            yield CheckResult("model", "warning", text)

    def start(self, config: RunConfig, on_message: Callable[[str], None], *, allows_changes: bool = False) -> RunStart:
        """Return the object that finds the checkpoint from which the run resumes.

        Args:
            on_message: Called with messages for the user.
            allows_changes: Whether to resume a checkpoint even if config changes alter results.
        """
        return RunStart(
            self.plan,
            to_toml(config),
            lambda before: changes_from(before, config),
            self.loader,
            self.num_steps,
            self.best,
            allows_changes,
            on_message,
        )


def refuse_early(config: RunConfig, *, allow_config_change: bool = False) -> None:
    """Raise errors that can be found without the model. Planning a large model takes minutes, so this runs first.

    Raises:
        DataError: A file of rows does not exist.
        CheckpointError: The config refers to a missing checkpoint, or forbids resuming although a checkpoint exists.
        ConfigChangedError: The config would resume a checkpoint with different results.
    """
    # Shards of streams are listed only when the streams are opened.
    for source in (*(() if config.data.streaming else config.data.train), *config.data.eval):
        if not is_hub_name(source.path):
            source_files(source.path, source.subset, source.split)
    try:
        candidates = find_candidates(resolve_checkpoint(config), lambda text: None)
    except LostCheckpointsError:
        return  # a finished run needs no checkpoint, and an unfinished run raises this error later
    if not candidates or allow_config_change:
        return
    state = candidates[0].state
    before, now = config_from_toml(state.config_toml), config
    # Keys that depend on the model are compared after the model is loaded.
    if "packing" not in config.data.model_fields_set:
        now = with_values(now, {"data.packing": before.data.packing})
    if config.model.revision is None:
        now = with_values(now, {"model.revision": before.model.revision})
    # The model determines which parameters the globs match, so the globs are compared later.
    now = with_values(now, {"optimizer.weight_decay_exclude": before.optimizer.weight_decay_exclude})
    changes = changes_from(state.config_toml, now)
    device = THIS_MACHINE.resolve_device(config.device)
    dtype = resolve_compute_dtype(config.precision.compute_dtype, device)
    of_model = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    model_config = Path(config.model.model_name_or_path, "config.json")
    if model_config.is_file():
        of_model["config_xxh3_64"] = checksum(model_config.read_bytes())

    def find_others() -> list[str]:
        """Return further differences that can be found without tokenizing rows."""
        is_streamed = config.data.streaming
        # Streams have checksums of shards, which cannot be compared with checksums of files.
        sources = state.sources if before.data.streaming == is_streamed else ()
        compared = {
            f"data.train.{number}.path"
            for number, source in enumerate(config.data.train)
            if sources and (is_streamed or not is_hub_name(source.path))
        }
        lines = [
            f"{change} (if the contents differ)"
            for change in changes.free
            if is_by_contents(change) and change.key not in compared
        ]
        return [*lines, *changed_sources(config.data, sources)]

    check_changes(
        changes,
        candidates[0],
        of_model,
        state.data_fingerprint,
        allow=False,
        on_notice=lambda text: None,
        find_others=find_others,
    )


def check_run(
    path: Path,
    extra_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda what: None,
    *,
    reads_weights: bool = True,
) -> Iterator[CheckResult]:
    """Check all parts of a config. Yield the findings.

    Args:
        path: As for :func:`megatrain.config.load_config`.
        extra_files: As for :func:`megatrain.config.load_config`.
        overrides: As for :func:`megatrain.config.load_config`.
        on_progress: Called with the name of the next part.
        reads_weights: Whether to read all weights of the model to find NaN and infinite values.
    """
    try:
        loaded = load_config(path, extra_files, overrides)
    except ConfigError as error:
        config, further = (None, []) if overrides else salvage(path, extra_files, error.problems)
        for each in (*error.problems, *further):
            yield CheckResult("config", "problem", f"{each.where or path}: {each}", "config")
        if config is None:
            yield CheckResult("rest", "note", "not checked: model, data, plan and checkpoints need a valid config")
            return
        yield from _WholeCheck(config, on_progress, is_whole=False, reads_weights=False).all_parts()
        return
    yield CheckResult("config", "ok", f"{path}: no mistakes")
    for warning in loaded.warnings:
        yield CheckResult("config", "note", warning)
    yield from _WholeCheck(loaded.config, on_progress, is_whole=True, reads_weights=reads_weights).all_parts()


class _WholeCheck:
    """Checks every part of a config that can be checked despite mistakes in the config.

    Args:
        is_whole: Whether the config is complete. If not, mistakes were removed from the config, and parts that depend
            on the complete config are not checked.
        reads_weights: As for :func:`check_run`.
    """

    def __init__(
        self, config: RunConfig, on_progress: Callable[[str], None], *, is_whole: bool, reads_weights: bool
    ) -> None:
        data = config.data.model_copy(update={"cache_dir": "none", "bad_rows": "drop"})
        self._own = {"bad_rows": config.data.bad_rows, "cache_dir": config.data.cache_dir}
        self._config = config.model_copy(update={"data": data})
        self._on_progress = on_progress
        self._is_whole = is_whole
        self._reads_weights = reads_weights
        self._is_planned = True
        self._graph: ModelGraph | None = None
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._dataset: TokenDataset | None = None
        self._prepared: Preparation | None = None
        self._is_cut = False  # whether the rows are already split into batches
        self._device: torch.device | None = None
        self._weight_names: Sequence[str] = ()

    def all_parts(self) -> Iterator[CheckResult]:
        """Yield the findings about each part. If an error ends a part, the error is also a finding."""
        parts: list[tuple[str, Callable[[], Iterator[CheckResult]]]] = [
            ("loggers", self._loggers),
            ("model", self._model),
            ("tokenizer", self._read_tokenizer),
            ("data", self._rows),
        ]
        if self._is_whole:
            parts += [
                ("plan", self._plan),
                ("eval data", self._evaluated_rows),
                ("drives", self._drives),
                ("disk", self._disk),
                ("steps", self._steps),
                ("checkpoints", self._checkpoints),
            ]
        if self._reads_weights:
            parts.append(("weights", self._weights))  # reading weights takes longest, so it comes last
        for subject, part in parts:
            self._on_progress(subject)
            try:
                yield from part()
            except _EXPECTED as error:
                yield CheckResult.of_error(subject, error)
        if not self._is_whole:
            yield CheckResult("plan", "note", "not made before the config is valid")

    def _loggers(self) -> Iterator[CheckResult]:
        try:
            check_loggers(resolve_logging(self._config))
        except ConfigError as error:
            yield from _each_problem("loggers", error)

    def _model(self) -> Iterator[CheckResult]:
        config, table, model = self._config, self._config.model, resolve_model(self._config)
        device = THIS_MACHINE.resolve_device("auto" if config.device == "cuda" else config.device)
        if config.device == "cuda" and device.type != "cuda":
            text = 'device = "cuda", but there is no CUDA device here. Write "auto" or "cpu"'
            yield CheckResult("device", "problem", text, "config")
            self._is_planned = False
        self._device = device
        dtype = resolve_compute_dtype(config.precision.compute_dtype, device)
        folder = model.folder
        graph = model.build(dtype)
        self._graph = graph
        size = f"{type(graph.model).__name__}, {graph.num_parameters / 1e6:,.1f} M parameters"
        if table.train_from_scratch:
            yield CheckResult("model", "ok", f"{size}, from random weights")
        elif model.hub is not None and (missing := missing_weights(model.hub)):
            nbytes = format_size(sum(missing.values()))
            text = f"{size}; `run` fetches {nbytes} of weights in {_count(len(missing), 'file')} into {model.folder}"
            yield CheckResult("model", "ok", text)
        else:
            passthrough = open_loader(folder, graph).origin.passthrough
            records = ModelFolder(folder).records.values()
            files = {record.file for record in records}
            nbytes = format_size(sum(record.nbytes for record in records))
            text = f"{size}: all {len(records)} tensors exist, {nbytes} in {_count(len(files), 'file')}"
            yield CheckResult("model", "ok", text)
            self._weight_names = [name for name in ModelFolder(folder).records if name not in set(passthrough.names)]
            if passthrough.names:
                yield CheckResult("model", "note", f"{passthrough}. An export copies them: keep this folder")
        try:
            check_positions(model, config.data.max_length, graph)
        except ConfigError as error:
            yield from _each_problem("model", error)
            self._is_planned = False
        for text in model_warnings(model, config.data.max_length, config.optimizer, graph):
            yield CheckResult("model", "warning", text)

    def _read_tokenizer(self) -> Iterator[CheckResult]:
        table = self._config.model
        try:
            model = resolve_model(self._config)
            if self._graph is None and table.tokenizer_name_or_path in (None, table.model_name_or_path):
                read_config(model.folder)  # transformers also reads it for the tokenizer
        except ModelFolderError:
            yield CheckResult("tokenizer", "note", "not checked before the model's config.json is valid")
            return
        self._tokenizer = tokenizer_of(model)
        template = "with a chat template" if self._tokenizer.chat_template else "without a chat template"
        yield CheckResult("tokenizer", "ok", f"{len(self._tokenizer):,} tokens, {template}")

    def _rows(self) -> Iterator[CheckResult]:
        if self._tokenizer is None:
            yield CheckResult("data", "note", "not checked without a tokenizer")
            return
        try:
            dataset = open_dataset(resolve_data(self._config), self._tokenizer)
        except DataError as error:
            yield from self._each_source(error)
            return
        self._dataset = dataset
        if self._graph is not None:
            check_token_ids(resolve_model(self._config), dataset, self._graph)
        head = str(dataset.report).splitlines()[0]
        proven = "; the trained part of each row was checked" if self._config.task != "pretrain" else ""
        yield CheckResult("data", "ok", f"{head}{proven}")
        yield from self._remarks("data", dataset)
        if self._own["bad_rows"] == "drop":
            for text in check_losses(
                dataset.report, resolve_data(self._config).source_names, self._config.data.max_dropped
            ):
                yield CheckResult("data", "warning", text)

    def _each_source(self, error: DataError) -> Iterator[CheckResult]:
        """Open each source separately, so that an error in one source does not hide errors in other sources."""
        assert self._tokenizer is not None
        sources = self._config.data.train
        if len(sources) == 1:
            yield CheckResult.of_error("data", error)
            return
        found = []
        for source in sources:
            try:
                open_dataset(resolve_data(self._config, [source]), self._tokenizer)
            except DataError as each:
                found.append(CheckResult.of_error("data", each))
        yield from found or [CheckResult.of_error("data", error)]

    def _remarks(self, subject: str, dataset: TokenDataset, name: str = "") -> Iterator[CheckResult]:
        """Yield findings about the rows of a data set: findings of the task, then omitted rows.

        Args:
            subject: Part of the run, as in ``CheckResult``.
            dataset: Rows of the data set.
            name: Prefix of each text.
        """
        report, is_strict = dataset.report, self._own["bad_rows"] == "error"
        for finding in task_class(self._config.task).findings(self._config.task_table, dataset):
            yield CheckResult(subject, finding.severity, f"{name}{finding.text}")
        if report.empty_files is not None and is_strict:
            yield CheckResult(subject, "problem", f"{name}{report.empty_files.skipped}. {_ENDS_THE_RUN}", "data")
        left_out = [
            f"{_count(each.count, 'row')} dropped: {each.reason} (first: {each.example})" for each in report.dropped
        ]
        if report.num_untrained:
            count = _count(report.num_untrained, "row")
            left_out.append(f"{count} without a trained token (first: {report.first_untrained})")
        for text in left_out:
            if is_strict:
                yield CheckResult(subject, "problem", f"{name}{text}. {_ENDS_THE_RUN}", "data")
            else:
                yield CheckResult(subject, "note", f"{name}{text}")
        for each in report.untrained_turns:
            text = f"{_count(each.count, 'turn')} not trained: {each.reason} (first: {each.example})"
            yield CheckResult(subject, "note", f"{name}{text}")
        for severity, text in report.remarks():
            yield CheckResult(subject, severity, f"{name}{text}")

    def _plan(self) -> Iterator[CheckResult]:
        if self._graph is None or not self._is_planned:
            yield CheckResult("plan", "note", "not made without a model and a device for it")
            return
        plan = plan_one_rank(self._config)
        self._config = with_choices(self._config, plan.run)
        self._prepared = Preparation(plan, self._config, dataset=self._dataset)
        yield from self._prepared.remarks()
        sizes = ", ".join(
            f"{tier} {format_size(nbytes)} of {format_size(plan.budgets[tier])}"
            for tier, nbytes in plan.totals.items()
            if nbytes
        )
        yield CheckResult("plan", "ok", f"fits: {sizes}")

    def _evaluated_rows(self) -> Iterator[CheckResult]:
        held_out = self._config.data.val_size is not None and self._dataset is not None
        prepared = self._prepared
        if prepared is None or self._tokenizer is None or not (held_out or self._config.data.eval):
            return
        for each in sorted(prepared.evaluated_rows(), key=lambda each: each.severity == "warning"):
            yield replace(each, text=each.text.splitlines()[0]) if each.severity == "ok" else each
        for rows in prepared.evaluation_sets if self._config.data.eval else ():
            yield from self._remarks("eval data", rows.loader.dataset, f"{rows.name}: ")
        prepared.check_evaluations()

    def _drives(self) -> Iterator[CheckResult]:
        """Yield each NVMe path's drive, and configured resources that this machine does not have."""
        tiers = resolve_tiers(self._config)
        for path in drive_paths(tiers.table.nvme):
            yield CheckResult("drive", "ok", str(path))
        if self._device is None:
            return
        prepared = self._prepared
        for each in find_objections(tiers, self._device) if prepared is None else prepared.plan.objections:
            subject = "drive" if each.key.startswith("tiers.nvme") else "tiers"
            if each.refuses:
                yield CheckResult(subject, "problem", str(each), "fit" if each.kind == "size" else "config")
            else:
                yield CheckResult(subject, "warning", str(each))

    def _disk(self) -> Iterator[CheckResult]:
        folder = self._config.output_dir
        parent = file_systems.existing_parent(folder)
        if not _can_hold_files(parent):
            text = f"output_dir: cannot write in {parent}. Write another folder"
            yield CheckResult("disk", "problem", text, "config")
        check_target(folder / FINAL_NAME)
        is_usable = _can_hold_files(parent)
        for number, table in enumerate(self._config.tiers.nvme):
            parent = file_systems.existing_parent(table.path)
            if not _can_hold_files(parent):
                text = f"tiers.nvme.{number}.path: cannot write in {parent}, for {table.path}. Write another folder"
                yield CheckResult("disk", "problem", text, "config")
                is_usable = False
        check_folders(resolve_checkpoint(self._config))
        if self._prepared is None or not is_usable:
            return
        check_drives(self._prepared.plan)
        count = self._config.checkpoint.save_total_limit if self._config.checkpoint.is_on else 0
        what = f"the run and {_count(count, 'checkpoint')}" if count else "the run"
        yield CheckResult("disk", "ok", f"enough free for {what}")

    def _steps(self) -> Iterator[CheckResult]:
        prepared = self._prepared
        if prepared is None or self._dataset is None:
            return
        per_epoch = prepared.loader.steps_per_epoch
        self._is_cut = True
        try:
            _ = prepared.learning_rate  # raises if the warm-up is longer than the run
        except ScheduleError as error:
            yield CheckResult.of_error("steps", error)
        for text in schedule_warnings(prepared.run.optimizer, prepared.num_steps):
            yield CheckResult("steps", "warning", text)
        epochs = prepared.num_steps / per_epoch
        text = f"{_count(prepared.num_steps, 'step')}, {epochs:.4g} epoch{'s' if epochs != 1 else ''}"
        yield CheckResult("steps", "ok", f"{text} of {_count(per_epoch, 'step')} each")

    def _checkpoints(self) -> Iterator[CheckResult]:
        spec, notices = resolve_checkpoint(self._config), list[str]()
        owner = living_owner(spec.output_dir)
        if owner is not None:
            yield CheckResult("checkpoints", "note", f"output_dir is in use: {owner.text} is training there")
        drive_bytes = 0 if self._prepared is None else self._prepared.plan.checkpoint_bytes_on_drives
        yield from (CheckResult("checkpoints", "note", text) for text in describe_drives(spec, drive_bytes))
        start = self._start(notices.append)
        try:
            candidates = find_candidates(spec, notices.append)
        except LostCheckpointsError as lost:
            if start is None or start.already_done(lost.newest) is None:
                raise
            yield CheckResult("checkpoints", "note", "the run is done, and its checkpoints were lost with a drive")
            return
        yield from map(_notice, notices)
        if not candidates:
            yield CheckResult("checkpoints", "ok", "no checkpoint: the run starts from the model")
            return
        if start is None:
            yield CheckResult("checkpoints", "note", f"{candidates[0]}: not compared without model and data")
            return
        notices.clear()
        start.check_changes(candidates[0], allow=False)
        yield from map(_notice, notices)
        if start.already_done(candidates[0]) is not None:
            yield CheckResult("checkpoints", "note", "the run is done: raise the number of steps to train longer")
        yield CheckResult("checkpoints", "ok", f"continues from {candidates[0]}")

    def _start(self, on_message: Callable[[str], None]) -> RunStart | None:
        """Return the object that finds checkpoints for the user's config, or None without a model or rows."""
        if self._prepared is None or not self._is_cut:
            return None
        config = self._config.model_copy(update={"data": self._config.data.model_copy(update=self._own)})
        return self._prepared.start(with_commit(config, self._prepared.run.model.hub), on_message)

    def _weights(self) -> Iterator[CheckResult]:
        """Read the weights that a run would load. Report all NaN and infinite values. A run stops at the first."""
        if not self._weight_names:
            return
        folder = ModelFolder(resolve_model(self._config).folder)

        def progress(done: int, total: int) -> None:
            self._on_progress(f"weights, {format_size(done)} of {format_size(total)}")

        found = folder.find_nonfinite(self._weight_names, progress)
        if found:
            files = dict.fromkeys(str(folder.records[name].file) for name in found)
            which = f"{_count(len(found), 'tensor')} ({join_names(found, 3)})"
            text = f"{which} hold NaN or infinite values, in {join_names(list(files), 2)}. Take an undamaged model"
            yield CheckResult("weights", "problem", text, "config")
        else:
            yield CheckResult("weights", "ok", "all are finite numbers")


def _notice(text: str) -> CheckResult:
    warning = text.removeprefix("warning: ")
    return CheckResult("checkpoints", "note" if warning == text else "warning", warning)


def _each_problem(subject: str, error: ConfigError) -> Iterator[CheckResult]:
    return (CheckResult(subject, "problem", str(each), "config") for each in error.problems)


def _can_hold_files(folder: Path) -> bool:
    """Return whether files can be created in a folder. The kernel's pseudo file systems have size 0."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return False
    return shutil.disk_usage(folder).total > 0


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
