"""Muon for matrices and AdamW for embeddings and norms, with bfloat16 weights and float32 master weights.

Muon: K. Jordan et al., 2024. The update scale 0.2 * sqrt(longer side) lets one learning rate serve both
rules: arXiv:2502.16982. Coefficients of the orthogonalisation: Polar Express, arXiv:2505.16932.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

POLAR_EXPRESS = (  # coefficients (a, b, c) of each iteration
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
# parameters that stack several matrices; Muon updates each by itself
FUSED_MATRICES = {"qkv": 3, "gate_up": 2}


@dataclass(frozen=True)
class OptimiserConfig:
    """Hyper-parameters that stay fixed over a run."""

    matrix_lr: float = 3e-3  # peak, of Muon
    vector_lr: float = 3e-3  # peak, of AdamW
    momentum: float = 0.95  # of Muon
    weight_decay: float = 0.05  # decoupled, of Muon
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.98


def orthogonalise(x: Tensor) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrices [N, R, C], R <= C: singular values near 1."""
    x = x.to(torch.bfloat16)
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x


@dataclass(frozen=True)
class Worker:
    """One of the processes that share a training step."""

    rank: int = 0
    count: int = 1


def owner_rank(name: str, worker_count: int, default_rank: int) -> int:
    """Return the rank of the worker that updates a parameter: layers are dealt out in turn.

    Parameters outside the layers go to `default_rank`, before the remainder by the number of workers.
    """
    layer = int(name.split(".")[1]) if name.startswith("layers.") else default_rank
    return layer % worker_count


def uses_adamw(name: str, weight: Tensor) -> bool:
    """Return whether AdamW, and not Muon, updates a parameter."""
    return weight.dim() < 2 or name == "embed"


@dataclass(frozen=True)
class MatrixView:
    """One matrix of a parameter, which may stack several."""

    name: str
    rows: slice  # of the parameter that hold the matrix
    transposed: bool  # whether `read` transposes it, so that rows <= columns

    def read(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the view into `tensors[name]`."""
        matrix = tensors[self.name][self.rows]
        return matrix.t() if self.transposed else matrix


def group_by_shape(parameters: dict[str, nn.Parameter]) -> dict[tuple[int, int], list[MatrixView]]:
    """Return the matrices by (short side, long side): equal shapes are orthogonalised in one batch."""
    groups: dict[tuple[int, int], list[MatrixView]] = {}
    for name, weight in parameters.items():
        parts = FUSED_MATRICES.get(name.rpartition(".")[2], 1)
        rows, columns = weight.shape[0] // parts, weight.shape[1]
        for part in range(parts):
            view = MatrixView(name, slice(part * rows, (part + 1) * rows), rows > columns)
            groups.setdefault((min(rows, columns), max(rows, columns)), []).append(view)
    return groups


class Optimiser:
    """Master weights (float32) and moments of one model. Each worker updates its share of the parameters.

    The first moments are Muon's momentum or AdamW's; only parameters of AdamW have second ones.
    """

    def __init__(
        self, model: nn.Module, config: OptimiserConfig, worker: Worker, default_rank: int = 0
    ) -> None:
        """Start with the model's weights and zero moments; `default_rank` is that of `owner_rank`."""
        self.config, self.steps = config, 0
        self.parameters = dict(model.named_parameters())
        self.masters = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.first_moments = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        vectors = [name for name, p in self.parameters.items() if uses_adamw(name, p)]
        self.second_moments = {name: torch.zeros_like(self.masters[name]) for name in vectors}
        self.owned = [n for n in self.parameters if owner_rank(n, worker.count, default_rank) == worker.rank]
        self._vectors = [name for name in vectors if name in self.owned]
        self._matrices = group_by_shape({n: self.parameters[n] for n in self.owned if n not in vectors})

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], lr_scale: float) -> None:
        """Update the owned parameters and their bfloat16 weights. The float32 gradients are overwritten."""
        self.steps += 1
        self._step_matrices(gradients, lr_scale * self.config.matrix_lr)
        self._step_vectors(gradients, lr_scale * self.config.vector_lr)
        for name in self.owned:
            self.parameters[name].copy_(self.masters[name])

    def _step_matrices(self, gradients: dict[str, Tensor], lr: float) -> None:
        momentum = self.config.momentum
        for (_, long_side), views in self._matrices.items():
            for name in {view.name: None for view in views}:
                self.first_moments[name].lerp_(gradients[name], 1 - momentum)
                gradients[name].lerp_(self.first_moments[name], momentum)  # Nesterov
                self.masters[name].mul_(1 - lr * self.config.weight_decay)
            updates = orthogonalise(torch.stack([view.read(gradients) for view in views]))
            for view, update in zip(views, updates, strict=True):
                view.read(self.masters).add_(update.float(), alpha=-lr * 0.2 * long_side**0.5)

    def _step_vectors(self, gradients: dict[str, Tensor], lr: float) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        for name in self._vectors:
            first, second = self.first_moments[name], self.second_moments[name]
            first.lerp_(gradients[name], 1 - beta1)
            second.lerp_(gradients[name].square(), 1 - beta2)
            scale = (second / (1 - beta2**self.steps)).sqrt_().add_(1e-10)
            self.masters[name].addcdiv_(first, scale, value=-lr / (1 - beta1**self.steps))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return master weights and moments by attribute name."""
        return {
            "masters": self.masters,
            "first_moments": self.first_moments,
            "second_moments": self.second_moments,
        }

    def state(self) -> dict[str, Any]:
        """Return the whole state. It is complete in every worker, because workers share the tensors."""
        return {"steps": self.steps, **self.tensors()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, and the model's weights with it."""
        self.steps = state["steps"]
        for key, tensors in self.tensors().items():
            assert state[key].keys() == tensors.keys()
            for name, tensor in tensors.items():
                tensor.copy_(state[key][name])
        for name, weight in self.parameters.items():
            weight.copy_(self.masters[name])
