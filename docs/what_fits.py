"""Writes docs/what_fits.md with its JSON file, and docs/what_fits_tables.md. This takes an hour on two cores.

    python docs/what_fits.py                      write all rows
    python docs/what_fits.py --only SmolLM3-3B    print the rows of some models
    python docs/what_fits.py --rows FILE          continue an interrupted call

All rows are planned from config.json files and machine profiles. Nothing runs, and nothing is measured.
"""

# ruff: noqa: E501 - sentences of the page

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from megatrain.config import load_config  # noqa: E402
from megatrain.machine.files import (  # noqa: E402
    Bandwidth,
    Flops,
    MachineFile,
    UpdateRate,
    read_machine,
)
from megatrain.machine.planned_machine import PlannedMachine, find_machine  # noqa: E402
from megatrain.plan.costs import DeviceCosts  # noqa: E402
from megatrain.plan.flops import work_of_phases  # noqa: E402
from megatrain.plan.plan import Plan  # noqa: E402
from megatrain.plan.planner import plan_run  # noqa: E402
from megatrain.plan.run_spec import MICRO_BATCH_TOKENS, BatchSpec  # noqa: E402
from megatrain.plan.shortfall import DoesNotFitError  # noqa: E402
from megatrain.trace.counting import step_flops  # noqa: E402
from megatrain.training.resolve import resolve  # noqa: E402
from tiered.units import GiB  # noqa: E402

MODELS = ROOT / "examples" / "models"
PAGE, TABLES, JSON = (ROOT / "docs" / name for name in ("what_fits.md", "what_fits_tables.md", "what_fits.json"))
#: Shape of the planned steps: 16 rows of 4,096 tokens.
LENGTH, TOKENS = 4096, 65_536
SHOWN = (
    "SmolLM3-3B", "Mistral-7B-v0.3", "Llama-3.1-8B", "Qwen3-8B", "Gemma-3-12B", "Qwen2.5-14B", "gpt-oss-20b",
    "Qwen3.5-27B", "Qwen3-30B-A3B", "Gemma-4-31B", "Qwen3-32B", "Qwen3.5-35B-A3B", "Llama-3.1-70B", "GLM-4.5-Air",
    "gpt-oss-120b", "Mistral-Large-2411", "Qwen3-235B-A22B", "DeepSeek-V4-Flash", "Llama-3.1-405B", "GLM-5", "Kimi-K2",
)  # fmt: skip
MACHINES = (
    "laptop-32gb", "dgx-spark", "rtx4090-128gb", "rtx5090-128gb", "4xrtx4090-256gb", "rtx-pro-6000-256gb",
    "cpu-server-512gb", "gh200", "h100-512gb", "h200-1.5tb", "8xh100-2tb",
)  # fmt: skip
#: Models whose experts can be split. If a layer does not fit, the model is planned again with split experts.
MIXTURES = (
    "gpt-oss-20b", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "GLM-4.5-Air", "gpt-oss-120b", "Qwen3-235B-A22B",
    "GLM-5", "Kimi-K2",
)  # fmt: skip
#: Task of a row -> its label in the selector, and its additional config tables.
TASKS = {
    "all": ("all parameters, AdamW", ""),
    "lora": ("LoRA, rank 16, all linear layers", '[lora]\nr = 16\nlora_alpha = 32\ntarget_modules = "all-linear"\n'),
}
#: Models whose rows were planned before the planner counted the bytes of gradient sums and kept logits.
OLDER = (
    "Qwen3.5-27B", "Qwen3.5-35B-A3B", "GLM-4.5-Air", "gpt-oss-120b", "Qwen3-235B-A22B", "DeepSeek-V4-Flash",
    "Llama-3.1-405B", "GLM-5", "Kimi-K2",
)  # fmt: skip
_BILLION = 10**9
_DAY_S = 86_400
TIERS = ("gpu", "ram", "nvme")


