"""The structure of the code: imports between modules, the cost of an import, class sizes and docstring sections."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping

import pytest
from pydantic import BaseModel

import house
from house import MODULES, PACKAGES, ROOT, SOURCES, imports, nodes_under_type_checking
from megatrain.config.schema import RunConfig

# A module may import modules with a lower rank in this table, or with the same rank if there is no import cycle. The
# longest matching prefix of a module's name applies.
RANKS = {
    "tiered.units": 0,
    "tiered.lazy": 0,
    "tiered.errors": 1,
    "tiered.block": 2,
    "tiered.condition": 2,
    "tiered.file_io": 2,
    "tiered.locks": 2,
    "tiered.schedule": 2,
    "tiered.durable.manifest": 5,
    "tiered.durable.drive_places": 5,
    "tiered.durable.zarr_folder": 5,
    "tiered.policies": 3,
    "tiered.transfer": 3,
    "tiered.tiers.base": 3,
    "tiered.durable.ownership": 5,
    "tiered.tiers": 5,
    "tiered.plugins": 6,
    "tiered.zarr_views": 6,
    "tiered.links": 6,
    "tiered.records": 6,
    "tiered.events": 7,
    "tiered.hops": 7,
    "tiered.occupancy": 7,
    "tiered.prefetch": 8,
    "tiered.simulation": 7,
    "tiered.movement": 9,
    "tiered.leasing": 9,
    "tiered.by_name": 10,
    "tiered.mapping": 10,
    "tiered.durable.arrays": 7,
    "tiered.durable.reader": 8,
    "tiered.durable": 10,
    "tiered.store": 11,
    "tiered.zarr_store": 12,
    "tiered.__init__": 13,
    "tiered.ext": 13,
    "tiered.testing": 14,
    "megatrain": 20,
    "cli": 30,
}

# Heavy, optional or hardware-bound library -> files and folders that may use it.
RESTRICTED = {
    "kvikio": ("tiered/links/kvikio.py", "tiered/links/probe.py"),
    "cupy": (),
    "zarr": ("megatrain/data/scores.py", "tiered/zarr_store.py", "tiered/zarr_views.py"),
    "datasets": ("megatrain/data/sources.py",),
    "pyarrow": ("megatrain/data/files.py", "megatrain/data/scores.py", "megatrain/data/shards.py"),
    "lightning": ("megatrain/embed/integrations/lightning.py", "megatrain/embed/integrations/lightning_files.py"),
    "liger_kernel": ("megatrain/converters/liger.py",),
    "numba": ("megatrain/optim/kernels.py",),
    "peft": ("megatrain/converters/adapters.py",),
    "greenlet": ("megatrain/engine/",),
    "triton": (
        "megatrain/trace/kernel_work.py",
        "megatrain/engine/device/triton_kernels.py",
        "megatrain/optim/triton_kernels.py",
    ),
    "safetensors": (),  # models/folder and models/export read and write these files themselves, part by part
    "transformers": (
        "megatrain/tasks/prompts.py",
        "megatrain/data/",
        "megatrain/tasks/continuation.py",
        "megatrain/converters/",
        "megatrain/embed/integrations/hf.py",
        "megatrain/engine/",
        "megatrain/optim/matrices.py",
        "megatrain/models/",
        "megatrain/trace/trace.py",
        "megatrain/optim/lr.py",
        "megatrain/extras/verify.py",
    ),
    "torch.distributed": ("megatrain/embed/stores.py", "megatrain/ranks/"),
    "torch.cuda": (
        "megatrain/__init__.py",
        "megatrain/converters/documents.py",
        "megatrain/extras/doctor/processors.py",
        "megatrain/embed/ordinary_groups.py",
        "megatrain/embed/stores.py",
        "megatrain/engine/",
        "megatrain/trace/trace.py",
        "megatrain/optim/matrices.py",
        "megatrain/optim/by_tier.py",
        "megatrain/machine/this_machine.py",
        "megatrain/ranks/affinity.py",
        "tiered/links/cuda.py",
        "tiered/tiers/ram.py",
        "tiered/tiers/gpu.py",
    ),
}


ALL_FOLDERS = sorted(path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))


def rank_of(module: str) -> int | None:
    """Return the rank of a module's longest known prefix, or None for a module of another project."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    for length in range(len(parts), 0, -1):
        rank = RANKS.get(".".join(parts[:length]))
        if rank is not None:
            return rank
    raise AssertionError(f"{module} has no rank")


