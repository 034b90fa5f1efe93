"""Wrong settings of tasks, optimizers, adapters and teachers give one message and an exit code, and write nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from processes.saved_run import SavedRun, make_run

PREFERENCES = ("task=dpo", "data.train.0.path=pairs.jsonl", "data.packing=false")
LORA = ("lora.r=4",)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a run folder with text, preferences, and two more models: one with 64 positions, one quantized (GPTQ)."""
    run = make_run(tmp_path_factory.mktemp("wrong") / "w")
    pairs = [{"prompt": f"{n}?\n", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
    (run.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    texts = [{"text": f"Call me Ishmael {n}. Some years ago, never mind how long precisely. " * 3} for n in range(9)]
    (run.folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 1024}
    positions = run.folder / "positions"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **size)).save_pretrained(positions)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (positions / name).write_bytes((run.folder / "model" / name).read_bytes())
    gptq = run.folder / "gptq"
    gptq.mkdir()
    for path in (run.folder / "model").iterdir():
        (gptq / path.name).write_bytes(path.read_bytes())
    values = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    return run


#: Mistake -> (command, settings, exit code, part of the message).
WRONG: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "an unknown loss": (
        "run",
        (*PREFERENCES, "preference.loss_type=bco"),
        2,
        '"sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo"',
    ),
    "packed preferences": ("run", (*PREFERENCES[:2], "data.packing=true"), 2, "each text needs a separate row"),
    "preferences with images": ("run", (*PREFERENCES, "model.images=frozen"), 2, "reads only text in this release"),
    "an unused reference": ("run", (*PREFERENCES, "preference.loss_type=robust"), 2, "label_smoothing = 0"),
    "rows that are no preferences": ("run", ("task=dpo", "data.packing=false"), 4, "a .txt file has no preferences"),
    "an unknown optimizer": ("run", ("optimizer.optim=adamx",), 2, '"adamw", "lion", "sgd", "adafactor", "muon"'),
    "small states of another optimizer": (
        "check",
        ("optimizer.optim=adafactor", "optimizer.state_dtype=int8"),
        0,
        "optimizer.state_dtype has no effect",
    ),
    "no teacher": ("run", ("task=distill",), 2, "Make them with megatrain-tier score TEACHER.toml"),
    "scores that are not there": ("run", ("task=distill", "distill.scores=nowhere"), 2, "there are no scores in"),
    "a teacher of random weights": ("score", ("model.train_from_scratch=true", "task=sft"), 2, "meaningless"),
    "adapters scored": ("score", (*LORA, "task=sft"), 2, "a model with separate adapters cannot be scored"),
    "an adapter that is not there": ("run", ("lora.adapter_name_or_path=nowhere",), 2, "does not exist"),
    "an unknown quantization": (
        "run",
        (*LORA, "model.model_name_or_path=gptq"),
        2,
        "quantized (gptq), which is not supported",
    ),
    "a quantized model trained whole": ("run", ("model.model_name_or_path=gptq",), 2, "use the original model"),
    "samples beyond all positions": (
        "run",
        (
            "model.model_name_or_path=positions",
            "evaluation.eval_strategy=steps",
            "data.val_size=0.2",
            "data.train.0.path=texts.jsonl",
            "evaluation.predict_with_generate=true",
        ),
        2,
        "evaluation.max_new_tokens = 64, but the longest prompt of an evaluation has 16 tokens, and the model has only "
        "64 positions. Use at most 48",
    ),
    "samples with images": (
        "run",
        ("evaluation.predict_with_generate=true", "task=sft", "model.images=frozen"),
        2,
        "supports only text",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_task_is_reported_with_its_exit_code(made: SavedRun, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    command, settings, exit_code, message = WRONG[name]
    monkeypatch.chdir(made.folder)
    config = made.write_config(out=f"out of {len(name)} {name[:3]}", steps=2)
    result = made.call(command, config, *(word for setting in settings for word in ("--set", setting)))
    said = " ".join(result.output.split())
    assert result.exit_code == exit_code and message in said, result.output
    assert "Traceback" not in result.output
    assert not (made.folder / f"out of {len(name)} {name[:3]}").exists()


def test_generate_rejects_unusable_prompts_and_models(made: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.folder)
    for words, exit_code, message in (
        (("positions", "-p", "Call me " * 40), 2, "more than the 64 positions of the model"),
        (("positions", "-p", "Call me", "--max-new-tokens", "100"), 2, "Lower max_new_tokens, or shorten the prompt"),
        (("gptq", "-p", "Call me"), 2, "quantized (gptq)"),
        ((made.write_config(), "-p", "a", "--set", "model.train_from_scratch=true"), 2, "random weights"),
        (("model", "-p", "a", "--set", "tiers.ram.size=100KiB"), 3, "does not fit"),
    ):
        result = made.call("generate", *words, "--set", "device=cpu")
        said = " ".join(result.output.split())
        assert result.exit_code == exit_code and message in said, result.output
        assert "Traceback" not in result.output
    random = made.call("score", made.write_config(), "--dry-run", "--set", "model.train_from_scratch=true")
    assert random.exit_code == 0, "a plan needs no weights: " + random.output
    words = ("--dry-run", "--json", "--set", "model.train_from_scratch=true")
    plan = json.loads(made.call("score", made.write_config(), *words).stdout)
    assert plan["fits"] and "ram" in plan["budgets"]


def test_a_damaged_row_of_preferences_is_named(made: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.folder)
    rows = tmp_path / "cut.jsonl"
    rows.write_text((made.folder / "pairs.jsonl").read_text() + '{"prompt": "5?", "chosen": "go')
    settings = ("task=dpo", f"data.train.0.path={rows}", "data.packing=false", "data.bad_rows=error")
    result = made.call("run", made.write_config(), *(word for each in settings for word in ("--set", each)))
    assert result.exit_code == 4 and "line 5" in result.output and "Traceback" not in result.output, result.output
