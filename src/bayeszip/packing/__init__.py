"""`pack()`: a network quantized and coded as it is, without training; with a few inputs, by what they show."""

from bayeszip.packing.curve import Point, curve
from bayeszip.packing.pack import pack

__all__ = ["Point", "curve", "pack"]
