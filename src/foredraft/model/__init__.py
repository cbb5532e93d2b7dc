"""The model: specification, weights, KV cache, forward pass, tokenizer. It knows nothing of speculation.

Importing this package does not import torch.
"""
