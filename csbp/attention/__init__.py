"""Attention on interval masks, on one device and over many (docs/attention.md). In reading order:

- ``mask`` the one mask type; ``tiles`` which tiles of keys and rows see each other, as runs
- ``core`` autograd on one device, and which backend; ``usable`` what refuses a backend asked for by name
- ``reference`` in plain torch; ``flash`` with ``hopper`` and ``hopper_heads`` (FlashAttention-4); ``flex``; ``wide``
  with ``wide_plan`` and ``wide_kernels``
- ``operator`` the distributed op, and a plan bound to a device; ``bound`` one layer kind of it; ``phases`` its forward
  and backward as steps that any transport can drive; ``guests`` query rows that another rank attends
- ``merge`` and ``sums`` what parts of outputs and of gradients add up to; ``row_kernels`` both on a GPU
- ``interface`` the caller inside transformers; ``cache`` generation
"""

from csbp.attention.core import interval_attention
from csbp.attention.mask import IntervalMask
from csbp.attention.merge import merge

__all__ = ["IntervalMask", "interval_attention", "merge"]