def test_the_packages_are_found() -> None:
    assert "tiered.store" in MODULES
    assert "megatrain.base.precision" in MODULES
    assert rank_of("tiered.links.base") == RANKS["tiered.links"]
    assert rank_of("torch.nn") is None


def test_imports_go_downward_only() -> None:
    upward = []
    for source in SOURCES:
        rank = rank_of(source.module)
        assert rank is not None
        for line, imported in imports(source):
            imported_rank = rank_of(imported)
            if imported_rank is not None and imported_rank > rank:
                upward.append(f"{source.name}:{line} (rank {rank}) imports {imported} (rank {imported_rank})")
    assert not upward, "\n".join(upward)


#: The only module outside `cli` that may import the command. It uses the installed name, `megatrain_tier_cli`.
RUNS_THE_COMMAND = "megatrain.__main__"


def test_only_one_module_imports_the_command() -> None:
    """`torchrun -m megatrain run CONFIG` needs one module in `megatrain` that imports the command. No other may."""
    importers = {
        source.module
        for source in SOURCES
        if not source.module.startswith("cli.")
        for _, imported in imports(source)
        if imported.split(".")[0] in ("cli", "megatrain_tier_cli")
    }
    assert importers == {RUNS_THE_COMMAND}


def test_no_import_cycles() -> None:
    """Imports under ``TYPE_CHECKING`` also count. A type belongs next to its concept, not where objects are created."""
    edges = {
        source.module: {name for _, name in imports(source) if name in MODULES} - {source.module} for source in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "circle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for imported in sorted(edges[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())
    assert done == MODULES


#: Imports of a higher layer (``house.LAYERS``) that still exist: remedy -> "importer -> imported". Remove an import
#: from this table once it is gone. New ones are forbidden: the higher layer must pass its objects down instead.
UPWARD: dict[str, set[str]] = {}


def test_packages_import_only_lower_layers() -> None:
    upward = {f"{importer} -> {imported}" for importer, imported in house.upward_pairs()}
    known = {pair for pairs in UPWARD.values() for pair in pairs}
    assert upward <= known, f"these import a room above their own: {sorted(upward - known)}"
    assert known <= upward, f"these pairs are gone, take them from UPWARD: {sorted(known - upward)}"


#: Imports of core internals by tools: reason -> "importer -> imported". Remove an import from this table once it is
#: gone. New ones are forbidden: the tool must use `megatrain.api`, to which public names can be added.
INTERNAL_IMPORTS_OF_TOOLS = {
    "its subject is a config: keys, what is wrong with them, whole tables": {
        "megatrain.extras.report.figures -> megatrain.config.keys",
        "megatrain.extras.report.history -> megatrain.config.schema",
        "megatrain.extras.translate.conversions -> megatrain.config.keys",
        "megatrain.extras.translate.draft -> megatrain.config.keys",
        "megatrain.extras.translate.translate -> megatrain.config.keys",
        "megatrain.extras.translate.translate -> megatrain.config.combinations",
        "megatrain.extras.translate.translate -> megatrain.config.load",
        "megatrain.extras.verify -> megatrain.config.schema",
    },
    "it measures a kernel or counts the calls of an engine, as they are": {
        "megatrain.extras.doctor.processors -> megatrain.trace.counting",
        "megatrain.extras.doctor.processors -> megatrain.optim.kernels",
        "megatrain.extras.doctor.processors -> megatrain.optim.threads",
    },
}


def test_tools_import_only_public_names() -> None:
    inside = {f"{importer} -> {imported}" for importer, imported in house.internal_imports_of_tools()}
    known = {pair for pairs in INTERNAL_IMPORTS_OF_TOOLS.values() for pair in pairs}
    assert inside <= known, f"import these from megatrain.api: {sorted(inside - known)}"
    assert known <= inside, f"these pairs are gone, take them from INTERNAL_IMPORTS_OF_TOOLS: {sorted(known - inside)}"


#: Names of the engine that `megatrain.embed` may use: placeholders for weights, gradient sums and block keys.
EMBEDDING_USES = {
    "megatrain.engine.unit.absent_weights.METADATA_QUERIES",
    "megatrain.engine.unit.absent_weights.placeholder",
    "megatrain.engine.unit.graph_keeping.version_probe",
    "megatrain.engine.program.block_keys.gradient_key",
    "megatrain.engine.program.block_keys.state_key",
    "megatrain.engine.program.block_keys.weight_key",
    "megatrain.engine.unit.weight_gradients.GradientAccumulator",
}


def test_embed_imports_only_the_listed_engine_names() -> None:
    used = {
        f"{node.module}.{alias.name}"
        for source in SOURCES
        if source.module.startswith("megatrain.embed")
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatrain.engine")
        for alias in node.names
    }
    assert used == EMBEDDING_USES


def test_only_one_module_of_embed_imports_ranks() -> None:
    """``ranks.dtensors`` does not count: with FSDP2, each rank updates only its own shards, independently of others."""
    importers = {
        source.module
        for source in SOURCES
        if source.module.startswith("megatrain.embed")
        for _, name in imports(source)
        if name.startswith("megatrain.ranks.") and name != "megatrain.ranks.dtensors"
    }
    assert importers == {"megatrain.embed.shared"}


def test_public_names_for_tools_exist() -> None:
    code = """
import sys, megatrain.api
print("torch" in sys.modules)
assert all(getattr(megatrain.api, name) is not None for name in megatrain.api.__all__)
"""
    assert run_python(code) == "False"


def test_no_package_cycles() -> None:
    assert not house.import_cycles((house.folder_of(one), house.folder_of(other)) for one, other in house.file_pairs())


# Size limits. The two tables contain exceptions, whose numbers of methods and arguments may only shrink.
MOST_METHODS = 30
METHODS = {
    "tiered.store.TieredStore": 42,
}
MOST_ARGUMENTS = 10
ARGUMENTS: dict[str, int] = {}
MOST_STEP_PROGRAM_FIELDS = 9
MOST_KNOWING_THE_CONFIG = 12
MOST_LINES_TO_READ = 4_000  # leaves room for fixes; to shorten a file, remove features, not comments


def assert_only_shrinks(found: Mapping[str, int], bounds: Mapping[str, int]) -> None:
    grown = {name: count for name, count in found.items() if count > bounds.get(name, 0)}
    assert not grown, f"more than { ({name: bounds.get(name) for name in grown}) }: {grown}"
    shrunk = {name: found.get(name) for name, bound in bounds.items() if found.get(name, 0) < bound}
    assert not shrunk, f"smaller now, take the bounds down: {shrunk}"


def test_large_classes_only_shrink() -> None:
    assert_only_shrinks(house.large_classes(MOST_METHODS), METHODS)


def test_long_constructors_of_the_core_only_shrink() -> None:
    assert_only_shrinks(house.long_constructors(MOST_ARGUMENTS), ARGUMENTS)


def test_step_program_fields_only_shrink() -> None:
    assert_only_shrinks({"StepProgram": house.fields_of("StepProgram")}, {"StepProgram": MOST_STEP_PROGRAM_FIELDS})


def test_class_names_are_unique() -> None:
    """No two classes have the same name, public or private, so a reader always knows which class a name means."""
    assert not house.shared_class_names()


def test_code_metrics_only_shrink() -> None:
    """Metrics such as lines of code, files per factor, reused file names and vague entries must not grow.

    One metric counts figures that a test bounds only from above or only from below. Such tests miss mistakes in the
    other direction.
    """
    bounds = house.read_bounds()
    grown = [
        f"{table}, {name}: {figure}, bound {bounds[table].get(name, 0)}"
        for table, rows in house.bounded().items()
        for name, figure in rows.items()
        if figure > bounds[table].get(name, 0)
    ]
    advice = "delete something redundant, or see CONTRIBUTING.md; `python -m tests.house` prints all figures"
    assert not grown, f"above {house.BOUNDS.relative_to(house.ROOT)}: {'; '.join(grown)}. {advice}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("assert moved > 0 and num_steps >= least", 2),
        ("assert all(peak <= capacity for peak in peaks)", 1),
        ("assert moved > 0 < peak", 2),
        ("assert 0 < moved <= planned", 0),
        ("assert moved > 0\n    assert moved < 9", 0),
        ("assert moved == planned > 0", 0),
        ("assert abs(loss - expected) < 1e-6", 0),
        ("assert {'ram->nvme per step'} <= names", 0),
    ],
)
def test_one_sided_figures_are_detected(text: str, count: int) -> None:
    found = house.one_sided_figures(ast.parse(f"def test() -> None:\n    {text}\n"))
    assert len(list(found)) == count


