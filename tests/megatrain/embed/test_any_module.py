"""Offloaded models of many kinds train like plain PyTorch, and are bit-identical on a drive and in RAM."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.embed.offloaded_module import offloaded_module
from megatrain.embed.partition import Part, enclosing_parts, partition, parts_of
from megatrain.embed.room import LocalBlocks
from oracles.any_modules import CASES, Case
from oracles.embedded import stored_gradient
from tiered import CapacityError, KiB

NUM_STEPS = 3
RATE = 1e-3
#: torch's kernels round updates differently, so later gradients and losses also differ slightly.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
#: One model of each kind, which is always tested. The other models are similar, and run only in the slow tests.
FIRST = ("Flux", "Wan", "UNet", "T5", "Whisper", "ViT", "reward", "protein")


def make(name: str, *, dtype: torch.dtype = torch.float32, lora: bool = False) -> Any:
    """Return a model, optionally with LoRA adapters on its attention."""
    case = CASES[name]
    pytest.importorskip(case.needs)
    torch.manual_seed(0)
    model: Any = case.make().to(dtype).train()
    if lora:
        peft = pytest.importorskip("peft")
        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))
    return model


@contextmanager
def offloaded(model: Any, folder: Path, ram: str, where: str) -> Iterator[Any]:
    """Offload a model into a store; yield its optimizer."""
    with megatrain.open_store(ram=ram, nvme=folder, nvme_size="256MiB") as store:
        megatrain.offload(model, store, weights=where, gradients=where)
        yield megatrain.TieredAdamW(trained(model), lr=RATE, weight_decay=0.1, max_grad_norm=1.0, state=where)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def backward(case: Case, model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, Any]]:
    """Run a forward and a backward. Return the loss, and all gradients by name."""
    inputs = {
        key: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for key, one in case.inputs().items()
    }
    loss = case.loss(model(**inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: stored_gradient(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_state_exceeds_the_ram_of_the_store(name: str) -> None:
    num_bytes = 16 * sum(parameter.numel() for parameter in make(name).parameters())
    assert num_bytes > 2 * CASES[name].ram_kib * KiB, num_bytes / KiB  # weights, gradients, m and v in fp32


@pytest.mark.parametrize(
    ("name", "lora"),
    [pytest.param(name, False, marks=() if name in FIRST else pytest.mark.slow) for name in CASES]
    + [pytest.param(name, True, marks=() if name == "Flux" else pytest.mark.slow) for name in ("Flux", "Wan", "UNet")],
    ids=str,
)
def test_losses_gradients_and_weights_match_plain_pytorch(name: str, lora: bool, tmp_path: Path) -> None:
    case, plain = CASES[name], make(name, lora=lora)
    model, in_ram = copy.deepcopy(plain), copy.deepcopy(plain)
    if hasattr(plain, "enable_gradient_checkpointing"):  # diffusers models
        for one in (plain, model, in_ram):
            one.enable_gradient_checkpointing()
    twin = torch.optim.AdamW(trained(plain), lr=RATE, weight_decay=0.1)
    with (
        offloaded(model, tmp_path / "a", f"{case.ram_kib}KiB", "nvme") as optimizer,
        offloaded(in_ram, tmp_path / "b", "64MiB", "ram") as other,
    ):
        for _ in range(NUM_STEPS):
            loss, gradients = backward(case, model)
            same, same_gradients = backward(case, in_ram)
            wanted, wanted_gradients = backward(case, plain)
            assert loss == same
            assert loss == pytest.approx(wanted, rel=2e-6, abs=1e-6)
            for key, expected in wanted_gradients.items():
                assert (expected is None) == (gradients[key] is None), key
                if expected is not None:
                    assert torch.equal(gradients[key], same_gradients[key]), key
                    torch.testing.assert_close(gradients[key], expected, **TOLERANCE)
            torch.nn.utils.clip_grad_norm_(trained(plain), 1.0)
            for one in (optimizer, other, twin):
                one.step()
                one.zero_grad()
        found, same_weights = model.state_dict(), in_ram.state_dict()
        for key, expected in plain.state_dict().items():
            assert torch.equal(found[key], same_weights[key]), key
            torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Flux", "UNet", pytest.param("Wan", marks=pytest.mark.slow)])
def test_adapters_do_not_change_the_partition_into_units(name: str) -> None:
    assert [unit.name for unit in partition(make(name, lora=True), "model")] == [
        unit.name for unit in partition(make(name), "model")
    ]


def test_unet_stages_are_split_with_and_without_attention() -> None:
    names = {unit.name for unit in partition(make("UNet"), "model")}
    assert {"up_blocks.0.resnets.0", "down_blocks.1.resnets.0", "up_blocks.1.resnets.1"} <= names
    assert not {"up_blocks.0", "down_blocks.1", "up_blocks.1"} & names


class Stage(nn.Module):
    """Stage of layers: its list has one item, a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer])


