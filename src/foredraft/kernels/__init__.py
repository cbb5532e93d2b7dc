"""C kernels for CPUs, compiled on the user's machine: decoder layers and vocabulary operations.

Contract: every kernel has a definition in PyTorch operators in another package. The tests hold the kernel to
its definition, and the definition serves wherever the kernel does not. This package knows no model and no
drafter.
"""

from foredraft.kernels.compilation import library

__all__ = ["library"]
