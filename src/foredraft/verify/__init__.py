"""verify: check on the user's machine that speculative decoding does not change the output.

`verify` runs a loaded model with its drafter and without, and returns a `VerifyReport`. It checks two things:
that tokens are identical at temperature 0 and in seeded texts under the `coupled` rule, and that sampled
tokens follow the target's distribution, by chi-square tests whose power the report states.
"""

from typing import TYPE_CHECKING

from foredraft.bench.settings import VerifySettings
from foredraft.lazy import lazily
from foredraft.verify.verify_records import (
    DistributionTest,
    Divergence,
    DraftPosition,
    Identity,
    VerifyReport,
)

if TYPE_CHECKING:
    from foredraft.verify.verify_run import verify

__all__ = [
    "DistributionTest",
    "Divergence",
    "DraftPosition",
    "Identity",
    "VerifyReport",
    "VerifySettings",
    "verify",
]

__getattr__ = lazily(__name__, {"foredraft.verify.verify_run": "verify"})
