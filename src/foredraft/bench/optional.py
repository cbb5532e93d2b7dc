"""Modules that only some of the benchmark, or of the search, needs, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foredraft.errors import ConfigError

__all__ = ["module"]

INSTALL = {
    "llama_cpp": "pip install llama-cpp-python",
    "optuna": "pip install 'foredraft[tune]'",
    "sqlalchemy": "pip install 'foredraft[tune]'",
}


def module(name: str, needed_by: str) -> Any:
    """The module. Raises ConfigError that says what to install."""
    try:
        return import_module(name)
    except ImportError as error:
        install = INSTALL.get(name, "pip install 'foredraft[bench]'")
        raise ConfigError(f"{needed_by} needs {name}, which is not there ({error}); {install}") from None
