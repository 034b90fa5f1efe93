"""Kind of rows that become one document each: chats, prompts with completions, plain texts and tokens."""

from __future__ import annotations

from megatrain.data.row_kind import RowKind

__all__ = ["CHATS"]

CHATS = RowKind()
