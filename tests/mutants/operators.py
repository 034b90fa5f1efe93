"""The mistakes that can be planted in a source file, as text replacements at nodes of its syntax tree.

Each operator imitates an error that people make, such as a wrong comparison, an off-by-one bound, a dropped wait or
swapped arguments. Exception messages, annotations, decorators and docstrings stay unchanged.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Mistake", "mistakes_in"]

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Mod: ("%", "//")}
_AUGMENTED = {ast.Add: ("+=", "-="), ast.Sub: ("-=", "+="), ast.BitOr: ("|=", "="), ast.Mult: ("*=", "=")}
#: Names of functions, attributes and units that people confuse.
_CONFUSED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "KiB": "MiB",
    "MiB": "KiB",
    "GiB": "MiB",
    "first": "last",
    "last": "first",
    "nbytes": "numel",
    "append": "extend",
    "setdefault": "get",
}
_UNITS = {1000: "1024", 1024: "1000", 1_000_000: "1 << 20", 1_000_000_000: "1 << 30", 8: "4"}


@dataclass(frozen=True)
class Mistake:
    """One replacement in one file.

    Attributes:
        path: File, relative to the root of the repository.
        line: First line of the replaced text, from 1.
        start: Offset of the first replaced character.
        end: Offset after the last replaced character.
        replacement: New text.
        operator: Name of the kind of error.
    """

    path: str
    line: int
    start: int
    end: int
    replacement: str
    operator: str

    def applied(self, text: str) -> str:
        """Return the file's text with the mistake."""
        return text[: self.start] + self.replacement + text[self.end :]

    def is_valid(self, text: str) -> bool:
        """Return whether the mistake changes the syntax tree but leaves the file valid Python."""
        try:
            return ast.dump(ast.parse(self.applied(text))) != ast.dump(ast.parse(text))
        except SyntaxError:
            return False

    def diff(self, text: str) -> str:
        """Return the mistake as a unified diff of `text`."""
        before, after = text.splitlines(keepends=True), self.applied(text).splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}", n=2))


