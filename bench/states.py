"""Training losses with optimizer moments in fp32, bf16 and int8, and with the 8-bit AdamW of bitsandbytes and torchao.

    python bench/states.py --json
    python bench/states.py --quick

Each optimizer trains a small Llama from the same random weights on the same batches of a book's bytes. The optimizers
are torch's AdamW, `TieredAdamW` with each `state_dtype`, and those of the other libraries, if installed. All keep fp32
weights, so that only the moments differ.

Claims: the mean loss of the last tenth of the steps is within 1 % of torch's AdamW. With int8 moments, the distance of
the final weights from those of torch's AdamW is at most 1.1 times that of the other 8-bit optimizers. No row depends on
time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common import QUICKSTART, Report
from megatrain import TieredAdamW, open_store

TARGET_LOSS, TARGET_DISTANCE = 0.01, 1.1
ROWS, LENGTH = 4, 64
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

Make = Callable[[list[nn.Parameter]], Any]


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 300, quick 20)")
    parser.add_argument("--scratch", type=Path, help="accepted by every bench; nothing is written here")
    arguments = parser.parse_args()
    report = Report("states", as_json=arguments.json, tokens_per_step=ROWS * LENGTH)
    num_steps = arguments.steps or (20 if arguments.quick else 300)
    report.row("steps", num_steps, "updates")
    print_results(report, 64 if arguments.quick else 128, num_steps)
    return 0 if report.all_ok else 1


def print_results(report: Report, width: int, num_steps: int) -> None:
    """Train once with each optimizer, and print losses and the distances between trained weights."""
    tail = max(1, num_steps // 10)
    runs: dict[str, tuple[list[float], Tensor]] = {}
    for name, make in makers().items():
        if make is None:
            report.row(f"{name}.loss", None, "not installed")
            continue
        runs[name] = train(width, num_steps, make)
        losses, weights = runs[name]
        exact_losses, exact = runs["torch_fp32"]
        last = sum(losses[-tail:]) / tail
        off = abs(last / (sum(exact_losses[-tail:]) / tail) - 1)
        claimed = name.startswith("ours")
        report.row(f"{name}.losses", [losses[0], *losses[tail - 1 :: tail]], "nats")
        report.row(f"{name}.loss", last, "nats")
        report.row(
            f"{name}.loss_from_fp32",
            off,
            "relative",
            target=TARGET_LOSS if claimed else None,
            ok=off <= TARGET_LOSS if claimed else None,
        )
        report.row(f"{name}.weights_from_fp32", float((weights - exact).norm() / exact.norm()), "relative")
    ours = float((runs["ours_int8"][1] - runs["torch_fp32"][1]).norm())
    for name in ("bitsandbytes_8bit", "torchao_8bit"):
        if name in runs:
            ratio = ours / float((runs[name][1] - runs["torch_fp32"][1]).norm())
            report.row(f"ours_int8.distance/{name}", ratio, "x", target=TARGET_DISTANCE, ok=ratio <= TARGET_DISTANCE)


def makers() -> dict[str, Make | None]:
    """Return a constructor for each optimizer by name, or None for an optimizer that is not installed."""

    def ours(state_dtype: Any) -> Make:
        return lambda parameters: TieredAdamW(
            parameters, store=open_store(ram="256MiB"), state_dtype=state_dtype, **SETTINGS
        )

    found: dict[str, Make | None] = {
        "torch_fp32": lambda parameters: torch.optim.AdamW(parameters, **SETTINGS),
        **{f"ours_{dtype}": ours(dtype) for dtype in ("float32", "bfloat16", "int8")},
        "bitsandbytes_8bit": None,
        "torchao_8bit": None,
    }
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes
    except ImportError:
        pass
    else:
        found["bitsandbytes_8bit"] = lambda parameters: BitsAndBytes(parameters, **SETTINGS)
    try:
        from torchao.optim import AdamW8bit as TorchAo
    except ImportError:
        pass
    else:
        found["torchao_8bit"] = lambda parameters: TorchAo(parameters, **SETTINGS)
    return found


def train(width: int, num_steps: int, make: Make) -> tuple[list[float], Tensor]:
    """Train a new model, and return the loss of each step and the final weights as one vector."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = make(list(model.parameters()))
    text = torch.frombuffer(bytearray((QUICKSTART / "loomings.txt").read_bytes()), dtype=torch.uint8).long()
    losses = []
    for step in range(num_steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


if __name__ == "__main__":
    sys.exit(main())
