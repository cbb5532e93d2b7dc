"""The server as an application of Ray Serve: several replicas of one model, on one machine or on many.

    options.py      the options of the application, and the application
    ingress.py      takes requests, and passes each on to a replica; answers for replicas that die
    router.py       chooses the replica: `foredraft.serve.affinity` within Ray's request router
    replica.py      the app of `foredraft serve`, in a replica
    calls.py        what goes between the two

No other module imports this package, which needs the extra `ray`.
"""

from foredraft.serve.ray.options import Options, app

__all__ = ["Options", "app"]
