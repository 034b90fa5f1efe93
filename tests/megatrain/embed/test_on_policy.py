"""On-policy distillation with TRL: the student is offloaded, and the teacher is loaded from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

import megatrain
from megatrain.embed.absent_parameters import AbsentWeightError
from megatrain.embed.offloaded_module import offloaded_module
from oracles.embedded import assert_same_gradients, pair_of, small_store
from oracles.tiered_run import QUICKSTART

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own warnings
NUM_STEPS = 2


def make(seed: int) -> Any:
    set_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART))


def trainer_of(kind: str) -> tuple[type, type, dict[str, Any]]:
    if kind == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDTrainer, GKDConfig, {"lmbda": 1.0, "max_new_tokens": 6, "max_length": 32}
    from trl import DistillationConfig, DistillationTrainer

    return DistillationTrainer, DistillationConfig, {"max_completion_length": 6, "beta": 0.5}


def train(kind: str, student: Any, teacher: Any, folder: Path, offloads: bool) -> list[dict[str, float]]:
    """Train, and return the trainer's log entry of each step."""
    from datasets import Dataset

    trainer_class, config_class, options = trainer_of(kind)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"
    words = [{"role": "user", "content": "What is a whale?"}, {"role": "assistant", "content": "A large one."}]
    row: dict[str, Any] = {"messages": words} if kind == "gkd" else {"prompt": "What is a whale?\n"}
    arguments = config_class(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        activation_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    made = megatrain.hf.offloaded(trainer_class) if offloads else trainer_class
    trainer = made(
        model=student,
        teacher_model=teacher,
        args=arguments,
        train_dataset=Dataset.from_list([row] * 4),
        processing_class=tokenizer,
    )
    trainer.train()
    logged: list[dict[str, float]] = trainer.state.log_history[:NUM_STEPS]
    return logged


@pytest.mark.parametrize("kind", ["gkd", "distillation"])
@pytest.mark.parametrize("where", ["nvme", pytest.param("ram", marks=pytest.mark.slow)])
def test_losses_and_weights_match_the_plain_trainer(kind: str, where: str, tmp_path: Path) -> None:
    make(1).save_pretrained(tmp_path / "teacher")
    plain, student = make(0), make(0)
    plain_teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").requires_grad_(False)
    wanted = train(kind, plain, plain_teacher, tmp_path / "plain", offloads=False)
    ram = "6MiB" if where == "nvme" else "64MiB"
    with megatrain.open_store(ram=ram, nvme=tmp_path / "store", nvme_size="256MiB") as store:
        megatrain.offload(student, store, weights=where, gradients=where)
        before = sum(spec.nbytes for spec in store.blocks())
        teacher = megatrain.load_pretrained(
            tmp_path / "teacher", store, trainable=False, name="teacher", weights="nvme"
        )
        size = sum(parameter.numel() for parameter in teacher.parameters())
        taken = sum(spec.nbytes for spec in store.blocks()) - before
        assert taken == pytest.approx(4 * size, rel=0.01), "weights alone"
        told = train(kind, student, teacher, tmp_path / "tiered", offloads=True)
        for ours, theirs in zip(told, wanted, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        found = student.state_dict()
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=2e-6)


class Pair(nn.Module):
    """Module that uses the weights of another module, outside of that module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(8, 8), list[nn.Linear]()

    def forward(self, x: Tensor) -> Tensor:
        return (self.own(x) @ self.others[0].weight.T).tanh()


def test_a_forward_may_use_the_weights_of_another_module(tmp_path: Path) -> None:
    (plain, model), (plain_head, head) = pair_of(Pair), pair_of(lambda: nn.Linear(8, 8), seed=1)
    plain.others.append(plain_head.requires_grad_(False))
    model.others.append(head.requires_grad_(False))
    x = torch.randn(4, 8)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights="nvme", gradients="nvme")
        megatrain.offload(head, store, name="head", weights="nvme")
        with pytest.raises(AbsentWeightError):
            torch.relu(head.weight)  # outside of any forward
        outputs = [one(x) for one in (plain, model)]
        for output in outputs:
            output.sum().backward()
        assert torch.equal(*outputs)
        assert_same_gradients(plain, model)
        with pytest.raises(AbsentWeightError):
            torch.relu(head.weight)  # the forward has ended
        assert not any(block.held is not None for block in offloaded_module(head).blocks)  # type: ignore[union-attr]
