"""The head phase: a model's loss and its gradients, computed over a few rows of logits at a time.

Logits are the largest activation of a step: [tokens, vocabulary] in fp32. So the model is cut behind its decoder (the
*trunk*). The head, which is all that follows, runs on pieces of the hidden states that have a label. Each piece calls
the model's own `forward` with a stub for the trunk: norms, scaling and soft caps of logits stay Hugging Face's code.

Where what follows the last product is elementwise, a piece is computed for a part of the vocabulary at a time, in two
passes (`vocabulary.py`): the first for the loss, the second, over the parts in reverse, for the gradients. The second
makes the logits of a part again, unless the graph of its first pass was kept, which changes no bits.

`plan_head` finds the cut by trying it; `ChunkedHead` runs the pieces.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.base.progress import Activity
from megatrain.engine.arguments import has_differentiable, tree_map
from megatrain.engine.cross_entropy import PLAIN, RunningSoftmax, replaced_loss
from megatrain.engine.loss import MicroBatchLoss, PartialMean, RowsLoss
from megatrain.engine.state import without_saved_tensors
from megatrain.engine.token_scores import RunningTopK, TokenScores, joined_scores
from megatrain.engine.visit import BoundUnit, PartedWeight, installed_stubs, optional_gradients
from megatrain.engine.vocabulary import CutProbe, PartWeight, VocabularyPart, vocabulary_ranges
from megatrain.engine.weight_gradients import GradientTarget, target_of, weight_leaf

if TYPE_CHECKING:
    from megatrain.engine.program import BlockAccess, GradientSink
    from megatrain.engine.state import RandomStates
    from megatrain.models.graph import ModelGraph, Unit

__all__ = [
    "ChunkedHead",
    "HeadPlan",
    "TrunkOutput",
    "accepts_use_cache",
    "plan_head",
    "without_auxiliary_loss",
]

_LOGITS_NBYTES = 64 << 20
_ROWS = 2048
_COLUMNS = _LOGITS_NBYTES // (4 * _ROWS)
_AUXILIARY_FLAG = "output_router_logits"


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlan:
    """Where a model is cut.

    Attributes:
        trunk: The submodule whose output the head starts from.
        units: Units that run after the cut, in order of their first call.
        vocab_size: Columns of the logits.
        cut_weight: Owner's name of the weight whose product the logits are, if they may come a part of the vocabulary
            at a time.
        logit_nbytes: What the graph of one logit takes from the last product to the loss.
        borders: Rows of the cut weight that its parts begin with, the first one left out.
        is_product: Whether the logits are the product of the trunk's output with the cut weight, and nothing else: then
            a part of them is made without the model's forward, which would be called for every piece and part.
    """

    trunk: nn.Module
    units: tuple[Unit, ...]
    vocab_size: int
    cut_weight: str | None = None
    logit_nbytes: int = 4
    borders: tuple[int, ...] = ()
    is_product: bool = False

    def ranges(self, columns: int) -> list[tuple[int, int]]:
        """Return the words of each part of the vocabulary; none has words of two blocks of the weight's gradient."""
        return vocabulary_ranges(self.vocab_size, columns, self.borders)

    @property
    def default_columns(self) -> int:
        """Words per part of the vocabulary; 0: logits must be whole. From the model alone, as it decides about bits."""
        return _COLUMNS if self.cut_weight is not None else 0

    def default_rows(self, columns: int) -> int:
        """Return the rows per piece for so many words per part; from the model alone, as they decide about bits.

        Whole logits: 64 MiB in fp32, a multiple of 64 rows.
        """
        return _ROWS if columns else max(64, round(_LOGITS_NBYTES / (4 * self.vocab_size) / 64) * 64)


def plan_head(graph: ModelGraph) -> HeadPlan | None:
    """Return where to cut the model; None if its loss cannot be computed in pieces.

    The head is tried on the meta device: it must call `loss_function` once, with logits of the given rows and with the
    shifted labels passed through.
    """
    model = graph.model
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return None
    layer = next((unit.layer for unit in graph.units if unit.layer), "")
    path = layer.split(".")[:-1]
    candidates = [model.get_submodule(".".join(path[: length + 1])) for length in range(len(path))]
    candidates = [module for module in candidates if not isinstance(module, nn.ModuleList)]
    probe = _Probe(graph, candidates)
    try:
        probe.run()
    except Exception:  # whatever fails on made-up rows cannot run on pieces
        return None
    if len(probe.trunks) != 1 or len(probe.losses) != 1:
        return None
    shape, labels_are_passed = probe.losses[0]
    if shape[:2] != (1, 2) or not labels_are_passed:
        return None
    units = tuple(graph.units[index] for index in dict.fromkeys(probe.called))
    cut_weight = _cut_weight(graph, candidates, probe)
    borders = () if cut_weight is None else _borders(graph, cut_weight)
    return HeadPlan(
        probe.trunks[0],
        units,
        shape[-1],
        cut_weight,
        probe.logit_nbytes,
        borders,
        cut_weight is not None and probe.is_product,
    )


