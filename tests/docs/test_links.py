"""Links in the documentation lead to existing files and headings. Lists of pages, names and decisions are complete."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatrain.engine.tape import execution
from megatrain.extras.translate.conversions import LOSSES
from oracles.code_blocks import NAMES, ROOT

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md"])
def test_links_have_existing_targets(name: str) -> None:
    page = ROOT / name
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", prose(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{name}: {link} leads out of the repository"
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == [], name


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and methods of a Python file: `function`, `Class`, `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_names_that_link_to_code_are_defined_there(name: str) -> None:
    page, dead = ROOT / name, []
    named = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", prose(page))
    for code, link in named:
        path = (page.parent / link).resolve()
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if code.removeprefix(f"{module}.") not in definitions(path):
            dead.append(f"{code}: {link}")
    assert dead == []
    assert name != "docs/reading.md" or len(named) > 40


def test_execution_docstring_names_existing_engine_code() -> None:
    found = set().union(*(definitions(path) for path in (ROOT / "megatrain/engine").rglob("*.py")))
    named = re.findall(r"`(\w+\.\w+)`", execution.__doc__ or "")
    assert len(named) > 8 and set(named) <= found


def test_mentions_of_pages_are_links() -> None:
    """If a page mentions another page, the mention is a link that a reader can follow."""
    named = [
        f"{name}: {page}"
        for name in NAMES
        for page in re.findall(r"(?<!\[)`(docs/\w+\.md)`", prose(ROOT / name))
        if page != name
    ]
    assert named == []


_STATUS = re.compile(
    r"\*\*Status\.\*\* (Binding since \d{4}-\d\d-\d\d(?:, amended by .+)?\.|"
    r"Ended on \d{4}-\d\d-\d\d, binding since \d{4}-\d\d-\d\d\. Successor: .+\.)"
)


def test_every_decision_has_a_status_and_is_in_the_list() -> None:
    """The third line of a decision states its status, which the list repeats. Ended decisions are in archive/."""
    folder = ROOT / "docs/decisions"
    text = (folder / "README.md").read_text(encoding="utf-8")
    for path in sorted(folder.rglob("0*.md")):
        title, _, status, *_ = path.read_text(encoding="utf-8").splitlines()
        found = _STATUS.fullmatch(status)
        assert found, f"{path.name}: '{status}' is no status"
        assert found[1].startswith("Ended") == (path.parent != folder), path.name
        plain = re.sub(r"\[(\d{4})\]\([^)]*\)", r"\1", found[1])
        assert f"- [{title[2:]}]({path.relative_to(folder)}). {plain}\n" in text, path.name


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_match_their_source_text() -> None:
    """``python docs/draw.py`` regenerates the pictures."""
    draw, drawn = module_of("draw"), 0
    for source in sorted((ROOT / "docs/pictures").glob("*.txt")):
        title, _, text = source.read_text(encoding="utf-8").partition("\n")
        if title.startswith("# "):
            svg = draw.picture_of(text, title[2:])
            assert source.with_suffix(".svg").read_text(encoding="utf-8") == svg, source.name
            assert ElementTree.fromstring(svg).tag.endswith("svg") and "<path" in svg and "<polygon" in svg
            drawn += 1
    assert drawn >= 3


def test_site_links_to_no_test_files() -> None:
    """The site is also built from an sdist, which may lack tests. Links to tests become plain text, and others stay."""
    pytest.importorskip("mkdocs")
    hook = module_of("site_hook")
    seen = 0
    for name in NAMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        links = hook._links(hook._without_tests(text))
        assert not [link for link in links if re.match(r"(\.\./)*tests/", link)], name
        seen += len(hook._links(text)) - len(links)
    assert seen >= 2


def test_every_page_is_in_the_navigation_or_on_the_page_of_the_project() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if "decisions" not in path.parts}
    shown = re.findall(r"[-:] ([\w/]+\.md)$", nav, flags=re.MULTILINE)
    assert len(shown) == len(set(shown))
    listed = set(re.findall(r"\]\(([\w/]+\.md)", (docs / "project.md").read_text(encoding="utf-8")))
    assert pages - set(shown) <= listed
    assert "decisions/README.md" in listed and not any(page.startswith("decisions/") for page in shown)
    # The reference pages come last.
    assert shown.index("config.md") > shown.index("embedding.md") and shown.index("cli.md") > shown.index(
        "quickstart.md"
    )


@pytest.mark.parametrize("package", ["megatrain", "tiered"])
def test_the_reference_has_every_public_name(package: str) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/api").glob("*.md")))
    names = re.findall(rf"^::: {package}\.(\w+)$", text, flags=re.MULTILINE)
    if package == "tiered":
        names += re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)  # units such as MiB are in a table
    assert sorted(names) == sorted(importlib.import_module(package).__all__)


def test_pages_list_keys_that_import_translates() -> None:
    """The page for users of each tool mentions preference losses, and does not list a supported loss as missing."""
    for tool in ("llamafactory", "trl"):
        text = (ROOT / f"docs/coming_from/{tool}.md").read_text(encoding="utf-8")
        assert 'task = "dpo"' in text and "preferences.md" in text
        missing = [line for line in text.splitlines() if re.search(r"does not have|not supported by `run`", line)]
        assert missing, "the lists of missing features are removed"
        for loss in ("dpo", *LOSSES, "distillation"):
            assert not any(re.search(rf"\b{loss}", line, re.IGNORECASE) for line in missing), (tool, loss)
