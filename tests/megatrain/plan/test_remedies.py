"""Refused runs and their remedies: each remedy makes the run fit with the stated bytes, and not with fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatrain.config import load_config
from megatrain.plan.plan import Plan
from megatrain.plan.shortfall import DoesNotFitError
from oracles.tiered_run import EXAMPLES, config_text, plan_of
from processes.saved_run import command_group
from tiered.units import format_size

MODEL = EXAMPLES / "quickstart" / "model"
BF16_GRADIENTS = 'precision.grad_dtype="bfloat16"'
BY_LAYER = 'optimizer.clip_scope="layer"'
ONE_AT_A_TIME = 'advanced.micro_batch_order="micro_batch"'
ONE_MICRO_BATCH = "training.gradient_accumulation_steps=1"


@pytest.fixture(params=[("", "8MiB"), ("5MiB", "6MiB")], ids=["CPU", "GPU"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write and return a config that is refused: a few MiB of RAM, with or without a GPU tier, and no drive."""
    gpu, ram = request.param
    text = config_text(tmp_path, MODEL, nvme=0, gpu=gpu, ram=ram, precision='compute_dtype = "bfloat16"')
    text = text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 1")
    (tmp_path / "run.toml").write_text(text.replace("[model]\n", "[model]\ntrain_from_scratch = true\n"))
    return tmp_path / "run.toml"


def planned(path: Path, *changes: str) -> Plan:
    return plan_of(load_config(path, (), changes).config)


def refused(path: Path, *changes: str) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as info:
        planned(path, *changes)
    return info.value


def test_each_remedy_needs_the_stated_bytes(path: Path) -> None:
    error = refused(path)
    assert error.tier == "ram"
    by_change = {remedy.change: remedy for remedy in error.remedies}
    assert list(by_change) == [
        'precision.grad_dtype = "bfloat16"',
        'optimizer.max_grad_norm = 0, or optimizer.clip_scope = "layer"',
        "a [[tiers.nvme]]",
    ]
    as_bf16, by_layer, drive = by_change.values()
    for changes, remedy in (
        ([BF16_GRADIENTS], as_bf16),
        ([BY_LAYER], by_layer),
        (["optimizer.max_grad_norm=0"], by_layer),
    ):
        assert remedy.tier == "ram" and error.have_bytes < remedy.need_bytes < error.need_bytes and not remedy.fits
        planned(path, *changes, f"tiers.ram.size={remedy.need_bytes}B")
        assert refused(path, *changes, f"tiers.ram.size={remedy.need_bytes - 4096}B").need_bytes == remedy.need_bytes
        assert f"ram needs {format_size(remedy.need_bytes)}, too much" in str(error)
    assert by_layer.need_bytes < as_bf16.need_bytes, "12 bytes and a layer's gradient against 14"
    added = f'tiers.nvme=[{{path="{path.parent / "drive"}", size="%dB"}}]'
    assert drive.tier == "nvme" and drive.fits
    planned(path, added % drive.need_bytes)
    assert refused(path, added % (drive.need_bytes - 4096)).tier == "nvme"
    assert f"a [[tiers.nvme]] of {format_size(drive.need_bytes)} for this run: fits" in str(error)


def test_sufficient_remedy_is_marked(path: Path) -> None:
    need = refused(path).remedies[1].need_bytes
    error = refused(path, f"tiers.ram.size={need}B")
    assert [remedy.fits for remedy in error.remedies] == [False, True, True]
    assert f'optimizer.clip_scope = "layer": ram needs {format_size(need)}, fits' in str(error)


def test_only_effective_remedies_are_named(path: Path) -> None:
    """Covers runs that hold no gradients, runs that may skip a step, and micro-batches that run one after the other."""
    changes = [remedy.change for remedy in refused(path, BY_LAYER, BF16_GRADIENTS).remedies]
    assert changes == ["a [[tiers.nvme]]"]
    by_step = 'optimizer.nonfinite="skip"'
    changes = [remedy.change for remedy in refused(path, by_step, "optimizer.max_grad_norm=0").remedies]
    assert changes[1:] == ['optimizer.clip_scope = "layer"', "a [[tiers.nvme]]"]
    one_after_the_other = (ONE_AT_A_TIME, "training.gradient_accumulation_steps=3")
    changes = [remedy.change for remedy in refused(path, *one_after_the_other).remedies]
    assert changes == ["a [[tiers.nvme]]"], "gradients are summed in place, micro-batch after micro-batch"
    changes = [remedy.change for remedy in refused(path, ONE_AT_A_TIME, ONE_MICRO_BATCH).remedies]
    assert changes[0] == 'precision.grad_dtype = "bfloat16"', "a single micro-batch is not summed"


