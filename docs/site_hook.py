"""Adds the README and other pages of the repository to the site that ``make docs`` builds.

Links in the pages work on a code host, which shows files at their repository paths. On the site, pages of ``docs/``
keep their paths, the README is the home page, and everything else is below ``repository/``. This hook copies linked
files there and rewrites the links. A link to a missing file is not rewritten, so the build fails.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS, HOME, REST = "docs/", "README.md", "repository/"
#: Pages of the repository that are shown like pages of docs/.
PAGES = (HOME, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "bench/README.md")
#: Pages outside nav that are included in the search.
SEARCHED = ("bench/README.md",)
_FENCED = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+)")
#: Link to a test. The site does not contain tests, so only the text of the link is kept.
_TEST_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)*tests/[^)\s]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository, and every file that a page links to."""
    pages = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("bench/results/*.md")))]
    known = {_source(file.src_uri): file for file in files if file.is_documentation_page()}
    wanted = dict.fromkeys(pages)
    for page in [*pages, *known]:
        for link in _links(_without_tests((ROOT / page).read_text(encoding="utf-8"))):
            source = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if not source.startswith((DOCS, "..")) and (ROOT / source).is_file():
                wanted[source] = None
    for source in wanted:
        files.append(File.generated(config, _uri(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the repository links of a page with site links."""
    source, here = _source(page.file.src_uri), posixpath.dirname(page.file.src_uri)
    if page.file.src_uri not in _pages(config["nav"]) and source not in SEARCHED:
        page.meta["search"] = {"exclude": True}  # otherwise, decisions and results would bury the guides

    def rewrite(link: str) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if (ROOT / target).is_dir():
            target = f"{target}/{HOME}"
        uri = _uri(target)
        return posixpath.relpath(uri, here or ".") if files.get_file_from_path(uri) else link

    return _outside_of_code(
        _without_tests(markdown), lambda text: _LINK.sub(lambda found: f"]({rewrite(found[1])}", text)
    )


def _pages(entries: Any) -> set[str]:
    """Return the addresses of all pages in a part of nav."""
    if isinstance(entries, str):
        return {entries}
    parts = entries.values() if isinstance(entries, dict) else entries
    return set().union(*map(_pages, parts))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Embed the rows of a page's selector as a script element, because file:// pages cannot request files."""
    rows = ROOT / _source(page.file.src_uri).replace(".md", ".json")
    if not rows.is_file():
        return html
    text = json.dumps(json.loads(rows.read_text(encoding="utf-8")), separators=(",", ":")).replace("</", "<\\/")
    return f'{html}\n<script type="application/json" id="rows">{text}</script>\n'


def _without_tests(markdown: str) -> str:
    return _outside_of_code(markdown, lambda text: _TEST_LINK.sub(r"\1", text))


def _source(uri: str) -> str:
    """Return the repository path of the page with this address on the site."""
    if uri == "index.md":
        return HOME
    return uri.removeprefix(REST) if uri.startswith(REST) else DOCS + uri


def _uri(source: str) -> str:
    if source == HOME:
        return "index.md"
    return source.removeprefix(DOCS) if source.startswith(DOCS) else REST + source


def _links(markdown: str) -> list[str]:
    found: list[str] = []
    _outside_of_code(markdown, lambda text: found.extend(_LINK.findall(text)) or text)
    return [link for link in found if "://" not in link]


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("```") else change(part) for part in _FENCED.split(markdown))
