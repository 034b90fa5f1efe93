"""Many kinds of modules, and bitwise comparisons of tiered and plain modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megatrain
from megatrain.embed.weights import block_of
from tiered import TieredStore

#: Options that set the homes of weights and gradients, by name. The default is RAM if there is space.
HOMES = {
    "ram": {},
    "weights on a drive": {"weights": "nvme"},
    "gradients on a drive": {"gradients": "nvme"},
    "all on a drive": {"weights": "nvme", "gradients": "nvme"},
}


def small_store(folder: Path, ram: int | str = "16MiB") -> TieredStore:
    """Open a small store with RAM and a drive."""
    return megatrain.open_store(ram=ram if isinstance(ram, str) else f"{ram}B", nvme=folder, nvme_size="256MiB")


def stored_gradient(parameter: Tensor) -> Tensor | None:
    """Return a copy of a parameter's gradient, from the store or from ``grad``, or None if it has no gradient."""
    block = block_of(parameter)
    if block is None:
        return None if parameter.grad is None else parameter.grad.clone()
    if block.gradients is None or not block.gradients.has_gradient(parameter):
        return None
    name = block.name_of(parameter)
    (entry,) = [entry for entry in block.layout.entries if entry.name == name]
    with block.store.acquire(block.gradients.key, "ram") as lease:
        return block.gradients.view(lease.tensor, entry).view(entry.shape).clone()


def assert_same_gradients(plain: nn.Module, tiered: nn.Module) -> None:
    """Assert that the same parameters have gradients in both modules, and that the gradients are equal in fp32."""
    pairs = zip(plain.named_parameters(), tiered.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        expected, found = one.grad, stored_gradient(other)
        assert (expected is None) == (found is None), f"{name}: {expected} and {found}"
        if expected is not None and found is not None:
            dense = expected.to_dense() if expected.layout is not torch.strided else expected
            assert torch.equal(dense.float(), found.float()), name


def assert_same_weights(plain: nn.Module, tiered: nn.Module) -> None:
    """Assert that both modules have equal ``state_dict`` entries in the same order."""
    one, other = plain.state_dict(), tiered.state_dict()
    assert list(one) == list(other)
    for name, numbers in one.items():
        assert torch.equal(numbers, other[name]), name


class RootParameters(nn.Module):
    """Module with parameters outside of submodules: direct, in a list and in a dict. One is empty, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.named = nn.ParameterDict({"a b": nn.Parameter(torch.randn(8))})
        self.parts = nn.ModuleDict({"x/y": nn.Linear(8, 8), "z": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.many:
            x = torch.tanh(x @ weight) * self.scale
        return self.parts["z"](self.parts["x/y"](x + self.named["a b"])) + self.nothing.sum()


class Tied(nn.Module):
    """Module that runs its layers twice. Its head uses the embedding's weight, unless only ``sparse`` is set."""

    def __init__(self, *, reads_directly: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0, sparse=sparse)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.reads_directly = reads_directly
        if not reads_directly and not sparse:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :4].abs() * 7).long() % 11
        y = self.embed(tokens)
        for _ in range(2):
            for layer in self.layers:
                y = y + layer(y)
        return F.linear(y, self.embed.weight) if self.reads_directly else self.head(y)


class Checkpointed(nn.Module):
    """Layers with activation checkpointing. With ``inside``, blocks checkpoint only their MLPs."""

    def __init__(self, *, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.reentrant, self.inside = reentrant, inside
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(16, 8)}) for _ in range(3))
        self.blocks = nn.ModuleList(_Block(reentrant=reentrant, inside=inside) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: y + layer["b"](layer["a"](y).relu()), x, use_reentrant=self.reentrant)
        for block in self.blocks:
            x = block(x) if self.inside else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class _Block(nn.Module):
    def __init__(self, *, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.reentrant, self.inside = reentrant, inside
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (checkpoint(self.mlp, y, use_reentrant=self.reentrant) if self.inside else self.mlp(y))


class Energy(nn.Module):
    """Module that returns forces, the derivative of an energy: its forward contains a differentiable backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (forces,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return forces


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x.unsqueeze(1).expand(-1, 3, -1))[0])


class Attention(nn.Module):
    """Attention that reads the weight of its output projection without calling the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(1).expand(-1, 3, -1).contiguous()
        return self.attention(y, y, y, need_weights=False)[0]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1).unsqueeze(-1).expand(-1, -1, -1, 8))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.unsqueeze(1).expand(-1, 3, -1))


class Nested(nn.Module):
    """Nested lists of layers, with one shared layer."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2)) for _ in "ab"
        ]
        self.stages = nn.ModuleList(stages)
        self.root = nn.Linear(8, 8)
        self.shared = self.root

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + layer(self.shared(x))
        return self.root(x)


def parametrized(kind: str) -> nn.Module:
    """Return layers that compute their weights from other parameters in every forward."""
    wrap: Any = getattr(nn.utils.parametrizations, kind)
    return nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU()))


def make_partly_frozen() -> nn.Module:
    """Return a module with one frozen layer and one frozen weight."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    module[1][0].weight.requires_grad_(False)
    return module


ZOO: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
    "rooted": RootParameters,
    "tied": Tied,
    "tied and read directly": lambda: Tied(reads_directly=True),
    "checkpoint": lambda: Checkpointed(reentrant=False, inside=False),
    "checkpoint inside": lambda: Checkpointed(reentrant=False, inside=True),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True, inside=False),
    "reentrant checkpoint inside": lambda: Checkpointed(reentrant=True, inside=True),
    "double backward": Energy,
    "lstm": lambda: Recurrent("LSTM"),
    "gru": lambda: Recurrent("GRU"),
    "attention": Attention,
    "convolutions": Convolutions,
    "encoder": Encoder,
    "nested": Nested,
    "weight_norm": lambda: parametrized("weight_norm"),
    "spectral_norm": lambda: parametrized("spectral_norm"),
    "orthogonal": lambda: parametrized("orthogonal"),
    "frozen in part": make_partly_frozen,
}


def pair_of(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Return two modules with equal weights."""
    torch.manual_seed(seed)
    plain = make()
    return plain, copy.deepcopy(plain)


def run_backward(module: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    """Run a module's forward and the backward of a simple loss, and return the module's output."""
    out: Tensor = module(x)
    (out.float().square().mean() * scale).backward()
    return out.detach()


def make() -> nn.Module:
    """Return a small module with a nested layer."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)
    )


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return ``count`` input batches for the module from ``make``."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 8, generator=generator).to(dtype) for _ in range(count)]
