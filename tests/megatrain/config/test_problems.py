"""All problems in a config are reported at once, each with its line and what to write instead."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import ConfigError, load_config
from megatrain.config.paths import make_paths_absolute
from megatrain.config.values import explain_error

HEAD = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "chat.jsonl"
"""  # six lines: the text that a test appends starts on line 7


def problems_of(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides)
    lines = str(caught.value).splitlines()
    count = len(caught.value.problems)
    assert lines[0] == f"{count} problem{'s' if count > 1 else ''} in {path}"
    return [line.strip() for line in lines[1:]]


BAD = {
    "other tool": ("[data]\ncutoff_len = 5", "line 8: unknown key `data.cutoff_len`. That is LLaMA-Factory's name; here: data.max_length"),
    "axolotl": ("[training]\nmicro_batch_size = 5", "line 8: unknown key `training.micro_batch_size`. That is Axolotl's name; here: training.per_device_train_batch_size"),
    "other table": ("[dataset]\nmax_seq_len = 5", "line 8: unknown key `dataset.max_seq_len`. That is MegaTrain's name; here: data.max_length"),
    "bf16": ("[precision]\nbf16 = true", 'line 8: unknown key `precision.bf16`. That is transformers\' name; here: precision.compute_dtype (write compute_dtype = "bfloat16")'),
    "typo": ("[optimizer]\nlearning_rte = 1e-5", "line 8: unknown key `optimizer.learning_rte`. Did you mean optimizer.learning_rate?"),
    "typo in list": ("pth = 5", "line 7: unknown key `data.train.0.pth`. Did you mean data.train.0.path?"),
    "typo in table": ("[optimiser]\nx = 1", "line 7: unknown table `optimiser`. Did you mean optimizer?"),
    "nothing near": ("[data]\nzzz = 1", "line 8: unknown key `data.zzz`"),
    "wrong table": ("[training]\nlearning_rate = 1e-5", "line 8: unknown key `training.learning_rate`. `learning_rate` belongs in [optimizer]: write optimizer.learning_rate"),
    "later release": ('[precision]\nmaster_dtype = "bfloat16"', "line 8: unknown key `precision.master_dtype`. This release does not support it yet; leave it out"),
    "text number": ('[optimizer]\nlearning_rate = "1e-5"', 'line 8: optimizer.learning_rate = "1e-5" is text. Write it without quotes: 1e-5'),
    "text boolean": ('[checkpoint]\nasync_save = "True"', 'line 8: checkpoint.async_save = "True" is text. Write it without quotes: true'),
    "text packing": ('[data]\npacking = "True"', 'line 8: data.packing = "True" is text. Write it without quotes: true'),
    "odd packing": ('[data]\npacking = "best"', 'line 8: data.packing = "best" is not a packing mode. Write true, false or "concat"'),
    "float for whole": ("[data]\nmax_length = 12.0", "line 8: data.max_length = 12.0 is not a whole number. Write 12"),
    "number for text": ("[model]\n", "line 7: model is defined twice. Keep one"),
    "no unit": ("[tiers.ram]\nsize = 110", 'line 8: tiers.ram.size = 110 has no unit. Write "110GiB" or "110GB"'),
    "no unit in text": ('[tiers.ram]\nsize = "110"', 'line 8: tiers.ram.size = 110 has no unit. Write "110GiB" or "110GB"'),
    "unknown unit": ('[tiers.ram]\nsize = "110 G"', 'line 8: tiers.ram.size = "G" is not a unit of size. Use B, KiB'),
    "too many percent": ('[tiers.ram]\nsize = "120%"', 'line 8: tiers.ram.size = "120%" is not a valid share'),
    "bare size": ("[tiers.ram]\nsize = 110GiB", 'Text needs quotes: "110GiB"'),
    "capital true": ("[data]\npacking = True", "Write it in lower case: true"),
    "null": ("[data]\npacking = null", "TOML has no null"),
    "rate": ('[[tiers.nvme]]\npath = "x"\nrate = "fast"', "line 9: tiers.nvme.0.rate: 'fast' is not a rate. Write for example \"2.0GB/s\""),
    "choice": ('[data]\ntrain_on = "assistantt"', 'line 8: data.train_on = "assistantt" is not allowed. Did you mean "assistant"? Write one of "assistant", "last_assistant", "completion", "all"'),
    "format": ('format = "pairs"', 'line 7: data.train.0.format = "pairs" is not allowed. Write one of "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "preference"'),
    "preferences": ('format = "preference"', 'data.train.0.format = "preference" has preferences, but task = "sft" trains on single rows. Write task = "dpo"'),
    "no preferences": ('[preference]\nbeta = 0.2', '[preference] is for training on preferences, but task = "sft"'),
    "range": ("[optimizer]\nadam_beta1 = 1.0", "line 8: optimizer.adam_beta1 = 1.0 is out of range. It must be below 1"),
    "not finite": ("[optimizer]\nlearning_rate = nan", "line 8: optimizer.learning_rate = nan is not a finite number"),
    "one bracket": ('[tiers.nvme]\npath = "x"', "line 7: tiers.nvme is a table, not a list of tables. Write [[tiers.nvme]] with two brackets"),
    "not a list": ('[optimizer]\nweight_decay_exclude = "*.bias"', 'weight_decay_exclude = "*.bias" is not a list. Write ["*.bias"]'),
    "groups": ('[advanced]\nstream_updates = -2', 'line 8: advanced.stream_updates = -2 is not a number of groups. Write a whole number at least 0, or "auto"'),
    "recompute": ('[training]\nrecompute = "none:0"', 'line 8: training.recompute = "none:0" is not a recompute mode. Write "auto", "full", "selective" or "none"; "selective:4" and "none:4" apply only to the last 4 layers'),
    "a key that is gone": ('[advanced]\nkeep_graphs = 3', 'line 8: unknown key `advanced.keep_graphs`. training.recompute determines what the backward recomputes: write "auto", "full", "selective" or "none", or "selective:4" or "none:4" for only the last 4 layers'),
    "tier": ('[placement]\nweights = ["disk"]', 'line 8: placement.weights = ["disk"] is not a placement. Write "auto" or tiers in order of preference: ["ram", "nvme"]'),
    "no nvme": ('[placement]\noptimizer = ["ram", "nvme"]', 'line 8: placement.optimizer names "nvme", but there is no [[tiers.nvme]]'),
    "tier twice": ('[placement]\nweights = ["ram", "ram"]', "line 8: placement.weights names a tier twice"),
    "column": ('columns = { body = "text" }', "line 7: data.train.0.columns: `body` is not a field of a row"),
    "remote code": ("[model.x]\n[optimizer]\nmax_grad_norm = -1", "line 9: optimizer.max_grad_norm = -1 is out of range. It must be at least 0"),
    "two batches": ("[training]\ntrain_batch_tokens = 8192\ngradient_accumulation_steps = 2", "line 9: training.gradient_accumulation_steps and training.train_batch_tokens both set the batch. Keep one"),
    "no multiple": ("[training]\ntrain_batch_tokens = 1500", "line 8: training.train_batch_tokens = 1500 is not a multiple of data.max_length = 1024. Write 1024 or 2048"),
    "no steps": ("[training]\nmax_steps = 0", "line 8: training.max_steps = 0 trains nothing"),
    "schedule": ('[optimizer]\nlr_scheduler_type = "cosin"', 'line 8: optimizer.lr_scheduler_type = "cosin" is not a schedule. Write one of "constant"'),
    "schedule arguments": ("[optimizer]\nlr_scheduler_kwargs = { min_lr_rate = 0.1 }", 'the "cosine" schedule has no argument `min_lr_rate`. It belongs to "cosine_with_min_lr"'),
    "schedule needs": ('[optimizer]\nlr_scheduler_type = "warmup_stable_decay"', "needs `num_decay_steps`"),
    "warm-up": ("[training]\nmax_steps = 10\n[optimizer]\nwarmup_steps = 20", "line 10: the warm-up of 20 steps does not end within the 10 steps of the run"),
    "nothing but warm-up": ("[training]\nmax_steps = 10\n[optimizer]\nwarmup_steps = 10", "line 10: the warm-up of 10 steps does not end within the 10 steps of the run"),
    "rounded sums": ('[training]\ngradient_accumulation_steps = 2\n[precision]\ngrad_dtype = "bfloat16"\n[advanced]\nmicro_batch_order = "micro_batch"', "bfloat16 gradients cannot be summed over micro-batches"),
    "half a step": ("[optimizer]\nwarmup_steps = 1.5", "line 8: optimizer.warmup_steps = 1.5 is not a whole number of steps"),
    "same folder": ('[[tiers.nvme]]\npath = "a"\n[[tiers.nvme]]\npath = "./a"', "line 10: tiers.nvme.1.path is the same folder as tiers.nvme.0.path"),
    "nested drives": ('[[tiers.nvme]]\npath = "a"\n[[tiers.nvme]]\npath = "a/live"', "line 10: tiers.nvme.1.path lies inside tiers.nvme.0.path"),
    "drive around a drive": ('[[tiers.nvme]]\npath = "a/b"\n[[tiers.nvme]]\npath = "a"', "line 10: tiers.nvme.1.path contains tiers.nvme.0.path"),
    "drive is output_dir": ('[[tiers.nvme]]\npath = "out"', "output_dir/checkpoints lies inside tiers.nvme.0.path"),
    "drive in checkpoints": ('[[tiers.nvme]]\npath = "out/checkpoints/rank00000"', "output_dir/checkpoints contains tiers.nvme.0.path"),
    "half the rates": ('[[tiers.nvme]]\npath = "a"\nrate = "1GB/s"\n[[tiers.nvme]]\npath = "b"', "only some of [[tiers.nvme]] have a rate"),
    "pinned": ('[tiers.ram]\nsize = "1GiB"\npinned = "2GiB"', 'line 9: tiers.ram.pinned = "2GiB" is more than tiers.ram.size = "1GiB"'),
    "odd copies": ("[checkpoint]\nsave_copy = [7]", "line 8: checkpoint.save_copy = [7] is not a rule for copies. Write true (every checkpoint), 5"),
    "lists of reports": ("[logging]\nreport_to = [[]]", 'line 8: logging.report_to = [] is not allowed. Write one of "jsonl", "tensorboard", "wandb"'),
    "interval without unit": ("[checkpoint]\nsave_interval = 45", 'line 8: checkpoint.save_interval: 45 has no unit. Write "45min" or "45s"'),
    "no interval": ('[checkpoint]\nsave_strategy = "time"', 'line 8: checkpoint.save_strategy = "time" needs checkpoint.save_interval. Write save_interval = "45min"'),
    "two rhythms": ('[checkpoint]\nsave_strategy = "epoch"\nsave_interval = "1h"', 'line 9: checkpoint.save_interval has no effect with save_strategy = "epoch"'),
    "nothing kept": ("[checkpoint]\nsave_total_limit = 0", "line 8: checkpoint.save_total_limit = 0 is out of range. It must be at least 1"),
    "no source": ("[checkpoint]\nresume_from_checkpoint = 3", "line 8: checkpoint.resume_from_checkpoint = 3 is a number. Write it in quotes"),
    "free disk": ("[checkpoint]\nmin_free_disk = 20", 'line 8: checkpoint.min_free_disk: 20 has no unit. Write "20GiB" or "20GB"'),
    "saves elsewhere": ("[training]\nsave_steps = 50", "line 8: unknown key `training.save_steps`. `save_steps` belongs in [checkpoint]: write checkpoint.save_steps"),
    "overwrite": ("[training]\noverwrite_output_dir = true", "That is transformers' name; here: checkpoint.resume_from_checkpoint (a run never overwrites checkpoints"),
    "model only": ("[checkpoint]\nsave_only_model = true", "line 8: unknown key `checkpoint.save_only_model`. That is transformers' name; not needed here"),
    "saves per epoch": ("[training]\nsaves_per_epoch = 2", "That is Axolotl's name; here: checkpoint.save_strategy"),
    "interval of torchtitan": ("[checkpoint]\ninterval = 50", "line 8: unknown key `checkpoint.interval`. That is torchtitan's name; here: checkpoint.save_steps"),
    "universal": ("[checkpoint]\nload_universal = true", "That is DeepSpeed's name; not needed here (a checkpoint opens with any tiers and any placement)"),
    "off": ("[training]\ngradient_checkpointing = false", "line 8: unknown key `training.gradient_checkpointing`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_config(tmp_path: Path, name: str) -> None:
    text, expected = BAD[name]
    found = problems_of(tmp_path, HEAD + text + "\n")
    assert [expected in line for line in found].count(True) == 1, found
    assert len(found) == (2 if name in ("typo in table", "remote code") else 1), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('task = "sft"\n', "", '`task` is missing. Write task = "sft" or task = "pretrain" or task = "distill" or task = "dpo" or task = "reward" at the top'),
        ('task = "sft"', 'task = "kto"', 'line 1: task = "kto" is not allowed. Write one of "sft", "pretrain", "distill", "dpo"'),
        ('task = "sft"', 'task = "dpo"\ntraining.train_batch_tokens = 3072', "but an example of preferences is two rows. Write 4096"),
        ('task = "sft"', 'task = "dpo"\ndata.packing = true', 'data.packing = true, but with task = "dpo" each text needs a separate row'),
        ('task = "sft"', 'task = "reward"\ndata.packing = "concat"', 'data.packing = "concat", but with task = "reward" each text needs a separate row'),
        ('task = "sft"', 'task = "reward"\ndata.streaming = true\ntraining.max_steps = 3', 'data.streaming is only for task = "sft" and "pretrain", but task = "reward"'),
        ('task = "sft"', 'task = "dpo"\npreference.loss_type = "robust"', 'assumes wrong labels, but preference.label_smoothing = 0'),
        ('task = "sft"', 'task = "dpo"\ntraining.label_smoothing_factor = 0.1', 'smooths cross entropy, which task = "dpo" does not train on'),
        ('output_dir = "out"\n', "", '`output_dir` is missing. Write output_dir = "outputs/first" at the top'),
        ('model_name_or_path = "model"\n', "", "`model.model_name_or_path` is missing"),
        ('[model]\nmodel_name_or_path = "model"\n', "", "`model.model_name_or_path` is missing"),
        ('[[data.train]]\npath = "chat.jsonl"\n', "", "`data.train` is missing. Write [[data.train]] and below it path"),
        ('path = "chat.jsonl"\n', "", "line 5: `data.train.0.path` is missing"),
        ('"model"\n', '"model"\ntrust_remote_code = true\n', "line 5: model.trust_remote_code = true is not possible: code in a model folder is never run here"),
        ('"model"\n', '"model"\nchat_template = "no.jinja"\n', "line 5: model.chat_template: there is no file"),
        ('"model"\n', '"model"\nattn_implementation = "flash_attention_2"\n', "separates packed documents only in micro-batches of one row"),
        ('"model"\n', '"model"\nrevision = "v2"\n', "line 5: model.revision is for a model on the hub, but /"),
        ('"model"', "3", "line 4: model.model_name_or_path = 3 is a number. Write it in quotes"),
        ('"out"', '"model"', "output_dir is the folder of the model that is trained"),
    ],
)  # fmt: skip
def test_bad_head(tmp_path: Path, old: str, new: str, expected: str) -> None:
    (tmp_path / "model").mkdir()
    found = problems_of(tmp_path, HEAD.replace(old, new, 1))
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("size=3", "--set, `size` is in several tables. Write one of tiers.gpu.size, tiers.nvme.size, tiers.ram.size"),
        ("foo", "--set, `foo` is not KEY=VALUE. Write for example --set learning_rate=2e-5"),
        ("data.train.path=x", "--set, data.train is a list. Write data.train.0.path"),
        ("data.train.4.path=x", "--set, data.train has 1 items; item 4 does not exist"),
        ("learning_rte=3", "--set, unknown key `learning_rte`. Did you mean optimizer.learning_rate?"),
        ("tiers.ram.size=3", '--set, tiers.ram.size = 3 has no unit. Write "3GiB" or "3GB"'),
        ("task.x=3", "--set, task is a value, not a table"),
    ],
)
def test_bad_override(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in problems_of(tmp_path, HEAD, (override,))[0]


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = HEAD + '[data]\ncutoff_len = 4\n[optimizer]\nlearning_rate = "1e-5"\n[tiers.ram]\nsize = 110\n'
    found = problems_of(tmp_path, text, ("foo",))
    assert [line.split(":")[0] for line in found] == ["line 8", "line 10", "line 12", "--set, `foo` is not KEY=VALUE. Write for example --set learning_rate=2e-5"]  # fmt: skip


def test_dpo_with_plain_rows_is_refused(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, HEAD.replace("sft", "dpo") + 'format = "messages"\n')
    assert found == (
        'line 7: data.train.0.format = "messages", but task = "dpo" trains on rows of preferences: answers to one '
        'prompt that are compared, or one that is judged. Write "preference", or leave the key out'
    )


def test_setting_a_key_and_its_alias_is_refused(tmp_path: Path) -> None:
    found = problems_of(tmp_path, HEAD + "[optimizer]\nwarmup_ratio = 0.1\nwarmup_steps = 3\n")
    assert found == [
        "line 8: `warmup_ratio` and `optimizer.warmup_steps` are the same key. Keep optimizer.warmup_steps"
    ]


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_pretrain_with_chat_settings_is_refused(tmp_path: Path, train_on: str) -> None:
    text = HEAD.replace("sft", "pretrain") + f'format = "messages"\n[data]\ntrain_on = "{train_on}"\n'
    found = problems_of(tmp_path, text)
    assert len(found) == 2
    assert 'data.train.0.format = "messages" is not plain text' in found[0]
    assert f'data.train_on = "{train_on}" needs conversations' in found[1]


def test_problem_in_an_extra_file_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(HEAD)
    extra = tmp_path / "over.toml"
    extra.write_text("\n[data]\nmax_length = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml", [extra])
    assert f"{extra}, line 3: data.max_length = 1 is out of range. It must be at least 2" in str(caught.value)


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(HEAD)
    with pytest.raises(ConfigError, match=r"there is no such file. In that folder: run.toml"):
        load_config(tmp_path / "rum.toml")


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nmax_steps = 11\n[optimizer]\nwarmup_steps = 10",
        '[training]\ngradient_accumulation_steps = 1\n[precision]\ngrad_dtype = "bfloat16"\n'
        '[advanced]\nmicro_batch_order = "micro_batch"',
        '[tiers.ram]\nsize = "1GiB"\npinned = "1GiB"',
        "[training]\nper_device_train_batch_size = 2\n[data]\npacking = false",
    ],
)
def test_values_at_the_limits_are_accepted(tmp_path: Path, text: str) -> None:
    head = HEAD.replace('"model"\n', '"model"\nattn_implementation = "flash_attention_2"\n')
    for start in (HEAD, head) if "packing" in text else (HEAD,):
        (tmp_path / "run.toml").write_text(start + text + "\n")
        load_config(tmp_path / "run.toml")


