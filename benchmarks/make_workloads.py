"""Write the workloads of `foredraft bench`: prompts of six kinds out of held-out modules.

Held out is proven here. A module counts if the split of the demo's recipe holds it out on this machine, if it
was held out when the demo models were trained (`prompts/heldout.jsonl` has beginnings from it), and if those
beginnings stand in it word for word, so that it is the same text. Its licence is one that the recipe accepts.

Of each kind, up to `--candidates` beginnings, modules in turn, are continued by the target, plainly and at
temperature 0. A small model soon falls into loops, where drafting is easy: `--count` are kept, those first
whose output repeats under 30 % of its 4-grams. Of edits, those first that are what the kind is for, with an
output that is half a copy of the prompt. Nothing else is looked at, drafts least of all.

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
from foredraft.bench.options import MAX_REPEATED
from foredraft.model.tokenizer import Tokenizer
from foredraft.ngrams import repeated
from recipes.demo.corpus import PACKAGES, Source, read_sources, write_jsonl

HERE = Path(__file__).parent
CONTEXT = 320  # tokens
COPIED = 0.5  # share of 4-grams that an edit has from its prompt
LICENCES = {"cpython": "PSF-2.0"} | {name: licence for name, licence, _ in PACKAGES}


@dataclass(frozen=True)
class Line:
    """One prompt, and where it is from."""

    prompt: str
    kind: str
    module: str
    name: str
    licence: str


def heldout(corpus: Path) -> list[Source]:
    """The modules that the demo models have certainly not seen. SystemExit: one that was held out is in the
    training set of `corpus`."""
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
    """With as many lines of the context as fit; None: too long, or it would end inside a token."""
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
    """In hash order, modules in turn, so that none dominates; no prompt twice."""
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
    """Share of the n-grams of what was written that the prompt has, too."""
    grams = [tuple(written[i : i + size]) for i in range(len(written) - size + 1)]
    known = {tuple(prompt[i : i + size]) for i in range(len(prompt) - size + 1)}
    return sum(gram in known for gram in grams) / len(grams)


def choose(lines: Sequence[Line], llm: LLM, count: int, new_tokens: int) -> tuple[list[Line], int]:
    """The prompts to keep, in the order that they came in, and how many of them count."""
    plain = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter="none")
    written = [output.token_ids for output in llm.generate([line.prompt for line in lines], plain)]
    repeats = [repeated(ids) for ids in written]

    def rank(index: int) -> tuple[bool, bool, float]:
        line, loops = lines[index], repeats[index] >= MAX_REPEATED
        asked = llm.encode(line.prompt)[0]
        departs = line.kind == "edit-file" and copied(written[index], asked) < COPIED
        return loops, departs, repeats[index] if loops else 0.0  # of equals the earlier one

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
