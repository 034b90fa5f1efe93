"""The project's headline plans, for published models. Any CPU computes each plan in little time and memory.

A plan with ``waits_for`` must be refused as long as that feature is missing. Once the feature exists, the test fails
until ``waits_for`` is removed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "examples" / "models"
#: Well above the 30 s that an idle machine needs at most, because other programs may be running.
PATIENCE_S = 280
MOST_BYTES = 2 * 2**30

PROGRAM = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from megatrain.config import load_config
from megatrain.training.resolve import resolve
from megatrain.machine.planned_machine import find_machine
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.planner import plan_run
config = load_config(Path(sys.argv[2]), (), sys.argv[4:]).config
try:
    plan = plan_run(resolve(config, find_machine(sys.argv[3])))
except DoesNotFitError as error:
    print(json.dumps({"refused": error.tier, "need": error.need_bytes, "have": error.have_bytes}))
    sys.exit()
found = plan.estimate.to_json()
found |= {"totals": dict(plan.totals), "budgets": dict(plan.budgets), "traffic": dict(plan.traffic)}
found |= {"parameters": plan.graph.num_parameters, "refusals": [str(o) for o in plan.objections if o.refuses]}
found["most_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Headline:
    """Claim of the project, in the form of a plan.

    Attributes:
        parameters: Number of parameters of the published model.
        least_tokens_per_s: Lower bound of the predicted rate, with assumed rates for unmeasured hardware.
        most_crossing_tokens: Upper bound of T*, in tokens per step. 0 if compute must always be the limit.
        waits_for: Missing feature without which the plan does not fit, or "".
    """

    name: str
    model: str
    machine: str
    num_drives: int
    parameters: int
    tokens: int
    least_tokens_per_s: float = 0.0
    most_crossing_tokens: float = 0.0
    length: int = 4096
    changes: tuple[str, ...] = ()
    waits_for: str = ""

    def found(self, folder: Path) -> dict[str, Any]:
        """Return the plan's figures. A child process makes the plan, so that its peak memory is the plan's."""
        drives = "".join(f'[[tiers.nvme]]\npath = "drive{number}"\n' for number in range(self.num_drives))
        (folder / "run.toml").write_text(
            f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{MODELS / self.model}"\n'
            f"train_from_scratch = true\n[data]\nmax_length = {self.length}\n"
            '[[data.train]]\npath = "text.txt"\n[precision]\ngrad_dtype = "bfloat16"\n'
            f"[training]\ntrain_batch_tokens = {self.tokens}\n{drives}"
        )
        words = [sys.executable, "-c", PROGRAM, str(ROOT), str(folder / "run.toml"), self.machine, *self.changes]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))


H200 = "h200-1.5tb"
#: For claims about all RAM of a machine, without a reserve for other programs.
ALL_RAM = "tiers.ram.size=1500GiB"
IN_CI = (
    Headline(
        "120b_dense_in_ram", "Mistral-Large-2411", H200, 0, 122_610_069_504, 65_536, 600, 60_000,
        changes=(ALL_RAM, "optimizer.max_grad_norm=0", "optimizer.nonfinite=ignore"),  # 12 bytes per parameter
    ),
)  # fmt: skip
#: Slow plans, to run after changes of the planner. Each takes half a minute.
SLOW = (
    Headline("120b_moe_in_ram", "gpt-oss-120b", H200, 0, 116_829_156_672, 65_536, 2400, 800_000, changes=(ALL_RAM,)),
    Headline("14b_beside_zero3", "Qwen2.5-14B", "gh200", 0, 14_770_033_664, 96 * 1024, 1614, 50_000, length=1024),
    Headline(
        "120b_dense_in_ram_with_exact_clipping", "Mistral-Large-2411", H200, 0, 122_610_069_504, 65_536,
        changes=(ALL_RAM,), waits_for="nothing: all gradients until the norm is known are more than this machine has",
    ),
    Headline("120b_dense_with_drives", "Mistral-Large-2411", H200, 8, 122_610_069_504, 65_536, 600, 100_000),
    Headline("405b_with_8_drives", "Llama-3.1-405B", H200, 8, 405_853_388_800, 131_072, 180, 150_000),
    Headline("70b_on_a_4090", "Llama-3.1-70B", "rtx4090-128gb", 2, 70_553_706_496, 131_072, 200, 150_000),
    Headline(
        "235b_moe_on_a_4090", "Qwen3-235B-A22B", "rtx4090-128gb", 2, 235_093_634_560, 131_072, 80, 3_000_000,
        changes=("checkpoint.save_strategy=no", "checkpoint.save_on_signal=false", "model.split_experts=true"),
    ),
    Headline(
        "7b_at_512k", "Qwen2.5-7B", H200, 0, 7_615_616_512, 524_288, 300, 50_000, length=524_288,
        changes=("model.mlp_rows=16384",),
    ),
)  # fmt: skip


@pytest.mark.timeout(PATIENCE_S + 20)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name) for row in IN_CI]
    + [pytest.param(row, id=row.name, marks=pytest.mark.slow) for row in SLOW],
)
def test_headline_row_matches_its_plan(row: Headline, tmp_path: Path) -> None:
    found = row.found(tmp_path)
    if row.waits_for:
        assert "refused" in found, f"it fits now: take `waits_for` ({row.waits_for}) out of this row"
        return
    assert "refused" not in found, found
    assert found["parameters"] == row.parameters
    assert found["refusals"] == []
    assert all(found["totals"][tier] <= capacity for tier, capacity in found["budgets"].items())
    assert found["predicted_tokens_per_s"] >= row.least_tokens_per_s
    assert found["crossing_tokens_per_step"] is not None
    assert found["crossing_tokens_per_step"] <= row.most_crossing_tokens
    assert "predicted for" in found["notes"][-1]
    assert found["most_bytes"] < MOST_BYTES
    assert ("nvme" in found["budgets"]) == (row.num_drives > 0)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 20)
def test_adapters_of_671b_on_one_4090(tmp_path: Path) -> None:
    """The weights stay in the model's folder, and RAM holds only some of a layer's experts at a time."""
    row = Headline(
        "671b_lora_on_a_4090", "DeepSeek-V3-671B", "rtx4090-128gb", 1, 671_123_410_944, 8192, length=2048,
        changes=(
            *("model.train_from_scratch=false", "model.split_experts=true", "tiers.ram.size=2660MiB", "lora.r=16"),
            'lora.target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]',
        ),
    )  # fmt: skip
    found = row.found(tmp_path)
    assert "refused" not in found, found
    assert found["parameters"] == row.parameters  # including the adapters
    assert found["traffic"]["folder->ram"] >= 2 * found["totals"]["folder"] * 0.9  # for the forward and the backward
    assert found["predicted_tokens_per_s"] > 0 and found["most_bytes"] < MOST_BYTES
    assert all(found["totals"][tier] <= capacity for tier, capacity in found["budgets"].items())


@pytest.fixture(scope="module")
def what_fits() -> ModuleType:
    """Import and return the program that writes docs/what_fits.md and docs/what_fits_tables.md."""
    spec = importlib.util.spec_from_file_location("what_fits", ROOT / "docs" / "what_fits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["what_fits"] = module
    spec.loader.exec_module(module)
    return module


def test_fit_page_marks_assumed_rates(what_fits: ModuleType) -> None:
    """The page marks exactly the rates that are estimates in the machine's file."""
    page = what_fits.TABLES.read_text(encoding="utf-8")
    assert page.startswith(what_fits.TABLES_HEAD) and what_fits.PAGE.read_text(encoding="utf-8").startswith(
        what_fits.HEAD
    )
    for name in what_fits.MACHINES:
        tables = tomllib.loads(
            (ROOT / "megatrain" / "machine" / "machines" / f"{name}.toml").read_text(encoding="utf-8")
        )
        section = page.split(f"`--machine {name}`\n")[1].split("\n## ")[0]
        (line,) = [line for line in section.splitlines() if line.startswith("Assumed, ")] or [""]
        drives = {f"drives.{number}": drive for number, drive in enumerate(tables.get("drives", ()))}
        rates = {
            f"{place}.{key}": "estimate" in figure
            for place, table in {**{each: tables.get(each, {}) for each in ("gpu", "cpu", "ram")}, **drives}.items()
            for key, figure in table.items()
            if isinstance(figure, dict) and str(figure["is"]).endswith("/s")
        }
        assert set(re.findall("`(.+?)`", line)) == {place for place, is_estimate in rates.items() if is_estimate}
        assert not line or f" {sum(rates.values())} of {len(rates)} rates" in line


