"""These tests run on the pretended device alone: `python -m pytest -p tests.rehearsal.plugin tests/rehearsal`."""

from __future__ import annotations

import sys

PRETENDED = "tests.rehearsal.plugin" in sys.modules
collect_ignore_glob = [] if PRETENDED else ["test_*.py"]
