"""Units, parameter owners and layouts of a model skeleton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.layout import ALIGNMENT_ELEMENTS, build_layout, build_layouts, views
from megatrain.converters.spec import build_graph
from megatrain.models.graph import FreezeError, graph_of
from oracles.families import FAMILIES, tiny_config


def test_layout_aligns_entries_and_views_share_memory() -> None:
    layout = build_layout("unit", [("a", (3, 4)), ("b", ()), ("c", (2000,))], True)
    assert [entry.offset for entry in layout.entries] == [0, 1024, 2048]
    assert layout.num_elements == 2048 + 2048
    assert layout.num_parameters == 12 + 1 + 2000
    flat = torch.zeros(layout.num_elements)
    found = views(flat, layout)
    found["c"].fill_(1.0)
    assert found["a"].shape == (3, 4) and found["b"].shape == ()
    assert flat.sum() == 2000 and flat[2048] == 1 and flat[2047] == 0


def test_a_unit_has_a_layout_for_each_kind_of_parameter() -> None:
    def made(dtype: torch.dtype, trains: bool) -> nn.Parameter:
        return nn.Parameter(torch.zeros(2, dtype=dtype), trains)

    kinds = {
        "a": (torch.float32, False),
        "b": (torch.bfloat16, True),
        "c": (torch.float32, True),
        "d": (torch.bfloat16, False),
    }
    parameters = {name: made(*kind) for name, kind in kinds.items()}

    def names(**options: bool) -> dict[str, str]:
        layouts = build_layouts("unit", parameters, **options)
        assert all(layout.trainable is kinds[entry.name][1] for layout in layouts for entry in layout.entries)
        return {layout.name: "".join(entry.name for entry in layout.entries) for layout in layouts}

    assert names() == {"unit": "bc", "unit.frozen": "ad"}
    assert names(by_dtype=True) == {"unit": "b", "unit.float32": "c", "unit.float32.frozen": "a", "unit.frozen": "d"}
    del parameters["b"], parameters["c"]
    assert names() == {"unit": "ad"} and names(by_dtype=True) == {"unit": "a", "unit.bfloat16": "d"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_is_owned_once(family: str) -> None:
    graph = build_graph(tiny_config(family))
    model = graph.model
    owned = [entry.name for layout in graph.layouts.values() for entry in layout.entries]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for layout in graph.layouts.values():
        end = 0
        for entry in layout.entries:
            assert entry.shape == shapes[entry.name]
            assert entry.offset % ALIGNMENT_ELEMENTS == 0 and entry.offset >= end
            end = entry.offset + entry.numel
        assert end <= layout.num_elements
    for unit in graph.units:
        for local, owner, layout_name in unit.params:
            full = f"{unit.name}.{local}"
            assert graph.owner_names.get(full, full) == owner
            assert owner in {entry.name for entry in graph.layouts[layout_name].entries}
    assert sum(unit.is_layer for unit in graph.units) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_are_meta_and_buffers_are_real(family: str) -> None:
    graph = build_graph(tiny_config(family))
    assert all(parameter.is_meta for parameter in graph.model.parameters())
    assert not any(buffer.is_meta for buffer in graph.model.buffers())
    assert graph.num_parameters == sum(parameter.numel() for parameter in graph.model.parameters())


def test_units_in_definition_order_with_a_tied_head() -> None:
    graph = build_graph(tiny_config("llama", tied=True))
    assert [unit.name for unit in graph.units] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]
    assert graph.owner_names == {"lm_head.weight": "model.embed_tokens.weight"}
    assert graph.units[-1].params == (("weight", "model.embed_tokens.weight", "model.embed_tokens"),)
    assert "lm_head" not in graph.layouts


def test_partly_frozen_unit_has_two_layouts() -> None:
    graph = build_graph(tiny_config("llama", tied=False), freeze=["model.layers.1.self_attn.*", "lm_head.weight"])
    own, frozen = graph.layouts["model.layers.1"], graph.layouts["model.layers.1.frozen"]
    assert own.trainable and not frozen.trainable
    assert all(".self_attn." in entry.name for entry in frozen.entries)
    assert not any(".self_attn." in entry.name for entry in own.entries)
    assert not graph.layouts["lm_head"].trainable
    assert "lm_head.weight" not in graph.trainable_parameters
    assert not graph.model.lm_head.weight.requires_grad


def test_freezing_by_the_other_name_of_a_tied_parameter() -> None:
    graph = build_graph(tiny_config("llama", tied=True), freeze=["lm_head.*"])
    assert not graph.layouts["model.embed_tokens"].trainable


@pytest.mark.parametrize(("patterns", "text"), [(["model.layer.*"], "model.layers"), (["*"], "no parameter")])
def test_useless_freeze_is_refused(patterns: list[str], text: str) -> None:
    with pytest.raises(FreezeError, match=text):
        build_graph(tiny_config("llama"), freeze=patterns)


def test_container_parameters_are_a_unit_of_their_own() -> None:
    graph = build_graph(tiny_config("zaya"))
    (unit,) = (unit for unit in graph.units if unit.is_container)
    assert {owner for _, owner, _ in unit.params} == {
        "model.input_hidden_states_scale",
        "model.input_hidden_states_bias",
    }


def test_persistent_buffers_match_the_checkpoint() -> None:
    graph = build_graph(tiny_config("deepseek_v3"))
    assert graph.persistent_buffers() == tuple(
        f"model.layers.{index}.mlp.gate.e_score_correction_bias" for index in (1, 2)
    )
    assert build_graph(tiny_config("llama")).persistent_buffers() == ()


def test_quantized_weights_are_refused() -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match=r"quantized \(gptq\)"):
        build_graph(config)


def test_a_model_without_layers_is_refused_by_name() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    model: Any = Plain()
    with pytest.raises(UnsupportedModelError, match=r"Looked for .*GradientCheckpointingLayer.*ModuleList"):
        graph_of(model, tiny_config("llama"), freeze=(), dtype=torch.float32)


def test_a_type_without_causal_language_model_is_refused() -> None:
    from transformers import CLIPConfig

    with pytest.raises(UnsupportedModelError, match="clip"):
        build_graph(CLIPConfig())


def test_folder_and_config_give_the_same_layouts(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert dict(build_graph(tmp_path).layouts) == dict(build_graph(config).layouts)


def test_given_config_is_unchanged() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    graph = build_graph(config, attn_implementation="eager", dtype=torch.bfloat16)
    assert config.to_dict() == before == graph.config.to_dict()
    assert graph.model.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in graph.model.parameters()} == {torch.bfloat16}
