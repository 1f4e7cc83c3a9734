"""A callback for Lightning: `Trainer(callbacks=[LightningCallback("quick", path="net.bayz")])`."""

import os
from typing import Any

from torch import nn

from bayeszip.compressor.compressor import Compressor
from bayeszip.compressor.guest import Guest
from bayeszip.errors import DataError, ModelError, TrainingError
from bayeszip.fitting import count_examples
from bayeszip.fitting.batches import checked_batch
from bayeszip.fitting.likelihood import Loss
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

    After each epoch it logs the share of zeros and the bytes that a file would take, as `bayeszip/zeros` and
    `bayeszip/bytes`; at the end the result is judged on the trainer's validation data. Distillation and the recipe's
    closing phase, which would need the loss, are left out.

    Args:
        recipe: a name, a path to a JSON file, or a `Recipe`.
        network: the attribute of the module that holds the network, such as "net"; by default its only child that has
            parameters.
        example_inputs: to trace the network with, or a batch that holds them; by default the module's
            `example_input_array`, or else the first batch of the training loader.
        loss: by name or as a function, to judge the result by.
        n_data: how many training examples there are; by default what the training loader says.
        path: where to save the file; by default nowhere.
    """

    def __init__(
        self,
        recipe: str | Recipe = "vd+sws",
        *,
        network: str | None = None,
        example_inputs: Any = None,
        n_data: int | None = None,
        path: str | os.PathLike[str] | None = None,
        loss: str | Loss = "cross-entropy",
    ) -> None:
        self._recipe, self._network, self._examples, self._loss = recipe, network, example_inputs, loss
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
            if self._examples is None:
                self._examples = pl_module.example_input_array
            compressor = Compressor(
                network, self._recipe, n_data=self._n_data or 1, loss=self._loss, example_inputs=self._examples
            )
            self._guest = Guest(compressor)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        if not 0 < total < float("inf"):
            raise TrainingError("a recipe has an end, so the trainer needs one: set max_epochs or max_steps")
        n_data = self._n_data or count_examples(trainer.train_dataloader or ())
        self.compressor.plan(n_data=n_data, total_steps=int(total))
        if self._examples is None:
            self._examples = _first_batch(trainer.train_dataloader)
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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._guest is not None:
            pl_module.log_dict(self._guest.figures())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._guest is None:
            raise TrainingError("LightningCallback compresses during trainer.fit(…) only")
        loader = trainer.val_dataloaders
        self.result = self._guest.finalize(self._examples, None if isinstance(loader, list | dict) else loader)
        if self._path is not None and trainer.is_global_zero:
            self.result.save(self._path)

    def state_dict(self) -> dict[str, Any]:
        if self._guest is None or self.result is not None:
            return {}
        return {"taken": self._taken, "guest": self._guest.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Taken up when the trainer has said how long it will go on.
        self._held = state_dict


def _first_batch(loader: Any) -> Any:
    """Of a loader, if it gives what is known as one; else the file holds tensors only."""
    try:
        return checked_batch(next(iter(loader))).inputs
    except (DataError, StopIteration, TypeError):
        return None


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
