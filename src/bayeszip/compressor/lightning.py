"""A callback for Lightning: `Trainer(callbacks=[LightningCallback("quick", path="net.bayz")])`."""

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bayeszip.compressor.compressor import Compressor
from bayeszip.compressor.guest import Guest
from bayeszip.errors import ModelError, TrainingError
from bayeszip.fitting import count_examples
from bayeszip.recipe import Recipe
from bayeszip.result import Result

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ModelError("LightningCallback needs Lightning: pip install 'bayeszip[lightning]'") from error

__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """Compresses what a `LightningModule` trains; `result` holds the outcome after `fit`.

    The recipe's phases are stretched over all steps that the trainer takes. The module's optimizer trains the weights
    at its own rates; variances and terms are trained beside it at the recipe's. Runs on with Lightning's checkpoints.

    Distillation and the recipe's closing phase, which would need the loss, are left out.

    Args:
        recipe: a name, a path to a JSON file, or a `Recipe`.
        network: the attribute of the module that holds the network, such as "net"; by default its only child that has
            parameters.
        example_inputs: to trace the network with; by default the module's `example_input_array`.
        n_data: how many training examples there are; by default what the training loader says.
        path: where to save the file; by default nowhere.
    """

    def __init__(
        self,
        recipe: str | Recipe = "vd+sws",
        *,
        network: str | None = None,
        example_inputs: Sequence[Tensor] | Tensor | None = None,
        n_data: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._recipe, self._network, self._examples = recipe, network, example_inputs
        self._n_data, self._path = n_data, path
        self._taken = 0
        self._held: dict[str, Any] = {}
        self._guest: Guest | None = None
        self.result: Result | None = None

    @property
    def compressor(self) -> Compressor:
        """From the start of `fit` on."""
        if self._guest is None:
            raise TrainingError("LightningCallback compresses during trainer.fit(…) only")
        return self._guest.compressor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before optimizers are made and the module is wrapped."""
        if stage == "fit" and self._guest is None:
            network = _network_of(pl_module, self._network)
            self._guest = Guest(Compressor(network, self._recipe, n_data=self._n_data or 1))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            raise TrainingError("a recipe has an end, so the trainer needs one: set max_epochs or max_steps")
        n_data = self._n_data or count_examples(trainer.train_dataloader or ())
        self.compressor.plan(n_data=n_data, total_steps=int(total))
        if self._held and self._guest is not None:
            self._taken = self._held["taken"]
            self._guest.load_state_dict(self._held["guest"])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        if len(trainer.optimizers) != 1:
            raise TrainingError(f"LightningCallback works with one optimizer; the module has {len(trainer.optimizers)}")
        if self._guest is not None:
            self._guest.before_step()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        # With accumulated batches not every one ends in a step of the optimizer.
        if self._guest is not None and trainer.global_step > self._taken:
            self._taken = trainer.global_step
            self._guest.after_step()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        examples = pl_module.example_input_array if self._examples is None else self._examples
        if isinstance(examples, dict):
            raise ModelError("give example_inputs as a tensor or a tuple of them: the module's are a dictionary")
        self.result = self.compressor.finalize(example_inputs=examples)
        if self._path is not None and trainer.is_global_zero:
            self.result.save(self._path)

    def state_dict(self) -> dict[str, Any]:
        if self._guest is None or self.result is not None:
            return {}
        return {"taken": self._taken, "guest": self._guest.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Taken up when the trainer has said how long it will go on.
        self._held = state_dict


def _network_of(module: LightningModule, attribute: str | None) -> nn.Module:
    """The network in the module: tracing needs one that knows nothing of a trainer."""
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    if attribute is None and len(children) == 1:
        return next(iter(children.values()))
    if attribute is None:
        raise ModelError(
            f"{type(module).__name__} has {len(children)} parts with parameters ({', '.join(children) or 'none'}); "
            "hold the network in one attribute and name it: LightningCallback(network=…)"
        )
    found = getattr(module, attribute, None)
    if not isinstance(found, nn.Module):
        raise ModelError(f"{type(module).__name__}.{attribute} is not a network; there are: {', '.join(children)}")
    return found
