"""bayeszip makes trained PyTorch networks tiny. The public surface; nothing is imported before it is used."""

import gc
import importlib
from typing import Any

__version__ = "0.1.0"

#: public name → module that owns it; `__init__.pyi` says the same to type checkers and editors
_OWNERS = {
    "BayeszipError": "errors",
    "CheckpointError": "errors",
    "Checkpointing": "fitting.keeper",
    "CompressedModel": "tensors",
    "Compressor": "compressor",
    "DataError": "errors",
    "EpochStats": "fitting",
    "FormatError": "errors",
    "Interrupted": "errors",
    "LightningCallback": "compressor.lightning",
    "LimitExceeded": "limits",
    "Limits": "limits",
    "LogGrid": "tensors",
    "ModelError": "errors",
    "OutputError": "errors",
    "QuantizedTensor": "tensors",
    "RawTensor": "tensors",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "ResidentBatches": "fitting",
    "Result": "result",
    "TargetError": "errors",
    "TrainerCallback": "compressor.transformers",
    "TrainingError": "errors",
    "UniformGrid": "tensors",
    "Watcher": "fitting",
    "compress": "compressing",
    "evaluate": "fitting",
    "export": "loading",
    "load": "loading",
    "pack": "packing",
    "preview": "previewing",
    "recipe": "recipe",
    "verify": "loading",
}
_MODULES = {"codec", "data", "models", "graph", "variational"}

__all__ = ["__version__", *_OWNERS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _OWNERS:
        return getattr(_imported(_OWNERS[name]), name)
    if name in _MODULES:
        return _imported(name)
    raise AttributeError(f"module 'bayeszip' has no attribute {name!r}")


def _imported(name: str) -> Any:
    """A module of the package. Imports leave no garbage, so none is looked for among torch's many objects meanwhile."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"bayeszip.{name}")
    finally:
        if collecting:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
