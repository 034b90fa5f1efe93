"""docs/cli.md contains the help of every command."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

CliModule = Callable[[str], ModuleType]
PAGE = Path(__file__).parents[2] / "docs/cli.md"


@pytest.fixture
def writer() -> dict[str, Any]:
    """Return the globals of the script that writes the page, by name."""
    pytest.importorskip("megatrain_tier_cli", reason="the project is not installed")
    return runpy.run_path(str(PAGE.with_name("commands.py")))


def sections(text: str) -> dict[str, str]:
    """Return the sections of the page, by command."""
    parts = re.split(r"^## `megatrain-tier (.+)`$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_reference_is_up_to_date(writer: dict[str, Any]) -> None:
    text = writer["to_markdown"]()
    assert PAGE.read_text(encoding="utf-8") == text, "run: python docs/commands.py > docs/cli.md"


@pytest.mark.parametrize("columns", ["20", "300"])
def test_reference_depends_on_no_terminal(
    columns: str, writer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = writer["to_markdown"]()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    assert writer["to_markdown"]() == text


def test_every_command_has_its_section_with_every_option(writer: dict[str, Any]) -> None:
    found = sections(PAGE.read_text(encoding="utf-8"))
    names = []
    for path, command, _ in writer["commands"]():
        names.append(path.removeprefix("megatrain-tier "))
        section = found[names[-1]]
        assert f"Usage: {path} [OPTIONS]" in section and f"```sh\n{path} " in section
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert all(re.search(rf"^  .*{name}\b", section, re.MULTILINE) for option in options for name in option.opts)
    assert sorted(names) == sorted(found)
    assert len(names) >= 24


def test_a_default_and_a_bound_are_shown(writer: dict[str, Any]) -> None:
    text = " ".join(writer["to_markdown"]().split())
    assert "Number of rows. [default: 3; x>=1]" in text
    assert "--dtype [auto|bfloat16|float32]" in text


def test_all_exit_codes_are_on_the_page(cli_module: CliModule) -> None:
    text = PAGE.read_text(encoding="utf-8")
    codes = {value for name, value in vars(cli_module("main")).items() if name.startswith("EXIT_")}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)}
