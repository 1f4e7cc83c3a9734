"""A compression inside somebody else's trainer, which keeps loss and optimizer to itself."""

from collections.abc import Mapping
from typing import Any

import torch

from bayeszip.compressor.compressor import Compressor
from bayeszip.fitting.state import load_optimizer_state, optimizer_state

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

    def state_dict(self) -> dict[str, Any]:
        """Without the model's tensors, which trainers save themselves."""
        return {
            "compressor": self.compressor.state_dict(model=False),
            "optimizer": optimizer_state(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.compressor.load_state_dict(state["compressor"])
        load_optimizer_state(self._optimizer, state["optimizer"])
