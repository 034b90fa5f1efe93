"""Classes and rewards: losses and every gradient of Hugging Face's own classes, and the bits of a run anywhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatrain.converters.heads import HeadSpec
from megatrain.converters.spec import build_graph
from megatrain_tier_cli.main import command_group
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMES = ("bad", "good", "odd")
#: Model type -> what its configuration has beside the shape.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"classifier_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {"attention_dropout": 0.0, "global_attn_every_n_layers": 2, "local_attention": 4},
}


def batches(level: str) -> list[dict[str, Tensor]]:
    """Three micro-batches of rows with padding; labels are one place later than what they belong to."""
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = [7, 4, 9, 5]
        ids = torch.randint(5, 60, (4, 9), generator=generator)
        mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
        labels = torch.full((4, 2 if level != "token" else 10), -100)
        if level == "reward":
            labels[:2, 1] = 0
        elif level == "sequence":
            labels[:, 1] = torch.randint(0, 3, (4,), generator=generator)
            labels[3, 1] = -100 if seed == 1 else labels[3, 1]
        else:
            tags = torch.randint(0, 3, (4, 9), generator=generator)
            labels[:, 1:] = torch.where(mask.bool(), tags, -100)
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
        if level == "reward":
            batch["margin"] = torch.tensor([0.0, 0.5 * seed])
        found.append(batch)
    return found


def plain_loss(model: Any, level: str, batch: dict[str, Tensor], center: float) -> Tensor:
    """The sum of the losses of a micro-batch, by the model's own forward."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if level == "reward":
        chosen, rejected = logits[:2, 0], logits[2:, 0]
        losses = -functional.logsigmoid(chosen - rejected - batch["margin"])
        return (losses + center * (chosen + rejected) ** 2).sum()
    labels = batch["labels"][:, 1] if level == "sequence" else batch["labels"][:, 1:].reshape(-1)
    return functional.cross_entropy(logits.reshape(-1, 3), labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["sequence", "token", "reward"])
def test_losses_and_gradients_are_those_of_the_plain_model(family: str, level: str) -> None:
    center = 0.01 if level == "reward" else 0.0
    config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **SHAPE, **FAMILIES[family])
    spec = HeadSpec(level, () if level == "reward" else NAMES, center)  # type: ignore[arg-type]
    graph = build_graph(config, of_task=spec, text_only=True)
    auto = AutoModelForTokenClassification if level == "token" else AutoModelForSequenceClassification
    torch.manual_seed(3)
    plain = auto.from_config(graph.model.config).train()
    assert type(plain) is type(graph.model)
    micro_batches = batches(level)
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    total = torch.stack([plain_loss(plain, level, batch, center) for batch in micro_batches]).sum() / count
    total.backward()

    access = MemoryAccess(graph, dict(plain.named_parameters()), torch.float32)
    runner = layer_runner(graph, access)
    loss = runner.forward_backward(micro_batches)
    gradients = access.finish()
    assert loss.num_trained_tokens == count
    assert loss.loss == pytest.approx(float(total.detach()), abs=1e-6)
    wanted = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)

    plain.eval()
    with torch.no_grad():
        for batch, logits in zip(micro_batches, runner.outputs(micro_batches), strict=True):
            own = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            read = batch["attention_mask"].bool() if level == "token" else slice(None)  # of padding nobody reads them
            torch.testing.assert_close(logits[read], own[read], rtol=1e-6, atol=1e-6)


# -- whole runs ----------------------------------------------------------------------------------------------------

