"""Runs of experiments: what one is, and what becomes of it once it is trained: a file, its figures, a record."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from bayeszip import codec, data, pipeline
from bayeszip.fitting import EpochStats, evaluate
from bayeszip.recipe import Recipe
from bayeszip.record import file_figures, write_record
from bayeszip.result import Fit, Form, Result, write_weights
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import Conversion

RESULTS = Path(__file__).resolve().parents[1] / "results"

#: The paper's width of a column offset (its app. B).
OFFSET_BITS = {"lenet-300-100": 5, "lenet-5": 8}
#: What the paper's accounting leaves out of a file.
NOT_COUNTED = ("magic", "header", "graph", "padding", "checksum")

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Run:
    """One compression: of `model`, pretrained from `seed`, by `recipe`; `name` is its folder below the experiment's."""

    name: str
    model: str
    recipe: Recipe
    seed: int

    @cached_property
    def settings(self) -> Recipe:
        """The recipe with its epochs as they are; pretrained networks are shared, whatever the factor on epochs."""
        return dataclasses.replace(self.recipe.scaled(), pretraining=self.recipe.pretraining)


@dataclass(frozen=True)
class Trained:
    """What is left of the training of a run."""

    quantized: Mapping[str, QuantizedTensor]
    conversion: Conversion
    accuracy_before: float
    #: Its share of what all networks that were trained together took, and how many these were at most. What runs have
    #: in common is counted in each.
    seconds: float
    together: int
    device: str
    history: tuple[EpochStats, ...]


def file_and_record(run: Run, trained: Trained, pretrained_in: Path, folder: Path) -> str:
    """The file of a trained run, its figures on the test set, and its record."""
    result = coded(run, trained, pretrained_in)
    figures = file_figures(result.network(), result.blob, in_order(mnist().test)) | {
        "model": run.model,
        "paper_bytes": paper_bytes(result.compressed, run.model),
        "trained_together": trained.together,
    }
    write_record(folder, result, figures)
    return (
        f"{run.name}: {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, {figures['ratio']:.0f}×, "
        f"{4 * figures['params'] / figures['paper_bytes']:.0f}× in the paper's accounting"
    )


def coded(run: Run, trained: Trained, pretrained_in: Path) -> Result:
    """The file of a trained run, with its accuracy on the validation images."""
    network = pretrained(pretrained_in, run.model, run.seed)
    write_weights(network, trained.quantized)
    splits = mnist()
    result = Form(network, (splits.train.images[:2],), run.recipe.coding).code(trained.quantized)
    return dataclasses.replace(
        result,
        accuracy=evaluate(result.network(), in_order(splits.validation)),
        fit=Fit(
            recipe=run.settings,
            seed=run.seed,
            conversion=trained.conversion,
            accuracy_before=trained.accuracy_before,
            seconds=trained.seconds,
            device=trained.device,
            history=trained.history,
        ),
    )


def recorded_recipe(path: Path) -> Recipe:
    """The recipe in a record; settings that it doesn't know of are at their defaults."""
    return Recipe.from_json(json.dumps(json.loads(path.read_text(encoding="utf-8"))["recipe"]))


@cache
def mnist() -> data.Dataset:
    return data.load("mnist")


def in_order(split: data.Split) -> data.Batches:
    return data.Batches(split.images, split.labels, EVALUATION_BATCH)


def weights_file(folder: Path, model: str, seed: int) -> Path:
    return folder / f"{model}-seed-{seed}.safetensors"


def pretrained(folder: Path, model: str, seed: int) -> nn.Module:
    """The network with the weights that `bench.Bench.pretrain` left."""
    network = pipeline.build_seeded(model, seed)
    network.load_state_dict(load_file(weights_file(folder, model, seed)))
    return network


def paper_bytes(compressed: CompressedModel, model: str) -> int:
    """Size in the paper's accounting: its codec (CSR, Huffman), without what makes a file of it."""
    blob = codec.encode(compressed, "csr-huffman", offset_bits=OFFSET_BITS[model])
    return len(blob) - sum(codec.describe(blob).parts.get(part, 0) for part in NOT_COUNTED)


def parser(description: str | None, seeds: int = 5, epochs_scale: float = 1.0) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--seeds", type=int, default=seeds, help="how many seeds, from 0")
    options.add_argument("--only", default="", help="only runs whose name contains this")
    options.add_argument("--together", type=int, default=None, help="networks trained at once; by default 32 on a GPU")
    options.add_argument(
        "--pretrained", type=Path, default=RESULTS / "pretrained", help="where pretrained networks are"
    )
    options.add_argument(
        "--epochs-scale", type=float, default=epochs_scale, help="factor on all epochs but those of pretraining"
    )
    return options
