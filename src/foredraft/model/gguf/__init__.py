"""GGUF files: one file with the weights, the sizes and the tokenizer of a model, as llama.cpp reads it.

`source.GGUFSource` is the model that a file holds. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
