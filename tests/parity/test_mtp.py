"""Layers that predict further tokens (MTP), against transformers' layer of the same form, and every spelling of their files."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft import SamplingParams, load
from foredraft.cli import main
from foredraft.doctor.examination import diagnose
from foredraft.doctor.teacher_forced import head_drafts, read_text
from foredraft.drafters.eagle3 import Eagle3Head
from foredraft.drafters.heads.settings import HeadSettings, write_settings
from foredraft.drafters.mtp import SPELLINGS, files_at, read_values
from foredraft.errors import ForedraftError
from foredraft.export.command import export_head
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.train import head_students
from foredraft.train.head_students import MTPStudent
from foredraft.train.target import Document, FrozenTarget, Packed
from foredraft.train.trainers import train
from foredraft.train.training_options import MTPOptions
from tests.support.gguf_files import write_gguf
from tests.support.hybrids import add_mtp, rewrite, save_hybrid
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around

LENGTH, STEPS = 40, 3  # tokens of a text, and of a draft


@cache
def saved(dtype: str = "float32", **keys: Any) -> tuple[Path, list[int], dict[int, Tensor]]:
    """Return a model's folder, a text, and the reference's logits [STEPS, V] of drafts after some places of it."""
    folder = save_hybrid(Path(tempfile.mkdtemp()), dtype=dtype, **keys)
    further = add_mtp(folder)
    target = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(3, 320, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    ids, drafts = torch.tensor([tokens]), dict[int, Tensor]()
    with torch.no_grad():
        states = target.model(ids).last_hidden_state
        for anchor in (8, 20, LENGTH - STEPS - 1):
            read, logits = states[:, :anchor], list[Tensor]()
            for step in range(STEPS):
                embedded = target.model.embed_tokens(ids[:, 1 : anchor + step + 1])
                pairs = further.pre_fc_norm_embedding(embedded), further.pre_fc_norm_hidden(read)
                left = further.model(inputs_embeds=further.fc(torch.cat(pairs, -1))).last_hidden_state
                logits.append(target.lm_head(left[:, -1]).float())
                read = torch.cat([read, left[:, -1:]], 1)
            drafts[anchor] = torch.cat(logits)
    return folder, tokens, drafts


def drafted(folder: Path, tokens: list[int], **options: Any) -> dict[int, Tensor]:
    llm = load(model=str(folder), drafter="mtp", policy="fixed", max_length=128, **options)
    try:
        head = llm.loaded.engine.drafters["mtp"].head  # type: ignore[attr-defined]
        runner = llm.loaded.runner
        return head_drafts(head, read_text(runner, tokens, [runner.decoder.spec.layers]), STEPS, 99)
    finally:
        llm.close()


def check(folder: Path | None = None, dtype: str = "float32", **options: Any) -> None:
    own, tokens, expected = saved(dtype)
    found = drafted(folder or own, tokens, **options)
    for anchor, logits in expected.items():
        far = (found[anchor] - logits).abs().max() / logits.abs().max()
        assert far < (2e-5 if dtype == "float32" else 0.05), (anchor, float(far))


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_drafts_equal_those_of_the_reference(dtype: str, kernels: bool) -> None:
    check(dtype=dtype, kernels=kernels)


def without(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return a copy of a model without the tensors that predict further tokens, and these."""
    copy = tmp_path / "target"
    copy.mkdir(parents=True)
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    own = {
        name: tensor
        for name, tensor in load_file(copy / "model.safetensors").items()
        if name.startswith("mtp.")
    }
    rewrite(copy, lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in own})
    return copy, own


def respelled(own: dict[str, Tensor], spelling: str) -> dict[str, Tensor]:
    """Return the tensors of a Qwen as another project names them."""
    qwen, other = SPELLINGS["Qwen"], SPELLINGS[spelling]
    inner = [
        f"model.layers.0.{name.removeprefix('mtp.layers.0.')}"
        for name in own
        if name.startswith("mtp.layers.0.")
    ]
    ours = [*inner, *(f"{module}.weight" for module in ("fc", "token_norm", "state_norm", "model.norm"))]
    made = {other.stored(name, 8): own[qwen.stored(name, 8)] for name in ours}
    if other.states_first:
        join = other.stored("fc.weight", 8)
        made[join] = made[join].roll(64, 1).contiguous()
    return made


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("within", [True, False], ids=["within the model", "apart"])
def test_every_spelling_is_read(spelling: str, within: bool, tmp_path: Path) -> None:
    folder, own = without(saved()[0], tmp_path)
    made = respelled(own, spelling)
    if within:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        rewrite(folder, lambda tensors: tensors | made)
        return check(folder)
    head = tmp_path / "head"
    head.mkdir()
    save_file(made, head / "model.safetensors")
    return check(folder, draft=str(head))


