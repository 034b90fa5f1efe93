from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.base.layout import build_layout, views
from megatrain.config import ConfigError, load_config, to_toml
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.average import MatrixWeightAverage, WeightAverage
from megatrain.optim.base import Update
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.factory import (
    ParameterGroupError,
    check_groups,
    has_measured_kernel,
    is_memory_bound,
    make_optimizer,
    segment_builder,
)
from megatrain.optim.fused import FusedMatrix
from megatrain.optim.muon import Muon
from megatrain.optim.table import OptimizerConfig
from megatrain.optim.threads import KernelThreads

LAYOUT = build_layout(
    "layer",
    [("model.embed_tokens.weight", (64, 8)), ("model.layers.0.up.weight", (16, 8)), ("model.norm.weight", (8,))],
    trainable=True,
)
CONFIG = """
task = "pretrain"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "text.txt"
"""


def table_of(**values: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate(values)


def load(tmp_path: Path, text: str, *overrides: str) -> tuple[OptimizerConfig, tuple[str, ...]]:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + text)
    loaded = load_config(path, (), overrides)
    return loaded.config.optimizer, loaded.warnings


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("lion", Lion), ("sgd", SGD), ("adafactor", Adafactor)])
def test_every_name_makes_its_optimizer_and_takes_its_settings(name: str, kind: type) -> None:
    table = table_of(optim=name, weight_decay=0.2)
    optimizer = make_optimizer(table, KernelThreads(1))
    assert isinstance(optimizer, kind)
    segments = segment_builder(table, optimizer, split_master=False)(LAYOUT)
    assert {segment.weight_decay for segment in segments} == {0.0, 0.2}


def test_betas_come_from_the_table_and_lion_has_own_defaults() -> None:
    adamw = make_optimizer(table_of(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6))
    assert isinstance(adamw, AdamW)
    assert (adamw.beta1, adamw.beta2, adamw.eps) == (0.8, 0.9, 1e-6)
    lion = make_optimizer(table_of(optim="lion"))
    assert isinstance(lion, Lion) and (lion.beta1, lion.beta2) == (0.9, 0.99)
    chosen = make_optimizer(table_of(optim="lion", adam_beta2=0.98))
    assert isinstance(chosen, Lion) and chosen.beta2 == 0.98
    sgd = make_optimizer(table_of(optim="sgd", sgd_momentum=0.5, sgd_nesterov=True))
    assert isinstance(sgd, SGD) and (sgd.momentum, sgd.nesterov) == (0.5, True)


def test_elementwise_optimizers_take_threads_seed_and_moments() -> None:
    threads = KernelThreads(3)
    for name in ("adamw", "lion", "sgd"):
        made = make_optimizer(table_of(optim=name, state_dtype="bfloat16"), threads, seed=11)
        assert isinstance(made, AdamW | Lion | SGD)
        assert (made.threads, made.state_dtype, made.seed) == (threads, "bfloat16", 11)
    adafactor = make_optimizer(table_of(optim="adafactor"), threads)
    assert isinstance(adafactor, Adafactor) and adafactor.threads is threads


def test_muon_takes_its_settings_and_leaves_out_vocabulary_and_globs() -> None:
    threads, fused = KernelThreads(3), {"qkv": FusedMatrix((4, 2, 2))}
    values: dict[str, object] = {
        "optim": "muon",
        "adam_beta1": 0.8,
        "adam_beta2": 0.85,
        "adam_epsilon": 1e-5,
        "muon_momentum": 0.7,
        "muon_nesterov": False,
        "muon_ns_steps": 3,
        "muon_adjust_lr": "original",
        "muon_exclude": ["*.router.*"],
    }
    for treatment, expected in (("auto", fused), ("parts", fused), ("whole", {})):
        muon = make_optimizer(table_of(**values, muon_fused=treatment), threads, {"lm_head.weight"}, fused=fused)
        assert isinstance(muon, Muon) and muon.fused == expected
        assert (muon.momentum, muon.nesterov, muon.num_steps, muon.adjust_lr) == (0.7, False, 3, "original")
        assert (muon.adamw.beta1, muon.adamw.beta2, muon.adamw.eps, muon.threads) == (0.8, 0.85, 1e-5, threads)
        names = {"lm_head.weight": 2, "a.router.weight": 2, "a.up.weight": 2, "experts": 3, "norm": 1}
        found = {name: muon.is_matrix(name, (8,) * ndim) for name, ndim in names.items()}
        assert [name for name, is_matrix in found.items() if is_matrix] == ["a.up.weight", "experts"]


