"""``megatrain-tier chat``: answers of an exported folder, a token at a time, and what is said about other folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.tasks import chat as chats
from megatrain.tasks.chat import ChatSettings, open_chat
from processes.saved_run import SavedRun, make_run

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLACES = [(torch.device("cpu"), 1 << 30)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A run that is done; tests only read it."""
    made = make_run(tmp_path_factory.mktemp("trained") / "w")
    result = made.run(steps=2)
    assert result.exit_code == 0, result.output
    assert f"next   megatrain-tier chat {made.out / 'final'}" in result.output
    return made


@pytest.fixture
def with_template(run: SavedRun, tmp_path: Path) -> Path:
    folder = shutil.copytree(run.out / "final", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def generated(folder: Path, text: str, count: int) -> str:
    """What transformers alone answers, the likeliest token each time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
    made = model.generate(input_ids=tokens, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True))


def test_a_text_is_continued(run: SavedRun) -> None:
    folder = run.out / "final"
    words = ("--prompt", "Call me", "--max-new-tokens", 6, "--temperature", 0, "--device", "cpu")
    result = run.call("chat", folder, *words)
    assert result.exit_code == 0, result.output
    assert result.stdout == generated(folder, "Call me", 6) + "\n"
    assert "parameters" in result.stderr and "cpu" in result.stderr
    again = run.call("chat", run.out, *words)
    assert again.exit_code == 0 and again.stdout == result.stdout, "the folder of a run is its model's"
    made = run.call("generate", run.out, "-p", "Call me", "--max-new-tokens", 2, "--temperature", 0)
    assert made.exit_code == 0, made.output
    assert result.stdout.startswith(json.loads(made.stdout)["completion"])


def test_a_conversation_comes_a_token_at_a_time(with_template: Path) -> None:
    """What was said before is known, until another conversation begins."""
    chat = open_chat(with_template, PLACES, ChatSettings(max_new_tokens=5, temperature=0, system="Be brief"))
    assert chat.has_template
    pieces: list[str] = []
    first = chat.answer("Hi", pieces.append)
    assert first == "".join(pieces) == generated(with_template, "<system>Be brief\n<user>Hi\n<assistant>", 5)
    assert len(pieces) > 1
    told = f"<system>Be brief\n<user>Hi\n<assistant>{first}\n<user>Why?\n<assistant>"
    assert chat.answer("Why?", pieces.append) == generated(with_template, told, 5)
    chat.forget()
    assert chat.answer("Hi", pieces.append) == first


def test_a_pipe_of_prompts(with_template: Path, run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter(["Hi", "", "/new", "Hi", "/exit", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    result = run.call("chat", with_template, "--max-new-tokens", 4, "--temperature", 0, "--device", "cpu")
    assert result.exit_code == 0, result.output
    answer = generated(with_template, "<user>Hi\n<assistant>", 4)
    assert result.stdout == f"{answer}\n{answer}\n"


def test_a_conversation_ends_with_the_positions(with_template: Path) -> None:
    config = json.loads((with_template / "config.json").read_text())
    (with_template / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    chat = open_chat(with_template, PLACES, ChatSettings(temperature=0))
    told = "and " * 7
    assert chat.answer(told, lambda text: None) != ""
    with pytest.raises(chats.ChatError, match="tokens, and the model 24 positions"):
        chat.answer(told, lambda text: None)


def test_an_interrupted_answer_belongs_to_the_conversation(with_template: Path) -> None:
    chat = open_chat(with_template, PLACES, ChatSettings(max_new_tokens=8, temperature=0))

    said = []

    def stop(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.answer("Hi", stop)
    told = f"<user>Hi\n<assistant>{said[0]}\n<user>And?\n<assistant>"
    assert chat.answer("And?", lambda text: None) == generated(with_template, told, 8)


def test_other_folders_are_named(run: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "gone")}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    shutil.copy(run.out / "final/model.safetensors", tmp_path / "adapter/adapter_model.safetensors")
    unfinished = shutil.copytree(run.out, tmp_path / "unfinished", ignore=shutil.ignore_patterns("final"))
    refused = run.call("generate", tmp_path / "adapter", "-p", "Hi")
    assert refused.exit_code == 2 and f"its base model is gone: {tmp_path / 'gone'}" in refused.stderr, refused.output
    for path, message in {
        unfinished: f"has no model yet. Write one with megatrain-tier export {unfinished} OUT",
        run.folder / "run.toml": "this is a config",
        tmp_path / "nowhere": "there is no such folder",
        tmp_path / "empty": "there is no model in it",
        tmp_path / "adapter": f"its base model is gone: {tmp_path / 'gone'}",
    }.items():
        if path.suffix:
            path.touch()
        result = run.call("chat", path, "--device", "cpu")
        assert result.exit_code == 2 and message in result.stderr, result.output
    monkeypatch.setattr("megatrain.machine.machine.available_ram_bytes", lambda: 1000)
    result = run.call("chat", run.out / "final", "--device", "cpu")
    assert result.exit_code == 3 and "A chat loads them whole" in result.stderr
    monkeypatch.undo()
    result = run.call("chat", run.out / "final", "--device", "cpu", "--system", "x", "--prompt", "y")
    assert result.exit_code == 2 and "no chat template" in result.stderr
