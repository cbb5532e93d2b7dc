"""Quantised weights: weights of few bits, and what they stand for.

A method reads its config keys into a scheme of weight formats; a format reads tensors into `Codes`, whose
`expand` is the definition.
"""
