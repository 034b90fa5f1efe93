"""AdamW, Lion, SGD and Adafactor of torch's interface, with their state in a tiered store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatrain.embed.optimizer_base import TieredOptimizer
from megatrain.optim.adafactor import Adafactor, AdafactorConfig
from megatrain.optim.adamw import AdamW, AdamWConfig
from megatrain.optim.lion import Lion, LionConfig
from megatrain.optim.sgd import SGD, SGDConfig

if TYPE_CHECKING:
    from megatrain.optim.base import Optimizer as Arithmetic
    from tiered.store import TieredStore

__all__ = ["TieredAdafactor", "TieredAdamW", "TieredLion", "TieredOptimizer", "TieredSGD"]


class TieredAdamW(TieredOptimizer):
    """AdamW with decoupled weight decay; see ``TieredOptimizer``. Defaults are those of ``torch.optim.AdamW``."""

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
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, store=store, **options
        )

    def setting_names(self) -> tuple[str, ...]:
        return ("betas", "eps")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return AdamW(AdamWConfig(0.0, float(beta1), float(beta2), float(settings["eps"]), 0.0), self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "exp_avg", "v": "exp_avg_sq"}


class TieredLion(TieredOptimizer):
    """Lion; see ``TieredOptimizer``."""

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

    def setting_names(self) -> tuple[str, ...]:
        return ("betas",)

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return Lion(LionConfig(0.0, float(beta1), float(beta2), 0.0), self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "exp_avg"}


class TieredSGD(TieredOptimizer):
    """SGD with momentum; see ``TieredOptimizer``. Defaults are those of ``torch.optim.SGD``."""

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

    def setting_names(self) -> tuple[str, ...]:
        return ("momentum", "nesterov")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        return SGD(SGDConfig(0.0, float(settings["momentum"]), bool(settings["nesterov"]), 0.0), self.threads)

    def widest(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with momentum where the optimizer has any: parameters of several groups share a block."""
        return {**settings, "momentum": max(float(settings["momentum"]), float(self.defaults["momentum"]))}

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "momentum_buffer"}


class TieredAdafactor(TieredOptimizer):
    """Adafactor with a learning rate from outside; see ``TieredOptimizer`` and ``megatrain.optim.adafactor``."""

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
        super().__init__(params, defaults, store=store, **options)

    def setting_names(self) -> tuple[str, ...]:
        return ("decay_rate", "eps", "clip_threshold")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        decay_rate, eps, clip_threshold = (float(settings[name]) for name in self.setting_names())
        return Adafactor(AdafactorConfig(0.0, decay_rate, eps, clip_threshold, 0.0), self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {}
