"""Comparison of LLaMA-Factory's named chat templates with the template in the model's folder, which training uses."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from megatrain.base.other_tools import OWN_TEMPLATE
from megatrain.extras.translate.read import is_file

#: Text that a template writes before a turn, by prefix of the template's name. The longest matching prefix applies.
_MARKS = {
    "alpaca": "### Instruction",
    "chatml": "<|im_start|>",
    "deepseek3": "<\uff5cUser\uff5c>",
    "deepseekr1": "<\uff5cUser\uff5c>",
    "default": "Human:",
    "gemma": "<start_of_turn>",
    "glm4": "<|user|>",
    "gpt": "<|start|>",
    "llama2": "[INST]",
    "llama3": "<|start_header_id|>",
    "llama4": "<|header_start|>",
    "mistral": "[INST]",
    "qwen": "<|im_start|>",
    "vicuna": "USER:",
    "zephyr": "<|user|>",
}
_WRITE_IT = "write it into a .jinja file and set model.chat_template to this file"


def compare_template(name: str, folder: Path) -> tuple[str, bool]:
    """Return a message about a tool's named template, and whether the model's template is of the same kind.

    Args:
        folder: Folder of the model; ignored if it is not on this machine.
    """
    if not is_file(folder / "tokenizer_config.json"):
        return OWN_TEMPLATE, False
    template = read_template(folder)
    if not template:
        return f"the model's folder has no chat template, which chats need; {_WRITE_IT}", False
    mark = _MARKS.get(max((prefix for prefix in _MARKS if name.lower().startswith(prefix)), key=len, default=""))
    if mark is None:
        return OWN_TEMPLATE, False
    if mark in template:
        return f"the chat template in the model's folder is used, which also writes {mark}", True
    reason = f"the chat template in the model's folder is used, which differs, because it does not contain {mark}"
    return f"{reason}. To keep the other template, {_WRITE_IT}", False


def read_template(folder: Path) -> str:
    """Return the text of the templates in a model's folder, or ""."""
    texts = []
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        value = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        texts += [str(item.get("template")) for item in value] if isinstance(value, list) else [str(value or "")]
    with suppress(OSError, ValueError):
        texts.append((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    return "".join(texts)
