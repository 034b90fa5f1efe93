"""Compares the examples for Hugging Face and TRL trainers with copies that lack the added lines."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import warm
from tiered import MiB

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
MARK = "# megatrain"
MOST_LINES = 5
STATE_BYTES = 16 * 820_352  # the model's weights, gradients, and AdamW's m and v, in fp32
#: Relative difference of losses and norms in fp32. torch's AdamW fuses multiplies and adds; this project rounds both.
TOLERANCE = 2e-5
NAMES = (
    "hf_trainer",
    "trl_sft",
    "trl_dpo",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("trl_grpo", "trl_reward", "trl_gkd", "hf_seq2seq")),
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of an example."""
    if request.param.startswith("trl"):
        pytest.importorskip("trl")
    pytest.importorskip("accelerate")
    return request.param


@pytest.fixture(scope="module")
def whole(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the example to the end, and return the folder with its results."""
    return run(EXAMPLES / f"{name}.py", tmp_path_factory.mktemp(name))


def test_adds_at_most_five_lines(name: str) -> None:
    added = [line for line in source(name).splitlines() if line.endswith(MARK)]
    assert 1 <= len(added) <= MOST_LINES, added


def test_training_matches_program_without_added_lines(name: str, whole: Path, tmp_path: Path) -> None:
    plain_program = tmp_path / f"{name}.py"
    text = "\n".join(line for line in source(name).splitlines() if not line.endswith(MARK))
    assert "mt." not in text, "a line that tiers is not marked"
    quickstart = str(EXAMPLES.parent / "quickstart")
    plain_program.write_text(re.sub(r"^QUICKSTART = .*$", f"QUICKSTART = Path({quickstart!r})", text, flags=re.M))
    plain = run(plain_program, tmp_path / "plain")
    for ours, theirs in zip(history(whole), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-6)
    weights, wanted = final_weights(whole), final_weights(plain)
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-6)


def test_ram_tier_is_smaller_than_the_training_state(name: str) -> None:
    (size,) = re.findall(r'ram="(\d+)MiB"', source(name))
    assert int(size) * MiB < STATE_BYTES, "the store's RAM tier never exceeds its size: tests/tiered"


@pytest.mark.fault
def test_training_resumes_from_the_trainer_checkpoint(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"  # stopped after step 4, and moved to another folder with an empty store
    shutil.copytree(whole / "checkpoint-4", folder / "checkpoint-4")
    run(EXAMPLES / f"{name}.py", folder, "--resume")
    assert history(folder) == history(whole)
    weights, wanted = final_weights(folder), final_weights(whole)
    assert all(torch.equal(weights[key], value) for key, value in wanted.items())


def source(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def run(program: Path, folder: Path, *more: str) -> Path:
    """Run an example in another process, and return its folder."""
    done = warm.run([sys.executable, program, "--output", folder, *more], timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def history(folder: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step, from the last checkpoint."""
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))
    steps = [(line["loss"], line["grad_norm"]) for line in state["log_history"] if "grad_norm" in line]
    assert len(steps) == 8, steps
    return steps


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")
