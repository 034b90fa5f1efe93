"""The packaging files agree with the project, and the files that they name exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

import megatrain
import tiered

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTRUCTIONS = {"FROM", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
#: Conda package -> its name on PyPI, where the names differ.
CONDA_NAMES = {"pytorch": "torch", "python-xxhash": "xxhash"}


def dockerfile() -> list[tuple[str, str]]:
    """Return (instruction, arguments) for each line of the Dockerfile, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "packaging/Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_dockerfile_has_its_targets_and_known_instructions() -> None:
    lines = dockerfile()
    assert {name for name, _ in lines} <= INSTRUCTIONS
    stages = [words.split() for name, words in lines if name == "FROM"]
    assert [stage[2] for stage in stages] == ["base", "cpu", "cuda"] and {stage[1] for stage in stages} == {"AS"}
    assert [stage[0] for stage in stages][1:] == ["base", "base"] and stages[0][0].startswith("debian:")
    page = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--target (\w+)", page)) == {"cpu", "cuda"}
    users = [words for name, words in lines if name == "USER"]
    assert users == ["trainer", "root", "trainer"], "nothing runs as root"


def test_docker_copies_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "**"
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [word for name, words in dockerfile() if name == "COPY" for word in shlex.split(words)[:-1]]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == keep or source.startswith(f"{keep}/") for keep in kept), source
    for needed in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "constraints.txt", "cli"):
        assert needed in copied, needed
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for package in packages["packages"]:
        folder = packages["package-dir"].get(package) or package.replace(".", "/").replace("megatrain_tier_cli", "cli")
        assert any(folder == source or folder.startswith(f"{source}/") for source in copied), package


def test_commands_of_the_dockerfile_are_sound() -> None:
    """The shell syntax, the entry point, and the extras and files in pip's arguments are valid."""
    for name, words in dockerfile():
        if name != "RUN":
            continue
        subprocess.run(["bash", "-n", "-c", words], check=True, timeout=20)
        for extras in re.findall(r"\.\[([a-z,]+)\]", words):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for file in re.findall(r"-[cr] (\S+\.txt)", words):
            assert (ROOT / Path(file).name).is_file(), file
    (entry,) = [words for name, words in dockerfile() if name == "ENTRYPOINT"]
    *_, program = yaml.safe_load(entry)
    assert program in PROJECT["scripts"]


def recipe() -> dict[str, Any]:
    """Return the recipe as conda-build reads it: rendered with the values of ``pyproject.toml``."""
    text = (ROOT / "packaging/conda/meta.yaml").read_text(encoding="utf-8")

    def load_file_data(name: str, *, from_recipe_dir: bool) -> Any:
        assert from_recipe_dir
        return tomllib.loads((ROOT / "packaging/conda" / name).resolve().read_text(encoding="utf-8"))

    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text)
    found: dict[str, Any] = yaml.safe_load(template.render(load_file_data=load_file_data, PYTHON="python"))
    return found


def asked(line: str) -> tuple[str, str]:
    name, bounds = re.fullmatch(r"([A-Za-z0-9_-]+) ?(.*)", line).groups()  # type: ignore[union-attr]
    return CONDA_NAMES.get(name, name), bounds


def test_recipe_requirements_match_the_wheel() -> None:
    found = recipe()
    run = dict(map(asked, found["requirements"]["run"]))
    assert run.pop("python") == PROJECT["requires-python"] and run.pop("__linux") == ""
    assert run == dict(map(asked, PROJECT["dependencies"]))
    assert found["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert found["build"]["entry_points"] == scripts
    assert (ROOT / "packaging/conda" / found["source"]["path"]).resolve() == ROOT
    assert (ROOT / found["about"]["license_file"]).is_file()


def test_the_version_is_written_once() -> None:
    assert megatrain.__version__ == tiered.__version__ == version("megatrain-tier") == PROJECT["version"]
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert top is not None and top[1] == PROJECT["version"]
    with pytest.raises(AttributeError):
        _ = tiered.__nothing__


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
