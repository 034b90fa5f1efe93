"""Adapters are put into a skeleton under peft's names, and unusable settings and folders are explained."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megatrain.base import limited
from megatrain.converters.adapters import (
    AdapterError,
    Adapters,
    AdapterWeights,
    adapters_of,
    find_base_model,
    read_adapter_settings,
)
from megatrain.models.export import ExportTargetError
from megatrain.models.folder import ModelFolderError
from megatrain.models.graph import ModelGraph, converted_graph
from megatrain.models.initialize import name_seed
from megatrain.models.table import LoraConfig
from oracles.families import tiny_config

Q, PLAIN = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"
EMBEDDING = "model.embed_tokens"


def make(family: str = "llama", *, tied: bool = False, **keys: Any) -> tuple[Adapters, ModelGraph]:
    adapters = Adapters(LoraConfig.model_validate({"r": 4, **keys}))
    return adapters, converted_graph(tiny_config(family, tied=tied), [adapters])


def shapes_of(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    return {
        entry.name: entry.shape for layout in graph.layouts.values() if layout.trainable for entry in layout.entries
    }


def test_adapters_have_the_names_of_peft_files() -> None:
    adapters, graph = make(
        target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], rank_pattern={"embed_tokens": 2}
    )
    paths = [f"model.layers.{index}.self_attn.q_proj" for index in range(3)]
    tensors = {
        f"{path}.lora_{kind}.weight": shape for path in paths for kind, shape in (("A", (4, 32)), ("B", (32, 4)))
    }
    size = graph.model.config.vocab_size
    embedding = {f"{EMBEDDING}.lora_embedding_A": (2, size), f"{EMBEDDING}.lora_embedding_B": (32, 2)}
    assert shapes_of(graph) == {**embedding, **tensors, "lm_head.weight": (size, 32)}
    assert adapters.names == (*embedding, *tensors, "lm_head.weight")
    assert adapters.adapter_names == {*embedding, *tensors}
    assert adapters.modules == (EMBEDDING, *paths) and adapters.num_layers == 4
    assert adapters_of(graph) is adapters
    assert adapters.adapter_tensors(f"{Q}.weight") == (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")
    assert adapters.adapter_tensors(f"{PLAIN}.weight") == adapters.adapter_tensors("lm_head.weight") == ()
    assert adapters.layer_of(f"{Q}.lora_A.weight") is graph.model.get_submodule(Q)
    assert adapters.layer_of(f"{Q}.weight") is None and adapters.layer_of("lm_head.weight") is None
    assert adapters.is_unit(graph.model.get_submodule(Q)) and not adapters.is_unit(graph.model.get_submodule(PLAIN))
    for name, plain in (
        (f"{Q}.base_layer.weight", f"{Q}.weight"),
        (f"{Q}.lora_A.default.weight", f"{Q}.lora_A.weight"),
        (f"{EMBEDDING}.lora_embedding_B.default", f"{EMBEDDING}.lora_embedding_B"),
        (f"{PLAIN}.weight", f"{PLAIN}.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert adapters.plain_name(name) == plain
    layer = graph.model.get_submodule(Q)
    with adapters.plain_model():
        assert type(graph.model.get_submodule(Q)) is nn.Linear
    assert graph.model.get_submodule(Q) is layer
    assert {parameter.dtype for _, parameter in graph.model.named_parameters()} == {torch.float32}


def test_settings_of_an_adapter_are_those_of_the_config() -> None:
    adapters, _ = make(
        target_modules=["v_proj", "q_proj"],
        exclude_modules=["layers.0"],
        layers_to_transform=[1],
        lora_alpha=6.5,
        lora_dropout=0.25,
        use_rslora=True,
        use_dora=True,
        init_lora_weights="gaussian",
        rank_pattern={"v_proj": 3},
        alpha_pattern={"q_proj": 5},
        modules_to_save=["lm_head"],
    )
    assert adapters.settings("hub/base") | {
        "base_model_name_or_path": "hub/base",
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": ["layers.0"],
        "layers_to_transform": [1],
        "lora_alpha": 6.5,
        "lora_dropout": 0.25,
        "use_rslora": True,
        "use_dora": True,
        "init_lora_weights": "gaussian",
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"q_proj": 5},
        "modules_to_save": ["lm_head"],
        "bias": "none",
        "target_parameters": None,
    } == adapters.settings("hub/base")
    whole, _ = make(target_modules="all-linear", lora_alpha=8)
    values = whole.settings("x")
    assert type(values["lora_alpha"]) is int and values["modules_to_save"] is None and not values["use_dora"]
    assert values["target_modules"] == sorted(f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v"))
    found, _ = make(target_modules=r".*layers\.2\.mlp\.(up|down)_proj")
    assert found.modules == ("model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown module": (
        {"target_modules": ["nope"]},
        "lora.target_modules: Target modules {'nope'} not found in the base model. Please check the target modules and "
        "try again. LlamaForCausalLM has e.g. q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
    ),
    "unknown saved module": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "classifier"]},
        "lora.modules_to_save: no module's name ends in 'classifier'. An example is lm_head",
    ),
    "saved and adapted": (
        {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
        "lora.modules_to_save: lm_head also has adapters. Remove it from one of the two keys",
    ),
    "adapted inside": (
        {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
        "lora.modules_to_save: model.layers.0.self_attn also has adapters. Remove it from one of the two keys",
    ),
    "tied": (
        {"tied": True, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "lora.modules_to_save: lm_head shares its weight with model.embed_tokens.weight, which would also be trained "
        "but not saved. Leave it out, or give it adapters: lora.target_modules",
    ),
    "embedding": (
        {"target_modules": ["embed_tokens"], "use_dora": True},
        "lora.use_dora: model.embed_tokens is an embedding. Leave it out of target_modules",
    ),
    "pattern": (
        {"target_modules": "(q"},
        "lora.target_modules: '(q' is not a regular expression: missing ), unterminated subpattern at position 0. List "
        "the names of the modules instead",
    ),
    "pattern of ranks": (
        {"target_modules": ["q_proj"], "rank_pattern": {"*": 3}},
        "lora.target_modules: '(.*\\\\.)?(*)$' is not a regular expression: nothing to repeat at position 8. List the "
        "names of the modules instead",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_settings_are_explained(name: str) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(AdapterError) as refused:
        make(**keys)
    assert str(refused.value) == message


def test_modules_that_are_no_layers_of_numbers_are_refused() -> None:
    for name, found in (("self_attn", "LlamaAttention"), ("norm", "LlamaRMSNorm((32,), eps=1e-06)")):
        with pytest.raises(AdapterError) as refused:
            make(target_modules=[name])
        assert str(refused.value).startswith(f"lora.target_modules: Target module {found} is not supported. Currently,")


def test_a_slow_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_CPU_S", 1)
    pattern = "(([a-z_.0-9]+)+)+!"
    for added, shown in (("", f"'{pattern}'"), ("|" + "x" * 200, f"'{pattern}|{'x' * 181} ...'")):
        with pytest.raises(AdapterError) as refused:
            make(target_modules=pattern + added)
        assert str(refused.value) == (
            f"lora.target_modules: {shown} cannot be matched: it takes more than 1 s of processor time. List the names "
            "of the modules instead"
        )


def test_adapters_of_tied_weights_cannot_be_merged() -> None:
    adapters, graph = make(tied=True, target_modules=["lm_head"])
    with pytest.raises(ExportTargetError) as refused:
        adapters.check_merge(graph)
    assert str(refused.value) == (
        "the adapter of lm_head.weight cannot be merged: model.embed_tokens.weight is the same tensor, and would "
        "change with it. Export the adapter alone (export.merge = false), or leave that module out"
    )
    for tied in (False, True):
        untied, graph = make(tied=tied, target_modules=["q_proj"])
        untied.check_merge(graph)


@pytest.mark.parametrize("rule", [True, "gaussian"])
def test_initial_values_follow_the_rules_of_peft(rule: object) -> None:
    adapters, graph = make(target_modules=["q_proj", "embed_tokens"], init_lora_weights=rule)
    views = {name: torch.full(shape, 7.0) for name, shape in shapes_of(graph).items()}
    adapters.initialize(views, {}, seed=5)
    for name, view in views.items():
        expected = torch.empty_like(view)
        generator = torch.Generator().manual_seed(name_seed(5, name))
        if ".lora_A" in name and rule == "gaussian":
            expected.normal_(std=1 / 4, generator=generator)
        elif ".lora_A" in name:
            nn.init.kaiming_uniform_(expected, a=math.sqrt(5), generator=generator)
        elif "embedding_B" in name:
            expected.normal_(generator=generator)
        else:
            expected.zero_()
        assert torch.equal(view, expected), name


def test_magnitudes_are_the_norms_of_the_rows() -> None:
    adapters, graph = make(target_modules=["q_proj"], use_dora=True)
    name = f"{Q}.lora_magnitude_vector"
    assert adapters.dora_modules([*adapters.names][3:6]) == [Q]
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    views = {name: torch.empty(shapes_of(graph)[name])}
    adapters.initialize(views, {Q: weight}, seed=5)
    torch.testing.assert_close(views[name], weight.square().sum(1).sqrt())
    transposed, graph = make("gpt2", target_modules=["c_attn"], use_dora=True)
    path = "transformer.h.1.attn.c_attn"
    rows, columns = graph.model.get_submodule(path).get_base_layer().weight.shape
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    views = {f"{path}.lora_magnitude_vector": torch.empty(columns)}
    transposed.initialize(views, {path: weight}, seed=5)
    torch.testing.assert_close(views[f"{path}.lora_magnitude_vector"], weight.square().sum(0).sqrt())


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weight_is_the_sum_of_both(use_rslora: bool) -> None:
    adapters, graph = make(target_modules=["q_proj"], lora_alpha=6, use_rslora=use_rslora)
    generator = torch.Generator().manual_seed(3)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((32, 32), (4, 32), (32, 4)))
    tensors = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    merged = adapters.merge(f"{Q}.weight", weight.bfloat16(), tensors)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, weight.bfloat16().float() + b @ a * 6 / (2 if use_rslora else 4))
    again = adapters.merge(f"{Q}.weight", weight, {name: 0 * tensor for name, tensor in tensors.items()})
    assert torch.equal(again, weight)
    assert all(parameter.is_meta for parameter in graph.model.parameters())


# -- folders of adapters -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write an adapter of `q_proj` in the second layer, whose tensors count up."""
    adapters, graph = make(target_modules=["q_proj"], layers_to_transform=[1])
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters.settings("hub/base")))
    tensors = {
        f"base_model.model.{name}": torch.arange(float(math.prod(shape))).reshape(shape)
        for name, shape in shapes_of(graph).items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


def change_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    values = {f"base_model.model.{Q}.lora_{kind}.weight": tensor for kind, tensor in tensors.items()}
    save_file(values, folder / "adapter_model.safetensors")


def test_tensors_of_a_folder_are_read(folder: Path) -> None:
    adapters, graph = make(adapter_name_or_path=str(folder), lora_dropout=0.5)
    assert (adapters.config.lora_dropout, adapters.config.inference_mode, adapters.config.r) == (0.5, False, 4)
    weights = AdapterWeights(folder, adapters, shapes_of(graph))
    assert weights.base_copies == {}
    views = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes_of(graph).items()}
    weights.fill(views)
    for view in views.values():
        assert torch.equal(view, torch.arange(128.0).reshape(view.shape).bfloat16())
    change_tensors(folder, A=torch.full((4, 32), math.inf), B=torch.zeros(32, 4))
    with pytest.raises(AdapterError) as refused:
        AdapterWeights(folder, adapters, shapes_of(graph)).fill(views)
    assert str(refused.value) == f"lora.adapter_name_or_path: {Q}.lora_A.weight contains infinite values or NaN"


