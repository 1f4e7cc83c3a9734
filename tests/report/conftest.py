"""A file and the folder of the run that made it, small and quick to make."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from bayeszip import compressing
from bayeszip.recipe import recipe
from bayeszip.record import file_figures, size_figures, write_record
from bayeszip.report import Contents, gather
from bayeszip.snapshots import SNAPSHOTS, SnapshotRecorder


class FinishedRun(NamedTuple):
    folder: object
    file: object
    contents: Contents


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> FinishedRun:
    """A network that tells which half of an 8×8 image is brighter, compressed with `quick` in a few epochs."""
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(240, 1, 8, 8, generator=generator)
    classes = (images[:, :, :4].sum((1, 2, 3)) > images[:, :, 4:].sum((1, 2, 3))).long()
    batches = list(zip(images.split(24), classes.split(24), strict=True))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 2))
    result = compressing.compress(
        network,
        batches,
        val_loader=batches,
        recipe=recipe("quick").override("epochs_scale=0.05"),
        device="cpu",
        pretrain=True,
        watcher=SnapshotRecorder(folder / SNAPSHOTS),
    )
    write_record(
        folder, result, file_figures(result.network(), size_figures(result.description, result.beside), batches)
    )
    return FinishedRun(folder, folder / "net.bayz", gather(folder / "net.bayz", folder))
