"""Students of training: losses and their gradients, packed documents against decoding, and chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.drafters.asset import WITH_MLP
from foredraft.errors import ConfigError
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.runner import Runner
from foredraft.model.tensor_names import written
from foredraft.model.weights import layer_tensors, load_decoder, read_tensors
from foredraft.train import students as losses
from foredraft.train import target as target_module
from foredraft.train.students import (
    FUNCTIONS,
    AdapterStudent,
    DraftStudent,
    Parameters,
    Student,
    mixture,
    overlap,
    trained_norm,
)
from foredraft.train.target import Document, FrozenTarget, Packed, PackedPass
from foredraft.train.training_options import LOSSES, parse_loss
from tests.support.checkpoints import ATTENDING as FAMILIES
from tests.support.checkpoints import save_checkpoint
from tests.support.hybrids import save_hybrid
from tests.support.mutation import Mutation, assert_caught, defect
from tests.support.mutations import around, instead

P, Q = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.2, 0.2, 0.6]]).double()
VALUES = {
    "ce": -(0.5 * math.log(0.2) + 0.3 * math.log(0.2) + 0.2 * math.log(0.6)),
    "kl": 0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3),
    "reverse-kl": 0.2 * math.log(0.4) + 0.2 * math.log(2 / 3) + 0.6 * math.log(3),
    "tv": 0.4,
    "lk": math.exp(-1.8) * (0.5 * math.log(2.5) + 0.3 * math.log(1.5) + 0.2 * math.log(1 / 3))
    + (1 - math.exp(-1.8)) * 0.4,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_value_of_a_loss(name: str) -> None:
    assert LOSSES.keys() == FUNCTIONS.keys() == VALUES.keys()
    assert FUNCTIONS[name](P.log(), Q.log()).item() == pytest.approx(VALUES[name])


def logits(seed: int, rows: int = 4, words: int = 7) -> Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", [*FUNCTIONS, "ce=0.1,tv=0.9"])
def test_the_gradient_of_a_loss(name: str) -> None:
    """Against finite differences in float64; λ of lk is no variable, so it is held."""
    log_p = logits(1).log_softmax(-1)
    start = logits(2)
    if name == "lk":
        with torch.no_grad():
            weight = torch.exp(-3 * overlap(log_p, start.log_softmax(-1)))

        def loss(q: Tensor) -> Tensor:
            log_q = q.log_softmax(-1)
            return weight * FUNCTIONS["kl"](log_p, log_q) + (1 - weight) * FUNCTIONS["tv"](log_p, log_q)

        own, other = start.clone().requires_grad_(), start.clone().requires_grad_()
        FUNCTIONS["lk"](log_p, own.log_softmax(-1)).sum().backward()
        loss(other).sum().backward()
        torch.testing.assert_close(own.grad, other.grad)
    else:
        made = mixture(parse_loss(name))

        def loss(q: Tensor) -> Tensor:
            return made(log_p, q.log_softmax(-1))

    assert torch.autograd.gradcheck(loss, start.clone().requires_grad_())


def test_tv_is_the_probability_of_a_rejection() -> None:
    """Against a count: drafts drawn from q, accepted with min(1, p / q)."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(Q[0], 200_000, replacement=True, generator=random)
    kept = torch.rand(len(drawn), generator=random) < (P[0] / Q[0])[drawn]
    assert kept.float().mean().item() == pytest.approx(1 - FUNCTIONS["tv"](P.log(), Q.log()).item(), abs=5e-3)


def test_the_sum_of_maxima_in_place_of_minima_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(_: object) -> Any:
        return lambda log_p, log_q: torch.maximum(log_p, log_q).exp().sum(-1)

    check = test_tv_is_the_probability_of_a_rejection
    assert_caught(defect("maxima", overlap, larger, check), monkeypatch)


def test_tokens_that_a_reduced_head_lacks_count_as_rejected() -> None:
    """q has two of the three tokens; tv stays 1 less the probability of acceptance."""
    log_p, log_q = P.log()[:, :2], torch.tensor([[0.9, 0.1]]).double().log()
    assert FUNCTIONS["tv"](log_p, log_q).item() == pytest.approx(1 - (0.5 + 0.1))
    assert FUNCTIONS["ce"](log_p, log_q).item() == pytest.approx(-(0.5 * math.log(0.9) + 0.3 * math.log(0.1)))


def test_a_token_that_the_target_never_says_adds_nothing() -> None:
    log_p = torch.tensor([[1.0, 0.0]]).log()
    log_q = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    for name in ("ce", "kl", "tv"):
        value = FUNCTIONS[name](log_p, log_q)
        assert value.isfinite().all()
        value.sum().backward()
    assert log_q.grad is not None and log_q.grad.isfinite().all()


@pytest.mark.parametrize("text", ["mse", "", "kl=0", "kl=-1", "kl=x", "kl=1,kl=2", "kl=inf", "kl,tv"])
def test_other_losses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ce, kl, reverse-kl, tv, lk"):
        parse_loss(text)


