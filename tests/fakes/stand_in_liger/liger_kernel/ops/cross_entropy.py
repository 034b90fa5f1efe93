"""liger-kernel's cross-entropy kernel with torch in the place of Triton: what it reads, writes and leaves alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

MAX_FUSED_SIZE = 65536 // 2
_NAMES = [
    "X_ptr",
    "X_stride",
    "Y_ptr",
    "Y_stride",
    "weight_ptr",
    "loss_ptr",
    "z_loss_ptr",
    "loss_stride",
    "token_accuracy_ptr",
    "token_accuracy_stride",
    "predicted_tokens_ptr",
    "predicted_tokens_stride",
    "n_cols",
    "n_non_ignore",
    "sum_non_ignore_weight",
    "weight_sum",
    "ignore_index",
    "lse_square_scale",
    "label_smoothing",
    "reduction",
    "softcap",
    "RETURN_Z_LOSS",
    "RETURN_TOKEN_ACCURACY",
    "RETURN_PREDICTED_TOKENS",
    "BLOCK_SIZE",
    "HAS_WEIGHT",
    "HAS_SOFTCAPPING",
    "HAS_GRADIENTS",
]


class Kernel:
    """Launched as a Triton kernel is, one program per row. ``launches`` notes each one's scalars."""

    arg_names = _NAMES

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *, num_warps: int, **given: Any) -> None:
        assert set(given) == set(self.arg_names), set(given) ^ set(self.arg_names)
        logits, labels, losses = given["X_ptr"], given["Y_ptr"], given["loss_ptr"]
        assert grid == losses.shape and logits.shape == (*grid, given["n_cols"]) and logits.stride(1) == 1
        assert (given["X_stride"], given["Y_stride"], given["loss_stride"]) == (logits.stride(0), 1, 1)
        assert given["BLOCK_SIZE"] & (given["BLOCK_SIZE"] - 1) == 0 and 1 <= given["BLOCK_SIZE"] <= MAX_FUSED_SIZE
        assert given["reduction"] == "mean" and given["softcap"] is given["weight_ptr"] is None
        assert not logits.requires_grad, "the kernel writes into it"
        self.launches.append({name: value for name, value in given.items() if not isinstance(value, Tensor)})
        ignored, count = labels == given["ignore_index"], given["n_non_ignore"]
        rows = logits.float()
        columns = labels.masked_fill(ignored, 0).unsqueeze(1)
        loss = torch.logsumexp(rows, 1) - rows.gather(1, columns).squeeze(1)
        losses.copy_((loss / count).masked_fill(ignored, 0.0))
        if given["HAS_GRADIENTS"]:
            gradient = torch.softmax(rows, 1)
            gradient.scatter_add_(1, columns, torch.full_like(columns, -1, dtype=torch.float32))
            logits.copy_(gradient / count)
        logits.masked_fill_(ignored.unsqueeze(1), 0.0)  # in every case, as the kernel does


liger_cross_entropy_kernel = Kernel()
