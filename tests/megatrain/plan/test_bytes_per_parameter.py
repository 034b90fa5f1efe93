"""Bytes per parameter that a bf16 step moves to and from the drive, for the plan with the minimum RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.models import write_shape
from bench.sides import run_config
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES

#: Most parameters are in the layers. The embedding and the head are small in comparison.
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
ON_NVME = {kind: ["nvme"] for kind in ("weights", "gradients", "optimizer")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


def least(model: Path, folder: Path, placement: dict[str, list[str]], **tables: Any) -> Plan:
    """Return the feasible plan with the least RAM."""

    def plan(ram: str) -> Plan:
        config = run_config(
            model,
            EXAMPLES / "quickstart" / "loomings.txt",
            (1, 1, 16),
            folder,
            model={"model_name_or_path": str(model), "train_from_scratch": True},
            tiers={"ram": {"size": ram}, "nvme": [{"path": str(folder / "nvme")}]},
            placement=placement,
            **tables,
        )
        return plan_run(resolve(config))

    with pytest.raises(DoesNotFitError) as error:
        plan("1MiB")
    return plan(f"{error.value.need_bytes}B")


@pytest.mark.parametrize(
    ("grad_dtype", "clip", "weights", "read", "written"),
    [
        ("float32", 1.0, "nvme", 18, 16),
        ("bfloat16", 1.0, "nvme", 16, 14),
        ("bfloat16", 1.0, "ram", 12, 12),
        ("float32", 0.0, "nvme", 14, 12),
        ("float32", 0.0, "ram", 10, 10),
    ],
)
def test_bytes_of_a_step(
    model: Path, tmp_path: Path, grad_dtype: str, clip: float, weights: str, read: int, written: int
) -> None:
    plan = least(
        model,
        tmp_path,
        {**ON_NVME, "weights": [weights]},
        precision={"compute_dtype": "bfloat16", "grad_dtype": grad_dtype},
        optimizer={"learning_rate": 1e-4, "max_grad_norm": clip},
    )
    count = plan.graph.num_parameters
    assert plan.traffic["nvme->ram"] / count == pytest.approx(read, rel=0.03)
    assert plan.traffic["ram->nvme"] / count == pytest.approx(written, rel=0.03)
