"""Everything that takes drafters takes `phrases`, with its line in the table: `test_kinds_new_drafter` runs this."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import ConfigError, SamplingParams
from foredraft.bench import bench_run as bench_run
from foredraft.bench import machine_record as machine
from foredraft.bench import measurement
from foredraft.cli import main
from foredraft.loading import capacity
from foredraft.loading.inspection import inspect_models
from foredraft.model.cache import KVCache
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import save_pair
from tests.support.phrases import BYTES_PER_TOKEN, FILE
from tests.support.serving import serving

WORDS = 384
LENGTH = 4  # tokens of a phrase
PROMPT = "a b c"
GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
DOCUMENT = ["--json", "--device", "cpu"]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`big` is a model, `phrases` holds phrases for it, those of one text and wrong ones, `foreign` has others."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    with foredraft.load(folder / "big", device="cpu", drafter="none", max_length=64) as llm:
        [output] = llm.generate(PROMPT, GREEDY)
    text = output.token_ids
    phrases = [text[at : at + LENGTH] for at in range(len(text) - LENGTH)]
    phrases += [[(word + i) % WORDS for i in range(LENGTH)] for word in range(WORDS)]
    for name, content in (("phrases", phrases), ("foreign", [[1, WORDS]])):
        (folder / name).mkdir()
        (folder / name / FILE).write_text(json.dumps(content))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that exits with this code; return its document or text, or, where it is refused, the error."""

    def run(*words: object, code: int = 0) -> Any:
        capsys.readouterr()
        exited = main([*map(str, words)])
        out, err = capsys.readouterr()
        assert exited == code, err
        return err if code == 2 else json.loads(out) if out.startswith("{") else " ".join(out.split())

    return run


def load(models: Path, **options: Any) -> foredraft.LLM:
    return foredraft.load(models / "big", device="cpu", max_length=128, **options)


def test_load_takes_it(models: Path) -> None:
    with load(models, draft=models / "phrases", policy="fixed") as llm:
        assert llm.default_drafter == "phrases"
        assert llm.loaded.engine.policy.max_draft == LENGTH - 1
        params = (GREEDY.replace(drafter=name) for name in ("none", "phrases"))
        plain, drafted = (llm.generate([PROMPT, "x"], each) for each in params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    stats = [output.stats for output in drafted]
    assert stats[0].accepted > 0 and stats[1].drafted > stats[1].accepted
    assert all(output.lossless for output in drafted)
    with load(models, draft=models / "phrases") as llm:
        assert llm.default_drafter == "auto" and "phrases" in llm.loaded.engine.drafters
        assert llm.requests.drafters(SamplingParams())[-1] == "phrases"


NO_PHRASES = "phrases has no phrases for this model; give draft, a folder with phrases.json$"
OTHER_DRAFTER = (
    "drafter is 'draft-model', but .*phrases is what drafter phrases reads; give drafter='phrases', or"
)
OTHER_WORDS = "draft is '.*foreign', whose phrases have token 384, but the model has 384 words"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "phrases"}, NO_PHRASES),
        ({"draft": "phrases", "drafter": "draft-model"}, OTHER_DRAFTER),
        ({"draft": "foreign"}, OTHER_WORDS),
        ({"draft": "phrases", "policy": "confidence"}, "but no loaded drafter has them; give another one"),
    ],
)
def test_load_refuses_what_does_not_fit(models: Path, options: dict[str, Any], message: str) -> None:
    given = {**options, "draft": models / options["draft"]} if "draft" in options else options
    with pytest.raises(ConfigError, match=message):
        load(models, **given)


