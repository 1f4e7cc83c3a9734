"""Kinds of networks, compressed by default settings, and what they came to: for tests, and for the guide's table."""

import warnings
from pathlib import Path

import layered
import tasks
from torch import nn

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.fitting.evaluation import Figures, Judge
from bayeszip.fitting.likelihood import Likelihood
from bayeszip.fitting.outputs import names_in
from bayeszip.recipe import recipe
from bayeszip.result import Result

__all__ = ["HUGGING_FACE", "NAMES", "compressed", "judged", "packed"]

#: The default recipe, shortened.
RECIPE = recipe("vd+sws").override("epochs_scale=0.15")
#: In the order of the guide.
NAMES = [kind.name for kind in (
    tasks.MLP, tasks.CNN, tasks.UNET, tasks.AUTOENCODER, layered.LSTM, layered.GRU, layered.ENCODER, layered.GPT,
    layered.BERT, tasks.SIAMESE, tasks.DICT, tasks.SEGMENTATION, layered.BILINEAR, layered.CONV1D, layered.OWN,
)]  # fmt: skip
HUGGING_FACE = {layered.BERT.name, layered.CONV1D.name}


def packed(name: str) -> Result:
    """Without training."""
    return bayeszip.pack(zoo.trained(name), example_inputs=zoo.KINDS[name].examples_of())


def compressed(name: str, network: nn.Module, folder: Path) -> Result:
    """The file is `net.bayz` in the folder."""
    kind = zoo.KINDS[name]
    if kind is layered.BERT:
        return _through_trainer(kind, network, folder)
    result = bayeszip.compress(
        network,
        kind.batches(),
        val_loader=kind.batches(validation=True),
        recipe=RECIPE,
        loss=kind.loss,
        device="cpu",
        watcher=Watcher(),
    )
    result.save(folder / "net.bayz")
    return result


def _through_trainer(kind: zoo.Kind, network: nn.Module, folder: Path) -> Result:
    """By Hugging Face's Trainer, whose epochs the recipe's schedule is scaled to."""
    from transformers import Trainer, TrainingArguments

    inputs, labels = kind.data(kind.examples, 0)
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(inputs, labels, strict=True)]
    callback = bayeszip.TrainerCallback(example_inputs=kind.examples_of(), path=folder / "net.bayz")
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=20, per_device_train_batch_size=64, learning_rate=3e-3, seed=1,
        report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the library are not ours
        Trainer(model=network, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    if callback.result is None:
        raise AssertionError("the trainer ended without a result")
    return callback.result


def judged(name: str, network: nn.Module) -> Figures:
    """On the validation data, by the kind's own loss."""
    kind = zoo.KINDS[name]
    judge = Judge(Likelihood.of(kind.loss), names=names_in(zoo.trained(name)(*kind.examples_of())))
    return judge(network, kind.batches(validation=True))
