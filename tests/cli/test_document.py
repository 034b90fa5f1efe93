"""The reference of the commands in docs/ is that of the commands."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

CliModule = Callable[[str], ModuleType]
PAGE = Path(__file__).parents[2] / "docs/cli.md"


def sections(text: str) -> dict[str, str]:
    """Return the section of each command."""
    parts = re.split(r"^### `megatrain-tier (.+)`$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_reference_is_up_to_date(cli_module: CliModule) -> None:
    text = cli_module("document").to_markdown()
    assert PAGE.read_text(encoding="utf-8") == text, "run: python -m megatrain_tier_cli.document > docs/cli.md"


@pytest.mark.parametrize("columns", ["20", "300"])
def test_reference_depends_on_no_terminal(columns: str, cli_module: CliModule, monkeypatch: pytest.MonkeyPatch) -> None:
    text = cli_module("document").to_markdown()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli_module("document").to_markdown() == text


def test_every_command_has_its_section_with_every_option(cli_module: CliModule) -> None:
    found = sections(PAGE.read_text(encoding="utf-8"))
    names = []
    for path, command, ctx in cli_module("document").commands():
        names.append(path.removeprefix("megatrain-tier "))
        section = found[names[-1]]
        rows = re.findall(r"^\| (`-.+?) \|", section, flags=re.MULTILINE)
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert rows == [", ".join(f"`{name}`" for name in option.opts) for option in options]
        for param in command.params:
            if isinstance(param, click.Argument):
                assert param.make_metavar(ctx) in section
    assert sorted(names) == sorted(found)
    assert len(names) >= 24


def test_a_default_and_a_bound_are_shown(cli_module: CliModule) -> None:
    text = cli_module("document").to_markdown()
    assert "| `-n` | `N` >= 1 | `3` | How many rows. |" in text
    assert "| `--dtype` | `auto`, `bfloat16`, `float32` | `auto` |" in text
    assert "`[[tiers.nvme]]` paths" in text


def test_exit_codes_that_a_command_names_are_on_the_page(cli_module: CliModule) -> None:
    main = cli_module("main")
    text = PAGE.read_text(encoding="utf-8")
    codes = {value for name, value in vars(main).items() if name.startswith("EXIT_")}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)}
    for name, section in sections(text).items():
        (line,) = re.findall(r"^Exit codes: ([\d, ]+)\.", section, flags=re.MULTILINE)
        told = {int(code) for code in line.split(",")}
        first = name.split()[0]
        module_name, attribute = main._COMMANDS[first]
        module = cli_module(module_name.removeprefix("."))
        # Where a module has several commands, those of each command are in its function.
        source = module if attribute == "command" else getattr(module, attribute).callback
        used = {getattr(main, constant) for constant in names_of(source) if constant.startswith("EXIT_")}
        assert used <= told, name


def names_of(source: Any) -> set[str]:
    """Return the names that a module or a function uses."""
    return {node.id for node in ast.walk(ast.parse(inspect.getsource(source))) if isinstance(node, ast.Name)}
