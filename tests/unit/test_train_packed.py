"""Packed documents: the arithmetic of decoding, without sight of a neighbour; students of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft.drafters.adapter_kinds import WITH_MLP
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.runner import Runner
from foredraft.model.tensor_layouts import written
from foredraft.model.weights import layer_tensors, load_decoder, read_tensors
from foredraft.train.packed_documents import Document, Packed, PackedPass
from foredraft.train.parameters import Parameters, TrainedNorm
from foredraft.train.students import AdapterStudent, DraftStudent
from foredraft.train.target import FrozenTarget
from tests.support.checkpoints import FAMILIES, save_checkpoint
from tests.support.planting import assert_caught, defect

CPU = torch.device("cpu")
LENGTHS = (30, 30, 7, 55, 1)  # two of one length; one longer than the window of 24; one without a prediction


def documents(counted_from: int = 0) -> list[Document]:
    random = torch.Generator().manual_seed(0)
    made = [tuple(torch.randint(3, 97, (n,), generator=random).tolist()) for n in LENGTHS]
    return [Document(ids, tuple(at >= counted_from for at in range(len(ids)))) for ids in made]


def alone(decoder: Decoder, document: Document) -> torch.Tensor:
    """Return the logits of decoding, [T, V]."""
    runner = Runner(decoder)
    cache = runner.new_cache(1, 64)
    logits = runner.forward(cache, torch.tensor([document.ids]), [0]).logits
    assert logits is not None
    return logits[0]


def check_packed(folder: Path, family: str) -> None:
    """Check the logits of the frozen target against those of decoding each document alone."""
    target = FrozenTarget(save_checkpoint(folder / family, family), CPU, torch.float32)
    packed = Packed.of(documents(), CPU)
    for taps in ((), (1,)):
        found = target.decoder.head(target.states(packed, taps).last)
        kernels = load_decoder(folder / family, dtype=torch.float32, native=True)
        want = torch.cat([alone(kernels, each)[:-1] for each in documents()])
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_logits_of_decoding(family: str, tmp_path: Path) -> None:
    check_packed(tmp_path, family)


def test_the_predicting_columns_are_those_before_a_token_that_counts() -> None:
    packed = Packed.of(
        [Document((5, 6, 7, 8), (True, False, True, True)), Document((9, 9), (True, True))], CPU
    )
    assert packed.predicting.tolist() == [
        1,
        2,
        4,
    ]  # never the first token of a document, nor from another one
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert Document((5, 6), (True, False)).counted == 0


def neighbours_seen(attend: Callable[..., Any]) -> Callable[..., Any]:
    """All documents attend as one."""

    def spoilt(pass_: PackedPass, index: int, qkv: torch.Tensor) -> Any:
        lengths = pass_.packed.lengths
        object.__setattr__(pass_.packed, "lengths", (sum(lengths),))
        try:
            return attend(pass_, index, qkv)
        finally:
            object.__setattr__(pass_.packed, "lengths", lengths)

    return spoilt


def positions_go_on(positions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda packed: torch.arange(len(packed.tokens)) % max(packed.lengths)


def ends_predict(of: Callable[..., Any]) -> Callable[..., Any]:
    """The last column of a document predicts the first token of the next."""

    def spoilt(cls: type[Packed], given: list[Document], device: torch.device) -> Packed:
        made: Packed = of(cls, given, device)
        counts = [n for each in given for n in each.counts][1:]
        object.__setattr__(made, "predicting", torch.tensor([*counts, False]).nonzero()[:, 0])
        return made

    return spoilt


def check_predicting() -> None:
    test_the_predicting_columns_are_those_before_a_token_that_counts()


@pytest.mark.parametrize(
    ("seam", "spoiler"),
    [(PackedPass._attend, neighbours_seen), (Packed.positions, positions_go_on)],
    ids=["neighbours seen", "positions that go on"],
)
def test_a_defect_of_packing_is_caught(
    seam: Any, spoiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(defect("packing", seam, spoiler, lambda: check_packed(tmp_path, "llama")), monkeypatch)


def test_a_last_column_that_predicts_the_next_document_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(defect("ends predict", Packed.of, ends_predict, check_predicting), monkeypatch)


# --- students -----------------------------------------------------------------------------------------------


def adapter_student(folder: Path, family: str, **more: Any) -> tuple[FrozenTarget, AdapterStudent]:
    target = FrozenTarget(save_checkpoint(folder / family, family), CPU, torch.float32)
    start = layer_tensors(folder / family, target.spec.layers - 1)
    options = {"depth": target.spec.layers - 1, "mlp": True, "bias": target.head_bias, **more}
    return target, AdapterStudent(target.spec, target.head_weight.clone(), start, **options)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_an_adapter_starts_as_the_targets_last_layer(family: str, tmp_path: Path) -> None:
    """At that layer's depth it has the target's logits, but for a window of the layer, and its rotation then."""
    target, student = adapter_student(tmp_path, family)
    packed = Packed.of([each for each in documents() if len(each.ids) < 24], CPU)
    states = target.states(packed, student.taps)
    torch.testing.assert_close(
        student(packed, states.tapped).detach(), target.decoder.head(states.last), rtol=1e-4, atol=1e-4
    )


def check_gradients(folder: Path, family: str, kind: str = WITH_MLP) -> None:
    """Check the gradient of every parameter against a finite difference."""
    target, student = adapter_student(folder, family, mlp=kind == WITH_MLP)
    student.double()
    student.head = student.head.double()
    student.bias = None if student.bias is None else student.bias.double()
    packed = Packed.of(documents()[1:4], CPU)
    tapped = target.states(packed, student.taps).tapped
    assert tapped is not None
    direction = torch.Generator().manual_seed(1)
    weights = torch.randn(len(packed.predicting), 97, generator=direction, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (student(packed, tapped.double()).double().log_softmax(-1) * weights).sum()

    loss().backward()
    for name, value in student.named_parameters():
        assert value.grad is not None and value.grad.abs().max() > 0, f"{name} gets no gradient"
        step = torch.randn(value.shape, generator=direction, dtype=torch.float64) * 1e-4
        slope = (value.grad * step).sum().item()
        with torch.no_grad():
            value += step
            up = loss().item()
            value -= 2 * step
            down = loss().item()
            value += step
        assert slope == pytest.approx((up - down) / 2, rel=0.05, abs=1e-4), name


@pytest.mark.parametrize("kind", ["attention", WITH_MLP])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_an_adapter_learns(family: str, kind: str, tmp_path: Path) -> None:
    check_gradients(tmp_path, family, kind)


def output_discarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """The defect of a public training code: the residual alone leaves the adapter."""

    def spoilt(pass_: PackedPass, layers: list[Layer], x: torch.Tensor, first: int = 0) -> torch.Tensor:
        made: torch.Tensor = run(pass_, layers, x, first)
        return x + 0 * made

    return spoilt


def norms_frozen(load: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(parameters: Parameters, shapes: Any) -> torch.Tensor:
        made: torch.Tensor = load(parameters, shapes)
        return made.detach() if made.dim() == 1 else made

    return spoilt


@pytest.mark.parametrize(
    ("seam", "spoiler"),
    [(PackedPass.run, output_discarded), (Parameters.load, norms_frozen)],
    ids=["adapter's output discarded", "norms frozen"],
)
def test_a_defect_of_a_student_is_caught(
    seam: Any, spoiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(defect("student", seam, spoiler, lambda: check_gradients(tmp_path, "llama")), monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_draft_student_with_all_layers_is_the_target(
    family: str, checkpointed: bool, tmp_path: Path
) -> None:
    target = FrozenTarget(save_checkpoint(tmp_path / family, family), CPU, torch.float32)
    weights = read_tensors(tmp_path / family, lambda name: True)
    student = DraftStudent(target.spec, CPU, weights, checkpointed=checkpointed)
    packed = Packed.of(documents(), CPU)
    logits = student(packed, None)
    want = target.decoder.head(target.states(packed, ()).last)
    torch.testing.assert_close(logits.detach(), want, rtol=1e-4, atol=1e-4)
    logits.log_softmax(-1).pow(2).sum().backward()
    assert all(value.grad is not None and value.grad.abs().max() > 0 for value in student.parameters())
    stored = load_file(tmp_path / family / "model.safetensors")
    assert written(target.spec.naming, student.tensors()).keys() == {
        name for name in stored if name != "lm_head.weight" or not target.spec.tied
    }


def test_weights_that_start_at_random_follow_the_seed(tmp_path: Path) -> None:
    spec = FrozenTarget(save_checkpoint(tmp_path / "m", "gemma2"), CPU, torch.float32).spec
    first, again, other = (DraftStudent(spec, CPU, None, seed=seed).tensors() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert isinstance(TrainedNorm(spec, CPU).norm().weight, torch.Tensor)
    assert not first["model.norm.weight"].any(), "Gemma's norms multiply by 1 + weight"
