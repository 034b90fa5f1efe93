"""An example optimizer from an installed package, and learning rates by layer and by parameter name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from megatrain.optim.plugins import ENTRY_POINT_GROUP
from megatrain_tier_cli.main import command_group
from oracles.tiered_run import config_text, run_config

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = 'optim = "custom"\ncustom_optimizer = "signum"\noptim_args = { momentum = 0.95 }'


def test_custom_optimizer_is_bitwise_equal_everywhere(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "signs-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nsignum = signum:Signum\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(EXAMPLES / "extend"))
    text = config_text(tmp_path, tiny_model, nvme=0, optimizer=TABLE)
    in_ram = run_config(text, tmp_path / "ram", num_steps=3)
    placement = 'optimizer = ["nvme"]\nweights = ["nvme"]'
    text = config_text(tmp_path, tiny_model, gpu="9MiB", ram="9MiB", placement=placement, optimizer=TABLE)
    spread = run_config(text, tmp_path / "spread", num_steps=3)
    spread.assert_same(in_ram)
    spread.assert_as_planned()
    assert in_ram.losses[-1] < in_ram.losses[0]
    for change, said in (
        ({"signum": "sgnum"}, "Available: signum"),
        ({"momentum = 0.95": "speed = 1"}, "optimizer.optim_args: TypeError"),
        (
            {'custom_optimizer = "signum"\n': "", "optim_args = { momentum = 0.95 }": ""},
            "needs optimizer.custom_optimizer",
        ),
    ):
        wrong = config_text(tmp_path, tiny_model, nvme=0, optimizer=TABLE)
        for old, new in change.items():
            wrong = wrong.replace(old, new)
        (tmp_path / "wrong.toml").write_text(wrong)
        result = CliRunner().invoke(command_group, ["plan", str(tmp_path / "wrong.toml")])
        assert result.exit_code == 2 and said in result.output, result.output


def test_layers_and_names_have_separate_rates(tiny_model: Path, tmp_path: Path) -> None:
    """Plain SGD changes a weight in proportion to its learning rate. The reference run has a single rate."""
    table = 'optim = "sgd"\nsgd_momentum = 0.0\nweight_decay = 0.0\nmax_grad_norm = 0.0\n'
    groups = '[[optimizer.groups]]\nparams = ["*.mlp.*"]\nlr_mult = 0.25\n'

    def moved(name: str, lines: str, placement: str = "", **options: Any) -> dict[str, torch.Tensor]:
        text = config_text(tmp_path / name, tiny_model, optimizer=table + lines, placement=placement, **options)
        run = run_config(text, tmp_path / name, num_steps=1)
        return {key: value - start[key] for key, value in run.weights.items()}

    start = {
        name: parameter.detach().float()
        for name, parameter in AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()
    }
    plain = moved("plain", "", nvme=0)
    found = moved("decayed", f"layer_decay = 0.5\n{groups}", nvme=0)
    spread = moved("spread", f"layer_decay = 0.5\n{groups}", ram="8MiB", gpu="9MiB", nvme=1)
    num_layers = 1 + max(int(name.split(".")[2]) for name in plain if ".layers." in name)
    for name, change in plain.items():
        scale = 1.0
        if ".layers." in name:
            scale = 0.5 ** (num_layers - int(name.split(".")[2]))
        elif "embed" in name:
            scale = 0.5 ** (num_layers + 1)
        scale *= 0.25 if ".mlp." in name else 1.0
        assert torch.equal(found[name], spread[name])
        last_place = 2.5e-7 if "norm" in name else 1e-8  # rounding error of weights near 1, or near 0.02
        assert torch.allclose(found[name], change * scale, rtol=1e-2, atol=last_place), name
