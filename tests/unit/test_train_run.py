"""Training runs: continued where they died, by several processes, to a drafter that decodes as the validation says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import ConfigError, SamplingParams
from foredraft.decode.sequence import Sequence
from foredraft.drafters.kangaroo import Kangaroo, read_adapter
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_tensors
from foredraft.train import trainers
from foredraft.train.students import AdapterStudent, overlap
from foredraft.train.target import Document, FrozenTarget, Packed
from foredraft.train.training_options import AdapterOptions, DraftOptions, Eagle3Options
from tests.support.checkpoints import save_checkpoint
from tests.support.hybrids import save_hybrid
from tests.support.loaded import engine_of
from tests.support.mutation import assert_caught, defect
from tests.support.running import forked
from tests.support.training import (
    CPU,
    QUICK,
    curve,
    random_words,
    stopped_at_its_first_checkpoint,
)

NAMES = "length steps step_tokens group_tokens warm_up validate_every learning_rate work out depth"


def options(files: Path, folder: Path, **more: Any) -> AdapterOptions:
    given = {"data": (files,), "steps": 12, "work": folder / "work", "out": folder / "adapter", "depth": 1}
    return AdapterOptions(**QUICK | given | more)


def draft_options(data: Path, folder: Path, **more: Any) -> DraftOptions:
    given = {**QUICK, "work": folder / "draft-work", "out": folder / "draft", **more}
    return DraftOptions(data=(data,), **given)


def weights(folder: Path, name: str = "adapter") -> dict[str, torch.Tensor]:
    return load_file(folder / name / "model.safetensors")


def train(model: Path, given: AdapterOptions) -> Any:
    return trainers.train(given, str(model), device="cpu")


def command(model: Path, given: AdapterOptions) -> list[str]:
    words = [sys.executable, *"-m foredraft train adapter --device cpu --json --patience 0 --model".split()]
    words += [str(model), "--data", *map(str, given.data)]
    for name in NAMES.split():
        words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    return words


def _train_until_killed(arguments: list[str]) -> None:
    model, data, folder = map(Path, arguments)

    def kill(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "train" and done == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    trainers.train(options(data, folder, steps=14), str(model), report=kill, device="cpu")


@pytest.mark.heavy
def test_a_killed_run_goes_on_to_the_same_curve(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, options(data, tmp_path / "whole", steps=14))
    given = options(data, tmp_path / "killed", steps=14)
    done = forked(_train_until_killed, str(model), str(data), str(tmp_path / "killed"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert train(model, given).steps == 14
    assert curve(given.work) == curve(tmp_path / "whole" / "work")
    first, second = (weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.heavy
def test_two_processes_have_the_curve_of_one(model: Path, data: Path, tmp_path: Path) -> None:
    """Sharded over two processes of gloo, from a checkpoint of one; one process ends with theirs."""
    train(model, options(data, tmp_path / "one"))
    given = options(data, tmp_path / "two", steps=12)
    with stopped_at_its_first_checkpoint():
        train(model, given)
    assert len(curve(tmp_path / "two" / "work")) == 5, "four steps and a validation"
    torchrun = [sys.executable, *"-m torch.distributed.run --nproc-per-node 2 --no-python".split()]
    place = "--master-addr 127.0.0.1 --master-port 0 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    torchrun += place.split()
    done = subprocess.run(
        [*torchrun, *command(model, given)], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = curve(tmp_path / "one" / "work"), curve(tmp_path / "two" / "work")
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert second[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (name, first["step"])
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 12
    found = weights(tmp_path / "two")
    for name, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
    shutil.rmtree(tmp_path / "two" / "adapter")
    assert train(model, given).steps == 12
    again = weights(tmp_path / "two")
    assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_starts_as_the_best_layer(model: Path, data: Path, tmp_path: Path, dtype: str) -> None:
    """The last layer writes nothing, so that the one below says what the target says."""
    target = Path(shutil.copytree(model, tmp_path / "target"))
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.startswith("model.layers.2.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    given = options(data, tmp_path, steps=1, learning_rate=1e-9, warm_up=0)
    trainers.train(given, str(target), device="cpu", dtype=dtype)
    written = weights(tmp_path)
    for name, weight in layer_tensors(target, 1).items():
        torch.testing.assert_close(written[name], weight.to(written[name].dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_trained_has_its_targets_dtype(model: Path, data: Path, tmp_path: Path, dtype: str) -> None:
    """No operator multiplies the target's float16 with the bfloat16 of a student."""
    trainers.train(options(data, tmp_path, steps=2), str(model), device="cpu", dtype=dtype)
    trainers.train(draft_options(data, tmp_path, steps=2, layers=1), str(model), device="cpu", dtype=dtype)
    for name in ("adapter", "draft"):
        found = weights(tmp_path, name).values()
        assert {str(t.dtype) for t in found if t.is_floating_point()} == {f"torch.{dtype}"}
    assert ModelSpec.from_folder(tmp_path / "draft").dtype == dtype


