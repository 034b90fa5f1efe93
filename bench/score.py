"""Scores from a model ten times as large as its RAM tier, compared with plain transformers in memory.

    python bench/score.py --json
    python bench/score.py --quick

Both sides compute the log-probability of each token and of the 16 likeliest tokens, in the same micro-batches of one
row. Our side streams the weights once per pass; the other side has them in memory. The sides alternate pass by pass.

Claims: the scores are equal up to fp32 rounding, moved bytes equal planned bytes, and the RAM tier is at most a tenth
of the weights. The reported tokens per second depend on the machine and its drive.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.config.schema import RunConfig
from megatrain.data.scores import TeacherScores
from megatrain.extras.scoring import Scorer, plan_scoring
from megatrain.plan.shortfall import DoesNotFitError

TOP_K = 16
TARGET_RATIO, TARGET_DIFFERENCE = 10.0, 1e-3


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 100 MB; else 1 GB")
    parser.add_argument("--tokens", type=step_shape, help="micro-batches x rows x tokens of a pass")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each side")
    parser.add_argument("--scratch", type=Path, help="folder for the model and the scores")
    arguments = parser.parse_args()
    shape = arguments.tokens or ((2, 1, 128) if arguments.quick else (16, 1, 512))
    report = Report("score", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
    try:
        hidden, layers = (256, 40) if arguments.quick else (768, 40)
        write_llama(folder / "model", hidden=hidden, layers=layers, vocabulary=1024)
        compare(report, folder, shape, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    return 0 if report.all_ok else 1


def config_of(folder: Path, shape: tuple[int, int, int], number: int, ram: str) -> RunConfig:
    """Write the text of one round, and return a config for one pass over its rows, without packing."""
    num_micro_batches, rows, length = shape
    text = (QUICKSTART / "moby_dick.txt").read_text(encoding="utf-8")
    own = folder / f"rows{number}.txt"
    size = 6 * num_micro_batches * rows * length  # number of characters, which exceeds the number of tokens
    own.write_text(text[number * size : (number + 1) * size], encoding="utf-8")
    return RunConfig.model_validate(
        {
            "task": "pretrain",
            "output_dir": str(folder / f"out{number}"),
            "device": "cpu",
            "model": {"model_name_or_path": str(folder / "model"), "attn_implementation": "sdpa"},
            "precision": {"compute_dtype": "float32"},
            "data": {"max_length": length, "train": [{"path": str(own)}], "cache_dir": "none", "packing": False},
            "training": {"per_device_train_batch_size": rows, "gradient_accumulation_steps": num_micro_batches},
            "score": {"top_k": TOP_K},
            "tiers": {"ram": {"size": ram}},
        }
    )


def compare(report: Report, folder: Path, shape: tuple[int, int, int], rounds: int) -> None:
    """Score the rows of each round on both sides, and print the results."""
    try:
        plan_scoring(config_of(folder, shape, 0, "1MiB"))
        ram = "1MiB"
    except DoesNotFitError as error:
        ram = f"{error.need_bytes}B"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ours, plain, differences = [], [], []
    is_as_planned, ratio = True, 0.0
    for number in range(rounds):
        scorer = Scorer(config_of(folder, shape, number, ram))
        plan = scorer.plan
        weights = sum(block.nbytes for block in plan.program.blocks.values())
        ratio = weights / plan.budgets["ram"]
        summary = scorer.run()
        is_as_planned &= summary.link_bytes == summary.planned_bytes
        ours.append(summary.num_tokens / summary.seconds)
        teacher = TeacherScores(summary.folder, TOP_K, plan.graph.config.get_text_config().vocab_size)
        num_tokens, seconds, difference = plain_pass(model, scorer, teacher)
        plain.append(num_tokens / seconds)
        differences.append(difference)
    report.row("weights", weights, "bytes")
    report.row("ram_tier", plan.budgets["ram"], "bytes")
    report.row("weights_to_ram", ratio, "times", target=TARGET_RATIO, ok=ratio >= TARGET_RATIO)
    report.row("planned_is_moved", str(is_as_planned), "", target=1, ok=is_as_planned)
    largest = max(differences)
    report.row("log_prob_difference", largest, "nats", target=TARGET_DIFFERENCE, ok=largest <= TARGET_DIFFERENCE)
    report.row("ours", median(ours), "tokens/s", timing=True)
    report.row("ours.all", ours, "tokens/s", timing=True)
    report.row("plain", median(plain), "tokens/s", timing=True)
    report.row("plain.all", plain, "tokens/s", timing=True)
    report.row("ratio", median(a / b for a, b in zip(ours, plain, strict=True)), "of plain", timing=True)


def plain_pass(model: torch.nn.Module, scorer: Scorer, teacher: TeacherScores) -> tuple[int, float, float]:
    """Score with plain transformers. Return the number of tokens, the seconds, and the largest difference from ours."""
    order, collator = scorer.make_rows()
    num_tokens, seconds, difference = 0, 0.0, 0.0
    size = scorer.plan.run.batch.micro_batch_rows
    for first in range(0, order.num_rows, size):
        group = order.rows(first, min(first + size, order.num_rows))
        batch = collator.micro_batch(order.dataset, group)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        start_s = time.perf_counter()
        with torch.no_grad():
            log_probs = model(**inputs, use_cache=False).logits.float().log_softmax(-1)
            top = log_probs.topk(TOP_K).values
        seconds += time.perf_counter() - start_s
        num_tokens += batch["input_ids"].numel()
        dataset = order.dataset
        lengths = dataset.lengths()
        keys = [[(dataset.document_key(document), int(lengths[document])) for document in row] for row in group]
        found = teacher.batch_scores(keys, batch["input_ids"].shape[1])[TEACHER_KEYS[1]]
        asked = (batch["labels"][:, 1:] != -100).unsqueeze(-1)
        difference = max(difference, float(((found - top)[:, :-1] * asked).abs().max()))
    return num_tokens, seconds, difference


if __name__ == "__main__":
    sys.exit(main())
