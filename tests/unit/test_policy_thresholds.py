"""The policies with thresholds, against their equations, and the numbers that they can be given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy import AdaptiveExit, Confidence, TargetConfidence, target_confidence
from foredraft.decode.stats import Round
from foredraft.errors import ConfigError
from foredraft.kinds.tables import POLICIES
from foredraft.loading.checkpoints import check_settings


def logits(*rows: list[float]) -> torch.Tensor:
    """Return logits [B, 1, V] whose softmax gives these probabilities."""
    return torch.tensor(rows).log()[:, None]


# One-hot, as at temperature 0: it says nothing about the drafter's confidence.
ONE_HOT: Any = Distribution(ids=torch.zeros(2, 1, dtype=torch.int64))


def test_confidence_reads_the_raw_probability_of_the_likeliest_token() -> None:
    on = Confidence(5, threshold=0.6).go_on([], 0, ONE_HOT, logits([0.65, 0.35], [0.55, 0.45]))
    assert on.tolist() == [True, False]
    broken = torch.full((1, 1, 3), math.nan)
    assert Confidence(5, threshold=0.0).go_on([], 0, ONE_HOT, broken).tolist() == [False]


def test_the_adaptive_threshold_follows_the_published_rule() -> None:
    """AR <- b1 AR + (1 - b1) m / n and th <- b2 th + (1 - b2) th', worked out by hand."""
    policy = AdaptiveExit(4, target=0.6, first=0.5, epsilon=0.1, beta1=0.5, beta2=0.9)
    one: Any = SimpleNamespace(policy_state=policy.start())
    thresholds = []
    for drafted, accepted in ((4, 4), (4, 4), (2, 2), (0, 0), (4, 0), (4, 0)):
        policy.learn(one, Round(drafted, accepted, accepted + 1), None)
        thresholds.append(one.policy_state.threshold)
    # AR .5 is below .6: up. AR .75 after the longest draft: held. AR .875 after a shorter one: down. A plain step
    # changes nothing. AR .4375 and .21875: up.
    assert thresholds == pytest.approx([0.51, 0.51, 0.50, 0.50, 0.51, 0.52])


def test_each_sequence_has_a_threshold_from_0_to_1() -> None:
    policy = AdaptiveExit(4, target=1.0, first=0.99, epsilon=1.0, beta2=0.0)
    one, other = (SimpleNamespace(policy_state=policy.start()) for _ in range(2))
    policy.learn(one, Round(4, 0, 1), None)  # type: ignore[arg-type]
    assert (one.policy_state.threshold, other.policy_state.threshold) == (1.0, 0.99)
    on = policy.go_on([one, other], 0, ONE_HOT, logits([0.995, 0.005], [0.995, 0.005]))  # type: ignore[list-item]
    assert on.tolist() == [False, True]


@pytest.mark.parametrize(
    ("by", "first"), [("probability", 0.2), ("margin", 0.5), ("entropy", 1 - 0.80182 / math.log(3))]
)
def test_target_confidence_by_each_signal(by: str, first: float) -> None:
    """Of the second of the tokens with 0.7, 0.2 and 0.1, whose entropy is 0.80182, and of a certain one."""
    probs = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    found = target_confidence(probs.log(), torch.tensor([1, 0]), by)
    assert found.tolist() == pytest.approx([first, 1.0], abs=1e-5)


def test_the_target_confidence_policy_drafts_above_its_threshold() -> None:
    policy = TargetConfidence(3, threshold=0.5)
    one: Any = SimpleNamespace(policy_state=policy.start())
    budgets = [policy.budget(one)]
    for confidence in (0.49, 0.5, math.nan):
        policy.learn(one, Round(0, 0, 1), confidence)
        budgets.append(policy.budget(one))
    assert budgets == [3, 0, 3, 0]


NUMBER = "give a number from 0 to 1"
WHOLE = "give a whole number from 0 to 32"
TABLE = "give a table, such as {'threshold': 0.6}"
REFUSED: list[tuple[str, Any, str]] = [
    ("fixed", {"threshold": 0.5}, "names 'threshold', which policy='fixed' does not have; give siblings"),
    ("confidence", {"treshold": 0.5}, "names 'treshold', .*; give threshold"),
    ("confidence", {"threshold": 1.5}, f"has threshold 1.5; {NUMBER}"),
    ("confidence", {"threshold": math.nan}, f"has threshold nan; {NUMBER}"),
    ("confidence", {"threshold": [0.5]}, rf"has threshold \[0.5\]; {NUMBER}"),
    ("target-confidence", {"by": "mood"}, "has by 'mood'; give one of probability, entropy"),
    ("confidence", "threshold=0.5", f"is 'threshold=0.5'; {TABLE}"),
    ("fallback", [("threshold", 0.5)], rf"is \[.*\]; {TABLE}"),
    ("fixed", "", "is ''; give a table, such as {'siblings': 0}"),
    ("heuristic", "", "is '', but policy='heuristic' has none; leave it out"),
    ("fixed", {"siblings": 1.5}, f"has siblings 1.5; {WHOLE}"),
    ("fixed", {"siblings": 33}, f"has siblings 33; {WHOLE}"),
]


@pytest.mark.parametrize(("policy", "given", "message"), REFUSED)
def test_bad_policy_options_are_refused_by_name(policy: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^policy_options {message}"):
        check_settings(policy, given)


def test_every_setting_reaches_its_policy() -> None:
    """The defaults of the table are the defaults of the policies."""
    for name, kind in POLICIES.items():
        made = kind.make(5)
        for setting, about in kind.settings.items():
            assert getattr(made, setting) == about.default, (name, setting)
            given, read = ("3", 3) if about.whole else ("0.125", 0.125)
            other = about.words[-1] if about.words else given
            changed = kind.make(5, **check_settings(name, {setting: other}))
            assert getattr(changed, setting) == (other if about.words else read)
