"""Students: what is trained, with their parameters in float32, and the losses by which they learn.

One class a kind of drafter; the loop knows none. A module here is a source for `model.weights`, so what is
trained has the arithmetic of what decodes, and the names of what is written.

Losses stand between the target's distribution p and the drafter's q, by position, a few positions at a time:
the logits of 4,096 positions over 128,256 ids take 2.1 GB, so head, comparison and their backward pass run on
`CHUNK` positions, and only the gradients of what goes in are kept.

    ce           −Σ p log q                the reference's (Kangaroo, arXiv:2404.18911)
    kl           Σ p (log p − log q)       ce less p's entropy: the same gradient, and 0 where q is p
    reverse-kl   Σ q (log q − log p)       weighs the tokens that the drafter proposes
    tv           1 − Σ min(p, q)           1 − α, the probability of a rejection
    lk           λ kl + (1 − λ) tv         with λ = e^(−3 α); a loss of the project speculators (Apache-2.0)

A mixture is a sum with weights. A reduced head's sums run over its tokens, with p as it is: tv stays 1 − α.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foredraft.drafters.kangaroo import VOCABULARY, adapter_spec
from foredraft.model.checkpoint import Shapes
from foredraft.model.decoder import Decoder, Layer
from foredraft.model.layer_weights import TensorSource
from foredraft.model.layers import Linear, Norm
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import EMBEDDING, HEAD, POSITIONS
from foredraft.model.weights import SizeCounter, build_layer, build_norm
from foredraft.train.target import Packed, PackedPass

CHUNK = 256  # positions: few enough for a processor's caches, and enough that products are efficient
Rows = slice | Tensor  # some of the predictions
# (logits of predictions, which ones) -> float32 [2]: the loss, and a figure without gradient
Compare = Callable[[Tensor, Rows], Tensor]


def by_chunks(compare: Callable[[Tensor, slice], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the sum of `compare` over all chunks of x [M, hidden], [2]; its first value has a gradient."""
    found: Tensor = _ByChunks.apply(compare, x, *parameters)  # type: ignore[no-untyped-call]
    return found


class _ByChunks(torch.autograd.Function):
    """The gradients are computed with the loss, while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any, compare: Callable[[Tensor, slice], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        learned = [
            value for value, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True) if needed
        ]
        sums = torch.zeros(2, device=x.device)
        of_x, of_learned = torch.zeros_like(x), [torch.zeros_like(value) for value in learned]
        for first in range(0, len(x), CHUNK):
            rows = slice(first, first + CHUNK)
            with torch.enable_grad():
                part = x[rows].detach().requires_grad_()
                own = compare(part, rows)
                of_x[rows], *gradients = torch.autograd.grad(own[0], [part, *learned])
            for sum_, gradient in zip(of_learned, gradients, strict=True):
                sum_ += gradient
            sums += own.detach()
        ctx.save_for_backward(of_x, *of_learned)
        return sums

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        scale = given[0][0]  # of the loss
        of_x, *of_learned = (gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors)
        rest = iter(of_learned)
        return None, of_x, *(next(rest) if needed else None for needed in ctx.needs_input_grad[2:])


Loss = Callable[[Tensor, Tensor], Tensor]  # (log p, log q), [M, V] each -> [M]
LK_SLOPE = 3.0  # of λ's exponent in α


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ min(p, q) by position, [M]: the probability that a drafted token is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the cross-entropy less the entropy of p."""
    finite = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # 0 log 0 is 0
    return cross_entropy(log_p, log_q) + (log_p.exp() * finite).sum(-1)


def likelihood_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return λ kl + (1 − λ) tv; λ is no variable of the gradient."""
    distance = 1 - overlap(log_p, log_q)
    weight = torch.exp(-LK_SLOPE * (1 - distance.detach()))
    return weight * forward_kl(log_p, log_q) + (1 - weight) * distance


FUNCTIONS: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "reverse-kl": lambda log_p, log_q: (log_q.exp() * (log_q - log_p)).sum(-1),
    "tv": lambda log_p, log_q: 1 - overlap(log_p, log_q),
    "lk": likelihood_kl,
}  # of the names in `options.LOSSES`


def mixture(weights: Mapping[str, float]) -> Loss:
    """Return the sum of losses with these weights."""

    def loss(log_p: Tensor, log_q: Tensor) -> Tensor:
        terms = [weight * FUNCTIONS[name](log_p, log_q) for name, weight in weights.items()]
        return torch.stack(terms).sum(0)

    return loss


Part = TypeVar("Part")
DEVIATION = 0.02  # of weights that start at random, as transformers draws them


class Parameters(nn.Module):
    """Parameters of a part of a model. A name of a checkpoint has dots, which a module's may not have."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        self.device, self.dtype = device, torch.float32
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.empty(shape, device=device)))

    def load(self, shapes: Shapes) -> Tensor:
        """Return the joined parameters; part of `model.weights.TensorSource`."""
        found = [getattr(self, name.replace(".", "/")) for name in shapes]
        return found[0] if len(found) == 1 else torch.cat(found)

    load_temporary = load

    def free_temporary(self) -> None:
        """There is no temporary memory."""

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters by the names of a checkpoint."""
        return {name.replace("/", "."): value for name, value in self.named_parameters()}

    @torch.no_grad()
    def draw(self, random: torch.Generator, *, norm: float) -> None:
        """Draw matrices from a normal distribution, and set norms to `norm`, scalars to 1 and biases to 0."""
        for name, value in self.by_name.items():
            if value.dim() > 1:
                drawn = torch.randn(value.shape, generator=random) * DEVIATION
                value.copy_(drawn)
            else:
                is_norm = "norm" in name and not name.endswith(".bias")
                value.fill_(norm if is_norm else float(name.endswith("layer_scalar")))

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of all parameters from tensors by the same names."""
        for name, value in self.by_name.items():
            value.copy_(tensors[name])


