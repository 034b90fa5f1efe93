"""`examples/07_gsm8k.toml` with streaming, compared with a plain Hugging Face loop on the same batches.

    python bench/gsm8k.py --json --data FOLDER          # gsm8k_train.jsonl and gsm8k_test.jsonl; 10 minutes
    python bench/gsm8k.py                               # the data from the hub
    python bench/gsm8k.py --quick                       # the 0.82 M model of the repository and made-up sums
    python bench/gsm8k.py --data FOLDER --trl PYTHON    # TRL too, in the environment of another interpreter

The example runs with less RAM than its state needs. The plain side is Hugging Face's model in RAM with torch's AdamW.
Claims: both sides have the same losses, gradient norms and trained weights, within tolerances. Both sides also have the
same loss on the test answers, before training and afterwards. The plain side computes this loss row by row, without
packing. With `--trl`, SFTTrainer trains on the same tokens and has the same losses. No row depends on time.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from torch import Tensor

from bench.common import QUICKSTART, ROOT, Report
from bench.compare.processes import import_failure
from bench.compare.trl_rows import compare_with_trl
from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.base.observer import EvaluationMetrics, RunObserver, RunSummary, StepMetrics
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import StepBatch
from megatrain.extras.verify import make_plain_optimizer
from megatrain.tasks.evaluation import load_evaluation_sets
from megatrain.training.resolve import resolve_evaluation
from megatrain.training.trainer import Trainer

#: Both sides compute in fp32, but in different orders (the loss in pieces, the norm in fp64, packed rows). Adam's first
#: steps divide by gradients near zero, which amplifies the differences in later steps.
LOSS_TOLERANCE, NORM_TOLERANCE, EVAL_TOLERANCE = 1e-5, 1e-4, 1e-5
#: Maximum norm of the difference between both sides' weights, divided by the norm of the weights' change in training.
WEIGHT_TOLERANCE = 1e-3

QUICK = """
[model]
model_name_or_path = "{model}"
chat_template = "{template}"
[data]
max_length = 64
[optimizer]
learning_rate = 1e-3
[tiers.ram]
size = "12MiB"
[[tiers.nvme]]
path = "{scratch}/nvme"
size = "1GiB"
"""

OVER = """
output_dir = "{scratch}/out"
[data]
cache_dir = "none"
[evaluation]
eval_strategy = "steps"
eval_steps = {num_steps}
eval_max_samples = {eval_samples}
[training]
max_steps = {num_steps}
[checkpoint]
save_strategy = "no"
save_on_signal = false
min_free_disk = "0MiB"
"""

SOURCE = """
[[data.{split}]]
path = "{path}"
format = "alpaca"
columns = {{ instruction = "question", output = "answer" }}
"""

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass
class Run(RunObserver):
    """Measurements of one side. ``tests`` contains the loss on the test answers, by step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_trained: list[int] = field(default_factory=list)
    link_bytes: list[Mapping[str, int]] = field(default_factory=list)
    tests: dict[int, float] = field(default_factory=dict)
    num_test_tokens: int = 0
    peak_rss_bytes: int = 0
    summary: RunSummary | None = None

    # -- a RunObserver ---------------------------------------------------------------------------------------------

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.loss)
        self.grad_norms.append(metrics.grad_norm)
        self.num_tokens.append(metrics.num_real_tokens)
        self.num_trained.append(metrics.num_trained_tokens)
        self.link_bytes.append(metrics.link_bytes)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self.tests[metrics.step] = metrics.loss
        self.num_test_tokens = metrics.num_tokens

    def on_end(self, summary: RunSummary) -> None:
        self.summary = summary


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        data = arguments.data
        if arguments.quick:
            data = make_data(folder / "data")
        config = make_config(folder, arguments, data)
        report = Report("gsm8k", as_json=arguments.json, tokens_per_step=config.rows_per_step * config.data.max_length)
        if not arguments.only_trl:
            measure(report, config)
        if arguments.trl is not None:
            reason = import_failure(arguments.trl, "trl")
            if reason:
                report.row("trl.skipped", reason, "reason")
            else:
                compare_with_trl(report, config, arguments.trl, folder, arguments.trl_steps)
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    """Parse and return the arguments on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="the 0.82 M model of the repository, and made-up sums")
    parser.add_argument("--data", type=Path, help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl; default: the hub")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--eval-samples", type=int, default=50, help="test questions")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that has TRL; default: TRL is left out")
    parser.add_argument("--only-trl", action="store_true", help="leave the plain loop out")
    parser.add_argument("--trl-steps", type=int, default=15, help="optimizer steps for the comparison with TRL")
    parser.add_argument("--scratch", type=Path, help="folder of the run; default: a temporary folder")
    return parser.parse_args()


def make_config(folder: Path, arguments: argparse.Namespace, data: Path | None) -> RunConfig:
    """Return the example's config with this bench's paths and number of steps, and without checkpoints."""
    over = folder / "over.toml"
    text = OVER.format(scratch=folder, num_steps=arguments.steps, eval_samples=arguments.eval_samples)
    if data is not None:
        splits = {split: (data / f"gsm8k_{name}.jsonl").resolve() for split, name in _SPLITS.items()}
        text += "".join(SOURCE.format(split=split, path=path) for split, path in splits.items())
    over.write_text(text, encoding="utf-8")
    files = [over]
    if arguments.quick:
        quick = folder / "quick.toml"
        template = folder / "chat.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        quick.write_text(
            QUICK.format(model=make_small_model(folder / "model"), template=template, scratch=folder), encoding="utf-8"
        )
        files.append(quick)
    else:
        files.append(folder / "drive.toml")
        files[-1].write_text(f'[[tiers.nvme]]\npath = "{folder}/nvme"\nsize = "8GiB"\n', encoding="utf-8")
    return load_config(ROOT / "examples" / "07_gsm8k.toml", files).config


_SPLITS = {"train": "train", "eval": "test"}


def make_small_model(folder: Path) -> Path:
    """Write the repository's model with random weights, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """Write addition problems and their answers in GSM8K's format, and return the folder."""
    folder.mkdir()
    for number, name in enumerate(_SPLITS.values()):
        rows = [
            {"question": f"What is {a} and {b}?", "answer": f"{a} and {b} is {a + b}.\n#### {a + b}"}
            for a, b in ((13 * i % 89 + number, 7 * i % 53) for i in range(60))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"gsm8k_{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def measure(report: Report, config: RunConfig) -> None:
    """Train and evaluate on both sides, and print the rows."""
    ours = Run()
    forget_peak_memory()
    trainer = Trainer(config, observer=ours)
    trainer.train()
    ours.peak_rss_bytes = peak_memory()
    num_steps = len(ours.losses)
    loader = trainer.make_loader()
    batches = list(islice(loader, num_steps))
    forget_peak_memory()
    plain, before, weights = run_plain(trainer, batches)
    plain.peak_rss_bytes = peak_memory()
    report.row("parameters", trainer.plan.graph.num_parameters, "parameters")
    report.row("steps", num_steps, "steps")
    report.row("tokens", sum(ours.num_tokens), "tokens, without padding")
    report.row("trained_tokens", sum(ours.num_trained), "tokens")
    print_differences(report, ours, plain)
    print_weights(report, ours, before, weights)
    print_tests(report, ours, plain, num_steps)
    print_memory(report, trainer, ours, plain)


def print_differences(report: Report, ours: Run, plain: Run) -> None:
    """Print both sides' losses and gradient norms, and the largest difference between the sides."""
    report.row("ours.losses", ours.losses, "loss of each step")
    report.row("plain.losses", plain.losses, "loss of each step")
    for name, mine, theirs, most in (
        ("loss", ours.losses, plain.losses, LOSS_TOLERANCE),
        ("grad_norm", ours.grad_norms, plain.grad_norms, NORM_TOLERANCE),
    ):
        found = [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]
        report.row(f"{name}.first_relative_difference", found[0], "of plain")
        report.row(f"{name}.max_relative_difference", max(found), "of plain", target=most, ok=max(found) <= most)