def test_tensors_of_another_model_are_refused(folder: Path) -> None:
    adapters, graph = make(adapter_name_or_path=str(folder))
    path = folder / "adapter_model.safetensors"
    prefix = f"lora.adapter_name_or_path: {path}"
    a, b = torch.zeros(4, 32), torch.zeros(32, 4)
    for tensors, problem in (
        ({"A": a}, f": 1 tensors are missing: {Q}.lora_B.weight"),
        ({"A": a, "B": b, "C": b.clone()}, f": 1 do not exist in the model: {Q}.lora_C.weight"),
        (
            {kind: a.clone() for kind in "CDEF"},
            f": 2 tensors are missing: {Q}.lora_A.weight, {Q}.lora_B.weight; 4 do not exist in the model: "
            + ", ".join(f"{Q}.lora_{kind}.weight" for kind in "CDE")
            + " and 1 more",
        ),
        ({"A": a, "B": torch.zeros(32, 5)}, f": {Q}.lora_B.weight has shape [32, 5], but [32, 4] in the model"),
    ):
        change_tensors(folder, **tensors)
        with pytest.raises(AdapterError) as refused:
            AdapterWeights(folder, adapters, shapes_of(graph))
        assert str(refused.value) == f"{prefix}{problem}. Is it an adapter of this model?"
    path.write_bytes(b"")
    with pytest.raises(AdapterError) as refused:
        AdapterWeights(folder, adapters, shapes_of(graph))
    damaged = ModelFolderError(
        path, "is not a safetensors file. The file is damaged or truncated: copy or download it again"
    )
    assert str(refused.value) == f"lora.adapter_name_or_path: {damaged}"
    path.unlink()
    for advice in (
        "Name a folder that peft wrote",
        "The folder has a pickle file, which is not supported: save it again with a newer peft",
    ):
        with pytest.raises(AdapterError) as refused:
            AdapterWeights(folder, adapters, shapes_of(graph))
        assert str(refused.value) == f"{prefix} is missing. {advice}"
        (folder / "adapter_model.bin").write_bytes(b"")