def test_reading_order_is_up_to_date_and_short() -> None:
    assert house.reading_order("ARCHITECTURE.md") == house.READING_ORDER
    assert sum(house.num_lines(name) for name in house.READING_ORDER) <= MOST_LINES_TO_READ


#: Words in the code whose meaning a reader cannot guess.
KEY_WORDS = (
    *("block", "slot", "copy", "home", "lease", "tick", "program", "tape", "op", "held", "passing", "turn"),
    *("unit", "layout", "part", "piece", "range", "region", "packed", "encoding", "visit", "use site"),
    *("rank", "shard", "full copy", "gather", "exchange", "lane", "open sum"),
    *("kept graph", "saved results", "pass-through tensor", "generation", "reference", "average", "workspace"),
)


def test_key_words_of_the_code_are_in_the_glossary() -> None:
    assert not set(KEY_WORDS) - house.glossary_words()


#: Modules that may use a whole config. All others get the values that `megatrain.training.resolve` derives from it.
KNOW_THE_CONFIG = {
    "megatrain.training.resolve",
    "megatrain.training.resolve_rows",
    "megatrain.training.run_check",
    "megatrain.extras.generation",
    "megatrain.extras.report.history",
    "megatrain.extras.scoring",
    "megatrain.training.trainer",
    "megatrain.extras.verify",
}
READ_TABLES = (
    *("megatrain.config.", "megatrain.training.resolve", "megatrain.extras.verify"),
    *("megatrain.training.run_check", "megatrain.extras.report.", "cli."),
)


