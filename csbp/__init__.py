"""csbp: block-diffusion language-model training at long context.

This package imports no torch by itself, so that ``csbp --help`` and configuration errors answer at once.
"""

__version__ = "0.1.0"
