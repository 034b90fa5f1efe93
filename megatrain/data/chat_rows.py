"""Row kind for conversations, prompts with completions, plain texts and token lists. Each row becomes one document."""

from __future__ import annotations

from megatrain.data.row_kind import RowKind

__all__ = ["CHATS"]

CHATS = RowKind()
