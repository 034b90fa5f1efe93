"""Prints the planned and measured memory of a step with wide MLPs: ``python memory_of_mlp.py FOLDER ROWS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.config.schema import RunConfig
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from processes.memory_of_tiering import peak

TOKENS = 2048


def main() -> None:
    """Run three steps. Print the planned workspace and the measured memory of the last step, in bytes."""
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    run = RunConfig.model_validate(
        {
            "task": "pretrain",
            "output_dir": str(folder / "out"),
            "device": "cpu",
            "model": {"model_name_or_path": str(folder / "model"), "mlp_rows": rows},
            "data": {"max_length": TOKENS, "train": [{"path": str(folder / "model" / "config.json")}]},
            "training": {"per_device_train_batch_size": 1, "recompute": "full"},
            "tiers": {"ram": {"size": "1GiB"}},
            "checkpoint": {"save_strategy": "no", "save_on_signal": False},
        }
    )
    plan = plan_run(resolve(run))
    results: dict[str, int] = {"planned": plan.placement.workspace_bytes["ram"]}
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    with Trainer(run, plan=plan).open() as trainer:
        trainer.load()
        engine = trainer.make_engine(3)
        for number in range(3):
            with peak(results, "peak"):
                engine.step([{"input_ids": ids, "labels": ids}], step_index=number, lr=1e-3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
