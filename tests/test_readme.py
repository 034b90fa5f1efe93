"""The README is correct: its Python runs, its config is accepted, its commands and files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config import load_config
from processes import warm

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", code_blocks("python"))
def test_python_runs(source: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(source, encoding="utf-8")
    for start in (subprocess.run, warm.run):  # the second run finds the files of the first
        done = start(
            [sys.executable, "-W", "error", program.name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", done.stderr


def test_readme_has_one_python_program() -> None:
    assert len(code_blocks("python")) == 1


@pytest.mark.parametrize("text", code_blocks("toml"))
def test_config_is_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "run.toml").config
    assert config.tiers.ram.size.nbytes == 700 * 2**20
    assert config.output_dir == tmp_path / "outputs" / "mine"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE))
    assert named == {"run", "test"}
    assert named <= targets


def test_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [name for name in links if not (ROOT / name).exists()] == []
