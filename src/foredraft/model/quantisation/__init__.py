"""Quantised weights: weights of few bits, and what they stand for.

A method reads its config keys into a scheme of weight formats; a format reads tensors into `Codes`, whose
`expand` is the definition.
"""

from foredraft.model.quantisation.codes import BITS, GROUP, CodeFormat, Codes, quantise
from foredraft.model.quantisation.methods import read_quantisation
from foredraft.model.quantisation.scheme import (
    ActivationFormat,
    Quantisation,
    SchemeRule,
    TensorSpec,
    WeightFormat,
    pieces,
)

__all__ = [
    "BITS",
    "GROUP",
    "ActivationFormat",
    "CodeFormat",
    "Codes",
    "Quantisation",
    "SchemeRule",
    "TensorSpec",
    "WeightFormat",
    "pieces",
    "quantise",
    "read_quantisation",
]
