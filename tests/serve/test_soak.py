"""A short soak: clients of every kind at the same time, after which nothing is left. benchmarks/soak.py is the long one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from benchmarks.soak import Soak, settled
from foredraft.llm import LLM
from tests.support.loaded import engine_of
from tests.support.serving import serving


@pytest.mark.heavy
@pytest.mark.parametrize("turns", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_is_left_after_clients_of_all_kinds(llm: LLM, turns: int) -> None:
    with serving(llm, max_queued=16, max_body=1 << 20) as served:
        model = served.state.ready()
        loop = model.loop

        def tasks() -> int:
            async def count() -> int:
                return len(asyncio.all_tasks())

            return asyncio.run_coroutine_threadsafe(count(), loop).result(10)

        served.client.get("/health")  # its connection stays open
        soak = Soak(served.url, new_tokens=8)
        asyncio.run(soak.prepare())
        engine, before, threads = engine_of(llm), tasks(), set(threading.enumerate())
        asyncio.run(soak.run(40, lambda done: done >= turns))
        assert soak.wrong == []
        assert len(soak.done) == len(soak.kinds)
        assert asyncio.run(settled(served.url))
        served.wait(served.idle)
        assert engine.rows.sequences == [] and not any(any(cache.lengths) for cache in engine.rows.caches)
        served.wait(lambda: tasks() <= before)
        assert not model.live and not model.limits.tokens and not model.limits.samples
        assert not model.service._handles
        left = [each.name for each in set(threading.enumerate()) - threads if each.is_alive()]
        # AnyIO's pool ends when it is idle
        assert all(name.startswith("AnyIO worker") for name in left), left