def test_modules_importing_the_config_schema_only_shrink() -> None:
    knowing = house.schema_importers()
    strangers = {module for module in knowing if not module.startswith("megatrain.config.")} - KNOW_THE_CONFIG
    assert not strangers, strangers
    assert_only_shrinks({"modules": len(knowing)}, {"modules": MOST_KNOWING_THE_CONFIG})


def test_keys_of_a_config_are_read_by_the_owners_of_their_tables() -> None:
    """Other modules get single tables, or values that ``resolve`` combines from several tables."""
    tables = {name for name, field in RunConfig.model_fields.items() if is_table(field.annotation)}
    found = [
        f"{source.name}:{node.lineno} {ast.unparse(node)}"
        for source in SOURCES
        if not source.module.startswith(READ_TABLES)
        for node in source.nodes
        if isinstance(node, ast.Attribute) and isinstance(table := node.value, ast.Attribute)
        if table.attr in tables and ast.unparse(table.value).endswith("config")
    ]
    assert {"model", "tiers", "advanced"} <= tables
    assert not found, found


def is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def test_config_tables_are_defined_by_their_owners_with_light_imports() -> None:
    """The command reads configs, and completes key names, before it imports torch."""
    owners = {field.annotation.__module__ for field in RunConfig.model_fields.values() if is_table(field.annotation)}
    assert len(owners) > 5 and all(re.fullmatch(r"megatrain\.\w+\.table", module) for module in owners), owners
    light = re.compile(r"pydantic|megatrain\.base\.|megatrain\.\w+\.table$|tiered\.units$")
    found = [
        f"{source.name}:{line} imports {name}"
        for source in SOURCES
        if source.module in owners
        for line, name in imports(source)
        if name.partition(".")[0] not in sys.stdlib_module_names and not light.match(name)
    ]
    assert not found, found


#: Names that other packages may import from `tiered`; everything else is internal.
PUBLIC = {"tiered.__init__", "tiered.ext", "tiered.testing.__init__", "tiered.errors", "tiered.lazy", "tiered.units"}


def test_other_packages_import_only_public_names_of_tiered() -> None:
    deep = [
        f"{source.name}:{line} imports {name}"
        for source in SOURCES
        for line, name in imports(source)
        if name.startswith("tiered.") and name not in PUBLIC and not source.module.startswith("tiered.")
    ]
    assert not deep, "\n".join(deep)


