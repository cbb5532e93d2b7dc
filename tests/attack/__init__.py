"""Attacks: what one client sends to stop the others, each beside a stream of another client."""
