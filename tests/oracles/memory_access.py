"""`BlockAccess` with plain dictionaries, as a reference for access to a tiered store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatrain.base.layout import views
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.models.graph import ModelGraph, Unit


class MemoryAccess:
    """Access to flat weight blocks in the graph's layout, cloned activations, and an fp32 accumulator per use site."""

    def __init__(
        self, graph: ModelGraph, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self._graph, self._device = graph, device
        self._weights: dict[str, torch.Tensor] = {}
        for layout in graph.layouts.values():
            flat = torch.zeros(layout.num_elements, dtype=dtype, device=device)
            for name, view in views(flat, layout).items():
                view.copy_(parameters[name].detach())
            self._weights.update(views(flat, layout))
        self._activations: dict[tuple[int, int, int], torch.Tensor] = {}
        self._accumulators: dict[int, dict[str, torch.Tensor]] = {}
        self._filled: dict[int, set[str]] = {}
        self._open: list[str] = []
        self.log: list[tuple[str, int]] = []
        self.skipped: list[str] = []  # names of units whose weights a visit did not need, one entry per visit
        self.largest_num_activations = 0
        self.attention_nbytes = 1 << 20  # size of a micro-batch's saved results
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, phase: str, visit: int) -> None:
        self.log.append((phase, visit))

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {owner: self._weights[owner].view_as(self._weights[owner]) for _, owner, _ in unit.params}

    def skip_weights(self, unit: Unit, visit: int) -> None:
        self.skipped.append(unit.name)

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        pass

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientAccumulator]:
        trainable = {owner for _, owner, layout in unit.params if self._graph.layouts[layout].trainable}
        assert trainable, unit.name
        targets = self._accumulators.setdefault(visit, {})
        for name in trainable - set(targets):
            targets[name] = torch.full_like(self._weights[name], torch.nan, dtype=torch.float32)
        yield GradientAccumulator(targets, self._filled.setdefault(visit, set()))

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        assert (visit, micro_batch, index) not in self._activations
        self._activations[visit, micro_batch, index] = tensor.clone(memory_format=torch.contiguous_format)
        self.largest_num_activations = max(self.largest_num_activations, len(self._activations))

    def reuse_activation(self, visit: int, micro_batch: int, index: int, place: tuple[int, int]) -> None:
        assert (place[0], micro_batch, place[1]) in self._activations and place[0] < visit

    def _log_visit(self) -> int:
        return self.log[-1][1]

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[torch.Tensor]:
        key = (visit, micro_batch, index)
        tensor = self._activations[key]
        yield tensor
        if self._log_visit() <= visit:  # otherwise the visit that saved the activation still has to read it
            del self._activations[key]
            tensor.fill_(0)  # so that a later use gives wrong results

    @contextmanager
    def results_block(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor]:
        if self.log[-1][0] == "forward":
            assert (visit, micro_batch) not in self._rooms
            room = torch.full((self.attention_nbytes,), 255, dtype=torch.uint8, device=self._device)
            self._rooms[visit, micro_batch] = room
            yield room
            return
        room = self._rooms.pop((visit, micro_batch))
        yield room
        room.fill_(255)  # so that a later use gives wrong results

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the gradients, summed over use sites in use order, and reset the accumulators."""
        assert not self._activations and not self._rooms, (list(self._activations), list(self._rooms))
        gradients: dict[str, torch.Tensor] = {}
        for visit in sorted(self._accumulators):
            for name in self._filled[visit]:
                accumulator = self._accumulators[visit][name]
                gradients[name] = gradients[name] + accumulator if name in gradients else accumulator
        self._accumulators, self._filled = {}, {}
        return gradients


def split_like(graph: ModelGraph, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors by the graph's names, with fused experts split as in the graph."""
    entries = [entry for layout in graph.layouts.values() for entry in layout.entries]
    return {
        entry.name: whole[entry.parameter]
        .detach()
        .reshape(-1)[entry.start : entry.start + entry.numel]
        .view(entry.shape)
        for entry in entries
        if entry.parameter in whole
    }


def joined(graph: ModelGraph, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo ``split_like``: join the tensors, and return them by the model's names."""
    found: dict[str, list[torch.Tensor]] = {}
    for layout in graph.layouts.values():
        for entry in layout.entries:
            if entry.name in parts:
                found.setdefault(entry.parameter, []).append(parts[entry.name])
    return {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in found.items()}
