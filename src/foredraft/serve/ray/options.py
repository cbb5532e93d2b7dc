"""Options of an application of Ray Serve, and the application."""

# Without `from __future__ import annotations`: Ray reads the type of the argument of `app`.

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from foredraft.errors import ConfigError
from foredraft.serve.ray.deployments import Ingress, PrefixRouter, Replica
from foredraft.serve.settings import Settings

# Options of the server that Ray has in its place, with the remedies.
LISTENS = "Ray listens: give it http_options, or serve start"
READS = "Ray's streams do not wait for their readers, so leave it out"
NOT_HERE = {"host": LISTENS, "port": LISTENS, "max_unread": READS, "slow_reader_seconds": READS}
OWN = ("model", "draft", "max_batch")  # arguments of `foredraft.load` that are options of the application
WAITING = 2  # requests that a replica holds, as a multiple of its rows: when one ends, the next is there
INGRESS_REQUESTS = 1000  # that one ingress passes on at a time


class Options(BaseModel):
    """Options of an application: of its replicas, of the model in each, and of the server in each."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str | None = None  # a folder or a hub id that every machine can read; None is the demo models
    draft: str | None = None  # the draft model, if any
    load: dict[str, Any] = {}  # further arguments of `foredraft.load`, such as {"policy": "fixed"}
    # options of the server, as `foredraft.serve.settings.Settings` names them. Ray has the host, the port,
    # and what waits for readers
    server: dict[str, Any] = {}
    max_batch: int = Field(default=8, ge=1)  # rows of the batch of a replica
    replicas: int = Field(default=1, ge=1)  # replicas; with `max_replicas`, at least so many
    # Ray adds replicas up to this number while more than `max_batch` requests a replica run or wait, and
    # takes them away again. None keeps the number
    max_replicas: int | None = Field(default=None, ge=1)
    cpus: float = Field(default=1, ge=0)  # cores of a replica
    gpus: float = Field(default=0, ge=0)  # GPUs of a replica
    # in a rolling restart, how many replicas are started before as many old ones stop, as a share of all. 0
    # needs no room for more: some of the old ones stop first
    surge_percent: int = Field(default=0, ge=0, le=100)
    ingresses: int = Field(default=1, ge=1)  # processes that take requests and pass them on
    # requests whose prompts agree in so many characters go to the same replica
    prefix_characters: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, fewer than the {self.replicas} replicas")
        return self


def app(options: Options) -> serve.Application:
    """Return the application; `serve run foredraft.serve.ray:app replicas=2` calls it, too.

    Examples:
        >>> from ray import serve
        >>> serve.run(app(Options(replicas=2)))
    """
    settings = _settings(options.server)
    for name in OWN:
        if name in options.load:
            remedy = "give it as an option of its own"
            raise ConfigError("which stands in load", option=name, value=options.load[name], remedy=remedy)
    load = {"draft": options.draft, "max_batch": options.max_batch, **options.load}
    drains = {
        "graceful_shutdown_timeout_s": settings.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(1.0, settings.drain_seconds),
    }
    scale: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.max_replicas,
            target_ongoing_requests=options.max_batch,
        )  # fmt: skip
        scale = {"autoscaling_config": scaling}
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"free": options.max_batch}
    )
    replica = serve.deployment(
        Replica, max_ongoing_requests=WAITING * options.max_batch, max_queued_requests=settings.max_queued,
        max_surge_percent=options.surge_percent, request_router_config=router,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus}, **drains, **scale,
    )  # fmt: skip
    ingress = serve.deployment(
        serve.ingress()(Ingress), num_replicas=options.ingresses, max_ongoing_requests=INGRESS_REQUESTS,
        max_surge_percent=100, ray_actor_options={"num_cpus": 0}, **drains,
    )  # fmt: skip
    return ingress.bind(replica.bind(options.model, load, settings), settings, options.prefix_characters)


def _settings(given: dict[str, Any]) -> Settings:
    for name in given:
        if name in NOT_HERE:
            raise ConfigError(option=name, value=given[name], remedy=NOT_HERE[name])
        if name not in Settings.__dataclass_fields__:
            remedy = "see foredraft serve --help-all for the options of a server"
            raise ConfigError("is unknown", option=name, remedy=remedy)
    files = {name: Path(given[name]) for name in ("api_key_file",) if given.get(name) is not None}
    return Settings(**given | files)
