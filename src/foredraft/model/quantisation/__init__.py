"""Quantised weights: weights of few bits, and what they stand for.

codes.py       a quantised weight: codes and scales; `expand` is the definition
quantise.py    16-bit weights -> codes
"""

from foredraft.model.quantisation.codes import Codes
from foredraft.model.quantisation.quantise import BITS, codable, quantise

__all__ = ["BITS", "Codes", "codable", "quantise"]
