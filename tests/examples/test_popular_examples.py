"""The comment in each example for a popular model matches plans of the example for three machines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.machine.planned_machine import find_machine
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from tiered.units import GiB

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
MACHINES = {"card_24gb": "rtx4090-128gb", "card_80gb": "h100-512gb", "cpu_server": "cpu-server-512gb"}
#: Recipes that tests/test_examples.py merges into 01_tiny.toml and runs.
OVERLAYS = ("average", "best_model", "muon", "small_states")
#: Example -> folder in examples/models with the model's config.json.
MODELS = {
    "smollm3_3b": "SmolLM3-3B",
    "mistral_7b": "Mistral-7B-v0.3",
    "llama_3_1_8b": "Llama-3.1-8B",
    "qwen3_8b": "Qwen3-8B",
    "gemma_3_12b": "Gemma-3-12B",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_5_27b": "Qwen3.5-27B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "gemma_4_31b": "Gemma-4-31B",
    "qwen3_32b": "Qwen3-32B",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
}
#: Name of an environment variable. If it is set, the tests rewrite the comments instead of comparing them.
REWRITE = "REWRITE_EXAMPLES"


def planned_line(plan: Plan, machine: str) -> str:
    """Return the comment line about a plan for a machine: required sizes of tiers, and predicted tokens per second."""
    assert plan.estimate is not None and plan.estimate.step_s is not None
    sizes = {tier.upper(): plan.totals[tier] for tier in plan.tiers if plan.totals[tier]}
    needs = ", ".join(f"{tier} {nbytes / GiB:,.0f} GiB" for tier, nbytes in sizes.items())
    speed = plan.estimate.tokens_per_step / plan.estimate.step_s
    rounded = round(speed, 2 - len(str(int(speed))))  # the rates are too inaccurate for more digits
    return f"#   {machine + '.toml':<15} {needs}; about {rounded:,.0f} tokens/s predicted"


def test_there_is_an_example_for_each_model_and_machine() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*MODELS, *MACHINES, *OVERLAYS}


#: Examples that are planned in CI. Each of the others takes minutes.
IN_CI = ("smollm3_3b", "qwen3_8b", "gpt_oss_20b")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in MODELS]
)
def test_example_plan_matches_its_comment(name: str) -> None:
    path = FOLDER / f"{name}.toml"
    text, like = path.read_text(encoding="utf-8"), None
    lines = []
    for overlay, machine in MACHINES.items():
        assert machine in (FOLDER / f"{overlay}.toml").read_text(encoding="utf-8")
        changes = [f"model_name_or_path={ROOT / 'examples/models' / MODELS[name]}", "train_from_scratch=true"]
        config = load_config(path, (FOLDER / f"{overlay}.toml",), changes).config
        try:
            plan = plan_run(resolve(config, find_machine(machine)), like=like)
        except DoesNotFitError as error:
            needs = f"{error.tier.upper()} {error.need_bytes / GiB:,.0f} GiB at least"
            lines.append(f"#   {overlay + '.toml':<15} does not fit: {needs}")
            continue
        like = like or plan
        assert not any(each.refuses for each in plan.objections)
        assert "predicted for" in (plan.estimate.notes[-1] if plan.estimate is not None else "")
        lines.append(planned_line(plan, overlay))
    written = re.findall(r"^#   \w+\.toml +.*(?:tokens/s predicted|at least)$", text, flags=re.MULTILINE)
    if os.environ.get(REWRITE):
        head = "and were not measured:\n#\n"
        text = text.replace("\n".join(written) + "\n", "") if written else text
        path.write_text(text.replace(head, head + "\n".join(lines) + "\n"), encoding="utf-8")
        return
    assert written == lines, f"run {REWRITE}=1 pytest {Path(__file__).relative_to(ROOT)}"