def test_plan_command_prints_the_remedies(path: Path) -> None:
    result = CliRunner().invoke(command_group(), ["plan", str(path)])
    assert result.exit_code == 3
    assert "Remedies: precision.grad_dtype" in result.stderr.replace("\n", " ")


# -- the case that motivated this project ----------------------------------------------------------------------------

#: config.json of Mistral-Large-Instruct-2407.
MISTRAL_LARGE: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 12288,
    "initializer_range": 0.02,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "num_attention_heads": 96,
    "num_hidden_layers": 88,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
H200 = """task = "pretrain"
output_dir = "{folder}/out"
device = "cpu"
[model]
model_name_or_path = "{folder}"
train_from_scratch = true
[precision]
compute_dtype = "bfloat16"
[data]
max_length = 4096
[[data.train]]
path = "text.txt"
[training]
train_batch_tokens = 65_536
[advanced]
emulate_gpu = true
[tiers.ram]
size = "1400GiB"
[tiers.gpu]
size = "130GiB"
"""


@pytest.fixture
def mistral_large(tmp_path: Path) -> Path:
    """Write and return a config: 123 B parameters, bf16, AdamW, 130 GiB of GPU memory, 1400 GiB of RAM and no drive."""
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_LARGE))
    (tmp_path / "run.toml").write_text(H200.format(folder=tmp_path))
    return tmp_path / "run.toml"


@pytest.mark.slow  # test_headline_plans has a similar plan
def test_123b_fit_with_12_bytes_per_parameter(mistral_large: Path) -> None:
    plan = planned(mistral_large, "optimizer.max_grad_norm=0")
    num_parameters = plan.graph.num_parameters
    assert num_parameters == 122_610_069_504
    held = {
        kind: sum(by_kind[kind] for by_kind in plan.placement.home_bytes.values())
        for kind in ("weights", "optimizer", "gradients")
    }
    assert held["weights"] + held["optimizer"] == pytest.approx(12 * num_parameters, rel=1e-3)
    layer = 4 * max(layout.num_parameters for layout in plan.graph.layouts.values())
    assert held["gradients"] <= 2.5 * layer, "at most two layers, and the small ones"


@pytest.mark.slow  # solves several placements of a large program
def test_123b_with_exact_clipping_needs_a_remedy(mistral_large: Path) -> None:
    error = refused(mistral_large)
    assert error.tier == "ram" and format_size(error.need_bytes) == "1.81 TiB"
    as_bf16, by_layer, drive = error.remedies
    assert (as_bf16.fits, by_layer.fits, drive.fits) == (False, True, True)
    assert format_size(as_bf16.need_bytes) == "1.59 TiB" and format_size(by_layer.need_bytes) == "1.36 TiB"
    added = f'tiers.nvme=[{{path="{mistral_large.parent / "drive"}", size="{drive.need_bytes}B"}}]'
    plan = planned(mistral_large, added)
    assert plan.program.updates.are_deferred
    on_drive = plan.placement.home_bytes["nvme"]
    assert on_drive["gradients"] > 0 == on_drive["weights"] + on_drive["optimizer"], "what no checkpoint holds"


def test_sequential_micro_batches_are_a_remedy(path: Path) -> None:
    """RAM has no space for the activations that all micro-batches of a step pass between layers."""
    several = "training.gradient_accumulation_steps=16"
    error = refused(path, several)
    remedy = next(remedy for remedy in error.remedies if "micro_batch_order" in remedy.change)
    assert remedy.need_bytes < error.need_bytes
    one = planned(path, several, ONE_AT_A_TIME, f"tiers.ram.size={remedy.need_bytes}B")
    assert one.run.batch.num_micro_batches == 16
    less = f"tiers.ram.size={remedy.need_bytes - 4096}B"
    assert refused(path, several, ONE_AT_A_TIME, less).need_bytes == remedy.need_bytes
    for change in ("training.gradient_lanes=2", BF16_GRADIENTS, ONE_AT_A_TIME):
        assert "micro_batch_order" not in str(refused(path, several, change)), "other bits, or already set"
