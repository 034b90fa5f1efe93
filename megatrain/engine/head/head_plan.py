"""Trial run of a model's head on the meta device, which finds where to cut the model before the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.head.cross_entropy import replace_loss
from megatrain.engine.head.head_model import without_auxiliary_loss
from megatrain.engine.head.vocabulary import vocabulary_ranges
from megatrain.engine.unit.absent_weights import METADATA_QUERIES
from megatrain.engine.unit.bound_unit import install_stubs

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph, Unit


_LOGITS_NBYTES = 64 << 20
_ROWS = 2048
_COLUMNS = _LOGITS_NBYTES // (4 * _ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlan:
    """Location of the cut before a model's head, and the properties of the logits.

    Attributes:
        trunk: Submodule whose output is the input of the head.
        units: Units that run after the cut, in order of their first call.
        vocab_size: Number of columns of the logits.
        cut_weight: Name of the weight that computes the logits; None if the vocabulary cannot be split.
        logit_nbytes: Bytes per logit that autograd saves between the last matmul and the loss.
        boundaries: First row of each part of the cut weight, except the first part.
        is_product: Whether the logits are just the product of the trunk's output and the cut weight. If so, the head
            computes them directly, without running the model's forward for every piece and part.
    """

    trunk: nn.Module
    units: tuple[Unit, ...]
    vocab_size: int
    cut_weight: str | None = None
    logit_nbytes: int = 4
    boundaries: tuple[int, ...] = ()
    is_product: bool = False

    def ranges(self, columns: int) -> list[tuple[int, int]]:
        """Return the column range of each vocabulary part. No part crosses a block boundary of the cut weight."""
        return vocabulary_ranges(self.vocab_size, columns, self.boundaries)

    @property
    def default_columns(self) -> int:
        """Columns per vocabulary part; 0 if not split. Depends only on the model, because it affects rounding."""
        return _COLUMNS if self.cut_weight is not None else 0

    def default_rows(self, columns: int) -> int:
        """Return the number of rows per piece. It depends only on the model, because it affects rounding.

        If the vocabulary is not split, a piece has a multiple of 64 rows, and about 64 MiB of fp32 logits.
        """
        return _ROWS if columns else max(64, round(_LOGITS_NBYTES / (4 * self.vocab_size) / 64) * 64)


def plan_head(graph: ModelGraph) -> HeadPlan | None:
    """Find where to cut a model before its head. Return None if the loss cannot be computed in pieces.

    In a trial run on the meta device, the head must call `loss_function` exactly once, with the given rows' logits and
    the shifted labels. It must return the value of `loss_function` unchanged.
    """
    model = graph.model
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return None
    layer = next((unit.layer for unit in graph.units if unit.layer), "")
    path = layer.split(".")[:-1]
    candidates = [model.get_submodule(".".join(path[: length + 1])) for length in range(len(path))]
    candidates = [module for module in candidates if not isinstance(module, nn.ModuleList)]
    probe = _HeadProbe(graph, candidates)
    try:
        probe.run()
    except Exception:  # a model that fails on two rows cannot run on pieces
        return None
    if len(probe.trunks) != 1 or len(probe.losses) != 1 or probe.has_own_term:
        return None
    shape, are_labels_passed = probe.losses[0]
    if shape[:2] != (1, 2) or not are_labels_passed:
        return None
    units = tuple(graph.units[index] for index in dict.fromkeys(probe.called_units))
    cut_weight = _cut_weight(graph, candidates, probe)
    boundaries = () if cut_weight is None else _boundaries(graph, cut_weight)
    return HeadPlan(
        probe.trunks[0],
        units,
        shape[-1],
        cut_weight,
        probe.logit_nbytes,
        boundaries,
        cut_weight is not None and probe.is_product,
    )


def _boundaries(graph: ModelGraph, name: str) -> tuple[int, ...]:
    """Return the first row of each part of a weight, except the first part; empty if its layout has other weights."""
    for layout in graph.layouts.values():
        if len(layout.entries) == 1 and layout.entries[0].name == name:
            return layout.first_rows[1:]
    return ()


def _cut_weight(graph: ModelGraph, candidates: Sequence[nn.Module], full_probe: _HeadProbe) -> str | None:
    """Return the name of the weight whose parts can compute parts of the logits, or None.

    The result is also None if the head has other weights, except biases, because every part would apply them again.
    """
    if full_probe.cut_weight is None:
        return None
    vocab_size = full_probe.losses[0][0][-1]
    shapes = {entry.name: entry.shape for layout in graph.layouts.values() for entry in layout.entries}
    units = (graph.units[index] for index in full_probe.called_units)
    other_names = {owner for unit in units for _, owner, _ in unit.params} - {full_probe.cut_weight}
    if any(shapes[name] != (vocab_size,) for name in other_names):
        return None
    num_columns = max(1, vocab_size // 2)
    half_probe = _HeadProbe(graph, candidates, num_columns)
    try:
        half_probe.run()
    except Exception:  # the head fails if the vocabulary has a different size
        return None
    is_same = half_probe.cut_weight == full_probe.cut_weight and half_probe.losses[0][0][-1] == num_columns
    return full_probe.cut_weight if is_same else None


class _HeadProbe:
    """Trial run of a model's head on placeholder rows on the meta device.

    Args:
        candidates: Submodules around the layers, outermost first. The trunk is the first candidate that is called.
        num_columns: Number of logit columns to compute; None for all.

    Attributes:
        trunks: Candidates that the model called.
        called_units: Indexes of the units that the model called.
        losses: For each call to the loss, the shape of the logits and whether the labels were passed on.
        has_own_term: Whether the model changes the loss function's result. Pieces could not reproduce this change.
    """

    def __init__(self, graph: ModelGraph, candidates: Sequence[nn.Module], num_columns: int | None = None) -> None:
        self._graph = graph
        self._candidates = candidates
        self.trunks: list[nn.Module] = []
        self.called_units: list[int] = []
        self.losses: list[tuple[torch.Size, bool]] = []
        self.cut_weight: str | None = None
        self.logit_nbytes = 0
        self.is_product = self.has_own_term = False
        self._num_columns = num_columns
        self._cut_weight = CutProbe({}, None)
        self._saved: list[Tensor] = []  # tensors that autograd saved
        self._rows = self._loss = torch.empty(0, device="meta")

    def run(self) -> None:
        """Run the head. Errors from model code propagate."""
        model = self._graph.model
        embedding = model.get_output_embeddings()
        config = self._graph.config.get_text_config()
        width = embedding.weight.shape[1] if embedding is not None else config.hidden_size
        rows = torch.empty(1, 2, width, device="meta", dtype=self._graph.dtype, requires_grad=True)
        self._rows = rows
        labels = torch.zeros(1, 2, dtype=torch.long, device="meta")
        stubs = {unit.module: self._unit_stub(unit) for unit in self._graph.units if not unit.is_container}
        stubs.update((module, self._trunk_stub(module, rows)) for module in self._candidates)
        loss = replace_loss(model, self._loss_stub(model.loss_function, labels))
        matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
        self._cut_weight = CutProbe(matrices, self._num_columns)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        with (
            install_stubs(stubs),
            without_auxiliary_loss(model),
            loss,
            torch.enable_grad(),
            hooks,
            self._cut_weight.watch(),
        ):
            output = model(input_ids=labels, labels=labels, shift_labels=labels, num_items_in_batch=2)
        self.has_own_term = output["loss"] is not self._loss  # for example Bamba's z-loss

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor

    def _unit_stub(self, unit: Unit) -> Callable[..., Any]:
        forward = unit.module.forward

        def stub(*args: Any, **kwargs: Any) -> Any:
            self.called_units.append(unit.index)
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
            is_passed = kwargs.get("shift_labels") is labels and kwargs.get("num_items_in_batch") == 2
            self.losses.append((logits.shape, is_passed))
            self.cut_weight = self._cut_weight.logits_weight(logits)
            self.is_product = self._cut_weight.is_product(logits, self._rows)
            # Select saved tensors by size, because autograd also saves the weight.
            candidates = [tensor for tensor in self._saved if tensor.numel() == logits.numel()]
            logit_tensors = [tensor for tensor in (logits, *candidates) if tensor.shape[-1:] == logits.shape[-1:]]
            sizes = {tensor.untyped_storage()._cdata: tensor.element_size() for tensor in logit_tensors}
            self.logit_nbytes = sum(sizes.values())
            if self._num_columns is not None:
                self._loss = logits.sum()
                return self._loss
            with self._cut_weight.pause():
                value = loss_function(*args, **kwargs)  # tensors that autograd saves here are not counted
            self._loss = value
            return value

        return stub


def _rows_only_output(rows: Tensor) -> Any:
    """Return a trunk output that contains ``rows``, and None for every other attribute that a model reads."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class RowsOnlyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return RowsOnlyOutput(last_hidden_state=rows)


