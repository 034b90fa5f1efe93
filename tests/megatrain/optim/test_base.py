from __future__ import annotations

from megatrain.models.layout import build_layout
from megatrain.optim.base import Segment, build_segments

PARAMETERS = [
    ("model.layers.0.input_layernorm.weight", (64,)),
    ("model.layers.0.mlp.up_proj.weight", (32, 64)),
    ("model.layers.0.mlp.up_proj.bias", (32,)),
    ("model.layers.0.qk_norm.scale", (4, 16)),
    ("transformer.h.0.ln_1.weight", (64,)),
]


def test_only_matrices_that_no_glob_names_decay() -> None:
    segments = build_segments(build_layout("layer", PARAMETERS, trainable=True), 0.1, ("*.bias", "*norm*"))
    assert segments == (
        Segment(0, 64, 0.0),
        Segment(1024, 1024 + 2048, 0.1),
        Segment(3072, 3072 + 32, 0.0),
        Segment(4096, 4096 + 64, 0.0),
        Segment(5120, 5120 + 64, 0.0),
    )


def test_globs_tell_upper_and_lower_case_apart() -> None:
    layout = build_layout("layer", [("model.Norm.weight", (4, 4))], trainable=True)
    assert build_segments(layout, 0.1, ("*norm*",))[0].weight_decay == 0.1
