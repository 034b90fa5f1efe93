"""Training an image-text model on text alone matches Hugging Face, or is refused with a reason."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.models.passthrough import passthrough_modules
from megatrain.models.skeleton import is_multimodal
from megatrain.trace.trace import trace_visits
from oracles.families import IMAGE_TEXT_TYPES, image_text_class, padded_batches, tiny_image_text_config
from oracles.huggingface import assert_same_gradients, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

SEED = 3
#: Families that Hugging Face runs on text alone but the engine refuses, with the reason.
REFUSED = {
    "t5gemma2": r"uses model\.encoder.* for text without images",
}


@pytest.fixture(autouse=True)
def quiet_single_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def random_model(model_type: str, config: Any) -> Any:
    torch.manual_seed(1234)
    model = image_text_class(model_type)._from_config(copy.deepcopy(config), dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.mark.parametrize("model_type", IMAGE_TEXT_TYPES)
def test_loss_and_gradients_equal_hugging_face(model_type: str) -> None:
    batches = padded_batches()
    try:
        config = tiny_image_text_config(model_type)
        model = random_model(model_type, config)
    except Exception as error:
        pytest.skip(f"no tiny model of this type: {type(error).__name__}: {str(error)[:80]}")
    try:
        expected = train_step(model, batches, SEED)
    except Exception as error:  # the model needs an image: the engine must refuse it before the first step
        if is_multimodal(model):
            with pytest.raises(UnsupportedModelError):
                trace_visits(build_graph(config), 1, 8, torch.float32)
        pytest.skip(f"does not run on text alone: {type(error).__name__}: {str(error)[:80]}")
    if model_type in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[model_type]):
            trace_visits(build_graph(config), 1, 8, torch.float32)
        return
    graph = build_graph(config)
    assert type(graph.model) is type(model)
    buffers = dict(model.named_buffers())
    for name, buffer in graph.model.named_buffers():
        if name in graph.persistent_buffers():
            buffer.copy_(buffers[name])
        assert torch.equal(buffer, buffers[name]), name
    loaded = {name: p for name, p in model.named_parameters() if name in graph.trainable_parameters}
    passthrough = passthrough_modules(graph.model)
    if passthrough is not None:
        unaccounted = set(dict(model.named_parameters())) - set(loaded) - passthrough.names - set(graph.owner_names)
        assert not unaccounted
        assert not passthrough.names & set(expected.gradients), "untrained tensors have no gradient"
    access = MemoryAccess(graph, loaded, torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    loss = runner.forward_backward(batches, seed=SEED)
    gradients = access.finish()
    assert_same_gradients(expected, loss.loss, gradients)
