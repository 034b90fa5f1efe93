"""Teacher scores match plain transformers, and do not depend on tiers or passes. Interrupted scoring can be resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import zarr
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain.base.errors import ConfigError
from megatrain.base.observer import RunObserver
from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.data import scores as scores_module
from megatrain.data.encoding import load_tokenizer
from megatrain.data.scores import ScoresError
from megatrain.extras.scoring import Scorer, ScoreSummary
from oracles.families import FAMILIES, VOCAB, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import EXAMPLES
from processes.saved_run import command_group

TEXTS = (
    "Call me Ishmael.",
    "Some years ago, never mind how long precisely, having little or no money in my purse.",
    "There now is your insular city of the Manhattoes, belted round by wharves.",
    "Circumambulate the city of a dreamy Sabbath afternoon.",
    "Look at the crowds of water-gazers there. What do you see?",
    "Posted like silent sentinels all around the town.",
    "Some leaning against the spiles; some seated upon the pier-heads.",
)
K = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_teacher(folder: Path, *, num_layers: int, width: int) -> Path:
    tokenizer = load_tokenizer(str(EXAMPLES / "quickstart/model"))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", num_layers=3, width=64)


def config_of(teacher: Path, folder: Path, *changes: str, texts: tuple[str, ...] = TEXTS) -> Any:
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": "Say it:", "completion": f" {texts[0]}"}, *({"text": text} for text in texts[1:])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "score.toml"
    path.write_text(
        f"""
task = "sft"
output_dir = "out"
device = "cpu"
model.model_name_or_path = "{teacher}"
precision.compute_dtype = "float32"
data.max_length = 64
data.cache_dir = "none"
data.train = [{{ path = "rows.jsonl" }}]
training.per_device_train_batch_size = 1
training.gradient_accumulation_steps = 2
score.top_k = {K}
tiers.ram.size = "64MiB"
"""
    )
    return load_config(path, overrides=changes).config


class Lines(RunObserver):
    """Observer that records messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_message(self, text: str) -> None:
        self.lines.append(text)


def score(config: Any) -> tuple[Scorer, ScoreSummary]:
    scorer = Scorer(config)
    return scorer, scorer.run()


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Read parquet files, and return the columns of each document by its key."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "parquet").glob("*.parquet")):
        found.update((row.pop("key"), row) for row in pyarrow.parquet.read_table(path).to_pylist())
    return found