# -- whether a head can be cut --------------------------------------------------------------------------------------

#: Operators that leave each column in its place if the result has the same number of columns.
_COLUMNWISE_OPERATORS = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim,
    }
)


class _Product:
    """Matmul with a weight in a head's forward."""

    def __init__(self, owner: str, rows: Tensor, bias: Tensor | None) -> None:
        self.owner, self.rows, self.bias = owner, rows, bias
        self.is_cuttable = True
        self.is_changed = False  # whether an operator changes the product before the loss


class CutProbe:
    """Observer of a head's trial run. It finds the weight that computes the logits, and whether it can be cut.

    Logits can be computed in parts under three conditions. The weight is used once, in `F.linear`. The head draws no
    random numbers. Between matmul and loss, all operations are elementwise and have the same operands for all columns.

    Args:
        weights: Parameters of the head, by name.
        num_columns: Number of logit columns to compute; None for all.
    """

    def __init__(self, weights: Mapping[str, Tensor], num_columns: int | None = None) -> None:
        self._owners = {id(weight): name for name, weight in weights.items()}
        self._num_columns = num_columns
        self._products: list[_Product] = []
        self._other_uses: set[str] = set()
        self._columns: dict[int, tuple[Tensor, _Product]] = {}  # keeps the tensor, so that its id is not reused
        self._is_random = self._is_paused = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Observe all code that runs within the context."""
        with _Functions(self), _Operators(self):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore code that runs within the context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def logits_weight(self, logits: Tensor) -> str | None:
        """Return the name of the weight that computes the logits, or None if the vocabulary cannot be split."""
        _, product = self._columns.get(id(logits), (None, None))
        if product is None or not product.is_cuttable or self._is_random:
            return None
        num_uses = sum(each.owner == product.owner for each in self._products)
        return product.owner if num_uses == 1 and product.owner not in self._other_uses else None

    def is_product(self, logits: Tensor, rows: Tensor) -> bool:
        """Return whether the logits are just the product of ``rows`` and the weight."""
        if self.logits_weight(logits) is None:
            return False
        _, product = self._columns[id(logits)]
        # Transformers slices out the rows that need logits. In training, this slice contains all rows.
        is_whole = product.rows._base is rows and product.rows.shape == rows.shape
        return not product.is_changed and product.bias is None and (product.rows is rows or is_whole)

    def on_function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function. Record matmuls with the head's weights, and all other uses of these weights."""
        owners = [name for leaf in tree_leaves((args, kwargs)) if (name := self._owners.get(id(leaf))) is not None]
        result = func(*args, **kwargs)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is functional.linear and id(weight) in self._owners:
            if self._num_columns is not None:
                result = result[..., : self._num_columns]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            product = _Product(self._owners[id(weight)], args[0] if args else kwargs["input"], bias)
            self._products.append(product)
            self._columns[id(result)] = (result, product)
            owners.remove(product.owner)
        is_query = getattr(func, "__name__", "") in METADATA_QUERIES or not isinstance(result, Tensor)
        self._other_uses.update(() if is_query else owners)
        return result

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record how an operator changes the columns of logits."""
        if self._is_paused:
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._is_random = True
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tracked_inputs = [(leaf, self._columns[id(leaf)][1]) for leaf in inputs if id(leaf) in self._columns]
        for leaf, product in tracked_inputs:
            product.is_changed = True
            operands = [operand for operand in inputs if id(operand) not in self._columns]
            if not _is_columnwise(func, args, leaf, operands, result):
                product.is_cuttable = False
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self._columns[id(output)] = (output, product)


def _is_columnwise(func: Any, args: Any, columns: Tensor, operands: list[Tensor], result: Any) -> bool:
    """Return whether an operator treats all columns the same and computes each column independently."""
    if not isinstance(result, Tensor) or result.shape[-1:] != columns.shape[-1:]:
        return False
    if func is torch.ops.aten.slice.Tensor:
        return (args[1] if len(args) > 1 else 0) not in (-1, columns.dim() - 1)
    if torch.Tag.pointwise in func.tags:
        return all(operand.dim() == 0 or operand.shape[-1] == 1 for operand in operands)
    return func in _COLUMNWISE_OPERATORS and result.numel() == columns.numel()


class _Functions(TorchFunctionMode):
    def __init__(self, probe: CutProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._probe.on_function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, probe: CutProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._probe.on_operator(func, args, kwargs or {}, result)
        return result
