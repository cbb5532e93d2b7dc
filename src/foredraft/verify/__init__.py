"""verify: check on the user's machine that speculative decoding does not change the output.

`verify` runs a loaded model with its drafter and without, and returns a `Report`. It checks two things: that
tokens are identical at temperature 0, and that sampled tokens follow the target's joint distribution, by
chi-square tests whose power the report states.
"""

from typing import TYPE_CHECKING

from foredraft.lazy import lazily
from foredraft.verify.options import Options

if TYPE_CHECKING:
    from foredraft.verify.report import DistributionTest, Divergence, Identity, Report
    from foredraft.verify.run import verify

__all__ = ["DistributionTest", "Divergence", "Identity", "Options", "Report", "verify"]

_HOME = dict.fromkeys(["DistributionTest", "Divergence", "Identity", "Report"], "foredraft.verify.report")
_HOME["verify"] = "foredraft.verify.run"

__getattr__ = lazily(__name__, _HOME)
