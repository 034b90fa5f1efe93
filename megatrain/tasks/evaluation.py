"""Evaluations between training steps, in which the training engine computes the losses of held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.observer import EvaluationMetrics, RunObserver, Sample
from megatrain.data.dataset import check_id_range, load_dataset
from megatrain.data.loader import BatchLoader
from megatrain.data.row_order import EpochOrder, LoaderPosition
from megatrain.data.rows_report import DataError, check_losses
from megatrain.data.token_dataset import HELD_OUT_NAME, describe, held_out_part
from megatrain.models.graph import num_learned_positions
from megatrain.plan.forward import plan_averages, plan_samples
from megatrain.plan.stepping import model_for_passes
from megatrain.plan.tiers import lend_step_memory
from megatrain.plan.traffic import Traffic
from megatrain.ranks.collectives import SingleRank, make_collectives
from megatrain.tasks.continuation import Continuation, StoppedError
from megatrain.tasks.passes import Passes
from megatrain.tasks.prompts import GenerationSettings
from megatrain.tasks.registry import task_class

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.data.dataset import DataSpec
    from megatrain.data.token_dataset import TokenDataset
    from megatrain.plan.forward import GenerationPlan
    from megatrain.plan.plan import Plan
    from megatrain.plan.run_spec import RunSpec
    from megatrain.ranks.collectives import Collectives
    from megatrain.tasks.table import EvaluationConfig
    from megatrain.tasks.task import SetMetrics
    from tiered import TieredStore

__all__ = [
    "EvaluatedWeights",
    "EvaluationSet",
    "Evaluator",
    "Sampler",
    "count_pass_traffic",
    "deal_micro_batches",
    "load_evaluation_sets",
    "make_samplers",
    "plan_evaluations",
]


EvaluatedWeights = Literal["trained", "average"]


@dataclass(frozen=True, slots=True)
class EvaluationSource:
    """Source of rows from one ``[[data.eval]]`` table.

    Attributes:
        name: Name of the set in metrics.
        label: Name of the source in messages.
        data: Settings for reading the rows.
    """

    name: str
    label: str
    data: DataSpec


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """Settings and sources of a run's evaluations.

    Attributes:
        table: The ``[evaluation]`` table.
        rows: Maximum number of rows in a micro-batch, or None for the same number as in training.
        sources: Sources of rows. Rows that ``data.val_size`` holds out are not included.
    """

    table: EvaluationConfig
    rows: int | None
    sources: tuple[EvaluationSource, ...]

    @property
    def num_samples(self) -> int:
        """Number of rows per set for which samples are generated, or 0 if samples are off."""
        return self.table.max_predict_samples if self.table.predict_with_generate else 0

    @property
    def weights(self) -> tuple[EvaluatedWeights, ...]:
        """Kinds of weights to evaluate, in order."""
        return ("trained", "average") if self.table.weights == "both" else (self.table.weights,)

    def evaluation_name(self, name: str, weights: EvaluatedWeights) -> str:
        """Return the name in metrics for the evaluation of a set with these weights."""
        return f"{name}_average" if weights == "average" and len(self.weights) > 1 else name

    def evaluation_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of all evaluations at a step, in order. ``names`` contains the names of the sets."""
        names = list(names)
        return [self.evaluation_name(name, weights) for weights in self.weights for name in names]


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Rows used only for evaluation.

    Attributes:
        loader: Loader of the rows. Each evaluation uses one epoch.
        num_micro_batches: Number of micro-batches in each of the loader's steps.
        pass_size: Number of micro-batches that share a pass.
        rank_range: Micro-batches of a pass that this rank evaluates, or None for all micro-batches.
    """

    name: str
    loader: BatchLoader
    num_micro_batches: int
    pass_size: int
    rank_range: range | None = None

    @property
    def num_passes(self) -> int:
        """Number of passes over the weights in one evaluation."""
        return self.loader.steps_per_epoch * (self.num_micro_batches // self.pass_size)

    def passes(self) -> Iterator[Sequence[Mapping[str, Tensor]]]:
        """Yield, for each pass, the micro-batches that this rank evaluates."""
        self.loader.seek(LoaderPosition())
        local_range = range(self.pass_size) if self.rank_range is None else self.rank_range
        for _ in range(self.loader.steps_per_epoch):
            micro_batches = next(self.loader).micro_batches
            for start in range(0, len(micro_batches), self.pass_size):
                yield micro_batches[start + local_range.start : start + local_range.stop]


def load_evaluation_sets(
    spec: EvaluationSpec,
    plan: Plan,
    tokenizer: PreTrainedTokenizerFast,
    on_message: Callable[[str], None],
    training: TokenDataset | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> list[EvaluationSet]:
    """Read and tokenize a run's evaluation sets, in order. The list is empty if the config has no evaluation.

    Args:
        on_message: Called with reports on the rows.
        training: Training dataset, whose held-out rows are an evaluation set. None to load it if needed.
        on_warning: Called with a warning for each set that lost many rows or tokens.

    Raises:
        DataError: ``load_dataset`` failed, or more than ``data.max_dropped`` of a set is dropped or truncated.
    """
    if spec.table.eval_strategy == "no" and not spec.table.eval_on_start:
        return []
    run = plan.run
    rows = min(spec.rows or plan.run.batch.micro_batch_rows, plan.run.batch.micro_batch_rows)
    if rows < (spec.rows or 0):
        on_message(f"evaluations use micro-batches of {rows} rows, because memory is planned for training")
    rank_ranges = deal_micro_batches(run, rows)
    num_micro_batches, local_range = rank_ranges[-1].stop, None if run.world.is_single else rank_ranges[run.world.rank]
    sets, shape = [], run.data.batch_shape(rows, num_micro_batches)
    for index, (name, dataset) in enumerate(
        _load_datasets(spec, run.data, tokenizer, on_message, training, on_warning)
    ):
        check_id_range(dataset, plan.graph.model.get_input_embeddings().weight.shape[0], location=f"data.eval.{index}")
        order = EpochOrder(dataset, shape, run.data.seed)
        loader = BatchLoader(order, run.data.collator(shape, tokenizer))
        # Limit the rows in a pass to the number in training, because the plan reserves memory for only that number.
        sets.append(EvaluationSet(name, loader, num_micro_batches, run.batch.together(num_micro_batches), local_range))
    return sets


def deal_micro_batches(run: RunSpec, rows: int) -> list[range]:
    """Return the range of a pass's micro-batches that each rank evaluates. Each micro-batch has ``rows`` rows.

    Every rank gets at least one micro-batch, and at most as many rows as in training. The ranges do not affect metrics.
    """
    training_counts = [
        len(run.lanes.rank_micro_batches(rank, run.batch.num_micro_batches)) for rank in range(run.world.size)
    ]
    stops = accumulate(count * run.batch.micro_batch_rows // rows for count in training_counts)
    return [range(start, stop) for start, stop in pairwise([0, *stops])]


def _load_datasets(
    spec: EvaluationSpec,
    data: DataSpec,
    tokenizer: PreTrainedTokenizerFast,
    on_message: Callable[[str], None],
    training: TokenDataset | None,
    on_warning: Callable[[str], None],
) -> Iterator[tuple[str, TokenDataset]]:
    """Yield (name, dataset) for the rows held out from training, then for each ``[[data.eval]]`` table."""
    if data.table.val_size is not None:
        full_dataset = load_dataset(data, tokenizer, on_message) if training is None else training
        dataset = held_out_part(full_dataset, spec.table.eval_max_samples)
        on_message(f"{HELD_OUT_NAME}: {describe(dataset)}")
        yield HELD_OUT_NAME, dataset
    for index, source in enumerate(spec.sources):
        try:
            dataset = load_dataset(source.data, tokenizer, on_message)
        except DataError as error:
            raise DataError(f"data.eval.{index}", str(error).removeprefix("data.train: ")) from error
        on_message(f"{source.name}: {dataset.report}")
        for text in check_losses(dataset.report, [source.label], data.table.max_dropped):
            on_warning(text)
        yield source.name, dataset


def plan_evaluations(spec: EvaluationSpec, plan: Plan) -> dict[EvaluatedWeights, Plan]:
    """Return the plan of evaluation passes for each kind of evaluated weights.

    Raises:
        DoesNotFitError: A tier is too small. The message states a sufficient size.
    """
    return {weights: plan if weights == "trained" else plan_averages(plan) for weights in spec.weights}


def count_pass_traffic(plan: Plan, num_passes: int) -> dict[str, int]:
    """Return the exact number of bytes that each link moves in ``num_passes`` evaluation passes.

    Args:
        plan: One of the plans that ``plan_evaluations`` returns.
    """
    program = model_for_passes(plan).program
    placement = plan.placement
    traffic = Traffic(program, placement.routes, placement.homes, {}).first_step_bytes()
    return {link: num_passes * nbytes for link, nbytes in traffic.items()}


class Evaluator:
    """Evaluator of a run, which evaluates at the configured steps. Must be used by the training thread.

    Args:
        steps_per_epoch: Number of steps in an epoch of training.
        should_stop: Called between passes, on all ranks, so it can be a collective. It must return the same result on
            all of them. An interrupted evaluation is not reported.
        resumed_evaluations: Latest evaluations before a resume, by name. They are not repeated at the same step.
        plans: Plans of the passes, or None to use the result of ``plan_evaluations``.
        samplers: Samplers by the kind of weights that they use. Empty if samples are off.

    Attributes:
        latest_evaluations: Latest evaluation by name. It is equal on all ranks, except for the duration.
    """

    def __init__(
        self,
        spec: EvaluationSpec,
        plan: Plan,
        store: TieredStore,
        sets: Sequence[EvaluationSet],
        observer: RunObserver,
        *,
        timeline: Timeline,
        activity: Activity,
        steps_per_epoch: int,
        max_steps: int,
        should_stop: Callable[[], bool],
        resumed_evaluations: Mapping[str, EvaluationMetrics] = MappingProxyType({}),
        plans: Mapping[EvaluatedWeights, Plan] | None = None,
        samplers: Mapping[EvaluatedWeights, Sampler] = MappingProxyType({}),
    ) -> None:
        self._spec, self.samplers = spec, samplers
        self._plans = plan_evaluations(spec, plan) if plans is None else plans
        self._plan, self._store, self._sets, self._observer = plan, store, sets, observer
        self._task = task_class(plan.run.task)(plan.run.objective.loss)
        self._timeline, self._activity = timeline, activity
        self._steps_per_epoch, self._max_steps = steps_per_epoch, max_steps
        self._should_stop = should_stop
        self.latest_evaluations = dict(resumed_evaluations)
        self._passes: dict[EvaluatedWeights, Passes] = {}
        # The first evaluation creates the collectives, because by then the ranks have joined their group.
        self._collectives: Collectives | SingleRank | None = None

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after ``step`` steps and not all sets have been evaluated yet."""
        return self._is_scheduled(step) and not all(self._is_done(step, name) for name in self.names)

    @property
    def names(self) -> list[str]:
        """Names of all evaluations at a step, in order."""
        return self._spec.evaluation_names(s.name for s in self._sets)

    def _is_done(self, step: int, name: str) -> bool:
        return name in self.latest_evaluations and self.latest_evaluations[name].step == step

    def _is_scheduled(self, step: int) -> bool:
        strategy = self._spec.table.eval_strategy
        if step == 0:
            return self._spec.table.eval_on_start
        if strategy == "no":
            return False
        return step == self._max_steps or step % self._interval == 0

    @property
    def _interval(self) -> int:
        return self._steps_per_epoch if self._spec.table.eval_strategy == "epoch" else self._spec.table.eval_steps

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` at which an evaluation is due or the run ends."""
        if not self._sets or self._spec.table.eval_strategy == "no":
            return self._max_steps
        return min(self._max_steps, (step // self._interval + 1) * self._interval)

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes that evaluations have exchanged with other ranks, by link."""
        return {} if self._collectives is None else dict(self._collectives.moved_bytes)

    @property
    def _ranks(self) -> Collectives | SingleRank:
        assert self._collectives is not None, "no evaluation has begun"
        return self._collectives

    def run(self, step: int) -> None:
        """Evaluate and report every set that has not been evaluated at this step. Use the current weights.

        All updates must be finished, and the compute tier must not keep copies for a later step. Afterwards, the store
        has no schedule. This is a collective: all ranks must call it at the same steps.
        """
        if self._collectives is None:
            self._collectives = make_collectives(self._plan.run.world, self._plan.program.compute_tier)
        self._timeline.is_recording = False
        for weights, plan in self._plans.items():
            due = [s for s in self._sets if not self._is_done(step, self._spec.evaluation_name(s.name, weights))]
            loan = lend_step_memory(self._store, self._plan, plan) if due and plan is not self._plan else nullcontext()
            with loan:
                for eval_set in due:
                    if not self._evaluate(step, eval_set, weights):
                        return

    def _evaluate(self, step: int, eval_set: EvaluationSet, weights: EvaluatedWeights) -> bool:
        """Evaluate a set and report the result. Return False if a stop interrupted the evaluation."""
        start_s, name = time.perf_counter(), self._spec.evaluation_name(eval_set.name, weights)
        result = self._evaluate_set(eval_set, weights, f"evaluating {name}")
        samples: Sequence[Sample] = ()
        if weights in self.samplers and not self._should_stop():
            sampler = self.samplers[weights]
            self._activity.begin(f"continuing rows of {name}", num_parts=sampler.num_ticks)
            items = sampler.generate_samples(eval_set.name, self._store, self._activity, self._should_stop, self._ranks)
            samples = tuple(items)
        if self._should_stop():
            return False
        seconds = time.perf_counter() - start_s
        metrics = EvaluationMetrics(
            step, self._max_steps, name, result.loss, result.num_tokens, seconds, result.metrics, samples
        )
        self.latest_evaluations[name] = metrics
        self._observer.on_evaluation(metrics)
        return True

    def _evaluate_set(self, eval_set: EvaluationSet, weights: EvaluatedWeights, description: str) -> SetMetrics:
        """Run a set's passes and return the task's metrics."""
        if weights not in self._passes:
            self._passes[weights] = Passes(
                self._plans[weights],
                self._store,
                timeline=self._timeline,
                activity=self._activity,
                collectives=self._ranks,
            )
        passes, accumulator = self._passes[weights], self._task.accumulator()
        self._activity.begin(description, num_parts=passes.num_ticks)
        for result in passes.run(
            eval_set.passes(), accumulator.head, num_passes=eval_set.num_passes, should_stop=self._should_stop
        ):
            accumulator.add(result)
        return accumulator.compute(self._ranks.gather_objects)


@dataclass(frozen=True, slots=True)
class _SplitRow:
    """A row, split into a prompt and the remaining tokens."""

    prompt: Tensor
    reference: Tensor


def _split_rows(dataset: TokenDataset, data_seed: int, count: int, max_new_tokens: int) -> list[_SplitRow]:
    """Return a set's first rows, split before the first token in the loss. For preferences, use only first answers.

    A text that is entirely in the loss is split in the middle.
    """
    split_rows: list[_SplitRow] = []
    for document in dataset.epoch_documents(data_seed):
        if len(split_rows) == count:
            break
        span = slice(int(dataset.starts[document]), int(dataset.starts[document + 1]))
        tokens = torch.from_numpy(dataset.tokens[span].astype(np.int64))
        trained_indices = np.flatnonzero(dataset.trained[span])
        if len(tokens) < 2 or not len(trained_indices):
            continue
        start = int(trained_indices[0]) if trained_indices[0] > 1 else len(tokens) // 2
        gaps = np.flatnonzero(~dataset.trained[span][start:])
        stop = start + (int(gaps[0]) if len(gaps) and gaps[0] else len(tokens) - start)
        split_rows.append(_SplitRow(tokens[:start], tokens[start : min(stop, start + max_new_tokens)]))
    return split_rows


class Sampler:
    """Generator of samples between training steps. A sample continues a row of an evaluation set.

    The most likely token is always selected, so samples depend only on the current weights. The KV cache uses the
    memory of gradients, activations and workspace, so that no tier exceeds its capacity.

    Attributes:
        planned_bytes: Planned bytes of all passes so far, by link.
    """

    def __init__(
        self,
        plan: Plan,
        generation: GenerationPlan,
        rows: Mapping[str, Sequence[_SplitRow]],
        tokenizer: PreTrainedTokenizerFast,
        max_new_tokens: int,
    ) -> None:
        self._plan, self._generation, self._rows = plan, generation, rows
        self._tokenizer, self._settings = tokenizer, GenerationSettings(max_new_tokens, temperature=0.0, seed=0)
        self.planned_bytes: dict[str, int] = {}

    @classmethod
    def for_sets(
        cls,
        spec: EvaluationSpec,
        plan: Plan,
        sets: Sequence[EvaluationSet],
        tokenizer: PreTrainedTokenizerFast,
        gather: Callable[[int], Sequence[int]] = lambda value: [value],
    ) -> Sampler | None:
        """Return a sampler for the first rows of each set, or None if there are no rows.

        Args:
            spec: Settings with the number of rows, and the number of new tokens per row.
            plan: Plan of evaluation passes.
            gather: Collective that returns the values of all ranks.

        Raises:
            ConfigError: A row with its new tokens needs more positions than the model has.
            DoesNotFitError: A tier is too small.
            UnsupportedModelError: The model cannot generate with streamed weights.
        """
        num_new, seed = spec.table.max_new_tokens, plan.run.data.seed
        rows = {s.name: _split_rows(s.loader.dataset, seed, spec.num_samples, num_new) for s in sets}
        max_rows = max(map(len, rows.values()), default=0)
        if not max_rows:
            return None
        max_length = max(len(row.prompt) for set_rows in rows.values() for row in set_rows)
        positions = num_learned_positions(plan.graph)
        if positions is not None and max_length + num_new > positions:
            key = "evaluation.max_new_tokens"
            text = (
                f"{key} = {num_new}, but the longest prompt of an evaluation has {max_length:,} tokens, and the model "
                f"has only {positions:,} positions"
            )
            advice = f"Use at most {positions - max_length}" if positions > max_length else "Lower data.max_length"
            raise ConfigError(plan.run.model.name, [Problem(key, text, advice)])
        batch_rows = min(spec.rows or plan.run.batch.micro_batch_rows, plan.run.batch.micro_batch_rows, max_rows)
        # Each rank gets whole micro-batches, because tokens depend on which rows share a micro-batch.
        num_micro_batches = -(-max_rows // (batch_rows * plan.run.world.size))

        def make_plan(count: int) -> GenerationPlan:
            return plan_samples(plan, rows=batch_rows, num_prompts=count * batch_rows, max_length=max_length + num_new)

        generation = make_plan(num_micro_batches)
        num_fitting = generation.plan.run.batch.num_micro_batches
        num_common = min(gather(num_fitting))  # other ranks may have memory for fewer micro-batches
        if num_common < num_fitting:
            generation = make_plan(num_common)
        return cls(plan, generation, rows, tokenizer, num_new)

    @property
    def num_ticks(self) -> int:
        """Number of ticks in a pass."""
        return len(self._generation.first_program.ticks)

    @property
    def plan(self) -> Plan:
        """Plan of a pass."""
        return self._generation.plan

    def generate_samples(
        self,
        name: str,
        store: TieredStore,
        activity: Activity,
        should_stop: Callable[[], bool],
        collectives: Collectives | SingleRank | None = None,
    ) -> list[Sample]:
        """Generate a set's samples. Return no samples if a stop was requested.

        As for ``Evaluator.run``, all updates must be finished. This is a collective: all ranks must call it.

        Args:
            should_stop: Called before each pass. All ranks must get the same result.
            collectives: Collectives of the ranks, or None for a single process.
        """
        rows, plan, ranks = self._rows[name], self._generation.plan, collectives or SingleRank()
        if not rows:
            return []
        passes = Continuation(
            self._generation,
            store,
            self._tokenizer,
            self._settings,
            activity=activity,
            is_exact=True,
            should_stop=should_stop,
            collectives=ranks,
        )
        outputs: list[tuple[int, ...]] = []
        rank, size, batch_rows = plan.run.world.rank, plan.run.world.size, plan.run.batch.num_rows
        with lend_step_memory(store, self._plan, plan):
            try:
                for offset in range(0, len(rows), batch_rows * size):
                    start = offset + rank * batch_rows
                    output = passes.run([row.prompt for row in rows[start : start + batch_rows]])
                    rank_outputs = ranks.gather_objects(output)
                    outputs += [t for rank_output in rank_outputs for t in rank_output]
            except StoppedError:
                outputs, rows = [], []
        for link, nbytes in passes.planned_bytes.items():
            self.planned_bytes[link] = self.planned_bytes.get(link, 0) + nbytes
        return [
            Sample(*(self._tokenizer.decode(t, skip_special_tokens=True) for t in (row.prompt, output, row.reference)))
            for row, output in zip(rows, outputs, strict=True)
        ]


def make_samplers(
    spec: EvaluationSpec,
    plans: Mapping[EvaluatedWeights, Plan],
    sets: Sequence[EvaluationSet],
    tokenizer: PreTrainedTokenizerFast,
    gather: Callable[[int], Sequence[int]] = lambda value: [value],
) -> dict[EvaluatedWeights, Sampler]:
    """Return samplers for the sets' rows, by kind of weights. The dict is empty if samples are off.

    Raises the errors of ``Sampler.for_sets``.

    Args:
        spec: Settings with the number of rows, and the number of new tokens per row.
        plans: Result of ``plan_evaluations``.
        gather: Collective that returns the values of all ranks.
    """
    if not spec.num_samples:
        return {}
    samplers = {weights: Sampler.for_sets(spec, plan, sets, tokenizer, gather) for weights, plan in plans.items()}
    return {weights: sampler for weights, sampler in samplers.items() if sampler is not None}