CPU = torch.device("cpu")
HYBRID = "hybrid"
LENGTHS = (30, 30, 7, 55, 1)  # two of one length; one longer than the window of 24; one without a prediction


def documents(counted_from: int = 0) -> list[Document]:
    random = torch.Generator().manual_seed(0)
    made = [tuple(torch.randint(3, 97, (n,), generator=random).tolist()) for n in LENGTHS]
    return [Document(ids, tuple(at >= counted_from for at in range(len(ids)))) for ids in made]


def alone(decoder: Decoder, document: Document) -> torch.Tensor:
    runner = Runner(decoder)
    cache = runner.new_cache(1, 64)
    logits = runner.forward(cache, torch.tensor([document.ids]), [0]).logits
    assert logits is not None
    return logits[0]


def saved(folder: Path, family: str) -> Path:
    if family != HYBRID:
        return save_checkpoint(folder / family, family)
    return save_hybrid(folder / family, vocab_size=97, num_hidden_layers=4)


def check_packed(folder: Path, family: str) -> None:
    target = FrozenTarget(saved(folder, family), CPU, torch.float32)
    packed = Packed.of(documents(), CPU)
    for aux_layers in ((), (1,)):
        found = target.decoder.head(target.states(packed, aux_layers).last)
        kernels = load_decoder(folder / family, dtype=torch.float32, native=True)
        want = torch.cat([alone(kernels, each)[:-1] for each in documents()])
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_packed_documents_have_the_logits_of_decoding(family: str, tmp_path: Path) -> None:
    check_packed(tmp_path, family)


def test_a_hybrid_reads_documents_by_operators_where_kernels_do_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "unserved_because", lambda *given: "they are off")
    check_packed(tmp_path, HYBRID)


def test_predicting_columns_precede_what_counts() -> None:
    """They never precede the first token of a document, nor belong to another one."""
    documents = [Document((5, 6, 7, 8), (True, False, True, True)), Document((9, 9), (True, True))]
    packed = Packed.of(documents, CPU)
    assert packed.predicting.tolist() == [1, 2, 4]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert Document((5, 6), (True, False)).counted == 0


@around
def neighbours_seen(attend: Callable[..., Any], pass_: PackedPass, index: int, qkv: torch.Tensor) -> Any:
    lengths = pass_.packed.lengths
    object.__setattr__(pass_.packed, "lengths", (sum(lengths),))
    try:
        return attend(pass_, index, qkv)
    finally:
        object.__setattr__(pass_.packed, "lengths", lengths)


positions_go_on = instead(lambda packed: torch.arange(len(packed.tokens)) % max(packed.lengths))


@around
def ends_predict(of: Callable[..., Any], cls: Any, given: list[Document], device: torch.device) -> Packed:
    made: Packed = of(cls, given, device)
    counts = [n for each in given for n in each.counts][1:]
    object.__setattr__(made, "predicting", torch.tensor([*counts, False]).nonzero()[:, 0])
    return made


# --- students -----------------------------------------------------------------------------------------------


def adapter_student(folder: Path, family: str, **more: Any) -> tuple[FrozenTarget, AdapterStudent]:
    target = FrozenTarget(saved(folder, family), CPU, torch.float32)
    start = layer_tensors(folder / family, target.spec.layers - 1)
    options = {"depth": target.spec.layers - 1, "mlp": True, "bias": target.head_bias, **more}
    return target, AdapterStudent(target.spec, target.head_weight.clone(), start, **options)


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "gemma3"), HYBRID])
def test_an_adapter_starts_as_the_targets_last_layer(family: str, tmp_path: Path) -> None:
    """At that layer's depth it has the target's logits, but for a window of the layer, and its rotation then."""
    target, student = adapter_student(tmp_path, family)
    packed = Packed.of([each for each in documents() if len(each.ids) < 24], CPU)
    states = target.states(packed, student.aux_layers)
    torch.testing.assert_close(
        student(packed, states.aux_states).detach(), target.decoder.head(states.last), rtol=1e-4, atol=1e-4
    )