def test_device_cpu_has_no_gpu(tmp_path: Path) -> None:
    found = problems_of(tmp_path, 'device = "cpu"\n' + HEAD + '[placement]\nweights = ["gpu"]\n')
    assert found == ['line 9: placement.weights names "gpu", but device = "cpu". Leave "gpu" out']


def test_an_emulated_gpu_needs_the_cpu_and_a_size(tmp_path: Path) -> None:
    key = "advanced.emulate_gpu"
    found = problems_of(tmp_path, 'device = "cuda"\n' + HEAD + "[advanced]\nemulate_gpu = true\n")
    assert found == [
        f'line 9: {key} = true needs device = "cpu", but device = "cuda". Write device = "cpu"',
        f'line 9: {key} = true needs tiers.gpu.size. Write below [tiers.gpu] for example size = "2GiB"',
    ]
    sized = '[placement]\nweights = ["gpu"]\n[advanced]\nemulate_gpu = true\n[tiers.gpu]\nsize = "1GiB"\n'
    (tmp_path / "run.toml").write_text('device = "cpu"\n' + HEAD + sized)
    assert not load_config(tmp_path / "run.toml").warnings


def test_direct_copies_need_both_tiers_and_no_checksums(tmp_path: Path) -> None:
    found = problems_of(tmp_path, 'device = "cpu"\n' + HEAD + '[tiers]\ndirect = "on"\nverify = "always"\n')
    key = 'line 9: tiers.direct = "on"'
    assert found == [
        f'{key}, but there is no [[tiers.nvme]]. Write direct = "auto"',
        f'{key}, but device = "cpu": there is no GPU memory. Write direct = "auto"',
        f'{key} bypasses RAM, but tiers.verify = "always" compares checksums in RAM. '
        'Write direct = "auto", or verify = "resume"',
    ]