def mistakes_in(path: str, text: str) -> list[Mistake]:
    """Return every mistake that the operators can make in a file, sorted by position.

    A few mistakes are not valid Python. `Mistake.is_valid` detects them.
    """
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return sorted(dict.fromkeys(finder.found), key=lambda each: (each.start, each.end, each.replacement))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mistake] = []
        self._path, self._text = path, text
        lines = text.encode().splitlines(keepends=True)
        #: Byte offset of each line, because `col_offset` counts bytes.
        self._line_starts = [0, *itertools.accumulate(len(line) for line in lines)]
        self._is_ascii = text.isascii()
        self._bytes = text.encode()
        self._keys = sorted({node.value for node in _string_keys(ast.parse(text))})

    def _offset(self, line: int, column: int) -> int:
        offset = self._line_starts[line - 1] + column
        return offset if self._is_ascii else len(self._bytes[:offset].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        where: ast.expr | ast.stmt = node  # type: ignore[assignment]
        assert where.end_lineno is not None and where.end_col_offset is not None
        return (
            self._offset(where.lineno, where.col_offset),
            self._offset(where.end_lineno, where.end_col_offset),
        )

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._text[start:end]

    def _add(self, operator: str, start: int, end: int, replacement: str) -> None:
        line = self._text.count("\n", 0, start) + 1
        self.found.append(Mistake(self._path, line, start, end, replacement, operator))

    def _replace(self, operator: str, node: ast.AST, replacement: str) -> None:
        self._add(operator, *self._span(node), replacement)

    def _replace_between(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace a token between two nodes."""
        begin, end = self._span(left)[1], self._span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        if old[0].isalpha():
            pattern = rf"\b{pattern}\b"
        if match := re.search(pattern, self._text[begin:end]):
            self._add(operator, begin + match.start(), begin + match.end(), new)

    # Code without planted mistakes: messages, assertions, imports, annotations and decorators.

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self.visit(default)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if len(body) > 1 and isinstance(node.returns, ast.Constant) and node.returns.value is None:
            last = body[-1]
            start = self._span(last)[0]
            self._add("early return", start, start, "return\n" + " " * last.col_offset)
        for each in body:
            self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    # Conditions.

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._source(node.test):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace("dropped condition", test, "True")
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._replace("negated condition", test, self._source(test.operand))
        else:
            self._replace("negated condition", test, f"not ({self._source(test)})")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            self._replace_between("and/or", left, right, old, new)
        for dropped in node.values:
            kept = [self._source(each) for each in node.values if each is not dropped]
            self._replace("dropped condition", node, f"({f' {old} '.join(kept)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, new = _COMPARISONS[type(operator)]
            self._replace_between("comparison", left, right, old, new)
        self.generic_visit(node)

    # Numbers, bounds and units.

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("flag", node, str(not value))
        elif isinstance(value, int | float) and value in _UNITS:
            self._replace("unit", node, f"({_UNITS[value]})")
        if isinstance(value, int) and not isinstance(value, bool):
            self._replace("bound", node, str(value + 1))
            if value > 0:
                self._replace("bound", node, str(value - 1))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC:
            self._replace_between("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        elif isinstance(node.op, ast.FloorDiv):
            self._replace("bound", node, f"-(-({self._source(node.left)}) // ({self._source(node.right)}))")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            self._wrong_key(index)
        elif isinstance(index, ast.UnaryOp) and self._source(index) == "-1":
            self._replace("index", index, "0")
        elif isinstance(index, ast.Constant) and index.value == 0:
            self._replace("index", index, "-1")
        elif isinstance(index, ast.Slice):
            for bound in filter(None, (index.lower, index.upper)):
                self._replace("bound", bound, f"({self._source(bound)}) + 1")
        self.generic_visit(node)

    def _wrong_key(self, key: ast.Constant) -> None:
        for other in self._keys:
            if other != key.value:
                self._replace("wrong key", key, repr(other))
                return

    # Calls.

    def visit_Call(self, node: ast.Call) -> None:
        plain = [each for each in node.args if not isinstance(each, ast.Starred)]
        is_symmetric = isinstance(node.func, ast.Name) and node.func.id in ("max", "min")
        for first, second in [] if is_symmetric else itertools.pairwise(plain):
            start, end = self._span(first)[0], self._span(second)[1]
            between = self._text[self._span(first)[1] : self._span(second)[0]]
            self._add("swapped arguments", start, end, self._source(second) + between + self._source(first))
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._drop_keyword(node, keyword)
        is_lookup = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault")
        if is_lookup and plain and isinstance(plain[0], ast.Constant) and isinstance(plain[0].value, str):
            self._wrong_key(plain[0])
        self.generic_visit(node)

    def _drop_keyword(self, call: ast.Call, dropped: ast.keyword) -> None:
        kept = [self._source(each) for each in call.args]
        kept += [self._source(each) for each in call.keywords if each is not dropped]
        self._replace("dropped argument", call, f"{self._source(call.func)}({', '.join(kept)})")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self._replace("dropped call", node, "pass")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _CONFUSED and isinstance(node.ctx, ast.Load):
            self._replace("confused name", node, _CONFUSED[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _CONFUSED and isinstance(node.ctx, ast.Load):
            self._replace("confused name", node, f"{self._source(node.value)}.{_CONFUSED[node.attr]}")
        self.generic_visit(node)

    # Statements.

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _AUGMENTED:
            self._replace_between("arithmetic", node.target, node.value, *_AUGMENTED[type(node.op)])
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        last = node.body[-1]
        if not isinstance(last, ast.Break | ast.Continue | ast.Return | ast.Raise):
            end = self._span(last)[1]
            self._add("loop ends early", end, end, "\n" + " " * node.body[0].col_offset + "break")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("loop goes on", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("loop ends early", node, "break")


def _string_keys(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string constants that are used as keys, in subscripts and in calls to `get`."""
    for node in ast.walk(tree):
        keys: Sequence[ast.expr] = ()
        if isinstance(node, ast.Subscript):
            keys = (node.slice,)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            keys = node.args[:1]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key
