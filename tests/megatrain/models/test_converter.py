"""The extension point for quirks of models: a converter defined here works from graph building to the export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.base.layout import UnitLayout
from megatrain.converters.spec import converters_for
from megatrain.models.converter import (
    ConvertedGraph,
    InnerUnit,
    ModelConverter,
    ModelSettings,
    ReadMaster,
    WeightSource,
)
from megatrain.models.export import export_model
from megatrain.models.folder import ModelFolder
from megatrain.models.graph import ModelGraph, converted_graph
from megatrain.models.table import ModelConfig
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner


class Gain(nn.Module):
    """Module that multiplies another module's output by a trained number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden) * self.gain
        return result


class Gains(ModelConverter):
    """Converter that scales the output of every MLP and overrides most hooks."""

    freezes_weights = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._gains: list[tuple[nn.Module, Gain]] = []

    def remove_untrained(self, model: PreTrainedModel) -> None:
        self.calls.append("remove_untrained")
        model.requires_grad_(False)

    def convert(self, model: PreTrainedModel) -> None:
        self.calls.append("convert")
        for layer in model.model.layers:
            self._gains.append((layer, Gain(layer.mlp)))
            layer.mlp = self._gains[-1][1]

    @contextmanager
    def plain_model(self) -> Iterator[None]:
        for layer, gain in self._gains:
            layer.mlp = gain.inner
        try:
            yield
        finally:
            for layer, gain in self._gains:
                layer.mlp = gain

    def plain_name(self, name: str) -> str:
        return name.replace(".mlp.inner.", ".mlp.")

    def split_layer(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Make attention and the MLP of the first layer separate units."""
        if layer is not self._gains[0][0]:
            return ()
        return [InnerUnit(name, child) for name, child in layer.named_children() if list(child.parameters())]

    def pass_context(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        @contextmanager
        def context() -> Iterator[None]:
            self.calls.append("begin")
            yield
            self.calls.append("end")

        return context()

    def export_source(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return doubled weights. A gain would not double them, but the factor is easy to recognize in the files."""

        @contextmanager
        def doubled(layout: UnitLayout) -> Iterator[ReadMaster]:
            with source(layout) as read:
                yield lambda start, stop: 2 * read(start, stop)

        return doubled


@pytest.fixture
def converted() -> tuple[Gains, ModelGraph]:
    gains = Gains()
    return gains, converted_graph(tiny_config("llama", tied=False), (gains,))


def test_names_and_units_come_from_the_converter(converted: tuple[Gains, ModelGraph]) -> None:
    gains, graph = converted
    assert gains.calls == ["remove_untrained", "convert"] and graph.converters == (gains,)
    num_layers = graph.config.num_hidden_layers
    assert graph.trainable_parameters == tuple(f"model.layers.{n}.mlp.gain" for n in range(num_layers))
    frozen = {entry.name for layout in graph.layouts.values() if not layout.trainable for entry in layout.entries}
    with graph.plain_model():
        assert frozen == {name for name, _ in graph.model.named_parameters()}, "the model as it is in its folder"
    assert isinstance(graph.model.model.layers[0].mlp, Gain)
    first = [unit for unit in graph.units if unit.layer == "model.layers.0"]
    assert "model.layers.0.mlp" in [unit.name for unit in first] and not any(unit.is_layer for unit in first)
    assert sum(unit.is_layer for unit in graph.units) == num_layers - 1


def test_a_converted_model_is_streamed_like_any_other(converted: tuple[Gains, ModelGraph]) -> None:
    gains, graph = converted
    model = build_model(graph.config)
    weights = dict(model.named_parameters())
    weights.update((name, torch.ones(())) for name in graph.trainable_parameters)
    trace = trace_visits(graph, 1, 8, torch.float32)
    gains.calls.clear()
    access = MemoryAccess(graph, weights, torch.float32)
    runner = layer_runner(graph, access, device="cpu", trace=trace)
    ids = torch.arange(3, 11)[None]
    loss = runner.forward_backward([{"input_ids": ids, "labels": ids}]).loss
    assert gains.calls == ["begin", "end"], "around the forward and the backward of a pass"
    assert loss == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    gradients = access.finish()
    assert gradients.keys() == set(graph.trainable_parameters)
    assert all(bool(gradient != 0) for gradient in gradients.values())


def test_export_writes_converter_output(converted: tuple[Gains, ModelGraph], tmp_path: Path) -> None:
    _, graph = converted

    @contextmanager
    def ones(layout: UnitLayout) -> Iterator[ReadMaster]:
        yield lambda start, stop: torch.ones(stop - start)

    out = export_model(graph, ones, tmp_path / "out", dtype=torch.float32)
    folder = ModelFolder(out)
    assert not any("gain" in name or "inner" in name for name in folder.records)
    assert all(bool((folder.read(name) == 2).all()) for name in folder.records)


def test_parameters_that_a_converter_adds_are_exported(tmp_path: Path) -> None:
    class AddsScale(ModelConverter):
        def convert(self, model: PreTrainedModel) -> None:
            for layer in model.model.layers:
                layer.mlp.channel_scale = nn.Parameter(torch.ones(model.config.hidden_size, device="meta"))

    @contextmanager
    def ones(layout: UnitLayout) -> Iterator[ReadMaster]:
        yield lambda start, stop: torch.ones(stop - start)

    graph = converted_graph(tiny_config("llama", tied=False), (AddsScale(),))
    folder = ModelFolder(export_model(graph, ones, tmp_path / "out", dtype=torch.bfloat16))
    added = [name for name in folder.records if name.endswith("channel_scale")]
    assert len(added) == len(graph.model.model.layers)
    assert all(folder.records[name].dtype == torch.bfloat16 and bool((folder.read(name) == 1).all()) for name in added)


def test_converters_are_inactive_by_default() -> None:
    config = tiny_config("llama")
    plain, converted = converted_graph(config), converted_graph(config, (ModelConverter(),))
    assert dict(plain.layouts) == dict(converted.layouts)
    assert [unit.name for unit in plain.units] == [unit.name for unit in converted.units]
    settings = ModelSettings(ModelConfig(model_name_or_path="x"))
    assert converters_for(settings)[0] is not converters_for(settings)[0], "each graph has its own"