def print_weights(report: Report, ours: Run, before: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Print the distance between both sides' trained weights, and how far training moved the weights."""
    assert ours.summary is not None and ours.summary.export_dir is not None
    apart = moved = largest = largest_move = 0.0
    with safe_open(ours.summary.export_dir / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for name, theirs in weights.items():
            if name not in names:  # of tied weights, only one name is written
                continue
            difference = (file.get_tensor(name) - theirs).double()
            way = (theirs - before[name]).double()
            apart, moved = apart + float(difference.square().sum()), moved + float(way.square().sum())
            largest = max(largest, float(difference.abs().max()))
            largest_move = max(largest_move, float(way.abs().max()))
    share = math.sqrt(apart / moved)
    report.row("weights.max_difference", largest, "")
    report.row("weights.max_move", largest_move, "")
    ok = share <= WEIGHT_TOLERANCE
    report.row("weights.difference_over_move", share, "of lengths", target=WEIGHT_TOLERANCE, ok=ok)


def print_tests(report: Report, ours: Run, plain: Run, num_steps: int) -> None:
    """Print the loss on the test answers before and after training."""
    report.row("test.tokens", ours.num_test_tokens, "tokens with a label")
    same = ours.num_test_tokens == plain.num_test_tokens
    report.row("test.tokens_more_than_plain", ours.num_test_tokens - plain.num_test_tokens, "tokens", target=0, ok=same)
    for name, step in (("before", 0), ("after", num_steps)):
        mine, theirs = ours.tests[step], plain.tests[step]
        difference = abs(mine - theirs) / theirs
        report.row(f"test.{name}.ours", mine, "loss")
        report.row(f"test.{name}.plain", theirs, "loss")
        ok = difference <= EVAL_TOLERANCE
        report.row(f"test.{name}.relative_difference", difference, "of plain", target=EVAL_TOLERANCE, ok=ok)
    change = ours.tests[num_steps] - ours.tests[0]
    report.row("test.change", change, "loss", target=0, ok=change < 0)


def print_memory(report: Report, trainer: Trainer, ours: Run, plain: Run) -> None:
    """Print the peak bytes in each tier, the bytes moved per step, and each side's peak process memory."""
    assert ours.summary is not None
    for tier, nbytes in ours.summary.tier_peak_bytes.items():
        most = trainer.plan.budgets[tier]
        report.row(f"ours.{tier}.peak", nbytes, "bytes", target=most, ok=nbytes <= most)
    for link in trainer.plan.traffic:
        moved = statistics.median(each.get(link, 0) for each in ours.link_bytes)
        report.row(f"ours.{link}.per_step", moved, "bytes")
    report.row("ours.peak_rss", ours.peak_rss_bytes, "bytes")
    report.row("plain.peak_rss", plain.peak_rss_bytes, "bytes")


def run_plain(trainer: Trainer, batches: Sequence[StepBatch]) -> tuple[Run, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Train Hugging Face's model in RAM with torch's AdamW. Return measurements, and the weights before and after."""
    from transformers import AutoModelForCausalLM, get_scheduler

    config, run = trainer.config, Run()
    table = config.optimizer
    source = config.model.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = make_plain_optimizer(model.named_parameters(), trainer.run.optimizer)
    warmup = int(table.warmup_steps if table.warmup_steps >= 1 else math.ceil(table.warmup_steps * len(batches)))
    schedule = get_scheduler(table.lr_scheduler_type, optimizer, warmup, len(batches))
    rows = test_rows(trainer)
    run.tests[0], run.num_test_tokens = test_loss(model, rows)
    model.train()
    for batch in batches:
        total = 0.0
        for micro_batch in batch.micro_batches:
            loss = model(**micro_batch, num_items_in_batch=batch.num_trained_tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        run.losses.append(total)
        run.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), table.max_grad_norm)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    run.tests[len(batches)], _ = test_loss(model, rows)
    return run, before, model.state_dict()


def test_rows(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Return each test row as a batch of one row, without padding."""
    config = trainer.config
    tokenizer = load_tokenizer(config.model.model_name_or_path, chat_template=config.model.chat_template)
    (each,) = load_evaluation_sets(resolve_evaluation(config), trainer.plan, tokenizer, lambda text: None)
    data = each.loader.dataset
    rows = []
    for first, end in zip(data.starts[:-1], data.starts[1:], strict=True):
        tokens = torch.from_numpy(data.tokens[first:end].astype("int64"))
        trained = torch.from_numpy(data.trained[first:end].copy())
        rows.append({"input_ids": tokens[None], "labels": torch.where(trained, tokens, IGNORED_LABEL)[None]})
    return rows


@torch.no_grad()
def test_loss(model: Any, rows: Sequence[Mapping[str, Tensor]]) -> tuple[float, int]:
    """Return the mean loss over all trained tokens of the rows, and the number of trained tokens."""
    model.eval()
    counts = [int((row["labels"][:, 1:] != IGNORED_LABEL).sum()) for row in rows]
    sums = [model(**row, use_cache=False).loss.item() * count for row, count in zip(rows, counts, strict=True)]
    return math.fsum(sums) / sum(counts), sum(counts)


def forget_peak_memory() -> None:
    """Reset the peak that :func:`peak_memory` returns, if the system supports this."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes."""
    read: Callable[[], str] = Path("/proc/self/status").read_text
    try:
        line = next(line for line in read().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
