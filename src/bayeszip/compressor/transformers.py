"""A callback for Hugging Face's Trainer: `Trainer(…, callbacks=[TrainerCallback("quick", path="net.bayz")])`."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayeszip.compressor.compressor import Compressor
from bayeszip.compressor.guest import Guest
from bayeszip.errors import BayeszipError, ModelError, TrainingError
from bayeszip.fitting import count_examples
from bayeszip.fitting.batches import examples_from
from bayeszip.fitting.checkpoint import read_checkpoint, write_checkpoint
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.state import load_random_state, random_state
from bayeszip.recipe import Recipe
from bayeszip.result import Result

try:
    import transformers
except ImportError as error:
    raise ModelError("TrainerCallback needs transformers: pip install 'bayeszip[transformers]'") from error

__all__ = ["TrainerCallback"]

#: In the folder of each of the trainer's checkpoints.
STATE = "bayeszip.safetensors"


class TrainerCallback(transformers.TrainerCallback):
    """Compresses what a `Trainer` trains; `result` holds the outcome after `train`.

    The recipe's phases are stretched over all steps that the trainer takes. The trainer's optimizer trains the weights
    at its own rates; variances and terms are trained beside it at the recipe's. Runs on with the trainer's
    checkpoints.

    The share of zeros and the bytes that a file would take stand in what the trainer logs, as `bayeszip/zeros` and
    `bayeszip/bytes`; at the end the result is judged on the trainer's evaluation data, if it has any. Distillation and
    the recipe's closing phase, which would need the loss, are left out.

    Args:
        recipe: a name, a path to a JSON file, or a `Recipe`.
        example_inputs: to trace the network with: in the order of its arguments, or a batch that holds them; by default
            what the loader makes of the first training examples. Where that fails the file holds tensors only and loads
            with `into=`.
        loss: by name or as a function, to judge the result by.
        n_data: how many training examples there are; by default what the training loader says.
        path: where to save the file; by default nowhere.
    """

    def __init__(
        self,
        recipe: str | Recipe = "vd+sws",
        *,
        example_inputs: Any = None,
        n_data: int | None = None,
        path: str | os.PathLike[str] | None = None,
        loss: str | Loss = "cross-entropy",
    ) -> None:
        self._recipe, self._examples, self._n_data, self._path = recipe, example_inputs, n_data, path
        self._loss, self._evaluation = loss, None
        self._guest: Guest | None = None
        self.result: Result | None = None

    @property
    def compressor(self) -> Compressor:
        """From the making of the trainer on."""
        return self._hosted().compressor

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before optimizers are made and the network is wrapped."""
        compressor = Compressor(
            given["model"], self._recipe, n_data=self._n_data or 1, loss=self._loss, example_inputs=self._examples
        )
        self._guest = Guest(compressor)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        n_data = self._n_data or count_examples(given["train_dataloader"])
        self.compressor.plan(n_data=n_data, total_steps=state.max_steps)
        if self._examples is None:
            self._examples = _first_examples(self.compressor.model, given["train_dataloader"])
        if state.global_step:
            self._hosted().load_state_dict(read_checkpoint(_folder(args, state) / STATE).state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hosted().before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hosted().after_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.result is None and isinstance(logs, dict) and self._guest is not None:
            figures = self._guest.figures()
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._evaluation = given.get("eval_dataloader")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and self.result is None:
            write_checkpoint(_folder(args, state) / STATE, self._hosted().state_dict(), {})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.result = self._hosted().finalize(self._examples, self._evaluation)
        if self._path is not None and state.is_world_process_zero:
            self.result.save(self._path)

    def _hosted(self) -> Guest:
        if self._guest is None:
            raise TrainingError("give TrainerCallback to the Trainer when that is made: Trainer(callbacks=[…])")
        return self._guest


def _first_examples(network: nn.Module, loader: Any) -> tuple[Tensor, ...] | None:
    """Inputs from the first examples of a loader's data, if these have numbers; the loader's own order goes on."""
    before = random_state()
    try:
        rows = [loader.dataset[place] for place in range(min(2, len(loader.dataset)))]
        return examples_from(network, loader.collate_fn(rows))
    except (BayeszipError, AttributeError, LookupError, NotImplementedError, TypeError):
        return None
    finally:
        load_random_state(before)


def _folder(args: Any, state: Any) -> Path:
    """Of the trainer's checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
