"""bayeszip makes trained PyTorch networks tiny. The public surface; nothing is imported before it is used."""

import importlib
from typing import Any

__version__ = "0.1.0"

#: public name → module that owns it
_OWNERS = {
    "BayeszipError": "errors",
    "Checkpointing": "fitting.keeper",
    "CompressedModel": "tensors",
    "Compressor": "compressor",
    "LightningCallback": "compressor.lightning",
    "LogGrid": "tensors",
    "QuantizedTensor": "tensors",
    "RawTensor": "tensors",
    "Recipe": "recipe",
    "ResidentBatches": "fitting",
    "Result": "result",
    "TrainerCallback": "compressor.transformers",
    "UniformGrid": "tensors",
    "compress": "compressing",
    "load": "loading",
    "pack": "packing",
    "preview": "previewing",
}
_MODULES = {"codec", "data", "models", "graph", "variational"}

__all__ = ["__version__", *_OWNERS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(importlib.import_module(f"bayeszip.{_OWNERS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"bayeszip.{name}")
    raise AttributeError(f"module 'bayeszip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
