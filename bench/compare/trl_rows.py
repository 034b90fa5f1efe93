"""Comparison with TRL on the same rows: which tokens are trained on, and the loss of each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, Report
from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.base.observer import RunObserver, StepMetrics
from megatrain.config.schema import RunConfig
from megatrain.data import sources
from megatrain.data.encoding import load_tokenizer
from megatrain.data.formats import Conversation
from megatrain.data.row_kind import CHATS
from megatrain.data.token_dataset import TokenDataset
from megatrain.training.trainer import Trainer

ROWS_PER_STEP = 2
#: TRL computes log-probabilities in chunks with a separate head. With a vocabulary of 49,152, its loss differs by 5e-6
#: from Hugging Face's loss on the same batch. Our first loss must be closer to it. Later, Adam amplifies differences.
LOSS_TOLERANCE, NORM_TOLERANCE, PLAIN_TOLERANCE = 1e-4, 1e-4, 1e-6
_TIMEOUT_S = 3600.0

Rows = Sequence[dict[str, list[int]]]


class _Recorder(RunObserver):
    """Observer that records the loss and gradient norm of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.loss)
        self.grad_norms.append(metrics.grad_norm)


def compare_with_trl(report: Report, config: RunConfig, python: str, folder: Path, num_steps: int) -> None:
    """Print which tokens of the same rows each side trains on, and how much the losses and gradient norms differ.

    Args:
        config: Config with the model, the data and the optimizer. Both sides train on two rows per step, unpacked.
        python: Interpreter that has TRL.
        folder: Writable folder.
    """
    chat, text = write_rows(config, folder, num_steps * ROWS_PER_STEP)
    text_config = unpacked(config, text, num_steps, folder / "trl_ours")
    ours = _Recorder()
    trainer = Trainer(text_config, observer=ours)
    trainer.train()
    batches = [batch.micro_batches for batch in islice(trainer.make_loader(), num_steps)]
    in_order = [row for batch in batches for row in rows_of(batch)]
    # TRL reads rows in file order, so write them in our training order.
    order = find_order(documents_of(trainer.make_loader().dataset), in_order)
    chat_documents = documents_of(Trainer(unpacked(config, chat, 1, folder), observer=ours).make_loader().dataset)
    for path in (chat, text):
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(lines[number] + "\n" for number in order), encoding="utf-8")
    theirs = run_trl(python, text_config, chat, text, folder, num_steps)
    report.row("trl.version", theirs["version"], "version")
    print_first_loss(report, text_config, batches[0], ours.losses[0], theirs["losses"][0])
    print_masks(report, "text", in_order, theirs["text"], text_config)
    print_masks(report, "chat", [chat_documents[number] for number in order], theirs["chat"], text_config)
    for name, mine, other, most in (
        ("loss", ours.losses, theirs["losses"], LOSS_TOLERANCE),
        ("grad_norm", ours.grad_norms, theirs["grad_norms"], NORM_TOLERANCE),
    ):
        found = [abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True)]
        report.row(f"trl.{name}.of_each_step", other, "")
        report.row(f"trl.{name}.first_relative_difference", found[0], "of TRL")
        report.row(f"trl.{name}.max_relative_difference", max(found), "of TRL", target=most, ok=max(found) <= most)


def write_rows(config: RunConfig, folder: Path, count: int) -> tuple[Path, Path]:
    """Write the first ``count`` rows as prompts and completions: one file has messages, the other rendered text."""
    table, source = config.model, config.data.train[0]
    tokenizer = load_tokenizer(table.model_name_or_path, chat_template=table.chat_template)
    source = source.model_copy(update={"max_samples": count})
    rows = sources.read_source(source, sources.source_files(source.path, source.subset, source.split), CHATS)
    chat, text = folder / "chat.jsonl", folder / "text.jsonl"
    with chat.open("w", encoding="utf-8") as chat_file, text.open("w", encoding="utf-8") as text_file:
        for row in rows:
            assert isinstance(row, Conversation), row
            *prompt, answer = [dict(message) for message in row.messages]
            rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            chat_file.write(json.dumps({"prompt": prompt, "completion": [answer]}) + "\n")
            text_file.write(json.dumps({"prompt": rendered, "completion": answer["content"]}) + "\n")
    return chat, text


def unpacked(config: RunConfig, path: Path, num_steps: int, output_dir: Path) -> RunConfig:
    """Return a config that trains on a file, two rows per step. Like transformers, do not decay biases and norms."""
    values = config.model_dump()
    values["output_dir"], values["run_name"] = output_dir, output_dir.name
    values["data"] |= {"packing": False, "eval": (), "train": ({"path": str(path), "format": "prompt_completion"},)}
    values["training"] |= {"per_device_train_batch_size": ROWS_PER_STEP, "max_steps": num_steps}
    values["training"] |= {"gradient_accumulation_steps": 1}
    values["evaluation"] = {}
    values["optimizer"]["weight_decay_exclude"] = ("*bias*", "*norm*")
    values["tiers"]["ram"]["size"] = "1GiB"  # the example's size is for a single row
    return RunConfig.model_validate(values)


