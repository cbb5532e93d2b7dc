"""The request router of Ray Serve, by the rule of `affinity`, and the HTTP messages that the ingress sends to
replicas.

All routers know the same replicas, so they agree about the replica of a key without a word between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from foredraft.serve.affinity import digest, ranked

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """An HTTP request."""

    method: str  # GET, POST, ..
    path: str  # of the URL
    query: bytes  # of the URL
    headers: Headers  # as ASGI has them
    body: bytes  # whole
    address: str = ""  # of the client, as Ray's proxy sees it; "" where it is not known
    key: int | None = None  # of `affinity.prompt_key`


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The beginning of a response."""

    status: int  # of HTTP
    headers: Headers  # as ASGI has them


TRIED = 4  # replicas that a request tries before it waits; each that is full costs a message


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is not typed
    """Prefers the replica that the key of a call has."""

    def initialize_state(self, free: int) -> None:
        """Take the option of the deployment; `free` as in `affinity.bound`."""
        self._free = free
        self._names: dict[str, int] = {}  # of replicas -> their digests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in this order."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full
        key = next((each.key for each in pending_request.args if isinstance(each, HttpCall)), None)
        known = self._digests([replica.replica_id.unique_id for replica in candidate_replicas])
        lengths = self.replica_queue_len_cache
        loads = [lengths.get(replica.replica_id) or 0 for replica in candidate_replicas]
        places = ranked(key, known, loads, self._free)
        return [[candidate_replicas[place]] for place in places[:TRIED]]

    def _digests(self, names: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        if self._names.keys() != set(names):
            self._names = {name: digest(name) for name in names}
        return np.array([self._names[name] for name in names], dtype=np.uint64)
