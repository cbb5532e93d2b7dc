"""Quantised weights: weights of few bits, and what they stand for.

codes.py                a quantised weight: codes and scales; `expand` is the definition
quantise.py             16-bit weights -> codes
scheme.py               which modules of a checkpoint are quantised, and what a weight format must tell
reading.py              config.json -> scheme: the table of the methods
activations.py          how inputs of linear layers are rounded
compressed_tensors.py   a method: its config keys and weight formats; so are gptq.py, awq.py, fp8.py, gguf.py,
                        and auto_round.py, which uses the formats of two of them
blocks/                 the block formats of GGUF files, for gguf.py
packing.py              numbers of 4 and 8 bits in words of 32
"""

from foredraft.model.quantisation.activations import ActivationFormat
from foredraft.model.quantisation.codes import GROUP, Codes, Coding
from foredraft.model.quantisation.quantise import BITS, quantise
from foredraft.model.quantisation.reading import read_quantisation
from foredraft.model.quantisation.scheme import Part, Quantisation, SchemeRule, WeightFormat, pieces

__all__ = [
    "BITS",
    "GROUP",
    "ActivationFormat",
    "Codes",
    "Coding",
    "Part",
    "Quantisation",
    "SchemeRule",
    "WeightFormat",
    "pieces",
    "quantise",
    "read_quantisation",
]