def check_gradients(folder: Path, family: str, kind: str = WITH_MLP) -> None:
    target, student = adapter_student(folder, family, mlp=kind == WITH_MLP)
    student.double()
    student.head = student.head.double()
    student.bias = None if student.bias is None else student.bias.double()
    packed = Packed.of(documents()[1:4], CPU)
    aux_states = target.states(packed, student.aux_layers).aux_states
    assert aux_states is not None
    direction = torch.Generator().manual_seed(1)
    weights = torch.randn(len(packed.predicting), 97, generator=direction, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (student(packed, aux_states.double()).double().log_softmax(-1) * weights).sum()

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
@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_every_parameter_of_an_adapter_learns(family: str, kind: str, tmp_path: Path) -> None:
    check_gradients(tmp_path, family, kind)


@around
def output_discarded(
    run: Callable[..., Any], pass_: PackedPass, layers: list[Layer], x: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """The defect of a public training code: the residual alone leaves the adapter."""
    made: torch.Tensor = run(pass_, layers, x, first)
    return x + 0 * made


@around
def norms_frozen(load: Callable[..., Any], parameters: Parameters, shapes: Any) -> torch.Tensor:
    made: torch.Tensor = load(parameters, shapes)
    return made.detach() if made.dim() == 1 else made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_student_with_all_layers_is_the_target(family: str, checkpointed: bool, tmp_path: Path) -> None:
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
    assert isinstance(trained_norm(spec, CPU).made().weight, torch.Tensor)
    assert not first["model.norm.weight"].any(), "Gemma's norms multiply by 1 + weight"


# --- a loss that is taken a few positions at a time ---------------------------------------------------------

CHUNKED = ["llama", "gemma2"]  # an untied head; a tied one with soft-capped logits and norms of 1 + weight


def student_of_kind(folder: Path, family: str, kind: str) -> tuple[FrozenTarget, Student]:
    target, adapter = adapter_student(folder, family)
    if kind == "adapter":
        return target, adapter
    return target, DraftStudent(target.spec, CPU, load_file(folder / family / "model.safetensors"))


def check_chunks(folder: Path, family: str, kind: str) -> None:
    target, student = student_of_kind(folder, family, kind)
    packed = Packed.of(documents(), CPU)
    aux_states = target.states(packed, student.aux_layers).aux_states
    random = torch.Generator().manual_seed(1)
    log_p = torch.randn(len(packed.predicting), 97, generator=random).log_softmax(-1)

    def compare(logits: Tensor, rows: slice) -> Tensor:
        log_q = logits.log_softmax(-1)
        return torch.stack([FUNCTIONS["lk"](log_p[rows], log_q).sum(), overlap(log_p[rows], log_q).sum()])

    def gradients(sums: Tensor) -> dict[str, Tensor]:
        (3 * sums[0]).backward()
        found = {name: value.grad for name, value in student.named_parameters() if value.grad is not None}
        student.zero_grad()
        assert found
        return found

    whole, by_chunks = compare(student(packed, aux_states), slice(None)), student(packed, aux_states, compare)
    torch.testing.assert_close(by_chunks.detach(), whole.detach())
    want, found = gradients(whole), gradients(by_chunks)
    assert found.keys() == want.keys() == dict(student.named_parameters()).keys()
    for name, gradient in found.items():
        assert (gradient - want[name]).abs().max() <= 1e-4 * want[name].abs().max(), name


@pytest.mark.parametrize("kind", ["adapter", "draft"])
@pytest.mark.parametrize("family", CHUNKED)
def test_gradients_are_whole(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 7)
    check_chunks(tmp_path, family, kind)


def test_nothing_to_predict_has_no_gradient(tmp_path: Path) -> None:
    target, student = student_of_kind(tmp_path, "llama", "adapter")
    assert isinstance(student, AdapterStudent)
    packed = Packed.of(documents(counted_from=99), CPU)
    aux_states = target.states(packed, student.aux_layers).aux_states
    sums = student(packed, aux_states, lambda *given: pytest.fail("called"))
    sums[0].backward()
    assert not sums.any() and all(not value.grad.any() for value in student.parameters())  # type: ignore[union-attr]


@around
def last_chunk_alone(forward: Any, compare: Callable[..., Tensor], x: Tensor, parameters: Any) -> Tensor:
    def compared(part: Tensor, rows: slice) -> Tensor:
        sums = compare(part, rows)
        if rows.stop < len(x):
            sums = sums.detach() + 0 * (part.sum() + sum(value.sum() for value in parameters))
        return sums

    found: Tensor = forward(compared, x, parameters)
    return found


factor_lost = around(lambda backward, ctx, given: backward(ctx, torch.ones_like(given)))

Check = Callable[[Path], None]
PACKED: Check = partial(check_packed, family="llama")
STUDENT: Check = partial(check_gradients, family="llama")
BY_CHUNKS: Check = partial(check_chunks, family="llama", kind="draft")
DEFECTS: dict[str, tuple[Any, Mutation, Check]] = {
    "neighbours seen": (PackedPass._attend, neighbours_seen, PACKED),
    "positions that go on": (Packed.positions, positions_go_on, PACKED),
    "last ones predict": (Packed.of, ends_predict, lambda _: test_predicting_columns_precede_what_counts()),
    "adapter's output discarded": (PackedPass.run, output_discarded, STUDENT),
    "norms frozen": (Parameters.load, norms_frozen, STUDENT),
    "all chunks but the last lost": (losses.by_chunks, last_chunk_alone, BY_CHUNKS),
    "the factor of the loss lost": (losses._ByChunks.backward, factor_lost, BY_CHUNKS),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point, mutation, check = DEFECTS[name]
    monkeypatch.setattr(losses, "CHUNK", 7)
    assert_caught(defect(name, point, mutation, partial(check, tmp_path)), monkeypatch)
