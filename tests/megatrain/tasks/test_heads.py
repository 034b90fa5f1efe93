"""Reward models: losses and gradients match Hugging Face's class, and results are bit-identical at every placement."""

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
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatrain.base.errors import ConfigError
from megatrain.config.resolved import config_from_toml, to_toml
from megatrain.converters.heads import HeadSpec
from megatrain.converters.spec import build_graph
from megatrain.models.task_head import TaskHead
from megatrain_tier_cli.main import command_group
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
#: Model type -> config values in addition to ``SHAPE``.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"classifier_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {"attention_dropout": 0.0, "global_attn_every_n_layers": 2, "local_attention": 4},
}


def batches() -> list[dict[str, Tensor]]:
    """Return three micro-batches of two padded pairs. The chosen rows come before the rejected rows."""
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = [7, 4, 9, 5]
        ids = torch.randint(5, 60, (4, 9), generator=generator)
        mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
        labels = torch.full((4, 2), -100)
        labels[:2, 1] = 0
        margin = torch.tensor([0.0, 0.5 * seed])
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels, "margin": margin})
    return found


def plain_loss(model: Any, batch: dict[str, Tensor], center: float) -> Tensor:
    """Return the sum of a micro-batch's losses, computed with the model's own forward."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen, rejected = logits[:2, 0], logits[2:, 0]
    losses = -functional.logsigmoid(chosen - rejected - batch["margin"])
    return (losses + center * (chosen + rejected) ** 2).sum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_losses_and_gradients_match_the_plain_model(family: str, center: float) -> None:
    config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **SHAPE, **FAMILIES[family])
    graph = build_graph(config, task_spec=HeadSpec(center), train_from_scratch=True)
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_config(graph.model.config).train()
    assert type(plain) is type(graph.model)
    micro_batches = batches()
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    total = torch.stack([plain_loss(plain, batch, center) for batch in micro_batches]).sum() / count
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
            torch.testing.assert_close(logits, own, rtol=1e-6, atol=1e-6)


# -- whole runs ----------------------------------------------------------------------------------------------------

CONFIG = """
task = "reward"
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
ON_DRIVE = ("tiers.ram.size=3MiB", *(f"placement.{kind}=nvme" for kind in ("weights", "gradients", "optimizer")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a language model with random weights to ``model`` in a new working directory, and return the directory."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(more: str = "") -> list[dict[str, Any]]:
    """Write preference pairs and a config to the working directory, and return the pairs."""
    draw, words = random.Random(1), (QUICKSTART / "loomings.txt").read_text().split()
    rows: list[dict[str, Any]] = []
    for _ in range(12):
        some = draw.sample(words, draw.randint(3, 10))
        chosen, rejected = " " + " ".join(some), " no " + some[0]
        rows.append({"prompt": "Which?", "chosen": chosen, "rejected": rejected, "margin": 0.25})
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("run.toml").write_text(CONFIG + more)
    return rows


def train(output: str, *changes: str) -> list[dict[str, Any]]:
    """Run the config, and return the logged steps and evaluations of all starts."""
    words = ["run", "run.toml", *(f"--set={change}" for change in (f"output_dir={output}", *changes))]
    result = CliRunner().invoke(command_group, words)
    assert result.exit_code == 0, result.output
    lines = map(json.loads, Path(output, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def losses(told: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in told]


def test_run_is_bit_identical_in_any_tier_and_its_folder_loads(folder: Path) -> None:
    rows = write()
    told = train("in_ram")
    assert losses(train("on_drive", *ON_DRIVE)) == losses(told)
    train("broken", "max_steps=2")
    assert losses(train("broken", *ON_DRIVE))[-3:] == losses(told)[-3:]
    models = []
    for name in ("in_ram", "on_drive", "broken"):
        model, info = AutoModelForSequenceClassification.from_pretrained(f"{name}/final", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        models.append(model.eval())
    for name, weight in models[0].state_dict().items():
        assert all(torch.equal(weight, model.state_dict()[name]) for model in models), name
    _recount(models[0], rows, told[-1])


def _recount(model: Any, rows: list[dict[str, Any]], evaluation: dict[str, Any]) -> None:
    """Check a run's last evaluation against the exported model, which computes each row separately."""
    figures = evaluation["preferences"]
    tokenizer = AutoTokenizer.from_pretrained("in_ram/final")

    def reward(text: str) -> float:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return float(model(torch.tensor([ids[:24]])).logits[0, 0])

    pairs = [[reward(row["prompt"] + row[key]) for key in ("chosen", "rejected")] for row in rows]
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    own = -functional.logsigmoid(chosen - rejected - 0.25).mean()
    assert figures["accuracy"] == float((chosen > rejected).double().mean())
    assert figures["margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert evaluation["loss"] == pytest.approx(float(own), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # from peft
def test_adapters_and_the_new_head_are_trained_and_open_in_peft(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    write('[lora]\nr = 4\ntarget_modules = "all-linear"\n')
    told = train("in_ram", "max_steps=3")
    assert losses(train("on_drive", "max_steps=3", *ON_DRIVE)) == losses(told)
    config = json.loads(Path("in_ram/final/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1, pad_token_id=0)
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
        (CONFIG.replace('"reward"', '"sft"\nreward.center_rewards_coefficient = 0.1'), "[reward] is for training"),
        (CONFIG.replace("max_length", "packing = true\nmax_length"), "a separate row"),
        (CONFIG.replace("eval_steps = 4", "predict_with_generate = true"), "generates text, which a model"),
        (CONFIG.replace('"reward"', '"classify"'), 'task = "classify" is no longer supported. Train'),
        (CONFIG + '[classify]\nlabels = ["a", "b"]\n', "`classify`. Leave the table out. Train classifiers with"),
        (CONFIG.replace('.jsonl" }', '.jsonl", format = "classification" }'), "is no longer supported"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(folder: Path, config: str, said: str) -> None:
    write()
    Path("run.toml").write_text(config)
    result = CliRunner().invoke(command_group, ["check", "run.toml"])
    assert result.exit_code != 0 and said in " ".join(result.output.split()), result.output


def test_a_run_of_an_ended_task_is_refused(folder: Path) -> None:
    """The config in a run's checkpoint may still name a task that no longer exists."""
    write()
    train("out", "max_steps=2")
    config = config_from_toml(Path("out/config.resolved.toml").read_text())
    text = to_toml(config)
    old = text.replace('task = "reward"', 'task = "classify"') + '[classify]\nlevel = "token"\nlabels = ["a", "b"]\n'
    with pytest.raises(ConfigError) as caught:
        config_from_toml(old)
    assert "megatrain.hf.offloaded(Trainer)" in str(caught.value) and "newer" not in str(caught.value)
    assert config_from_toml(text + '[classify]\nlevel = "sequence"\nlabels = []\n') == config, "as other tasks wrote it"


def test_tensors_of_other_heads_are_excluded_by_name() -> None:
    head = TaskHead(r"^score\.", r"^(lm_head|cls)\.")
    names = ("lm_head.weight", "cls.bias", "model.lm_head.weight", "score.weight")
    assert [name for name in names if head.is_excluded(name)] == ["lm_head.weight", "cls.bias"]
