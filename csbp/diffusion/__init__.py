"""From packs to target blocks, noise, labels and loss, and back to text (docs/objectives.md).

``random``, ``noise``, ``layout`` and ``build`` are NumPy alone, pure functions of a pack; ``loss`` sums the
terms over a rank's logits; ``sampler`` generates.
"""
