"""CompressedModel ↔ bytes: exact integers, numpy and numba only, no torch."""

from bayeszip.codec.choosing import cheapest, prices
from bayeszip.codec.container import CODERS, DEFAULT_CODER, decode, describe, encode, inspect, measure, read
from bayeszip.codec.parts import Description, TensorDescription
from bayeszip.codec.paths import cheapest_path
from bayeszip.limits import Budget, Limits

__all__ = [
    "CODERS",
    "DEFAULT_CODER",
    "Budget",
    "Description",
    "Limits",
    "TensorDescription",
    "cheapest",
    "cheapest_path",
    "decode",
    "describe",
    "encode",
    "inspect",
    "measure",
    "prices",
    "read",
]