CONFIG = """
output_dir = "out"
device = "cpu"
precision.compute_dtype = "float32"
optimizer = { learning_rate = 1e-3, lr_scheduler_type = "constant", warmup_steps = 0 }
training = { per_device_train_batch_size = 2, gradient_accumulation_steps = 2, max_steps = 4 }
export.dtype = "float32"
tiers.ram.size = "64MiB"
evaluation.eval_steps = 4
[model]
model_name_or_path = "model"
[data]
max_length = 24
cache_dir = "none"
train = [{ path = "rows.jsonl" }]
eval = [{ path = "rows.jsonl" }]
[[tiers.nvme]]
path = "drive"
size = "64MiB"
"""
TASKS = {
    "sequence": 'task = "classify"\nclassify.labels = ["bad", "good", "odd"]\n',
    "token": 'task = "classify"\nclassify = { level = "token", labels = ["bad", "good", "odd"] }\n',
    "reward": 'task = "reward"\n',
}
ON_DRIVE = ("tiers.ram.size=3MiB", *(f"placement.{kind}=nvme" for kind in ("weights", "gradients", "optimizer")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder of a language model of random weights, and where a config is written."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(level: str, more: str = "") -> list[dict[str, Any]]:
    """Write the rows of a task and its config; return the rows."""
    draw, words = random.Random(1), (QUICKSTART / "loomings.txt").read_text().split()
    rows: list[dict[str, Any]] = []
    for number in range(12):
        some = draw.sample(words, draw.randint(3, 10))
        if level == "reward":
            row = {"prompt": "Which?", "chosen": " " + " ".join(some), "rejected": " no " + some[0], "margin": 0.25}
        elif level == "sequence":
            row = {"text": " ".join(some), "label": NAMES[number % 3] if number % 2 else number % 3}
        else:
            row = {"tokens": some, "ner_tags": [len(word) % 3 for word in some]}
        rows.append(row)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("run.toml").write_text(TASKS[level] + CONFIG + more)
    return rows


def train(output: str, *changes: str) -> list[dict[str, Any]]:
    """Run the config; return what it told of its steps and evaluations, over all starts."""
    words = ["run", "run.toml", *(f"--set={change}" for change in (f"output_dir={output}", *changes))]
    result = CliRunner().invoke(command_group, words)
    assert result.exit_code == 0, result.output
    lines = map(json.loads, Path(output, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def losses(told: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in told]


@pytest.mark.parametrize("level", TASKS)
def test_a_run_has_the_same_bits_anywhere_and_its_folder_opens(folder: Path, level: str) -> None:
    rows = write(level)
    told = train("in_ram")
    assert losses(train("on_drive", *ON_DRIVE)) == losses(told)
    train("broken", "max_steps=2")
    assert losses(train("broken", *ON_DRIVE))[-3:] == losses(told)[-3:]
    auto = AutoModelForTokenClassification if level == "token" else AutoModelForSequenceClassification
    models = []
    for name in ("in_ram", "on_drive", "broken"):
        model, info = auto.from_pretrained(f"{name}/final", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        models.append(model.eval())
    for name, weight in models[0].state_dict().items():
        assert all(torch.equal(weight, model.state_dict()[name]) for model in models), name
    _recount(models[0], level, rows, told[-1])


def _recount(model: Any, level: str, rows: list[dict[str, Any]], evaluation: dict[str, Any]) -> None:
    """Compare the last evaluation of a run with what its exported model says of each row alone."""
    figures = evaluation["preferences"]
    if level == "token":
        assert model.config.id2label == dict(enumerate(NAMES)) and evaluation["num_tokens"] <= sum(
            len(row["tokens"]) for row in rows
        )
        return
    tokenizer = AutoTokenizer.from_pretrained("in_ram/final")

    def logits(text: str, end: str = "") -> Tensor:
        ids = tokenizer(text)["input_ids"] + tokenizer.convert_tokens_to_ids([end] if end else [])
        with torch.no_grad():
            return model(torch.tensor([ids[:24]])).logits[0]

    if level == "reward":
        end = tokenizer.eos_token
        pairs = [[float(logits(row["prompt"] + row[key], end)[0]) for key in ("chosen", "rejected")] for row in rows]
        chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        own = -functional.logsigmoid(chosen - rejected - 0.25).mean()
        assert figures["accuracy"] == float((chosen > rejected).double().mean())
        assert figures["margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    else:
        said = torch.stack([logits(row["text"]) for row in rows])
        true = torch.tensor([NAMES.index(label) if isinstance(label := row["label"], str) else label for row in rows])
        own = functional.cross_entropy(said.double(), true)
        assert figures["accuracy"] == pytest.approx(float((said.argmax(1) == true).double().mean()))
    assert evaluation["loss"] == pytest.approx(float(own), abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_adapters_and_the_new_head_are_trained_and_open_in_peft(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    write("sequence", '[lora]\nr = 4\ntarget_modules = "all-linear"\n')
    told = train("in_ram", "max_steps=3")
    assert losses(train("on_drive", "max_steps=3", *ON_DRIVE)) == losses(told)
    config = json.loads(Path("in_ram/final/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained("model", num_labels=3, pad_token_id=0)
    model = peft.PeftModel.from_pretrained(base, "in_ram/final").eval()
    result = CliRunner().invoke(command_group, ["export", "in_ram", "merged", "--merge", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    merged = AutoModelForSequenceClassification.from_pretrained("merged").eval()
    ids = torch.tensor([[5, 9, 17, 30], [40, 6, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('task = "classify"\n' + CONFIG, "names no classes"),
        ('task = "classify"\nclassify.labels = ["good"]\n' + CONFIG, "names one class alone"),
        ('task = "sft"\nreward.center_rewards_coefficient = 0.1\n' + CONFIG, '[reward] says how rewards are trained'),
        (TASKS["sequence"] + CONFIG.replace("max_length", "packing = true\nmax_length"), "a row of its own"),
        (TASKS["reward"] + CONFIG.replace("eval_steps = 4", "predict_with_generate = true"), "says no words"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, config: str, said: str) -> None:
    write("reward" if 'task = "reward"' in config else "sequence")
    Path("run.toml").write_text(config)
    result = CliRunner().invoke(command_group, ["check", "run.toml"])
    assert result.exit_code != 0 and said in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a", "label": "fine"}, 'the label "fine" is none of classify.labels (bad, good, odd)'),
        ({"text": "a", "label": 3}, "the label 3 is no number from 0 to 2"),
        ({"text": "a", "label": 0.5}, "must be a class, by name or number"),
        ({"sentence": "a", "label": 1}, "no field `text`"),
    ],
)
def test_rows_that_are_refused(folder: Path, row: dict[str, Any], said: str) -> None:
    write("sequence")
    Path("rows.jsonl").write_text(json.dumps(row))
    result = CliRunner().invoke(command_group, ["check", "run.toml"])
    assert result.exit_code != 0 and said in " ".join(result.output.split()), result.output
