"""GGUF files: one file with the weights, the sizes and the tokenizer of a model, as llama.cpp reads it.

`checkpoint_folder` makes the small files of a checkpoint folder from a file's metadata, once;
`model.checkpoint` reads the tensors from the file itself. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