def run_trl(python: str, config: RunConfig, chat: Path, text: Path, folder: Path, num_steps: int) -> dict[str, Any]:
    """Run `trl_side.py` in the other interpreter, and return its answer."""
    table = config.optimizer
    tokenizer = load_tokenizer(config.model.model_name_or_path, chat_template=config.model.chat_template)
    job = {
        "model": config.model.model_name_or_path,
        "template": tokenizer.chat_template,
        "chat": str(chat),
        "text": str(text),
        "folder": str(folder),
        "num_threads": torch.get_num_threads(),
        "options": {
            "max_length": config.data.max_length,
            "per_device_train_batch_size": ROWS_PER_STEP,
            "max_steps": num_steps,
            "train_sampling_strategy": "sequential",
            "learning_rate": table.learning_rate,
            "lr_scheduler_type": table.lr_scheduler_type,
            "warmup_steps": table.warmup_steps,
            "weight_decay": table.weight_decay,
            "adam_beta1": table.adam_beta1,
            "adam_beta2": table.adam_beta2,
            "adam_epsilon": table.adam_epsilon,
            "max_grad_norm": table.max_grad_norm,
            "bf16": False,
            "use_cpu": True,
            "save_strategy": "no",
            "logging_steps": 1,
        },
    }
    command = [python, "-P", "-c", "from bench.compare import trl_side; trl_side.main()", json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"TRL ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows_of(micro_batches: Sequence[Any]) -> Iterator[dict[str, list[int]]]:
    """Yield the token ids and labels of each row, without padding."""
    for batch in micro_batches:
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            keep = mask.bool()
            yield {"ids": ids[keep].tolist(), "labels": labels[keep].tolist()}


def documents_of(data: TokenDataset) -> list[dict[str, list[int]]]:
    """Return the token ids and labels of each document, in file order."""
    rows = []
    for first, end in zip(data.starts[:-1], data.starts[1:], strict=True):
        ids, trained = data.tokens[first:end].tolist(), data.trained[first:end].tolist()
        labels = [token if wanted else IGNORED_LABEL for token, wanted in zip(ids, trained, strict=True)]
        rows.append({"ids": ids, "labels": labels})
    return rows


def find_order(documents: Rows, trained: Rows) -> list[int]:
    """Return, for each trained row, the index of the document with the same token ids."""
    numbers = {tuple(row["ids"]): number for number, row in enumerate(documents)}
    return [numbers[tuple(row["ids"])] for row in trained]


def print_first_loss(report: Report, config: RunConfig, micro_batches: Any, ours: float, theirs: float) -> None:
    """Print the loss of the first step, and Hugging Face's loss on the same batch."""
    from transformers import AutoModelForCausalLM

    (batch,) = micro_batches
    source = config.model.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        plain = model(**batch, use_cache=False).loss.item()
    for name, loss in (("ours", ours), ("plain", plain), ("trl", theirs)):
        report.row(f"trl.first_loss.{name}", loss, "loss")
    difference = abs(ours - plain) / plain
    ok = difference <= PLAIN_TOLERANCE
    report.row("trl.first_loss.ours_from_plain", difference, "of plain", target=PLAIN_TOLERANCE, ok=ok)


def print_masks(report: Report, kind: str, ours: Rows, theirs: Rows, config: RunConfig) -> None:
    """Print how many rows have different token ids, and which tokens only one side trains on."""
    tokenizer = load_tokenizer(config.model.model_name_or_path)
    only: dict[str, list[str]] = {"ours": [], "trl": []}
    num_other_ids = 0
    for mine, other in zip(ours, theirs, strict=True):
        shared = min(len(mine["ids"]), len(other["ids"]))
        num_other_ids += mine["ids"][:shared] != other["ids"][:shared]
        for name, row, against in (("ours", mine, other), ("trl", other, mine)):
            labels = [*against["labels"], *[IGNORED_LABEL] * len(row["labels"])]
            found = [
                label for label, seen in zip(row["labels"], labels, strict=False) if label not in (IGNORED_LABEL, seen)
            ]
            only[name] += [tokenizer.decode([token]) for token in found]
    report.row(f"trl.{kind}.rows", len(theirs), "rows")
    report.row(f"trl.{kind}.rows_with_other_tokens", num_other_ids, "rows", target=0, ok=num_other_ids == 0)
    trained = sum(label != IGNORED_LABEL for row in ours for label in row["labels"])
    report.row(f"trl.{kind}.trained_by_ours", trained, "tokens")
    for name, tokens in only.items():
        is_claimed = kind == "text" or name == "ours"
        claim: dict[str, Any] = {"target": 0, "ok": not tokens} if is_claimed else {}
        report.row(f"trl.{kind}.trained_only_by_{name}", len(tokens), "tokens", **claim)
        if tokens:
            report.row(f"trl.{kind}.what_only_{name}_trains", json.dumps(sorted(set(tokens))), "tokens")
