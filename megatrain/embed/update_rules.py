"""Optimizers with torch's interface: AdamW, Lion, SGD, Adafactor and Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from megatrain.base.layout import build_layout
from megatrain.embed.optimizer import TieredOptimizer
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.base import StateKind
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.matrices import DeviceOrthogonalizer, Shape, host_bytes
from megatrain.optim.muon import COEFFICIENTS, EPS, Muon
from tiered import TieredStore


class TieredAdamW(TieredOptimizer):
    """AdamW with decoupled weight decay and the defaults of ``torch.optim.AdamW``; see ``TieredOptimizer``."""

    setting_names = ("betas", "eps")
    torch_names: Mapping[str, str] = {"m": "exp_avg", "v": "exp_avg_sq"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, store=store, **options)

    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return AdamW(float(beta1), float(beta2), float(settings["eps"]), **self._kernel_options())


class TieredLion(TieredOptimizer):
    """Lion; see ``TieredOptimizer``."""

    setting_names = ("betas",)
    torch_names: Mapping[str, str] = {"m": "exp_avg"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, store=store, **options)

    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return Lion(float(beta1), float(beta2), **self._kernel_options())


class TieredSGD(TieredOptimizer):
    """SGD with momentum and the defaults of ``torch.optim.SGD``; see ``TieredOptimizer``."""

    setting_names = ("momentum", "nesterov")
    torch_names: Mapping[str, str] = {"m": "momentum_buffer"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, store=store, **options)

    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        return SGD(float(settings["momentum"]), bool(settings["nesterov"]), **self._kernel_options())

    def widest_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with momentum if the group or the default uses it, because groups can share a block."""
        return {**settings, "momentum": max(float(settings["momentum"]), float(self.defaults["momentum"]))}


class TieredAdafactor(TieredOptimizer):
    """Adafactor with an external learning rate; see ``TieredOptimizer`` and ``megatrain.optim.adafactor``."""

    setting_names = ("decay_rate", "eps", "clip_threshold")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        decay_rate: float = -0.8,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "decay_rate": decay_rate,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        if options.get("state_dtype", "float32") != "float32":
            raise ValueError("TieredAdafactor has no state_dtype, because it keeps row and column means in fp32")
        super().__init__(params, defaults, store=store, **options)

    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        decay_rate, eps, clip_threshold = (float(settings[name]) for name in self.setting_names)
        return Adafactor(decay_rate, eps, clip_threshold, threads=self.threads)


