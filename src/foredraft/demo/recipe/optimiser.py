"""Muon for the matrices, AdamW for embeddings and norms, over bfloat16 weights with float32 masters.

Contract: `Optimiser.step` reads `.grad` of every parameter, updates the float32 masters and writes them
back rounded; its whole state is the dictionary `state()` returns.

Muon: K. Jordan et al., 2024; scale 0.2 * sqrt(max side) so that one learning rate serves both rules:
arXiv:2502.16982; coefficients of the orthogonalisation: Polar Express, arXiv:2505.16932.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
FUSED = {"qkv": 3, "gate_up": 2}  # parameters that stack several matrices


@dataclass(frozen=True)
class Rates:
    """Hyper-parameters that stay fixed over a run."""

    matrix: float = 3e-3
    vector: float = 3e-3
    momentum: float = 0.95
    decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98


def orthogonalise(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: singular values pushed towards 1."""
    x = x.to(torch.bfloat16)  # [n, R, C] with R <= C
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x


@dataclass(frozen=True)
class Worker:
    """One of the processes that share a step."""

    rank: int = 0
    count: int = 1


def owner(name: str, extra: int) -> int:
    """Who updates a parameter, before the remainder by the number of workers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else extra


def is_vector(name: str, weight: Tensor) -> bool:
    """Whether AdamW, not Muon, trains a parameter."""
    return weight.dim() < 2 or name == "embed"


@dataclass(frozen=True)
class Slot:
    """One matrix of a (possibly fused) parameter; tall ones are handled transposed."""

    name: str
    rows: slice
    tall: bool

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        matrix = tensors[self.name][self.rows]
        return matrix.t() if self.tall else matrix


def group_slots(parameters: dict[str, nn.Parameter]) -> dict[tuple[int, int], list[Slot]]:
    """Matrices by (short side, long side), so that equal shapes are orthogonalised in one batch."""
    groups: dict[tuple[int, int], list[Slot]] = {}
    for name, weight in parameters.items():
        parts = FUSED.get(name.rpartition(".")[2], 1)
        rows, columns = weight.shape[0] // parts, weight.shape[1]
        for part in range(parts):
            slot = Slot(name, slice(part * rows, (part + 1) * rows), rows > columns)
            groups.setdefault((min(rows, columns), max(rows, columns)), []).append(slot)
    return groups


class Optimiser:
    """Masters and moments of one model; a worker updates its share of the parameters.

    Layers go to workers in turn, and what belongs to no layer to worker `extra`.
    """

    def __init__(self, model: nn.Module, rates: Rates, worker: Worker, extra: int = 0) -> None:
        self.rates, self.steps = rates, 0
        self.parameters = dict(model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        vectors = [n for n, p in self.parameters.items() if is_vector(n, p)]
        self.second = {name: torch.zeros_like(self.masters[name]) for name in vectors}
        self.owned = [n for n in self.parameters if owner(n, extra) % worker.count == worker.rank]
        self.vectors = [n for n in vectors if n in self.owned]
        self.groups = group_slots({n: self.parameters[n] for n in self.owned if n not in vectors})

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], scale: float) -> None:
        """One update of the owned parameters at `scale` times the peak rates; consumes `grads`."""
        self.steps += 1
        self._step_matrices(grads, scale * self.rates.matrix)
        self._step_vectors(grads, scale * self.rates.vector)
        for name in self.owned:
            self.parameters[name].copy_(self.masters[name])

    def _step_matrices(self, grads: dict[str, Tensor], rate: float) -> None:
        momentum = self.rates.momentum
        for (_, long), slots in self.groups.items():
            for name in {slot.name: None for slot in slots}:
                self.first[name].lerp_(grads[name], 1 - momentum)
                grads[name].lerp_(self.first[name], momentum)  # Nesterov
                self.masters[name].mul_(1 - rate * self.rates.decay)
            updates = orthogonalise(torch.stack([slot.read(grads) for slot in slots]))
            for slot, update in zip(slots, updates, strict=True):
                slot.read(self.masters).add_(update.float(), alpha=-rate * 0.2 * long**0.5)

    def _step_vectors(self, grads: dict[str, Tensor], rate: float) -> None:
        beta1, beta2 = self.rates.beta1, self.rates.beta2
        for name in self.vectors:
            first, second = self.first[name], self.second[name]
            first.lerp_(grads[name], 1 - beta1)
            second.lerp_(grads[name].square(), 1 - beta2)
            scale = (second / (1 - beta2**self.steps)).sqrt_().add_(1e-10)
            self.masters[name].addcdiv_(first, scale, value=-rate / (1 - beta1**self.steps))

    def state(self) -> dict[str, object]:
        """Everything a later run needs; complete in every worker, because the tensors are shared."""
        return {"steps": self.steps, "masters": self.masters, "first": self.first, "second": self.second}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`, weights included."""
        self.steps = state["steps"]
        for mine, name in ((self.masters, "masters"), (self.first, "first"), (self.second, "second")):
            theirs = state[name]
            assert theirs.keys() == mine.keys()
            for key, tensor in mine.items():
                tensor.copy_(theirs[key])
        for name, weight in self.parameters.items():
            weight.copy_(self.masters[name])
