"""Kernels of our own for CPUs, in C, compiled where they run: layers, and what is decided over a vocabulary.

Contract: every kernel has a definition in PyTorch's operators elsewhere, which serves wherever the kernels do
not, and which the tests hold it to. Nothing here knows of models, drafts or laws.
"""

from foredraft.kernels.compilation import library

__all__ = ["library"]
