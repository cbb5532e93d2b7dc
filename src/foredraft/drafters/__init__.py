"""Drafters: one file a kind. None of them knows the engine; all see `decode.drafter`."""
