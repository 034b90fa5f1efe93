"""Everything that can be known to be wrong with a run before it starts: config, files, data, room, checkpoints.

Each part is looked at whatever the others found, so that one look names every mistake. Nothing is trained or written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatrain.api import (
    AdapterError,
    CheckpointError,
    ConfigChangedError,
    ConfigError,
    ConversionError,
    DataError,
    DoesNotFitError,
    ExportError,
    FreezeError,
    InitializationError,
    LostCheckpointsError,
    ModelFolder,
    ModelFolderError,
    ModelGraph,
    OptimizerError,
    Plan,
    ScheduleError,
    TokenDataset,
    TransformersVersionError,
    already_done,
    changed_sources,
    check_changes,
    check_drives,
    check_loggers,
    check_positions,
    check_token_ids,
    config_from_toml,
    describe_drives,
    describe_model,
    drive_paths,
    find_candidates,
    find_objections,
    is_hub_name,
    load_config,
    load_evaluation_sets,
    machine,
    make_loader,
    make_samplers,
    make_schedule,
    missing_weights,
    model_warnings,
    open_dataset,
    open_loader,
    plan_run,
    plans_of_evaluations,
    read_config,
    resolve,
    resolve_best,
    resolve_checkpoint,
    resolve_data,
    resolve_evaluation,
    resolve_logging,
    resolve_model,
    resolve_preference,
    resolve_tiers,
    salvage,
    schedule_warnings,
    source_files,
    task_of,
    tokenizer_of,
    with_decays,
    with_kept_rules,
)
from megatrain.base.errors import UnsupportedModelError
from megatrain.base.names import FINAL_NAME
from megatrain.base.owner import living_owner
from megatrain.config.resolved import (
    changes_from,
    is_by_contents,
    with_commit,
    with_flash,
    with_fused,
    with_lanes,
    with_liger,
    with_packing,
)
from megatrain.data.rows_report import check_losses
from megatrain.models.export import check_target
from megatrain.models.folder import some
from tiered import checksum
from tiered.errors import TieredError, UnusableDirectoryError
from tiered.ext import check_ours
from tiered.units import format_size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from megatrain.config.schema import RunConfig

#: What a problem is about: the config or the model, room, data, or storage that failed.
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
    """One thing that was looked at.

    Attributes:
        subject: what.
        severity: "ok", "note" (worth knowing), "warning" (the run would start, and may not do what is meant) or
            "problem" (the run would be refused, or end).
        text: what was seen, and what to do about a problem.
        kind: what kind of problem it is; None: none.
    """

    subject: str
    severity: Literal["ok", "note", "warning", "problem"]
    text: str
    kind: Kind | None = None


def problem(subject: str, error: Exception) -> CheckResult:
    """Return the finding behind an expected error."""
    kind = next(kind for errors, kind in _KIND_OF if isinstance(error, errors))
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return CheckResult(subject, "problem", text, kind)


def check_run(
    path: Path,
    extra_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda what: None,
    *,
    reads_weights: bool = True,
) -> Iterator[CheckResult]:
    """Yield what is found, part by part.

    Args:
        path: as for :func:`megatrain.config.load_config`.
        extra_files: as for :func:`megatrain.config.load_config`.
        overrides: as for :func:`megatrain.config.load_config`.
        on_progress: told what is looked at next.
        reads_weights: also read all weights of the model, to find NaN and infinite ones.
    """
    try:
        loaded = load_config(path, extra_files, overrides)
    except ConfigError as error:
        config, further = (None, []) if overrides else salvage(path, extra_files, error.problems)
        for each in (*error.problems, *further):
            yield CheckResult("config", "problem", f"{each.where or path}: {each}", "config")
        if config is None:
            yield CheckResult(
                "rest", "note", "looked at once these are mended: model, data, plan and checkpoints need them"
            )
            return
        yield from _Checkup(config, on_progress, is_whole=False, reads_weights=False).look()
        return
    yield CheckResult("config", "ok", f"{path}: no mistake in it")
    for warning in loaded.warnings:
        yield CheckResult("config", "note", warning)
    yield from _Checkup(loaded.config, on_progress, is_whole=True, reads_weights=reads_weights).look()


def look_first(config: RunConfig, *, allow_config_change: bool = False) -> None:
    """Refuse what needs no model to be known. Planning a large one takes time, so this is told before.

    Raises:
        DataError: there is no such file of rows.
        CheckpointError: there is no checkpoint where the config names one, or there is one and it wants none.
        ConfigChangedError: the config would continue a checkpoint with other results.
    """
    # Shards of streams are listed where they are opened.
    for source in (*(() if config.data.streaming else config.data.train), *config.data.eval):
        if not is_hub_name(source.path):
            source_files(source.path, source.subset, source.split)
    try:
        candidates = find_candidates(resolve_checkpoint(config), lambda text: None)
    except LostCheckpointsError:
        return  # a run that is done needs none
    if not candidates or allow_config_change:
        return
    state = candidates[0].state
    before, now = config_from_toml(state.config_toml), config
    # What the config leaves to the model is compared once there is one.
    if "packing" not in config.data.model_fields_set:
        now = with_packing(now, before.data.packing)
    if config.model.revision is None:
        model = now.model.model_copy(update={"revision": before.model.revision})
        now = now.model_copy(update={"model": model})
    # Which parameters its globs name only a model says.
    decays = {"weight_decay_exclude": before.optimizer.weight_decay_exclude}
    now = now.model_copy(update={"optimizer": now.optimizer.model_copy(update=decays)})
    changes = changes_from(state.config_toml, now)
    device = machine.resolve_device(config.device)
    dtype = machine.resolve_compute_dtype(config.precision.compute_dtype, device)
    of_model = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    model_config = Path(config.model.model_name_or_path, "config.json")
    if model_config.is_file():
        of_model["config_xxh3_64"] = checksum(model_config.read_bytes())

    def find_others() -> list[str]:
        """Return what else differs, as far as no row has to be tokenized."""
        is_streamed = config.data.streaming
        # Checksums of shards and of files have nothing in common.
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


class _Checkup:
    """Looks at the parts of one config, keeping what later parts need.

    Args:
        is_whole: the config is as written; else mistakes were taken out, and what depends on all of it is not judged.
        reads_weights: as for :func:`check_run`.
    """

    def __init__(
        self, config: RunConfig, on_progress: Callable[[str], None], *, is_whole: bool, reads_weights: bool
    ) -> None:
        data = config.data.model_copy(update={"cache_dir": "none", "bad_rows": "drop"})
        self._bad_rows, self._cache_dir = config.data.bad_rows, config.data.cache_dir
        self._config = config.model_copy(update={"data": data})
        self._on_progress = on_progress
        self._is_whole = is_whole
        self._reads_weights = reads_weights
        self._is_planned = True
        self._graph: ModelGraph | None = None
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._dataset: TokenDataset | None = None
        self._plan: Plan | None = None
        self._num_steps: int | None = None
        self._fingerprint = ""  # of the data, once it is cut into steps
        self._device: torch.device | None = None
        self._weight_names: Sequence[str] = ()

    def look(self) -> Iterator[CheckResult]:
        parts: list[tuple[str, Callable[[], Iterator[CheckResult]]]] = [
            ("loggers", self._look_at_loggers),
            ("model", self._look_at_model),
            ("tokenizer", self._look_at_tokenizer),
            ("data", self._look_at_data),
        ]
        if self._is_whole:
            parts += [
                ("plan", self._look_at_plan),
                ("eval data", self._look_at_eval_data),
                ("drives", self._look_at_drives),
                ("disk", self._look_at_disk),
                ("steps", self._look_at_steps),
                ("checkpoints", self._look_at_checkpoints),
            ]
        if self._reads_weights:
            parts.append(("weights", self._look_at_weights))  # last: it takes the longest
        for subject, part in parts:
            self._on_progress(subject)
            try:
                yield from part()
            except _EXPECTED as error:
                yield problem(subject, error)
        if not self._is_whole:
            yield CheckResult("plan", "note", "not made before the config is right")

    # -- parts ---------------------------------------------------------------------------------------------------

    def _look_at_loggers(self) -> Iterator[CheckResult]:
        try:
            check_loggers(resolve_logging(self._config))
        except ConfigError as error:
            for each in error.problems:
                yield CheckResult("loggers", "problem", str(each), "config")

    def _look_at_model(self) -> Iterator[CheckResult]:
        config, table, model = self._config, self._config.model, resolve_model(self._config)
        device = machine.resolve_device("auto" if config.device == "cuda" else config.device)
        if config.device == "cuda" and device.type != "cuda":
            text = 'device = "cuda", but there is no CUDA device here. Write "auto" or "cpu"'
            yield CheckResult("device", "problem", text, "config")
            self._is_planned = False
        self._device = device
        dtype = machine.resolve_compute_dtype(config.precision.compute_dtype, device)
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
            carried = open_loader(folder, graph).origin.carried
            records = ModelFolder(folder).records.values()
            files = {record.file for record in records}
            nbytes = format_size(sum(record.nbytes for record in records))
            text = f"{size}: all {len(records)} tensors are there, {nbytes} in {_count(len(files), 'file')}"
            yield CheckResult("model", "ok", text)
            self._weight_names = [name for name in ModelFolder(folder).records if name not in set(carried.names)]
            if carried.names:
                yield CheckResult("model", "note", f"{carried}. An export copies them: keep this folder")
        try:
            check_positions(model, config.data.max_length, graph)
        except ConfigError as error:
            yield from (CheckResult("model", "problem", str(each), "config") for each in error.problems)
            self._is_planned = False
        for text in model_warnings(model, config.data.max_length, config.optimizer, graph):
            yield CheckResult("model", "warning", text)

    def _look_at_tokenizer(self) -> Iterator[CheckResult]:
        table = self._config.model
        try:
            model = resolve_model(self._config)
            if self._graph is None and table.tokenizer_name_or_path in (None, table.model_name_or_path):
                read_config(model.folder)  # transformers reads it for the tokenizer too
        except ModelFolderError:
            yield CheckResult("tokenizer", "note", "not looked at before the model's config.json is right")
            return
        self._tokenizer = tokenizer_of(model)
        template = "with a chat template" if self._tokenizer.chat_template else "without a chat template"
        yield CheckResult("tokenizer", "ok", f"{len(self._tokenizer):,} tokens, {template}")

    def _look_at_data(self) -> Iterator[CheckResult]:
        if self._tokenizer is None:
            yield CheckResult("data", "note", "not looked at without a tokenizer")
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
        proven = "; what is trained of each row was checked" if self._config.task != "pretrain" else ""
        yield CheckResult("data", "ok", f"{head}{proven}")
        yield from self._remarks("data", dataset)
        if self._bad_rows == "drop":
            for text in check_losses(
                dataset.report, resolve_data(self._config).source_names, self._config.data.max_dropped
            ):
                yield CheckResult("data", "warning", text)

    def _each_source(self, error: DataError) -> Iterator[CheckResult]:
        """Look at each source alone, so that a mistake in one does not hide those of the others."""
        assert self._tokenizer is not None
        sources = self._config.data.train
        if len(sources) == 1:
            yield problem("data", error)
            return
        found = []
        for source in sources:
            try:
                open_dataset(resolve_data(self._config, [source]), self._tokenizer)
            except DataError as each:
                found.append(problem("data", each))
        yield from found or [problem("data", error)]

    def _remarks(self, subject: str, dataset: TokenDataset, name: str = "") -> Iterator[CheckResult]:
        """Yield what is worth knowing about the rows of a data set: what the task says, then rows that are left out.

        Args:
            subject: As in ``CheckResult``.
            dataset: Its rows.
            name: In front of each text.
        """
        report = dataset.report
        for note in task_of(self._config.task, resolve_preference(self._config)).notes(dataset):
            yield CheckResult(subject, note.severity, f"{name}{note.text}")
        if report.empty_files is not None and self._bad_rows == "error":
            yield CheckResult(subject, "problem", f"{name}{report.empty_files.skipped}. {_ENDS_THE_RUN}", "data")
        left_out = [
            f"{_count(each.count, 'row')} dropped: {each.reason} (first: {each.example})" for each in report.dropped
        ]
        if report.num_untrained:
            count = _count(report.num_untrained, "row")
            left_out.append(f"{count} without a trained token (first: {report.first_untrained})")
        for text in left_out:
            if self._bad_rows == "error":
                yield CheckResult(subject, "problem", f"{name}{text}. {_ENDS_THE_RUN}", "data")
            else:
                yield CheckResult(subject, "note", f"{name}{text}")
        for each in report.untrained_turns:
            text = f"{_count(each.count, 'turn')} not trained: {each.reason} (first: {each.example})"
            yield CheckResult(subject, "note", f"{name}{text}")
        for severity, text in report.remarks():
            yield CheckResult(subject, severity, f"{name}{text}")

    def _look_at_plan(self) -> Iterator[CheckResult]:
        if self._graph is None or not self._is_planned:
            yield CheckResult("plan", "note", "not made without a model and a device for it")
            return
        run, size = with_kept_rules(resolve(self._config)), self._config.distributed.processes
        self._plan = plan = plan_run(run if size == 1 else run.as_fullest_rank(size))
        config = with_fused(with_lanes(self._config, plan.run.num_lanes), plan.run.optimizer.muon_fused)
        config = with_flash(with_liger(config, uses_liger=plan.run.uses_liger), plan.run.flash)
        self._config = with_packing(config, plan.run.data.table.packing)
        if plan.flash_note:
            yield CheckResult("plan", "note", plan.flash_note)
        if plan.packing_warning:
            yield CheckResult("plan", "warning", plan.packing_warning)
        sizes = ", ".join(
            f"{tier} {format_size(nbytes)} of {format_size(plan.budgets[tier])}"
            for tier, nbytes in plan.totals.items()
            if nbytes
        )
        yield CheckResult("plan", "ok", f"fits: {sizes}")

    def _look_at_eval_data(self) -> Iterator[CheckResult]:
        held_out = self._config.data.val_size is not None and self._dataset is not None
        if self._plan is None or self._tokenizer is None or not (held_out or self._config.data.eval):
            return
        said: list[str] = []
        warnings: list[str] = []
        spec = resolve_evaluation(self._config)
        sets = load_evaluation_sets(spec, self._plan, self._tokenizer, said.append, self._dataset, warnings.append)
        yield from (CheckResult("eval data", "ok", text.splitlines()[0]) for text in said)
        yield from (CheckResult("eval data", "warning", text) for text in warnings)
        for each in sets if self._config.data.eval else ():
            yield from self._remarks("eval data", each.loader.dataset, f"{each.name}: ")
        make_samplers(spec, plans_of_evaluations(spec, self._plan), sets, self._tokenizer)

    def _look_at_drives(self) -> Iterator[CheckResult]:
        """Show where each path of the NVMe tier lies, and what the config gives the tiers that is not there."""
        tiers = resolve_tiers(self._config)
        for path in drive_paths(tiers.table.nvme):
            yield CheckResult("drive", "ok", str(path))
        if self._device is None:
            return
        for each in find_objections(tiers, self._device) if self._plan is None else self._plan.objections:
            subject = "drive" if each.key.startswith("tiers.nvme") else "tiers"
            if each.refuses:
                yield CheckResult(subject, "problem", str(each), "fit" if each.kind == "size" else "config")
            else:
                yield CheckResult(subject, "warning", str(each))

    def _look_at_disk(self) -> Iterator[CheckResult]:
        folder = self._config.output_dir
        parent = machine.existing_parent(folder)
        if not _can_hold_files(parent):
            text = f"output_dir: cannot write in {parent}. Write another folder"
            yield CheckResult("disk", "problem", text, "config")
        check_target(folder / FINAL_NAME)
        is_usable = _can_hold_files(parent)
        for number, table in enumerate(self._config.tiers.nvme):
            parent = machine.existing_parent(table.path)
            if not _can_hold_files(parent):
                text = f"tiers.nvme.{number}.path: cannot write in {parent}, for {table.path}. Write another folder"
                yield CheckResult("disk", "problem", text, "config")
                is_usable = False
            elif table.path.is_dir():
                check_ours(table.path)
        if self._plan is None or not is_usable:
            return
        check_drives(self._plan)
        count = self._config.checkpoint.save_total_limit if self._config.checkpoint.is_on else 0
        what = f"the run and {_count(count, 'checkpoint')}" if count else "the run"
        yield CheckResult("disk", "ok", f"enough free for {what}")

    def _look_at_steps(self) -> Iterator[CheckResult]:
        if self._plan is None or self._dataset is None or self._tokenizer is None:
            return
        run = self._plan.run
        loader = make_loader(self._plan, self._dataset, self._tokenizer)
        num_steps = loader.num_steps(run.num_epochs, run.max_steps)
        try:
            make_schedule(run.optimizer, num_steps)
        except ScheduleError as error:
            yield problem("steps", error)
        for text in schedule_warnings(run.optimizer, num_steps):
            yield CheckResult("steps", "warning", text)
        self._num_steps, self._fingerprint = num_steps, loader.fingerprint()
        epochs = num_steps / loader.steps_per_epoch
        text = f"{_count(num_steps, 'step')}, {epochs:.4g} epoch{'s' if epochs != 1 else ''}"
        text += f" of {_count(loader.steps_per_epoch, 'step')} each"
        yield CheckResult("steps", "ok", text)

    def _look_at_checkpoints(self) -> Iterator[CheckResult]:
        spec, dtype = resolve_checkpoint(self._config), self._config.export.dtype
        owner = living_owner(spec.output_dir)
        if owner is not None:
            yield CheckResult("checkpoints", "note", f"output_dir is in use: {owner.text} is training there")
        drive_bytes = 0 if self._plan is None else self._plan.checkpoint_bytes_on_drives
        yield from (CheckResult("checkpoints", "note", text) for text in describe_drives(spec, drive_bytes))
        notices: list[str] = []
        rule = resolve_best(self._config)
        try:
            candidates = find_candidates(spec, notices.append)
        except LostCheckpointsError as lost:
            if (
                self._num_steps is None
                or already_done(lost.newest, self._num_steps, spec.output_dir, dtype, rule) is None
            ):
                raise
            yield CheckResult("checkpoints", "note", "the run is done, and its checkpoints are gone with a drive")
            return
        yield from (CheckResult("checkpoints", "note", text) for text in notices)
        if not candidates:
            yield CheckResult("checkpoints", "ok", "none: the run starts from the model")
            return
        if self._plan is None or self._dataset is None:
            yield CheckResult("checkpoints", "note", f"{candidates[0]}: not compared without model and data")
            return
        changes: list[str] = []
        own = {"bad_rows": self._bad_rows, "cache_dir": self._cache_dir}  # those of the checkup are not the user's
        config = self._config.model_copy(update={"data": self._config.data.model_copy(update=own)})
        check_changes(
            changes_from(candidates[0].state.config_toml, with_commit(config, self._plan.run.model.hub)),
            with_decays(candidates[0], self._plan),
            describe_model(self._plan),
            self._fingerprint or self._dataset.fingerprint(),
            allow=False,
            on_notice=changes.append,
        )
        yield from (CheckResult("checkpoints", "note", text) for text in changes)
        if (
            self._num_steps is not None
            and already_done(candidates[0], self._num_steps, spec.output_dir, dtype, rule) is not None
        ):
            yield CheckResult("checkpoints", "note", "the run is done: raise the number of steps to train longer")
        yield CheckResult("checkpoints", "ok", f"continues from {candidates[0]}")

    def _look_at_weights(self) -> Iterator[CheckResult]:
        """Read the weights that a run would load: it stops at the first that is no number."""
        if not self._weight_names:
            return
        folder = ModelFolder(resolve_model(self._config).folder)

        def progress(done: int, total: int) -> None:
            self._on_progress(f"weights, {format_size(done)} of {format_size(total)}")

        found = folder.find_nonfinite(self._weight_names, progress)
        if found:
            files = dict.fromkeys(str(folder.records[name].file) for name in found)
            which = f"{_count(len(found), 'tensor')} ({some(found, 3)})"
            text = f"{which} hold NaN or infinite values, in {some(list(files), 2)}. Take an undamaged model"
            yield CheckResult("weights", "problem", text, "config")
        else:
            yield CheckResult("weights", "ok", "all are finite numbers")


def _can_hold_files(folder: Path) -> bool:
    """Return whether a file could be made in a folder; one of the kernel's own file systems has no bytes at all."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return False
    return shutil.disk_usage(folder).total > 0


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
