"""The packaging files agree with the project, and the files that they name exist."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain
import tiered

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_written_once() -> None:
    assert megatrain.__version__ == tiered.__version__ == version("megatrain-tier") == PROJECT["version"]
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert top is not None and top[1] == PROJECT["version"]
    with pytest.raises(AttributeError):
        _ = tiered.__nothing__


@pytest.mark.parametrize(("name", "max_bytes"), [("ARCHITECTURE.md", 8192), ("CHANGELOG.md", 3072)])
def test_pages_of_the_project_stay_short(name: str, max_bytes: int) -> None:
    assert (ROOT / name).stat().st_size in range(max_bytes // 2, max_bytes + 1)


def test_messages_name_install_commands_that_work_in_a_checkout() -> None:
    """The package is not on PyPI, so messages use ``install_command``, with an extra that exists."""
    for package in ("cli", "megatrain", "tiered"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "megatrain-tier[" not in text, path
            extras = re.findall(r"install_command\(['\"](\w+)['\"]\)", text)
            assert set(extras) <= set(PROJECT["optional-dependencies"]), path


def test_the_extra_gds_and_the_wheels_of_the_tests_agree() -> None:
    """The extra has four of the five tested wheels, in the same versions. It omits kvikio-cu13, which requires cupy."""
    text = (ROOT / "requirements-kvikio.txt").read_text(encoding="utf-8")
    lines = [line.split(";")[0].strip() for line in text.splitlines() if line and not line.startswith("#")]
    tested = dict(re.fullmatch(r"([a-z0-9-]+)(.*)", line).groups() for line in lines)  # type: ignore[union-attr, misc]
    extra = [line.split(";")[0].strip() for line in PROJECT["optional-dependencies"]["gds"]]
    asked_for = dict(re.fullmatch(r"([a-z0-9-]+)(.*)", line).groups() for line in extra)  # type: ignore[union-attr, misc]
    assert set(tested) - set(asked_for) == {"kvikio-cu13"}
    for name, bounds in asked_for.items():
        assert tested[name] == bounds or tested[name].startswith(bounds.removesuffix("*")), name


def test_the_description_has_no_relative_links() -> None:
    """A package index shows the description without the repository, so relative links would be dead."""
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if "://" not in link] == []


def test_files_of_the_code_host_are_well_formed() -> None:
    folder = ROOT / ".github"
    files = sorted(folder.rglob("*.yml"))
    assert len(files) >= 4
    loaded = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}
    steps = loaded["ci.yml"]["jobs"]["ci"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]
    assert loaded["ci.yml"]["permissions"] == {"contents": "read"}
    for path in (folder / "ISSUE_TEMPLATE").glob("*.yml"):
        if path.name != "config.yml":
            form = loaded[path.name]
            assert {"name", "description", "body"} <= set(form), path.name
            ids = [field["id"] for field in form["body"]]
            assert len(ids) == len(set(ids)) and all(field["attributes"]["label"] for field in form["body"]), path.name


def test_the_citation_is_of_this_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert citation["cff-version"] == "1.2.0" and {"message", "authors", "type"} <= set(citation)
