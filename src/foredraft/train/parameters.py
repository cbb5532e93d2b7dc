"""Parameters: weights that are trained, in float32, by the names that a checkpoint gives them.

A module here is a source for `model.weights`, which builds layers of every family. So what is trained has the
arithmetic of what decodes, and the names of what is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from foredraft.model.checkpoint import Shapes
from foredraft.model.decoder import Layer
from foredraft.model.layers import Norm
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import build_layer, build_norm
from foredraft.train.packed_documents import PackedPass

__all__ = ["Parameters", "TrainedLayer", "TrainedNorm"]

DEVIATION = 0.02  # of weights that start at random, as transformers draws them


class Parameters(nn.Module):
    """Parameters of a part of a model. A name of a checkpoint has dots, which a module's may not have."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        self.device, self.dtype = device, torch.float32
        for name, shape in shapes.items():
            self.register_parameter(_own(name), nn.Parameter(torch.empty(shape, device=device)))

    def load(self, shapes: Shapes) -> Tensor:
        """Return the joined parameters; part of `model.weights.Source`."""
        found = [getattr(self, _own(name)) for name in shapes]
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


def _own(name: str) -> str:
    return name.replace(".", "/")


class TrainedLayer(Parameters):
    """A layer, with or without an MLP; `index` is its place in the model that it is part of."""

    def __init__(self, spec: ModelSpec, device: torch.device, *, index: int = 0, mlp: bool = True) -> None:
        self._spec, self._index, self._mlp = spec, index, mlp
        recorder = _ShapeRecorder()
        build_layer(spec, recorder, index, mlp=mlp)
        super().__init__(recorder.shapes, device)

    def layer(self) -> Layer:
        """Return the layer over the parameters as they are now."""
        return build_layer(self._spec, self, self._index, mlp=self._mlp)

    def forward(self, x: Tensor, pass_: PackedPass) -> Tensor:
        """Return the states [N, hidden] that leave the layer."""
        return pass_.run([self.layer()], x, self._index)


class TrainedNorm(Parameters):
    """The norm after the last layer."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        recorder = _ShapeRecorder()
        build_norm(spec, recorder)
        super().__init__(recorder.shapes, device)

    def norm(self) -> Norm:
        """Return the norm over the parameter as it is now."""
        return build_norm(self._spec, self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed states, [N, hidden]."""
        return self.norm()(x)


class _ShapeRecorder:
    """A source that notes what is asked of it."""

    device, dtype = torch.device("meta"), torch.float32

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, shapes: Shapes) -> Tensor:
        self.shapes |= shapes
        rows = sum(shape[0] for shape in shapes.values())
        return torch.empty(rows, *next(iter(shapes.values()))[1:], device="meta")

    load_temporary = load

    def free_temporary(self) -> None:
        return None
