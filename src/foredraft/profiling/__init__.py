"""Profiling: what a draft step, a verifying pass and the host cost here, measured in one way for all."""
