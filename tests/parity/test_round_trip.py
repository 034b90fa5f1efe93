"""Loading and exporting a model without a step keeps tensors and configs, for each type that can be made tiny."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.export import export_model
from megatrain.models.folder import ModelFolderError, read_config
from megatrain.models.load import WeightLoader
from oracles.families import IMAGE_TEXT_TYPES, MODEL_TYPES, image_text_class, shrunk_config, tiny_image_text_config
from tests.megatrain.models.tiny import Weights, build_graph

#: Refused image-text types, with the error and a part of its message.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "idefics": (UnsupportedModelError, "no causal language model"),
    "pi0": (UnsupportedModelError, "no causal language model"),
    "udop": (UnsupportedModelError, "no causal language model"),
    "pp_formulanet": (UnsupportedModelError, "does not separate its language model from the rest"),
    "shieldgemma2": (ModelFolderError, "are missing"),  # transformers saves tensors that its own class does not load
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def text_model(model_type: str) -> Any:
    return AutoModelForCausalLM.from_config(shrunk_config(model_type), dtype=torch.float32)


def image_text_model(model_type: str) -> Any:
    return image_text_class(model_type)._from_config(tiny_image_text_config(model_type), dtype=torch.float32)


def tensors_in(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("make", "model_type"),
    [
        *(pytest.param(text_model, name, id=name) for name in MODEL_TYPES),
        *(pytest.param(image_text_model, name, id=f"image-{name}") for name in IMAGE_TEXT_TYPES),
    ],
)
def test_export_without_a_step_is_unchanged(make: Any, model_type: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    torch.manual_seed(1)
    try:
        model = make(model_type)
        model.save_pretrained(source)
    except Exception as error:
        pytest.skip(f"no tiny model of this type: {type(error).__name__}: {str(error)[:80]}")
    if make is image_text_model and model_type in REFUSED:
        kind, reason = REFUSED[model_type]
        with pytest.raises(kind, match=reason):
            WeightLoader(source, build_graph(read_config(source)).model)
        return
    weights = Weights(build_graph(read_config(source)))
    loader = WeightLoader(source, weights.graph.model)
    weights.fill(loader.fill)
    out = export_model(
        weights.graph, weights.source, tmp_path / "out", dtype=torch.float32, copy_from=source, origin=loader.origin
    )
    theirs, ours = tensors_in(source), tensors_in(out)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same_bytes(ours[name], theirs[name])] == []
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            assert json.loads((out / name).read_text()) == json.loads((source / name).read_text())
    named = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
    if named.__module__ == type(model).__module__:  # an auto class can return a model of another class
        _, report = named.from_pretrained(out, output_loading_info=True)
        _, before = named.from_pretrained(source, output_loading_info=True)
        assert report["missing_keys"] == before["missing_keys"]
        assert report["unexpected_keys"] == before["unexpected_keys"]