def test_similar_stages_are_split_if_one_is_recognized() -> None:
    plain, with_attention = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    for layers, expected in (
        ((plain, with_attention), ["0.blocks.0", "1.blocks.0"]),
        ((plain, copy.deepcopy(plain)), ["0", "1"]),
    ):
        stages = nn.ModuleList(map(Stage, layers))
        assert [unit.name for unit in partition(stages, "model")] == expected


def make_mixed() -> nn.Module:
    """Return a module with direct, tied, frozen and bf16 parameters, and an empty list."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(3))
    model.embed = nn.Embedding(5, 4)
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).bfloat16())
    layer[0].bias.requires_grad_(False)
    model.layers = nn.ModuleList([layer, nn.Sequential(nn.Linear(4, 2))])
    model.nothing = nn.ModuleList([nn.ReLU()])
    model.head = nn.Linear(4, 5)
    model.head.weight = model.embed.weight
    return model


def test_units_share_parts_by_dtype_and_training() -> None:
    model = make_mixed()
    units = partition(model, "m", leave=["head.b*", "layers.1.0.bias"])
    first, *_ = parts = parts_of(units)
    names = {unit.name: [part.layout.name for part in unit.parts] for unit in units}
    assert names == {
        "": ["(root)"],
        "embed": ["embed"],
        "layers.0": ["layers.0", "layers.0.frozen", "layers.0.bfloat16"],
        "layers.1": ["layers.1"],
        "head": ["embed"],
    }
    assert [unit.module for unit in units] == [model, model.embed, *model.layers, model.head]
    found = [
        (part.layout.name, part.dtype, list(part.parameters), part.weight_bytes, part.gradient_bytes) for part in parts
    ]
    assert found == [
        ("(root)", torch.float32, ["scale"], 4096, 4096),
        ("embed", torch.float32, ["embed.weight"], 4096, 4096),
        ("layers.0", torch.float32, ["layers.0.0.weight"], 4096, 4096),
        ("layers.0.frozen", torch.float32, ["layers.0.0.bias"], 4096, 0),
        ("layers.0.bfloat16", torch.bfloat16, ["layers.0.1.weight", "layers.0.1.bias"], 4096, 8192),
        ("layers.1", torch.float32, ["layers.1.0.weight"], 4096, 4096),
    ]
    assert (first.root, first.weight_key, first.gradient_key) == (
        "m/-28-root-29-",
        "m/-28-root-29-/weight",
        "m/-28-root-29-/grad.0",
    )
    enclosing = {unit.name: [part.layout.name for part in enclosing_parts(unit, units)] for unit in units}
    assert enclosing == {name: list(dict.fromkeys(["(root)", *own])) for name, own in names.items()}
    for part in parts:
        assert all(parameter is dict(model.named_parameters())[name] for name, parameter in part.parameters.items())


def test_working_set_of_a_module() -> None:
    """The largest unit is layers.0. It has 1024 fp32 and 2048 bf16 elements that are trained, and 1024 frozen ones."""
    units = partition(make_mixed(), "m")
    parts = parts_of(units)

    def keys_of(part: Part) -> list[str]:
        return [part.weight_key, part.gradient_key]

    with megatrain.open_store(ram="64KiB") as store:
        access = LocalBlocks(store)
        assert access.working_bytes(units) == 24 * (1024 + 2048) + 2 * 4096
        # Weights of (root) and layers.0, and gradients of layers.0
        need_bytes = 4 * 4096 + 4096 + 8192
        on_drive = {key: "nvme" for part in parts for key in keys_of(part)}
        access.check_working_set(units, on_drive, {"ram": 64 * KiB - need_bytes}.__getitem__)
        with pytest.raises(CapacityError) as caught:
            access.check_working_set(units, on_drive, {"ram": 64 * KiB - need_bytes + 1}.__getitem__)
        assert (caught.value.tier, caught.value.need_bytes, caught.value.free_bytes) == (
            "ram",
            need_bytes,
            need_bytes - 1,
        )
        assert str(caught.value).endswith("; to run layers.0 with its parts. Increase the size of ram")
        in_ram = {**on_drive, **dict.fromkeys(keys_of(parts[2]), "ram")}
        access.check_working_set(units, in_ram, {"ram": 64 * KiB - need_bytes + 8192}.__getitem__)
        with pytest.raises(CapacityError, match="to run the module with its parts"):
            access.check_working_set(units, on_drive, {"ram": 64 * KiB - 100}.__getitem__)


def test_experts_of_one_layer_stay_together() -> None:
    def layer(num_experts: int) -> nn.Module:
        experts = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(num_experts)]
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "experts": nn.ModuleList(experts)})

    model = nn.Module()
    model.layers = nn.ModuleList([layer(1), layer(3)])
    assert [unit.name for unit in partition(model, "model")] == ["layers.0", "layers.1"]


def test_mixed_bf16_and_fp32_model_matches_plain_and_reloads(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    case = CASES["Wan"]
    make("Wan").save_pretrained(tmp_path / "whole")
    plain = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "whole", torch_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32, torch.bfloat16}
    model = copy.deepcopy(plain)
    with offloaded(model, tmp_path / "a", "640KiB", "nvme") as optimizer:
        with megatrain.open_store(ram="64MiB") as store:
            twin = megatrain.TieredAdamW(plain.parameters(), lr=RATE, weight_decay=0.1, max_grad_norm=1.0, store=store)
            for _ in range(NUM_STEPS):
                losses = [backward(case, one, torch.bfloat16)[0] for one in (model, plain)]
                assert losses[0] == losses[1]
                for each in (optimizer, twin):
                    each.step()
                    each.zero_grad()
        model.save_pretrained(tmp_path / "trained")
    again = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "trained", torch_dtype=torch.bfloat16)
    for key, expected in plain.state_dict().items():
        assert torch.equal(again.state_dict()[key], expected), key


def test_diffusers_folder_is_loaded_file_by_file(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    whole = make("Wan")
    whole.save_pretrained(tmp_path / "whole", max_shard_size="40KB")
    with accelerate.init_empty_weights():  # only parameters stay empty: buffers are in no file
        model = diffusers.WanTransformer3DModel.from_config(
            diffusers.WanTransformer3DModel.load_config(tmp_path / "whole")
        )
    with megatrain.open_store(ram="512KiB", nvme=tmp_path / "store", nvme_size="64MiB") as store:
        megatrain.offload(model, store, weights="nvme", gradients="nvme")
        files = sorted((tmp_path / "whole").glob("*.safetensors"))
        assert len(files) > 2
        for file in files:
            model.load_state_dict(load_file(file), strict=False)
        assert not any(block.missing_names for block in offloaded_module(model).blocks)  # type: ignore[union-attr]
        loss, gradients = backward(CASES["Wan"], model)
        wanted, expected = backward(CASES["Wan"], whole)
        assert loss == wanted
        assert all(torch.equal(gradients[key], one) for key, one in expected.items() if one is not None)


def test_saved_adapters_load_in_diffusers(tmp_path: Path) -> None:
    model = make("Flux", lora=True)
    with offloaded(model, tmp_path / "a", "896KiB", "nvme") as optimizer:
        backward(CASES["Flux"], model)
        optimizer.step()
        model.save_lora_adapter(tmp_path / "adapter")
        found = {name: one.clone() for name, one in model.state_dict().items() if "lora" in name}
    other = make("Flux")
    other.load_lora_adapter(tmp_path / "adapter", weight_name="pytorch_lora_weights.safetensors", prefix=None)
    loaded = {name.replace(".default_0.", ".default."): one for name, one in other.state_dict().items()}
    assert found
    for name, expected in found.items():
        assert torch.equal(loaded[name], expected), name
