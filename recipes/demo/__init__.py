"""Make the demo models: corpus, tokenizer, training, export and evaluation."""
