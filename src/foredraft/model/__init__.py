"""What a model is: spec, weights, cache, forward, tokenizer. It knows nothing of drafting.

Rooms, downwards: spec -> layers, cache -> attention -> decoder -> runner -> weights; tokenizer and hub stand
beside. Importing this package imports no torch; import the room that you need.
"""