def assert_same(found: Path, expected: Path) -> None:
    a, b = read(found), read(expected)
    assert a.keys() == b.keys()
    assert repr(a) == repr({key: b[key] for key in a})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gives_hugging_faces_log_softmax(family: str) -> None:
    config = tiny_config(family, tied=False)
    model, batches = build_model(config), padded_batches()
    graph = build_graph(config, dtype=torch.float32, is_trained=False)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu", head_rows=4, head_columns=16)
    found = runner.score(batches, k=K, temperature=2.0)
    model.eval()
    for batch, scores in zip(batches, found, strict=True):
        labels = batch["labels"][:, 1:]
        with torch.no_grad():
            logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1].float()
        wanted = logits[labels != -100]
        chosen = labels[labels != -100]
        plain = wanted.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        torch.testing.assert_close(scores.log_probs, plain, rtol=2e-5, atol=2e-5)
        tempered = (wanted / 2).log_softmax(-1)
        top = tempered.topk(K)
        torch.testing.assert_close(scores.top_log_probs, top.values, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(tempered.gather(1, scores.top_ids), top.values, rtol=2e-5, atol=2e-5)
        rest = tempered.scatter(1, top.indices, -torch.inf).logsumexp(1)
        torch.testing.assert_close(scores.rest_log_probs, rest, rtol=2e-5, atol=2e-5)
        assert all(len(set(row)) == K and max(row) < VOCAB for row in scores.top_ids.tolist())


def test_teacher_ten_times_larger_than_ram_matches_transformers(tmp_path: Path) -> None:
    """A model ten times as large as its RAM scores packed rows like plain transformers, with the planned traffic."""
    changes = (
        'score.formats=["parquet","zarr"]',
        "score.embeddings=mean",
        "score.temperature=2.0",
        'tiers.ram.size="9MiB"',
    )
    teacher = write_teacher(tmp_path / "model", num_layers=28, width=256)
    config = config_of(teacher, tmp_path / "a", *changes)
    scorer, summary = score(config)
    plan = scorer.plan
    weights = sum(block.nbytes for block in plan.program.blocks.values())
    assert weights >= 10 * plan.budgets["ram"] >= 10 * plan.totals["ram"]
    assert "folder" in set(plan.placement.homes.values())
    assert summary.num_passes == 2 and summary.link_bytes == summary.planned_bytes != {}
    read_bytes = summary.link_bytes["folder->ram"]
    assert 2 * (weights - plan.budgets["ram"]) <= read_bytes <= 2 * weights
    assert not (tmp_path / "a/out/checkpoints").exists()

    found = read(summary.folder)
    assert sorted(row["document"] for row in found.values()) == list(range(len(TEXTS)))
    tokenizer = load_tokenizer(str(teacher))
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    scored = []
    for row in found.values():
        text = f"Say it: {TEXTS[0]}" if row["document"] == 0 else TEXTS[row["document"]]
        ids = torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[None][:, : row["num_tokens"]]
        with torch.no_grad():
            output = model.model(ids, use_cache=False)
            logits = model.lm_head(output.last_hidden_state)[0]
        positions = torch.tensor(row["positions"])
        assert row["token_ids"] == ids[0, positions].tolist()
        plain = logits[positions - 1].log_softmax(-1).gather(1, ids[0, positions, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["log_probs"]), plain, rtol=1e-4, atol=1e-4)
        tempered = (logits[positions - 1] / 2).log_softmax(-1)
        torch.testing.assert_close(torch.tensor(row["top_log_probs"]), tempered.topk(K).values, rtol=1e-4, atol=1e-4)
        assert row["top_ids"] == tempered.topk(K).indices.tolist()
        assert row["perplexity"] == pytest.approx(float(torch.exp(-plain.double().mean())), rel=1e-3)
        mean = output.last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.tensor(row["embedding"]), mean, rtol=1e-3, atol=1e-3)
        scored += plain.tolist()
    assert summary.num_scored_tokens == len(scored)
    assert summary.perplexity == pytest.approx(float(np.exp(-np.mean(scored))), rel=1e-3)

    keys = 0
    for _, part in zarr.open_group(str(summary.folder / "zarr"), mode="r").groups():
        starts = part["starts"][:]
        for number, key in enumerate(part["key"][:]):
            row, own = found[f"{int(key):016x}"], slice(starts[number], starts[number + 1])
            assert part["top_ids"][own].tolist() == row["top_ids"]
            assert part["rest_log_probs"][own].tolist() == row["rest_log_probs"]
            assert part["embedding"][number].tolist() == row["embedding"]
            keys += 1
    assert keys == len(found)


def test_bits_do_not_depend_on_tiers_or_passes(teacher: Path, tmp_path: Path) -> None:
    packing = "data.packing=false"
    _, first = score(config_of(teacher, tmp_path / "a", packing))
    others = {
        "tight": ('tiers.ram.size="2500KiB"', "training.gradient_accumulation_steps=1"),
        "one pass": ("training.gradient_accumulation_steps=7", 'placement.weights="folder"'),
        "gpu": ("advanced.emulate_gpu=true", 'tiers.gpu.size="24MiB"', "training.gradient_accumulation_steps=3"),
    }
    for name, changes in others.items():
        scorer, summary = score(config_of(teacher, tmp_path / name, packing, *changes))
        assert summary.link_bytes == summary.planned_bytes
        assert scorer.plan.placement.homes.keys()
        assert_same(summary.folder, first.folder)


