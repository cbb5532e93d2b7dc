"""Token identity at temperature 0: every output must equal plain decoding of the same prompt alone.

Three runs are compared with it: the drafter on one prompt at a time, plain decoding in a batch, and the
drafter in a batch. A divergence is reported with the target's margin between its two most likely tokens at
that position, and is a failure however small the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.decode.params import SamplingParams
from foredraft.llm import LLM, Output
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.report import Divergence, Identity

__all__ = ["compare_tokens"]


def compare_tokens(
    llm: LLM,
    plain: PlainTarget,
    prompts: Sequence[list[int]],
    drafter: str,
    tokens: int,
    progress: Callable[[int, int], None],
) -> Identity:
    """Compare greedy outputs with plain decoding's.

    Args:
        llm: The loaded models.
        plain: Computes the target's logits where an output diverges.
        prompts: Token ids of each prompt.
        drafter: Name of the drafter.
        tokens: Maximum number of new tokens per prompt.
        progress: Called as (outputs done, outputs in all).
    """
    runs = ((drafter, False), ("none", True), (drafter, True))
    done, total = 0, len(prompts) * (1 + len(runs))

    def generate(name: str, batched: bool) -> list[Output]:
        nonlocal done
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, drafter=name)
        outputs: list[Output] = []
        for group in [prompts] if batched else [[prompt] for prompt in prompts]:
            # A single prompt runs beside a copy of itself, so that the batch has two rows.
            rows = [*group, *group] if batched and len(group) == 1 else group
            outputs += llm.generate(rows, params)[: len(group)]
            done += len(group)
            progress(done, total)
        return outputs

    expected = generate("none", False)
    divergences: list[Divergence] = []
    errors = [f"prompt {i}: {output.error}" for i, output in enumerate(expected) if output.error]
    drafted = 0
    for name, batched in runs:
        for i, (want, got) in enumerate(zip(expected, generate(name, batched), strict=True)):
            drafted += got.stats.drafted
            if got.error:
                errors.append(f"prompt {i}, {name}: {got.error}")
            elif not want.error and got.token_ids != want.token_ids:
                at = _first_difference(want.token_ids, got.token_ids)
                logits, best = plain.logits(prompts[i], want.token_ids[:at]).topk(2)
                divergences.append(
                    Divergence(
                        prompt=i,
                        drafter=name,
                        batched=batched,
                        position=at,
                        expected=want.token_ids[at] if at < len(want.token_ids) else None,
                        found=got.token_ids[at] if at < len(got.token_ids) else None,
                        best=(int(best[0]), int(best[1])),
                        logits=(float(logits[0]), float(logits[1])),
                    )
                )
    count = sum(len(output.token_ids) for output in expected)
    return Identity(len(prompts), count, runs, drafted, tuple(divergences), tuple(errors))


def _first_difference(expected: list[int], found: list[int]) -> int:
    """Return the first position at which the tokens differ, or the length of the shorter list."""
    shorter = min(len(expected), len(found))
    return next((i for i in range(shorter) if expected[i] != found[i]), shorter)
