"""Quantise: a checkpoint of few bits out of one of 16, and a card that says what it lost."""

from foredraft.quantise.command import Quality, QuantiseResult, quantise_checkpoint

__all__ = ["Quality", "QuantiseResult", "quantise_checkpoint"]