def behind(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of the layer behind the model's own, and those outside layers, as llama.cpp's converter does."""
    return {
        name: each
        for name, each in tensors.items()
        if not name.startswith("blk.") or name.startswith("blk.8.")
    }


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("within", [True, False], ids=["within the file", "apart"])
def test_gguf_files(kind: str, within: bool, tmp_path: Path) -> None:
    folder, tokens, expected = saved("float32", hidden_size=128, intermediate_size=128)
    copy = tmp_path / "target"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    whole = write_gguf(copy, tmp_path / "whole.gguf", kind)
    if within:
        found = drafted(whole, tokens)
    else:
        head = write_gguf(copy, tmp_path / "mtp-model.gguf", kind, tensors=behind)
        without(folder, tmp_path / "rest")
        found = drafted(
            write_gguf(tmp_path / "rest" / "target", tmp_path / "rest.gguf", kind), tokens, draft=str(head)
        )
        with pytest.raises(
            ForedraftError, match="holds only the layer that predicts further tokens; give the model's"
        ):
            load(model=str(head))
    far = torch.cat([found[anchor] - logits for anchor, logits in expected.items()])
    bound = 1e-5 if kind == "F32" else 0.2
    assert float(far.std()) < bound * float(torch.cat([*expected.values()]).std())


def test_a_model_without_one_says_so(tmp_path: Path) -> None:
    folder, _ = without(saved()[0], tmp_path)
    with pytest.raises(ForedraftError, match=r"mtp needs a head that predicts further tokens \(MTP\)"):
        load(model=str(folder), drafter="mtp")
    llm = load(model=str(folder), max_length=64)
    assert "mtp" not in llm.loaded.engine.drafters
    llm.close()


def test_codes_of_few_bits(tmp_path: Path) -> None:
    folder, tokens, expected = saved("bfloat16", hidden_size=128, intermediate_size=128)
    found = drafted(folder, tokens, weights="int8")
    far = torch.cat([found[anchor] - logits for anchor, logits in expected.items()])
    assert float(far.std()) < 0.2 * float(torch.cat([*expected.values()]).std())


# settings with which the head of a file is read otherwise than it was made, and what undoes each
MISREAD: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "states_first": lambda own: own | {"mtp.fc.weight": own["mtp.fc.weight"].roll(64, 1).contiguous()},
    "folded_norms": lambda own: {name: each + 1 if each.dim() == 1 else each for name, each in own.items()},
}


@pytest.mark.parametrize("setting", MISREAD)
def test_settings_of_the_doctor_undo_what_a_converter_changed(setting: str, tmp_path: Path) -> None:
    folder, own = without(saved()[0], tmp_path)
    rewrite(folder, lambda tensors: tensors | MISREAD[setting](own))
    with pytest.raises(AssertionError):
        check(folder)
    write_settings(folder, HeadSettings(**{setting: True}))
    check(folder)


def test_the_doctor_tries_every_misreading(tmp_path: Path) -> None:
    folder, _, _ = saved()
    llm = load(model=str(folder), drafter="mtp", policy="fixed", max_length=128)
    texts = [torch.randint(3, 320, (48,)).tolist()]
    tried = {
        name for trial in diagnose(llm.loaded, folder, texts, write=False).trials for name in trial.settings
    }
    llm.close()
    assert {"final_norm", "norm_output", "states_first", "folded_norms"} <= tried


def test_the_command_examines_the_model_s_own_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved()[0], tmp_path / "model")
    words = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2
    assert main(["doctor", words, "--model", str(folder), "--dry-run"]) == 0
    assert f"mtp {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(temperature: float) -> None:
    folder = saved("bfloat16")[0]
    texts = list[list[list[int]]]()
    for drafter in ("none", "mtp"):
        llm = load(
            model=str(folder), drafter=drafter, max_length=256, policy="fixed" if drafter == "mtp" else "auto"
        )
        params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=5)
        outputs = llm.generate([[5, 6, 7, 8], [9], list(range(3, 150))], params)
        texts.append([output.token_ids for output in outputs])
        drafted = sum(output.stats.drafted for output in outputs)
        assert drafted == 0 if drafter == "none" else drafted > 100
        llm.close()
    assert texts[0] == texts[1]


def shaken(own: dict[str, Tensor]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    return {name: each + 0.1 * torch.randn(each.shape, generator=random) for name, each in own.items()}


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_export_writes_a_trained_layer_into_the_model(shards: bool, tmp_path: Path) -> None:
    folder, own = without(saved()[0], tmp_path)
    rewrite(folder, lambda tensors: tensors | shaken(own))
    if shards:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        where = {name: f"model-{1 + (place % 2):05}-of-00002.safetensors" for place, name in enumerate(names)}
        for shard in set(where.values()):
            save_file(
                {name: tensors[name] for name in names if where[name] == shard},
                folder / shard,
                {"format": "pt"},
            )
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    head = tmp_path / "head"
    head.mkdir()
    save_file(own, head / "model.safetensors")
    with pytest.raises(AssertionError):
        check(folder)
    export_head(head, "checkpoint", tmp_path / "made", str(folder))
    check(tmp_path / "made")
    assert (tmp_path / "made" / "tokenizer.json").is_file()


def test_a_quantised_copy_keeps_the_layer(tmp_path: Path) -> None:
    folder, tokens, expected = saved("bfloat16", hidden_size=128, intermediate_size=128)
    assert (
        main(["quantise", "--model", str(folder), "--weights", "int8", "--out", str(tmp_path / "coded")]) == 0
    )
    found = drafted(tmp_path / "coded", tokens)
    far = torch.cat([found[anchor] - logits for anchor, logits in expected.items()])
    assert float(far.std()) < 0.2 * float(torch.cat([*expected.values()]).std())


def trained() -> tuple[MTPStudent, Packed, Tensor]:
    folder, tokens, _ = saved()
    options = options_for(str(folder), device="cpu")
    files = files_at(folder, checkpoint := find_target(options))
    record = files.record.for_target(checkpoint.spec, "the head")
    target = FrozenTarget(folder, torch.device("cpu"), torch.float32)
    student = MTPStudent(
        record, target.decoder, target.head_weight, steps=STEPS, decay=1.0, start=read_values(files)
    )
    document = Document(tuple(tokens), (True,) * len(tokens))
    packed = Packed.of([document, document], torch.device("cpu"))
    states = target.states(packed, student.aux_layers).aux_states
    assert states is not None
    return student, packed, states


def check_training() -> None:
    """What training computes of each step of a draft is what decoding drafts."""
    student, packed, states = trained()
    drafts, (_, tokens, expected) = student.drafts(packed, states, STEPS, sampled=False), saved()
    with torch.no_grad():
        for step in drafts.steps:
            logits = drafts.logits(step.left)
            for anchor, own in expected.items():
                for document in (0, 1):  # each has a column less that predicts than tokens
                    [place] = (step.anchors == anchor + document * (len(tokens) - 1)).nonzero()[:, 0].tolist()
                    far = (logits[place] - own[step.number]).abs().max() / own.abs().max()
                    assert far < 2e-5, (step.number, anchor, float(far))


def test_training_learns_what_decoding_drafts() -> None:
    check_training()


def test_what_is_trained_is_read_back(tmp_path: Path) -> None:
    folder = saved("bfloat16")[0]
    data, head = tmp_path / "data.txt", tmp_path / "head"
    data.write_text("def f(x): return x\n\n" * 200)
    options = MTPOptions(
        data=(data,), out=head, steps=2, validate_every=1, step_tokens=256, work=tmp_path / "work"
    )
    train(options, str(folder), device="cpu")
    again = replace(options, from_head=head, out=tmp_path / "again", work=tmp_path / "more")
    train(again, str(folder), device="cpu")
    found = load_file(head / "model.safetensors")
    assert set(found) == set(without(folder, tmp_path)[1])
    changed = load_file(tmp_path / "again" / "model.safetensors")
    assert any(not torch.equal(changed[name], found[name]) for name in found)
    llm = load(model=str(folder), draft=str(head), max_length=64)
    assert "mtp" in llm.loaded.engine.drafters
    llm.close()


def check_operators() -> None:
    check(kernels=False)


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_training: [
        ("training without gates", head_students._gated, lambda _: lambda attended, gates: attended),
    ],
    check_operators: [
        ("the raw state recurs", Eagle3Head.recurring, lambda _: lambda head, left: left),
        ("the state before the final norm is read", Eagle3Head.joined, lambda _: lambda head, states: states),
        (
            "halves in the other order", Eagle3Head.entering,
            around(lambda work, head, pairs: work(head, pairs.roll(64, 1))),
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
