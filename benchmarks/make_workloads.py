"""Write the workloads of `foredraft bench`: prompts of six kinds from held-out modules.

The script proves that the modules are held out. A module counts if three conditions hold: the split of the
demo's recipe holds it out on this machine; it was held out when the demo models were trained, so that
`prompts/heldout.jsonl` has prompts from it; and those prompts occur in it word for word, so that it is the
same text. Its licence is one that the recipe accepts.

For each kind, the target continues up to `--candidates` prompts, from the modules in turn, by plain decoding
at temperature 0. A small model often loops, and drafting a loop is easy. So the `--count` prompts to keep are
first those whose output repeats under 30 % of its 4-grams. Among edits, prompts come first whose output
copies at least half of its 4-grams from the prompt. No other figure is considered, in particular none of
drafts.

    python -m recipes.demo.corpus --out DIR
    python -m benchmarks.make_workloads --corpus DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import foredraft
from benchmarks.workload_kinds import KINDS, Beginning, Text
from foredraft import LLM, SamplingParams
from foredraft.bench.bench_settings import MAX_REPEATED
from foredraft.model.tokenizer import Tokenizer
from foredraft.ngrams import repeated
from recipes.demo.corpus import PACKAGES, Source, read_sources, write_jsonl

HERE = Path(__file__).parent
CONTEXT = 320  # tokens of a prompt, at most
COPIED = 0.5  # share of an edit's 4-grams that occur in its prompt, at least
LICENCES = {"cpython": "PSF-2.0"} | {name: licence for name, licence, _ in PACKAGES}


@dataclass(frozen=True)
class Line:
    """A prompt and its origin: a line of the file."""

    prompt: str
    kind: str
    module: str
    name: str
    licence: str


def heldout(corpus: Path) -> list[Source]:
    """Return the modules that the demo models were certainly not trained on.

    Raises:
        SystemExit: A held-out module is in the training set of `corpus`.
    """
    recorded: dict[str, list[str]] = {}
    for line in (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        recorded.setdefault(prompt["module"], []).append(prompt["prompt"])
    for source in read_sources(corpus / "train.jsonl"):
        if module(source) in recorded:
            raise SystemExit(f"{module(source)} was held out, but {corpus} trains on it; check its packages")
    found = [source for source in read_sources(corpus / "heldout.jsonl") if module(source) in recorded]
    return [source for source in found if all(prompt in source.text for prompt in recorded[module(source)])]


def module(source: Source) -> str:
    return f"{source.package}:{source.path}"


def prompt_of(beginning: Beginning, tokenizer: Tokenizer) -> str | None:
    """Return the prompt with as many lines of context as fit.

    Returns:
        The prompt, or None if it is too long or would end inside a token.
    """
    prompt = beginning.needed
    if len(tokenizer.encode(prompt)) > CONTEXT:
        return None
    for line in reversed(beginning.context.split("\n")[:-1]):
        longer = f"{line}\n{prompt}"
        if len(tokenizer.encode(longer)) > CONTEXT:
            break
        prompt = longer
    prompt = prompt.lstrip("\n")
    ids = tokenizer.encode(prompt)
    return prompt if tokenizer.encode(prompt + beginning.rest[:200])[: len(ids)] == ids else None


def candidates(kind: str, sources: Sequence[Source], tokenizer: Tokenizer) -> Iterator[Line]:
    """Yield different prompts from the modules in turn; each module's prompts come in hash order."""
    queues = []
    for source in sources:
        lines = [
            Line(prompt, kind, module(source), beginning.name, LICENCES[source.package])
            for beginning in KINDS[kind](Text(source.text))
            if (prompt := prompt_of(beginning, tokenizer)) is not None
        ]
        queues.append(sorted(lines, key=lambda line: hashlib.blake2b(line.prompt.encode()).digest()))
    seen = set()
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue) and queue[turn].prompt not in seen:
                seen.add(queue[turn].prompt)
                yield queue[turn]


def copied(written: Sequence[int], prompt: Sequence[int], size: int = 4) -> float:
    """Return the share of the output's n-grams that occur in the prompt."""
    grams = [tuple(written[i : i + size]) for i in range(len(written) - size + 1)]
    known = {tuple(prompt[i : i + size]) for i in range(len(prompt) - size + 1)}
    return sum(gram in known for gram in grams) / len(grams)


def choose(lines: Sequence[Line], llm: LLM, count: int, new_tokens: int) -> tuple[list[Line], int]:
    """Return the prompts to keep, in their given order, and how many of them repeat little."""
    plain = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter="none")
    written = [output.token_ids for output in llm.generate([line.prompt for line in lines], plain)]
    repeats = [repeated(ids) for ids in written]

    def rank(index: int) -> tuple[bool, bool, float]:
        line, loops = lines[index], repeats[index] >= MAX_REPEATED
        prompt = llm.encode(line.prompt)[0]
        departs = line.kind == "edit-file" and copied(written[index], prompt) < COPIED
        return loops, departs, repeats[index] if loops else 0.0  # sorting is stable: ties keep their order

    best = sorted(sorted(range(len(lines)), key=rank)[:count])
    return [lines[index] for index in best], sum(repeats[index] < MAX_REPEATED for index in best)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the workloads of `foredraft bench`.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that recipes.demo.corpus wrote")
    parser.add_argument("--out", type=Path, default=HERE / "workloads")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--candidates", type=int, default=320)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    sources = heldout(options.corpus)
    llm = foredraft.load(max_batch=16)
    assert llm.tokenizer is not None
    options.out.mkdir(exist_ok=True)
    print(f"{len(sources)} modules")
    for kind in options.kinds:
        lines = list(islice(candidates(kind, sources, llm.tokenizer), options.candidates))
        kept, qualify = choose(lines, llm, options.count, options.new_tokens)
        write_jsonl(options.out / f"{kind}.jsonl", map(asdict, kept))
        print(f"{kind}: {len(kept)} of {len(lines)}, of which {qualify} repeat under {MAX_REPEATED:.0%}")


if __name__ == "__main__":
    main()
