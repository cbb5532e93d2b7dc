"""The forward of Medusa heads (Cai et al. 2024, arXiv:2401.10774).

Head k reads the target's last hidden state, after the final norm, at the last committed position before the
pending token, and gives logits of the token k + 1 places behind the pending one: residual blocks
x + SiLU(W x + b), then a linear layer over the words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.medusa_files import TOKEN_MAP, HeadTensors, MedusaFiles
from foredraft.drafters.heads.products import packed_beside
from foredraft.drafters.heads.words import draft_words
from foredraft.model.decoder import Decoder
from foredraft.model.layers import Product
from foredraft.model.runner import Runner
from foredraft.model.safetensors_file import SafetensorsFile

__all__ = ["MedusaHeads", "load_medusa"]


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head.

    Attributes:
        blocks: The products of its residual blocks.
        output: Over its words.
    """

    blocks: tuple[Product, ...]
    output: Product

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [N, words] float32 of normed states [N, D]."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.output(x).float()


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """All heads beside their target.

    Attributes:
        target: The target's decoder.
        heads: The first one drafts the first token.
        words: The target's id of each of their words, [words]; None where they are the target's.
    """

    target: Decoder
    heads: tuple[MedusaHead, ...]
    words: Tensor | None

    def entering(self, states: Tensor) -> Tensor:
        """Return what the heads read of the states [N, D] that leave the target's last layer."""
        normed: Tensor = self.target.norm(states)
        return normed


def load_medusa(files: MedusaFiles, target: Runner) -> MedusaHeads:
    """Read the weights, in the target's dtype.

    Raises:
        CheckpointError: They are broken, or the heads' words are none of the target's.
    """
    decoder = target.decoder
    with SafetensorsFile(files.file) as opened:

        def read(name: str) -> Tensor:
            return opened.get_tensor(name).to(decoder.device, decoder.dtype, copy=True)

        words = None
        if files.words is not None:
            words = draft_words(
                str(files.folder), files.words, decoder.spec.vocab_size,
                opened.get_tensor(TOKEN_MAP).long().clone(), None, name=TOKEN_MAP, absolute=True,
            )  # fmt: skip
            words = None if words is None else words.to(decoder.device)

        def output(name: str) -> Product:
            weight = read(name)
            return packed_beside(
                target, weight if len(weight) == files.words or words is None else weight[words]
            )

        outputs = {name: output(name) for name in files.rows}  # heads may share one

        def head(names: HeadTensors) -> MedusaHead:
            blocks = (
                packed_beside(target, read(weight), None if bias is None else read(bias))
                for weight, bias in names.blocks
            )
            return MedusaHead(tuple(blocks), outputs[names.output])

        return MedusaHeads(decoder, tuple(head(names) for names in files.heads), words)