@dataclass(frozen=True)
class Case:
    """Inputs of the plan for one row.

    Attributes:
        model: Folder in examples/models.
        machine: Name of a machine profile, or its file.
        length: Tokens per row.
        tokens: Tokens per step.
        is_split: Whether experts are split into parts.
        has_kernels: Whether norms and MLPs use liger-kernel.
        grad_dtype: Dtype of gradients between two visits.
        task: Key in `TASKS`.
    """

    model: str
    machine: str
    length: int = LENGTH
    tokens: int = TOKENS
    is_split: bool = False
    has_kernels: bool = False
    grad_dtype: str = "bfloat16"
    task: str = "all"


@dataclass(frozen=True)
class Row:
    """Planned figures of one model on one machine.

    Attributes:
        missing: Tier that is too small, with needed and available bytes; "" if the model fits.
        totals: Required bytes by tier.
        step_s: Predicted seconds per step.
        bound_by: Resource that limits the step.
        crossing_tokens: Tokens per step above which compute limits the step (T*).
        written_bytes: Bytes written to drives per step.
        endurance_bytes: Endurance of all drives together; 0 if unknown.
        is_split: Whether experts are split into parts.
        flops_ratio: Computed FLOPs per model FLOP. Recompute makes it larger than 1.
        products_share: Fraction of the step that matrix products take at the assumed rate.
    """

    model: str
    machine: str
    missing: str
    totals: dict[str, int]
    tokens: int
    step_s: float = 0.0
    bound_by: str = ""
    crossing_tokens: float | None = None
    written_bytes: int = 0
    endurance_bytes: int = 0
    is_split: bool = False
    flops_ratio: float = 0.0
    products_share: float = 0.0

    @property
    def title(self) -> str:
        """Label of the row in the table."""
        return f"{self.model}, `split_experts`" if self.is_split else self.model

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput, or 0 if the model does not fit."""
        return self.tokens / self.step_s if self.step_s else 0.0


@functools.cache
def folder_with_weights(model: str) -> Path:
    """Return a model folder with a weight file, because plans of adapters read the header of this file.

    The file has the names and sizes of all tensors, and a sparse hole instead of their values.
    """
    folder = Path(tempfile.mkdtemp()) / model
    shutil.copytree(MODELS / model, folder)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in skeleton.state_dict().items():
        if name in skeleton.all_tied_weights_keys:
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def shared_keys(case: Case, data: str) -> str:
    """Return the end of a [model] table and the tables that a planned config and the config to copy have in common."""
    return f"""use_liger_kernel = {str(case.has_kernels).lower()}
[precision]
compute_dtype = "bfloat16"
grad_dtype = "{case.grad_dtype}"
[data]
max_length = {case.length}
[[data.train]]
path = "{data}"
[training]
train_batch_tokens = {case.tokens}
{TASKS[case.task][1]}"""


def config_text(case: Case, num_drives: int, more: str = "") -> str:
    """Return the text of a config for a model of examples/models and a machine with `num_drives` drives."""
    folder = MODELS / case.model if case.task == "all" else folder_with_weights(case.model)
    drives = "".join(f'[[tiers.nvme]]\npath = "drive{number}"\n' for number in range(num_drives))
    return f"""
task = "pretrain"
output_dir = "out"
[model]
model_name_or_path = "{folder}"
train_from_scratch = {str(case.task == "all").lower()}
split_experts = {str(case.is_split).lower()}
{shared_keys(case, "text.txt")}{more}
{drives}
"""


def planned(case: Case, machine: PlannedMachine, *, more: str = "", like: Plan | None = None) -> Plan:
    """Return the plan of a model on a machine, with automatic sizes of the tiers.

    Raises:
        DoesNotFitError: The model does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(config_text(case, len(machine.drives), more))
        return plan_run(resolve(load_config(path).config, machine), like=like, with_remedies=False)


@functools.lru_cache(maxsize=1)
def traced(case: Case) -> Plan:
    """Return a plan of one micro-batch without memory limits. Other plans of the model reuse its trace."""
    more = '[tiers.ram]\nsize = "90TiB"\n[tiers.gpu]\nsize = "1TiB"'
    return planned(case, find_machine(case.machine), more=more)


