"""Conditions of every test: no network, a cache apart from the user's, repeatable examples, GPU tests only where
there is a GPU, and of a test with many cases one that changes with the sources, unless `--cases` asks for more."""

from __future__ import annotations

import gc
import getpass
import os
import random
import subprocess
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# under CI pytest draws the whole difference at each planted defect, for minutes
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)
# the user's own is left alone; what is compiled once serves all workers and runs
os.environ["FOREDRAFT_CACHE"] = os.path.join(tempfile.gettempdir(), f"foredraft-tests-{getpass.getuser()}")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores


USUAL = gc.get_threshold()
# modules and tests stay: to walk over them again and again took more than half of collecting
gc.set_threshold(50_000)
ROOT = os.path.dirname(os.path.dirname(__file__))
MORE = 4  # cases of one test
HEAVY = 4  # one in so many heavy tests runs for every change


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("few", "more", "others", "all"), default="few",
        help=f"few: one of each test, and of one in {HEAVY} heavy tests; more: up to {MORE} of each, one of a heavy one,"
        " all planted defects, but for these few; others: all but these few",
    )  # fmt: skip
    parser.addoption(
        "--sample", help="the cases follow from this text; if not given, from the sources at the commit"
    )


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")
    if config.option.sample is None:  # workers have that of the run
        config.option.sample = _sources()


def _sources() -> str:
    command = ["git", "rev-parse", "HEAD:src"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases: {config.option.cases}, --sample {config.option.sample!r}"


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collection: `LLM.close` and `verify` collect often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*USUAL)


@pytest.hookimpl(trylast=True)  # of the tests that -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    if another := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{another[0]}: another id in each worker; give the parameter a repr")
    asked = config.getoption("--cases")
    if asked == "all":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    few, more = set(), set()
    for test, each in cases.items():
        draw = random.Random(f"{config.option.sample} {test}")
        shuffled, least, most = draw.sample(each, len(each)), 1, MORE
        if each[0].get_closest_marker("heavy"):
            least, most = int(draw.randrange(HEAVY) == 0), 1
        few.update(shuffled[:least])
        name = test.rpartition("::")[2]
        more.update(shuffled if "defect" in name and "without" not in name else shuffled[:most])
    chosen = {"few": few, "more": more - few, "others": {*items} - few}[asked]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
