# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-defs
# mypy: disallow-incomplete-defs, check-untyped-defs, disallow-untyped-decorators, warn-unused-ignores
# mypy: warn-return-any, no-implicit-reexport, strict-equality, extra-checks, strict-bytes
"""A program that uses the public surface, for mypy at its strictest: what is asserted here would fail were it Any."""

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader

import bayeszip

Loader = DataLoader[tuple[torch.Tensor, torch.Tensor]]


class Loud(bayeszip.Watcher):
    def on_warning(self, message: str) -> None:
        print(message)


def shrink(model: nn.Module, loader: Loader) -> bayeszip.Result:
    recipe = bayeszip.recipe("quick")
    assert_type(recipe, bayeszip.Recipe)
    try:
        result = bayeszip.compress(
            model, loader, recipe=recipe.override("vd.epochs=3"), settings={"all.tau1": 2.0}, watcher=Loud()
        )
    except bayeszip.TargetError as error:
        raise SystemExit(str(error)) from error
    except (bayeszip.ModelError, bayeszip.DataError, bayeszip.BayeszipError):
        raise
    assert_type(result, bayeszip.Result)
    result.save("net.bayz")
    print(result.ratio, result.report())
    return result


def use(loader: Loader) -> float:
    net = bayeszip.load("net.bayz", limits=bayeszip.Limits(elements=2**20))
    assert_type(net, nn.Module)
    assert_type(bayeszip.verify("net.bayz"), float | None)
    bayeszip.export("net.bayz", "net.onnx", input_names=["x"])
    assert_type(bayeszip.pack(net), bayeszip.Result)
    return bayeszip.evaluate(net, loader)


def mistaken() -> None:
    """Were one of these no error to mypy, the comment on it would be one."""
    bayeszip.load(3)  # type: ignore[arg-type]
    bayeszip.recipe()  # type: ignore[call-arg]
    print(bayeszip.compres)  # type: ignore[attr-defined]
