"""``megatrain-tier check`` reports all mistakes at once and writes nothing.

Its exit code is the first of 2, 3, 4 and 1 that applies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from megatrain.machine import file_systems
from processes.saved_run import NVME, ON_NVME, ROOT, SavedRun
from tiered import MiB, format_size


@pytest.fixture
def run(untrained: SavedRun, tmp_path: Path) -> SavedRun:
    return untrained.copy(tmp_path / "w")


def check(run: SavedRun, *words: object, **config: Any) -> Result:
    """Run `check` and assert that it wrote nothing."""
    path = run.write_config(**config)
    before = sorted(run.folder.rglob("*"))
    result = run.call("check", path, *words)
    assert sorted(run.folder.rglob("*")) == before
    assert "Traceback" not in result.output and "\x1b" not in result.output
    return result


def findings(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Return the findings by subject."""
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["subject"], []).append(finding)
    return found


def test_check_of_a_valid_run_finds_no_problems(run: SavedRun) -> None:
    result = check(run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [
        "config", "model", "tokenizer", "data", "plan", "disk", "steps", "checkpoints", "weights",
    ]  # fmt: skip
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
    assert "all 20 tensors exist" in lines[1]
    assert lines[-1] == "no problems found"


def test_all_findings_about_a_run_with_a_drive(run: SavedRun) -> None:
    (run.folder / "held.txt").write_text((run.folder / "data.txt").read_text()[:1000])
    path, drive = run.folder / "run.toml", run.folder / "drive"
    tables = {"placement": ON_NVME, "more": f'{NVME}[[data.eval]]\npath = "held.txt"\n'}
    found = json.loads(check(run, "--json", "--set", "learning_rate=0.5", **tables).stdout)
    place, usage = file_systems.file_system_of(run.folder), re.compile(r", [^,]+, [^,]+ of it free$")
    lines = [
        (each["subject"], each["severity"], usage.sub("", each["text"]), each["kind"]) for each in found["findings"]
    ]
    plan = json.loads(run.call("plan", path, "--json").stdout)
    sizes = [
        f"{tier} {format_size(plan['totals'][tier])} of {format_size(plan['budgets'][tier])}" for tier in plan["totals"]
    ]
    stay = next(text for subject, _, text, _ in lines if subject == "checkpoints").partition(" of each checkpoint")[0]
    assert found["exit_code"] == 0 and lines == [
        ("config", "ok", f"{path}: no mistakes", None),
        ("model", "ok", "LlamaForCausalLM, 0.1 M parameters: all 20 tensors exist, 497.25 KiB in 1 file", None),
        (
            "model", "warning",
            'optimizer.learning_rate = 0.5 is implausible for optim = "adamw": training usually diverges above 0.01. '
            "Use a smaller value",
            None,
        ),
        ("tokenizer", "ok", "1,024 tokens, without a chat template", None),
        (
            "data", "ok",
            "1 row (a text file is one row), 31 documents (pieces of texts, or answers), 974 tokens (96.8% trained)",
            None,
        ),
        ("plan", "ok", f"fits: {', '.join(sizes)}", None),
        (
            "eval data", "ok",
            "held: 1 row (a text file is one row), 13 documents (pieces of texts, or answers), 395 tokens (96.7% "
            "trained)",
            None,
        ),
        ("drive", "ok", f"tiers.nvme.0: {drive}: {place}", None),
        ("disk", "ok", "enough free for the run and 3 checkpoints", None),
        ("steps", "ok", "6 steps, 0.375 epochs of 16 steps each", None),
        (
            "checkpoints", "note",
            f"{stay} of each checkpoint stay in '{drive}' (now 0 B): deleting that folder destroys them. "
            "checkpoint.save_copy = true keeps whole copies in output_dir",
            None,
        ),
        ("checkpoints", "ok", "no checkpoint: the run starts from the model", None),
        ("weights", "ok", "all are finite numbers", None),
    ]  # fmt: skip


def test_notes_about_evaluation_rows(run: SavedRun) -> None:
    """Evaluation rows give the same notes as training rows, each prefixed with the name of the evaluation set."""
    rows = [{"prompt": f"hello {n}", "completion": "" if n % 9 == 0 else "end <|endoftext|> here"} for n in range(20)]
    (run.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {"more": '[[data.eval]]\npath = "held.jsonl"\n[evaluation]\neval_strategy = "steps"\neval_steps = 1\n'}
    words = ("--set", "task=sft", "--set", "data.packing=false", "--skip-weights", "--json")
    train = [*words, "--set", f"data.train.0.path={run.folder / 'held.jsonl'}"]
    of_training = findings(check(run, *train, **tables))["data"]
    of_eval = [each for each in findings(check(run, *train, **tables))["eval data"] if each["severity"] == "note"]
    notes = [each["text"] for each in of_training if each["severity"] == "note"]
    assert [each["text"] for each in of_eval] == [f"held: {text}" for text in notes]
    assert "3 rows without a trained token (first: " in notes[0] and "line 1)" in notes[0]
    assert "the text of 17 rows contains <|endoftext|>" in notes[1] and len(notes) == 2


def test_rows_longer_than_learned_positions(run: SavedRun) -> None:
    """If ``max_length`` exceeds the positions of a reward model, ``check``, ``plan`` and ``run`` refuse the config."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = {"model_type": "bert", "vocab_size": 1024, "max_position_embeddings": 16, **size}
    (run.folder / "model/config.json").write_text(json.dumps(bert))
    (run.folder / "pairs.jsonl").write_text('{"chosen": "a b", "rejected": "b"}\n' * 2)
    values = ("task=reward", f"data.train.0.path={run.folder / 'pairs.jsonl'}", "model.train_from_scratch=true")
    words = [word for value in values for word in ("--set", value)]
    message = "data.max_length = 32, but this model has 16 positions. Write at most 16"
    result = check(run, *words, "--skip-weights")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 2 and said.count("max_length = 32") == 1 and message in said, result.output
    for command in ("plan", "run"):
        result = run.call(command, run.folder / "run.toml", *words)
        assert result.exit_code == 2 and message in result.output, result.output


def test_check_reports_all_problems_together(run: SavedRun) -> None:
    (run.folder / "model/model.safetensors").write_bytes(b"short")
    (run.folder / "data.txt").unlink()
    result = check(run, more="[training2]\nbogus = 1\n", ram="100")
    assert result.exit_code == 2
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem")]
    assert len(problems) == 5, result.output
    for part in (
        "unknown table `training2`",
        "tiers.ram.size = 100 has no unit",
        "is not a safetensors file",
        "there is no such file",
    ):
        assert part in " ".join(result.stdout.split()), part
    assert result.stdout.splitlines()[-1] == "5 problems"


def test_missing_files_of_rows_are_found_without_a_model(run: SavedRun) -> None:
    shutil.rmtree(run.folder / "model")
    (run.folder / "data.txt").unlink()
    found = findings(check(run, "--json", more='[[data.eval]]\npath = "no_eval.txt"\n'))
    for subject, name in (("data", "data.txt"), ("eval data", "no_eval.txt")):
        [problem] = [finding for finding in found[subject] if finding["severity"] == "problem"]
        assert name in problem["text"] and "there is no such file" in problem["text"]


def test_exit_code_follows_the_order_of_kinds(run: SavedRun) -> None:
    """With one mistake of each kind, the exit code is 2. As the mistakes are fixed, it becomes 3, 4, 1 and 0."""
    mistakes = {"ram": "1MiB", "model": 'freeze = ["nothing.*"]'}
    run.out.mkdir()
    (run.out / "LOCK").symlink_to("elsewhere")  # the system refuses to open the lock file
    text = (run.folder / "data.txt").read_bytes()
    (run.folder / "data.txt").write_bytes(b"\xff")
    assert check(run, **mistakes).exit_code == 2
    assert check(run, ram=mistakes["ram"]).exit_code == 3
    assert check(run).exit_code == 4
    (run.folder / "data.txt").write_bytes(text)
    assert check(run).exit_code == 1
    (run.out / "LOCK").unlink()
    assert check(run).exit_code == 0


def spoil_weights(run: SavedRun) -> None:
    path = run.folder / "model/model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][1:].contiguous()
    save_file(tensors, path, {"format": "pt"})


Spoil = Callable[[SavedRun], object]
CASES: dict[str, tuple[Spoil, dict[str, Any], int, str, str]] = {
    "a tensor is missing": (spoil_weights, {}, 2, "model", "1 tensors of LlamaForCausalLM are missing"),
    "no model": (lambda run: shutil.rmtree(run.folder / "model"), {}, 2, "model", "does not exist"),
    "no tokenizer": (lambda run: (run.folder / "model/tokenizer.json").unlink(), {}, 4, "tokenizer", "tokenizer.json"),
    "frozen nothing": (lambda run: None, {"model": 'freeze = ["nothing.*"]'}, 2, "model", "nothing.*"),
    "adapters of nothing": (
        lambda run: None, {"model": '[lora]\nr = 4\ntarget_modules = ["q_prj"]'}, 2, "model", "target_modules",
    ),
    "broken rows": (lambda run: (run.folder / "data.txt").write_bytes(b"\xff"), {}, 4, "data", "not UTF-8"),
    "does not fit": (lambda run: None, {"ram": "1MiB"}, 3, "plan", "this run needs at least"),
    "no CUDA": (lambda run: None, {"device": "cuda"}, 2, "device", "no CUDA device"),
    "no output_dir": (lambda run: (run.folder / "out").write_text("x"), {}, 2, "config", "is a file"),
    "another user's model": (
        lambda run: ((run.folder / "out/final").mkdir(parents=True), (run.folder / "out/final/x").touch()),
        {}, 2, "disk", "nor an export of this program",
    ),
    "another user's checkpoints": (
        lambda run: ((run.folder / "out/checkpoints").mkdir(parents=True), (run.folder / "out/checkpoints/x").touch()),
        {}, 2, "disk", "was not made by tiered",
    ),
    "no such figure": (
        lambda run: None,
        {
            "checkpoint": "load_best_model_at_end = true",
            "more": '[[data.eval]]\npath = "data.txt"\n[evaluation]\neval_strategy = "steps"\neval_steps = 2\n'
            'metric_for_best_model = "other_loss"\n',
        },
        2, "eval data", "no evaluation has this metric",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_mistakes(run: SavedRun, case: str) -> None:
    spoil, config, code, subject, text = CASES[case]
    spoil(run)
    words = ("--set", f"device={config.pop('device')}") if "device" in config else ()
    result = check(run, "--json", *words, **config)
    assert result.exit_code == code, result.output
    found = findings(result)[subject]
    assert any(text in finding["text"] and finding["severity"] == "problem" for finding in found), found


def test_warmup_longer_than_the_run_is_reported(run: SavedRun) -> None:
    words = ("--set", "lr_scheduler_type=cosine", "--set", "warmup_steps=5000")
    result = check(run, "--json", *words, steps=-1)
    assert result.exit_code == 2
    assert "does not end within" in findings(result)["steps"][0]["text"]


@pytest.mark.slow  # Python compiles torch and transformers again for -O
def test_check_does_not_rely_on_assert_statements(run: SavedRun) -> None:
    """`python -O` drops assert statements, but ``check`` still finds the same mistakes."""
    words = ("--set", "lr_scheduler_type=cosine", "--set", "warmup_steps=5000", "--json")
    command = [sys.executable, "-O", "-m", "megatrain", "check", str(run.write_config(steps=-1)), *words]
    found = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "does not end within" in found.stdout, found.stdout + found.stderr


def test_each_source_reports_its_problem(run: SavedRun) -> None:
    (run.folder / "broken.jsonl").write_text("{\n")
    more = '[[data.train]]\npath = "nowhere.txt"\n[[data.train]]\npath = "broken.jsonl"\n'
    result = check(run, "--json", more=more)
    texts = [finding["text"] for finding in findings(result)["data"]]
    assert result.exit_code == 4 and len(texts) == 2
    assert "nowhere.txt" in texts[0] and "broken.jsonl line 1" in texts[1]


def test_dropped_rows_are_explained(run: SavedRun) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"messages": [{"role": "nobody", "content": "x"}]}]
    (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--set", "task=sft", "--set", "data.train.0.path=" + str(run.folder / "rows.jsonl"))
    result = check(run, "--json", *words)
    assert result.exit_code == 0, result.output
    notes = [finding["text"] for finding in findings(result)["data"] if finding["severity"] == "note"]
    assert len(notes) == 1 and notes[0].startswith("1 row dropped:") and "line 2" in notes[0]
    strict = check(run, "--json", *words, "--set", "data.bad_rows=error")
    assert strict.exit_code == 4
    assert "would end the run there" in findings(strict)["data"][-1]["text"]


def test_check_reports_a_full_drive(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total, used, free = 100 * MiB, 100 * MiB, 4096

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    result = check(run, "--json")
    assert result.exit_code == 3
    assert "output_dir" in findings(result)["disk"][0]["text"]


def test_checkpoints(run: SavedRun) -> None:
    assert run.run(steps=4).exit_code == 0
    result = check(run, "--json", steps=8)
    assert result.exit_code == 0, result.output
    found = findings(result)["checkpoints"]
    assert "continues from the checkpoint of step 4" in found[-1]["text"]
    done = findings(check(run, "--json", steps=4))["checkpoints"]
    assert any("the run is done" in finding["text"] for finding in done)
    changed = check(run, "--json", "--set", "learning_rate=5e-3", steps=8)
    assert changed.exit_code == 2
    text = findings(changed)["checkpoints"][0]["text"]
    assert "optimizer.learning_rate: 0.001 -> 0.005" in text and "--allow-config-change" in text
    refused = check(run, "--json", "--set", "checkpoint.resume_from_checkpoint=no", steps=8)
    assert refused.exit_code == 2


def test_missing_and_invalid_configs_are_reported(tmp_path: Path, untrained: SavedRun) -> None:
    missing = untrained.call("check", tmp_path / "nowhere.toml")
    assert missing.exit_code == 2 and "there is no such file" in missing.stdout
    (tmp_path / "x.toml").write_text("x = = 1")
    broken = untrained.call("check", tmp_path / "x.toml")
    assert broken.exit_code == 2 and "line 1: this is not TOML" in broken.stdout
    assert untrained.call("check").exit_code == 2


def test_rows_to_evaluate_on(run: SavedRun) -> None:
    shutil.copy(run.folder / "data.txt", run.folder / "held_out.txt")
    result = check(run, "--json", more='[[data.eval]]\npath = "held_out.txt"\n')
    assert result.exit_code == 0, result.output
    assert findings(result)["eval data"][0]["text"].startswith("held_out: 1 row (a text file is one row), 31 documents")
    missing = check(run, "--json", more='[[data.eval]]\npath = "nowhere.txt"\n')
    assert missing.exit_code == 4
    assert "nowhere.txt" in findings(missing)["eval data"][0]["text"]


def test_missing_tracker_is_reported(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comet_ml" else real(name))
    result = check(run, "--json", top='logging.report_to = ["jsonl", "comet_ml"]')
    (finding,) = findings(result)["loggers"]
    assert result.exit_code == 2 and 'pip install -e ".[comet_ml]"' in finding["text"], result.output


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nonfinite_weights_are_named(run: SavedRun, value: float) -> None:
    """All tensors with NaN or infinite values are named. A run would find them only after loading for a while."""
    path = run.folder / "model/model.safetensors"
    tensors = load_file(path)
    spoiled = sorted(tensors)[1:3]
    for name in spoiled:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})
    result = check(run, "--json")
    assert result.exit_code == 2
    (found,) = findings(result)["weights"]
    assert found["severity"] == "problem" and f"2 tensors ({', '.join(spoiled)}) hold NaN" in found["text"]
    assert str(path) in found["text"]
    assert "weights" not in findings(check(run, "--json", "--skip-weights"))


def test_adapter_folder_is_recognized_as_an_adapter(run: SavedRun) -> None:
    """An adapter folder is recognized with and without a config.json, which peft does not write."""
    model = run.folder / "model"
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    for _ in range(2):
        (found,) = findings(check(run, "--json"))["model"]
        assert "contains an adapter, not a model. Use the folder of its base model (org/base)" in found["text"]
        (model / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForTokenClassification"])
def test_model_of_another_task_is_reported_with_a_remedy(run: SavedRun, task: str) -> None:
    """The model folder is saved by transformers. It has other tensors than a language model."""
    import transformers

    auto = getattr(transformers, f"AutoModel{task}")
    folder = run.folder / "model"
    config = transformers.AutoConfig.from_pretrained(folder)
    model = auto.from_config(config)
    model.save_pretrained(folder)
    for found in (findings(check(run, "--json"))["model"], findings(check(run, "--json", "--skip-weights"))["model"]):
        text = found[0]["text"]
        assert type(model).__name__ in text and "megatrain.offload" in text and "RewardTrainer" in text, text
        assert "belong together" not in text
    result = run.run()
    assert result.exit_code != 0 and "megatrain.offload" in " ".join(result.stderr.split()), result.output