def test_tier_capabilities_are_protocols() -> None:
    """`hasattr` checks a name; a protocol also defines the method's behaviour, and mypy checks it."""
    found = [
        f"{source.name}:{node.lineno}"
        for source in SOURCES
        if source.module.startswith("tiered.")
        for node in source.nodes
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr")
        or (isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None and is_untyped_tier(node))
    ]
    assert not found, found


def is_untyped_tier(node: ast.arg | ast.AnnAssign) -> bool:
    name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
    return "tier" in name and node.annotation is not None and "Any" in ast.unparse(node.annotation)


def test_imports_within_cli_are_relative() -> None:
    """With absolute imports, a module could be loaded twice, as `cli.main` and as `megatrain_tier_cli.main`."""
    own_names = {"cli", "megatrain_tier_cli"}
    absolute = [
        f"{source.name}:{node.lineno}"
        for source in SOURCES
        if source.module.startswith("cli.")
        for node in source.nodes
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in own_names)
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] in own_names for alias in node.names))
    ]
    assert not absolute, absolute


@functools.cache
def names_used() -> list[tuple[str, int, str]]:
    """Return (file, line, name) for every import that runs and every attribute. Attribute names begin with "="."""
    found = []
    for source in SOURCES:
        skipped = nodes_under_type_checking(source.tree)
        found += [(source.name, line, name) for line, name in imports(source, with_typing=False)]
        found += [
            (source.name, node.lineno, f"={ast.unparse(node)}")
            for node in source.nodes
            if isinstance(node, ast.Attribute) and node not in skipped
        ]
    return found


@pytest.mark.parametrize("library", sorted(RESTRICTED))
def test_restricted_library_is_used_only_in_its_files(library: str) -> None:
    owners = RESTRICTED[library]
    strangers = [
        f"{file}:{line}"
        for file, line, name in names_used()
        if (f"{name}.".startswith(f"{library}.") or name == f"={library}")
        and not any(file == owner or (owner.endswith("/") and file.startswith(owner)) for owner in owners)
    ]
    assert not strangers, strangers


def test_todo_comments_reference_an_issue() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    found = [
        f"{source.name}:{number}"
        for source in SOURCES
        for number, line in enumerate(source.text.splitlines(), 1)
        if marker.search(line)
    ]
    assert not found, found


def test_sources_are_ascii() -> None:
    assert not [source.name for source in SOURCES if not source.text.isascii()]


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_weights_only_load(call: ast.Call) -> bool:
    return any(keyword.arg == "weights_only" and is_true(keyword.value) for keyword in call.keywords)


def test_sources_use_no_pickle_and_no_remote_code() -> None:
    """`torch.load` (without `weights_only`) and pickle can execute code from a file, and anyone can write a model."""
    found = []
    for source in SOURCES:
        found += [f"{source.name}:{line} {name}" for line, name in imports(source) if name.split(".")[0] == "pickle"]
        for node in source.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and not is_weights_only_load(node):
                found.append(f"{source.name}:{node.lineno} torch.load")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and is_true(node.value):
                found.append(f"{source.name}:{node.value.lineno} trust_remote_code is on")
    assert not found, found


def test_every_package_is_listed_for_the_wheel() -> None:
    """Automatic discovery is off (package-dir is set): an unlisted package would silently be missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        ".".join(["megatrain_tier_cli" if part == "cli" else part for part in folder.relative_to(ROOT).parts])
        for folder in ALL_FOLDERS
    }
    example = {"megatrain_tier_cli.example"}  # data of `init --example`, stored with the examples
    assert set(project["tool"]["setuptools"]["packages"]) == folders | example
    with_code = {source.path.parent for source in SOURCES}
    assert with_code <= set(ALL_FOLDERS), f"no __init__.py: {sorted(map(str, with_code - set(ALL_FOLDERS)))}"


def test_every_non_code_file_is_listed_for_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    missing = []
    for path in sorted(files):
        is_listed = path.suffix == ".py"
        for above in path.relative_to(ROOT).parents[:-1]:
            folder = ".".join(above.parts).replace("cli", "megatrain_tier_cli")
            name = path.relative_to(ROOT / above).as_posix()
            is_listed = is_listed or any(fnmatch.fnmatchcase(name, pattern) for pattern in data.get(folder, []))
        if not is_listed and "__pycache__" not in path.parts:
            missing.append(str(path.relative_to(ROOT)))
    assert not missing, missing


def test_tests_are_not_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("package", ["tiered", "megatrain"])
def test_importing_a_package_is_lean(package: str) -> None:
    code = f"""