class TrainedPart(Parameters, Generic[Part]):
    """A part of a model, which `build` makes of a source of tensors."""

    def __init__(self, build: Callable[[TensorSource], Part], device: torch.device) -> None:
        counter = SizeCounter()
        build(counter)
        super().__init__(counter.shapes, device)
        self._build = build

    def made(self) -> Part:
        """Return the part over the parameters as they are now."""
        return self._build(self)


class TrainedLayer(TrainedPart[Layer]):
    """A layer, with or without an MLP; `index` is its place in the model that it is part of."""

    def __init__(self, spec: ModelSpec, device: torch.device, *, index: int = 0, mlp: bool = True) -> None:
        super().__init__(lambda source: build_layer(spec, source, index, mlp=mlp), device)
        self._index = index

    def forward(self, x: Tensor, pass_: PackedPass) -> Tensor:
        """Return the states [N, hidden] that leave the layer."""
        return pass_.run([self.made()], x, self._index)


def trained_norm(spec: ModelSpec, device: torch.device) -> TrainedPart[Norm]:
    """Return the norm after the last layer."""
    return TrainedPart(lambda source: build_norm(spec, source), device)


# (logits of predictions, which ones) -> [n, 2]: the probability of acceptance, and whether both argmax agree
Accept = Callable[[Tensor, Rows], Tensor]


class DraftStep(NamedTuple):
    """One step of some drafts."""

    number: int
    left: Tensor  # the states that give its logits, [A, d]
    anchors: Tensor  # the prediction that each draft begins with, [A], among the M that count
    reached: Tensor  # the prediction that this step makes, [A], among the same


class Drafts(NamedTuple):
    """Drafts of a student, which begin at all predictions or at a sample of them."""

    logits: Callable[[Tensor], Tensor]  # of the states that a step leaves
    parameters: Sequence[Tensor]  # that these are computed with
    steps: Iterator[DraftStep]


