"""Values that cannot work together are refused, and values without effect are reported. All other values load."""

# ruff: noqa: E501  -- one message per line reads best
from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import ConfigError, load_config

CONFIG = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "chat.jsonl"
"""

#: Overrides of the config -> all problems.
REFUSED = {
    "training.max_steps=0": ["training.max_steps = 0 trains nothing. Write -1 for whole epochs"],
    "train_batch_tokens=500": ["training.train_batch_tokens = 500 is not a multiple of data.max_length = 1024. Write 1024"],
    "train_batch_tokens=1500 per_device_train_batch_size=2 gradient_accumulation_steps=2": [
        "training.per_device_train_batch_size and training.train_batch_tokens both set the batch. Keep one",
        "training.gradient_accumulation_steps and training.train_batch_tokens both set the batch. Keep one",
        "training.train_batch_tokens = 1500 is not a multiple of data.max_length = 1024. Write 1024 or 2048",
    ],
    "training.gradient_lanes=2 micro_batch_order=micro_batch": ['training.gradient_lanes = 2 needs advanced.micro_batch_order = "layer": with one micro-batch at a time, the gradients of all layers would be summed at the same time. Write micro_batch_order = "layer", or gradient_lanes = 1'],
    "grad_dtype=bfloat16 micro_batch_order=micro_batch train_batch_tokens=2048": ['bfloat16 gradients cannot be summed over micro-batches in advanced.micro_batch_order = "micro_batch". Write micro_batch_order = "layer", which sums all micro-batches first'],
    'data.eval=[{path="a",name="x"},{path="b",name="x"}]': ['data.eval.1 and data.eval.0 are both called "x". Give them different names'],
    'data.eval=[{path="a",name="x"},{path="b",name="x_average"}] evaluation.weights=both optimizer.ema_decay=0.9': ['data.eval.1 is called "x_average", the name for evaluations of averaged weights on another set. Give it another name'],
    'data.eval=[{path="a"}] evaluation.weights=average': ['evaluation.weights = "average" evaluates averaged weights, but the run computes no average. Write ema_decay = 0.999 in [optimizer], or leave weights out'],
    'data.eval=[{path="a"}] data.val_size=0.5': ["data.val_size and [[data.eval]] both set the rows for evaluation. Keep one"],
    "data.val_size=1.5": ["data.val_size = 1.5 is not a whole number of rows. Write 1, or a fraction below 1 of all rows"],
    "evaluation.eval_strategy=steps": ['evaluation.eval_strategy needs rows to evaluate on, but there is no [[data.eval]]. Write [[data.eval]] and below it path = "held_out.jsonl", or val_size = 0.01 in [data]'],
    "evaluation.eval_on_start=true": ['evaluation.eval_on_start needs rows to evaluate on, but there is no [[data.eval]]. Write [[data.eval]] and below it path = "held_out.jsonl", or val_size = 0.01 in [data]'],
    "checkpoint.load_best_model_at_end=true": ['checkpoint.load_best_model_at_end = true compares evaluations, but the run makes none. Write eval_strategy = "steps" in [evaluation], and rows to evaluate on'],
    "evaluation.early_stopping_patience=2": ['evaluation.early_stopping_patience = 2 compares evaluations, but the run makes none. Write eval_strategy = "steps" in [evaluation], and rows to evaluate on'],
    "checkpoint.load_best_model_at_end=true data.val_size=0.1 checkpoint.save_strategy=no": ['checkpoint.load_best_model_at_end = true needs checkpoints, and save_strategy is "no". Write save_strategy = "steps"'],
    "optim=custom": ['optimizer.optim = "custom" needs optimizer.custom_optimizer. Write custom_optimizer = "NAME", with the name in its package'],
    'optimizer.groups=[{params=["a"]},{params=["b"],lr_mult=1.0},{params=["c"],lr_mult=2.0},{params=["d"],learning_rate=0.1,lr_mult=2.0},{params=["e"],weight_decay=0.0}]': [
        "optimizer.groups.0 changes nothing for its parameters. Give it a learning_rate or a weight_decay",
        "optimizer.groups.1 changes nothing for its parameters. Give it a learning_rate or a weight_decay",
        "optimizer.groups.3 has a learning_rate and an lr_mult, which is a factor on the optimizer's learning_rate. Keep one",
    ],
    "lr_scheduler_type=cosine_with_min_lr": ['the "cosine_with_min_lr" schedule needs either `min_lr` or `min_lr_rate`. Write lr_scheduler_kwargs = { min_lr_rate = 0.1 }'],
    "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr=0.1,min_lr_rate=0.1}": ['the "cosine_with_min_lr" schedule needs either `min_lr` or `min_lr_rate`. Write lr_scheduler_kwargs = { min_lr_rate = 0.1 }'],
    "lr_scheduler_type=cosine_warmup_with_min_lr": ['the "cosine_warmup_with_min_lr" schedule needs either `min_lr` or `min_lr_rate`. Write lr_scheduler_kwargs = { min_lr_rate = 0.1 }'],
    "lr_scheduler_type=linear lr_scheduler_kwargs={foo=1,power=2.0}": [
        'the "linear" schedule has no argument `foo`. Leave it out',
        'the "linear" schedule has no argument `power`. It belongs to "polynomial"',
    ],
    "warmup_steps=1 max_steps=1": ["the warm-up of 1 steps does not end within the 1 steps of the run. Write fewer, or a fraction below 1 of all steps"],
    "attn_implementation=flash_attention_2 device=cpu compute_dtype=float32": [
        'flash_attention_2 needs a GPU, but device = "cpu". Write "sdpa"',
        'flash_attention_2 does not support float32, but precision.compute_dtype = "float32". Write "sdpa"',
        'flash_attention_2 separates packed documents only in micro-batches of one row, but training.per_device_train_batch_size = 8. Write per_device_train_batch_size = 1 with a longer data.max_length, or "sdpa"',
    ],
    "flash_attention=FA3 device=cpu": ['FA3 needs a GPU, but device = "cpu". Write flash_attention = "FA2"'],
    "flash_attention=FA4 device=cpu": ['FA4 needs a GPU, but device = "cpu". Write flash_attention = "FA2"'],
    "use_liger_kernel=true device=cpu": ['the kernels of model.use_liger_kernel need a GPU, but device = "cpu". Write use_liger_kernel = false'],
    "model.compile=true mlp_rows=8": ["model.mlp_rows runs a layer in pieces, but model.compile compiles it as one graph. Write mlp_rows = 0, or compile = false"],
    "split_experts=true model.compile=true mlp_rows=8 clip_scope=layer optim=muon": [
        "model.mlp_rows runs a layer in pieces, but model.compile compiles it as one graph. Write mlp_rows = 0, or compile = false",
        "model.compile needs whole layers or matrices, but model.split_experts splits them. Write split_experts = false, or compile = false",
        "model.mlp_rows needs whole layers or matrices, but model.split_experts splits them. Write split_experts = false, or mlp_rows = 0",
        'optimizer.clip_scope = "layer" needs whole layers or matrices, but model.split_experts splits them. Write split_experts = false, or clip_scope = "global"',
        'optimizer.optim = "muon" needs whole layers or matrices, but model.split_experts splits them. Write split_experts = false, or optim = "adamw"',
    ],
    "lora.lora_alpha=4 lora.lora_dropout=0.1": ["[lora] sets lora_alpha, but not r. Write r = 16, for example"],
    "lora.r=4 lora.adapter_name_or_path=a": ["lora.r is for new adapters; the adapters of lora.adapter_name_or_path have their own settings. Leave out one of the two"],
    "lora.r=2 train_from_scratch=true": ["model.train_from_scratch = true with [lora]: adapters are trained on the weights of a folder. Leave out one of the two"],
    "model.images=frozen train_from_scratch=true": ['model.images = "frozen" needs the weights of the image encoder, but model.train_from_scratch = true loads no weights. Leave out one of the two'],
    "checkpoint.save_strategy=time": ['checkpoint.save_strategy = "time" needs checkpoint.save_interval. Write save_interval = "45min"'],
    'placement.weights=["folder"] train_from_scratch=true': ['placement.weights names "folder", which can only store frozen weights. Leave "folder" out'],
    'placement.gradients=["folder"]': ['placement.gradients names "folder", which can only store frozen weights. Leave "folder" out'],
    "tiers.safety_margin=auto": ['tiers.safety_margin = "auto" is not valid. Write for example "5%" or "2GiB"'],
    "data.streaming=true": ["data.streaming: the rows are not counted, so the run has no epochs (training.num_train_epochs). Write max_steps = 1000, or another number of steps, in [training]"],
    "data.streaming=true max_steps=3 data.val_size=0.5 checkpoint.save_strategy=epoch model.images=frozen": [
        "data.streaming reads no images. Leave out data.streaming or model.images",
        "data.val_size = 0.5 chooses among all rows, which streams do not know in advance. Name separate rows in [[data.eval]]",
        'checkpoint.save_strategy = "epoch", but data.streaming has no epochs. Write "steps"',
    ],
    'data.streaming=true max_steps=3 data.train=[{path="a",subset="x",split="train",json_key="k",max_samples=3}]': [
        'line 5: data.train.0.subset cannot be used with data.streaming. Name the shards in path, e.g. "data/train-*.parquet"',
        'line 5: data.train.0.split cannot be used with data.streaming. Name the shards in path, e.g. "data/train-*.parquet"',
        'line 5: data.train.0.json_key cannot be used with data.streaming. Name the shards in path, e.g. "data/train-*.parquet"',
        'line 5: data.train.0.max_samples cannot be used with data.streaming. Name the shards in path, e.g. "data/train-*.parquet"',
    ],
    'data.train=[{path="s3://b/c",weight_from_step={5=1.0}}]': [
        "line 5: data.train.0.weight_from_step changes weights during the run, but its rows are read before the run. Write streaming = true in [data], or leave it out",
        'line 6: data.train.0.path = "s3://b/c" is a URL, which can only be read during the run. Write streaming = true in [data], and max_steps in [training]',
    ],
    'data.streaming=true max_steps=9 data.train=[{path="a",weight_from_step={5=0.0,7=1.0}}]': ["line 5: from step 5 on all weights are 0. Give at least one source a weight above 0"],
    'data.train=[{path="https://me:pw@host/x"}]': ['line 6: data.train.0.path = "https://***@host/x" contains a password or a signature, but configs are stored and shown. Leave it out, and set keys in the environment'],
    "data.packing=concat": ['data.packing = "concat" joins plain text, but task = "sft" trains on separate rows. Write packing = true, or task = "pretrain"'],
    'evaluation.predict_with_generate=true data.eval=[{path="a"}] model.images=frozen data.packing=false': ['evaluation.predict_with_generate = true supports only text in this release, but model.images = "frozen". Leave out one of the two'],
    "optim=sgd sgd_nesterov=true sgd_momentum=0": ["optimizer.sgd_nesterov = true needs momentum, but optimizer.sgd_momentum = 0.0. Write sgd_momentum = 0.9, or leave sgd_nesterov out"],
    "task=reward data.val_size=0.1 evaluation.predict_with_generate=true": ['evaluation.predict_with_generate generates text, which a model trained with task = "reward" cannot. Leave it out'],
    "data.streaming=true max_steps=0": [
        "training.max_steps = 0 trains nothing. Write -1 for whole epochs",
        "data.streaming: the rows are not counted, so the run has no epochs (training.num_train_epochs). Write max_steps = 1000, or another number of steps, in [training]",
    ],
    "pinned=2GiB tiers.ram.size=1GiB": ['tiers.ram.pinned = "2GiB" is more than tiers.ram.size = "1GiB". Write at most the size'],
    "task=reward data.streaming=true max_steps=3": ['data.streaming is only for task = "sft" and "pretrain", but task = "reward". Leave it out: the rows are read before the first step'],
}  # fmt: skip
#: Overrides of the config -> all warnings.
WITHOUT_EFFECT = {
    "warmup_steps=20 max_steps=10 lr_scheduler_type=constant": ['the "constant" schedule has no warm-up; use "constant_with_warmup"'],
    "checkpoint.save_strategy=no checkpoint.save_interval=45min": ['checkpoint.save_interval has no effect with save_strategy = "no"'],
    "device=cpu tiers.gpu.size=2GiB": ['tiers.gpu.size has no effect with device = "cpu"'],
    "export.merge=true": ["export.merge has no effect without [lora]"],
    'lora.r=2 model.freeze=["a*"]': ["model.freeze has little effect with [lora], which trains adapters only"],
    "max_steps=5 num_train_epochs=2": ["training.max_steps is set, so training.num_train_epochs has no effect"],
    "lr_scheduler_type=constant warmup_steps=3": ['the "constant" schedule has no warm-up; use "constant_with_warmup"'],
    "data.val_size=0.1 evaluation.eval_strategy=no evaluation.predict_with_generate=true": [
        'data.val_size keeps rows that evaluation.eval_strategy = "no" never evaluates',
        'evaluation.predict_with_generate has no effect with evaluation.eval_strategy = "no"',
    ],
    'data.eval=[{path="a"}] evaluation.eval_strategy=no': ['[[data.eval]] has no effect with evaluation.eval_strategy = "no"'],
}  # fmt: skip
#: Overrides of the config without a problem or a warning.
SOUND = [
    "training.gradient_lanes=2",
    "training.gradient_lanes=1 micro_batch_order=micro_batch",
    "grad_dtype=bfloat16 gradient_accumulation_steps=2",
    'data.eval=[{path="a",name="y"},{path="b",name="x_average"}] evaluation.weights=both optimizer.ema_decay=0.9',
    "data.val_size=2",
    "optim=sgd sgd_nesterov=true",
    "optim=sgd sgd_nesterov=true sgd_momentum=0.5",
    "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr=0.1}",
    "lr_scheduler_type=warmup_stable_decay lr_scheduler_kwargs={num_decay_steps=3}",
    "warmup_steps=0.5 max_steps=10",
    "warmup_steps=20",
    "attn_implementation=flash_attention_2 per_device_train_batch_size=1",
    "flash_attention=FA2 device=cpu",
    "flash_attention=FA3",
    "use_liger_kernel=true",
    "split_experts=true",
    "lora.adapter_name_or_path=a lora.lora_dropout=0.1",
    "checkpoint.save_interval=45min",
    'placement.weights=["folder"] lora.r=2',
    'tiers.direct=on tiers.nvme=[{path="a"}]',
    "device=cpu advanced.emulate_gpu=true tiers.gpu.size=2GiB",
    "lora.r=2 export.merge=true",
    "max_steps=5 num_train_epochs=1",
    "num_train_epochs=2",
    "lr_scheduler_type=constant warmup_steps=0",
    "lr_scheduler_type=constant",
    'data.eval=[{path="a"}] evaluation.eval_strategy=no evaluation.eval_on_start=true',
    "task=pretrain data.packing=concat",
    "task=pretrain data.train.0.format=text",
    "model.attn_implementation=sdpa device=cpu compute_dtype=float32",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


@pytest.mark.parametrize("overrides", REFUSED)
def test_values_that_cannot_work_together_are_refused(config: Path, overrides: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides=overrides.split(" "))
    assert [str(problem) for problem in caught.value.problems] == REFUSED[overrides]


@pytest.mark.parametrize("overrides", WITHOUT_EFFECT)
def test_values_without_effect_are_reported(config: Path, overrides: str) -> None:
    assert list(load_config(config, overrides=overrides.split(" ")).warnings) == WITHOUT_EFFECT[overrides]


@pytest.mark.parametrize("overrides", SOUND)
def test_sound_values_cause_no_message(config: Path, overrides: str) -> None:
    assert load_config(config, overrides=overrides.split(" ")).warnings == ()
