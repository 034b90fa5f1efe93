"""Trace of one forward: the units that a model calls in order, and the memory and work of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatrain.engine.device.work import NO_PRODUCTS, NO_WORK, NOT_SAVABLE, SavableResults, SkippedProducts, Work

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph


@dataclass(frozen=True, slots=True)
class VisitMemory:
    """Device memory that one visit uses for one micro-batch, not counting blocks.

    Attributes:
        held_nbytes: Bytes in use when the visit starts: hidden states, masks and tables, but no weights or gradients.
        retained_nbytes: Portion of `held_nbytes` that stays in use until the backward: masks, tables, ids, and tensors
            that autograd saves between visits. In layer order, each micro-batch holds this portion once, and the rest
            of `held_nbytes` twice: for the current visit and for the next visit.
        forward_nbytes: Peak memory beyond `held_nbytes`, from the start of this visit to the start of the next visit.
        backward_nbytes: Peak memory of recompute and backward beyond `held_nbytes`, including parameter gradients.
        graph_nbytes: Size of the forward's graph, if the graph is kept for the backward. Counts inputs, tensors saved
            by autograd, and weights cast to another dtype, but neither the weights nor tensors that visits share.
    """

    held_nbytes: int
    retained_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    graph_nbytes: int


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One unit call in a forward.

    Attributes:
        is_head: Whether the unit runs in the head phase, one piece at a time.
        has_backward: Whether the unit has a backward. It has none if the loss does not depend on its output, or if the
            output depends on no trained parameter. The backward still announces such a visit, but leases no weights.
        saved_inputs: `(shape, dtype)` of every activation that is kept in a block until the backward.
        aliases: (visit, index) of an earlier activation that is the same tensor, by input index. Both use one block.
        no_token_probability: Probability that one token is not routed to the visit's experts, assuming uniform routing.
        backward: Work that recompute and backward execute; `NO_WORK` for visits of the head.
        partwise_params: Names of parameters that the visit can process one part at a time, both weight and gradient.
        attention: Attention results that can be saved for the recompute.
        results: Attention results and matmul results that can be saved for the recompute.
    """

    unit: int
    is_head: bool
    has_backward: bool
    saved_inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    memory: VisitMemory
    forward: Work = NO_WORK
    backward: Work = NO_WORK
    partwise_params: frozenset[str] = frozenset()
    attention: SavableResults = NOT_SAVABLE
    results: SavableResults = NOT_SAVABLE
    aliases: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    no_token_probability: float = 0.0
    unneeded_products: SkippedProducts = NO_PRODUCTS

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward recomputes the unit if the unit's graph is not kept."""
        return self.has_backward and not self.is_head

    @property
    def recompute(self) -> Work:
        """Work of the recompute, or `NO_WORK` if there is no recompute. `backward` includes this work."""
        return self.forward - self.unneeded_products.work if self.is_recomputed else NO_WORK


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """Visits of one forward in order. The visits of the head come last.

    Attributes:
        head_nbytes: Peak memory of the head phase for one micro-batch, not counting held bytes. Counts one piece of
            logits, the piece's gradients, and the gradient of the trunk's output.
        head_rows: Number of rows whose logits are computed at a time; 0 if the head is not chunked.
        head_columns: Number of vocabulary columns computed at a time; 0 for the whole vocabulary.
        head_part_nbytes: Size of the graph that the head keeps for one vocabulary part. ``head_nbytes`` includes the
            graph of one part.
        guesses: One sentence for each value that the trace guessed. If there are guesses, the counts are estimates.
        uncounted_ops: Operators without a FLOP formula, with reasons. Byte counts do not depend on FLOP formulas.
        head: Work of the head's forward and backward if every token has a label and each logit is computed once.
        logits_flops: FLOPs needed to compute all logits once. The second pass recomputes the logits that were not kept.
        dense_masks: Reasons why the model builds [S, S] masks. Their memory grows with the square of the row length.
    """

    visits: tuple[TracedVisit, ...]
    head_nbytes: int
    head_rows: int
    guesses: tuple[str, ...] = ()
    uncounted_ops: tuple[str, ...] = ()
    head: Work = NO_WORK
    num_tokens: int = 0
    dense_masks: tuple[str, ...] = ()
    head_columns: int = 0
    head_parts: int = 1
    head_part_nbytes: int = 0
    logits_flops: int = 0

    @property
    def exact(self) -> bool:
        """Whether byte counts are exact, because no value was guessed."""
        return not self.guesses


@dataclass(frozen=True, slots=True)
class Recompute:
    """Choice of forward results that a step keeps so that the backward recomputes less.

    The choice does not change the results of the step. A visit is in at most one of the first three sets.

    Attributes:
        kept_graphs: Visits whose graphs are kept for the backward. Their inputs have no blocks.
        saved_attention: Visits that save attention results in blocks.
        saved_results: Visits that save attention results and matmul results in blocks.
        kept_parts: Number of vocabulary parts whose logits the head keeps for its second pass.
    """

    kept_graphs: frozenset[int] = frozenset()
    saved_attention: frozenset[int] = frozenset()
    saved_results: frozenset[int] = frozenset()
    kept_parts: int = 1

    def savable_results(self, index: int, visit: TracedVisit) -> SavableResults:
        """Return the results that visit ``index`` saves for its recompute."""
        if index in self.saved_results:
            return visit.results
        return visit.attention if index in self.saved_attention else NOT_SAVABLE

    def is_graph_kept(self, visit: int) -> bool:
        """Return whether a visit's graph is kept for the backward."""
        return visit in self.kept_graphs

    @property
    def saving_visits(self) -> frozenset[int]:
        """Visits that save results in blocks."""
        return self.saved_attention | self.saved_results


#: Keep no forward results, so that the backward recomputes everything.
KEEP_NOTHING = Recompute()


def unit_layouts(graph: ModelGraph, unit: int) -> tuple[str, ...]:
    """Return the names of the layouts that a unit uses, in order and without duplicates."""
    return tuple(dict.fromkeys(layout for _, _, layout in graph.units[unit].params))


def layout_uses(graph: ModelGraph, trace: VisitTrace) -> dict[str, list[int]]:
    """Return the visits that use each layout, in forward order. These visits are the layout's use sites."""
    uses: dict[str, list[int]] = {name: [] for name in graph.layouts}
    for visit, visit_trace in enumerate(trace.visits):
        for name in unit_layouts(graph, visit_trace.unit):
            uses[name].append(visit)
    return uses
