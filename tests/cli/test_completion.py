"""``megatrain-tier completion`` prints valid shell scripts. Completing a word does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from processes.saved_run import ROOT, command_group, command_words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed(shell: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command_group(), ["completion", shell])
    assert result.exit_code == 0, result.output
    assert "_MEGATRAIN_TIER_COMPLETE" in result.stdout and "megatrain-tier" in result.stdout
    program = shutil.which(shell)
    if program is not None:
        script = tmp_path / "script"
        script.write_text(result.stdout)
        assert subprocess.run([program, "-n", str(script)], check=False).returncode == 0


def test_completion_rejects_an_unknown_shell() -> None:
    result = CliRunner().invoke(command_group(), ["completion", "cmd"])
    assert result.exit_code == 2 and "'cmd' is not one of" in result.stderr


def completed(words: str, number: int) -> list[str]:
    """Return the completions that the command offers a shell for word ``number``."""
    variable = "_MEGATRAIN_TIER_COMPLETE"
    environment = {**os.environ, variable: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    code = (
        "import sys; from megatrain_tier_cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    words_of_python = [command_words()[0], "-c", code.replace("megatrain_tier_cli", command_words()[2])]
    result = subprocess.run(words_of_python, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    *lines, has_torch = result.stdout.splitlines()
    assert has_torch == "False"
    return [line.partition(",")[2] for line in lines]


def test_commands_and_options_are_completed() -> None:
    assert completed("megatrain-tier co", 1) == ["completion", "config"]
    assert completed("megatrain-tier config ", 2) == ["diff", "explain", "schema", "show"]
    assert "--origin" in completed("megatrain-tier config show --o", 3)
    assert completed("megatrain-tier import --from ", 3) == ["llamafactory", "axolotl", "trl", "deepspeed", "megatrain"]
