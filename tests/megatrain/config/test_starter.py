"""The text of a new config: every line depends on the task, the machine, the model and the data as expected."""

# ruff: noqa: E501  -- the text has long lines
from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.base.facts import Drive, MachineFacts, ModelFacts
from megatrain.config.starter import DataFacts, starter_toml
from tiered import GiB

DRIVES = (
    Drive("state", 100 * GiB, "ext4"),
    Drive("/b/state", 50 * GiB, "xfs"),
    Drive("/c/state", 9 * GiB, "nfs", "nfs may be slow"),
)
GPU = MachineFacts(64 * GiB, 60 * GiB, 22 * GiB, DRIVES)
CPU = MachineFacts(32 * GiB, 30 * GiB, None, ())
ROWS = DataFacts("d.jsonl", "alpaca", {"instruction": "q"}, ("q", "\u00e9 a"))
FULL = """\
#:schema ./megatrain-tier.schema.json
# Made by `megatrain-tier init` for this machine. Meaning of a key: `megatrain-tier config explain KEY`.
#   megatrain-tier check FILE    find every mistake
#   megatrain-tier plan FILE     see where every byte goes, and how long a step takes
#   megatrain-tier run FILE      train; the same command continues after a stop
config_version = 1
task = "sft"                              # chats and prompts, loss on the answers
output_dir = "o"                          # paths are relative to this file
seed = 42

[model]
model_name_or_path = "org/m"              # 1.50 B parameters

# To train small adapters instead of the whole model: remove the #, and write learning_rate = 0.0001.
# [lora]
# r = 16                                    # rank: 8 to 64 are usual
# lora_alpha = 32                           # adapters are scaled by lora_alpha / r

[data]
max_length = 2048                         # tokens in a row
# packing = true                          # default, if the model supports it: documents share a row; false: one per row
train_on = "assistant"                    # assistant, last_assistant, completion or all

[[data.train]]
path = "d.jsonl"
format = "alpaca"                         # the rows have q, ? a
columns = { instruction = "q" }           # our field = their column

[training]
train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it
num_train_epochs = 1.0                    # or a number of steps instead: max_steps = 100

[optimizer]
optim = "adamw"                           # 16 bytes of state per parameter; lion 12, adafactor 8
learning_rate = 1e-05
lr_scheduler_type = "cosine"
warmup_steps = 0.03                       # below 1: a share of all steps

[checkpoint]
save_steps = 200                          # and at the end, on SIGTERM and on Ctrl-C
save_total_limit = 2                      # the newest ones are kept
save_copy = false                         # true: whole copies in output_dir; or to s3://bucket/run

# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.
# Resources of this run. "auto": everything that is free at its start. Or write "22GiB" or "90%".
[tiers.gpu]
size = "auto"                             # now 22.00 GiB

[tiers.ram]
size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive

# Training state, and parts of checkpoints: deleting this folder destroys them.
[[tiers.nvme]]
path = "state"                            # ext4, 100.00 GiB free
size = "auto"                             # or a part of it, such as "50GiB"

# another drive: blocks are striped over both
# [[tiers.nvme]]
# path = "/b/state"  # xfs, 50.00 GiB free
# size = "auto"

# nfs may be slow
# [[tiers.nvme]]
# path = "/c/state"  # nfs, 9.00 GiB free
# size = "auto"
"""


def test_all_keys_of_a_new_config_are_explained() -> None:
    text = starter_toml(GPU, "sft", ModelFacts("org/m", 1_500_000_000, 2048), ROWS, output_dir="o")
    assert text == FULL


