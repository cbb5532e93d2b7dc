"""The server as an application of Ray Serve: several replicas of one model, on one machine or on many.

No other module imports this package, which needs the extra `ray`.
"""

from foredraft.serve.ray.options import Options, app

__all__ = ["Options", "app"]
