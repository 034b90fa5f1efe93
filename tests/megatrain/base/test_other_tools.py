"""The table of other tools' keys matches this project's schema, and error messages and the importer agree with it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.base.other_tools import ACCEPTED_KEYS, ALWAYS_ON, KEYS, OTHER_KEYS, TRANSLATIONS, Tool
from megatrain.config.keys import NAMES, full_keys_of_leaf, leaf_schema
from megatrain.config.unknown import advice_for_unknown
from megatrain.extras.translate.conversions import CONVERSIONS
from megatrain.extras.translate.translate import translate_file


def test_each_of_our_keys_in_the_table_exists() -> None:
    rows = [*OTHER_KEYS.values(), *(row for rows in KEYS.values() for row in rows.values())]
    ours = {".".join(part for part in row.config_key.split(".") if not part.isdecimal()) for row in rows}
    assert ours - {""} <= set(NAMES)
    for row in rows:
        assert row.conversion in {*CONVERSIONS, "with others", "lora", "preference"}
        if row.conversion in ("copy", "path", "lora", "preference"):
            assert row.config_key
        if row.conversion in ("unneeded", "lost"):
            assert row.reason
        allowed = leaf_schema(row.config_key).get("enum") if row.choices and row.config_key else None
        values = {value for value in row.choices.values() if value is not None}
        assert allowed is None or values <= {*allowed}, row.config_key


def test_accepted_keys_are_not_in_the_translations() -> None:
    assert {name for name in TRANSLATIONS if full_keys_of_leaf(name)} == {"dtype", "flash_attention"}
    assert not {*ACCEPTED_KEYS, *ALWAYS_ON} & set(TRANSLATIONS), "these are accepted"


def test_every_key_of_another_tool_gets_advice() -> None:
    for leaf, name in TRANSLATIONS.items():
        advice = advice_for_unknown((leaf,))
        assert f"That is {name.tool}'" in advice and (name.config_key or name.note) in advice


@pytest.mark.parametrize(
    ("tool", "values", "ours"),
    [
        ("trl", {"model_name_or_path": "a/b", "use_cpu": True}, {"device": "cpu"}),
        ("trl", {"model_name_or_path": "a/b", "per_gpu_train_batch_size": 3},
         {"training.per_device_train_batch_size": 3}),
        ("axolotl", {"base_model": "a/b", "use_tensorboard": True, "wandb_project": "p"},
         {"logging.report_to": ["jsonl", "tensorboard", "wandb"], "logging.project": "p"}),
    ],
)  # fmt: skip
def test_advised_keys_match_the_import(
    tmp_path: Path, tool: Tool, values: dict[str, object], ours: dict[str, object]
) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(values))
    translation = translate_file(path, tool, base=tmp_path)
    assert ours.items() <= {key: entry.value for key, entry in translation.entries.items()}.items()
    assert not translation.lost_keys


def test_table_imports_no_other_project_module() -> None:
    heavy = {"torch", "pydantic", "yaml", "megatrain.config"}
    code = f"import sys, megatrain.base.other_tools; print({heavy} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("tool", ["llamafactory", "trl", "deepspeed", "torchtitan"])
def test_coming_from_pages_list_all_keys(tool: str) -> None:
    """If this test fails, run ``python docs/keys_of_tools.py docs/coming_from`` to update the pages."""
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / f"coming_from/{tool}.md").read_text(encoding="utf-8")
    writer = runpy.run_path(str(docs / "keys_of_tools.py"))
    assert page == writer["update_page"](page, tool)
    table = page.partition(writer["BEGIN"])[2]
    keys = {**OTHER_KEYS, **KEYS.get(tool, {})}  # type: ignore[call-overload]
    told = {
        key: name for key, name in keys.items() if (tool in KEYS or name.tool == tool) and name.reason + name.config_key
    }
    told = {key: name for key, name in told.items() if key not in OTHER_KEYS or name.tool == tool}
    assert len(told) > 15
    for key, name in told.items():
        is_same = key == name.config_key.rpartition(".")[2]
        assert f"`{key}`" in table or (is_same and f"`{name.config_key}`" in table), key
