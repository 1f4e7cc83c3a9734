"""A network as ONNX, checked against itself: `to_onnx`."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bayeszip.errors import ModelError
from bayeszip.graph.proof import outputs_of, random_inputs
from bayeszip.graph.soundness import charge_run, refusing
from bayeszip.graph.to_module import Network, to_module
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import CompressedModel

__all__ = ["to_onnx"]

#: How far onnxruntime may be from torch, relative to the largest output.
TOLERANCE = 1e-5

#: In a shorter type than float32: by so many times its precision.
_ROUNDINGS = 16


def to_onnx(model: CompressedModel, dtype: torch.dtype = torch.float32, limits: Limits | Budget | None = None) -> bytes:
    """The network as an ONNX file's bytes, its batch size free; onnxruntime has run it, and agreed with torch.

    Args:
        dtype: of its floating-point tensors, inputs and outputs. float32 by default, whatever the network's own type:
            runtimes have all operators in it.
        limits: what the model may ask for; a budget, where reading its file has been charged to it.

    Raises:
        ModelError: a package is missing, the model has no graph that states its inputs, onnxruntime lacks an operator
            in this type, or the outputs differ.
    """
    if dtype == torch.bfloat16:
        raise ModelError("onnxruntime can't run bfloat16 networks on a CPU to check them; take float32 or float16")
    for package in ("onnx", "onnxscript"):
        _needed(package)
    runtime = _needed("onnxruntime")
    budget = Budget.of(limits)
    network = to_module(model, dtype, budget)
    charge_run(model, budget)
    first, second = (
        tuple(
            each.to(dtype) if each.is_floating_point() else each
            for each in random_inputs(model, torch.Generator().manual_seed(seed), batch=2 + 2 * seed)
        )
        for seed in (0, 1)
    )
    blob = _exported(network, first)
    difference = _difference(network, second, blob, runtime)
    if not difference <= max(TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps):
        raise ModelError(
            f"onnxruntime's outputs differ from torch's by {difference:.3g}: this network can't be exported"
        )
    return blob


def _needed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"exporting to ONNX needs {package}: pip install 'bayeszip[onnx]'") from error


def _exported(network: Network, inputs: tuple[Tensor, ...]) -> bytes:
    batch = torch.export.Dim("batch")
    first, *more = ({0: batch} for _ in inputs)
    shapes = (first, tuple(more)) if more else (first,)
    with _quiet():
        try:
            program = torch.onnx.export(network, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
        except Exception as error:  # torch.onnx raises many kinds; each means the same to the caller
            raise ModelError(f"torch.onnx can't export the network: {str(error).strip().splitlines()[0]}") from error
        if program is None:
            raise ModelError("torch.onnx can't export the network")
        blob: bytes = program.model_proto.SerializeToString()
    return blob


def _difference(network: Network, inputs: tuple[Tensor, ...], blob: bytes, runtime: ModuleType) -> float:
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each kind
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"onnxruntime can't run the network, try another dtype, such as float32: {reason}") from error
    with torch.no_grad(), refusing("the network can't be run on random inputs", ModelError):
        feed = {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs, strict=True)}
        expected = [each.numpy() for each in outputs_of(network(*inputs))]
    try:
        results = session.run(None, feed)
    except Exception as error:  # as above
        raise ModelError(f"onnxruntime can't run the network: {str(error).strip().splitlines()[-1]}") from error
    worst = 0.0
    for one, other in zip(expected, results, strict=True):
        if one.shape != other.shape:
            raise ModelError(f"onnxruntime's output has shape {other.shape}, torch's {one.shape}")
        differs = ~((one == other) | (np.isnan(one) & np.isnan(other)))
        gap = np.abs(one.astype(np.float64) - other)[differs].max(initial=0.0)
        worst = max(worst, float(gap) / max(float(np.abs(one).max(initial=0.0)), 1e-30))
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx talks about packages that it doesn't need here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
