"""MXFP4 and MXFP8, from the definition to training.

Reading order: formats.py (what the formats are), mx_slow.py (the definition as code), mx.py (the same, fast), pack.py
(what checkpoints store), qat.py (which tensors are quantised, and their gradients).
"""

from nonet.quant.mx import MX, decode, encode, fake
from nonet.quant.qat import QuantConfig, fake_quant

__all__ = ["MX", "QuantConfig", "decode", "encode", "fake", "fake_quant"]