def test_a_copy_of_a_base_weight_must_be_equal(tmp_path: Path) -> None:
    adapters, graph = make(target_modules=["embed_tokens"])
    size = graph.model.config.vocab_size
    copy = torch.arange(32.0 * size).reshape(size, 32)
    tensors = {f"base_model.model.{name}": torch.ones(shape) for name, shape in shapes_of(graph).items()}
    tensors[f"base_model.model.{EMBEDDING}.base_layer.weight"] = copy.bfloat16()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    weights = AdapterWeights(tmp_path, adapters, shapes_of(graph))
    name = f"{EMBEDDING}.weight"
    assert weights.base_copies == {name: f"{EMBEDDING}.base_layer.weight"}
    weights.check_base(name, copy)
    for other in (copy + 64 * (copy == 40), copy[1:]):
        with pytest.raises(AdapterError) as refused:
            weights.check_base(name, other)
        assert str(refused.value) == (
            f"lora.adapter_name_or_path: {name} differs between the file and the model's folder. Use the model that "
            "the adapter was trained on, or merge it with peft into that model"
        )


def edit(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


LEFT_OUT = "[lora]: {} of peft is not supported. Leave it out"
BAD_SETTINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "kind": (
        edit(peft_type="IA3"),
        "lora.adapter_name_or_path: {path} is an adapter of type 'IA3'; this program trains LoRA",
    ),
    "list": (
        lambda folder: (folder / "adapter_config.json").write_text("[]"),
        "lora.adapter_name_or_path: {path} is an adapter of type None; this program trains LoRA",
    ),
    "missing": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "lora.adapter_name_or_path: {path} is missing. Name a folder that peft wrote",
    ),
    "broken": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "lora.adapter_name_or_path: {path} cannot be read as JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)). Copy it again",
    ),
    "bias": (edit(bias="all"), LEFT_OUT.format("bias")),
    "several": (
        edit(lora_bias=True, trainable_token_indices=[1], layer_replication=[[0, 1]]),
        LEFT_OUT.format("lora_bias, trainable_token_indices, layer_replication"),
    ),
    "initialization": (
        edit(init_lora_weights="pissa"),
        "lora.init_lora_weights = 'pissa' is not supported. Write true or \"gaussian\"; or initialize the adapter with "
        "peft and set its folder: lora.adapter_name_or_path",
    ),
    "pattern": (
        edit(target_modules="(q_proj", layers_to_transform=None),
        "lora.adapter_name_or_path ({folder}) ({path}): '(q_proj' is not a regular expression: missing ), unterminated "
        "subpattern at position 0. List the names of the modules instead",
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_unusable_settings_of_a_folder_are_explained(folder: Path, name: str) -> None:
    change, message = BAD_SETTINGS[name]
    change(folder)
    with pytest.raises(AdapterError) as refused:
        make(adapter_name_or_path=str(folder))
    assert str(refused.value) == message.format(folder=folder, path=folder / "adapter_config.json")


def test_a_wrong_path_of_an_adapter_is_explained(folder: Path) -> None:
    for path, problem in ((folder / "none", "does not exist"), (folder / "adapter_config.json", "is not a folder")):
        with pytest.raises(AdapterError) as refused:
            read_adapter_settings(path)
        assert str(refused.value) == (
            f"lora.adapter_name_or_path: {path} {problem}. Name a folder with adapter_config.json and "
            "adapter_model.safetensors"
        )


def test_base_model_of_an_adapter(folder: Path) -> None:
    path = folder / "adapter_config.json"
    assert find_base_model(folder) == "hub/base"
    edit(base_model_name_or_path=str(folder))(folder)
    assert find_base_model(folder) == str(folder)
    edit(base_model_name_or_path=f"{folder}/gone")(folder)
    gone = f"{folder}: its base model is gone: {folder}/gone. Restore it, or write its new path into {path}"
    with pytest.raises(AdapterError, match=f"^{re.escape(gone)}$"):
        find_base_model(folder)
    for text in ('{"base_model_name_or_path": ""}', '{"base_model_name_or_path": 5}', "{}", "[]", "{"):
        path.write_text(text)
        with pytest.raises(
            AdapterError, match=f"^{re.escape(str(path))} specifies no base model. Export the run again$"
        ):
            find_base_model(folder)
