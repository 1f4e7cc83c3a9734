"""`Compressor`: compression inside a training loop of one's own; callbacks for Lightning and for transformers."""

from bayeszip.compressor.compressor import Compressor, CompressorStats

__all__ = ["Compressor", "CompressorStats"]