def trace_of(case: Case) -> Case:
    """Return the case with one micro-batch whose trace ``case`` can reuse. A trace does not depend on the machine."""
    batch = BatchSpec(
        case.tokens // case.length, case.length, None, False, "layer", target_tokens=MICRO_BATCH_TOKENS["cuda"]
    )
    return replace(case, machine="h200-1.5tb", tokens=batch.micro_batch_rows * case.length)


class Rows:
    """Planned rows in a JSON lines file, so that an interrupted call can resume."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.is_file() else []
        known = [json.loads(line) for line in lines]
        self._known = {Case(**each["case"]): Row(**each["row"]) for each in known}

    def __contains__(self, case: Case) -> bool:
        return case in self._known

    def of(self, case: Case) -> Row:
        """Return the row of a case. Plan the case if the file does not have it."""
        if case not in self._known:
            self._known[case] = row_of(case)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": asdict(case), "row": asdict(self._known[case])}) + "\n")
        return self._known[case]


def row_of(case: Case) -> Row:
    """Plan one model on one machine, and return the row."""
    machine = find_machine(case.machine)
    try:
        plan = planned(case, machine, like=traced(trace_of(case)))
    except DoesNotFitError as error:
        missing = f"{error.tier.upper()}: {_gib(error.need_bytes)} of {_gib(error.have_bytes)}"
        return Row(case.model, case.machine, missing, {}, case.tokens, is_split=case.is_split)
    estimate = plan.estimate
    assert estimate is not None and estimate.step_s is not None, estimate
    each = {"num_positions": case.tokens, "num_real_tokens": case.tokens, "num_trained_tokens": case.tokens}
    flops = step_flops(plan.trace, recompute=plan.program.recompute, **each)
    costs = DeviceCosts.of(machine.profile, plan.device.type, "bfloat16")
    assert costs is not None, machine.name
    products = sum(work.product_flops for work in work_of_phases(plan).values())
    products_s = products * case.tokens / plan.trace.num_tokens / costs.product_flops_per_s
    return Row(
        case.model,
        case.machine,
        "",
        dict(plan.totals),
        case.tokens,
        estimate.step_s,
        estimate.bound_by or "",
        estimate.crossing_tokens,
        sum((estimate.written_bytes or {}).values()),
        sum(drive.endurance.nbytes if drive.endurance else 0 for _, drive in machine.drives),
        case.is_split,
        flops.hardware / flops.model if flops.model else 0.0,
        products_s / estimate.step_s,
    )


def _gib(nbytes: int) -> str:
    gib = nbytes / GiB
    return f"{gib / 1024:,.2f} TiB" if gib >= 1024 else f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:,.1f} GiB"


def _rounded(value: float) -> str:
    """Return a number with two significant digits, because the rates are not more accurate."""
    digits = 0 if value >= 10 else 1
    while value >= 10 ** (2 + max(0, -digits)) and digits > -9:
        digits -= 1
    return f"{round(value, digits):,.{max(0, digits)}f}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of one machine."""
    yield (
        "| model | GPU | RAM | drives | tokens/s, predicted | bound by | T* | days per 10^9 tokens | "
        "written per 10^9 tokens | share of the drives' endurance |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row.missing:
            yield f"| {row.title} | does not fit: {row.missing} | | | | | | | | |"
            continue
        sizes = [_gib(row.totals[tier]) if row.totals.get(tier) else "-" for tier in TIERS]
        crossing = _rounded(row.crossing_tokens) if row.crossing_tokens else "any" if row.crossing_tokens == 0 else "-"
        written = row.written_bytes * _BILLION / row.tokens
        share = f"{written / row.endurance_bytes:.1%}" if written and row.endurance_bytes else "-"
        wear = f"{_rounded(written / 1e12)} TB" if written else "-"
        days = _rounded(_BILLION / row.tokens_per_s / _DAY_S)
        yield (
            f"| {row.title} | {' | '.join(sizes)} | {_rounded(row.tokens_per_s)} | {row.bound_by} | {crossing} | "
            f"{days} | {wear} | {share} |"
        )


@dataclass(frozen=True)
class Published:
    """Published throughput of another system, with the settings of our prediction in the same table row.

    Attributes:
        machine: Name of a machine profile, or of a file in docs/published_machines.
        tokens: Tokens per step.
        tokens_per_s: Published throughput.
        why: Reasons for the difference between the published throughput and the prediction.
        own_tokens: Tokens per predicted step, or 0 for the same number as `tokens`.
        grad_dtype: Gradient dtype of the prediction.
    """

    system: str
    model: str
    machine: str
    length: int
    tokens: int
    tokens_per_s: float
    source: str
    why: str
    own_tokens: int = 0
    grad_dtype: str = "bfloat16"

    @property
    def case(self) -> Case:
        """Case of the prediction."""
        file = ROOT / "docs" / "published_machines" / f"{self.machine}.toml"
        name = str(file.relative_to(ROOT)) if file.is_file() else self.machine
        tokens = self.own_tokens or self.tokens
        return Case(self.model, name, self.length, tokens, has_kernels=True, grad_dtype=self.grad_dtype)


_MEGATRAIN = (
    "it computes 10 FLOPs per parameter and token instead of 6 (two additional forwards), loads weights three times, and "
    "updates in bf16 without a master, after the step. The prediction overlaps all transfers that can be hidden"
)
_HBM = (
    "its whole state, in bf16, lives in GPU memory, and little is recomputed (6 FLOPs per parameter and token). The prediction "
    "has fp32 masters and moments in RAM, weights and fp32 gradient sums in GPU memory, and one micro-batch at a time"
)
_OFFLOADED = (
    "the prediction streams everything; LLMQ keeps weights and activations on the card, and state in RAM, in bf16"
)
_PARTLY = f"{_OFFLOADED}; it recomputes only the FFN"
_FP8 = f"{_OFFLOADED}; listed as bf16, but its command has products in fp8"
_LAZY = "PCIe of 12 GB/s; its schedule keeps some activations to recompute less"
PUBLISHED = (
    Published("MegaTrain", "Qwen2.5-7B", "gh200", 1024, 158 * 1024, 6015, "arXiv 2604.05091, long context", _MEGATRAIN),
    Published("MegaTrain", "Qwen2.5-14B", "gh200", 1024, 96 * 1024, 2980, "arXiv 2604.05091: 264 TFLOPS", _MEGATRAIN),
    Published("MegaTrain", "Qwen2.5-7B", "h100-512gb", 1024, 148 * 1024, 5950, "README: 272 TFLOPS", _MEGATRAIN),
    Published("LLMQ", "Qwen2.5-7B", "h100-512gb", 2048, 524_288, 14_000, "README, bf16", _HBM, 0, "float32"),
    Published("LLMQ", "Qwen2.5-7B", "rtx-pro-6000-256gb", 2048, 262_144, 8_000, "README, bf16", _HBM, 0, "float32"),
    Published("LLMQ", "Qwen2.5-14B", "h100-512gb", 2048, 524_288, 6_320, "benchmark page, bf16", _PARTLY),
    Published("LLMQ", "Qwen2.5-14B", "h100-512gb", 2048, 524_288, 6_320, "benchmark page, bf16", _PARTLY, 131_072),
    Published("LLMQ", "Qwen2.5-14B", "rtx-pro-6000-256gb", 2048, 524_288, 4_000, "README, bf16", _OFFLOADED, 0, "float32"),
    Published("LLMQ", "Qwen2.5-7B", "rtx4090-128gb", 2048, 524_288, 1_900, "earlier README, bf16", _OFFLOADED),
    Published("LLMQ", "Qwen2.5-7B", "rtx4090-128gb", 2048, 524_288, 2_780, "benchmark page, command with e4m3", _FP8),
    Published("LLMQ", "Qwen2.5-14B", "rtx4090-128gb", 2048, 524_288, 1_348, "benchmark page, bf16", _OFFLOADED),
    Published("LLMQ", "Qwen2.5-14B", "rtx4090-128gb", 2048, 524_288, 1_348, "benchmark page, bf16", _OFFLOADED, 131_072),
    Published("LLMQ", "Qwen2.5-7B", "rtx5090-128gb", 2048, 524_288, 3_100, "README, bf16", _OFFLOADED),
    Published(
        "RoundPipe", "Llama-3.1-8B", "rtx4090-128gb", 2048, 131_072, 3_142, "README",
        "fp16 with sums in fp16, which this card computes at twice the rate, and an optimizer that is one step stale",
    ),
    Published("LazyTrain", "Qwen2.5-3B", "h800-12gbs", 1024, 72 * 1024, 9801, "arXiv 2608.11919", _LAZY),
    Published("LazyTrain", "Qwen2.5-7B", "h800-12gbs", 1024, 72 * 1024, 4758, "arXiv 2608.11919", _LAZY),
    Published("MegaTrain", "Qwen2.5-7B", "h800-12gbs", 1024, 72 * 1024, 3842, "in LazyTrain's table", _MEGATRAIN),
    Published("LazyTrain", "Qwen2.5-14B", "h800-12gbs", 1024, 72 * 1024, 2528, "arXiv 2608.11919", _LAZY),
    Published("MegaTrain", "Qwen2.5-14B", "h800-12gbs", 1024, 72 * 1024, 2047, "in LazyTrain's table", _MEGATRAIN),
)  # fmt: skip


def published_row(published: Published, rows: Rows) -> str:
    """Return one line of the table that compares published figures with predictions."""
    row = rows.of(published.case)
    ours = f"does not fit: {row.missing}" if row.missing else _rounded(row.tokens_per_s)
    ratio = "-" if row.missing else f"{row.tokens_per_s / published.tokens_per_s:.2f}"
    title = read_machine(published.case.machine)[1].title.partition(",")[0]
    of_products = f"{row.products_share:.0%}" if row.products_share else "-"
    again = f"{row.flops_ratio:.2f}" if row.flops_ratio else "-"
    tokens = f"{published.tokens:,}" + (f", predicted for {published.own_tokens:,}" if published.own_tokens else "")
    return (
        f"| {published.system} | {published.model} | {title} | {tokens} | "
        f"{published.tokens_per_s:,.0f} ({published.source}) | {ours} | {ratio} | {row.bound_by or '-'} | "
        f"{of_products} | {again} | {published.why} |"
    )


HEAD = f"""# What fits where

The planner calculated every row. **Nothing on this page was measured**, and no GPU has run the code. The sizes were planned without the machines: the
memory of kernels was counted on a CPU, and [some rows are older estimates](#your-model-and-machine). The speeds are predictions from the rates of each
machine. To plan for your own machine, run `megatrain-tier plan run.toml`. To plan for another machine, add its name:
`megatrain-tier plan run.toml --machine rtx4090-128gb`.

## The largest model of each machine

All rows train all parameters with AdamW in bf16. Masters and moments are in fp32 (12 bytes per parameter), gradients in bf16. Clipping
uses the exact norm of all gradients. A step has {TOKENS:,} tokens in rows of {LENGTH:,}.

*Largest in memory* is the largest model whose state fits without drives. The last three columns show the memory that the
largest model with drives needs. Training with such a model wears the drives out; the [selector](#your-model-and-machine) shows how fast.

"""

SELECT = """## Your model and machine

<div id="what-fits">The selector needs JavaScript and the built site (`make docs`). Another page lists the same rows as tables.</div>

`python docs/what_fits.py` makes the rows from the `config.json` of each model (`examples/models`) and the data of each machine
(`megatrain/machine/machines`, with sources). The last rows were made on @DATE@. The page [all planned rows](what_fits_tables.md) shows the same rows
as tables, with the assumptions and with published measurements of other systems.

- The planner chooses the sizes of the tiers. It uses all drives of the machine and keeps space for two checkpoints.
- Each row uses one GPU, even on a machine with several GPUs; `plan --processes` plans for all of them.
- The [recipes](../examples/README.md#recipes) list other speeds for some models, because they use at most one drive and, on a GPU, liger-kernel; these
  rows use all drives and no liger-kernel.
- If a layer of a mixture of experts is too large for GPU memory or RAM, the row uses [experts in parts](config.md#model)
  (`model.split_experts = true`).
@OLDER@- **T\\*** is the number of tokens per step above which compute limits the step. If a row names `nvme`, `ram->gpu` or
  `optimizer` as its limit, a step with more tokens trains more tokens per second and wears drives less.

"""

TABLES_HEAD = f"""# All planned rows

`python docs/what_fits.py` writes this page. [What fits where](what_fits.md) has the largest model of each machine, and a selector. **This project measured
nothing on this page**: the sizes were planned without the machines, and the speed of a run may differ from the prediction.

The work of a step is [counted](sizing.md#accuracy-of-the-prediction) as matrix products, attention, bytes of all other operators, and kernel
launches by the host, which run concurrently with a GPU. **Assumed for every machine**: attention at half the rate of products, other operators
at the rate of updates in memory, and 40 us of host time per launch, 42 us with a GPU. If `host` limits a row, its
micro-batches have too few tokens to keep the GPU busy. The assumed rates of each machine are listed below its heading. They are estimates from data sheets or
similar machines, because no measurement was published. The prediction assumes that compute, transfers and updates overlap wherever possible. The speeds are not upper bounds:
on some of these machines, other systems measured higher speeds (last table).

The rows train all parameters with AdamW in bf16, with fp32 masters and moments (12 bytes per parameter), bf16 gradients and
exact clipping. A step has {TOKENS:,} tokens in rows of {LENGTH:,}. The rows use all drives of the machine and keep two checkpoints. The planner
chooses the sizes of the tiers. **T\\*** is the number of tokens per step above which compute limits the step. Each row uses one GPU, even on a machine with several
GPUs; `plan --processes` plans for all of them. If a layer of a mixture of experts is too large for a GPU or for RAM, the
next row has [experts in parts](config.md#model), `model.split_experts = true`.

Below {TOKENS:,} tokens per step, transfers limit most rows; above T\\* they limit no row. If `nvme`, `ram->gpu` or `optimizer` limits a row, more tokens
per step are the cheapest way to speed it up; they also wear drives less.
"""

BESIDE = """## Predicted and published

The table compares published figures of other systems with the planner's prediction for the same machine and tokens per step. The
ratio divides a prediction for this project by a measurement of another system. It does not show which system is faster.
If row lengths or batch sizes were not published, the number of tokens is an assumption. Predictions use
`model.use_liger_kernel = true`, because the other systems have custom kernels for norms and MLPs. **Products** is the share of the
predicted step that matrix products alone take at the assumed rate. The rest is attention and the memory traffic of other
operators: rotary embeddings, residual sums, copies, bias sums. **FLOPs** is the ratio of computed FLOPs to the FLOPs that a forward
and a backward need. Above 1.00, some results are recomputed because there is no memory to keep them.

On an H100, the speed that LLMQ published equals the prediction; on an RTX PRO 6000 and an RTX 4090, it is up to a tenth higher. On these two cards, two things limit
the prediction: the assumed rate of products, and operators that only LLMQ's CUDA kernels fuse. LLMQ keeps gradient sums in bf16 on the
card. This project keeps them in fp32, so less memory is left for saved results, and the column FLOPs rises above 1.00. A step with fewer
tokens leaves more memory for results.

| system | model | machine | tokens per step | published tokens/s | predicted tokens/s | ratio | predicted limit | products | FLOPs | what explains it |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def assumed_rates(file: MachineFile) -> str:
    """Return the line that lists the keys of a machine's estimated rates, or "" if no rate is an estimate."""
    rates = [place for place, figure in file.figures() if isinstance(figure, Bandwidth | Flops | UpdateRate)]
    assumed = [f"`{place}`" for place, figure in file.figures() if place in rates and figure.estimate]
    return f"Assumed, {len(assumed)} of {len(rates)} rates: {', '.join(assumed)}.\n\n" if assumed else ""


def cases_of(model: str, name: str, rows: Rows, task: str = "all", *, known_only: bool) -> Iterator[Case]:
    """Yield the case of a model on a machine, and a case with split experts if a mixture does not fit."""
    case = Case(model, name, task=task)
    yield case
    split = replace(case, is_split=True)
    if model in MIXTURES and rows.of(case).missing.startswith(("GPU", "RAM")) and (not known_only or split in rows):
        yield split


def shown_of(models: Sequence[str], machines: Sequence[str], rows: Rows, task: str, *, known_only: bool) -> list[str]:
    """Return the models to show for a task. With ``known_only``, these are the models with rows for all machines."""
    return [
        model for model in models if not known_only or all(Case(model, name, task=task) in rows for name in machines)
    ]


def found_rows(
    models: Sequence[str], machines: Sequence[str], rows: Rows, *, known_only: bool
) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows by (task, model, machine). If any of the rows for a key fits, the last one does."""
    found = {}
    for task in TASKS:
        for model in shown_of(models, machines, rows, task, known_only=known_only):
            for name in machines:
                cases = cases_of(model, name, rows, task, known_only=known_only)
                found[task, model, name] = [rows.of(case) for case in cases]
                print(task, *found[task, model, name], sep="\n", file=sys.stderr, flush=True)
    return found


def largest(found: dict[tuple[str, str, str], list[Row]], models: Sequence[str], machines: Sequence[str]) -> str:
    """Return the table of the largest models that fit each machine; `models` are in ascending order of size."""
    lines = [
        "| machine | largest in memory | tokens/s | largest with drives | tokens/s | GPU | RAM | drives |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in machines:
        fitting = [found["all", model, name][-1] for model in models if ("all", model, name) in found]
        fitting = [row for row in fitting if not row.missing]
        resident = [row for row in fitting if not row.totals.get("nvme")]
        cells = [read_machine(name)[1].title]
        cells += [f"{resident[-1].model}", _rounded(resident[-1].tokens_per_s)] if resident else ["-", "-"]
        if fitting:
            sizes = [_gib(fitting[-1].totals[tier]) if fitting[-1].totals.get(tier) else "-" for tier in TIERS]
            cells += [fitting[-1].title, _rounded(fitting[-1].tokens_per_s), *sizes]
        else:
            cells += ["-"] * 5
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def selector(found: dict[tuple[str, str, str], list[Row]], machines: Sequence[str]) -> dict[str, Any]:
    """Return the data of the page's selector (docs/assets/what_fits.js)."""
    entries = []
    for (task, model, name), its_rows in found.items():
        row = its_rows[-1]
        written = row.written_bytes * _BILLION / row.tokens
        entry: dict[str, Any] = {"task": task, "model": model, "machine": name}
        if row.is_split:
            entry["split"] = True
        if row.missing:
            entries.append(entry | {"missing": row.missing})
            continue
        entry |= {tier: _gib(row.totals[tier]) for tier in (*TIERS, "folder") if row.totals.get(tier)}
        entry |= {"tokens_per_s": _rounded(row.tokens_per_s), "bound_by": row.bound_by}
        entry["days"] = _rounded(_BILLION / row.tokens_per_s / _DAY_S)
        if row.crossing_tokens:
            entry["crossing_tokens"] = _rounded(row.crossing_tokens)
        if written:
            entry["written"] = f"{_rounded(written / 1e12)} TB"
            if row.endurance_bytes:
                entry["life"] = f"{written / row.endurance_bytes:.1%}"
        entries.append(entry)
    places = {name: (read_machine(name)[1].title, len(find_machine(name).drives)) for name in machines}
    return {
        "tasks": {task: title for task, (title, _) in TASKS.items()},
        "machines": {name: {"title": title, "drives": drives} for name, (title, drives) in places.items()},
        "configs": {task: config_to_copy(task) for task in TASKS},
        "rows": entries,
    }


def config_to_copy(task: str) -> str:
    """Return the config of a task. The selector replaces MODEL, SPLIT and DRIVES.

    All keys except paths and ``train_from_scratch`` equal the keys of the planned config (``config_text``).
    """
    return f"""task       = "pretrain"          # or "sft": chats, loss on the answers only
output_dir = "outputs/MODEL"
[model]
model_name_or_path = "models/MODEL"   # a Hugging Face folder, or an id of the hub
SPLIT{shared_keys(Case("MODEL", "", task=task), "text/*.txt")}DRIVES"""


def json_lines(values: dict[str, Any]) -> str:
    """Return JSON with one line for each row, for readable diffs."""
    rows = ",\n".join(json.dumps(row) for row in values["rows"])
    rest = json.dumps({key: value for key, value in values.items() if key != "rows"}, indent=1)
    return f'{rest[:-2]},\n "rows": [\n{rows}\n]\n}}\n'


def tables_page(
    found: dict[tuple[str, str, str], list[Row]],
    models: Sequence[str],
    machines: Sequence[str],
    rows: Rows,
    *,
    known_only: bool,
) -> str:
    """Return the page with all rows.

    Args:
        known_only: Whether to omit models and published figures without planned rows, and to name them on the page.
    """
    shown = shown_of(models, machines, rows, "all", known_only=known_only)
    beside = [each for each in PUBLISHED if not known_only or each.case in rows]
    left_out = [*(model for model in models if model not in shown)]
    left_out += [f"{each.system} {each.model} on {each.machine}" for each in PUBLISHED if each not in beside]
    missing = f"\nNot on this page, because it was not planned again: {', '.join(left_out)}.\n" if left_out else ""
    parts = [TABLES_HEAD, f"\n{older()} The last table is also from that planner.\n" if OLDER else "", missing]
    for name in machines:
        file = read_machine(name)[1]
        note = f"{file.note[:1].upper()}{file.note[1:]}.\n\n" if file.note else ""
        parts.append(f"\n## {file.title}\n\n`--machine {name}`\n\n{assumed_rates(file)}{note}")
        parts.append("\n".join(table([row for model in shown for row in found["all", model, name]])) + "\n")
    # Rows with the same trace are adjacent, so that each model is traced once.
    by_trace = sorted(beside, key=lambda each: repr(trace_of(each.case)))
    lines = {each: published_row(each, rows) for each in by_trace}
    parts.append("\n" + BESIDE + "\n".join(lines[each] for each in beside) + "\n")
    return "".join(parts)


def older() -> str:
    """Return the sentence about rows from an earlier planner."""
    return (
        "An earlier planner, which did not count the bytes of gradient sums and of stored logits, made the rows that train "
        f"all parameters of these models: {', '.join(OLDER)}. These rows are estimates. When eight other models "
        "were planned again, no size changed, and speeds changed by less than a tenth."
    )


def page(found: dict[tuple[str, str, str], list[Row]], models: Sequence[str], machines: Sequence[str]) -> str:
    """Return the page with the largest models, the selector, and modules that are not language models."""
    sys.path.insert(0, str(ROOT / "docs"))
    from what_fits_modules import section

    today = datetime.date.today().isoformat()
    select = SELECT.replace("@DATE@", today).replace("@OLDER@", f"- {older()}\n" if OLDER else "")
    return HEAD + largest(found, models, machines) + select + section() + "\n"


def main() -> None:
    """Write the pages, or print the tables of some models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="MODEL", action="append", help="print only these models")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="store rows here, and reuse existing rows")
    parser.add_argument("--known", action="store_true", help="use only the rows in --rows; the page lists omitted rows")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    rows = Rows(arguments.rows)
    if arguments.only:
        for model in arguments.only:
            print("\n".join(table([rows.of(Case(model, name)) for name in MACHINES])))
        return
    found = found_rows(SHOWN, MACHINES, rows, known_only=arguments.known)
    TABLES.write_text(tables_page(found, SHOWN, MACHINES, rows, known_only=arguments.known), encoding="utf-8")
    JSON.write_text(json_lines(selector(found, MACHINES)), encoding="utf-8")
    PAGE.write_text(page(found, SHOWN, MACHINES), encoding="utf-8")


if __name__ == "__main__":
    main()
