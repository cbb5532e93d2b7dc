"""The benchmark: what each decoding method gains on this model, these prompts and this machine."""
