"""Metrics of the code base: imports between packages, and the measurements of ``test_architecture.py``.

``python -m tests.house`` prints the metrics, for the commit message of a change that affects them. ``--lower`` lowers
the bounds in ``house_bounds.json`` to the metrics. CONTRIBUTING.md explains what to do if a change exceeds a bound.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import prose

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tiered", "megatrain", "cli")
PROSE = ("README.md", "docs", *PACKAGES, "bench", "examples", "tests")

#: The layers from the bottom up. Each layer may import the layers before it. If a folder has files of two layers, the
#: longest matching prefix of a module's name applies.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "tiered": ("tiered",),
    "base": ("megatrain.base",),
    "tables": (
        "megatrain.checkpoint.table",
        "megatrain.data.table",
        "megatrain.engine.table",
        "megatrain.machine.table",
        "megatrain.models.table",
        "megatrain.optim.table",
        "megatrain.plan.table",
        "megatrain.ranks.table",
        "megatrain.run.table",
        "megatrain.tasks.table",
    ),
    "machine": ("megatrain.machine",),
    "models": ("megatrain.models",),
    "optim": ("megatrain.optim",),
    "sharding": ("megatrain.ranks",),
    "core": ("megatrain.engine",),
    "embedding": ("megatrain.embed",),
    # Three modules look like converters but belong to lower layers. Like `device.work`, `device.attention` knows the
    # costs of torch's kernels, but nothing about models. `models.passthrough` only records whether each tensor of a
    # folder is loaded, copied or refused. `models.quantized` only decodes bytes: it treats a file format as a dtype.
    "converters": (
        "megatrain.converters",
        "megatrain.models.in_place",
        "megatrain.models.packed",
    ),
    "data": ("megatrain.data",),
    "trace": ("megatrain.trace",),
    "plan": ("megatrain.plan",),
    "tasks": ("megatrain.tasks",),
    "checkpoint": ("megatrain.checkpoint", "megatrain.training.weights", "megatrain.training.weight_parts"),
    "run": ("megatrain.run",),
    "launch": ("megatrain.ranks.launch",),
    "config": ("megatrain.config",),
    "trainer": ("megatrain.training",),
    "forward passes": ("megatrain.extras.generation", "megatrain.extras.scoring"),
    "api": ("megatrain.api",),
    "tools": ("megatrain.extras",),
    "package": ("megatrain.__init__", "megatrain.__main__"),
    "cli": ("cli",),
}
_LEVELS = {room: floor for floor, room in enumerate(LAYERS)}
_LAYER_OF = {prefix: room for room, prefixes in LAYERS.items() for prefix in prefixes}

#: The files to read first, which ARCHITECTURE.md lists.
READING_ORDER = (
    "tiered/block.py",
    "tiered/store.py",
    "megatrain/engine/program/step_program.py",
    "megatrain/engine/tape/access.py",
    "megatrain/engine/forward.py",
    "megatrain/training/training_loop.py",
)


#: Factor (a feature) -> regular expression that matches its words. A file with such a word depends on the factor.
FACTOR_WORDS: Mapping[str, str] = {
    "adapters": "adapters?|lora",
    "averages": "averages?|averaged",
    "experts": "experts?",
    "images": "images?",
    "kept graphs": "kept_graphs?|kept graphs?",
    "lanes": "lanes?",
    "micro-batch order": "micro_batch_order|micro-batch order",
    "packing": "packing|packed",
    "preferences": "preferences?|dpo|kto|orpo",
    "quantized bases": "quantized|nf4|mxfp4",
    "ranks": "ranks?|num_ranks",
    "remote copies": "remote|save_copy",
    "saved results": "saved_results?|saved results?",
}

#: First words of vague Args entries, such as "of the model". Good entries begin with a noun or a unit.
VAGUE = r"(of|what|that|as)\b"

#: Words in names of a run's metrics, such as `nbytes` and `link_bytes`.
FIGURE_WORDS = (
    "bytes|calls|capacity|drops|flops|generations|high|kept|launches|linked|loss|losses|moved|nbytes|norm|norms|num|passes"
    "|peak|planned|prefetch|rate|reads|room|s|saved|size|sizes|stall|step|steps|stored|tokens|totals|traffic|used|written"
)

#: Bounds of the metrics in `bounded`. `python -m tests.house --lower` lowers them.
BOUNDS = Path(__file__).with_name("house_bounds.json")


@dataclass(frozen=True)
class Source:
    path: Path
    module: str
    text: str

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return prose.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree. Walking through the trees again in each test would take seconds."""
        return tuple(ast.walk(self.tree))


