"""Import names of a package at their first use, so that importing the package itself is cheap (PEP 562)."""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` calls so; importing it takes longer than all else that a package needs
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that imports names at first use; `modules`: module -> its names."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(homes[name]), name)

    return get
