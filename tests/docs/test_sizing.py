"""The worked examples in docs/sizing.md match the output of the planner, line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megatrain.machine.resources import TierSpecs
from megatrain.machine.this_machine import ThisMachine
from oracles.code_blocks import Block, blocks_of, commands_of
from processes.saved_run import command_group

PAGE = "docs/sizing.md"
BLOCKS = blocks_of(PAGE)
SHAPES = {
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "Qwen2.5-72B": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
KV_HEADS = {"Qwen2.5-7B": 4, "Qwen2.5-72B": 8}


def examples() -> list[tuple[Block, Block]]:
    """Return (command block, output block) for every worked example."""
    given = [number for number, block in enumerate(BLOCKS) if block.language == "sh"]
    return [(BLOCKS[number], BLOCKS[number + 1]) for number in given]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with the config from the page, and the config.json of each model."""
    for name, shape in SHAPES.items():
        (tmp_path / name).mkdir()
        values = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 152064,
            "num_key_value_heads": KV_HEADS[name],
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
            **shape,
        }
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    (config,) = (block for block in BLOCKS if block.language == "toml")
    assert config.text.startswith("# sizing.toml\n")
    (tmp_path / "sizing.toml").write_text(config.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def planned_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the planner accept a GPU tier of the configured size on a machine without a GPU. Trace layers on the CPU."""
    compute_tier = TierSpecs.compute_tier
    devices: list[str] = []

    def resolve(machine: ThisMachine, name: str) -> torch.device:
        devices.append(name)
        return torch.device("cpu")

    monkeypatch.setattr(ThisMachine, "resolve_device", resolve)
    monkeypatch.setattr(
        TierSpecs,
        "compute_tier",
        lambda tiers, device: "gpu" if devices[-1] == "cuda" else compute_tier(tiers, device),
    )
    monkeypatch.setattr(TierSpecs, "gpu_capacity_bytes", lambda tiers, device: tiers.table.gpu.size.resolve(0))


@pytest.mark.parametrize(("command", "printed"), examples(), ids=lambda block: f"line{block.line}")
@pytest.mark.usefixtures("folder", "planned_gpu")
def test_quoted_plans_match_the_planner(command: Block, printed: Block) -> None:
    (given,) = commands_of(command)
    assert given.words[:3] == ("megatrain-tier", "plan", "sizing.toml")
    result = CliRunner().invoke(command_group(), list(given.words[1:]))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    shown = [line.split() for line in printed.text.splitlines()]
    assert len(shown) >= 8
    missing = [" ".join(words) for words in shown if not any(line[: len(words)] == words for line in lines)]
    assert missing == [], f"{command}\n{result.output}"


def test_all_machines_have_an_example() -> None:
    given = [str(next(commands_of(command))) for command, _ in examples()]
    assert len(given) == 4
    assert sum("device=cuda" in words for words in given) == 2
    assert any("tiers.gpu.size=22GiB" in words for words in given)
    assert any("tiers.gpu.size=130GiB" in words and "tiers.ram.size=1400GiB" in words for words in given)
    assert {block.language for block in BLOCKS} == {"toml", "sh", "text"}
