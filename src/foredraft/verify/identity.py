"""Token identity at temperature 0: every output against plain decoding, one prompt at a time.

Three runs are held against it: the drafter alone, plain decoding in a batch, and the drafter in a batch. A
divergence is reported with the target's margin between its two best tokens there, and never explained away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.decode.params import SamplingParams
from foredraft.llm import LLM, Output
from foredraft.verify.plain import PlainTarget
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
    """`tokens`: of each prompt at most; fewer where the text ends."""
    runs = ((drafter, False), ("none", True), (drafter, True))
    done, total = 0, len(prompts) * (1 + len(runs))

    def generate(name: str, batched: bool) -> list[Output]:
        nonlocal done
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, drafter=name)
        outputs: list[Output] = []
        for group in [prompts] if batched else [[prompt] for prompt in prompts]:
            company = (
                [*group, *group] if batched and len(group) == 1 else group
            )  # nobody shares with itself alone
            outputs += llm.generate(company, params)[: len(group)]
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
                divergences.append(_divergence(plain, i, prompts[i], name, batched, want, got))
    count = sum(len(output.token_ids) for output in expected)
    return Identity(len(prompts), count, runs, drafted, tuple(divergences), tuple(errors))


def _divergence(
    plain: PlainTarget, number: int, prompt: list[int], drafter: str, batched: bool, want: Output, got: Output
) -> Divergence:
    expected, found = want.token_ids, got.token_ids
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    logits, best = plain.logits(prompt, expected[:at]).topk(2)
    return Divergence(
        prompt=number,
        drafter=drafter,
        batched=batched,
        position=at,
        expected=expected[at] if at < len(expected) else None,
        found=found[at] if at < len(found) else None,
        best=(int(best[0]), int(best[1])),
        logits=(float(logits[0]), float(logits[1])),
    )
