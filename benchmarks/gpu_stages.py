"""The stages of `gpu.py`."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import foredraft
from benchmarks import peer
from benchmarks.random_model import SHAPES, Pair, Shape, find_factor, make_llm, random_prompts
from benchmarks.timing import Quiet, interleaved, spread
from foredraft import LLM, SamplingParams, Stats
from foredraft.bench.bench_records import Cost, DraftCost, ForwardCosts, Spread
from foredraft.bench.bench_run import bench
from foredraft.bench.figures import ceiling, divergence, predicted_speedup
from foredraft.bench.machine_record import bandwidth
from foredraft.bench.settings import DISTANCES, BenchSettings
from foredraft.bench.workload import load_workloads
from foredraft.drafters.lookup import repeated
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Runner
from foredraft.model.weights import weight_bytes
from foredraft.verify import VerifySettings, verify

ROOT = Path(__file__).parents[1]
ROWS = (1, 2, 4, 8, 16, 32)
ALPHAS = (0.6, 0.8, 0.9)
PROMPT = 128  # tokens of a prompt
CONTEXT = 256  # tokens in the KV cache before a bare forward
DRAFT = "draft-model"
WARM = 2  # untimed turns: the engine may prepare a shape at its second use, for example by recording a graph
TESTS_TIMEOUT = 400  # seconds

# returns the seconds of the decoding phase, and the new token ids
Run = Callable[[], tuple[float, list[int]]]


class Bench:
    """The resolved options, and the device's bandwidth, which is measured anew in every run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shape: Shape = SHAPES[options.shape]
        self.device = torch.device(options.device)
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.dtype_name: str = options.dtype
        self.new_tokens, self.repeats = options.new_tokens, options.repeats
        self.prompts, self.longest, self.backend = options.prompts, options.max_draft, options.backend
        self.compile, self.samples = options.compile, options.samples
        self.positions = PROMPT + options.new_tokens + 64
        self.bandwidth = bandwidth(self.device)

    # --- stages -----------------------------------------------------------------------------------------

    def tests(self) -> dict[str, Any]:
        """Run a few cases of each test that needs a GPU, collecting only the files that have one.

        Other files may import packages that this machine lacks.
        """
        files = [str(f) for f in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in f.read_text()]
        command = [sys.executable, *"-m pytest -q -rfE -p no:cacheprovider -m gpu".split(), *files]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TESTS_TIMEOUT,
        )
        if ran.returncode:
            raise RuntimeError(
                f"pytest ended with {ran.returncode}: {ran.stdout[-8000:]}{ran.stderr[-2000:]}"
            )
        return {"summary": ran.stdout.splitlines()[-1]}

    def verified(self) -> dict[str, Any]:
        """Run `verify` on the demo models: texts token for token, and chi-square tests."""
        llm = self._demo()
        detect = DISTANCES[-1] if self.samples is None else None
        settings = VerifySettings(tokens=self.new_tokens, samples=self.samples, detect=detect, seed=1)
        [workload] = load_workloads(("free",), self.prompts)
        found = verify(llm, list(workload.prompts), settings)
        llm.close()
        return found.as_dict()

    def demo(self) -> dict[str, Any]:
        """Time every method that can run on the demo models, transformers' assisted generation among them."""
        settings = BenchSettings(new_tokens=self.new_tokens, repeats=self.repeats)
        report = bench(
            load_workloads(("free",), self.prompts), settings, device=str(self.device),
            dtype=self.dtype_name, max_draft=self.longest,
        )  # fmt: skip
        return report.as_dict()

    def vllm(self) -> dict[str, Any]:
        """Time vLLM's plain decoding of the same shape and dtype, where it is installed."""
        if find_spec("vllm") is None:
            return {"skipped": "vllm is not installed"}
        pair = Pair.of(self.shape, self.device, self.dtype)
        [prompt] = random_prompts(1, PROMPT, pair.target.spec.vocab_size)
        with TemporaryDirectory() as folder:
            peer.save_pair(pair, self.shape.config(self.dtype), Path(folder))
            del pair
            gc.collect()
            torch.cuda.empty_cache()
            run = peer.vllm_contender(folder, prompt, self.new_tokens)
            speeds = [self.new_tokens / run() for _ in range(WARM + self.repeats)][WARM:]
        return {"tokens_per_second": spread(speeds)}

    def forwards(self) -> dict[str, Any]:
        """Time bare forwards with `deterministic` on and off."""
        pair = Pair.of(self.shape, self.device, self.dtype)
        results: dict[str, Any] = {}
        for deterministic in (True, False):
            runner = Runner(pair.target, deterministic=deterministic, compile=self.compile)
            costs = asdict(self._costs(runner, None, ROWS)) | {"shapes": repr(runner.shapes)}
            results["deterministic" if deterministic else "not deterministic"] = costs
        return results

    def plain(self) -> dict[str, Any]:
        """Time plain decoding in turns with transformers' `generate`."""
        pair = Pair.of(self.shape, self.device, self.dtype)
        [prompt] = random_prompts(1, PROMPT, pair.target.spec.vocab_size)
        runs: dict[str, Run] = {}
        variants: dict[str, dict[str, Any]] = {
            "foredraft": {},
            "foredraft, not deterministic": {"deterministic": False},
            **({"foredraft, compiled": {"compile": True}} if self.compile else {}),
        }
        for name, options in variants.items():
            llm = make_llm(Runner(pair.target, **options), None, self.positions)
            runs[name] = lambda llm=llm: decoded(llm, prompt, self.new_tokens, "none")[:2]  # type: ignore[misc]
        model = peer.model_of(self.shape.config(self.dtype), pair.tensors, self.device)
        for way in peer.WAYS:
            runs[f"transformers, {way}"] = peer.contender(model, way, prompt, self.new_tokens, self.backend)
        return self._compared(runs, self._bytes_per_step(pair.target, PROMPT + self.new_tokens // 2))

    def arranged(self, alpha: float) -> dict[str, Any]:
        """Time drafting with an acceptance probability of `alpha` in turns with plain decoding."""
        factor, tried = find_factor(self.shape, self.device, self.dtype, alpha)
        say(f"  later layers scaled by {factor:.4f}: draft and target agree at {dict(tried)[factor]:.3f}")
        return {"factor": factor, "bisection": tried} | self._drafted(alpha, factor)

    def _demo(self) -> LLM:
        return foredraft.load(
            device=str(self.device), dtype=self.dtype_name, policy="fixed", max_draft=self.longest
        )

    # --- shared by the stages ---------------------------------------------------------------------------

    def _costs(self, target: Runner, draft: Runner | None, rows: Sequence[int]) -> ForwardCosts:
        """Measure v by rows of a forward, and c as the mean step of a whole draft."""
        cache = target.new_cache(1, self.positions + CONTEXT)
        rows = [n for n in rows if n <= target.max_queries]
        made = {n: torch.ones(1, n, dtype=torch.int64, device=self.device) for n in rows}
        works: dict[Any, Callable[[], object]] = {
            n: lambda tokens=tokens: target.forward(cache, tokens, [CONTEXT - 1])  # type: ignore[misc]
            for n, tokens in made.items()
        }
        if draft is not None:
            draft_cache = draft.new_cache(1, self.positions + CONTEXT)
            at = torch.zeros(1, dtype=torch.int64, device=self.device)

            def steps() -> None:
                for position in range(CONTEXT, CONTEXT + self.longest):
                    draft.forward(draft_cache, made[1], [position - 1], at=at, invariant=False)

            works[DRAFT] = steps
        seconds = interleaved(works, self.device, 10 * self.repeats)
        step = median(seconds[1])
        spreads = {n: Spread.of(seconds[n]) for n in rows}
        verifying = tuple(Cost(n, found.median / step, found) for n, found in spreads.items() if found)
        c = 0.0 if draft is None else median(seconds[DRAFT]) / self.longest / step
        drafting = {} if draft is None else {DRAFT: DraftCost(c, c)}
        read = self._bytes_per_step(target.decoder, CONTEXT) / step
        share = None if self.bandwidth is None else read / self.bandwidth.bytes_per_second
        return ForwardCosts(1, CONTEXT, verifying, drafting, share)

    def _compared(self, runs: dict[str, Run], bytes_per_step: int) -> dict[str, Any]:
        """Time the contenders in turns after a warm-up; a failing one is dropped, with its error."""
        results: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {}
        ids: dict[str, list[int]] = {}
        for turn in range(-WARM, self.repeats):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                try:
                    taken, ids[name] = runs[name]()
                except Exception as error:
                    results[name] = failure(error)
                    del runs[name]
                    continue
                if turn >= 0:
                    seconds.setdefault(name, []).append(taken)
                elif turn == -1:
                    say(f"  {name}: {self.new_tokens / taken:.1f} tokens/s, warm")
        expected = ids.get("foredraft", [])
        for name in runs:
            speeds = [self.new_tokens / taken for taken in seconds[name]]
            results[name] = {
                "tokens_per_second": spread(speeds),
                "fraction_of_bandwidth": self.bandwidth
                and median(speeds) * bytes_per_step / self.bandwidth.bytes_per_second,
                "differs_from_foredraft_at": divergence(ids[name][: len(expected)], expected),
                "repeated_4grams": repeated(ids[name]),
            }
            if "foredraft" in runs and name.startswith("transformers"):
                pairs = zip(seconds[name], seconds["foredraft"], strict=True)
                results[name]["foredraft_is_faster"] = spread([theirs / ours for theirs, ours in pairs])
        return {"contenders": results, "bytes_per_step": bytes_per_step}

    def _drafted(self, alpha: float, factor: float) -> dict[str, Any]:
        """Time drafting and plain decoding prompt by prompt, at the best draft length for `alpha`."""
        pair = Pair.of(self.shape, self.device, self.dtype, factor)
        target = Runner(pair.target, compile=self.compile)
        draft = Runner(pair.draft, deterministic=False, compile=self.compile)
        longest = min(self.longest, target.max_queries - 1)
        costs = self._costs(target, draft, range(1, longest + 2))
        length = ceiling(costs, DRAFT, alpha).draft_length
        llm = make_llm(target, draft, self.positions, length)
        ratios, stats, shares, identical = [], [], [], True

        def turn(at: int, prompt: list[int]) -> dict[str, Any]:
            nonlocal identical
            order = ("none", DRAFT)[:: 1 if at % 2 else -1]
            both = {name: decoded(llm, prompt, self.new_tokens, name) for name in order}
            identical = identical and both["none"][1] == both[DRAFT][1]
            return both

        quiet = Quiet(self.prompts * self.repeats)
        for prompt in random_prompts(self.prompts, PROMPT, pair.target.spec.vocab_size):
            for at in range(-WARM, 0):
                turn(at, prompt)
            for at in range(self.repeats):
                both = quiet.take(partial(turn, at, prompt))
                ratios.append(both["none"][0] / both[DRAFT][0])
            stats.append(both[DRAFT][2])
            shares.append(repeated(both[DRAFT][1]))
        merged = Stats.merge(stats)
        predicted = predicted_speedup(costs, merged)
        return {
            "identical": identical,
            "repeated_4grams": shares,
            "alpha": merged.alpha,
            "acceptance_by_position": merged.acceptance_by_position,
            "max_draft": length,
            "mean_accepted_length": merged.mean_accepted_length,
            "costs": asdict(costs),
            "speedup": spread(ratios),
            "predicted": predicted,
            "measured_over_predicted": median(ratios) / predicted,
        }

    def _bytes_per_step(self, decoder: Decoder, context: int) -> int:
        """Return the bytes that a plain step reads with `context` tokens in the KV cache."""
        spec, width = decoder.spec, self.dtype.itemsize
        weights = weight_bytes(spec, self.device, self.dtype) - decoder.embedding.numel() * width
        return weights + 2 * spec.layers * spec.kv_heads * spec.head_dim * context * width


def decoded(llm: LLM, prompt: list[int], new_tokens: int, drafter: str) -> tuple[float, list[int], Stats]:
    """Decode greedily; return the seconds of the decoding phase, the new token ids and the statistics."""
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter=drafter)
    [output] = llm.generate(prompt, params)
    if output.error is not None:
        raise RuntimeError(output.error)
    return output.stats.seconds, output.token_ids, output.stats


def failure(error: Exception) -> dict[str, Any]:
    """Return the error and the last lines of its traceback, for the result file."""
    return {"error": f"{type(error).__name__}: {error}"[:12000], "traceback": traceback.format_exc(-3)}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


STAGES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "tests": Bench.tests,
    "verify": Bench.verified,
    "forwards": Bench.forwards,
    "plain": Bench.plain,
    **{f"arranged-{alpha}": partial(Bench.arranged, alpha=alpha) for alpha in ALPHAS},
    "demo": Bench.demo,
    "vllm": Bench.vllm,
}
