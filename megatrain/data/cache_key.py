"""The name of a cache entry: a checksum of everything that decides which tokens are trained, and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.data.files import suffix_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from megatrain.config.schema import RunConfig
    from megatrain.data.cache import TokenCache

#: To be raised whenever the same rows become other tokens or masks.
ENCODING = 2


def cache_key(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, files: Sequence[Sequence[Path]], cache: TokenCache
) -> str:
    """Return 32 hex digits. Names and places of files do not count, their contents and order do.

    Args:
        files: of each source.
        cache: remembers checksums of files.
    """
    data = config.data
    sources = [
        {
            "files": [[suffix_of(file), cache.file_checksum(file)] for file in paths],
            "format": source.format,
            "columns": {str(ours): theirs for ours, theirs in source.columns.items()},
            "max_samples": source.max_samples,
        }
        for source, paths in zip(data.train, files, strict=True)
    ]
    parts = {
        "encoding": ENCODING,
        "libraries": {name: version(name) for name in ("transformers", "tokenizers")},
        "tokenizer": _tokenizer_parts(tokenizer),
        "sources": sources,
        "only_text": config.task == "pretrain",
        "joins_texts": data.packing == "concat",
        "options": [data.train_on, data.max_length, data.overlong, data.bad_rows],
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tokenizer_parts(tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """Return what a tokenizer does: its vocabulary and rules, its special tokens, and its chat template."""
    rules = tokenizer.backend_tokenizer.to_str().encode()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [hashlib.sha256(rules).hexdigest(), special, tokenizer.chat_template]
