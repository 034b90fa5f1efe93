"""TRL's GRPOTrainer trains an offloaded policy, and a separate program generates completions, as vLLM's server does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

import megatrain
from fakes.rollout_server import RolloutServer
from megatrain.embed.integrations.vllm import follow
from megatrain.embed.partition import OffloadError
from oracles.tiered_run import QUICKSTART
from tiered import GpuTier, MiB, RamTier, TieredStore

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own warnings

NUM_STEPS = 2


def make() -> Any:
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART))


def vowels(completions: list[str], **rest: object) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def train(
    folder: Path, *, offloaded: bool, lora: bool = False
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], RolloutServer]:
    """Train. Return the trainer's log, the policy's weights (with the names that vLLM uses) and the engine."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = make()
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = Dataset.from_list([{"prompt": f"What is whale {n}?\n"} for n in range(4)])
    with RolloutServer(make()).running() as engine:
        arguments = GRPOConfig(
            output_dir=str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            learning_rate=1e-2,
            beta=0.0,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=engine.url,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        given = {
            "reward_funcs": vowels,
            "args": arguments,
            "train_dataset": rows,
            "processing_class": AutoTokenizer.from_pretrained(QUICKSTART),
        }
        if not offloaded:
            trainer = GRPOTrainer(model=model, **given)
            trainer.train()
            trainer.vllm_generation.sync_weights()
            return trainer.state.log_history, dict(megatrain.named_tensors(model)), engine
        with megatrain.open_store(ram="8MiB", nvme=folder / "store", nvme_size="256MiB") as store:
            megatrain.offload(model, store)
            trainer = megatrain.hf.offloaded(GRPOTrainer)(model=model, **given)
            trainer.train()
            trainer.vllm_generation.sync_weights()
            return trainer.state.log_history, dict(megatrain.named_tensors(model)), engine


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_engine_receives_the_weights_of_each_step(lora: bool, tmp_path: Path) -> None:
    told, weights, engine = train(tmp_path / "offloaded", offloaded=True, lora=lora)
    wanted, others, plain_engine = train(tmp_path / "plain", offloaded=False, lora=lora)
    for ours, theirs in zip(told[:NUM_STEPS], wanted[:NUM_STEPS], strict=True):
        for name in ("reward", "completions/mean_length", "num_tokens"):
            assert ours[name] == theirs[name], name  # both engines had the same weights
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    served = dict(engine.model.named_parameters())
    assert served.keys() == weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(served[name], weight), name
        torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=2e-5)
    assert engine.received == plain_engine.received and len(engine.received) == NUM_STEPS + 1
    assert engine.calls == plain_engine.calls


def test_gpu_tier_is_released_while_a_colocated_engine_generates() -> None:
    class Generation:  # the part of TRL's class that is used; the class itself needs vLLM in this mode
        mode, accelerator, _weight_metadata = "colocate", SimpleNamespace(device=torch.device("cpu")), None

        def _iter_named_params(self) -> Any: ...

        def _fix_param_name_to_vllm(self, name: str) -> str:
            return name

        def sync_weights(self) -> dict[str, int]:
            before = store.tier("gpu").usage().used_bytes  # a sleeping engine would allocate its weights here
            names = [name for name, _ in self._iter_named_params()]
            assert names == [name for name, *_ in self._weight_metadata]
            return {"before": before, "meanwhile": store.tier("gpu").usage().used_bytes}

        def generate(self, prompts: list[int], *, sleeps: bool = False) -> int:
            if sleeps:
                self.sync_weights()
            return store.tier("gpu").usage().used_bytes

    generation: Any = Generation()
    with TieredStore([GpuTier(4 * MiB, device="cpu"), RamTier(16 * MiB)]) as store:
        model = megatrain.offload(make(), store, weights="ram", gradients="ram")
        follow(generation, model, store)
        model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
        assert 2 * MiB < store.tier("gpu").usage().used_bytes <= 4 * MiB
        assert generation.generate([1]) == 0
        model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
        used = generation.sync_weights()
        assert used["before"] == 0 < used["meanwhile"]
        assert generation.generate([1], sleeps=True) == 0


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "python" / "trl_grpo_vllm.py"
    with RolloutServer(make()).running() as engine:
        arguments = [str(example), "--output", str(tmp_path), "--server", engine.url, "--steps", "2"]
        with mock.patch.object(sys, "argv", arguments):
            runpy.run_path(str(example), run_name="__main__")
        assert len(engine.received) == 2, "after the first step, and before"
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_unsupported_rollout_engine_is_refused() -> None:
    with pytest.raises(OffloadError, match=r"Install trl>=1.16"):
        follow(SimpleNamespace(mode="server"), torch.nn.Linear(1, 1), SimpleNamespace())  # type: ignore[arg-type]