@pytest.mark.timeout(PATIENCE_S)
def test_fit_page_matches_the_planner(what_fits: ModuleType) -> None:
    """Only some rows of the smallest model are checked. `python docs/what_fits.py` writes the whole page again."""
    page = what_fits.TABLES.read_text(encoding="utf-8")
    for name in ("rtx4090-128gb", "laptop-32gb"):
        (line,) = list(what_fits.table([what_fits.row_of(what_fits.Case("SmolLM3-3B", name))]))[2:]
        section = page.split(f"`--machine {name}`")[1].split("\n## ")[0]
        assert line in section.splitlines(), "run python docs/what_fits.py, which takes half an hour"
    assert set(what_fits.SHOWN) <= {folder.name for folder in MODELS.iterdir()}
    for heading in ("Predicted and published", *(what_fits.read_machine(n)[1].title for n in what_fits.MACHINES)):
        assert f"\n## {heading}\n" in page
    left_out = page.partition("Not on this page yet")[2].partition("\n")[0]
    for model in what_fits.SHOWN:
        assert page.count(f"\n| {model} | ") == len(what_fits.MACHINES) or model in left_out
    for case in what_fits.PUBLISHED:
        is_there = f"| {case.system} | {case.model} |" in page and case.why in page
        assert is_there or f"{case.system} {case.model} on {case.machine}" in left_out
