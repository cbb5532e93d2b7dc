"""The benchmark of decoding methods on a model, prompts and a machine."""
