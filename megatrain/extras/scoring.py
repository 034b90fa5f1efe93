"""Scoring of a data set by a model of any size. Each forward pass fetches every weight once for a large batch.

The weights are frozen. Weights that do not fit in RAM are read in place from the model's folder, in every pass
(docs/decisions/0031-frozen-weights-are-read-in-place.md). The scores of a pass are on disk before the next pass begins,
so after a crash only the last pass has to be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.observer import RunObserver
from megatrain.base.progress import Activity
from megatrain.config.combinations import find_scoring_problems
from megatrain.config.resolved import check_writable
from megatrain.data.collate import Collator
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import pad_token_id
from megatrain.data.row_order import EpochOrder
from megatrain.data.rows_report import check_losses
from megatrain.data.scores import SCORES_NAME, DocumentScores, ScoreFolder, ScoreKind, tokenizer_checksum
from megatrain.models.folder import ModelFolder
from megatrain.plan.forward import check_weights, forward_run, plan_forward
from megatrain.plan.limits import refuse
from megatrain.run.folder import RunFolder
from megatrain.run.signals import RunSignals
from megatrain.tasks.passes import Passes
from megatrain.training.open_run import OpenRun, open_run, open_weights
from megatrain.training.resolve import resolve
from megatrain.training.rows import check_token_ids, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.config.schema import RunConfig
    from megatrain.data.table import ScoreConfig
    from megatrain.data.token_dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.head.token_scores import TokenScores
    from megatrain.plan.plan import Plan
    from megatrain.tasks.task import MicroBatches

__all__ = ["ScoreSummary", "Scorer", "plan_scoring"]

#: Document embeddings by micro-batch number.
_Vectors = dict[int, Sequence[np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Results of one ``Scorer.run``.

    Attributes:
        num_rows: Number of rows in the data; a packed row counts once.
        num_rows_done: Number of rows with scores, including scores from earlier calls.
        num_passes: Number of passes over the weights in this call.
        num_tokens: Number of positions that this call processed, including padding.
        mean_log_prob: Mean log-probability of the tokens that this call scored; NaN if it scored none.
        seconds: Total time of this call's passes.
        planned_bytes: Bytes that the plan expects these passes to move, by link.
        link_bytes: Bytes that these passes moved, by link.
        interrupted: Whether a signal ended the call early.
    """

    folder: Path
    num_rows: int
    num_rows_done: int
    num_passes: int
    num_tokens: int
    num_scored_tokens: int
    mean_log_prob: float
    seconds: float
    planned_bytes: dict[str, int]
    link_bytes: dict[str, int]
    interrupted: bool

    @property
    def perplexity(self) -> float:
        """Perplexity of the tokens that this call scored."""
        return math.exp(-self.mean_log_prob)


def _check_scorable(config: RunConfig) -> None:
    """Check that the model of a config can score rows.

    Raises:
        ConfigError: A key prevents scoring.
    """
    if problems := list(find_scoring_problems(config)):
        raise ConfigError("the config", problems)


def plan_scoring(config: RunConfig) -> Plan:
    """Return the plan of a pass of ``Scorer``.

    Raises:
        ConfigError: The config is unsuitable for scoring.
        DoesNotFitError: A tier is too small.
        ModelFolderError: The model folder cannot be read.
        UnsupportedModelError: The model is not supported.
    """
    _check_scorable(config)
    table = config.score
    run = forward_run(resolve(config))
    plan = plan_forward(run, top_k=table.top_k)
    text = plan.graph.config.get_text_config()
    if table.top_k > text.vocab_size:
        message = f"score.top_k = {table.top_k} exceeds the model's vocabulary of {text.vocab_size} tokens"
        raise ConfigError(run.model.name, [Problem("score.top_k", message, f"Write at most {text.vocab_size}")])
    if table.embeddings != "none":
        plan = plan_forward(plan.run, top_k=table.top_k, width=text.hidden_size)
    return plan