@pytest.mark.parametrize(
    ("text", "without", "added"),
    [
        (
            starter_toml(CPU, "dpo", None, DataFacts("d.jsonl", has_label=True, problem="no\n field"), has_lora=True),
            [
                'task = "sft"                              # chats and prompts, loss on the answers',
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "# To train small adapters instead of the whole model: remove the #, and write learning_rate = 0.0001.",
                "# [lora]",
                "# r = 16                                    # rank: 8 to 64 are usual",
                "# lora_alpha = 32                           # adapters are scaled by lora_alpha / r",
                "max_length = 2048                         # tokens in a row",
                "# packing = true                          # default, if the model supports it: documents share a row; false: one per row",
                'train_on = "assistant"                    # assistant, last_assistant, completion or all',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                'optim = "adamw"                           # 16 bytes of state per parameter; lion 12, adafactor 8',
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                "[tiers.gpu]",
                'size = "auto"                             # now 22.00 GiB',
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                "# Training state, and parts of checkpoints: deleting this folder destroys them.",
                "[[tiers.nvme]]",
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                "# another drive: blocks are striped over both",
                "# [[tiers.nvme]]",
                '# path = "/b/state"  # xfs, 50.00 GiB free',
                '# size = "auto"',
                "# nfs may be slow",
                "# [[tiers.nvme]]",
                '# path = "/c/state"  # nfs, 9.00 GiB free',
                '# size = "auto"',
            ],
            [
                'task = "dpo"                              # preferences, which of two answers is better',
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "path/to/model"      # FILL IN: a Hugging Face folder with safetensors',
                "[lora]",
                "r = 16                                    # rank: 8 to 64 are usual",
                "lora_alpha = 32                           # adapters are scaled by lora_alpha / r",
                'target_modules = "all-linear"             # or ["q_proj", "v_proj"]; auto: peft\'s choice',
                "max_length = 512                          # tokens in a row",
                "# FILL IN: no field",
                '# columns = { prompt = "..." }            # our field = their column',
                "train_batch_tokens = 4096                 # 8 rows of max_length per step; micro-batches follow from it",
                "[preference]",
                'loss_type = "kto"                         # judges single answers',
                "beta = 0.1",
                'optim = "adamw"                           # only adapters have optimizer state',
                "# The model stays in its folder: weights that do not fit into RAM are read when a layer needs them.",
                'size = "auto"                             # now 30.00 GiB of 32.00 GiB',
            ],
        ),
        (
            starter_toml(CPU, "dpo", ModelFacts("m", 999_940_000), None),
            [
                'task = "sft"                              # chats and prompts, loss on the answers',
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "# To train small adapters instead of the whole model: remove the #, and write learning_rate = 0.0001.",
                "max_length = 2048                         # tokens in a row",
                "# packing = true                          # default, if the model supports it: documents share a row; false: one per row",
                'train_on = "assistant"                    # assistant, last_assistant, completion or all',
                'path = "d.jsonl"',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                "learning_rate = 1e-05",
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                "[tiers.gpu]",
                'size = "auto"                             # now 22.00 GiB',
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                "# Training state, and parts of checkpoints: deleting this folder destroys them.",
                "[[tiers.nvme]]",
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                "# another drive: blocks are striped over both",
                "# [[tiers.nvme]]",
                '# path = "/b/state"  # xfs, 50.00 GiB free',
                '# size = "auto"',
                "# nfs may be slow",
                "# [[tiers.nvme]]",
                '# path = "/c/state"  # nfs, 9.00 GiB free',
                '# size = "auto"',
            ],
            [
                'task = "dpo"                              # preferences, which of two answers is better',
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "m"                  # 999.9 M parameters',
                "# To train small adapters instead of the whole model: remove the #, and write learning_rate = 1e-05.",
                "max_length = 512                          # tokens in a row",
                'path = "data/preferences.jsonl"           # FILL IN: file, glob or folder',
                "train_batch_tokens = 4096                 # 8 rows of max_length per step; micro-batches follow from it",
                "[preference]",
                'loss_type = "sigmoid"                     # DPO; or hinge, ipo, robust, kto, cpo, orpo, simpo',
                "beta = 0.1",
                "learning_rate = 1e-06",
                "# Weights, gradients and optimizer state of this model: about 14.90 GiB with adamw in fp32.",
                'size = "auto"                             # now 30.00 GiB of 32.00 GiB; blocks that do not fit are stored on the drive',
            ],
        ),
        (
            starter_toml(CPU, "distill", ModelFacts("m", 2_500_000, 512), None),
            [
                'task = "sft"                              # chats and prompts, loss on the answers',
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "max_length = 2048                         # tokens in a row",
                'path = "d.jsonl"',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                "[tiers.gpu]",
                'size = "auto"                             # now 22.00 GiB',
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                "# Training state, and parts of checkpoints: deleting this folder destroys them.",
                "[[tiers.nvme]]",
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                "# another drive: blocks are striped over both",
                "# [[tiers.nvme]]",
                '# path = "/b/state"  # xfs, 50.00 GiB free',
                '# size = "auto"',
                "# nfs may be slow",
                "# [[tiers.nvme]]",
                '# path = "/c/state"  # nfs, 9.00 GiB free',
                '# size = "auto"',
            ],
            [
                'task = "distill"                          # chats and prompts, loss against the scores of a teacher',
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "m"                  # 2.5 M parameters',
                "max_length = 512                          # tokens in a row",
                'path = "data/chat.jsonl"                  # FILL IN: file, glob or folder',
                "train_batch_tokens = 4096                 # 8 rows of max_length per step; micro-batches follow from it",
                "[distill]",
                'scores = "path/to/scores"                 # FILL IN: folder that `megatrain-tier score` wrote for these rows',
                "# Weights, gradients and optimizer state of this model: about 38.15 MiB with adamw in fp32.",
                'size = "auto"                             # now 30.00 GiB of 32.00 GiB; blocks that do not fit are stored on the drive',
            ],
        ),
        (
            starter_toml(GPU, "pretrain", ModelFacts("m"), DataFacts("d.txt", "text"), has_lora=True),
            [
                'task = "sft"                              # chats and prompts, loss on the answers',
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "# To train small adapters instead of the whole model: remove the #, and write learning_rate = 0.0001.",
                "# [lora]",
                "# r = 16                                    # rank: 8 to 64 are usual",
                "# lora_alpha = 32                           # adapters are scaled by lora_alpha / r",
                "max_length = 2048                         # tokens in a row",
                'train_on = "assistant"                    # assistant, last_assistant, completion or all',
                'path = "d.jsonl"',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                'optim = "adamw"                           # 16 bytes of state per parameter; lion 12, adafactor 8',
                "learning_rate = 1e-05",
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                "# Training state, and parts of checkpoints: deleting this folder destroys them.",
                "[[tiers.nvme]]",
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                "# another drive: blocks are striped over both",
            ],
            [
                'task = "pretrain"                         # plain text, loss on every token',
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "m"',
                "[lora]",
                "r = 16                                    # rank: 8 to 64 are usual",
                "lora_alpha = 32                           # adapters are scaled by lora_alpha / r",
                'target_modules = "all-linear"             # or ["q_proj", "v_proj"]; auto: peft\'s choice',
                "max_length = 4096                         # tokens in a row",
                'path = "d.txt"',
                "# plain text",
                "train_batch_tokens = 65536                # 16 rows of max_length per step; micro-batches follow from it",
                'optim = "adamw"                           # only adapters have optimizer state',
                "learning_rate = 0.0001",
                "# The model stays in its folder: weights that do not fit into RAM are read when a layer needs them.",
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB',
                "# for blocks that do not fit into RAM, such as activations of long rows",
                '# path = "state"  # ext4, 100.00 GiB free',
                "# for blocks that do not fit into RAM, such as activations of long rows",
            ],
        ),
        (
            starter_toml(replace(CPU, drives=DRIVES[1:]), "reward", ModelFacts("m", 1_000_000_000), DataFacts("d", "messages")),
            [
                'task = "sft"                              # chats and prompts, loss on the answers',
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "max_length = 2048                         # tokens in a row",
                "# packing = true                          # default, if the model supports it: documents share a row; false: one per row",
                'train_on = "assistant"                    # assistant, last_assistant, completion or all',
                'path = "d.jsonl"',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                "[tiers.gpu]",
                'size = "auto"                             # now 22.00 GiB',
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                "# another drive: blocks are striped over both",
                '# path = "/b/state"  # xfs, 50.00 GiB free',
            ],
            [
                'task = "reward"                           # preferences, a reward that is larger for the better of two answers',
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "m"                  # 1.00 B parameters',
                "max_length = 512                          # tokens in a row",
                'path = "d"',
                "# rows of `messages`: chats, rendered with the model's chat template",
                "train_batch_tokens = 4096                 # 8 rows of max_length per step; micro-batches follow from it",
                "# Weights, gradients and optimizer state of this model: about 14.90 GiB with adamw in fp32.",
                'size = "auto"                             # now 30.00 GiB of 32.00 GiB; blocks that do not fit are stored on the drive',
                'path = "/b/state"                         # xfs, 50.00 GiB free',
                'size = "auto"                             # or a part of it, such as "25GiB"',
            ],
        ),
        (
            starter_toml(replace(CPU, drives=[Drive("state", 1, "ext4"), Drive("b", 8 * GiB, "xfs")]), "sft", None, None),
            [
                'output_dir = "o"                          # paths are relative to this file',
                'model_name_or_path = "org/m"              # 1.50 B parameters',
                "max_length = 2048                         # tokens in a row",
                'path = "d.jsonl"',
                'format = "alpaca"                         # the rows have q, ? a',
                'columns = { instruction = "q" }           # our field = their column',
                "train_batch_tokens = 32768                # 16 rows of max_length per step; micro-batches follow from it",
                "# Weights, gradients and optimizer state of this model: about 22.35 GiB with adamw in fp32.",
                "[tiers.gpu]",
                'size = "auto"                             # now 22.00 GiB',
                'size = "auto"                             # now 60.00 GiB of 64.00 GiB; blocks that do not fit are stored on the drive',
                'path = "state"                            # ext4, 100.00 GiB free',
                'size = "auto"                             # or a part of it, such as "50GiB"',
                '# path = "/b/state"  # xfs, 50.00 GiB free',
                "# nfs may be slow",
                '# path = "/c/state"  # nfs, 9.00 GiB free',
            ],
            [
                'output_dir = "outputs/first"              # paths are relative to this file',
                'model_name_or_path = "path/to/model"      # FILL IN: a Hugging Face folder with safetensors',
                "max_length = 512                          # tokens in a row",
                'path = "data/chat.jsonl"                  # FILL IN: file, glob or folder',
                "train_batch_tokens = 4096                 # 8 rows of max_length per step; micro-batches follow from it",
                'size = "auto"                             # now 30.00 GiB of 32.00 GiB; blocks that do not fit are stored on the drive',
                'path = "state"                            # ext4, 1 B free',
                'size = "auto"                             # or a part of it, such as "1GiB"',
                '# path = "b"  # xfs, 8.00 GiB free',
            ],
        ),
    ],
)  # fmt: skip
def test_other_facts_change_only_their_own_lines(text: str, without: list[str], added: list[str]) -> None:
    lines, full = text.splitlines(), FULL.splitlines()
    assert [line for line in full if line not in lines] == without
    assert [line for line in lines if line not in full] == added


def test_renamed_alpaca_columns_are_used_as_prompts_and_completions() -> None:
    """A row with an input needs a template, and so do columns with alpaca's own names."""
    assert ROWS.without_template() == replace(
        ROWS, format="prompt_completion", columns={"prompt": "q", "completion": "output"}
    )
    for facts in (replace(ROWS, columns={}), replace(ROWS, fields=("input",)), replace(ROWS, format="messages")):
        assert facts.without_template() == facts
