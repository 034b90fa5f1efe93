"""Writes the file tree into README.md, one line per file: ``python docs/tree.py``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tiered", "megatrain", "cli")
START, END = "<!-- tree:", "<!-- end of tree -->"
OTHERS = {
    "tests/": "mirrors the packages; reference/ holds plain-PyTorch oracles, parity/ compares with Hugging Face",
    "bench/": "measurements, one file per claim",
    "docs/": "quickstart, concepts, glossary, references of config and commands, guides, decisions, log of experiments",
    "examples/": "configs and data that run",
    "Makefile": "run, test, check, format, docs",
    "mkdocs.yml": "the site that make docs builds",
    ".ci/run": "what a change must pass",
}


def summary(path: Path) -> str:
    """Return the first sentence of a file's docstring, without markup."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring is not None, f"{path} has no docstring"
    return docstring.splitlines()[0].replace("``", "").replace("`", "").rstrip(".")


def tree() -> str:
    """Return the tree of the packages as a Markdown code block."""
    lines = []
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path))
        for path in files:
            name = path.relative_to(ROOT).as_posix()
            if path.read_text(encoding="utf-8").strip():
                lines.append(f"{name:39} {summary(path)}")
        lines.append("")
    lines += [f"{name:39} {text}" for name, text in OTHERS.items() if has_content(ROOT / name)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def has_content(path: Path) -> bool:
    return path.is_file() or any(inner.suffix in (".py", ".md") for inner in path.rglob("*"))


def with_tree(readme: str) -> str:
    """Return the text of the README with the tree of now in it."""
    head, rest = readme.split(START)
    first_line, rest = rest.split("\n", 1)
    return f"{head}{START}{first_line}\n{tree()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(with_tree(file.read_text(encoding="utf-8")), encoding="utf-8")