def test_lines_are_found_in_awkward_toml(tmp_path: Path) -> None:
    text = 'run_name = """\nseed = 3\n"""\n' + HEAD + 'columns = { "prompt" = "a" }\n[optimizer]\nweight_decay_exclude = [\n  "a=[", # ]\n  "b",\n]\n"adam_beta1" = 7\n'  # fmt: skip
    assert problems_of(tmp_path, text) == ["line 16: optimizer.adam_beta1 = 7 is out of range. It must be below 1"]


def test_ineffective_key_combinations_are_reported(tmp_path: Path) -> None:
    head = HEAD.replace("[model]", '[model]\ncompile_backend = "eager"')
    (tmp_path / "run.toml").write_text(head + '[optimizer]\noptim = "lion"\nadam_epsilon = 1e-6\nadam_beta1 = 0.8\n')
    assert load_config(tmp_path / "run.toml").warnings == (
        "model.compile_backend has no effect with compile = false",
        'optimizer.adam_epsilon has no effect with optim = "lion"',
    )


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("lora_alpha = 4", "[lora] sets lora_alpha, but not r"),
        ('r = 4\nadapter_name_or_path = "a"', "lora.r is for new adapters"),
    ],
)
def test_adapters(tmp_path: Path, lora: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'task = "sft"\noutput_dir = "o"\n[model]\nmodel_name_or_path = "m"\n[[data.train]]\npath = "d.jsonl"\n'
        f"[lora]\n{lora}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value)


def test_bytes_of_another_encoding_are_named_with_the_locale_that_reads_them() -> None:
    problem = explain_error(
        {"type": "string_unicode", "loc": ("model", "model_name_or_path"), "msg": "", "input": "caf\udce9"}
    )
    assert problem is not None
    assert (
        r"model.model_name_or_path = 'caf\udce9' contains bytes" in problem.message
        and "LC_ALL=C.UTF-8" in problem.remedy
    )


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\u0085"])
def test_line_numbers_follow_toml_line_ends(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(f'# a comment{sign}seed = 5\nrun_name = "a{sign}b"\r\nwrong = 1\n{HEAD}'.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [problem.line for problem in caught.value.problems] == [3]
    path.write_text(f"# a{sign}b\n# c{sign}d\nseed = \n{HEAD}", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [problem.line for problem in caught.value.problems] == [3]


def test_a_password_in_a_path_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "https://me:hunter2@host/model"
    text = HEAD.replace('"model"', f'"{secret}"\ntokenizer_name_or_path = "{secret}"')
    path = tmp_path / "run.toml"
    path.write_text(f'{text}[lora]\nadapter_name_or_path = "{secret}"\n[checkpoint]\n', encoding="utf-8")
    config = load_config(path, overrides=(f"tokenizer_name_or_path={secret}?sig=hunter2",)).config
    assert config.model.model_name_or_path == "https://***@host/model"
    assert "hunter2" not in repr(config)
    monkeypatch.setenv("SERVER", "https://me:hunter2@host")
    for value, masked in (
        ("https://me:hunter2@host/$UNSET", "https://***@host/$UNSET"),
        ("$SERVER/a", "https://***@host/a"),
    ):
        values: dict[str, Any] = {"model": {"model_name_or_path": value}}
        make_paths_absolute(values, tmp_path)
        assert values == {"model": {"model_name_or_path": masked}}
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=(f"chat_template={secret}",))
    assert "no file https://***@host/model" in str(caught.value)
