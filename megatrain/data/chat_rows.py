"""Row kind for chats, prompts with completions, plain texts and tokens. Each row becomes one document."""

from __future__ import annotations

from megatrain.data.row_kind import RowKind

__all__ = ["CHATS"]

CHATS = RowKind()
