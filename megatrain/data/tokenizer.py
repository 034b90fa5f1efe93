"""Opens the tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatrain.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name_or_path: str, *, chat_template: str = "auto") -> PreTrainedTokenizerFast:
    """Open a fast tokenizer. No code of the folder is run.

    Args:
        name_or_path: a folder with ``tokenizer.json``.
        chat_template: "auto" for the tokenizer's own, or the path of a .jinja file.

    Raises:
        DataError: no such folder, no ``tokenizer.json`` in it, or one that cannot be opened.
    """
    from transformers import AutoTokenizer

    folder = Path(name_or_path)
    if not folder.is_dir():
        advice = "Check model.model_name_or_path"
        if not folder.is_absolute():
            advice = (
                f"Download the model first, for example: hf download {name_or_path} --local-dir models/{folder.name}"
            )
        raise DataError(name_or_path, "there is no such folder", advice)
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            name_or_path,
            "there is no tokenizer.json, which exact loss masks need",
            "Set model.tokenizer_name_or_path if it is in another folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # from_pretrained raises whatever its many readers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            name_or_path, f"the tokenizer cannot be opened: {reason}", "Check tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(name_or_path, "this tokenizer reports no offsets, which exact loss masks need")
    if chat_template != "auto":
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
            raise DataError(
                chat_template, f"the chat template cannot be read: {reason}", "Save it as UTF-8 text, or name another"
            ) from None
    return cast("PreTrainedTokenizerFast", tokenizer)


def pad_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that fills rows: the pad token, else end of text, else 0. It is never trained or attended."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