# --- what was trained, against decoding -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    result = train(model, options(data, folder, steps=60, validate_every=20))
    assert result.steps == 60 and result.work == str(folder / "work") and result.held_out >= 1
    return folder / "adapter"


@pytest.mark.heavy
def test_the_loss_falls_on_held_out_text(trained: Path) -> None:
    figures = curve(trained.parent / "work")
    alphas = [each["alpha"] for each in figures if "alpha" in each]
    losses = [each["loss"] for each in figures if "loss" in each]
    assert losses[-1] < 0.8 * losses[0] and alphas[-1] > alphas[0]
    assert (trained.parent / "work" / "tensorboard").is_dir()


def student_of(model: Path, adapter: Path) -> tuple[FrozenTarget, AdapterStudent]:
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
    assert len(seen) > 60 and drafter.aux_layers == (1,)
    for text, q in seen:
        packed = Packed.of([Document((*text, 0), (True,) * (len(text) + 1))], CPU)
        states = target.states(packed, student.aux_layers)
        with torch.no_grad():
            found = student(packed, states.aux_states)[-1].softmax(-1)
        assert (found - q).abs().max() < 1e-5
        p = target.log_probs(states.last)[-1]
        kept = overlap(p, found.log())
        assert kept.item() == pytest.approx(torch.minimum(p.exp(), q).sum().item(), abs=1e-5)


@pytest.mark.heavy
def test_a_replay_reproduces_every_q_of_decoding(model: Path, trained: Path) -> None:
    check_replay(model, trained)


@pytest.mark.heavy
def test_what_is_trained_for_a_hybrid_decodes(data: Path, tmp_path: Path) -> None:
    """An adapter as it was trained, and a draft model, whose layers all attend, and a head."""
    target = save_hybrid(tmp_path / "hybrid", num_hidden_layers=4)
    train(target, options(data, tmp_path, steps=8, kept_states=0.1))
    assert any((tmp_path / "work" / "states").iterdir())
    check_replay(target, tmp_path / "adapter")
    assert drafts_as_plain(target, adapter=tmp_path / "adapter", drafter="kangaroo")
    given = draft_options(data, tmp_path, steps=8, layers=1, from_layers=(3,))
    trainers.train(given, str(target), device="cpu")
    assert ModelSpec.from_folder(tmp_path / "draft").recurrent_layers == ()
    assert drafts_as_plain(target, draft=tmp_path / "draft", drafter="draft-model")
    wrong = draft_options(data, tmp_path / "x", layers=1, from_layers=(2,))
    with pytest.raises(ConfigError, match="names layer 2, which is recurrent"):
        trainers.train(wrong, str(target), device="cpu")
    head = Eagle3Options(
        data=(data,), out=tmp_path / "head", taps=(2, 3, 4), steps=2, work=tmp_path / "third"
    )
    trainers.train(head, str(target), device="cpu")
    assert drafts_as_plain(target, draft=tmp_path / "head", drafter="eagle3")


def test_no_draft_model_has_blocks_of_one_mixer(data: Path, tmp_path: Path) -> None:
    target = save_hybrid(tmp_path / "target", "blocks")
    with pytest.raises(ConfigError, match="cannot train a draft model of the form of a NemotronHForCausalLM"):
        trainers.train(draft_options(data, tmp_path, layers=1), str(target), device="cpu")


@pytest.mark.parametrize("pattern", ["*-M*M", "*M-*MM"])
def test_an_adapter_starts_as_a_layer_with_an_mlp(pattern: str, data: Path, tmp_path: Path) -> None:
    """Of a model in which not all layers have one; where no layer that attends has one, that is said."""
    target = save_hybrid(tmp_path / "target", "blocks", hybrid_override_pattern=pattern)
    given = options(data, tmp_path, steps=2)
    if pattern == "*-M*M":
        train(target, given)
        assert (given.out / "config.json").is_file()
        return
    with pytest.raises(ConfigError, match=r"no layer of .* has both attention and an MLP.*give attention"):
        train(target, given)


def one_position_late(states: Any) -> Any:
    def mutated(target: FrozenTarget, packed: Packed, layers: Any) -> Any:
        found = states(target, packed, layers)
        return found._replace(aux_states=None if found.aux_states is None else found.aux_states.roll(1, 0))

    return mutated


def without_the_adapters_norm(tensors: Any) -> Any:
    def mutated(student: AdapterStudent, packed: Packed, states: torch.Tensor, **more: Any) -> torch.Tensor:
        with torch.no_grad():
            for value in student.norm.parameters():
                value.fill_(1.0)
        made: torch.Tensor = tensors(student, packed, states, **more)
        return made

    return mutated


