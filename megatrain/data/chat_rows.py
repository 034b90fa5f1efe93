"""Chats, prompts with completions, plain texts and tokens, row by row: each row is one document."""

from __future__ import annotations

from megatrain.data.row_kind import RowKind

__all__ = ["CHATS"]

CHATS = RowKind()
