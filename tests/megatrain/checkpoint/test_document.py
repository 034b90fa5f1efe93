"""The format in docs/checkpoints.md is correct: its code opens the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from megatrain.checkpoint.state import RunState
from megatrain.training.export import export_checkpoint
from processes.saved_run import NVME, ON_NVME, make_run

TEXT = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tables", [{}, {"placement": ON_NVME, "more": NVME}], ids=["ram", "nvme"])
def test_documented_code_reads_a_checkpoint_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, str], dtype: str
) -> None:
    run = make_run(tmp_path / "w")
    result = run.run(steps=2, dtype=dtype, **tables)
    assert result.exit_code == 0, result.output
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(run.folder)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/checkpoints.md", "exec"), names)
    assert names["body"]["meta"]["step"] == 2
    exported = load_file(export_checkpoint(run.out, tmp_path / "out", dtype=torch.float32) / "model.safetensors")
    first = exported["model.layers.0.self_attn.q_proj.weight"].numpy().reshape(-1)
    assert numpy.array_equal(names["masters"][: first.size], first)
    assert names["masters"].size % 1024 == 0


def test_document_describes_every_state_field() -> None:
    described = set(re.findall(r"`(\w+)`", TEXT))
    assert not {field.name for field in dataclasses.fields(RunState)} - described