def test_the_memory_plan_counts_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = models / "big"
    weights = inspect_models(big, device="cpu").models[0].weight_bytes[32]
    caches = KVCache.bytes_per_row(ModelSpec.from_folder(big), 900, torch.float32)

    def longest(free: int, **given: Any) -> int | None:
        monkeypatch.setattr(capacity, "free_memory", lambda device: weights + 2 * caches + free)
        return inspect_models(big, device="cpu", **given).context.longest

    without, phrases = longest(0), json.loads((models / "phrases" / FILE).read_text())
    assert without is not None and without >= 900
    # half of what is beside the weights is for caches
    own = BYTES_PER_TOKEN * sum(map(len, phrases)) + 2 * without
    assert longest(own, draft=models / "phrases") == without
    assert (longest(own // 2, draft=models / "phrases") or 0) < without


def test_info_takes_it(models: Path, run: Run) -> None:
    found = run("info", models / "big", "--draft", models / "phrases", *DOCUMENT)
    assert found["pair"] is None and len(found["models"]) == 1
    notes = {each["name"]: (each["at_hand"], each["note"]) for each in found["drafters"]}
    assert notes["phrases"] == (True, f"the phrases of {models / 'phrases'}")
    text = run("info", models / "big", "--device", "cpu")
    assert "phrases no phrases has no phrases for this model; give --draft," in text


def test_generate_takes_it(models: Path, run: Run) -> None:
    assert "phrases: known phrases, word for word" in run("generate", "--help-all")
    own = ["generate", "--model", models / "big", "--draft", models / "phrases", "--temperature", "0"]
    found = run(*own, "--drafter", "phrases", *DOCUMENT, "a b c")
    assert found["stats"]["drafted"] > 0
    error = run(*own, "--drafter", "phrases", "--plan", "exit:1", "a b c", code=2)
    assert "--plan has no effect with drafter phrases; leave it out" in error
    assert "phrases" in run("generate", "--model", models / "big", "--drafter", "phrase", "a b c", code=2)


def test_bench_takes_it(models: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (machine, "BYTES", 2**20),
        (machine, "TRIES", 2),
        (measurement, "REPEATS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "words.jsonl").write_text('{"prompt": "def accept(draft, p):"}\n')
    own = ["bench", "--model", models / "big", "--workload", tmp_path / "words.jsonl", "--new-tokens", "4"]
    quick = [*own, "--repeats", "1", "--methods", "phrases", *DOCUMENT]
    resolve, resolved = bench_run.resolve, list[str]()
    monkeypatch.setattr(
        bench_run, "resolve", lambda name, *more: resolved.append(name) or resolve(name, *more)
    )
    found = run(*quick, "--draft", models / "phrases")
    assert [row["contender"] for row in found["rows"]] == ["plain", "phrases"]
    assert [model["role"] for model in found["models"]] == ["target"], "it is no whole model"
    assert resolved == [str(models / "big")], "other programs get no draft model"
    assert "phrases has no phrases for this model; give --draft" in run(*quick, code=2)


def test_verify_takes_it(models: Path, run: Run) -> None:
    found = run(
        "verify", "--model", models / "big", "--draft", models / "phrases", "--drafter", "phrases", "--tokens", "6",
        "--samples", "40", "--seed", "3", "--max-batch", "8", *DOCUMENT, "a b c", "x", code=3,
    )  # fmt: skip
    assert found["verdict"] == "inconclusive", "so few samples are weak evidence"
    assert found["about"]["drafters"] == ["phrases"]
    assert all(not identity["divergences"] for identity in found["identities"])
    assert any(test["drafted"] > test["accepted"] > 0 for test in found["tests"])


def test_a_server_takes_it(models: Path) -> None:
    options = {"draft": models / "phrases", "policy": "fixed", "drafter": "lookup"}
    with load(models, **options) as llm, serving(llm) as served:
        assert served.client.get("/v1/capabilities").json()["drafters"]["phrases"] == {"lossless": True}
        [model] = served.client.get("/v1/models").json()["data"]
        asked = {
            "model": model["id"],
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "drafter": "phrases",
        }
        reply = served.client.post("/v1/completions", json={"provenance": True, **asked})
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        [plain] = llm.generate(PROMPT, GREEDY.replace(max_new_tokens=8, drafter="none"))
        assert choice["text"] == plain.text
        assert "drafter" in {each["origin"] for each in choice["provenance"]}
