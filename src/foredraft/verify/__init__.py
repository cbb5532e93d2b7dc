"""verify: evidence, on the user's own machine, that speculation changed nothing.

`verify` runs a loaded model with its drafter and without, and returns a `Report`. It has two parts: token
identity at temperature 0, and chi-square tests of the sampled joint law with a statement of their power.
"""

from foredraft.verify.report import Divergence, Identity, LawTest, Report
from foredraft.verify.run import Options, verify

__all__ = ["Divergence", "Identity", "LawTest", "Options", "Report", "verify"]
