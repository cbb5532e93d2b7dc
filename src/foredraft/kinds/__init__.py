"""The kinds of drafters, policies and acceptance rules, and which of them fit together."""
