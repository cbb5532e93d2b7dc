"""Hold JSON schemas against a public test suite: what is taken must accept what is valid, and nothing else.

The suite is JSON-Schema-Test-Suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, MIT), which
the source distribution of the package jsonschema carries in json/. A schema is refused by name or taken; the
texts of its tests are read token by token with the demo target's tokenizer.

    pip download --no-deps --no-binary jsonschema jsonschema && tar xzf jsonschema-*.tar.gz
    python -m benchmarks.schemas --suite jsonschema-*/json/tests/draft2020-12
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.workload import machine, write
from foredraft import RequestError, SamplingParams, demo
from foredraft.constraints.compiling import compile_grammar, grammar_tokenizer
from foredraft.constraints.pace import MaskThreads, Pace
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer


def compare(suite: Path) -> dict[str, Any]:
    """Return counts, the reasons of refusals, and every test whose answer differs."""
    folder = demo.target_path()
    codec = ByteCodec(Tokenizer.from_folder(folder))
    spec = ModelSpec.from_folder(folder)
    tokenizer = grammar_tokenizer(codec, spec.vocab_size, frozenset(spec.eos_token_ids))
    threads = MaskThreads()
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    differing = []
    for file in sorted(suite.rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            try:
                schema = SamplingParams(json_schema=case["schema"]).json_schema
                assert schema is not None
                start = compile_grammar("json_schema", schema, tokenizer, Pace(threads))
            except RequestError as error:
                counts["schemas refused"] += 1
                refusals[str(error).split("; ")[0]] += 1
                continue
            counts["schemas taken"] += 1
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                tokens = codec.spell(text)
                matcher = start.deep_copy()
                fits = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
                valid = test["valid"]
                counts[f"{'valid' if valid else 'invalid'} texts {'accepted' if fits else 'refused'}"] += 1
                if fits != valid:
                    differing.append(
                        {"file": file.name, "schema": case["schema"], "text": text, "valid": valid}
                    )
    return {"counts": dict(counts), "refusals": dict(refusals.most_common()), "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--name", default="schemas")
    given = parser.parse_args()
    write(given.name, {"what": "JSON-Schema-Test-Suite", "machine": machine(), **compare(given.suite)})


if __name__ == "__main__":
    main()