@pytest.mark.parametrize(
    ("values", "kind", "is_measured", "is_bound"),
    [
        ({}, AdamW, True, True),
        ({"state_dtype": "bfloat16"}, AdamW, False, False),
        ({"state_dtype": "int8"}, AdamW, False, False),
        ({"optim": "lion"}, Lion, False, True),
        ({"optim": "sgd", "state_dtype": "int8"}, SGD, False, False),
        ({"optim": "adafactor"}, Adafactor, False, False),
        ({"optim": "muon"}, Muon, False, True),
        ({"ema_decay": 0.75}, WeightAverage, False, True),
        ({"ema_decay": 0.75, "state_dtype": "int8"}, WeightAverage, False, False),
        ({"ema_decay": 0.75, "optim": "muon"}, MatrixWeightAverage, False, True),
    ],
)
def test_averages_wrap_the_optimizer_and_fp32_updates_are_memory_bound(
    values: dict[str, object], kind: type, is_measured: bool, is_bound: bool
) -> None:
    threads = KernelThreads(2)
    optimizer: Any = make_optimizer(table_of(**values), threads)
    assert type(optimizer) is kind and optimizer.threads is threads
    assert not isinstance(optimizer, WeightAverage) or optimizer.decay == 0.75
    for split_master in (False, True):
        assert has_measured_kernel(optimizer, split_master=split_master) is is_measured
    assert is_memory_bound(optimizer) is is_bound


@pytest.mark.parametrize(
    ("values", "rates", "defers", "has_warmup", "depends"),
    [
        ({}, {"optimizer.learning_rate": 1e-5}, True, True, True),
        ({"max_grad_norm": 0}, {"optimizer.learning_rate": 1e-5}, False, True, True),
        ({"max_grad_norm": 0, "nonfinite": "skip"}, {"optimizer.learning_rate": 1e-5}, True, True, True),
        ({"clip_scope": "layer", "nonfinite": "skip"}, {"optimizer.learning_rate": 1e-5}, False, True, True),
        ({"lr_scheduler_type": "constant"}, {"optimizer.learning_rate": 1e-5}, True, False, False),
        ({"lr_scheduler_type": "inverse_sqrt"}, {"optimizer.learning_rate": 1e-5}, True, True, True),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1.0},
            {"optimizer.learning_rate": 1e-5},
            *(True, True, False),
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 0},
            {"optimizer.learning_rate": 1e-5},
            True,
            True,
            False,
        ),
        (
            {
                "learning_rate": 0.5,
                "groups": [
                    {"params": ["a"], "lr_mult": 0.25},
                    {"params": ["b"], "weight_decay": 0.5},
                    {"params": ["c"], "learning_rate": 0.75},
                ],
            },
            {
                "optimizer.learning_rate": 0.5,
                "optimizer.groups.0.lr_mult x optimizer.learning_rate": 0.125,
                "optimizer.groups.2.learning_rate": 0.75,
            },
            *(True, True, True),
        ),
    ],
)
def test_rates_and_dependencies_of_a_table(
    values: dict[str, object], rates: dict[str, float], defers: bool, has_warmup: bool, depends: bool
) -> None:
    table = table_of(**values)
    assert table.learning_rates == rates
    assert (table.defers_updates, table.has_warmup, table.depends_on_length) == (defers, has_warmup, depends)


def test_each_layer_has_its_share_of_the_learning_rate() -> None:
    """A tied head has the factor of the embedding, its first use. Units between the layers belong to the one before."""

    def unit(layer: str, *layouts: str) -> Any:
        return SimpleNamespace(layer=layer, params=[(None, None, layout) for layout in layouts])

    graph: Any = SimpleNamespace(
        units=[
            unit("", "embed"),
            unit("0", "0.attention"),
            unit("0", "0.mlp", "shared"),
            unit("1", "1.mlp", "shared"),
            unit("", "norm", "embed"),
        ]
    )
    table = table_of(layer_decay=0.5, groups=[{"params": ["b"], "lr_mult": 3.0}])
    build = segment_builder(table, make_optimizer(table), split_master=True, graph=graph)
    plain = segment_builder(table, make_optimizer(table), split_master=True)
    expected = {"embed": 0.125, "0.attention": 0.25, "0.mlp": 0.25, "shared": 0.25, "1.mlp": 0.5, "norm": 1.0}
    for name, scale in expected.items():
        layout = build_layout(name, [("a", (4, 4)), ("b", (4, 4))], trainable=True)
        assert [segment.lr_scale for segment in build(layout)] == [scale, 3 * scale]
        assert [segment.lr_scale for segment in plain(layout)] == [1.0, 3.0]


