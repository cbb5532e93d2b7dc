"""Constraints: banned words, regex and JSON schemas. None ships yet; `decode.constraint` is the protocol."""