class Scorer:
    """Scorer for the rows of ``[[data.train]]``, which writes missing scores to ``output_dir/scores``.

    Args:
        config: Model, data, tiers and ``[score]``. A pass has the size of a step; other training keys are ignored.
        observer: Observer that receives messages.
        plan: Result of ``plan_scoring``; None to compute it.
        activity: Progress for a live view, which the scorer updates.

    Attributes:
        plan: Plan of a pass.

    Raises:
        ConfigError: The config is unsuitable for scoring. Without ``plan``, all errors of ``plan_scoring``.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        observer: RunObserver | None = None,
        plan: Plan | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.plan = plan or plan_scoring(config)
        _check_scorable(config)
        self._config, self._table = config, config.score
        self._observer, self._activity = observer or RunObserver(), activity or Activity()

    def run(self) -> ScoreSummary:
        """Score the rows that have no scores yet.

        A stop signal ends the call after the current pass. Finished scores are kept, and the next call continues.

        Raises:
            DataError: The data cannot be used.
            ScoresError: ``output_dir`` contains scores of a different kind.
            BeyondMachineError: This machine has less memory than the tiers need.
            LockedError: Another run uses ``output_dir``.
            OSError: Storage failed.
            TieredError: Storage failed.
            KeyboardInterrupt: A second signal arrived. The current pass is lost.
        """
        check_weights(self.plan.run)
        refuse(self.plan.objections)
        check_writable(self._config)
        weights = None
        # If scores exist, weights are opened later, and only if the data shows that some scores are missing.
        if not (self.plan.run.output_dir / SCORES_NAME).is_dir():
            weights = open_weights(self.plan, self._observer.on_message)
        self._activity.begin("reading the data")
        order, collator = self.make_rows()
        kind = self._score_kind(order)
        with RunFolder(self.plan.run.output_dir) as run_folder:
            folder = ScoreFolder(run_folder.path / SCORES_NAME, kind)
            pass_rows = list(self._split_passes(folder.missing_rows()))
            if not pass_rows:
                self._observer.on_message(f"nothing to do: all {kind.num_rows:,} rows are scored in {folder.path}")
                return ScoreSummary(
                    folder=folder.path,
                    num_rows=kind.num_rows,
                    num_rows_done=kind.num_rows,
                    num_passes=0,
                    num_tokens=0,
                    num_scored_tokens=0,
                    mean_log_prob=math.nan,
                    seconds=0.0,
                    planned_bytes={},
                    link_bytes={},
                    interrupted=False,
                )
            num_scored = kind.num_rows - sum(map(len, pass_rows))
            self._observer.on_ready(num_scored or None)
            if num_scored:
                self._observer.on_message(f"continuing: {num_scored:,} of {kind.num_rows:,} rows are scored")
            with open_run(
                self.plan, on_message=self._observer.on_message, activity=self._activity, weights=weights
            ) as runtime:
                runtime.load()
                return self._run_passes(runtime, folder, kind, order, collator, pass_rows)

    def make_rows(self) -> tuple[EpochOrder, Collator]:
        run, on_message = self.plan.run, self._observer.on_message
        tokenizer = tokenizer_of(run.model)
        data = run.data.with_keys(val_size=None)
        dataset = load_dataset(data, tokenizer, on_message)
        check_token_ids(run.model, dataset, self.plan.graph)
        on_message(str(dataset.report))
        for text in check_losses(dataset.report, data.source_names, data.table.max_dropped):
            on_message(f"warning: {text}")
        self._tokenizer = tokenizer
        shape = data.batch_shape(run.batch.micro_batch_rows, run.batch.num_micro_batches)
        dataset = replace(dataset, weights=())  # without weights of the sources, each document is used once
        return EpochOrder(dataset, shape, data.seed), Collator(shape, pad_token_id(tokenizer))

    def _score_kind(self, order: EpochOrder) -> ScoreKind:
        run, graph = self.plan.run, self.plan.graph
        return ScoreKind(
            model=run.model.name,
            weights=ModelFolder(run.model.folder).fingerprint(),
            dtype=str(graph.dtype).removeprefix("torch."),
            attention=str(graph.model.config._attn_implementation),
            mlp_rows=run.model.table.mlp_rows,
            split_experts=run.model.table.split_experts,
            tokenizer=tokenizer_checksum(self._tokenizer),
            data=order.dataset.fingerprint(),
            max_length=run.batch.max_length,
            packing=bool(run.data.table.packing),
            data_seed=run.data.seed,
            num_rows=order.num_rows,
            top_k=self._table.top_k,
            temperature=self._table.temperature,
            embeddings=self._table.embeddings,
            formats=self._table.formats,
        )

    def _split_passes(self, missing: Sequence[range]) -> list[range]:
        """Split the missing rows into passes, and return the rows of each pass."""
        size = self.plan.run.batch.num_rows
        return [rows[start : start + size] for rows in missing for start in range(0, len(rows), size)]

    def _run_passes(
        self,
        runtime: OpenRun,
        folder: ScoreFolder,
        kind: ScoreKind,
        order: EpochOrder,
        collator: Collator,
        pass_rows: Sequence[range],
    ) -> ScoreSummary:
        plan, store = self.plan, runtime.store
        placement = plan.placement
        passes = Passes(plan, store, activity=self._activity, stays=placement.stays)
        store.wait_idle()  # otherwise, writes from loading would count as traffic of the passes
        start_stats, start_s = store.stats(), time.perf_counter()  # read before the first prefetch, which must count
        seconds = 0.0
        num_passes = num_tokens = num_scored = num_rows = 0
        log_probs: list[float] = []
        with RunSignals(stops_after_step=True, activity=self._activity) as signals:
            results = self._scores(passes, order, collator, pass_rows, lambda: signals.stop_requested)
            for index, ((documents, num_positions), rows) in enumerate(zip(results, pass_rows, strict=False)):
                folder.write(rows.start, len(rows), documents)
                num_passes, num_tokens, num_rows = index + 1, num_tokens + num_positions, num_rows + len(rows)
                num_scored += sum(len(document.positions) for document in documents)
                log_probs += [float(document.log_probs.sum(dtype=np.float64)) for document in documents]
                seconds = time.perf_counter() - start_s
                self._report_pass(folder, kind, index + 1, len(pass_rows), num_tokens, seconds)
        store.wait_idle()
        traffic = store.stats() - start_stats
        rows_left = sum(map(len, pass_rows)) - num_rows
        return ScoreSummary(
            folder=folder.path,
            num_rows=kind.num_rows,
            num_rows_done=kind.num_rows - rows_left,
            num_passes=num_passes,
            num_tokens=num_tokens,
            num_scored_tokens=num_scored,
            mean_log_prob=math.fsum(log_probs) / num_scored if num_scored else math.nan,
            seconds=seconds,
            planned_bytes={link: nbytes for link, nbytes in placement.run_traffic_bytes(num_passes).items() if nbytes},
            link_bytes={name: link.num_bytes for name, link in traffic.links.items() if link.num_bytes},
            interrupted=num_passes < len(pass_rows),
        )

    def _scores(
        self,
        passes: Passes,
        order: EpochOrder,
        collator: Collator,
        pass_rows: Sequence[range],
        should_stop: Callable[[], bool],
    ) -> Iterator[tuple[list[DocumentScores], int]]:
        """Yield the document scores and the number of positions of each pass."""
        size = self.plan.run.batch.micro_batch_rows
        groups: list[Sequence[Sequence[int]]] = []  # rows of each micro-batch of the current pass

        def batches() -> Iterator[MicroBatches]:
            for rows in pass_rows:
                self._activity.begin("scoring", num_parts=passes.num_ticks)
                # Rows stay in order, unlike in a training step. The rows that share a micro-batch, and therefore the
                # exact scores, do not depend on the number of micro-batches in a pass.
                firsts = range(rows.start, rows.stop, size)
                groups[:] = [order.rows(start, min(start + size, rows.stop)) for start in firsts]
                yield [collator.micro_batch(order.dataset, group) for group in groups]

        def run_head(runner: LayerRunner, micro_batches: MicroBatches) -> tuple[list[TokenScores], _Vectors, int]:
            vectors: _Vectors = {}

            def on_hidden(micro_batch: int, hidden: Tensor) -> None:
                vectors[micro_batch] = _embeddings(hidden, groups[micro_batch], order.dataset, self._table)

            scores = runner.score(
                micro_batches,
                k=self._table.top_k,
                temperature=self._table.temperature,
                on_hidden=None if self._table.embeddings == "none" else on_hidden,
            )
            return scores, vectors, sum(batch["input_ids"].numel() for batch in micro_batches)

        results = passes.run(batches(), run_head, num_passes=len(pass_rows), should_stop=should_stop)
        for scores, vectors, num_positions in results:
            documents: list[DocumentScores] = []
            for micro_batch, group in enumerate(groups):
                documents += _score_documents(group, order.dataset, scores[micro_batch], vectors.get(micro_batch))
            order.dataset.release_pages()
            yield documents, num_positions

    def _report_pass(
        self, folder: ScoreFolder, kind: ScoreKind, num_done: int, num_passes: int, num_tokens: int, seconds: float
    ) -> None:
        rows = kind.num_rows - sum(map(len, folder.missing_rows()))
        rate = num_tokens / max(seconds, 1e-9)
        self._observer.on_message(
            f"pass {num_done} of {num_passes}: {rows:,} of {kind.num_rows:,} rows scored, {rate:,.0f} tokens/s"
        )


def _iter_documents(
    rows: Sequence[Sequence[int]], dataset: TokenDataset
) -> Iterator[tuple[int, int, int, np.ndarray[Any, Any]]]:
    """Yield (row, offset in the row, document, positions in the loss) for each document in the rows, in order."""
    for row_index, row in enumerate(rows):
        offset = 0
        for document in row:
            span = slice(int(dataset.starts[document]), int(dataset.starts[document + 1]))
            yield row_index, offset, document, np.flatnonzero(dataset.trained[span])
            offset += span.stop - span.start


def _embeddings(
    hidden: Tensor, rows: Sequence[Sequence[int]], dataset: TokenDataset, table: ScoreConfig
) -> list[np.ndarray[Any, Any]]:
    """Return the embedding of each document in the rows of a micro-batch, in order."""
    embeddings = []
    for row, offset, document, _ in _iter_documents(rows, dataset):
        stop = offset + int(dataset.starts[document + 1] - dataset.starts[document])
        states = hidden[row, offset if table.embeddings == "mean" else stop - 1 : stop].float()
        embeddings.append(states.mean(0).cpu().numpy())
    return embeddings


def _score_documents(
    rows: Sequence[Sequence[int]],
    dataset: TokenDataset,
    scores: TokenScores,
    embeddings: Sequence[np.ndarray[Any, Any]] | None,
) -> list[DocumentScores]:
    """Return the scores of each document in the rows of a micro-batch. ``scores`` is in the order of the labels."""
    log_probs, rest_log_probs = scores.log_probs.numpy(), scores.rest_log_probs.numpy()
    top_ids, top_log_probs = scores.top_ids.numpy().astype(np.int32), scores.top_log_probs.numpy()
    documents: list[DocumentScores] = []
    offset = 0
    for index, (_, _, document, positions) in enumerate(_iter_documents(rows, dataset)):
        span = slice(offset, offset + len(positions))
        offset = span.stop
        start = int(dataset.starts[document])
        documents.append(
            DocumentScores(
                key=dataset.document_key(document),
                document=document,
                source=int(np.searchsorted(dataset.source_starts[1:-1], document, side="right")),
                num_tokens=int(dataset.starts[document + 1]) - start,
                positions=positions.astype(np.int32),
                token_ids=np.asarray(dataset.tokens[start + positions], dtype=np.int32),
                log_probs=log_probs[span],
                top_ids=top_ids[span],
                top_log_probs=top_log_probs[span],
                rest_log_probs=rest_log_probs[span],
                embedding=np.zeros(0, np.float32) if embeddings is None else embeddings[index],
            )
        )
    assert offset == len(log_probs), (offset, len(log_probs))
    return documents
