"""Imports of public names at their first use, because importing torch takes seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    module: str, *, distribution: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the names that a module imports for type checkers.

    ::

        if TYPE_CHECKING:
            from package.module import Name as Name
        else:
            __getattr__, __dir__, __all__ = lazy_names(__name__)

    The function reads the names from the module's source text, as transformers does for its models. So each name is
    written only once, where type checkers and editors look for it.

    Args:
        module: Dotted name of the module that calls this function while it is being imported.
        distribution: Name of an installed distribution. Its version becomes the attribute ``__version__``.

    Raises:
        ImportError: The installation lacks the module's source text.
    """
    module_names = _typed_imports(module)
    public_names = [*module_names, *([] if distribution is None else ["__version__"])]

    def __getattr__(name: str) -> Any:
        if name == "__version__" and distribution is not None:
            from importlib.metadata import version  # imported late, because it takes half of the import time

            return version(distribution)
        if name not in module_names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home = import_module(module_names[name])
        return getattr(home, name) if name in vars(home) else import_module(f"{module_names[name]}.{name}")

    def __dir__() -> list[str]:
        """Return all public names for tab completion and ``help``, imported or not."""
        return sorted(public_names)

    return __getattr__, __dir__, list(module_names)


def _typed_imports(module: str) -> dict[str, str]:
    """Return the defining module of each name that ``module`` imports under a top-level ``if TYPE_CHECKING``."""
    loader: Any = sys.modules[module].__loader__
    get_source = getattr(loader, "get_source", None)  # A test runner's loader may lack this method.
    path = Path(sys.modules[module].__file__ or "")
    text = path.read_text(encoding="utf-8") if get_source is None else get_source(module)
    if text is None:
        raise ImportError(f"'{module}' needs its source file: install the package with its .py files")
    return {
        alias.name: node.module or ""
        for block in ast.parse(text).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
