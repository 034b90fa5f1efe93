"""Creates and checks a planned run's parts before its first step: weights, rows, evaluation sets, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatrain.base.names import FINAL_NAME
from megatrain.base.progress import Activity
from megatrain.config.advice import model_warnings
from megatrain.config.resolved import check_writable
from megatrain.data.loader import BatchLoader
from megatrain.data.rows_report import DataError, check_losses
from megatrain.data.stream import open_dataset
from megatrain.data.token_dataset import TokenDataset
from megatrain.models.export import RECORD_FILE, check_target
from megatrain.optim.lr import make_schedule, schedule_warnings
from megatrain.plan.limits import refuse
from megatrain.plan.plan import Plan
from megatrain.plan.tiers import check_drives, check_folders
from megatrain.ranks.collectives import check_same
from megatrain.ranks.group import RankGroup
from megatrain.run.loggers import check_loggers
from megatrain.tasks.evaluation import (
    EvaluatedWeights,
    EvaluationSet,
    Sampler,
    load_evaluation_sets,
    make_samplers,
    plan_evaluations,
)
from megatrain.training.check_result import CheckResult
from megatrain.training.final import check_merge
from megatrain.training.open_run import StartWeights, open_weights
from megatrain.training.resolve import RunSettings
from megatrain.training.rows import check_token_ids, make_loader, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Preparation"]


class Preparation:
    """The parts that a planned run needs before its first step. Each part is created on first use and cached.

    Args:
        on_message: Called with messages for the user while a part is created.
        group: The ranks of the run, or None for a single process.
        activity: Progress shared with a live view. Default: not shared.
        dataset: Training rows, if they are already read and checked.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        on_message: Callable[[str], None] = lambda text: None,
        *,
        group: RankGroup | None = None,
        activity: Activity | None = None,
        dataset: TokenDataset | None = None,
    ) -> None:
        self.plan, self.run, self.settings = plan, plan.run, settings
        self.group, self.activity = group or RankGroup.single(), activity or Activity()
        self._on_message = on_message
        if dataset is not None:
            self.dataset = dataset

    def create_parts(self) -> Iterator[CheckResult]:
        """Create and check all parts, cheap checks first. Yield the findings. This is a collective.

        Raises:
            Exception: The first error of a part. ``Trainer.train`` lists the types.
        """
        group = self.group
        self.check_limits()
        if group.world.is_first:
            self.check_folders()
        # If an export exists, the run may be done and need neither weights nor space. Only the data will show this.
        if not (self.run.output_dir / FINAL_NAME / RECORD_FILE).is_file():
            _ = self.weights  # raises if weights are unusable or a drive is full
        self.activity.begin("reading the data")
        # The first rank of a host writes tokenized rows to the cache. The other ranks read them from the cache.
        yield from group.run_host_leaders_first(lambda: list(self.check_rows()))
        fingerprint = {"the fingerprint of the rows": self.loader.dataset.fingerprint()}
        check_same(group.gather, "data", fingerprint, "Give all ranks the same files in [[data.train]]")
        _ = self.learning_rate  # raises if the warm-up is longer than the run
        yield from group.run_host_leaders_first(self.check_evaluation_rows)
        self.check_evaluations()
        yield from self.plan_notes()
        yield from self.warnings()

    def check_limits(self) -> None:
        """Check that this machine has the configured memory and drives, and that evaluations and the export can run."""
        refuse(self.plan.objections)
        _ = self.evaluation_plans  # raises if a pass does not fit
        check_merge(self.plan)

    def check_folders(self) -> None:
        """Check that all loggers are installed and all folders are writable, without leaving files."""
        check_loggers(self.settings.logging)
        check_writable(self.settings.config)
        check_target(self.run.output_dir / FINAL_NAME)

    @cached_property
    def evaluation_plans(self) -> Mapping[EvaluatedWeights, Plan]:
        """Plans of evaluation passes, by the weights to evaluate."""
        return plan_evaluations(self.settings.evaluation, self.plan)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokenizer of the model."""
        return tokenizer_of(self.run.model)

    @cached_property
    def weights(self) -> StartWeights:
        """Initial weights, opened after a check of the drives' folders and free space."""
        check_drives(self.plan)
        check_folders(self.run.checkpoint)
        return open_weights(self.plan, self._on_message)

    @cached_property
    def dataset(self) -> TokenDataset:
        """Training rows, from the cache or newly tokenized."""
        dataset = open_dataset(self.run.data, self.tokenizer, self._on_message)
        check_token_ids(self.run.model, dataset, self.plan.graph)
        return dataset

    def check_rows(self) -> Iterator[CheckResult]:
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
        """Loader of the run's batches. ``RunStart.make_state`` moves it to a checkpoint's position."""
        return make_loader(self.plan, self.dataset, self.tokenizer)

    @cached_property
    def num_steps(self) -> int:
        """Number of steps in the run."""
        return self.loader.num_steps(self.run.num_epochs, self.run.max_steps)

    @cached_property
    def learning_rate(self) -> Callable[[int], float]:
        """Learning rate by step.

        Raises:
            ScheduleError: The warm-up is longer than the run.
        """
        return make_schedule(self.run.optimizer, self.num_steps)

    @cached_property
    def _evaluation_data(self) -> tuple[Sequence[EvaluationSet], Sequence[CheckResult]]:
        findings: list[CheckResult] = []
        sets = load_evaluation_sets(
            self.settings.evaluation,
            self.plan,
            self.tokenizer,
            lambda text: findings.append(CheckResult("eval data", "ok", text)),
            None if self.run.data.table.val_size is None else self.dataset,
            lambda text: findings.append(CheckResult("eval data", "warning", text)),
        )
        return sets, findings

    @property
    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """Evaluation sets with their rows."""
        return self._evaluation_data[0]

    def check_evaluation_rows(self) -> Sequence[CheckResult]:
        """Return the findings about the evaluation rows."""
        return self._evaluation_data[1]

    @cached_property
    def samplers(self) -> Mapping[EvaluatedWeights, Sampler]:
        """Samplers that generate continuations of evaluation rows, by the weights that they use."""
        spec, plans = self.settings.evaluation, self.evaluation_plans
        return make_samplers(spec, plans, self.evaluation_sets, self.tokenizer, self.group.gather)

    def check_evaluations(self) -> None:
        """Check that samples fit in memory, and that some evaluation reports the metric for the best model."""
        _ = self.samplers  # raises if samples do not fit
        names = self.settings.evaluation.evaluation_names(dataset.name for dataset in self.evaluation_sets)
        self.settings.best.check(names)

    def plan_notes(self) -> Iterator[CheckResult]:
        """Yield notes about surprising choices of the plan."""
        if self.plan.traced.flash_note:
            yield CheckResult("plan", "note", self.plan.traced.flash_note)
        if self.plan.traced.packing_warning:
            yield CheckResult("plan", "warning", self.plan.traced.packing_warning)

    def warnings(self) -> Iterator[CheckResult]:
        """Yield warnings about unusual settings of the model and the learning rate."""
        run = self.run
        for text in (
            *model_warnings(run.model, run.batch.max_length, run.optimizer, self.plan.graph),
            *schedule_warnings(run.optimizer, self.num_steps),
        ):
            yield CheckResult("model", "warning", text)