def read_sources() -> list[Source]:
    sources = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            sources.append(Source(path, module, text))
    return sources


SOURCES = read_sources()
MODULES = {source.module for source in SOURCES}


def nodes_under_type_checking(tree: ast.Module) -> set[ast.AST]:
    """Return every node under `if TYPE_CHECKING:`, where imports never run."""
    return {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }


def absolute_name(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    base = source.module.split(".")[: -node.level]
    return ".".join([*base, node.module] if node.module else base)


def module_of(name: str) -> str:
    """Return the module that a dotted name refers to. For a package, this is its `__init__`."""
    return f"{name}.__init__" if f"{name}.__init__" in MODULES else name


def imports(source: Source, with_typing: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of every import, including imports inside functions."""
    skipped = set() if with_typing else nodes_under_type_checking(source.tree)
    for node in source.nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, module_of(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = absolute_name(source, node)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield node.lineno, module_of(inner if module_of(inner) in MODULES else module)


def file_pairs() -> set[tuple[str, str]]:
    """Return (importer, imported) for all imports between modules of this project."""
    return {
        (source.module, name)
        for source in SOURCES
        for _, name in imports(source)
        if name in MODULES and name != source.module
    }


def layer_of(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        room = _LAYER_OF.get(".".join(parts[:length]))
        if room is not None:
            return room
    raise AssertionError(f"{module} is in no room: tests/house.py lists them")


def folder_of(module: str) -> str:
    """Return a module's package inside `megatrain`, or its top-level package if it is outside `megatrain`."""
    return ".".join(module.split(".")[:2]) if module.startswith("megatrain.") else module.split(".")[0]


def upward_pairs() -> set[tuple[str, str]]:
    """Return (importer, imported) for all imports from a higher layer."""
    return {
        (importer, imported)
        for importer, imported in file_pairs()
        if _LEVELS[layer_of(importer)] < _LEVELS[layer_of(imported)]
    }


def internal_imports_of_tools() -> set[tuple[str, str]]:
    """Return (importer, imported) for the tools' imports from any layer except `tiered`, base, api and tools."""
    return {
        (importer, imported)
        for importer, imported in file_pairs()
        if layer_of(importer) == "tools" and layer_of(imported) not in ("tiered", "base", "api", "tools")
    }


def import_cycles(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Return each set of packages that import each other, directly or indirectly (Tarjan's algorithm)."""
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported in pairs:
        edges[importer].add(imported)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    trail: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        trail.append(name)
        for other in edges.get(name, ()):
            if other not in order:
                visit(other)
            if other in trail:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            circle = set(trail[trail.index(name) :])
            del trail[trail.index(name) :]
            if len(circle) > 1:
                found.append(circle)

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


def packages_in_cycles(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return the packages that are in an import cycle."""
    return set().union(*import_cycles((folder_of(one), folder_of(other)) for one, other in pairs))


def definitions() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield (module, class) for all top-level classes."""
    for source in SOURCES:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                yield source.module, node


def num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def num_arguments(node: ast.ClassDef) -> int:
    """Return the number of `__init__` arguments without `self`, or 0 for a class without `__init__`."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len(each.args.posonlyargs) + len(each.args.args) + len(each.args.kwonlyargs) - 1
    return 0


def num_fields(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.AnnAssign) for each in node.body)


def large_classes(least: int) -> dict[str, int]:
    """Return the number of methods by `module.Class`, for classes with more than `least` methods."""
    found = {f"{module}.{node.name}": num_methods(node) for module, node in definitions()}
    return {name: count for name, count in found.items() if count > least}


def long_constructors(least: int) -> dict[str, int]:
    """Return the number of constructor arguments by `module.Class`, for engine classes with more than `least`."""
    found = {
        f"{module}.{node.name}": num_arguments(node)
        for module, node in definitions()
        if module.startswith("megatrain.engine.")
    }
    return {name: count for name, count in found.items() if count > least}


def fields_of(name: str) -> int:
    return next(num_fields(node) for _, node in definitions() if node.name == name)


def shared_class_names() -> set[str]:
    """Return the class names, without leading underscores, that two or more classes share."""
    counts = Counter(node.name.lstrip("_") for _, node in definitions())
    return {name for name, count in counts.items() if count > 1}


def schema_importers() -> set[str]:
    """Return the modules that import the complete config schema."""
    return {
        source.module
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.ImportFrom)
        and (node.module == "megatrain.config.schema" or any(alias.name == "RunConfig" for alias in node.names))
    }


def reading_order(page: str) -> tuple[str, ...]:
    """Return the files in the numbered list under a page's heading about reading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"^## .*\bread(?:ing)?\b.*$", text, flags=re.MULTILINE | re.IGNORECASE)[1]
    return tuple(re.findall(r"^\d+\. `([^`]+)`", section.split("\n## ")[0], flags=re.MULTILINE))


def num_lines(name: str) -> int:
    return (ROOT / name).read_text(encoding="utf-8").count("\n")


def glossary_words() -> set[str]:
    """Return all words in the left column of the glossary."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {word.strip() for row in rows for word in row.split(",")}


def vague_entries() -> tuple[int, int]:
    """Return how many Args and Attributes entries begin with a vague word, and the total number of entries."""
    vague = total = 0
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for section in re.split(r"^(?:Args|Attributes):$", ast.get_docstring(node) or "", flags=re.M)[1:]:
                    entries = re.findall(r"^ {4}\*{0,2}\w+: (.*)$", section.split("\n\n")[0], flags=re.M)
                    total += len(entries)
                    vague += sum(re.match(VAGUE, entry, flags=re.IGNORECASE) is not None for entry in entries)
    return vague, total


def assertions(tree: ast.Module) -> Iterator[list[ast.Assert]]:
    """Yield the list of assertions in each function that has any. Nested functions have separate lists."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found, left = [], list(function.body)
            while left:
                node = left.pop()
                if isinstance(node, ast.Assert):
                    found.append(node)
                elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    left += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
            if found:
                yield found


def comparisons(test: ast.expr) -> Iterator[ast.Compare]:
    """Yield the comparisons of an assertion, including each part of `and`, `or`, `all` and `any`."""
    if isinstance(test, ast.Compare):
        yield test
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from comparisons(value)
    elif isinstance(test, ast.Call) and ast.unparse(test.func) in ("all", "any"):
        for value in test.args:
            if isinstance(value, ast.GeneratorExp | ast.ListComp):
                yield from comparisons(value.elt)


def one_sided_figures(tree: ast.Module) -> Iterator[ast.Compare]:
    """Yield the comparisons that bound a metric only on one side. A tolerance with `abs` does not count."""
    for found in assertions(tree):
        ordered: list[tuple[ast.Compare, ast.expr, ast.expr]] = []  # (comparison, smaller side, larger side)
        for comparison in (each for assertion in found for each in comparisons(assertion.test)):
            sides = [comparison.left, *comparison.comparators]
            for operator, one, other in zip(comparison.ops, sides, sides[1:], strict=False):
                if isinstance(operator, ast.Lt | ast.LtE):
                    ordered.append((comparison, one, other))
                elif isinstance(operator, ast.Gt | ast.GtE):
                    ordered.append((comparison, other, one))
        has_upper = {ast.unparse(smaller) for _, smaller, _ in ordered}
        has_lower = {ast.unparse(larger) for _, _, larger in ordered}
        for comparison, smaller, larger in ordered:
            is_measured = {ast.unparse(side): not _is_constant(side) for side in (smaller, larger)}
            others = ({ast.unparse(smaller)} & has_lower) | ({ast.unparse(larger)} & has_upper)
            words = re.findall("[a-z]+", ast.unparse(comparison).lower())
            is_figure = any(re.fullmatch(FIGURE_WORDS, word) for word in words) and not {"abs", "monotonic"} & {*words}
            is_exact = any(isinstance(operator, ast.Eq) for operator in comparison.ops)
            is_set = any(isinstance(each, ast.Set | ast.SetComp) for each in ast.walk(comparison))
            if is_figure and not is_exact and not is_set and not any(is_measured[text] for text in others):
                yield comparison


def _is_constant(node: ast.expr) -> bool:
    """Return whether one side of a comparison has no calls and no names except constants such as `MiB`."""
    return not any(
        isinstance(each, ast.Call) or (isinstance(each, ast.Name) and not re.fullmatch("[A-Z0-9_]+|[KMG]iB", each.id))
        for each in ast.walk(node)
    )


def bounded() -> dict[str, dict[str, int]]:
    """Return the metrics that must not grow, by table and name."""
    lines: Counter[str] = Counter()
    for source in SOURCES:
        lines[folder_of(source.module) if source.path.parent != ROOT / "megatrain" else "megatrain"] += (
            source.text.count("\n")
        )
    files = {
        factor: sum(re.search(rf"\b({words})\b", source.text, flags=re.IGNORECASE) is not None for source in SOURCES)
        for factor, words in FACTOR_WORDS.items()
    }
    rank_tests = sum(len(re.findall(r"\bis_(?:single|first)\b", source.text)) for source in SOURCES)
    one_sided: Counter[str] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        count = sum(1 for _ in one_sided_figures(prose.parse(path.read_text(encoding="utf-8"))))
        one_sided["/".join(path.relative_to(ROOT).parts[:2])] += count
    stems = Counter(source.path.stem for source in SOURCES if source.path.stem not in ("__init__", "__main__", "table"))
    return {
        "hundreds of lines": {name: math.ceil(count / 100) for name, count in sorted(lines.items())},  # room for fixes
        "files per factor": files,
        "uses": {"is_single and is_first": rank_tests},
        "file stems used more than once": {stem: count for stem, count in sorted(stems.items()) if count > 1},
        "one-sided figures in tests": {name: count for name, count in sorted(one_sided.items()) if count},
        "vague entries": {"Args and Attributes": vague_entries()[0]},
        "odd phrases": {name: prose.count(ROOT / name) for name in PROSE},
    }


def read_bounds() -> dict[str, dict[str, int]]:
    """Return the bound of each metric, by table and name."""
    bounds: dict[str, dict[str, int]] = json.loads(BOUNDS.read_text(encoding="utf-8"))
    return bounds


def lower_bounds() -> None:
    """Lower each bound to its metric, and remove bounds without a metric."""
    bounds, found = read_bounds(), bounded()
    lowered = {
        table: {name: min(bound, found[table][name]) for name, bound in rows.items() if name in found[table]}
        for table, rows in bounds.items()
    }
    BOUNDS.write_text(json.dumps(lowered, indent=1) + "\n", encoding="utf-8")


def figures() -> Iterator[tuple[str, str]]:
    """Yield the name and value of each metric."""
    pairs, upward = file_pairs(), upward_pairs()
    yield "upward pairs of files", f"{len(upward)} of {len(pairs)}"
    by_rooms = Counter((layer_of(one), layer_of(other)) for one, other in upward)
    for (one, other), count in sorted(by_rooms.items(), key=lambda each: (_LEVELS[each[0][0]], _LEVELS[each[0][1]])):
        yield f"    {one} -> {other}", str(count)
    yield "packages in a circle", f"{len(packages_in_cycles(pairs))}: {', '.join(sorted(packages_in_cycles(pairs)))}"
    yield "modules that know the config", str(len(schema_importers()))
    yield "fields of StepProgram", str(fields_of("StepProgram"))
    yield "constructors of the core with more than 10 arguments", str(len(long_constructors(10)))
    for name, count in sorted(long_constructors(10).items(), key=lambda each: -each[1]):
        yield f"    {name}", str(count)
    yield "classes with more than 30 methods", str(len(large_classes(30)))
    for name, count in sorted(large_classes(30).items(), key=lambda each: -each[1]):
        yield f"    {name}", str(count)
    yield "class names of two classes", f"{len(shared_class_names())}: {', '.join(sorted(shared_class_names()))}"
    yield "lines of the six files to read", str(sum(map(num_lines, READING_ORDER)))
    yield "lines", str(sum(source.text.count("\n") for source in SOURCES))
    for table, rows in bounded().items():
        yield table, str(sum(rows.values()))
        for name, count in rows.items():
            yield f"    {name}", str(count)


if __name__ == "__main__":
    if sys.argv[1:] == ["--lower"]:
        lower_bounds()
    for title, figure in figures():
        print(f"{title}: {figure}")
