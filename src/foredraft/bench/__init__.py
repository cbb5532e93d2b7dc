"""bench: what each method gains on this model, these prompts and this machine, and at what exactness."""
