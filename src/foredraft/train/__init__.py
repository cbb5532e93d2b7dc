"""Training of drafters: an adapter over the target's first layers, or a small model distilled from it."""
