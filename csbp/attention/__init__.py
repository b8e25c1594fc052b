"""Attention on interval masks, on one device and over many (DESIGN sections 2 and 5).

``mask`` the mask type; ``reference`` the portable kernel; ``core`` autograd and checks; ``phases`` the distributed
forward and backward as steps that any transport can drive, ``merge`` and ``sums`` what their parts add up to;
``operator`` the autograd op and a plan bound to a device; ``interface`` its caller inside transformers; ``cache``
generation.
"""

from csbp.attention.core import interval_attention
from csbp.attention.mask import IntervalMask
from csbp.attention.merge import merge

__all__ = ["IntervalMask", "interval_attention", "merge"]
