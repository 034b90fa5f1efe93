"""``megatrain-tier generate --interactive``: a conversation, and messages about folders without a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.tasks.prompts import PromptError, prompt_tokens
from processes.saved_run import SavedRun, command_group, make_run

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a finished run. Tests only read it."""
    made = make_run(tmp_path_factory.mktemp("trained") / "w")
    result = made.run(steps=2)
    assert result.exit_code == 0, result.output
    assert f"next   megatrain-tier generate {made.out / 'final'} --interactive" in result.output
    return made


@pytest.fixture
def with_template(run: SavedRun, tmp_path: Path) -> Path:
    folder = shutil.copytree(run.out / "final", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run_interactive(folder: Path, lines: str, *words: object) -> Result:
    options = ["generate", folder, "-i", "--max-new-tokens", 5, "--temperature", 0, "--set", "device=cpu", *words]
    return CliRunner().invoke(command_group(), list(map(str, options)), input=lines)


def generated(folder: Path, text: str, count: int = 5) -> str:
    """Return the text that transformers generates greedily, without this project."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
    made = model.generate(input_ids=tokens, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True))


def test_interactive_generation_matches_transformers(run: SavedRun) -> None:
    result = run_interactive(run.out, "Call me\n\nThe sea\n")
    assert result.exit_code == 0, result.output
    final = run.out / "final"
    assert result.stdout == f"{generated(final, 'Call me')}\n{generated(final, 'The sea')}\n"
    made = run.call("generate", run.out, "-p", "Call me", "--max-new-tokens", 2, "--temperature", 0)
    assert made.exit_code == 0 and result.stdout.startswith(json.loads(made.stdout)["completion"])


def test_chat_template_receives_previous_turns(with_template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def record(tokenizer: Any, *arguments: Any) -> torch.Tensor:
        tokens = prompt_tokens(tokenizer, *arguments)
        seen.append(tokenizer.decode(tokens[0]))
        return tokens

    monkeypatch.setattr("megatrain.extras.generation.prompt_tokens", record)
    result = run_interactive(with_template, "Hi\nWhy?\n", "--system", "Be brief")
    assert result.exit_code == 0, result.output
    asked = "<system>Be brief\n<user>Hi\n<assistant>"
    first = generated(with_template, asked)
    assert seen == [asked, f"{asked}{first}\n<user>Why?\n<assistant>"]
    assert result.stdout == f"{first}\n{generated(with_template, seen[1])}\n"


def test_wrong_use(run: SavedRun) -> None:
    refused = run_interactive(run.out, "Hi\n", "--prompt", "Hi")
    assert refused.exit_code == 2 and "--interactive reads prompts from stdin" in refused.stderr
    refused = run_interactive(run.out, "Hi\n", "--system", "Be brief")
    assert refused.exit_code == 2 and "has no chat template, so it supports no system message" in refused.stderr


def test_conversation_continues_after_a_refused_turn_on_a_terminal(
    with_template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_second(tokenizer: Any, prompt: str, *rest: Any) -> torch.Tensor:
        if prompt == "Why?":
            raise PromptError("too long")
        return prompt_tokens(tokenizer, prompt, *rest)

    monkeypatch.setattr("megatrain.extras.generation.prompt_tokens", refuse_second)
    piped = run_interactive(with_template, "Hi\nWhy?\nHi\n")
    assert piped.exit_code == 2 and "prompt 1: too long" in piped.stderr
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    shown = run_interactive(with_template, "Hi\nWhy?\nSo?\n")
    assert shown.exit_code == 0 and "error: prompt 1: too long; the conversation is unchanged" in shown.stderr
    first = generated(with_template, "<user>Hi\n<assistant>")
    assert generated(with_template, f"<user>Hi\n<assistant>{first}\n<user>So?\n<assistant>") in shown.stdout


def test_invalid_utf8_line_is_refused(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "caf\udce9")
    result = run_interactive(run.out, "")
    assert result.exit_code == 2 and "a line of stdin is not UTF-8" in result.stderr


def test_folders_without_a_usable_model_are_reported(run: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "gone")}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    shutil.copy(run.out / "final/model.safetensors", tmp_path / "adapter/adapter_model.safetensors")
    unfinished = shutil.copytree(run.out, tmp_path / "unfinished", ignore=shutil.ignore_patterns("final"))
    for path, message in {
        unfinished: f"has no model yet. Write one with megatrain-tier export {unfinished} OUT",
        tmp_path / "nowhere": "there is no such file",
        tmp_path / "empty": "contains no model",
        tmp_path / "adapter": f"its base model is gone: {tmp_path / 'gone'}",
    }.items():
        result = run_interactive(path, "Hi\n")
        assert result.exit_code == 2 and message in result.stderr, (path, result.output)
