"""Muon matches torch's Muon for matrices and for each stacked expert, and torch's AdamW for all other parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatrain.base.layout import build_layout, split_into_parts
from megatrain.optim.base import Update, build_segments, bytes_per_parameter
from megatrain.optim.elementwise import AdamW
from megatrain.optim.fused import FusedMatrix
from megatrain.optim.matrices import DeviceOrthogonalizer, device_bytes, host_bytes, matrix_elements, matrix_shapes
from megatrain.optim.muon import Muon, newton_schulz, newton_schulz_bytes
from megatrain.optim.threads import KernelThreads
from oracles.blocks import master_blocks, master_of

SHAPES = {"wide": (24, 40), "tall": (70, 30), "experts": (3, 16, 8), "norm": (40,), "lm_head": (50, 24)}


def make(**options: Any) -> Muon:
    return Muon(AdamW(threads=KernelThreads(1)), lambda n, s: len(s) >= 2 and n != "lm_head", **options)


@pytest.mark.parametrize("split_master", [True, False])
@pytest.mark.parametrize(("adjust_lr", "nesterov"), [("match_rms_adamw", True), ("original", False)])
def test_matrices_follow_torch_and_the_rest_adamw(adjust_lr: Any, nesterov: bool, split_master: bool) -> None:
    layout = build_layout("layer", SHAPES.items(), True)
    optimizer = make(adjust_lr=adjust_lr, nesterov=nesterov)
    kinds = optimizer.state_kinds(split_master)
    torch.manual_seed(0)
    start = torch.zeros(layout.num_elements)
    plain: dict[str, list[torch.nn.Parameter]] = {}
    for entry in layout.entries:
        values = torch.randn(entry.shape)
        start[entry.offset : entry.offset + entry.numel] = values.reshape(-1)
        parts = list(values) if entry.name == "experts" else [values]
        plain[entry.name] = [torch.nn.Parameter(part.clone()) for part in parts]
    blocks = master_blocks(start.numpy(), split_master)
    blocks |= {kind.name: torch.zeros(kind.num_elements(layout)) for kind in kinds if kind.name in ("m", "v")}
    matrices = [p for name in ("wide", "tall", "experts") for p in plain[name]]
    others = [*plain["norm"], *plain["lm_head"]]
    twins = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust_lr),
        torch.optim.AdamW(
            others,  # nothing is excluded: vectors also decay
            weight_decay=0.1,
            lr=1e-2,
            betas=(0.9, 0.95),
        ),
    ]
    segments = build_segments(layout, 0.1, (), kinds=kinds)
    for step in range(1, 6):
        gradient = torch.randn(layout.num_elements)
        for entry in layout.entries:
            own = gradient[entry.offset : entry.offset + entry.numel].view(entry.shape)
            for p, g in zip(plain[entry.name], own if entry.name == "experts" else [own], strict=True):
                p.grad = g * 0.5
        optimizer.update(blocks, gradient, segments, Update(step, 1e-2, 0.5))
        for twin in twins:
            twin.step()
    master = torch.from_numpy(master_of(blocks))
    for entry in layout.entries:
        found = master[entry.offset : entry.offset + entry.numel]
        expected = torch.cat([p.detach().reshape(-1) for p in plain[entry.name]])
        assert torch.allclose(found, expected, rtol=1e-5, atol=2e-4 if entry.name not in ("norm", "lm_head") else 1e-6)
        first = start[entry.offset : entry.offset + entry.numel]
        assert float((found - first).abs().max()) > 1e-2
    assert len(others) == 2


def test_newton_schulz_equalizes_singular_values() -> None:
    wide = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.logspace(0, -2, 64))
    for first, num_steps in ((wide, 5), (wide.T, 5), (wide, 6), (wide.T, 6)):
        matrix = first.to(torch.bfloat16).contiguous()
        newton_schulz(matrix, torch.empty(newton_schulz_bytes(*matrix.shape), dtype=torch.uint8), num_steps)
        values = torch.linalg.svdvals(matrix.float())
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(first, full_matrices=False)
        assert float((matrix.float() * (u @ v)).sum() / (matrix.float().norm() * (u @ v).norm())) > 0.97


def test_matrices_stay_whole_and_the_vocabulary_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = make().state_kinds(True)
    layer = build_layout("layer", [("a", (1024, 1024)), ("norm", (1024,))], True)
    head = build_layout("head", [("lm_head", (2048, 1024))], True)
    assert not all(kind.has_weight_layout(layer) for kind in kinds)
    assert all(kind.has_weight_layout(head) for kind in kinds)
    assert 8 < bytes_per_parameter(kinds, layer) < 8.1 and bytes_per_parameter(kinds, head) == 12
    # Updating the head in parts is bit-identical.
    (cut,) = split_into_parts([head])
    cut = replace(cut, parts=(range(65_536), range(65_536, head.num_elements)))
    (segment,) = build_segments(head, 0.1, (), kinds=kinds)
    gradient = torch.randn(head.num_elements)
    runs = []
    for parts in (head.parts, cut.parts):
        blocks = {"weight": torch.zeros(head.num_elements), "m": torch.zeros(head.num_elements)}
        blocks["v"] = torch.zeros(head.num_elements)
        for part in parts:
            inside = slice(part.start, part.stop)
            own = {name: block[inside] for name, block in blocks.items()}
            make().update(own, gradient[inside], [segment.within(part)], Update(1, 1e-3))
        runs.append(blocks)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


#: Shape, how the matrix is fused, and the rows or columns of each logical matrix, listed by hand.
FUSED: dict[str, tuple[tuple[int, ...], FusedMatrix, list[list[int]]]] = {
    "grouped qkv": (
        (44, 24),
        FusedMatrix((28, 8, 8)),
        [[*range(28)], [*range(28, 36)], [*range(36, 44)]],
    ),
    "gate and up of experts": ((3, 20, 8), FusedMatrix((10, 10)), [[*range(10)], [*range(10, 20)]]),
    "qkv in each head": (
        (24, 30),
        FusedMatrix((2, 2, 4), 3),
        [[0, 1, 8, 9, 16, 17], [2, 3, 10, 11, 18, 19], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]],
    ),
    "tall in each head": ((60, 4), FusedMatrix((2, 1), 20), [[r for r in range(60) if r % 3 < 2], [*range(2, 60, 3)]]),
    "columns": (
        (16, 36),
        FusedMatrix((12,) * 3, divides_columns=True),
        [[*range(12)], [*range(12, 24)], [*range(24, 36)]],
    ),
    "every other column": (
        (2, 9, 14),
        FusedMatrix((1, 1), 7, divides_columns=True),
        [[*range(0, 14, 2)], [*range(1, 14, 2)]],
    ),
}


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("where", ["host", "device", "ranks"])
def test_fused_matrices_match_torch_on_separate_ones(where: str, adjust_lr: Any) -> None:
    layout = build_layout("layer", [(name, shape) for name, (shape, _, _) in FUSED.items()], True)
    options: dict[str, Any] = {"fused": {name: fused for name, (_, fused, _) in FUSED.items()}, "adjust_lr": adjust_lr}
    optimizer, kinds = make(**options), make().state_kinds(False)
    if where == "device":
        optimizer = make(**options, matrices=DeviceOrthogonalizer(torch.device("cpu")))
        optimizer.matrices.allocate_buffers(optimizer, {shape[-2:] for shape, _, _ in FUSED.values()})  # type: ignore
    generator = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(layout.num_elements, generator=generator), []
    plain: list[tuple[torch.Tensor, torch.nn.Parameter]] = []  # positions of a logical matrix, and the matrix
    for entry in layout.entries:
        places = torch.arange(entry.offset, entry.offset + entry.numel).view(-1, *entry.shape[-2:])
        _, fused, indexes = FUSED[entry.name]
        for stacked in places:
            for own in indexes:
                at = stacked[:, own] if fused.divides_columns else stacked[own]
                plain.append((at, torch.nn.Parameter(weight[at].clone())))
    twin = torch.optim.Muon([p for _, p in plain], lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust_lr)
    blocks = {"weight": weight.clone(), "m": torch.zeros_like(weight), "v": torch.zeros(1024)}
    segments = build_segments(layout, 0.1, (), kinds=kinds)
    for step in range(1, 4):
        gradient = torch.randn(layout.num_elements, generator=generator)
        gradients.append(gradient)
        for at, parameter in plain:
            parameter.grad = gradient[at]
        twin.step()
        if where != "ranks":
            optimizer.update(blocks, gradient, segments, Update(step, 1e-2))
            continue
        # Ranks compute elementwise updates for their shards, with arbitrary borders, but orthogonalize whole matrices.
        borders = [0, 700, 1811, 2500, layout.num_elements]
        shards = [range(*each) for each in pairwise(borders)]
        directions = torch.zeros(layout.num_elements, dtype=torch.bfloat16)
        for apply in (False, True):
            for shard in shards:
                inside = slice(shard.start, shard.stop)
                own_blocks = {name: block[inside] for name, block in blocks.items() if name != "v"}
                own_segments = [s.within(shard) for s in segments if s.start < shard.stop and s.stop > shard.start]
                call = optimizer.apply_directions if apply else optimizer.make_directions
                call(own_blocks, gradient[inside], own_segments, Update(step, 1e-2), directions[inside])
            if not apply:
                for entry in layout.entries:
                    rows, columns = entry.shape[-2:]
                    own = directions[entry.offset : entry.offset + entry.numel].view(-1, rows, columns)
                    for matrix in own:
                        scratch = torch.empty(optimizer.orthogonalize_bytes(rows, columns), dtype=torch.uint8)
                        optimizer.orthogonalize(matrix, scratch, entry.name)
    for at, parameter in plain:
        torch.testing.assert_close(blocks["weight"][at], parameter.detach(), rtol=1e-5, atol=2e-4)
        assert float((parameter.detach() - weight[at]).abs().max()) > 5e-3
    host = {"weight": weight.clone(), "m": torch.zeros_like(weight), "v": torch.zeros(1024)}
    for step, gradient in enumerate(gradients, 1):
        make(**options).update(host, gradient, segments, Update(step, 1e-2))
    assert torch.equal(host["weight"], blocks["weight"]) and torch.equal(host["m"], blocks["m"])


def test_memory_and_flops_of_matrices() -> None:
    muon, layout = make(num_steps=3), build_layout("layer", SHAPES.items(), True)
    frozen = build_layout("frozen", [("base", (500, 500))], False)
    shapes = matrix_shapes(muon, [frozen, layout])
    assert shapes == {(24, 40), (70, 30), (16, 8)}
    assert matrix_elements(muon, layout) == 24 * 40 + 70 * 30 + 3 * 16 * 8
    scratch_bytes = 2 * (70 * 30 + 2 * 30 * 30)
    assert newton_schulz_bytes(70, 30) == newton_schulz_bytes(30, 70) == scratch_bytes
    assert [muon.workspace_bytes(entry) for entry in layout.entries] == [
        2 * 24 * 40 + 2 * (24 * 40 + 2 * 24 * 24),
        2 * 70 * 30 + scratch_bytes,
        2 * 16 * 8 + 2 * (16 * 8 + 2 * 8 * 8),
        0,
        0,
    ]
    assert device_bytes(muon, torch.device("cpu"), shapes) == 2 * 70 * 30 + scratch_bytes
    assert device_bytes(muon, torch.device("cuda"), shapes) == 2 * 70 * 30 + scratch_bytes + 8 * 4096 * 1024
    assert device_bytes(muon, torch.device("cuda"), []) == 0
    assert host_bytes(shapes) == 2 * 8192 and host_bytes([(32, 64), (1, 9)]) == 2 * 4096 and host_bytes([]) == 0
    assert muon.orthogonalize_flops(70, 30) == 3 * (4 * 30 * 30 * 70 + 2 * 30**3) == muon.orthogonalize_flops(30, 70)
    assert muon.piece_bytes == 0


def test_flops_and_workspace_of_fused_matrices() -> None:
    muon = make(fused={"qkv": FusedMatrix((28, 8, 8)), "c": FusedMatrix((12,) * 3, divides_columns=True)})
    assert (
        muon.orthogonalize_flops(44, 24, "qkv")
        == sum(make().orthogonalize_flops(rows, 24) for rows in (28, 8, 8))
        < make().orthogonalize_flops(44, 24)
    )
    copied_bytes = muon.orthogonalize_bytes(16, 36) - newton_schulz_bytes(16, 36)
    assert 2 * 16 * 36 <= copied_bytes < 2 * 16 * 36 + 256, "in bf16, aligned"
    assert make(fused={"qkv": FusedMatrix((28, 8, 8))}).orthogonalize_bytes(44, 24) == newton_schulz_bytes(44, 24)
