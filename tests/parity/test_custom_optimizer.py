"""A run with an optimizer that an installed package brings: the example, by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from megatrain.optim.plugins import ENTRY_POINT_GROUP
from megatrain_tier_cli.main import command_group
from oracles.tiered_run import config_text, run_config

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = 'optim = "custom"\ncustom_optimizer = "signum"\noptim_args = { momentum = 0.95 }'


def test_the_same_bits_everywhere_and_mistakes_in_words(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "signs-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nsignum = signum:Signum\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(EXAMPLES / "optimizers"))
    text = config_text(tmp_path, tiny_model, nvme=0, optimizer=TABLE)
    in_ram = run_config(text, tmp_path / "ram", num_steps=3)
    placement = 'optimizer = ["nvme"]\nweights = ["nvme"]'
    text = config_text(tmp_path, tiny_model, gpu="9MiB", ram="9MiB", placement=placement, optimizer=TABLE)
    spread = run_config(text, tmp_path / "spread", num_steps=3)
    spread.assert_same(in_ram)
    spread.assert_as_planned()
    assert in_ram.losses[-1] < in_ram.losses[0]
    for change, said in (
        ({"signum": "sgnum"}, "there are: signum"),
        ({"momentum = 0.95": "speed = 1"}, "optimizer.optim_args: TypeError"),
        ({'custom_optimizer = "signum"\n': "", "optim_args = { momentum = 0.95 }": ""}, "does not say which optimizer"),
    ):
        wrong = config_text(tmp_path, tiny_model, nvme=0, optimizer=TABLE)
        for old, new in change.items():
            wrong = wrong.replace(old, new)
        (tmp_path / "wrong.toml").write_text(wrong)
        result = CliRunner().invoke(command_group, ["plan", str(tmp_path / "wrong.toml")])
        assert result.exit_code == 2 and said in result.output, result.output
