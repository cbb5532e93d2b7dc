"""The model: specification, weights, KV cache, forward pass, tokenizer. It knows nothing of speculation.

Imports run downwards: weights, runner, decoder, attention, layers and cache, spec. `tokenizer` and `hub`
are independent of them. Importing this package does not import torch.
"""
