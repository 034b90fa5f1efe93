"""Run states for tests that need only some of the values."""

from __future__ import annotations

from typing import Any

from megatrain.checkpoint.state import RunState


def make_state(**values: Any) -> RunState:
    """Return a run state with these values. All other values are zero, empty or None."""
    return RunState(
        **{
            **dict.fromkeys(("max_steps", "num_updates", "epoch", "epoch_step", "num_real_tokens"), 0),
            **dict.fromkeys(("num_trained_tokens", "seed", "data_seed", "step"), 0),
            **dict.fromkeys(("config_toml", "data_fingerprint", "run_name", "saved_at"), ""),
            "seconds": 0.0, "first_loss": None, "last_loss": None, "lr_schedule": {}, "model": {}, **values,
        }
    )  # fmt: skip
