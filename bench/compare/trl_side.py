"""TRL's side of `gsm8k.py`, run by the interpreter that has TRL: what SFTTrainer trains on, and its steps.

This program imports no module of this project. Input: a job as JSON on the command line. Output: a JSON object on
stdout.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the job from the command line, and print its result."""
    job = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # keep TRL's output apart from the answer
        answer = answer_job(job)
    print(json.dumps(answer))


def answer_job(job: dict[str, Any]) -> dict[str, Any]:
    """Read the chat rows without training, and train on the text rows.

    Returns:
        TRL's version, the token ids and labels of both files' rows, and the loss and gradient norm of each step.
    """
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job["num_threads"])
    cache = str(Path(job["folder"], "cache"))
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["template"] is not None:
        tokenizer.chat_template = job["template"]

    def trainer_of(path: str, kind: type) -> Any:
        rows = load_dataset("json", data_files=path, split="train", cache_dir=cache)
        options = {"output_dir": str(Path(job["folder"], "trl")), "report_to": "none", **job["options"]}
        return kind(model=model, args=trl.SFTConfig(**options), train_dataset=rows, processing_class=tokenizer)

    chat = [row for batch in trainer_of(job["chat"], trl.SFTTrainer).get_train_dataloader() for row in rows_of(batch)]
    seen: list[dict[str, Any]] = []
    losses: list[float] = []

    class Recorder(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        """Trainer that records its inputs, and its losses before they are rounded."""

        def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            seen.extend(rows_of(inputs))
            loss = super().training_step(model, inputs, *arguments, **options)
            losses.append(float(loss))
            return loss

    trainer = trainer_of(job["text"], Recorder)
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return {"version": trl.__version__, "chat": chat, "text": seen, "losses": losses, "grad_norms": norms}


def rows_of(batch: Any) -> list[dict[str, list[int]]]:
    """Return the token ids and labels of each row, without padding."""
    rows = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        keep = mask.bool()
        rows.append({"ids": ids[keep].tolist(), "labels": labels[keep].tolist()})
    return rows
