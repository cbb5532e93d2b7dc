"""verify: check on the user's machine that speculative decoding does not change the output.

`verify` runs a loaded model with its drafter and without, and returns a `Report`. It checks two things: that
tokens are identical at temperature 0 and in seeded texts under the `coupled` rule, and that sampled tokens
follow the target's distribution, by chi-square tests whose power the report states.
"""

from typing import TYPE_CHECKING

from foredraft.lazy import lazily
from foredraft.verify.options import Options

if TYPE_CHECKING:
    from foredraft.verify.records import DistributionTest, Divergence, DraftPosition, Identity
    from foredraft.verify.report import Report
    from foredraft.verify.run import verify

__all__ = ["DistributionTest", "Divergence", "DraftPosition", "Identity", "Options", "Report", "verify"]

_RECORDS = ["DistributionTest", "Divergence", "DraftPosition", "Identity"]
_HOME = dict.fromkeys(_RECORDS, "foredraft.verify.records")
_HOME["Report"] = "foredraft.verify.report"
_HOME["verify"] = "foredraft.verify.run"

__getattr__ = lazily(__name__, _HOME)