def test_interrupted_scoring_resumes_and_ignores_partial_files(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TEXTS[:4]
    changes = ("data.packing=false", "training.gradient_accumulation_steps=1", 'score.formats=["zarr","parquet"]')
    _, whole = score(config_of(teacher, tmp_path / "whole", *changes, texts=texts))
    config = config_of(teacher, tmp_path / "cut", *changes, texts=texts)
    put = scores_module._commit_part
    calls = 0

    def interrupt_fourth_move(partial: Path, place: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second format of the second pass, which is written but not moved to its place
            raise KeyboardInterrupt
        put(partial, place)

    monkeypatch.setattr(scores_module, "_commit_part", interrupt_fourth_move)
    with pytest.raises(KeyboardInterrupt):
        Scorer(config).run()
    monkeypatch.undo()
    folder = tmp_path / "cut/out/scores"
    assert len(list((folder / "zarr").glob("part-*"))) == 2 and len(list((folder / "parquet").iterdir())) == 1

    class StopAfterFirstPass(RunObserver):
        def on_message(self, text: str) -> None:
            if text.startswith("pass 1"):
                signal.raise_signal(signal.SIGTERM)

    second = Scorer(
        config, observer=StopAfterFirstPass()
    ).run()  # continues after the first row, and stops after one pass
    assert second.interrupted and (second.num_passes, second.num_rows_done) == (1, 2)
    third = Scorer(config).run()
    assert not third.interrupted and (third.num_passes, third.num_rows_done) == (2, 4)
    assert_same(folder, whole.folder)
    lines = Lines()
    assert Scorer(config, observer=lines).run().num_passes == 0
    assert "nothing to do" in lines.lines[-1]
    # Only the part whose file is missing is computed again.
    sorted((folder / "parquet").iterdir())[1].unlink()
    assert Scorer(config).run().num_passes == 1
    assert_same(folder, whole.folder)

    for table, change, key in (("score", {"top_k": 3}, "score.top_k"), ("model", {"mlp_rows": 16}, "model.mlp_rows")):
        changed = getattr(config, table).model_copy(update=change)
        with pytest.raises(ScoresError, match=rf"differ from this config in {key}\. Set"):
            Scorer(config.model_copy(update={table: changed})).run()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("score.top_k=5000", "score.top_k = 5000 exceeds the model's vocabulary"),
        ("lora.r=4", "a model with separate adapters cannot be scored"),
        ("score.formats=[]", "is empty"),
        ('score.formats="csv"', "score.formats"),
    ],
)
def test_unsupported_scoring_is_refused_with_a_reason(teacher: Path, tmp_path: Path, change: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Scorer(config_of(teacher, tmp_path, change))


def test_plan_is_shown_when_scoring_starts(teacher: Path, tmp_path: Path) -> None:
    """As with `run`, a resumed command prints one line instead of the plan, and a finished command prints neither."""
    config_of(teacher, tmp_path)

    def call(*words: str) -> Result:
        result = CliRunner().invoke(command_group(), ["score", str(tmp_path / "score.toml"), *words])
        assert result.exit_code == 0, result.output
        return result

    first, again = call(), call()
    assert "fits." in first.stdout and "plan   `" not in first.output
    assert "fits." not in again.output and "plan   `" not in again.output and "nothing to do" in again.stderr
    max((tmp_path / "out/scores/parquet").iterdir()).unlink()
    rest = call()
    assert "fits." not in rest.output and "score.toml --dry-run` shows" in rest.stderr, rest.output
    dry = call("--dry-run").stdout
    assert "fits." in dry and "times           not measured" in dry and "\nexport" not in dry


@pytest.mark.slow
def test_killed_scoring_process_resumes(teacher: Path, tmp_path: Path, cli_words: list[str]) -> None:
    changes = ("data.packing=false", "training.gradient_accumulation_steps=1")
    _, whole = score(config_of(teacher, tmp_path / "whole", *changes))
    config_of(teacher, tmp_path / "cut")
    words = [*cli_words, "score", str(tmp_path / "cut/score.toml"), *(f"--set={change}" for change in changes)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("pass 2"):
                process.kill()
                break
        process.wait(60)
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout.splitlines()[-1])["num_passes"] <= len(TEXTS) - 2
    assert_same(tmp_path / "cut/out/scores", whole.folder)


@pytest.fixture
def cli_words() -> list[str]:
    return [sys.executable, "-c", "from megatrain_tier_cli.main import main; main()"]
