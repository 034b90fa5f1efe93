"""The mixin and the callback for Hugging Face's Trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain as mt
from megatrain.embed.partition import OffloadError
from oracles.tiered_run import write_tiny_model
from tiered import GenerationReader, TieredStore

pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

# transformers warns about future renames.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

Stores = Callable[..., TieredStore]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model, and return its folder."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Yield a function that opens a store. It first closes the previous store, as the end of a process would."""
    opened: list[TieredStore] = []

    def make(**options: Any) -> TieredStore:
        for store in opened:
            store.close()
        opened.append(mt.open_store(**{"ram": "10MiB", "nvme": tmp_path / "store", "nvme_size": "256MiB", **options}))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def data(num_rows: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 1000, (num_rows, 24), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(output: Path, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }
    return TrainingArguments(output_dir=str(output), **options)


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(model: Any, args: Any, *, resume: bool = False, **options: Any) -> Any:
    trainer = mt.hf.offloaded(Trainer)(model=model, args=args, train_dataset=data(), **options)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_model_and_offloaded_optimizer_match_plain_training(
    folder: Path, tmp_path: Path, stores: Stores, dtype: torch.dtype
) -> None:
    plain = Trainer(
        model=model_of(folder, dtype),
        args=arguments(tmp_path / "plain", gradient_accumulation_steps=1),
        train_dataset=data(),
    )
    plain.train()
    only_state = train(
        model_of(folder, dtype), arguments(tmp_path / "a", gradient_accumulation_steps=1), store=stores()
    )
    found = losses(only_state), weights(only_state.model)
    model = mt.offload(model_of(folder, dtype), stores())
    tiered = train(model, arguments(tmp_path / "b", gradient_accumulation_steps=1))
    assert losses(tiered) == found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in weights(tiered.model).items())
    if dtype == torch.float32:  # in bf16, torch's AdamW has no fp32 master, so it loses most of each update
        for ours, theirs in zip(losses(tiered), losses(plain), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.parametrize("tiers_model", [True, False])
def test_resume_is_bit_identical_with_other_tier_sizes(
    folder: Path, tmp_path: Path, stores: Stores, tiers_model: bool
) -> None:
    def run(output: Path, store: TieredStore, **options: Any) -> Any:
        model = model_of(folder, torch.bfloat16)
        if tiers_model:
            mt.offload(model, store)
        return train(model, arguments(output), store=store, **options)

    whole = run(tmp_path / "whole", stores(nvme=tmp_path / "store_of_whole"))
    wanted = losses(whole), weights(whole.model)
    run(tmp_path / "cut", stores())
    shutil.rmtree(tmp_path / "cut" / "checkpoint-4")
    resumed = run(tmp_path / "cut", stores(ram="64MiB"), resume=True)
    assert losses(resumed) == wanted[0]
    assert all(torch.equal(value, wanted[1][name]) for name, value in weights(resumed.model).items())


def test_generations_are_kept_while_checkpoints_reference_them(folder: Path, tmp_path: Path, stores: Stores) -> None:
    store = stores(keep_generations=1)
    model = mt.offload(model_of(folder), store)
    train(model, arguments(tmp_path / "out", max_steps=5, save_steps=1, save_total_limit=3))
    folders = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [one.name for one in folders] == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
    generations = [json.loads((one / "tiered.json").read_text())["generation"] for one in folders]
    for generation in generations:
        assert not list(GenerationReader(str(store.path), generation).problems())
    kept = sorted(int(one.name) for one in (Path(str(store.path)) / "snap").iterdir() if one.name.isdigit())
    assert (generations, kept) == ([3, 4, 5], [2, 3, 4, 5]), (
        "the trainer removes a folder after the commit; the next one follows it"
    )


def test_best_model_at_the_end(folder: Path, tmp_path: Path, stores: Stores) -> None:
    model = mt.offload(model_of(folder), stores())
    args = arguments(
        tmp_path / "out", eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=0.05
    )
    trainer = train(model, args, eval_dataset=data(4))
    best = Path(trainer.state.best_model_checkpoint)
    wanted = AutoModelForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in weights(trainer.model).items())


