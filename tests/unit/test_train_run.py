"""Training runs: continued where they died, by several processes, to a drafter that decodes as the validation says."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import ConfigError, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.decode.sequence import Sequence
from foredraft.drafters.adapter_files import read_adapter
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_tensors
from foredraft.train import training_checkpoints as checkpoints
from foredraft.train.adapter import train_adapter
from foredraft.train.draft import train_draft
from foredraft.train.loop import TrainingRun
from foredraft.train.losses import overlap
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.students import AdapterStudent
from foredraft.train.target import FrozenTarget
from foredraft.train.training_checkpoints import TrainingCheckpoints
from foredraft.train.training_options import AdapterOptions, DraftOptions
from tests.support.checkpoints import TEXT, save_checkpoint
from tests.support.loaded import engine_of
from tests.support.planting import assert_caught, defect
from tests.support.trained_texts import check_prediction

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, vocab_size=97)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.txt"
    words = TEXT.split()
    random = np.random.default_rng(0)
    file.write_text(" ".join(words[at] for at in random.integers(len(words), size=3000)))
    return file


def options(files: Path, folder: Path, **more: Any) -> AdapterOptions:
    given: dict[str, Any] = {
        "data": (files,), "length": 64, "steps": 12, "step_tokens": 512, "group_tokens": 256, "warm_up": 2,
        "validate_every": 4, "learning_rate": 3e-3, "work": folder / "work", "out": folder / "adapter",
        "depth": 1, "patience": 0,
    }  # fmt: skip
    return AdapterOptions(**{**given, **more})


def curve(work: Path) -> list[dict[str, Any]]:
    """Return the figures of every step and validation, but for times."""
    entries = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name != "tokens_per_second"} for each in entries]


def train(model: Path, given: AdapterOptions) -> Any:
    return train_adapter(given, str(model), device="cpu")


def test_the_loss_falls_on_held_out_text(model: Path, data: Path, tmp_path: Path) -> None:
    result = train(model, options(data, tmp_path, steps=60, validate_every=20))
    figures = curve(result_folder := tmp_path / "work")
    alphas = [each["alpha"] for each in figures if "alpha" in each]
    losses = [each["loss"] for each in figures if "loss" in each]
    assert losses[-1] < 0.8 * losses[0] and alphas[-1] > alphas[0]
    assert result.steps == 60 and result.work == str(result_folder) and result.held_out >= 1
    assert (tmp_path / "work" / "tensorboard").is_dir()


def test_a_seed_gives_one_curve(model: Path, data: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(model, options(data, tmp_path / name))
    assert curve(tmp_path / "a" / "work") == curve(tmp_path / "b" / "work")
    train(model, options(data, tmp_path / "c", seed=1))
    assert curve(tmp_path / "a" / "work") != curve(tmp_path / "c" / "work")


def command(model: Path, given: AdapterOptions) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "foredraft",
        "train",
        "adapter",
        "--model",
        str(model),
        "--device",
        "cpu",
        "--json",
    ]
    for name in (
        "length",
        "steps",
        "step_tokens",
        "group_tokens",
        "warm_up",
        "validate_every",
        "learning_rate",
        "work",
        "out",
        "depth",
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    return [*words, "--patience", "0", "--data", *map(str, given.data)]


def test_a_killed_run_goes_on_to_the_same_curve(model: Path, data: Path, tmp_path: Path) -> None:
    """SIGKILL at a random step, twice; the same command then ends with the figures of an undisturbed run."""
    whole = options(data, tmp_path / "whole", steps=40)
    train(model, whole)
    given = options(data, tmp_path / "killed", steps=40)
    work = tmp_path / "killed" / "work"
    for wanted in (6, 19):
        process = subprocess.Popen(command(model, given), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ends = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < ends:
            if (work / "metrics.jsonl").is_file() and len(
                (work / "metrics.jsonl").read_text().splitlines()
            ) > wanted:
                process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    done = subprocess.run(command(model, given), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert curve(work) == curve(tmp_path / "whole" / "work")
    assert json.loads(done.stdout)["steps"] == 40
    first, second = (
        load_file(tmp_path / name / "adapter" / "model.safetensors") for name in ("whole", "killed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_processes_have_the_curve_of_one(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded over two processes of gloo, from a checkpoint of one; one process ends with theirs."""
    train(model, options(data, tmp_path / "one"))
    given = options(data, tmp_path / "two", steps=12)
    save = TrainingCheckpoints.save

    def save_and_stop(self: TrainingCheckpoints, *state: Any) -> None:
        save(self, *state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingCheckpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(model, given)
    assert len(curve(tmp_path / "two" / "work")) == 5, "four steps and a validation"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "127.0.0.1:0", *command(model, given)],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = curve(tmp_path / "one" / "work"), curve(tmp_path / "two" / "work")
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (name, first["step"])
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 12
    found = load_file(tmp_path / "two" / "adapter" / "model.safetensors")
    for name, value in load_file(tmp_path / "one" / "adapter" / "model.safetensors").items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
    shutil.rmtree(tmp_path / "two" / "adapter")
    assert train(model, given).steps == 12
    again = load_file(tmp_path / "two" / "adapter" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_starts_as_the_layer_that_drafts_best(
    model: Path, data: Path, tmp_path: Path, dtype: str
) -> None:
    """The last layer writes nothing, so that the one below says what the target says."""
    target = tmp_path / "target"
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.startswith("model.layers.2.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    given = options(data, tmp_path, steps=1, learning_rate=1e-9, warm_up=0)
    train_adapter(given, str(target), device="cpu", dtype=dtype)
    written = load_file(tmp_path / "adapter" / "model.safetensors")
    for name, weight in layer_tensors(target, 1).items():
        torch.testing.assert_close(written[name], weight.to(written[name].dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_trained_has_the_dtype_of_its_target(
    model: Path, data: Path, tmp_path: Path, dtype: str
) -> None:
    """No operator multiplies the target's float16 with the bfloat16 of a student."""
    given: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    train_adapter(options(data, tmp_path, steps=2), str(model), **given)
    shared = {name: getattr(options(data, tmp_path), name) for name in ("data", "length", "step_tokens")}
    draft = tmp_path / "draft"
    train_draft(
        DraftOptions(**shared, steps=2, layers=1, out=draft, work=tmp_path / "w"), str(model), **given
    )
    for folder in (tmp_path / "adapter", draft):
        found = load_file(folder / "model.safetensors")
        assert {str(t.dtype) for t in found.values() if t.is_floating_point()} == {f"torch.{dtype}"}
    assert ModelSpec.from_folder(draft).dtype == dtype


# --- what was trained, against decoding -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(model, options(data, folder, steps=60, validate_every=20))
    return folder / "adapter"


def student_of(model: Path, adapter: Path) -> tuple[FrozenTarget, AdapterStudent]:
    """Return the training code's own view of a written adapter."""
    target, config = FrozenTarget(model, CPU, torch.float32), read_adapter(adapter)
    start = load_file(adapter / "model.safetensors")
    return target, AdapterStudent(target.spec, target.head_weight, start, config.depth, mlp=True)


def check_replay(model: Path, adapter: Path) -> None:
    """Check every q that a decoder drew from against a teacher-forced pass of the training code."""
    target, student = student_of(model, adapter)
    llm = foredraft.load(
        model, adapter=adapter, drafter="kangaroo", policy="fixed", max_draft=3, dtype="float32", device="cpu",
        max_batch=4, max_length=256, kernels=False,
    )  # fmt: skip
    drafter: Any = engine_of(llm).drafters["kangaroo"]
    seen: list[tuple[list[int], torch.Tensor]] = []
    step = Kangaroo.step

    def spy(self: Kangaroo, tokens: Any, starts: Any, counts: Any, idle: Any, at: Any) -> Any:
        logits = step(self, tokens, starts, counts, idle, at)
        for row, sequence in enumerate(engine_of(llm).rows.sequences):
            if not idle[row]:
                drafted[row].append(int(tokens[row, 0]))
                text = [*sequence.tokens[:-1], *drafted[row]]
                seen.append((text, logits[row].softmax(-1).clone()))
        return logits

    drafted: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kangaroo, "step", spy)
        params = SamplingParams(max_new_tokens=30, temperature=1.0, drafter="kangaroo", ignore_eos=True)
        several = [Sequence(-1 - n, [1, 5 + n, 9], params, n, drafters=("kangaroo",)) for n in range(3)]
        for sequence in several:
            engine_of(llm).submit(sequence)
        while any(sequence.finish is None for sequence in several):
            drafted.clear()
            drafted.update({row: [] for row in range(4)})
            engine_of(llm).step()
    assert len(seen) > 60 and drafter.taps == (1,)
    for text, q in seen:
        packed = Packed.of([Document((*text, 0), (True,) * (len(text) + 1))], CPU)
        states = target.states(packed, student.taps)
        with torch.no_grad():
            found = student(packed, states.tapped)[-1].softmax(-1)
        assert (found - q).abs().max() < 1e-5
        p = target.log_probs(states.last)[-1]
        kept = overlap(p, found.log())
        assert kept.item() == pytest.approx(torch.minimum(p.exp(), q).sum().item(), abs=1e-5)


def test_a_replay_reproduces_every_q_of_decoding(model: Path, trained: Path) -> None:
    check_replay(model, trained)


def one_position_late(states: Any) -> Any:
    def spoilt(target: FrozenTarget, packed: Packed, taps: Any) -> Any:
        found = states(target, packed, taps)
        return found._replace(tapped=None if found.tapped is None else found.tapped.roll(1, 0))

    return spoilt


def without_the_adapters_norm(tensors: Any) -> Any:
    def spoilt(student: AdapterStudent, packed: Packed, states: torch.Tensor, **more: Any) -> torch.Tensor:
        with torch.no_grad():
            for value in student.norm.parameters():
                value.fill_(1.0)
        made: torch.Tensor = tensors(student, packed, states, **more)
        return made

    return spoilt


@pytest.mark.parametrize(
    ("seam", "spoiler"),
    [(FrozenTarget.states, one_position_late), (AdapterStudent.forward, without_the_adapters_norm)],
    ids=["a tap one position late", "the adapter's norm missing"],
)
def test_a_mismatch_of_training_and_decoding_is_caught(
    seam: Any, spoiler: Any, model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(defect("mismatch", seam, spoiler, lambda: check_replay(model, trained)), monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_validations_tau_is_that_of_decoding(model: Path, trained: Path, temperature: float) -> None:
    """On texts that the target wrote: within the interval of a bootstrap over whole texts."""
    target, student = student_of(model, trained)
    gamma, count, new = 3, 40, 60
    llm = foredraft.load(
        model, adapter=trained, drafter="kangaroo", policy="fixed", max_draft=gamma, dtype="float32", device="cpu",
        max_batch=8, max_length=128,
    )  # fmt: skip

    def windows_of(runs: Any) -> Any:
        padded = np.zeros((count, new + gamma))
        for row, run in enumerate(runs):
            padded[row, :new] = run[:, 0]
        return np.lib.stride_tricks.sliding_window_view(padded, gamma, axis=1)[:, :new]

    check_prediction(
        llm,
        student,
        target,
        temperature=temperature,
        gamma=gamma,
        count=count,
        new=new,
        windows_of=windows_of,
    )


# --- options and mistakes --------------------------------------------------------------------------------------


def test_a_reduced_vocabulary_has_the_words_of_the_data(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, options(data, tmp_path, steps=8, draft_vocabulary=30))
    config = read_adapter(tmp_path / "adapter")
    assert config.draft_vocabulary == 30
    words = load_file(tmp_path / "adapter" / "model.safetensors")["draft_vocabulary"].tolist()
    assert len(words) == 30 and words == sorted(words) and 2 in words, "the end of a text is among them"
    llm = foredraft.load(model, adapter=tmp_path / "adapter", drafter="kangaroo", policy="fixed", max_draft=3)
    [output] = llm.generate(["the target"], temperature=0, max_new_tokens=40, ignore_eos=True)
    [plain] = llm.generate(["the target"], temperature=0, max_new_tokens=40, ignore_eos=True, drafter="none")
    assert output.token_ids == plain.token_ids and output.stats.drafted > 0


def test_kept_states_change_nothing_but_the_forwards(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = []
    states = FrozenTarget.states
    monkeypatch.setattr(
        FrozenTarget, "states", lambda self, packed, depth: forwards.append(1) or states(self, packed, depth)
    )
    counts = []
    for name, kept in (("a", 0.0), ("b", 0.1)):
        forwards.clear()
        train(
            model,
            options(data, tmp_path / name, steps=30, validate_every=30, step_tokens=1024, kept_states=kept),
        )
        counts.append(len(forwards))
    assert curve(tmp_path / "a" / "work") == curve(tmp_path / "b" / "work")
    assert counts[1] < counts[0]
    file = next((tmp_path / "b" / "work" / "states").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])  # cut short: computed again
    train(
        model, options(data, tmp_path / "b", steps=30, validate_every=30, step_tokens=1024, kept_states=0.1)
    )


def test_the_target_writes_what_a_drafter_learns(model: Path, data: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"the target {n}", "response": "x"}) + "\n" for n in range(40))
    )
    given = options(prompts, tmp_path, steps=4, validate_every=2, self_generate=20)
    train(model, given)
    written = [
        json.loads(line) for line in (tmp_path / "work" / "self_generated.jsonl").read_text().splitlines()
    ]
    assert len(written) == 40 and max(map(len, written)) == 20
    llm = foredraft.load(model, drafter="none")
    [output] = llm.generate(["the target 3"], temperature=1.0, max_new_tokens=20, seed=3)
    assert output.token_ids == written[3]
    (tmp_path / "work" / "self_generated.jsonl").write_text("[1, 2]\n[3")  # killed while it wrote
    train(model, replace(given, fresh=False))


def test_a_distilled_draft_drafts(model: Path, data: Path, tmp_path: Path) -> None:
    given = options(data, tmp_path)
    shared = {
        name: getattr(given, name)
        for name in ("data", "length", "step_tokens", "group_tokens", "warm_up", "learning_rate", "work")
    }
    train_draft(
        DraftOptions(**shared, out=tmp_path / "draft", steps=30, validate_every=10, layers=2, from_layers=(0, 2)),
        str(model), device="cpu",
    )  # fmt: skip
    llm = foredraft.load(model, draft=tmp_path / "draft", drafter="draft-model", policy="fixed", max_draft=3)
    [output] = llm.generate(["the target"], temperature=0, max_new_tokens=40, ignore_eos=True)
    [plain] = llm.generate(["the target"], temperature=0, max_new_tokens=40, ignore_eos=True, drafter="none")
    assert output.token_ids == plain.token_ids and output.stats.drafted > 0
    with pytest.raises(ConfigError, match="layer 9"):
        train_draft(
            DraftOptions(**shared | {"work": tmp_path / "w"}, out=tmp_path / "x", layers=1, from_layers=(9,)),
            str(model), device="cpu",
        )  # fmt: skip


def test_a_full_disk_leaves_the_checkpoint_before(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, options(data, tmp_path, steps=4))
    folder = tmp_path / "work" / "checkpoints"
    before = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    given = options(data, tmp_path)
    (tmp_path / "work" / "key.json").unlink()
    adapter = (tmp_path / "adapter" / "model.safetensors").read_bytes()

    def full(file: Path, *_: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def claim(*_: Any) -> None:
        """The run of four steps is continued with more of them, for the test alone."""

    monkeypatch.setattr("foredraft.train.preparation._claim", claim)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tensors", full)
        with pytest.raises(ConfigError, match="No space left on device.*the one before it is whole"):
            train(model, given)
    assert {path: path.stat().st_size for path in before} == before
    assert TrainingCheckpoints(folder, Any, "").latest == folder / "step-4.safetensors"  # type: ignore[arg-type]
    assert (tmp_path / "adapter" / "model.safetensors").read_bytes() != b"" != adapter
    assert train(model, given).steps == 12


def test_a_run_of_other_options_is_not_continued(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, options(data, tmp_path, steps=4))
    with pytest.raises(ConfigError, match="a run of another target, other data or other options"):
        train(model, options(data, tmp_path, steps=8))
    assert train(model, options(data, tmp_path, steps=8, fresh=True)).steps == 8
    shutil.rmtree(tmp_path / "adapter")
    assert train(model, options(data, tmp_path, steps=8)).steps == 8
    assert read_adapter(tmp_path / "adapter").steps == 8, "the same command writes it again"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        train(model, options(data, tmp_path, work=tmp_path / "other"))


def test_a_folder_of_other_files_is_never_replaced(model: Path, data: Path, tmp_path: Path) -> None:
    """Not the target's own, nor one with a file beside an adapter's; an adapter's own is."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for place in (mine, model, mine / "thesis.txt"):
        with pytest.raises(ConfigError, match="out is .*(holds other files|no folder); give a new folder"):
            train(model, options(data, tmp_path, steps=4, out=place))
        with pytest.raises(ConfigError, match="out is .*(holds other files|no folder); give a new folder"):
            train_draft(
                DraftOptions(data=(data,), out=place, work=tmp_path / "w", layers=3, steps=2),
                str(model),
                device="cpu",
            )
    assert (mine / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "empty"):
        train(model, options(data, tmp_path, steps=4, out=place, fresh=True))
    (tmp_path / "empty" / "note.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        train(model, options(data, tmp_path, steps=4, out=tmp_path / "empty", fresh=True))


def test_an_adapter_of_another_target_is_refused(model: Path, trained: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", "llama", seed=1, tokenizer=True)
    with pytest.raises(ConfigError, match="has other weights"):
        foredraft.load(other, adapter=trained)
    with pytest.raises(ConfigError, match="adapter"):
        foredraft.load(other, drafter="kangaroo")
    with pytest.raises(ConfigError, match="cannot be read"):
        foredraft.load(model, adapter=tmp_path)


def test_training_stops_where_the_validation_gets_no_better(model: Path, data: Path, tmp_path: Path) -> None:
    """With a learning rate of next to nothing, no validation is better than the first."""
    given = options(data, tmp_path, steps=60, validate_every=2, learning_rate=1e-12, patience=3)
    result = train(model, given)
    assert result.stopped_early and result.steps <= 20


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steps": 0}, "steps"), ({"loss": "mse"}, "loss"), ({"learning_rate": 0.0}, "learning_rate"),
        ({"depth": 9}, "3 layers"), ({"kind": "mlp"}, "attention"), ({"data": ()}, "data"),
        ({"draft_vocabulary": 0}, "draft_vocabulary"), ({"learning_rate": 1e30}, "is (nan|inf)"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_honoured(
    more: dict[str, Any], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(model, options(data, tmp_path, clip=1e30, **more))


def test_the_gradient_counts_every_token_once(model: Path, data: Path, tmp_path: Path) -> None:
    """One group or several make the same first step."""
    for name, tokens in (("a", 128), ("b", 512)):
        train(model, options(data, tmp_path / name, steps=1, validate_every=1, group_tokens=tokens))
    first, second = (curve(tmp_path / name / "work")[0] for name in ("a", "b"))
    assert first["loss"] != second["loss"], "the groups hold other documents, so this compares nothing else"
    assert TrainingRun.__doc__ and Fixed