@pytest.mark.parametrize(
    ("point", "mutation"),
    [(FrozenTarget.states, one_position_late), (AdapterStudent.forward, without_the_adapters_norm)],
    ids=["states one position late", "the adapter's norm missing"],
)
def test_a_mismatch_of_training_and_decoding_is_caught(
    point: Any, mutation: Any, model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(defect("mismatch", point, mutation, lambda: check_replay(model, trained)), monkeypatch)


# --- options and mistakes --------------------------------------------------------------------------------------


def drafts_as_plain(model: Path, **options: Any) -> bool:
    llm = foredraft.load(model, policy="fixed", max_draft=3, **options)
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    [output] = llm.generate(["the target"], **greedy)
    [plain] = llm.generate(["the target"], **greedy, drafter="none")
    return output.token_ids == plain.token_ids and output.stats.drafted > 0


def test_a_reduced_vocabulary_has_the_tokens_of_the_data(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, options(data, tmp_path, steps=8, draft_vocabulary=30))
    assert read_adapter(tmp_path / "adapter").draft_vocabulary == 30
    ids = weights(tmp_path)["draft_vocabulary"].tolist()
    assert len(ids) == 30 and ids == sorted(ids) and 2 in ids, "the end of a text is among them"
    assert drafts_as_plain(model, adapter=tmp_path / "adapter", drafter="kangaroo")


@pytest.mark.heavy
def test_kept_states_save_forwards(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "few.txt"
    data.write_text(random_words(700))  # a few epochs
    forwards, states = list[int](), FrozenTarget.states
    monkeypatch.setattr(FrozenTarget, "states", lambda *given: forwards.append(1) or states(*given))

    def forwards_of(name: str, kept: float) -> int:
        forwards.clear()
        more: dict[str, Any] = {"steps": 12, "validate_every": 12, "step_tokens": 512, "kept_states": kept}
        train(model, options(data, tmp_path / name, **more))
        return len(forwards)

    assert forwards_of("b", 0.1) < forwards_of("a", 0.0)
    assert curve(tmp_path / "a" / "work") == curve(tmp_path / "b" / "work")
    file = next((tmp_path / "b" / "work" / "states").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])  # cut short: computed again
    forwards_of("b", 0.1)


def test_the_target_writes_what_a_drafter_learns(model: Path, data: Path, tmp_path: Path) -> None:
    prompts, texts = tmp_path / "prompts.jsonl", tmp_path / "work" / "self_generated.jsonl"
    records = [{"prompt": f"the target {n}", "response": "x"} for n in range(40)]
    prompts.write_text("".join(json.dumps(each) + "\n" for each in records))
    given = options(prompts, tmp_path, steps=4, validate_every=2, self_generate=20)
    train(model, given)
    written = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len(written) == 40 and max(map(len, written)) == 20
    llm = foredraft.load(model, drafter="none")
    [output] = llm.generate(["the target 3"], temperature=1.0, max_new_tokens=20, seed=3)
    assert output.token_ids == written[3]
    texts.write_text("[1, 2]\n[3")  # killed while it wrote
    train(model, given)


def test_a_distilled_draft_drafts(model: Path, data: Path, tmp_path: Path) -> None:
    given = draft_options(data, tmp_path, steps=30, validate_every=10, layers=2, from_layers=(0, 2))
    trainers.train(given, str(model), device="cpu")
    assert drafts_as_plain(model, draft=tmp_path / "draft", drafter="draft-model")
    with pytest.raises(ConfigError, match="layer 9"):
        trainers.train(
            draft_options(data, tmp_path / "x", layers=1, from_layers=(9,)), str(model), device="cpu"
        )


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
            trainers.train(
                draft_options(data, tmp_path, layers=3, steps=2, out=place), str(model), device="cpu"
            )
    assert (mine / "thesis.txt").read_text() == "years of work"
    given = options(data, tmp_path, steps=4, out=tmp_path / "empty", fresh=True)
    (tmp_path / "empty").mkdir()
    for _ in ("an empty folder", "an adapter"):
        train(model, given)
    (tmp_path / "empty" / "note.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        train(model, given)


def test_an_adapter_of_another_target_is_refused(model: Path, trained: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", "llama", seed=1, tokenizer=True)
    with pytest.raises(ConfigError, match="has other weights"):
        foredraft.load(other, adapter=trained)
    with pytest.raises(ConfigError, match="adapter"):
        foredraft.load(other, drafter="kangaroo")
    with pytest.raises(ConfigError, match="cannot be read"):
        foredraft.load(model, adapter=tmp_path)


def test_training_stops_where_the_validation_gets_no_better(model: Path, data: Path, tmp_path: Path) -> None:
    given = options(data, tmp_path, steps=60, validate_every=2, learning_rate=1e-12, patience=3)
    result = train(model, given)
    assert result.stopped_early and result.steps <= 20


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steps": 0}, "steps"), ({"learning_rate": 0.0}, "learning_rate"), ({"kind": "mlp"}, "attention"), ({"data": ()}, "data"),
        ({"draft_vocabulary": 0}, "draft_vocabulary"), ({"learning_rate": 1e30}, "is (nan|inf)"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(more: dict[str, Any], message: str, model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(model, options(data, tmp_path, clip=1e30, **more))
