from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.base.layout import build_layout, views
from megatrain.config import ConfigError, load_config, to_toml
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import Update
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.factory import ParameterGroupError, check_groups, make_optimizer, segment_builder
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
            [{"params": ["*.upp.*"], "learning_rate": 1e-4}],
            r'groups.0.params: "\*.upp.\*" matches no .*layers.0.up.weight',
        ),
        (
            [{"params": ["model.*"], "learning_rate": 1e-4}, {"params": ["*.up.*"], "learning_rate": 1e-3}],
            "groups.1 has no effect, because earlier groups",
        ),
        ([{"params": ["*norm*", "*embed*"], "weight_decay": 0.1}], "groups.0.weight_decay = 0.1 has no effect"),
    ],
)
def test_groups_without_an_effect_are_refused(groups: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ParameterGroupError, match=message):
        check_groups(table_of(groups=groups), LAYOUT.entries)


def test_groups_with_an_effect_are_accepted() -> None:
    groups = [{"params": ["*.up.*"], "weight_decay": 0.0}, {"params": ["*"], "learning_rate": 1e-4}]
    table = table_of(groups=groups)
    check_groups(table, LAYOUT.entries)
    assert [group.params for group in table.groups] == [("*.up.*",), ("*",)]


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
