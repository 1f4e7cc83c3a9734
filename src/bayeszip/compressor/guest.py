"""A compression inside somebody else's trainer, which keeps loss and optimizer to itself."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from bayeszip.compressor.compressor import Compressor
from bayeszip.errors import BayeszipError
from bayeszip.fitting.batches import Loader
from bayeszip.fitting.state import load_optimizer_state, optimizer_state
from bayeszip.result import Result

__all__ = ["Guest"]


class Guest:
    """What the trainer's optimizer doesn't do: the gradients of the regularizer, and steps for variances and terms.

    The trainer's optimizer is left as it is, schedulers and checkpoints included; it trains the weights at its own
    rates. Variances and terms are moved by an Adam of the guest's at the recipe's rates, and when that is done have
    no gradient left that another optimizer could see.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._optimizer = torch.optim.Adam(compressor.parameter_groups(weights=False))
        compressor.set_rates_of(self._optimizer)

    def before_step(self) -> None:
        """Once before each step of the trainer's optimizer, when gradients are reduced and unscaled."""
        self.compressor.add_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def after_step(self) -> None:
        """Once after it."""
        self.compressor.step()

    def figures(self) -> dict[str, float]:
        """For the trainer's log: the share of weights that are zero, and the bytes that a file would take now."""
        stats = self.compressor.stats()
        return {"bayeszip/zeros": stats.zeros, "bayeszip/bytes": float(stats.bytes)}

    def finalize(self, examples: Any, val_loader: Loader | None) -> Result:
        """The result, judged on the trainer's validation data if these have the form of batches and the loss fits."""
        if val_loader is not None:
            try:
                self.compressor.judge_on(val_loader)
            except BayeszipError as error:
                logging.getLogger("bayeszip").warning("what is compressed is not judged on validation data: %s", error)
                val_loader = None
        return self.compressor.finalize(example_inputs=examples, val_loader=val_loader)

    def state_dict(self) -> dict[str, Any]:
        """Without the model's tensors, which trainers save themselves."""
        return {
            "compressor": self.compressor.state_dict(model=False),
            "optimizer": optimizer_state(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.compressor.load_state_dict(state["compressor"])
        load_optimizer_state(self._optimizer, state["optimizer"])
