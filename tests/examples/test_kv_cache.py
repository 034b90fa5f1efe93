"""examples/python/kv_cache.py stays within its RAM budget, produces bit-identical logits, and is short."""

from __future__ import annotations

import ast
import io
import os
import sys
import tokenize

from oracles.example_files import EXAMPLES
from processes import warm

FILE = EXAMPLES / "python/kv_cache.py"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_example_runs_in_its_budget_bitwise_equal() -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(FILE)]
    result = warm.run(command, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "cache: 524288 bytes; RAM: at most 131072 of 131072",
        "same logits as in memory, bit for bit; 66 different tokens",
    ]


def test_example_has_less_than_50_lines_of_code() -> None:
    text = FILE.read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.FunctionDef)]
    documented = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    docstrings = {line for first in documented for line in range(first.lineno, (first.end_lineno or 0) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    assert 20 < len(lines - docstrings) < 50