import sys, threading
import torch  # brings what it brings; only what comes on top counts
before, threads = set(sys.modules), threading.active_count()
import {package}
heavy = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(heavy & {{"kvikio", "cupy", "zarr", "transformers", "safetensors", "numba", "greenlet", "rich", "click"}}))
print(torch.cuda.is_initialized(), threading.active_count() - threads)
"""
    assert run_python(code).splitlines() == ["[]", "False 0"]


def test_importing_megatrain_configures_cublas_before_torch_loads() -> None:
    unset = "import os; os.environ.pop('CUBLAS_WORKSPACE_CONFIG', None)"
    code = "import sys, megatrain; print('torch' in sys.modules, os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert run_python(f"{unset}\n{code}") == "False :4096:8"
    chosen = "import os; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'"
    assert run_python(f"{chosen}\n{code}") == "False :16:8"


def test_public_names_load_lazily_next_to_same_named_packages() -> None:
    code = """
import sys, megatrain
megatrain.load_config("examples/01_tiny.toml")
print("torch" in sys.modules)
optional = {"hf", "lightning"}
assert all(callable(getattr(megatrain, name)) for name in megatrain.__all__ if name not in optional)
import megatrain.plan.planner
assert megatrain.plan.planner.plan_run is megatrain.plan_run
"""
    assert run_python(code) == "False"


def test_a_config_is_read_without_torch() -> None:
    """Mistakes in a config are therefore reported immediately, before slow imports."""
    code = """
import sys
import tiered, megatrain.config
import megatrain.run.folder, megatrain.run.loggers, megatrain.run.status
import megatrain.base.observer, megatrain.base.owner, megatrain.base.progress, megatrain.base.timeline
megatrain.config.load_config("examples/01_tiny.toml")
print(sorted({"torch", "transformers", "numpy", "zarr"} & set(sys.modules)))
assert all(getattr(tiered, name) is not None for name in tiered.__all__)
assert "torch" in sys.modules
"""
    assert run_python(code) == "[]"


def test_the_command_shows_its_help_without_torch() -> None:
    pytest.importorskip("megatrain_tier_cli", reason="the project is not installed")
    code = """
import sys
from megatrain_tier_cli.main import main
sys.argv = ["megatrain-tier", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(sorted({"torch", "transformers", "numpy", "zarr"} & set(sys.modules)))
"""
    lines = run_python(code).splitlines()
    assert lines[-1] == "[]", lines[-1]
    assert "run" in "\n".join(lines) and "plan" in "\n".join(lines)


def names_in_docstring(node: ast.AST) -> set[str]:
    """Return the names that entries in the docstring of a function or class may describe."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = inner.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            names |= {inner.name} | {argument.arg for argument in every if argument is not None}
        elif isinstance(inner, ast.Name):
            names.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            names.add(inner.attr)
    return names


def malformed_entries(docstring: str, names: set[str]) -> Iterator[str]:
    """Yield the lines in Args, Attributes and Raises that are not an entry for exactly one known name."""
    section, indent = None, 0
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if found := re.fullmatch(r"(Args|Attributes|Raises):", line.strip()):
            section, indent = found[1], 0
        elif section and line.strip():
            indent = indent or depth
            if depth < indent:
                section = None
            elif depth == indent:
                entry = re.match(r"\*{0,2}(\w+): \S", line.strip())
                is_known = entry is not None and (section == "Raises" or entry[1] in names)
                second = re.search(r"[.;] (\w+): ", line)
                if not is_known or (second is not None and (second[1] in names or second[1].endswith("Error"))):
                    yield line.strip()


def test_sections_of_docstrings_have_one_entry_per_line() -> None:
    """Tools such as mkdocstrings and IDEs can then show the entries, and a reader can find a name."""
    found = []
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = malformed_entries(ast.get_docstring(node) or "", names_in_docstring(node))
                found += [f"{source.name}:{node.lineno} {node.name}: {line}" for line in lines]
    assert not found, "\n".join(found)
