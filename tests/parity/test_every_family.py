"""The streamed step works for every causal language model in transformers, or is refused with a reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from megatrain.converters.spec import build_graph
from oracles.families import MODEL_TYPES, padded_batches, shrunk_config
from oracles.huggingface import assert_same_gradients, build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

SEED = 3
REFUSED = {"prophetnet": "outside of the weight's own module"}


@pytest.fixture(autouse=True)
def quiet_single_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_loss_and_gradients_equal_hugging_face(model_type: str) -> None:
    batches = padded_batches()
    try:
        config = shrunk_config(model_type)
        model = build_model(config)
        expected = train_step(model, batches, SEED)
    except Exception as error:
        pytest.skip(f"no tiny text model of this type: {type(error).__name__}: {str(error)[:80]}")
    graph = build_graph(config)
    buffers = dict(model.named_buffers())
    for name, buffer in graph.model.named_buffers():
        if name in graph.persistent_buffers():
            buffer.copy_(buffers[name])
        assert torch.equal(buffer, buffers[name]), name
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    if model_type in REFUSED:
        with pytest.raises(Exception, match=REFUSED[model_type]):
            runner.forward_backward(batches, seed=SEED)
        return
    loss = runner.forward_backward(batches, seed=SEED)
    gradients = access.finish()
    assert_same_gradients(expected, loss.loss, gradients)
    kept_runner = layer_runner(graph, access, device="cpu", kept=range(1000))
    kept_loss = kept_runner.forward_backward(batches, seed=SEED)
    kept = access.finish()
    assert kept_loss == loss and kept.keys() == gradients.keys()
    assert all(torch.equal(kept[name], gradient) for name, gradient in gradients.items())
