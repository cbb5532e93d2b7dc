"""GGUF files: one file with the weights, the sizes and the tokenizer of a model, as llama.cpp reads it.

A file is read as a checkpoint folder is: `checkpoint_folder` makes the small files of a folder from its
metadata once, and `model.checkpoint` reads the tensors from the file itself.

file.py         the container: metadata, and the place of each tensor
parts.py        the parts of a file that was split, as one
choice.py       which of several files: by the names that llama.cpp's makers give them
config.py       metadata -> config.json
vocabulary.py   metadata -> tokenizer.json and tokenizer_config.json
words.py        how vocabularies cut text into words
special.py      special tokens, and what ends a text
llama_like.py   keys of architectures after llama
names.py        tensor names -> the names of Hugging Face, and what the writer did to a tensor
tensors.py      tensors by the names of Hugging Face
folder.py       the folder of a file

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
