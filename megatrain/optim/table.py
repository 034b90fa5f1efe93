"""[optimizer]: the update and its schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import model_validator

from megatrain.base.table import HF, HF_AXOLOTL, Listed, Table, all_alter, key

#: Storage format of moments.
StateDtype = Literal["float32", "bfloat16", "int8"]
#: Rule that computes Muon's learning rate factor from the shape of a matrix.
AdjustLr = Literal["original", "match_rms_adamw"]


class ParameterGroupConfig(Table):
    """``[[optimizer.groups]]``: settings for some of the parameters."""

    params: Listed[str] = key(
        "Globs of parameter names. The first group that matches a parameter applies.",
        min_length=1,
        examples=[["*norm*"]],
    )
    learning_rate: float | None = key("Peak learning rate. Not set: optimizer.learning_rate.", None, gt=0)
    lr_mult: float | None = key("Factor on optimizer.learning_rate; not together with learning_rate.", None, gt=0)
    weight_decay: float | None = key("Weight decay of the group. Not set: optimizer.weight_decay.", None, ge=0)

    def matches(self, name: str) -> bool:
        """Return whether a parameter is in the group. Globs are case-sensitive."""
        return any(fnmatchcase(name, glob) for glob in self.params)

    def lr_scale(self, learning_rate: float) -> float:
        """Return the factor for a step's learning rate, given the optimizer's peak learning rate."""
        return (self.lr_mult or 1.0) if self.learning_rate is None else self.learning_rate / learning_rate


class OptimizerConfig(Table, json_schema_extra=all_alter("yes")):
    """``[optimizer]``: the update and its schedule."""

    optim: Literal["adamw", "lion", "sgd", "adafactor", "muon", "custom"] = key(
        "Optimizer. State per parameter, besides the 4-byte master: adamw 8 bytes, lion and sgd 4, adafactor almost 0. "
        "muon: 4 for matrices, and adamw's 8 for embeddings, heads, norms and biases. custom: an optimizer of an "
        "installed package.",
        "adamw",
        same_name=HF,
    )
    state_dtype: StateDtype = key(
        "Format of the moments (two for adamw, one for lion and sgd): 4, 2 or 1.02 bytes each per parameter. "
        "bfloat16 uses stochastic rounding by seed, step and element. int8 uses blocks of 256 elements with a "
        "scale, in the code of bitsandbytes. Masters stay in fp32.",
        "float32",
        used_if={"optim": ["adamw", "lion", "sgd"]},
    )
    ema_decay: float = key(
        "Decay of an exponential moving average of the fp32 weights, e.g. 0.999; 4 more bytes per parameter. It "
        "starts as a copy of the weights and changes with every update; `export --ema` writes it. 0: no average.",
        0.0,
        ge=0,
        lt=1,
    )
    learning_rate: float = key("Peak learning rate.", 1e-5, gt=0, same_name=HF_AXOLOTL)
    weight_decay: float = key(
        "Decay per step, multiplied by the learning rate; sgd adds it to the gradient, as in torch.",
        0.1,
        ge=0,
        same_name=HF_AXOLOTL,
    )
    weight_decay_exclude: Listed[str] = key(
        "Globs of parameter names without weight decay. Vectors (norms, biases, DoRA magnitudes, attention sinks)"
        " never decay, unless the list is empty: then every trained parameter decays.",
        ("*bias*", "*norm*", "*embed*"),
    )
    adam_beta1: float = key(
        "adamw: decay of the first moment. lion: weight of the moment in the update direction.",
        0.9,
        ge=0,
        lt=1,
        same_name=HF_AXOLOTL,
        used_if={"optim": ["adamw", "lion", "muon"]},
    )
    adam_beta2: float = key(
        "adamw: decay of the second moment. lion: decay of the moment, 0.99 by default.",
        0.95,
        ge=0,
        lt=1,
        same_name=HF_AXOLOTL,
        used_if={"optim": ["adamw", "lion", "muon"]},
    )
    adam_epsilon: float = key(
        "adamw: added to the denominator.", 1e-8, gt=0, same_name=HF_AXOLOTL, used_if={"optim": ["adamw", "muon"]}
    )
    sgd_momentum: float = key("sgd: decay of the moment. 0: no state.", 0.9, ge=0, lt=1, used_if={"optim": ["sgd"]})
    sgd_nesterov: bool = key("sgd: Nesterov momentum.", False, used_if={"optim": ["sgd"]})
    muon_momentum: float = key("muon: decay of the moment.", 0.95, ge=0, lt=1, used_if={"optim": ["muon"]})
    muon_nesterov: bool = key("muon: Nesterov momentum.", True, used_if={"optim": ["muon"]})
    muon_ns_steps: int = key("muon: steps of the Newton-Schulz iteration.", 5, ge=1, le=99, used_if={"optim": ["muon"]})
    muon_adjust_lr: AdjustLr = key(
        "muon: factor on the learning rate of a matrix. match_rms_adamw: 0.2 x sqrt(max(rows, columns)), so one "
        "rate also fits the parameters that adamw updates. original: sqrt(max(1, rows / columns)); set the rate"
        " of adamw's parameters in optimizer.groups.",
        "match_rms_adamw",
        used_if={"optim": ["muon"]},
    )
    muon_fused: Literal["auto", "parts", "whole"] = key(
        "muon: treatment of a parameter that fuses several matrices (q, k and v; gate and up). parts: "
        "orthogonalize each matrix. whole: treat the parameter as one matrix, like earlier versions. auto: as in"
        " the resumed checkpoint, else parts.",
        "auto",
        used_if={"optim": ["muon"]},
    )
    muon_exclude: Listed[str] = key(
        "muon: globs of matrices that adamw updates, in addition to embeddings and heads.",
        (),
        used_if={"optim": ["muon"]},
    )
    custom_optimizer: str = key(
        "custom: registered name of an installed package's optimizer (entry point group megatrain.optimizers).",
        "",
        used_if={"optim": ["custom"]},
    )
    optim_args: dict[str, int | float | bool | str] = key(
        "custom: arguments of that optimizer, e.g. { momentum = 0.95 }.", {}, used_if={"optim": ["custom"]}
    )
    max_grad_norm: float = key(
        "Gradients are scaled to at most this norm. 0: no clipping.", 1.0, ge=0, same_name=HF_AXOLOTL
    )
    clip_scope: Literal["global", "layer"] = key(
        "Scope of max_grad_norm and nonfinite. global: the norm of all gradients, which are held until it is "
        "known. layer: the norm of each layer, which is not equivalent; a layer is updated during the backward, "
        "and only one layer's gradient is held.",
        "global",
    )
    nonfinite: Literal["stop", "skip", "ignore"] = key(
        "Treatment of a NaN or infinite gradient: stop ends the run, skip skips the update, ignore does not "
        "check. With max_grad_norm = 0, stop and ignore update layers during the backward.",
        "stop",
    )
    lr_scheduler_type: str = key("Name of a schedule of transformers, e.g. cosine, linear.", "cosine", same_name=HF)
    lr_scheduler_kwargs: dict[str, int | float | str] = key(
        "Extra arguments of the schedule, e.g. { min_lr_rate = 0.1 }.", {}, same_name=HF
    )
    warmup_steps: float = key("Warm-up. >= 1: steps. < 1: share of all steps.", 0.03, ge=0, same_name=HF_AXOLOTL)
    layer_decay: float = key(
        "Layer-wise decay of the learning rate, as in timm. Parameters after the last layer use the full rate. The rate"
        " of the last layer is multiplied by this factor, the rate of the previous layer by the square of the factor,"
        " and so on. Embeddings get the smallest rate.",
        1.0,
        gt=0,
        le=1,
    )
    groups: Listed[ParameterGroupConfig] = key("Parameters with a different learning rate or weight decay.", ())

    @model_validator(mode="before")
    @classmethod
    def _fill_lion_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("optim") == "lion":
            return {"adam_beta2": 0.99, **values}
        return values

    @property
    def defers_updates(self) -> bool:
        """Whether updates wait until the global norm of all gradients in the step is known.

        Without clipping, "stop" does not wait: it can end the run at the first non-finite layer, because the state
        after a stopped step is not used. "skip" must check a step's last gradient before it applies the first update.
        """
        return self.clip_scope == "global" and (self.max_grad_norm > 0 or self.nonfinite == "skip")

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Peak learning rates of the run and of groups, by config key."""
        rates = {"optimizer.learning_rate": self.learning_rate}
        for index, group in enumerate(self.groups):
            if group.learning_rate is not None:
                rates[f"optimizer.groups.{index}.learning_rate"] = group.learning_rate
            elif group.lr_mult is not None:
                expression = f"optimizer.groups.{index}.lr_mult x optimizer.learning_rate"
                rates[expression] = group.lr_mult * self.learning_rate
        return rates

    @property
    def has_warmup(self) -> bool:
        """Whether the schedule uses ``warmup_steps``; transformers' "constant" does not."""
        return self.lr_scheduler_type != "constant"

    @property
    def depends_on_length(self) -> bool:
        """Whether the learning rate of a step depends on the total number of steps."""
        is_open_ended = self.lr_scheduler_type in ("constant", "constant_with_warmup", "inverse_sqrt")
        return not is_open_ended or (self.has_warmup and 0 < self.warmup_steps < 1)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the number of linear warm-up steps in a run. Fractions are rounded up, as in transformers 5."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(num_steps * self.warmup_steps)
