"""verify: evidence, on the user's own machine, that speculation changed nothing.

`verify` runs a loaded model with its drafter and without, and returns a `Report`. It has two parts: token
identity at temperature 0, and chi-square tests of the sampled joint law with a statement of their power.
"""

from typing import TYPE_CHECKING

from foredraft.lazy import lazily
from foredraft.verify.options import Options

if TYPE_CHECKING:
    from foredraft.verify.report import Divergence, Identity, LawTest, Report
    from foredraft.verify.run import verify

__all__ = ["Divergence", "Identity", "LawTest", "Options", "Report", "verify"]

_HOME = dict.fromkeys(["Divergence", "Identity", "LawTest", "Report"], "foredraft.verify.report")
_HOME["verify"] = "foredraft.verify.run"

__getattr__ = lazily(__name__, _HOME)
