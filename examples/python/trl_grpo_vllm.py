"""Train with TRL's GRPOTrainer and vLLM: a server generates answers and receives the policy's weights after each step.

Only the marked lines differ from a program without a store. Start the server first, with the same model:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs --max-logprobs -1

Then, after ``pip install trl[vllm]``:

    python examples/python/trl_grpo_vllm.py --output /tmp/grpo --model MODEL --server http://localhost:8000

For a real model, set the sizes of the store (``gpu="20GiB", ram="200GiB"``). A test runs this file with a tiny model
and a small server instead of vLLM. ``--colocate`` runs vLLM in this process, on the same GPU.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import megatrain as mt  # megatrain

GRPOTrainer = mt.hf.offloaded(GRPOTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def questions() -> Dataset:
    """Return questions about whales."""
    lines = (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([{"prompt": json.loads(line)["messages"][0]["content"] + "\n"} for line in lines])


def vowels(completions: list[str], **rest: object) -> list[float]:
    """Return the number of vowels in each answer, as its reward."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--model", default=QUICKSTART / "model", help="a Hugging Face folder, or an id of the hub")
    parser.add_argument("--server", default="http://localhost:8000", help="URL of the vLLM server")
    parser.add_argument("--colocate", action="store_true", help="run vLLM in this process, on the same GPU")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    store = mt.open_store(ram="8MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(model, store)  # megatrain
    arguments = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        use_vllm=True,
        vllm_mode="colocate" if options.colocate else "server",
        vllm_server_base_url=options.server,
        beta=0.0,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = GRPOTrainer(
        model=model, reward_funcs=vowels, args=arguments, train_dataset=questions(), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