def _borders(graph: ModelGraph, name: str) -> tuple[int, ...]:
    """Return the rows that parts of a weight begin with, if it is alone in its layout and parts are whole rows."""
    for layout in graph.layouts.values():
        if len(layout.entries) == 1 and layout.entries[0].name == name:
            return layout.first_rows[1:]
    return ()


def _cut_weight(graph: ModelGraph, candidates: Sequence[nn.Module], whole: _Probe) -> str | None:
    """Return the weight of which a part can make a part of the logits, if a head that was tried has one.

    A head with more weights than that one and a bias would run them again for every part: its logits are made whole.
    """
    if whole.cut_weight is None:
        return None
    vocab_size = whole.losses[0][0][-1]
    shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
    units = (graph.units[index] for index in whole.called)
    others = {owner for unit in units for _, owner, _ in unit.params} - {whole.cut_weight}
    if any(shapes[name] != (vocab_size,) for name in others):
        return None
    num_columns = max(1, vocab_size // 2)
    half = _Probe(graph, candidates, num_columns)
    try:
        half.run()
    except Exception:  # it reshapes its logits by the size of the vocabulary, or has an operand of that size
        return None
    is_same = half.cut_weight == whole.cut_weight and half.losses[0][0][-1] == num_columns
    return whole.cut_weight if is_same else None


class _Probe:
    """Tries a model's head on made-up rows on the meta device.

    Args:
        graph: The model.
        candidates: Submodules around the layers, outermost first; the first one that the model calls is the trunk.
        num_columns: Make so many columns of the logits; None: all.

    Attributes:
        trunks: Candidates that were called.
        called: Indexes of the units that were called.
        losses: Shape of the logits at every call of the loss, and whether the labels were passed through.
        cut_weight: As in the plan.
        logit_nbytes: As in the plan.
        is_product: As in the plan.
    """

    def __init__(self, graph: ModelGraph, candidates: Sequence[nn.Module], num_columns: int | None = None) -> None:
        self._graph = graph
        self._candidates = candidates
        self.trunks: list[nn.Module] = []
        self.called: list[int] = []
        self.losses: list[tuple[torch.Size, bool]] = []
        self.cut_weight: str | None = None
        self.logit_nbytes = 0
        self.is_product = False
        self._num_columns = num_columns
        self._cut = CutProbe({}, None)
        self._saved: list[Tensor] = []  # by autograd
        self._rows = self._loss = torch.empty(0, device="meta")

    def run(self) -> None:
        """Run the head; raises what the model's code raises."""
        model = self._graph.model
        embedding = model.get_output_embeddings()
        config = self._graph.config.get_text_config()
        width = embedding.weight.shape[1] if embedding is not None else config.hidden_size
        rows = torch.empty(1, 2, width, device="meta", dtype=self._graph.dtype, requires_grad=True)
        self._rows = rows
        labels = torch.zeros(1, 2, dtype=torch.long, device="meta")
        stubs = {unit.module: self._unit_stub(unit) for unit in self._graph.units if not unit.is_container}
        stubs.update((module, self._trunk_stub(module, rows)) for module in self._candidates)
        loss = replaced_loss(model, self._loss_stub(model.loss_function, labels))
        named = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
        self._cut = CutProbe(named, self._num_columns)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        with (
            installed_stubs(stubs),
            without_auxiliary_loss(model),
            loss,
            torch.enable_grad(),
            hooks,
            self._cut.watching(),
        ):
            output = model(input_ids=labels, labels=labels, shift_labels=labels, num_items_in_batch=2)
        if output["loss"] is not self._loss:  # the model scales it or adds to it, which parts would leave out
            self.cut_weight = None

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor

    def _unit_stub(self, unit: Unit) -> Callable[..., Any]:
        forward = unit.module.forward

        def stub(*args: Any, **kwargs: Any) -> Any:
            self.called.append(unit.index)
            return forward(*args, **kwargs)

        return stub

    def _trunk_stub(self, module: nn.Module, rows: Tensor) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            self.trunks.append(module)
            return _rows_only_output(rows)

        return stub

    def _loss_stub(self, loss_function: Callable[..., Any], labels: Tensor) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            logits = kwargs["logits"] if "logits" in kwargs else args[0]
            passed = kwargs.get("shift_labels") is labels and kwargs.get("num_items_in_batch") == 2
            self.losses.append((logits.shape, passed))
            self.cut_weight = self._cut.weight_of(logits)
            self.is_product = self._cut.is_product(logits, self._rows)
            saved = [tensor for tensor in self._saved if tensor.numel() == logits.numel()]  # not the weight
            graph = [tensor for tensor in (logits, *saved) if tensor.shape[-1:] == logits.shape[-1:]]
            sizes = {tensor.untyped_storage()._cdata: tensor.element_size() for tensor in graph}
            self.logit_nbytes = sum(sizes.values())
            if self._num_columns is not None:
                self._loss = logits.sum()
                return self._loss
            with self._cut.paused():
                value = loss_function(*args, **kwargs)  # it saves no logits, only what it computes of them
            self._loss = value
            return value

        return stub


def _rows_only_output(rows: Tensor) -> Any:
    """Return a trunk's output that fits every model: the rows, and None for every other attribute."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class RowsOnlyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return RowsOnlyOutput(last_hidden_state=rows)


@dataclass(slots=True, eq=False)
class TrunkOutput:
    """Input of the head from one micro-batch.

    Attributes:
        micro_batch: Number of the micro-batch in the step.
        output: The trunk's `ModelOutput`.
        batch: The micro-batch on the compute device, without labels.
        rows: Rows of `last_hidden_state` (flattened to [B * S, H]) with a label.
        labels: Their labels, same length.
        random_state: The micro-batch's random stream at the cut.
        loss: The loss of the micro-batch.
    """

    micro_batch: int
    output: Any
    batch: dict[str, Any]
    rows: Tensor
    labels: Tensor
    random_state: tuple[Tensor, ...]
    loss: MicroBatchLoss = PLAIN


#: Loss terms of a micro-batch, tensors that cross the cut, and their gradients.
HeadResult = tuple[list[Tensor], list[Tensor], list[Tensor]]


@dataclass(slots=True, eq=False)
class _HeadRows:
    """Some rows of a micro-batch.

    Attributes:
        item: The micro-batch.
        output: The trunk's output with these rows alone.
        rows: Their positions.
        labels: Their labels.
        leaf: Their hidden states [1, rows, H].
        loss: Their loss; None: the model's own loss function computes it.
        kept: Logits that the second pass need not make again, by part.
        gradient: Of the leaf so far: of a single part in its dtype, a sum in fp32.
    """

    item: TrunkOutput
    output: Any
    rows: Tensor
    labels: Tensor
    leaf: Tensor
    loss: RowsLoss | None
    kept: list[Tensor] = field(default_factory=list)
    gradient: Tensor | None = None

    def note_gradient(self, total: Tensor | None) -> None:
        """Write the leaf's gradient into that of the trunk's output [B * S, H]."""
        if total is not None:
            assert self.gradient is not None
            total.index_copy_(0, self.rows, self.gradient[0].to(total.dtype))
            self.gradient = None


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The trained weights of a head, by visit and name, and where their gradients go, by visit."""

    weights: dict[tuple[int, str], Tensor]
    sinks: dict[int, GradientSink]

    def at(self, item: TrunkOutput) -> None:
        """Go on to a micro-batch."""
        for sink in self.sinks.values():
            sink.at(item.micro_batch)

    def add_gradients(self, piece: _HeadRows, output: Tensor, gradient: Tensor, trained: list[Tensor]) -> None:
        """Run a graph's backward, and add what it gives to the gradients of the weights and of the piece's rows.

        Args:
            piece: What the graph was made of.
            output: End of the graph.
            gradient: Of it.
            trained: More leaves of the graph, with targets that their gradients go to.
        """
        rows = [piece.leaf] if piece.leaf.requires_grad else []
        found = optional_gradients([output], [gradient], [*rows, *self.weights.values(), *trained])
        if rows:
            piece.gradient = _plus(piece.gradient, found.pop(0))
        for (visit, name), own in zip(self.weights, found, strict=False):
            if own is not None:
                self.sinks[visit].add(name, own)
        for leaf, own in zip(trained, found[len(self.weights) :], strict=True):
            target = target_of(leaf)
            if own is not None and target is not None:
                indexes = torch.arange(target.first_row, target.first_row + len(own), device=own.device)
                target.receiver.sink.add_rows(target.name, indexes, own)


class ChunkedHead:
    """Runs the head of all micro-batches of a pass: their loss, and the gradients of their trunk's outputs.

    Args:
        model: The model.
        plan: The cut.
        bounds: The head's units and the number of each one's visit.
        access: Weights and gradient accumulators.
        random: Random state of the compute device.
        rows: Rows per piece.
        columns: Words per part of the vocabulary; 0: logits are whole.
        stand_in: For the weight that makes the logits, if there are parts.
        kept_parts: Parts of a piece whose graphs are kept from the first pass to the second, at least one. It changes
            no bits.
        in_turn: Have all rows pass a part of the vocabulary before the next one, so that one part is needed at a time;
            nothing is kept then. It changes no bits.
        activity: Progress within the step, for status.

    Attributes:
        figures: What the loss tells of the micro-batches that were run.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: HeadPlan,
        bounds: Sequence[tuple[BoundUnit, int]],
        access: BlockAccess,
        random: RandomStates,
        rows: int,
        columns: int = 0,
        stand_in: PartWeight | None = None,
        kept_parts: int = 1,
        in_turn: bool = False,
        activity: Activity | None = None,
    ) -> None:
        assert columns == 0 or stand_in is not None, columns
        self.figures: list[PartialMean] = []
        self._columns, self._stand_in = columns, stand_in
        self._kept_parts = kept_parts
        self._in_turn = in_turn and columns > 0
        self._parts: list[VocabularyPart] = []  # that are there until the weights go
        self._passing: PartedWeight | None = None  # the weight whose blocks are leased one at a time
        self._activity = activity or Activity()
        self._model = model
        self._plan = plan
        self._bounds = bounds
        self._access = access
        self._random = random
        self._rows = rows
        self._has_auxiliary_loss = _has_auxiliary_loss(model)
        self._accepts_use_cache = accepts_use_cache(model)

    def run(
        self, outputs: Sequence[TrunkOutput], num_items: int
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield `(micro-batch, loss terms, tensors that cross the cut, their gradients)` for each output, in order.

        Weights and gradient accumulators of the head are leased once for all of them.
        """
        with ExitStack() as stack:
            if self._in_turn:
                with torch.enable_grad():
                    results = self._run_in_turn(outputs, num_items, stack)
                for item, result in zip(outputs, results, strict=True):
                    yield (item.micro_batch, *result)
                return
            leaves = self._leaves(stack, self._bound_weights(stack))
            for item in outputs:
                self._resume(item)
                with torch.enable_grad():
                    result = self._run_one(item, num_items, leaves)
                yield (item.micro_batch, *result)

    def evaluate(self, outputs: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return summed losses of the pieces of all outputs, in order. To be called in `no_grad`.

        Weights are leased once for all of them.
        """
        losses: list[Tensor] = []
        with ExitStack() as stack:
            self._bound_weights(stack)
            if self._passing is not None:
                pieces = [piece for item in outputs for piece in self._pieces(item, 1)]
                self._take_in_all(pieces)
                return [piece.loss.loss() for piece in pieces if piece.loss is not None]
            for item in outputs:
                self._resume(item)
                for piece in self._pieces(item, 1):
                    if piece.loss is None:
                        losses.append(self._loss(item, piece.output, piece.labels, 1))
                        continue
                    for part in self._parts:
                        self._take_in(piece, part, is_kept=False)
                    losses.append(piece.loss.loss())
        return losses

    def score(self, outputs: Sequence[TrunkOutput], k: int, temperature: float) -> Iterator[TokenScores]:
        """Yield what the model says of the rows of each output with a label, on the host. To be called in `no_grad`.

        Weights are leased once for all of them.

        Args:
            outputs: As in ``run``.
            k: Likeliest words of each row.
            temperature: Of their probabilities.
        """
        with ExitStack() as stack:
            self._bound_weights(stack)
            assert self._passing is None, "weights that are only read do not come part by part"
            for item in outputs:
                self._resume(item)
                found = [RunningTopK(item.labels[:0], 0, temperature).scores()]
                for piece in self._pieces(item, 1):
                    top = RunningTopK(piece.labels, k, temperature)
                    for part in self._parts or (None,):
                        top.add(self._logits(item, piece.output, part), 0 if part is None else part.start)
                    found.append(top.scores())
                yield joined_scores(found)

    def _bound_weights(self, stack: ExitStack) -> list[tuple[BoundUnit, int, dict[str, Tensor]]]:
        """Lease and bind the weights of all units until the stack closes; return unit, visit, trainable leaves."""
        if self._bounds:
            self._access.begin("head", self._bounds[0][1])
        units: list[tuple[BoundUnit, int, dict[str, Tensor]]] = []
        for bound, visit in self._bounds:
            weights = stack.enter_context(self._access.weights(bound.unit, visit))
            own = stack.enter_context(bound.bound(weights))
            cut = self._plan.cut_weight
            if self._stand_in is not None and self._columns and cut is not None and cut in weights:
                weight = stack.enter_context(bound.replaced(cut, self._stand_in))
                self._parts = self._parts_of(weight, stack)
                stack.callback(self._parts.clear)  # views of what is leased
            units.append((bound, visit, own))
        return units

    def _leaves(self, stack: ExitStack, units: Sequence[tuple[BoundUnit, int, dict[str, Tensor]]]) -> Leaves:
        """Lease the gradients of bound weights until the stack closes."""
        leaves = Leaves({}, {})
        for bound, visit, own in units:
            leaves.weights.update(((visit, name), leaf) for name, leaf in own.items())
            if own:
                leaves.sinks[visit] = stack.enter_context(self._access.gradients(bound.unit, visit))
                stack.enter_context(bound.receiver.into(leaves.sinks[visit]))
        return leaves

    def _parts_of(self, weight: Tensor, stack: ExitStack) -> list[VocabularyPart]:
        """Return the parts of the vocabulary whose weight is there until the stack closes: none where it passes."""
        ranges = self._plan.ranges(self._columns)
        self._passing = None
        if not isinstance(weight, PartedWeight):
            return _vocabulary_parts(weight.detach(), 0, ranges, target_of(weight))
        if weight.parts.passes:
            self._passing = weight
            return []
        parts: list[VocabularyPart] = []
        for number in range(len(weight.parts.rows)):
            parts += stack.enter_context(self._block(weight, number))
        return parts

    @contextmanager
    def _block(self, weight: PartedWeight, number: int) -> Iterator[list[VocabularyPart]]:
        """Lease a block of the weight, and yield the parts of the vocabulary in it."""
        rows = weight.parts.rows[number]
        inside = [(start, stop) for start, stop in self._plan.ranges(self._columns) if start in rows]
        assert inside[-1][1] == rows.stop, (rows, inside)
        with weight.parts.part(number) as block:
            parts = _vocabulary_parts(block.to(weight.dtype), rows.start, inside, weight.target)
            yield parts
            parts.clear()

    def _resume(self, item: TrunkOutput) -> None:
        """Continue a micro-batch where its trunk ended: its random stream, and the progress shown."""
        self._activity.micro_batch = item.micro_batch + 1
        self._random.set(item.random_state)

    def _run_one(self, item: TrunkOutput, num_items: int, leaves: Leaves) -> HeadResult:
        """Run all pieces of one micro-batch, one after the other: their weights are all there."""
        losses: list[Tensor] = []
        leaves.at(item)
        hidden_grad = self._hidden_grad(item)
        with without_auxiliary_loss(self._model):
            if item.loss.compares_rows:
                losses.append(self._run_compared(item, num_items, leaves, hidden_grad))
                return self._result(item, num_items, losses, hidden_grad)
            for piece in self._pieces(item, num_items):
                losses.append(self._run_piece(piece, num_items, leaves))
                piece.note_gradient(hidden_grad)
        return self._result(item, num_items, losses, hidden_grad)

    def _run_compared(self, item: TrunkOutput, num_items: int, leaves: Leaves, hidden_grad: Tensor | None) -> Tensor:
        """Return the loss of a micro-batch that compares rows, and add its gradients to those of weights and rows.

        All of its rows are taken in before the gradient of any: what is compared is spread over pieces.
        """
        rows = self._take_in_rows(item, num_items)
        loss = self._compare(item, rows)
        for piece, own in zip(self._pieces(item, num_items), rows, strict=True):
            piece.loss = own
            for part in reversed(self._whole_or_parts()):
                self._add_gradients(piece, part, leaves)
            piece.note_gradient(hidden_grad)
        return loss

    def _take_in_rows(self, item: TrunkOutput, num_items: int) -> list[RowsLoss]:
        """Have all pieces of a micro-batch pass all parts of the vocabulary; copies of their rows are not kept."""
        rows: list[RowsLoss] = []
        for piece in self._pieces(item, num_items, takes_logits=True):
            assert piece.loss is not None
            for part in self._whole_or_parts():
                self._take_in(piece, part, is_kept=False)
            rows.append(piece.loss)
        return rows

    def _compare(self, item: TrunkOutput, rows: Sequence[RowsLoss]) -> Tensor:
        """Return the loss of a micro-batch that compares rows, all of which were taken in."""
        loss, figures = item.loss.compare(rows)
        self.figures += figures
        return loss

    def _whole_or_parts(self) -> Sequence[VocabularyPart | None]:
        """Return the parts of the vocabulary; None, for all of it, where logits are whole."""
        return self._parts if self._columns else [None]

    def log_probs(self, outputs: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return the log-probabilities of all labels, in order, for each output. To be called in `no_grad`.

        Weights are leased once for all of them.
        """
        with ExitStack() as stack:
            self._bound_weights(stack)
            if self._passing is not None:
                by_item = [list(self._pieces(item, 1, takes_logits=True)) for item in outputs]
                self._take_in_all([piece for pieces in by_item for piece in pieces])
                found = [[piece.loss for piece in own] for own in by_item]
            else:
                found = []
                for item in outputs:
                    self._resume(item)
                    found.append([*self._take_in_rows(item, 1)])
        softmaxes = [[each for each in own if isinstance(each, RunningSoftmax)] for own in found]
        empty = torch.zeros(0)
        return [torch.cat([each.log_probs() for each in own]) if own else empty for own in softmaxes]

    def _run_in_turn(self, outputs: Sequence[TrunkOutput], num_items: int, stack: ExitStack) -> list[HeadResult]:
        """Run all pieces of all micro-batches, part by part of the vocabulary.

        The bits are those of ``_run_one``: what is computed of a piece and a part is the same, as is each sum's order.
        """
        units = self._bound_weights(stack)
        with without_auxiliary_loss(self._model):
            pieces = [list(self._pieces(item, num_items)) for item in outputs]
            together = [piece for own in pieces for piece in own]
            self._take_in_all(together)
            if self._passing is not None:  # the second pass is another tick: each block comes once in a tick
                stack.close()
                units = self._bound_weights(stack)
            leaves = self._leaves(stack, units)
            compared: list[Tensor | None] = []
            for item, own in zip(outputs, pieces, strict=True):
                rows = [piece.loss for piece in own if piece.loss is not None]
                compared.append(self._compare(item, rows) if item.loss.compares_rows else None)
            for place in self._places(leaves):
                with place as parts:
                    for part in reversed(parts):
                        with self._rows_of(part, leaves):
                            for piece in together:
                                leaves.at(piece.item)
                                self._add_gradients(piece, part, leaves)
        results: list[HeadResult] = []
        for item, own, loss in zip(outputs, pieces, compared, strict=True):
            hidden_grad = self._hidden_grad(item)
            for piece in own:
                piece.note_gradient(hidden_grad)
            losses = [loss] if loss is not None else [each.loss.loss() for each in own if each.loss is not None]
            results.append(self._result(item, num_items, losses, hidden_grad))
        return results

    def _take_in_all(self, pieces: Sequence[_HeadRows]) -> None:
        """Have all pieces pass a part of the vocabulary before the next one, for their loss."""
        weight = self._passing
        blocks: Iterator[AbstractContextManager[list[VocabularyPart]]] = (
            iter([nullcontext(self._parts)])
            if weight is None
            else (self._block(weight, number) for number in range(len(weight.parts.rows)))
        )
        for block in blocks:
            with block as parts:
                for part in parts:
                    for piece in pieces:
                        self._take_in(piece, part, is_kept=False)

    def _places(self, leaves: Leaves) -> Iterator[AbstractContextManager[list[VocabularyPart]]]:
        """Yield the blocks of weight and gradient that are leased in turn, with their parts of the vocabulary.

        The last ones come first. Where everything is there, it is one place.
        """
        cut = self._plan.cut_weight
        assert cut is not None
        sinks = [sink for sink in leaves.sinks.values() if sink.rows_of_parts(cut)]
        weight = self._passing
        rows = weight.parts.rows if weight is not None else sinks[0].rows_of_parts(cut) if sinks else ()
        for number in reversed(range(len(rows))):
            gradient = sinks[0].part(cut, number) if sinks else nullcontext()
            yield self._place(gradient, number, rows[number])
        if not rows:
            yield nullcontext(self._parts)

    def _rows_of(self, part: VocabularyPart, leaves: Leaves) -> AbstractContextManager[None]:
        """Return the context in which gradients of one part of the vocabulary are added."""
        cut = self._plan.cut_weight
        assert cut is not None
        for sink in leaves.sinks.values():
            if sink.rows_of_parts(cut):
                return sink.rows(cut, part.start, part.stop)
        return nullcontext()

    @contextmanager
    def _place(
        self, gradient: AbstractContextManager[None], number: int, rows: range
    ) -> Iterator[list[VocabularyPart]]:
        inside = [part for part in self._parts if part.start in rows]
        weight = self._passing
        with gradient, nullcontext(inside) if weight is None else self._block(weight, number) as parts:
            yield parts

    def _hidden_grad(self, item: TrunkOutput) -> Tensor | None:
        """Return zeros for the gradient of the trunk's output [B * S, H], if it has one."""
        hidden: Tensor = item.output["last_hidden_state"]
        has_gradient = hidden.requires_grad and len(item.rows)
        return torch.zeros_like(hidden.detach().reshape(-1, hidden.shape[-1])) if has_gradient else None

    def _pieces(self, item: TrunkOutput, num_items: int, *, takes_logits: bool = False) -> Iterator[_HeadRows]:
        """Yield the pieces of a micro-batch, with their rows of the trunk's output as leaves.

        Args:
            item: The micro-batch.
            num_items: Rows with a label of the whole step.
            takes_logits: Have the loss take in logits that are whole as well, in place of the model's own function.
        """
        in_parts = takes_logits or self._columns > 0
        hidden: Tensor = item.output["last_hidden_state"]
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        bare = _bare_output(item.output)
        for start in range(0, len(item.rows), self._rows):
            rows, labels = item.rows[start : start + self._rows], item.labels[start : start + self._rows]
            leaf = flat.index_select(0, rows).unsqueeze(0).requires_grad_(hidden.requires_grad)
            output = copy.copy(bare)
            output["last_hidden_state"] = leaf
            loss = item.loss.of_rows(
                labels, start, vocab_size=self._plan.vocab_size, num_items=num_items, in_parts=in_parts
            )
            yield _HeadRows(item, output, rows, labels, leaf, loss)

    def _result(
        self, item: TrunkOutput, num_items: int, losses: list[Tensor], hidden_grad: Tensor | None
    ) -> HeadResult:
        hidden: Tensor = item.output["last_hidden_state"]
        crossing = [] if hidden_grad is None else [hidden]
        grads = [] if hidden_grad is None else [hidden_grad.view(hidden.shape)]
        if self._has_auxiliary_loss:
            losses.append(self._auxiliary(item, num_items, crossing, grads))
        return losses, crossing, grads

    def _run_piece(self, piece: _HeadRows, num_items: int, leaves: Leaves) -> Tensor:
        """Return the loss of a piece, and add its gradients to those of its weights and of its rows."""
        if piece.loss is None:
            loss = self._loss(piece.item, piece.output, piece.labels, num_items)
            leaves.add_gradients(piece, loss, torch.ones_like(loss), [])
            return loss.detach()
        parts = self._parts or (None,)
        for number, part in enumerate(parts):
            self._take_in(piece, part, is_kept=number >= len(parts) - self._kept_parts)
        for part in reversed(parts):
            self._add_gradients(piece, part, leaves)
        return piece.loss.loss()

    def _take_in(self, piece: _HeadRows, part: VocabularyPart | None, *, is_kept: bool) -> None:
        """Take in the logits of a part, None: of all, for the loss; keep them with their graph for the second pass."""
        assert piece.loss is not None
        # Not `no_grad`: the kernels must be those of the second pass.
        saving = nullcontext() if is_kept or not torch.is_grad_enabled() else without_saved_tensors()
        with saving:
            logits = self._logits(piece.item, piece.output, part)
        piece.loss.add(logits.detach(), 0 if part is None else part.start)
        if is_kept and torch.is_grad_enabled():
            piece.kept.append(logits)

    def _add_gradients(self, piece: _HeadRows, part: VocabularyPart | None, leaves: Leaves) -> None:
        """Add the gradients that come by the logits of a part, made again unless they were kept."""
        assert piece.loss is not None
        logits = piece.kept.pop() if piece.kept else self._logits(piece.item, piece.output, part)
        trained = [part.weight] if part is not None and part.weight.requires_grad else []
        gradient = piece.loss.gradient(logits.detach(), 0 if part is None else part.start)
        leaves.add_gradients(piece, logits, gradient, trained)

    def _logits(self, item: TrunkOutput, output: Any, part: VocabularyPart | None) -> Tensor:
        """Return the logits [rows, words of the part, None: all] that the model's own forward makes."""
        if part is not None and self._plan.is_product:
            assert self._stand_in is not None
            with self._stand_in.at(part):
                logits = torch.nn.functional.linear(output["last_hidden_state"], self._stand_in)
            return logits.reshape(-1, logits.shape[-1])
        made: list[Tensor] = []
        self._call_at(part, item, output, made)
        return made[0].reshape(-1, made[0].shape[-1])

    def _call_at(self, part: VocabularyPart | None, item: TrunkOutput, output: Any, made: list[Tensor]) -> Any:
        """Run the model's own forward with a part of its logits, which go to ``made``, and cross entropy taken as 0.

        None: with all of them.
        """
        assert part is None or self._stand_in is not None
        at_part = nullcontext() if part is None or self._stand_in is None else self._stand_in.at(part)

        def catch(*args: Any, **kwargs: Any) -> Tensor:
            made.append(kwargs["logits"] if "logits" in kwargs else args[0])
            return torch.zeros((), device=made[-1].device)

        hidden = output["last_hidden_state"]
        labels = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with at_part, replaced_loss(self._model, catch):
            found = self._call(item, output, labels, 1)
        assert len(made) == 1 and made[0].shape[:-1].numel() == labels.numel(), [logits.shape for logits in made]
        return found

    def _auxiliary(self, item: TrunkOutput, num_items: int, crossing: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Run the head once on a row without a loss of its own: what is left is the auxiliary term."""
        outer: list[Tensor] = []
        inner: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            outer.append(value)
            inner.append(value.detach().requires_grad_())
            return inner[-1]

        hidden: Tensor = item.output["last_hidden_state"]
        rest = {key: tree_map(value, leaf) for key, value in item.output.items() if key != "last_hidden_state"}
        full = copy.copy(item.output)
        full["last_hidden_state"] = hidden.detach().reshape(-1, hidden.shape[-1])[:1].unsqueeze(0)
        for key, value in rest.items():
            full[key] = value
        if self._columns:
            # Its logits are dropped: one word, whose weight need not be there.
            assert self._stand_in is not None
            word = torch.zeros(1, self._stand_in.shape[1], dtype=self._stand_in.dtype, device=hidden.device)
            loss: Tensor = self._call_at(VocabularyPart(0, 1, word), item, full, [])["loss"]
        else:
            unlabelled = torch.full((1,), IGNORED_LABEL, dtype=torch.long, device=hidden.device)
            loss = self._loss(item, full, unlabelled, num_items)
        if loss.requires_grad and inner:
            found = optional_gradients([loss], [torch.ones_like(loss)], inner)
            for tensor, gradient in zip(outer, found, strict=True):
                if gradient is not None:
                    crossing.append(tensor)
                    grads.append(gradient)
        return loss.detach()

    def _loss(self, item: TrunkOutput, trunk_output: Any, shift_labels: Tensor, num_items: int) -> Tensor:
        loss: Tensor = self._call(item, trunk_output, shift_labels.unsqueeze(0), num_items)["loss"]
        return loss

    def _call(self, item: TrunkOutput, trunk_output: Any, labels: Tensor, num_items: int) -> Any:
        """Run the model's own forward behind the trunk; labels [1, rows] are shifted already."""
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}
        with installed_stubs({self._plan.trunk: lambda *args, **kwargs: trunk_output}):
            return self._model(
                **item.batch, labels=labels, shift_labels=labels, num_items_in_batch=num_items, **options
            )


def _vocabulary_parts(
    rows: Tensor, first_row: int, ranges: Sequence[tuple[int, int]], target: GradientTarget | None
) -> list[VocabularyPart]:
    """Return parts of the vocabulary, given the weight's rows from ``first_row`` on."""
    parts: list[VocabularyPart] = []
    for start, stop in ranges:
        own = rows[start - first_row : stop - first_row]
        leaf = own if target is None else weight_leaf(own, replace(target, first_row=start))
        parts.append(VocabularyPart(start, stop, leaf))
    return parts


def _plus(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a part's gradient of a piece to the sum, in fp32; that of a single part is passed on."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.float().add_(gradient)


def _bare_output(output: Any) -> Any:
    """Return a copy of a trunk's output without differentiable tensors that only the auxiliary loss uses."""
    bare = copy.copy(output)
    for key, value in output.items():
        if key != "last_hidden_state" and has_differentiable(value):
            bare[key] = None
    return bare


@contextmanager
def without_auxiliary_loss(model: nn.Module) -> Iterator[None]:
    """Switch the routers' auxiliary loss off: it is computed once per micro-batch, not per piece."""
    configs = {id(config): config for config in _configs(model) if getattr(config, _AUXILIARY_FLAG, False)}
    try:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, False)
        yield
    finally:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, True)


def _has_auxiliary_loss(model: nn.Module) -> bool:
    """Return whether the loss has an auxiliary term of the routers."""
    return any(getattr(config, _AUXILIARY_FLAG, False) for config in _configs(model))


def accepts_use_cache(model: nn.Module) -> bool:
    """Return whether the model's forward takes `use_cache`."""
    parameters = inspect.signature(type(model).forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _configs(model: nn.Module) -> list[Any]:
    config: Any = model.config
    return [config, config.get_text_config()]
