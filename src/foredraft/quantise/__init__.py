"""Quantise: a checkpoint of few bits out of one of 16, and a card that says what it lost.

writing.py    weights -> codes -> a folder in the format of compressed-tensors
quality.py    how far its predictions are from the original's, on text that the user names
command.py    both, with the checks of the user's options
"""

from foredraft.quantise.command import QuantiseResult, quantise_checkpoint
from foredraft.quantise.quality import Quality

__all__ = ["Quality", "QuantiseResult", "quantise_checkpoint"]
