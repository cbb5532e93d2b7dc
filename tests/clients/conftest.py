"""A served chat model, as for the tests of the server."""

from tests.serve.conftest import llm, served

__all__ = ["llm", "served"]
