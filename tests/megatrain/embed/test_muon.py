"""`TieredMuon` matches torch's Muon and AdamW, exchanges state with them, and refuses invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from oracles.embedded import batches, make, pair_of, run_backward, small_store
from tiered.errors import CapacityError

MATRICES: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": 4}
OTHERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.05}


def split(module: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the matrices and all other parameters, with their names."""
    own = list(module.named_parameters())
    return [each for each in own if each[1].ndim == 2], [each for each in own if each[1].ndim != 2]


def tiered(module: nn.Module, **options: Any) -> megatrain.TieredMuon:
    matrices, others = split(module)
    groups = [{"params": matrices, **MATRICES}, {"params": others, "use_muon": False, **OTHERS}]
    return megatrain.TieredMuon(groups, **options)


def close(found: Tensor, expected: Tensor) -> None:
    """Compare, with a bf16 tolerance for matrices: Muon iterates in bf16, and torch transposes different matrices."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-4 if expected.ndim == 2 else 1e-6)


@pytest.mark.parametrize("offloaded", [False, True])
def test_results_match_torch(offloaded: bool, tmp_path: Path) -> None:
    plain, module = pair_of(make)
    matrices, others = split(plain)
    twins = [torch.optim.Muon(matrices, **MATRICES), torch.optim.AdamW(others, foreach=False, **OTHERS)]
    begin = {name: numbers.clone() for name, numbers in plain.state_dict().items()}
    with small_store(tmp_path) as store:
        if offloaded:
            megatrain.offload(module, store, weights="nvme")
        optimizer = tiered(module, store=store)
        for x in batches(5):
            for each in (plain, module):
                run_backward(each, x)
            for twin in twins:
                twin.step()
                twin.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        found = module.state_dict()
        for name, expected in plain.state_dict().items():
            close(found[name], expected)
            assert float((found[name] - begin[name]).abs().max()) > 1e-3, name
        for name, parameter in module.named_parameters():
            state, twin = optimizer.state[parameter], dict(plain.named_parameters())[name]
            if parameter.ndim == 2:
                assert state.keys() == {"step", "momentum_buffer"}
                torch.testing.assert_close(
                    state["momentum_buffer"], twins[0].state[twin]["momentum_buffer"], rtol=1e-2, atol=1e-3
                )
            else:
                assert (
                    state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg_sq"].shape == parameter.shape
                )


def test_muon_state_resumes_and_converts_to_and_from_torch(tmp_path: Path) -> None:
    plain, module = pair_of(make)
    with megatrain.open_store(ram="32MiB", path=tmp_path / "store") as store:
        optimizer = tiered(module, store=store, ema_decay=0.9)
        xs = batches(3)
        run_backward(module, xs[0])
        optimizer.step()
        saved = optimizer.state_dict()
        full = optimizer.full_state_dict()
        weights = {name: numbers.clone() for name, numbers in module.state_dict().items()}

        def go_on() -> dict[str, Tensor]:
            for x in xs[1:]:
                module.zero_grad()
                run_backward(module, x)
                optimizer.step()
            return {name: numbers.clone() for name, numbers in module.state_dict().items()}

        first = go_on()
        for state in (saved, full):
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)
            again = go_on()
            assert all(torch.equal(first[name], again[name]) for name in first)
        matrices, _ = split(plain)
        twin = torch.optim.Muon([p for _, p in matrices], **MATRICES)
        numbers = range(len(matrices))
        twin.load_state_dict(
            {"state": {n: full["state"][n] for n in numbers}, "param_groups": twin.state_dict()["param_groups"]}
        )
        assert all(twin.state[p]["momentum_buffer"].shape == p.shape for _, p in matrices)


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    with megatrain.open_store(ram="16MiB") as store:
        for number, (params, options, text) in enumerate(
            [
                (
                    module.named_parameters(),
                    {},
                    r"parameter 0.bias of this group has the shape \(16,\)\. Put it into a",
                ),
                (module.parameters(), {}, r"parameter number 1 of this group has the shape \(16,\)"),
                ([module[0].weight], {"momentum": 1.0}, "^momentum=1.0: it must be at least 0 and below 1$"),
                ([module[0].weight], {"momentum": -0.1}, "^momentum=-0.1: it must be at least 0$"),
                ([module[0].weight], {"ns_steps": 100}, "^ns_steps=100: it must be from 1 to 99$"),
                ([module[0].weight], {"ns_steps": 0}, "^ns_steps=0: it must be from 1 to 99$"),
                (
                    [module[0].weight],
                    {"ns_coefficients": (1.0, 2.0)},
                    r"^ns_coefficients=\(1.0, 2.0\): pass three numbers$",
                ),
                (
                    [module[0].weight],
                    {"adjust_lr_fn": "other"},
                    '^adjust_lr_fn="other": pass "original" or "match_rms_adamw"$',
                ),
                ([module[0].weight], {"state_dtype": "int8"}, "^TieredMuon has no state_dtype"),
                ([module[0].weight], {"lr": -1.0}, "^lr=-1.0: it must be at least 0$"),
            ]
        ):
            with pytest.raises(ValueError, match=text):
                megatrain.TieredMuon(params, store=store, name=str(number), **options)
        assert not list(store.blocks()) and store.stats().tiers["ram"].used_bytes == 0
        for number, options in enumerate(
            ({"momentum": 0.0, "ns_steps": 1}, {"ns_steps": 99, "adjust_lr_fn": "original"})
        ):
            megatrain.TieredMuon([module[0].weight], store=store, name=f"bound{number}", **options).release()
        # Muon takes workspace for its iteration from the store, and returns it on release.
        optimizer = megatrain.TieredMuon([module[0].weight], store=store)
        taken = store.stats().tiers["ram"].used_bytes
        assert 0 < taken - sum(spec.nbytes for spec in store.blocks()) < 4096, "of a matrix of 16 rows"
        optimizer.release()
        assert store.stats().tiers["ram"].used_bytes == 0
    wide = nn.Parameter(torch.zeros(1024, 1024))
    with megatrain.open_store(ram="12MiB") as small, pytest.raises(CapacityError):
        megatrain.TieredMuon([wide], store=small)
