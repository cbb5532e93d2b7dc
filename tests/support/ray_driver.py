"""The program that runs Ray for `tests.support.raying`: it deploys the options of each line that it reads."""

from __future__ import annotations

import json
import sys

import ray
from ray import serve

from foredraft.serve.ray import Options, app


def main(port: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for line in sys.stdin:
            serve.run(app(Options(**json.loads(line))))
            print("up", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
