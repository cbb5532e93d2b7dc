"""What a server has loaded is left out of garbage collection: to walk over it would stop every stream.

Seen to fail: `freeze_what_is_loaded` left out of `serve`.
"""

from __future__ import annotations

from tests.support.running import forked, run_code

SERVE = """
import gc, os, signal
import foredraft
from foredraft.serve.server import serve
from foredraft.serve.settings import Settings

def ready(address, model, needs_key):
    print(gc.get_freeze_count())
    os.kill(os.getpid(), signal.SIGTERM)

gc.unfreeze()  # what the parent of this process froze
serve(lambda: foredraft.load(policy="fixed", max_length=64), Settings(port=0), ready)
"""


def test_what_is_loaded_is_frozen_before_the_first_request() -> None:
    done = forked(run_code, SERVE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000
