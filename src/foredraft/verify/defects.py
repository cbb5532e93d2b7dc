"""The defects that a self-test can plant, by name; `planting` has the defects themselves.

No PyTorch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.verify.sampling_settings import Rule, Setting

__all__ = ["ALL", "DEFAULT", "DEFECTS", "Defect"]


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect that a self-test plants.

    Attributes:
        summary: What is wrong, in a few words.
        rule: The acceptance rule that it breaks; None breaks both, at temperature 0 too.
        penalised: It shows only where a setting has penalties.
    """

    summary: str
    rule: Rule | None
    penalised: bool = False

    def affects(self, rule: Rule | None, setting: Setting) -> bool:
        """Return whether a check of the drafter can show the defect.

        Args:
            rule: The check's acceptance rule; None at temperature 0, where the rules agree.
            setting: The check's sampling parameters.
        """
        return self.rule in (None, rule) and (setting.penalised or not self.penalised)


DEFECTS = {
    "residual": Defect("corrections drawn from p, not from the residual", "speculative"),
    "position": Defect("the residual taken with q of the position before", "speculative"),
    "coin": Defect("one coin shared by all positions of a draft", "speculative"),
    "round-noise": Defect("noise of the coupled rule keyed by the round", "coupled"),
    "penalties": Defect("penalties not applied along the draft", None, penalised=True),
}
DEFAULT = "residual"
ALL = "all"  # one self-test for each defect
