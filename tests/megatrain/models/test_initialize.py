"""Random weights have the distributions that transformers uses, and do not depend on the order of the calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.models.initialize import InitializationError, init_weights, initialize_tensors
from tests.megatrain.models.tiny import FAMILIES, Weights, build_graph


def drawn(family: str, seed: int = 0, reverse: bool = False, **changes: object) -> dict[str, Tensor]:
    model_type, values = FAMILIES[family]
    weights = Weights(build_graph(AutoConfig.for_model(model_type, **{**values, **changes})))
    layouts = weights.graph.layouts
    if reverse:
        weights.graph.layouts = dict(reversed(layouts.items()))
    weights.fill(lambda layout, views: init_weights(weights.graph.model, layout, views, seed))
    return weights.named()


def test_every_weight_has_the_distribution_that_transformers_gives_it(family: str) -> None:
    model_type, values = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    found = drawn(family)
    for name, parameter in model.named_parameters():
        expected, ours = parameter.detach(), found[name]
        assert ours.shape == expected.shape
        if expected.std() == 0:  # a constant, such as the ones of a norm or the zeros of a bias
            assert torch.equal(ours, expected), name
        else:
            assert abs(float(ours.std() / expected.std()) - 1) < 6 / ours.numel() ** 0.5, name
            assert abs(float(ours.mean())) < 6 * float(expected.std()) / ours.numel() ** 0.5, name
            assert not torch.equal(ours, expected.float()), name


def test_gpt2_scales_the_last_projections() -> None:
    found = drawn("gpt2")
    inner, last = found["transformer.h.1.mlp.c_fc.weight"], found["transformer.h.1.mlp.c_proj.weight"]
    assert abs(float(inner.std() / last.std()) / 6**0.5 - 1) < 0.1


def test_order_does_not_matter_but_the_seed_does(family: str) -> None:
    first, other_order, other_seed = drawn(family), drawn(family, reverse=True), drawn(family, seed=1)
    assert all(torch.equal(first[name], other_order[name]) for name in first)
    assert any(not torch.equal(first[name], other_seed[name]) for name in first)


def test_layers_differ_from_each_other() -> None:
    found = drawn("llama")
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], found["model.layers.1.mlp.up_proj.weight"])


def test_global_random_state_and_skeleton_are_unchanged() -> None:
    model_type, values = FAMILIES["llama_tied"]
    weights = Weights(build_graph(AutoConfig.for_model(model_type, **values)))
    before = torch.random.get_rng_state()
    identities = {name: id(parameter) for name, parameter in weights.graph.model.named_parameters()}
    weights.fill(lambda layout, views: init_weights(weights.graph.model, layout, views, 0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {name: id(parameter) for name, parameter in weights.graph.model.named_parameters()} == identities
    assert all(parameter.is_meta for parameter in weights.graph.model.parameters())


def test_initializer_range_scales_the_initial_weights() -> None:
    narrow, wide = drawn("llama", initializer_range=0.01), drawn("llama", initializer_range=0.5)
    assert 40 < float(wide["lm_head.weight"].std() / narrow["lm_head.weight"].std()) < 60


class ModuleWithoutInitRule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(4))


def test_a_parameter_without_any_rule_is_named() -> None:
    model_type, values = FAMILIES["llama"]
    model = build_graph(AutoConfig.for_model(model_type, **values)).model
    with torch.device("meta"):
        model.add_module("unruly", ModuleWithoutInitRule())
    with pytest.raises(InitializationError, match=r"no rule to initialise unruly\.gain"):
        initialize_tensors(model, {"unruly.gain": torch.empty(4)}, seed=0)