def test_groups_reach_the_segments() -> None:
    table = table_of(
        optim="adafactor",
        learning_rate=1e-3,
        groups=[
            {"params": ["*embed*"], "learning_rate": 1e-4},
            {"params": ["*.up.*"], "weight_decay": 0.5},
        ],
    )
    segments = segment_builder(table, make_optimizer(table), split_master=True)(LAYOUT)
    assert [segment.lr_scale for segment in segments] == [pytest.approx(0.1), 1.0, 1.0]
    assert [segment.weight_decay for segment in segments] == [0.0, 0.5, 0.0]
    assert [segment.state_starts["v"] for segment in segments] == [0, 80, 112]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_group_without_decay_does_not_decay(name: str) -> None:
    """A decay of 0.0 is a set value, not a missing one."""
    names = ("model.layers.0.up.weight", "model.layers.1.up.weight", "model.norm.weight")
    layout = build_layout("layer", zip(names, ((16, 8), (16, 8), (8,)), strict=True), trainable=True)
    groups = [{"params": ["*.0.up.*"], "weight_decay": 0.0}]
    table = table_of(optim=name, learning_rate=0.5, weight_decay=0.1, groups=groups)
    optimizer = make_optimizer(table, KernelThreads(1))
    blocks = {kind.name: torch.zeros(kind.num_elements(layout)) for kind in optimizer.state_kinds(False)}
    blocks["weight"].fill_(1.0)
    segments = segment_builder(table, optimizer, split_master=False)(layout)
    optimizer.update(blocks, torch.zeros(layout.num_elements), segments, Update(step=1, lr=0.5))
    found = [part.unique().tolist() for part in views(blocks["weight"], layout).values()]
    assert found == [[1.0], [pytest.approx(0.95)], [1.0]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"params": ["*.up.*", "*.upp.*"], "learning_rate": 1e-4}],
            'optimizer.groups.0.params: "*.upp.*" matches no trained parameter. Write a pattern that matches one; the '
            'most similar one is "model.layers.0.up.weight"',
        ),
        (
            [
                {"params": ["*embed*", "*norm*"], "learning_rate": 1e-4},
                {"params": ["*.up.*"], "learning_rate": 1e-4},
                {"params": ["*.up.*", "*norm*"], "learning_rate": 1e-3},
            ],
            "optimizer.groups.2 has no effect, because earlier groups match all of its parameters. Move it up or "
            "remove it",
        ),
        (
            [{"params": ["*.up.*"], "weight_decay": 0.2}, {"params": ["*norm*", "*embed*"], "weight_decay": 0.1}],
            "optimizer.groups.1.weight_decay = 0.1 has no effect: its parameters are vectors, which do not decay, or "
            "match optimizer.weight_decay_exclude. Change optimizer.weight_decay_exclude (with [], vectors also "
            "decay), or remove this weight_decay",
        ),
    ],
)
def test_groups_without_an_effect_are_refused(groups: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ParameterGroupError) as caught:
        check_groups(table_of(groups=groups), LAYOUT.entries)
    assert str(caught.value) == message


def test_groups_with_an_effect_are_accepted() -> None:
    groups = [{"params": ["*norm*"], "weight_decay": 0.0}, {"params": ["*.up.*"], "weight_decay": 0.5}]
    groups.append({"params": ["*"], "learning_rate": 1e-4})
    table = table_of(groups=groups)
    check_groups(table, LAYOUT.entries)
    assert [group.params for group in table.groups] == [("*norm*",), ("*.up.*",), ("*",)]


def test_file_groups_combine_with_command_line_overrides(tmp_path: Path) -> None:
    text = '[[optimizer.groups]]\nparams = ["*embed*"]\nlearning_rate = 1e-6\n'
    table, warnings = load(tmp_path, text, "learning_rate=2e-5", "optimizer.groups.0.weight_decay=0.3")
    assert not warnings
    assert table.learning_rate == 2e-5
    assert (table.groups[0].learning_rate, table.groups[0].weight_decay) == (1e-6, 0.3)


def test_resolved_config_round_trips_groups(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        CONFIG + '[optimizer]\noptim = "lion"\n[[optimizer.groups]]\nparams = ["*a*"]\nweight_decay = 0.0\n'
    )
    config = load_config(path).config
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    loaded = load_config(again)
    assert loaded.config == config
    assert not loaded.warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[optimizer]\noptim = "adam"\n', 'Did you mean "adamw"'),
        ('[optimizer]\noptim = "sgd"\nsgd_momentum = 0.0\nsgd_nesterov = true\n', "needs momentum"),
        ('[[optimizer.groups]]\nparams = ["*"]\n', "optimizer.groups.0 changes nothing"),
        ("[[optimizer.groups]]\nlearning_rate = 1e-3\n", "optimizer.groups.0.params"),
        ('[[optimizer.groups]]\nparams = ["*"]\nlearning_rate = 1e-3\nlr_mult = 0.5\n', "Keep one"),
        ("[optimizer]\nlayer_decay = 1.5\n", "optimizer.layer_decay"),
        ("[[optimizer.groups]]\nparams = []\nlearning_rate = 1e-3\n", "optimizer.groups.0.params"),
        ('[[optimizer.groups]]\nparams = ["*"]\nlr = 1e-3\n', "unknown key `optimizer.groups.0.lr`"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_settings_of_another_optimizer_are_pointed_out(tmp_path: Path) -> None:
    _, warnings = load(tmp_path, '[optimizer]\noptim = "sgd"\nadam_beta1 = 0.8\n')
    assert warnings == ('optimizer.adam_beta1 has no effect with optim = "sgd"',)
