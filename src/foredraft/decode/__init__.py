"""The loop: draft, verify, accept, roll back. Knows protocols, not kinds of drafters or constraints."""