class TieredMuon(TieredOptimizer):
    """Muon for matrices and AdamW for all other parameters; see ``TieredOptimizer`` and ``megatrain.optim.muon``.

    Arguments, defaults and arithmetic are the same as in ``torch.optim.Muon``. That class accepts only two-dimensional
    parameters, but an offloaded layer has one optimizer and usually also contains other parameters. Put the latter in
    groups with ``use_muon=False``, which AdamW updates; also put embeddings and heads there. Groups share ``lr`` and
    ``weight_decay`` unless they set their own values. With ``adjust_lr_fn="match_rms_adamw"``, the same learning rate
    suits both. In addition to the master, state needs 4 bytes per matrix element and 8 per element of other parameters.
    The Newton-Schulz iteration runs on the parameters' compute device. On a GPU, it needs memory outside of all tiers
    (``megatrain.optim.matrices.device_bytes``).

    Args:
        params: Parameters or groups, as for other optimizers. Groups can set ``use_muon``.
        momentum: At least 0 and below 1.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: Three coefficients that each Newton-Schulz step uses.
        eps: Lower limit of the norm by which the iteration divides. In a group with ``use_muon=False``, AdamW's eps, by
            default 1e-8.
        ns_steps: Number of Newton-Schulz steps.
        adjust_lr_fn: "original" (also None) or "match_rms_adamw".
        betas: AdamW's betas, for groups with ``use_muon=False``.
        store: As in ``TieredOptimizer``.
        options: As in ``TieredOptimizer``, except ``state_dtype``.

    Raises:
        ValueError: As in ``TieredOptimizer``, or a parameter for Muon is not a matrix.
    """

    setting_names = ("use_muon", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "betas")
    torch_names: Mapping[str, str] = {"m": "momentum_buffer", "v": "exp_avg_sq"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "use_muon": True,
        }
        if options.get("state_dtype", "float32") != "float32":
            raise ValueError("TieredMuon has no state_dtype, because it keeps its moments in fp32")
        groups = [{**g, "params": _as_list(g["params"])} if isinstance(g, dict) else g for g in params]
        # Include all groups, because an offloaded layer's block can contain parameters of several groups.
        self._matrices = {id(parameter) for group in groups if _uses_muon(group) for parameter in _parameters_of(group)}
        self._shapes: set[Shape] = set()
        self._orthogonalizer: DeviceOrthogonalizer | None = None
        super().__init__(groups, defaults, store=store, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see ``TieredOptimizer``."""
        param_group["params"] = _as_list(param_group["params"])
        ids = map(id, _parameters_of(param_group))
        if _uses_muon(param_group):
            self._matrices.update(ids)
        else:
            param_group.setdefault("eps", 1e-8)
            self._matrices.difference_update(ids)
        super().add_param_group(param_group)
        matrices = [p for p in _parameters_of(param_group) if id(p) in self._matrices]
        self._shapes |= {(len(matrix), matrix.shape[1]) for matrix in matrices}
        if self._orthogonalizer is None and matrices and matrices[0].is_cuda:
            self._orthogonalizer = DeviceOrthogonalizer(matrices[0].device)
        if self._orthogonalizer is not None:
            muon = self._make_muon(self.defaults, lambda name, shape: True)
            self._orthogonalizer.allocate_buffers(muon, self._shapes)

    def release(self) -> None:
        """Unregister the state and drop the workspace on the GPU; see ``TieredOptimizer``."""
        super().release()
        self._orthogonalizer = None

    def check_group(self, param_group: Mapping[str, Any]) -> None:
        super().check_group(param_group)
        momentum, ns_steps, adjust = (param_group[name] for name in ("momentum", "ns_steps", "adjust_lr_fn"))
        if not 0 <= float(momentum) < 1:
            raise ValueError(f"momentum={momentum}: it must be at least 0 and below 1")
        if not 1 <= int(ns_steps) < 100:
            raise ValueError(f"ns_steps={ns_steps}: it must be from 1 to 99")
        if len(param_group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients={param_group['ns_coefficients']}: pass three numbers")
        if adjust not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn="{adjust}": pass "original" or "match_rms_adamw"')
        if not param_group["use_muon"]:
            return
        names = param_group.get("param_names") or [f"number {n}" for n in range(len(param_group["params"]))]
        for name, parameter in zip(names, param_group["params"], strict=True):
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon updates two-dimensional parameters, but parameter {name} of this group has the shape "
                    f"{tuple(parameter.shape)}. Put it into a group with use_muon=False, which AdamW updates"
                )

    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        uses_muon = bool(settings["use_muon"])
        return self._make_muon(settings, lambda name, shape: uses_muon)

    def _make_muon(self, settings: Mapping[str, Any], is_matrix: Callable[[str, Sequence[int]], bool]) -> Muon:
        beta1, beta2 = settings["betas"]
        a, b, c = settings["ns_coefficients"]
        return Muon(
            AdamW(float(beta1), float(beta2), float(settings["eps"]), threads=self.threads),
            is_matrix,
            momentum=float(settings["momentum"]),
            nesterov=bool(settings["nesterov"]),
            num_steps=int(settings["ns_steps"]),
            adjust_lr=settings["adjust_lr_fn"] or "original",
            coefficients=(float(a), float(b), float(c)),
            eps=float(settings["eps"]),
            matrices=self._orthogonalizer,
        )

    def kinds_of(
        self, settings: Mapping[str, Any], split_master: bool, parameters: Mapping[str, nn.Parameter]
    ) -> Sequence[StateKind]:
        matrices = frozenset(name for name, parameter in parameters.items() if id(parameter) in self._matrices)
        kinds = self._make_muon(settings, lambda name, shape: name in matrices).state_kinds(split_master)
        # Updates do not gather shards, so each process must have whole matrices.
        return [replace(kind, needs_whole=kind.name == "m" and bool(matrices)) for kind in kinds]

    def scratch_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        muon = self._make_muon(self.defaults, lambda name, shape: True)
        matrices = [parameter for parameter in parameters if id(parameter) in self._matrices]
        if self._orthogonalizer is not None or (matrices and matrices[0].is_cuda):
            return host_bytes([(len(matrix), matrix.shape[1]) for matrix in matrices])
        layout = build_layout("", ((str(index), matrix.shape) for index, matrix in enumerate(matrices)), True)
        return max((muon.workspace_bytes(entry) for entry in layout.entries), default=0)

    def torch_names_of(self, parameter: nn.Parameter) -> Mapping[str, str]:
        if id(parameter) in self._matrices:
            return {"m": "momentum_buffer"}
        return {"m": "exp_avg", "v": "exp_avg_sq"}


def _as_list(params: Any) -> list[Any]:
    """Return a group's parameters as a list. ``params`` can also be a single parameter or a one-time iterator."""
    return [params] if isinstance(params, Tensor) else list(params)


def _parameters_of(item: Any) -> list[Any]:
    """Return the parameters in one item of ``params``: a group, a parameter, or a named parameter."""
    params = item["params"] if isinstance(item, dict) else [item]
    return [param[1] if isinstance(param, tuple) else param for param in params]


def _uses_muon(group: Any) -> bool:
    return bool(group.get("use_muon", True)) if isinstance(group, dict) else True
