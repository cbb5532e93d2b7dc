"""Quantised weights: weights of few bits, and what they stand for.

codes.py    a quantised weight: codes and scales; `expand` is the definition
gguf.py     the block formats of GGUF files
"""

from foredraft.model.quantisation.codes import Codes

__all__ = ["Codes"]
