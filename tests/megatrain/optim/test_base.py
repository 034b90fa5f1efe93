from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from megatrain.base.layout import build_layout
from megatrain.extras.translate.conversions import DECAY_EXCLUDE
from megatrain.optim.base import Segment, StateKind, build_segments, bytes_per_parameter
from megatrain.optim.table import OptimizerConfig, ParameterGroupConfig
from oracles.families import tiny_config

PARAMETERS = [
    ("model.layers.0.input_layernorm.weight", (64,)),
    ("model.layers.0.mlp.up_proj.weight", (32, 64)),
    ("model.layers.0.mlp.up_proj.bias", (32,)),
    ("model.layers.0.qk_norm.scale", (4, 16)),
    ("transformer.h.0.ln_1.weight", (64,)),
]


def test_only_matrices_not_excluded_by_globs_decay() -> None:
    segments = build_segments(build_layout("layer", PARAMETERS, trainable=True), 0.1, ("*.bias", "*norm*"))
    assert [(segment.start, segment.stop, segment.weight_decay) for segment in segments] == [
        (0, 64, 0.0),
        (1024, 1024 + 2048, 0.1),
        (3072, 3072 + 32, 0.0),
        (4096, 4096 + 64, 0.0),
        (5120, 5120 + 64, 0.0),
    ]
    assert [segment.shape for segment in segments] == [shape for _, shape in PARAMETERS]
    assert {segment.lr_scale for segment in segments} == {1.0}
    assert not any(segment.state_starts for segment in segments)


def test_vectors_decay_if_nothing_is_excluded() -> None:
    segments = build_segments(build_layout("layer", PARAMETERS, trainable=True), 0.1, ())
    assert {segment.weight_decay for segment in segments} == {0.1}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gpt2"])
def test_matrices_decay_as_under_transformers(family: str) -> None:
    """With the exclusions that `import` writes, the same matrices decay as in transformers, and no vector decays.
    Biases of fused experts are matrices, but do not decay.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    theirs = set(Trainer.get_decay_parameter_names(None, model)) & set(shapes)  # a tied head has two names there
    layout = build_layout("model", list(shapes.items()), trainable=True)
    ours = {segment.name for segment in build_segments(layout, 0.1, DECAY_EXCLUDE) if segment.weight_decay}
    assert ours == {name for name in theirs if len(shapes[name]) >= 2}
    default = OptimizerConfig.model_fields["weight_decay_exclude"].default
    by_default = {segment.name for segment in build_segments(layout, 0.1, default) if segment.weight_decay}
    assert by_default == {name for name in ours if "embed" not in name}
    if family == "gpt_oss":
        assert any(name.endswith("gate_up_proj_bias") for name in shapes)


def test_globs_are_case_sensitive() -> None:
    layout = build_layout("layer", [("model.Norm.weight", (4, 4))], trainable=True)
    assert build_segments(layout, 0.1, ("*norm*",))[0].weight_decay == 0.1


def test_first_matching_group_applies_and_excluded_never_decay() -> None:
    layout = build_layout("layer", PARAMETERS, trainable=True)
    groups = (
        ParameterGroupConfig(params=("*.bias", "*up_proj*"), learning_rate=0.05, weight_decay=0.3),
        ParameterGroupConfig(params=("*mlp*", "*layernorm*"), lr_mult=2.0),
    )
    segments = build_segments(layout, 0.1, ("*embed*",), groups, learning_rate=0.1)
    assert [segment.lr_scale for segment in segments] == [2.0, 0.5, 0.5, 1.0, 1.0]
    assert [segment.weight_decay for segment in segments] == [0.0, 0.3, 0.0, 0.1, 0.0]


def test_state_with_its_own_length_is_packed_by_tensor() -> None:
    layout = build_layout("layer", PARAMETERS, trainable=True)
    kind = StateKind("sums", torch.float32, lambda entry: entry.shape[0] if len(entry.shape) == 2 else 0)
    assert list(kind.starts(layout).values()) == [0, 0, 32, 32, 48]
    assert kind.num_elements(layout) == 1024
    whole = StateKind("m", torch.float32)
    assert whole.num_elements(layout) == layout.num_elements
    assert whole.starts(layout)["model.layers.0.mlp.up_proj.weight"] == 1024
    segments = build_segments(layout, 0.0, (), kinds=(kind, whole))
    assert [dict(segment.state_starts) for segment in segments] == [{"sums": start} for start in (0, 0, 32, 32, 48)]
    used = 4 * (1024 + layout.num_elements)
    assert bytes_per_parameter((kind, whole), layout) == pytest.approx(used / layout.num_parameters)


def test_shared_elements_are_counted_and_located() -> None:
    layout = build_layout("layer", PARAMETERS, trainable=True)
    scales = StateKind("m_scale", torch.float32, granularity=256)
    assert list(scales.starts(layout).values()) == [0, 4, 12, 16, 20]
    assert [scales.elements_for(count) for count in (1, 256, 257, 2048)] == [1, 1, 2, 8]
    assert [scales.length_of(entry) for entry in layout.entries] == [1, 8, 1, 1, 1]
    assert scales.num_elements(layout) == layout.num_elements // 256 == 24
    rows = StateKind("rows", torch.float32, lambda entry: entry.shape[0] + 1)
    assert [rows.length_of(entry) for entry in layout.entries] == [65, 33, 33, 5, 65]
    assert bytes_per_parameter((scales, rows, StateKind("low", torch.int16))) == 4 / 256 + 2


def test_only_blocks_that_match_the_weights_can_be_split() -> None:
    one, two = (build_layout("layer", PARAMETERS[:count], trainable=True) for count in (1, 2))
    same = StateKind("v", torch.float32, lambda entry: entry.numel)
    kinds = (same, replace(same, elements_of=None), replace(same, elements_of=lambda entry: 1))
    assert [kind.has_weight_layout(one) for kind in kinds] == [True, True, False]
    assert [kind.has_weight_layout(two) for kind in kinds] == [False, True, False]
    assert not any(replace(kind, needs_whole=True).has_weight_layout(one) for kind in kinds)


def test_a_segment_is_cut_to_a_part_of_its_block() -> None:
    segment = Segment(100, 200, 0.5, 0.25, (10, 10), {"v": 7}, "w", param_start=30)
    rest = (0.5, 0.25, (10, 10))
    assert segment.within(range(150, 180)) == Segment(0, 30, *rest, {"v": 0}, "w", 80)
    assert segment.within(range(40, 120)) == Segment(60, 80, *rest, {"v": 60}, "w", 30)
    assert segment.within(range(190, 300)) == Segment(0, 10, *rest, {"v": 0}, "w", 120)
    assert segment.within(range(300)) == Segment(100, 200, *rest, {"v": 100}, "w", 30)


def test_empty_state_kind_still_has_a_block() -> None:
    layout = build_layout("norm", [("model.norm.weight", (64,))], trainable=True)
    assert StateKind("rows", torch.float32, lambda entry: 0).num_elements(layout) == 1024
