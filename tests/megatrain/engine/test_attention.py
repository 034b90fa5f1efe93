"""FLOPs and workspace of fused attention kernels match counts by hand, for every kernel and kind of call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device import attention
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.flash import FlashKernels
from megatrain.engine.device.work import Work

CUDA = torch.device("cuda", 0)
BACKWARD = AttentionCall("flash", True, 2, 6, 3, 600, 800, 400, 40, 48, 2, num_copied_bytes=1000)
PACKAGE = replace(BACKWARD, width=64, value_width=64)
FORWARD = replace(PACKAGE, is_backward=False)
#: 600 queries and 800 keys in sequences of different lengths, of which the longest has 450 keys.
RAGGED: dict[str, Any] = {"is_ragged": True, "longest_keys": 450}
EXPANDED = 800 * 6 * (40 + 48) * 2
WORKSPACES: dict[str, tuple[AttentionCall, bool, FlashKernels, int]] = {
    # Rows are padded to 384, widths to 64. Each of 12 heads of rows gets 11 of 132 multiprocessors.
    "flash": (BACKWARD, False, "FA2", 1000 + 768 * 6 * (64 + 1) * 4 + EXPANDED),
    "flash, in order": (BACKWARD, True, "FA2", 1000 + 768 * 6 * (11 * 64 + 1) * 4 + EXPANDED),
    "flash, all heads": (replace(BACKWARD, num_key_heads=6), False, "FA2", 1000 + 768 * 6 * (64 + 1) * 4),
    "flash, wide": (replace(BACKWARD, num_key_heads=6, width=192), False, "FA2", 1000 + 768 * 6 * (192 + 1) * 4),
    "flash, wider": (replace(BACKWARD, num_key_heads=6, width=193), False, "FA2", 1000 + 768 * 6 * (256 + 1) * 4),
    "flash, ragged": (
        replace(BACKWARD, **RAGGED),
        False,
        "FA2",
        1000 + 856 * 6 * (2 * 64 + 1) * 4 + EXPANDED + 600 * 6 * 40 + 800 * 3 * (40 + 48),
    ),
    "forward": (replace(BACKWARD, is_backward=False), True, "FA2", 0),
    "ragged forward": (replace(BACKWARD, is_backward=False, **RAGGED), True, "FA2", 600 * 6 * 48),
    "cudnn": (replace(BACKWARD, backend="cudnn"), True, "FA2", 768 * 6 * (64 + 1) * 4 + EXPANDED),
    "other": (replace(BACKWARD, backend="other"), True, "FA2", 0),
    # Rows are padded to 384, widths to multiples of 128. Only wide heads need gradients of blocks of 128 keys.
    "efficient": (replace(BACKWARD, backend="efficient"), False, "FA2", 1000 + 12 * 384 * (128 + 1) * 4),
    "efficient, fp32": (
        replace(BACKWARD, backend="efficient", itemsize=4), False, "FA2", 1000 + 12 * 384 * (128 + 1 + 48) * 4,
    ),
    "efficient, wide": (
        replace(BACKWARD, backend="efficient", width=130),
        False,
        "FA2",
        1000 + 12 * (384 * (256 + 1) + 7 * 128 * (256 + 128)) * 4,
    ),
    "efficient, wide values": (
        replace(BACKWARD, backend="efficient", value_width=129),
        True,
        "FA2",
        1000 + 12 * (384 * (128 + 1) + 128 * (128 + 256)) * 4,
    ),
    "efficient, at the width of a block": (
        replace(BACKWARD, backend="efficient", width=128), False, "FA2", 1000 + 12 * 384 * (128 + 1) * 4,
    ),
    "efficient, many heads": (
        replace(BACKWARD, backend="efficient", width=130, num_heads=300),
        False,
        "FA2",
        1000 + 600 * (384 * (256 + 1) + 128 * (256 + 128)) * 4,
    ),
    "efficient, some heads": (
        replace(BACKWARD, backend="efficient", width=130, num_heads=30),
        False,
        "FA2",
        1000 + 60 * (384 * (256 + 1) + 3 * 128 * (256 + 128)) * 4,
    ),
    "efficient, ragged": (
        replace(BACKWARD, backend="efficient", **RAGGED), False, "FA2", 1000 + 12 * 512 * (128 + 1) * 4,
    ),
    # Each row of the batch pads its queries by 128 and its keys by 256, and has 10 counters.
    "FA3": (PACKAGE, True, "FA3", 1000 + (856 * 6 * 66 + 20 * 6 + 3 * (1312 * 128 + 2 * 20)) * 4),
    "FA3, all heads": (replace(PACKAGE, num_key_heads=6), True, "FA3", 1000 + (856 * 6 * 66 + 20 * 6) * 4),
    "FA3, ragged": (
        replace(PACKAGE, **RAGGED),
        True,
        "FA3",
        1000 + 600 * 6 * 64 + 800 * 3 * 128 + (984 * 6 * 66 + 22 * 6 + 3 * (1568 * 128 + 2 * 22)) * 4,
    ),
    "FA4, ragged": (
        replace(PACKAGE, **RAGGED),
        True,
        "FA4",
        1000 + 600 * 6 * 64 + 800 * 3 * 128 + (984 * 6 * 66 + 32 * 6 + 3 * (1568 * 128 + 2 * 32)) * 4,
    ),
    "FA3, forward": (FORWARD, False, "FA3", 7 * 856 * 6 * 65 * 4),
    "FA3, forward of long keys": (replace(FORWARD, longest_keys=10_000), False, "FA3", 128 * 856 * 6 * 65 * 4),
    "FA3, forward in order": (FORWARD, True, "FA3", 0),
    "FA3, ragged forward in order": (replace(FORWARD, **RAGGED), True, "FA3", 600 * 6 * 64),
    "FA3, forward of few heads": (replace(FORWARD, num_heads=21), False, "FA3", 7 * 856 * 21 * 65 * 4),
    "FA3, forward of many heads": (replace(FORWARD, num_heads=22), False, "FA3", 0),
    "FA4, forward": (FORWARD, False, "FA4", 0),
}  # fmt: skip


@pytest.mark.parametrize(("call", "is_deterministic", "flash", "nbytes"), WORKSPACES.values(), ids=WORKSPACES)
def test_workspace_of_each_kernel(
    call: AttentionCall, is_deterministic: bool, flash: FlashKernels, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 132)
    assert call.workspace_nbytes(CUDA, is_deterministic=is_deterministic, flash=flash) == nbytes
    assert call.workspace_nbytes(torch.device("cpu"), is_deterministic=is_deterministic, flash=flash) == 0


def test_flops_of_attention_count_every_pair() -> None:
    pairs = 6 * 600 * 400
    assert BACKWARD.work == Work(0, 2 * pairs * (3 * 40 + 2 * 48), 0, 0, 1)
    causal = replace(BACKWARD, is_backward=False, is_causal=True)
    assert causal.work == Work(0, 2 * pairs * (40 + 48), pairs * (40 + 48), 0, 1)
    assert replace(BACKWARD, **RAGGED).num_flops == 2 * 6 * 600 * 450 * (3 * 40 + 2 * 48), "the longest keys"


@pytest.mark.parametrize(
    ("wrong", "widths"),
    [({"width": 80, "value_width": 80}, "80 and 80"), ({"value_width": 96}, "64 and 96"), ({"has_dropout": True}, "")],
)
def test_calls_that_flash_packages_do_not_support_are_refused(wrong: dict[str, Any], widths: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        replace(FORWARD, **wrong).workspace_nbytes(CUDA, is_deterministic=True, flash="FA3")
    assert "without dropout, but the model has head widths " + (widths or "64 and 64 with dropout") in str(caught.value)
