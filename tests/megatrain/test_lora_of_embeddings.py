"""Embedding adapters in peft's format. The adapter's file also contains a copy of the embedding's weight."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.base.layout import views
from megatrain.config import load_config
from megatrain.converters.adapters import AdapterError
from megatrain.converters.spec import build_graph
from megatrain.models.table import LoraConfig
from megatrain.training.trainer import Trainer
from oracles.image_models import make_folder
from oracles.peft_model import parameters_by_name, with_adapters
from oracles.tiered_run import config_text, plan_of, write_tiny_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of a model with an untied head and of an adapter for its embedding and attention."""
    base = write_tiny_model(tmp_path / "base", tie_word_embeddings=False)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = with_adapters(plain, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "adapter")
    torch.save(parameters_by_name(model), tmp_path / "expected.pt")
    return base, tmp_path / "adapter"


def loaded(base: Path, adapter: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    text = config_text(folder, base, nvme=0)
    (folder / "run.toml").write_text(
        text.replace("[training]", f'[lora]\nadapter_name_or_path = "{adapter}"\n[training]', 1)
    )
    config = load_config(folder / "run.toml").config
    plan = plan_of(config)
    found: dict[str, torch.Tensor] = {}
    with Trainer(config, plan=plan).open() as running:
        running.load()
        for layout in plan.graph.layouts.values():
            with running.weights.master(layout) as read:
                found.update(views(read(0, layout.num_elements).clone(), layout))
    return found


def test_adapter_with_a_copy_of_the_embedding_matches_peft(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    file = adapter / "adapter_model.safetensors"
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in load_file(file))
    found, expected = loaded(base, adapter, tmp_path / "run"), torch.load(tmp_path / "expected.pt")
    assert any("lora_embedding_A" in name for name in found)
    for name, value in found.items():
        assert torch.equal(value, expected[name].detach().view(value.shape)), name


def test_another_embedding_than_the_models_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.base_layer.weight"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        AdapterError, match=r"model\.embed_tokens\.weight differs between the file and the model's folder"
    ):
        loaded(base, adapter, tmp_path / "run")


def test_text_embedding_adapters_of_image_models_are_not_optional(tmp_path: Path) -> None:
    """Every row has text tokens, so only the image modules may be skipped in a step."""
    folder = make_folder("qwen2_5_vl", tmp_path / "images")
    lora = LoraConfig(r=4, target_modules=("embed_tokens", "q_proj"))
    graph = build_graph(folder, images="frozen", lora=lora)
    optional = [graph.units[index].name for index in graph.optional_units]
    assert optional and all("visual" in name for name in optional)
    adapted = [unit.name for unit in graph.units if any("lora_embedding" in name for name, _, _ in unit.params)]
    assert adapted and not set(adapted) & set(optional)