def test_optim_names_select_tiered_optimizers(folder: Path, tmp_path: Path, stores: Stores) -> None:
    store = stores()
    trainer = mt.hf.offloaded(Trainer)(
        model=model_of(folder), args=arguments(tmp_path), store=store, optimizer_options={"seed": 5}
    )
    lion = {"lr": 1e-3, "betas": (0.7, 0.8), "store": store, "max_grad_norm": 0.5, "seed": 5}
    adamw, plain = {**lion, "eps": 1e-6}, {name: value for name, value in lion.items() if name != "betas"}
    wanted: dict[str, tuple[type[Any], dict[str, Any]]] = {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (mt.TieredAdamW, adamw)),
        **dict.fromkeys(
            ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
            (mt.TieredAdamW, {**adamw, "state_dtype": "int8"}),
        ),
        **dict.fromkeys(("lion_32bit", "lion"), (mt.TieredLion, lion)),
        **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (mt.TieredLion, {**lion, "state_dtype": "int8"})),
        "sgd": (mt.TieredSGD, plain),
        "adafactor": (mt.TieredAdafactor, plain),
    }
    settings = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_epsilon": 1e-6}
    for name, expected in wanted.items():
        args = arguments(tmp_path, **settings)
        args.optim = name  # transformers checks that the library of an 8-bit optimizer is installed
        assert trainer.get_optimizer_cls_and_kwargs(args) == expected, name
    args = arguments(tmp_path, max_grad_norm=None)
    assert trainer.get_optimizer_cls_and_kwargs(args)[1]["max_grad_norm"] == 0.0
    for name in ("rmsprop", "adamw_torch_4bit"):
        with pytest.raises(ValueError) as caught:
            trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=name))
        assert str(caught.value) == (
            f'optim="{name}" has no tiered optimizer. Use adamw_torch, adamw_8bit, lion_32bit, lion_8bit, sgd or '
            "adafactor"
        )


def test_completion_lists_the_public_names() -> None:
    assert dir(mt.hf) == ["RECORD_NAME", "TierCallback", "TierTrainerMixin", "offloaded"]


def test_adapters_of_peft_with_sft_trainer(folder: Path, tmp_path: Path, stores: Stores) -> None:
    """Both ``peft_config`` with a store and adapters created beforehand match the plain trainer."""
    from datasets import Dataset
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": f"the whale swims in sea number {number}"} for number in range(8)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def train(kind: type[Any], name: str, model: Any, **options: Any) -> tuple[Any, list[float]]:
        arguments = SFTConfig(
            str(tmp_path / name), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", max_length=32,
        )  # fmt: skip
        trainer = kind(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **options)
        trainer.train()
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder)

    tiered = mt.hf.offloaded(SFTTrainer)
    _, plain = train(SFTTrainer, "plain", model(), peft_config=settings)
    trainer, found = train(tiered, "store", model(), peft_config=settings, store=stores())
    assert found == pytest.approx(plain, rel=1e-6)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert isinstance(PeftModel.from_pretrained(model(), tmp_path / "adapter"), PeftModel)
    torch.manual_seed(3)
    first, _ = train(SFTTrainer, "first", get_peft_model(model(), settings))
    torch.manual_seed(3)
    adapted = mt.offload(get_peft_model(model(), settings), stores())
    second, _ = train(tiered, "second", adapted)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    with pytest.raises(OffloadError, match="create the adapters first"):
        train(tiered, "late", mt.offload(model(), stores()), peft_config=settings)


def test_refuses_a_model_without_a_store(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"First call megatrain.offload\(model, store\), or pass store"):
        mt.hf.offloaded(Trainer)(model=model_of(folder), args=arguments(tmp_path), train_dataset=data())


def test_plain_trainer_with_a_tiered_model_raises(folder: Path, tmp_path: Path, stores: Stores) -> None:
    model = mt.offload(model_of(folder), stores())
    trainer = Trainer(model=model, args=arguments(tmp_path / "out"), train_dataset=data())
    with pytest.raises(RuntimeError, match="gradient of"):
        trainer.train()


def test_callback_and_class_without_the_mixin(folder: Path, tmp_path: Path, stores: Stores) -> None:
    store = stores()
    trainer = Trainer(
        model=model_of(folder),
        args=arguments(tmp_path / "out"),
        train_dataset=data(),
        optimizer_cls_and_kwargs=(mt.TieredAdamW, {"lr": 1e-3, "store": store}),
        callbacks=[mt.hf.TierCallback(store)],
    )
    trainer.train()
    assert json.loads((tmp_path / "out" / "checkpoint-4" / "tiered.json").read_text())["generation"] == 2
