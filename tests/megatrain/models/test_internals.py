"""All uses of transformers beyond its public interface are listed in tables and exist in the installed version."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from megatrain.models import internals
from megatrain.models.internals import (
    IMAGE_INTERNALS,
    MODEL_INTERNALS,
    SCHEDULE_INTERNALS,
    TRAINER_INTERNALS,
    TransformersVersionError,
    check_internals,
)
from processes import warm
from processes.saved_run import make_run

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("megatrain", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
USED = {**MODEL_INTERNALS, **TRAINER_INTERNALS, **IMAGE_INTERNALS, **SCHEDULE_INTERNALS}


def imported(path: Path) -> Iterator[str]:
    """Yield ``module:name`` for everything that a file uses from submodules of transformers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            for alias in node.names:
                if node.module == "transformers" and alias.name in ("masking_utils", "initialization"):
                    modules[alias.asname or alias.name] = f"transformers.{alias.name}"
                elif node.module != "transformers":
                    yield f"{node.module}:{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}:{node.attr}"


def test_every_internal_in_use_is_in_the_table() -> None:
    found = {name: path for path in SOURCES for name in imported(path)}
    assert {name: path for name, path in found.items() if name not in USED} == {}
    # Private attributes of transformers classes. All other private attributes belong to torch, peft or this project.
    named = set(
        re.findall(r"\._(?:keys_to_ignore|from_config|get_dtype|init_weights|model_mapping|attn_impl)\w*", text())
    )
    assert named <= {f".{name.rpartition('.')[2]}" for name in USED}


def text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name != "internals.py")


def test_table_lists_only_internals_in_use() -> None:
    leaves = {name: re.split(r"[:.]", name)[-1] for name in USED}
    assert [name for name, leaf in leaves.items() if not re.search(rf"\b{leaf}\b", text())] == []


def test_installed_transformers_has_all_internals() -> None:
    assert internals.missing_internals(USED) == []
    check_internals(with_trainer=True)


def test_missing_internals_are_named_once_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils, modeling_utils

    run = make_run(tmp_path)
    run.write_config(out="out", steps=2)
    check_internals.cache_clear()
    monkeypatch.delattr(masking_utils, "is_tracing")
    monkeypatch.delattr(modeling_utils.PreTrainedModel, "_get_dtype_plan")
    try:
        with pytest.raises(TransformersVersionError) as caught:
            check_internals()
        result = run.call("plan", run.folder / "run.toml")
    finally:
        check_internals.cache_clear()
    said = str(caught.value)
    assert said.startswith(f"transformers {transformers.__version__} lacks ")
    assert "transformers.masking_utils.is_tracing (attention by documents)" in said
    assert "PreTrainedModel._get_dtype_plan (weights that stay in fp32)" in said
    assert re.search(r"pip install 'transformers[<>=.,\d]+'$", said)
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


def test_canary_names_missing_internals(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatrain.models.internals"]
    good = warm.run(command, cwd=ROOT, timeout=120)
    assert good.returncode == 0 and f"{len(USED)} of {len(USED)}" in good.stdout