class Student(nn.Module):
    """Base class of what is trained."""

    aux_layers: tuple[int, ...] = ()  # the depths at which it reads the target's states; none: tokens alone
    steps: int = 1  # tokens of a draft that are learned at every position
    decay: float = 1.0  # weight of each of them against the one before
    stride: int = 1  # columns that an anchor stands for in training
    vocabulary: Tensor | None = None  # the token ids that it has logits for, [n] int64; None is all

    def drafts(self, packed: Packed, states: Tensor | None, steps: int, *, sampled: bool) -> Drafts:
        """Return drafts of so many steps; `states` are [N, layers * hidden]."""
        raise NotImplementedError

    def forward(
        self,
        packed: Packed,
        states: Tensor | None,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> Tensor:
        """Return the logits, or what comparing them gives: those of step 0, as the figure of `compare`.

        The loss of step k counts `decay`^k. A column without a column before it has logits of 0, and is never
        accepted.
        """
        device, count = packed.tokens.device, len(packed.predicting)
        sums, everywhere = torch.zeros(2, device=device), torch.zeros(count, 0, device=device)
        accepted = torch.zeros(count, self.steps, 2, dtype=torch.float64, device=device)
        steps = 1 if compare is None and accept is None else self.steps
        logits_of, parameters, drafted = self.drafts(packed, states, steps, sampled=compare is not None)
        for number, left, anchors, reached in drafted:
            if compare is not None:

                def compared(part: Tensor, rows: slice, reached: Tensor = reached) -> Tensor:
                    return compare(logits_of(part), reached[rows])

                weights = torch.tensor([self.decay**number, float(number == 0)], device=device)
                sums = sums + by_chunks(compared, left, parameters) * (weights * self.stride)
            elif accept is None:
                logits = logits_of(left)
                everywhere = everywhere if everywhere.shape[1] else logits.new_zeros(count, logits.shape[1])
                everywhere = everywhere.index_put((anchors,), logits)
            elif len(left):
                parts = zip(torch.split(left, CHUNK), torch.split(reached, CHUNK), strict=True)
                found = torch.cat([accept(logits_of(part), rows) for part, rows in parts])
                accepted[anchors, number] = found
        return sums if compare is not None else everywhere if accept is None else accepted

    def tensors(self) -> dict[str, Tensor]:
        """Return what is written, by the names of a checkpoint, in float32."""
        raise NotImplementedError

    def shards(self) -> Iterable[nn.Module]:
        """Return the parts that `fully_shard` gathers one at a time."""
        return ()


class AdapterStudent(Student):
    """An adapter over the target's first layers, which starts as a layer and the last norm of the target."""

    def __init__(
        self,
        target: ModelSpec,  # the target; its head is used, frozen
        head: Tensor,  # the head's weight, [V, hidden]
        start: dict[str, Tensor],  # their tensors, by the adapter's names
        depth: int,  # layers of the target below the adapter
        *,
        mlp: bool,  # the adapter has an MLP
        vocabulary: Sequence[int] | None = None,  # the token ids of a reduced head, ascending; None keeps all
        bias: Tensor | None = None,  # the head's bias, [V]; None if it has none
    ) -> None:
        super().__init__()
        self.depth, self.aux_layers, self.spec = depth, (depth,), adapter_spec(target)
        device = head.device
        self.layer = TrainedLayer(self.spec, device, mlp=mlp)
        self.norm = trained_norm(self.spec, device)
        if vocabulary is not None:
            self.vocabulary = torch.tensor(vocabulary, device=device)
            head = head[self.vocabulary]
            bias = None if bias is None else bias[self.vocabulary]
        self.head, self.bias = head, bias
        for part in (self.layer, self.norm):
            part.fill(start)

    def drafts(self, packed: Packed, states: Tensor | None, steps: int, *, sampled: bool) -> Drafts:
        assert states is not None
        x = self.layer(states, PackedPass(self.spec, packed, states.dtype))
        return _drafts(self.spec, self.norm, self.head, self.bias, x[packed.predicting])

    def tensors(self) -> dict[str, Tensor]:
        own = {} if self.vocabulary is None else {VOCABULARY: self.vocabulary}
        return {**self.layer.by_name, **self.norm.by_name, **own}

    def shards(self) -> Iterable[nn.Module]:
        return [self.layer]


class DraftStudent(Student):
    """A small model with the target's tokenizer."""

    def __init__(
        self,
        spec: ModelSpec,  # the small model
        device: torch.device,  # where it is
        start: dict[str, Tensor] | None,  # tensors to start from, by name; None draws them from `seed`
        *,
        seed: int = 0,  # of the first weights
        checkpointed: bool = False,  # recompute each layer's activations in the backward pass, to save memory
    ) -> None:
        super().__init__()
        self.spec, self.checkpointed = spec, checkpointed
        size = (spec.vocab_size, spec.hidden_size)
        names: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": size}
        names |= {} if spec.tied else {f"{HEAD}.weight": size}
        names |= {f"{HEAD}.bias": size[:1]} if spec.head_bias else {}
        if spec.learned_positions:
            names[f"{POSITIONS}.weight"] = (spec.learned_positions, spec.hidden_size)
        self.ends = Parameters(names, device)
        self.layers = nn.ModuleList(TrainedLayer(spec, device, index=index) for index in range(spec.layers))
        self.norm = trained_norm(spec, device)
        random = torch.Generator().manual_seed(seed)
        for part in self._parts():
            part.draw(random, norm=0.0 if spec.norm_offset else 1.0)
            if start is not None:
                part.fill(start)

    def drafts(self, packed: Packed, states: Tensor | None, steps: int, *, sampled: bool) -> Drafts:
        ends = self.ends.by_name
        embedding = ends[f"{EMBEDDING}.weight"]
        x = nn.functional.embedding(packed.tokens, embedding)
        if self.spec.embedding_scale is not None:
            x = x * self.spec.embedding_scale
        if self.spec.learned_positions:
            rows = packed.positions + self.spec.position_offset
            x = x + nn.functional.embedding(rows, ends[f"{POSITIONS}.weight"])
        pass_ = PackedPass(self.spec, packed, x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, pass_, use_reentrant=False) if self.checkpointed else layer(x, pass_)
        head, bias = ends.get(f"{HEAD}.weight", embedding), ends.get(f"{HEAD}.bias")
        return _drafts(self.spec, self.norm, head, bias, x[packed.predicting])

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for part in self._parts() for name, value in part.by_name.items()}

    def shards(self) -> Iterable[nn.Module]:
        return self.layers

    def _parts(self) -> list[Parameters]:
        layers = [layer for layer in self.layers if isinstance(layer, Parameters)]
        return [self.ends, *layers, self.norm]


def _drafts(
    spec: ModelSpec, norm: TrainedPart[Norm], head: Tensor, bias: Tensor | None, left: Tensor
) -> Drafts:
    """Return drafts of one step from the states that leave the last layer."""
    places = torch.arange(len(left), device=left.device)
    return Drafts(
        Decoder(spec, head, (), norm.made(), Linear(head, bias)).head,
        [*norm.parameters(), head, *([] if bias is None else [bias])],
        iter([DraftStep(0, left, places, places)]),
    )
