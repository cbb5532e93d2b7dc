"""Optional dependencies of the benchmark and of the search, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foredraft.errors import ConfigError

__all__ = ["module"]

INSTALL = {
    "llama_cpp": "pip install llama-cpp-python",
    "optuna": "pip install 'foredraft[tune]'",
}


def module(name: str, needed_by: str) -> Any:
    """Import and return an optional module.

    Args:
        name: The module's name.
        needed_by: The feature that needs it, for the error message.

    Raises:
        ConfigError: The module cannot be imported; the remedy is the command that installs it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        install = INSTALL.get(name, "pip install 'foredraft[bench]'")
        problem = f"{needed_by} needs {name}, which cannot be imported ({error})"
        raise ConfigError(problem, remedy=install) from None
