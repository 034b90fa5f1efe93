"""Plans with other sizes: which keys a short name means, what fits, and what a whole run comes to."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatrain.config import load_config
from megatrain.extras.what_if import describe, plan_alternative, run_length
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text

MODEL = EXAMPLES / "quickstart" / "model"
PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"
overrides_of: Callable[..., list[str]] = importlib.import_module(f"{PACKAGE}.plan").overrides_of


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**tables: Any) -> Path:
        path = tmp_path / "run.toml"
        text = config_text(tmp_path, MODEL, **{"nvme": 2, **tables})
        text = text.replace("[model]\n", "[model]\ntrain_from_scratch = true\n")
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ram=64GiB", ["tiers.ram.size=64GiB"]),
        (" gpu = 90% ", ["tiers.gpu.size=90%"]),
        ("nvme=1GiB", ["tiers.nvme.0.size=536870912B", "tiers.nvme.1.size=536870912B"]),
        ("nvme=auto", ["tiers.nvme.0.size=auto", "tiers.nvme.1.size=auto"]),
        ("nvme=none,ram=1GiB", ["tiers.nvme=[]", "tiers.ram.size=1GiB"]),
        ("batch=4,length=128", ["training.per_device_train_batch_size=4", "data.max_length=128"]),
        ("optimizer.optim=lion", ["optimizer.optim=lion"]),
        ('placement.weights=["ram","nvme"],ram=1MiB', ['placement.weights=["ram","nvme"]', "tiers.ram.size=1MiB"]),
    ],
)
def test_what_short_names_mean(text: str, expected: list[str], write: Callable[..., Path]) -> None:
    assert overrides_of(text, resolve(load_config(write()).config)) == expected


def test_names_that_depend_on_the_config(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(nvme=0)
    text = path.read_text().replace("per_device_train_batch_size = 2\ngradient_accumulation_steps = 3\n", "")
    path.write_text(text.replace("[training]\n", "[training]\ntrain_batch_tokens = 256\n"))
    config = load_config(path).config
    assert overrides_of("batch=512", resolve(config)) == ["training.train_batch_tokens=512"]
    length = resolve(config).batch.max_length
    assert overrides_of("batch=7", resolve(config)) == [f"training.train_batch_tokens={7 * length}"], "rows"
    assert overrides_of("batch=6,length=10", resolve(config))[0] == "training.train_batch_tokens=60"
    changes = overrides_of("nvme=64MiB", resolve(config))
    assert load_config(path, (), changes).config.tiers.nvme[0].path == tmp_path / "out" / "nvme"


@pytest.mark.parametrize("text", ["ram", "=3", "ram=", "64GiB"])
def test_what_is_no_change_is_refused(text: str, write: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="ram=64GiB"):
        overrides_of(text, resolve(load_config(write()).config))


def test_alternatives_are_the_plans_of_those_configs(write: Callable[..., Path]) -> None:
    path = write(ram="7MiB")
    for text in ("ram=64MiB", "batch=1", "length=32"):
        changes = overrides_of(text, resolve(load_config(path).config))
        plan = plan_run(resolve(load_config(path, (), changes).config))
        found = plan_alternative(text, path, (), (), changes)
        assert found == describe(text, plan) and found.fits
        assert found.peak_bytes == dict(plan.totals) and found.moved_bytes == sum(plan.traffic.values())
    all_in_ram = plan_alternative("x", path, (), (), ["tiers.ram.size=512MiB"])
    assert all_in_ram.moved_bytes == all_in_ram.written_bytes == 0


def test_what_cannot_run_says_why(write: Callable[..., Path]) -> None:
    small = plan_alternative("ram=1MiB", write(), (), (), ["tiers.ram.size=1MiB"])
    assert not small.fits and small.problem.startswith("ram needs ") and small.problem.endswith("has 1.00 MiB")
    assert plan_alternative("x", write(), (), (), ["nope=1"]).problem == "unknown key `nope`"
    bare = plan_alternative("x", write(), (), (), ["tiers.ram.size=64"])
    assert "no unit" in bare.problem


def test_a_whole_run(write: Callable[..., Path]) -> None:
    path = write(ram="7MiB", placement='optimizer = ["nvme"]', training="max_steps = 450")
    config = load_config(path, (), ["tiers.nvme.0.max_written=1GB", "tiers.nvme.1.max_written=1GB"]).config
    plan = plan_run(resolve(config))
    length = run_length(plan, None, 0.5)
    assert (length.num_steps, length.num_tokens, length.seconds) == (450, 450 * 6 * 64, 225.0)
    assert length.written_bytes == plan.placement.run_traffic_bytes(450)["ram->nvme"]
    assert length.share_of_limit == length.written_bytes / 2e9
    assert length.num_saves == 3 and length.saved_bytes == 3 * plan.checkpoint_bytes_in_output_dir
    plan = plan_run(resolve(load_config(write(ram="7MiB")).config))
    assert run_length(plan, None, 0.5).num_steps is None
    assert run_length(plan, 7, None).num_tokens == 7 * 6 * 64


def call(*words: object) -> Any:
    group = importlib.import_module(f"{PACKAGE}.main").command_group
    return CliRunner().invoke(group, ["plan", *map(str, words)])


def test_the_command(write: Callable[..., Path]) -> None:
    path = write(ram="7MiB")
    result = call(path, "--count-steps", "--what-if", "ram=64MiB", "--what-if", "ram=1MiB,batch=1")
    assert result.exit_code == 0, result.output
    text = result.stdout
    found = re.search(r"^run +(\d+) steps, ([\d,]+) tokens", text, re.MULTILINE)
    assert found is not None and int(found[2].replace(",", "")) == int(found[1]) * 6 * 64 and "NVMe writes" in text
    lines = text[text.index("what if") :].splitlines()
    assert [line.split()[0] for line in lines] == ["what", "as", "ram=64MiB", "ram=1MiB,batch=1"]
    assert "cannot run: ram needs" in lines[-1]
    values = json.loads(call(path, "--json", "--what-if", "ram=64MiB").stdout)
    assert [one["what"] for one in values["what_if"]] == ["as configured", "ram=64MiB"]
    assert values["run"]["num_steps"] is None and values["what_if"][1]["fits"]


def test_alternatives_to_what_does_not_fit(write: Callable[..., Path]) -> None:
    path = write(ram="1MiB")
    result = call(path, "--what-if", "ram=64MiB")
    assert result.exit_code == 3 and "does not fit" in result.stderr and "ram=64MiB" in result.stdout
    result = call(path, "--json", "--what-if", "ram=64MiB")
    assert result.exit_code == 3 and json.loads(result.stdout)["what_if"][0]["fits"]
    assert call(path).exit_code == 3
    result = call(path, "--what-if", "ram")
    assert result.exit_code == 2 and "ram=64GiB" in result.stderr
