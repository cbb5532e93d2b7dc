"""How the demo models were made: corpus, tokenizer, training, export, evaluation. Needs nothing else here."""
