"""Several processes, on one machine or many, through Hugging Face Accelerate."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bayeszip.errors import DataError, ModelError, RecipeError, TrainingError
from bayeszip.fitting.batches import Loader
from bayeszip.fitting.engine import in_precision
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.shares import LoaderShare, ResidentShare, Shared, SlicedShare, checksum

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ManyProcesses"]

#: Elements summed at once over all processes: large enough to keep the network busy, small beside the parameters.
BUCKET = 2**24

#: Ways of Accelerate to train what does not fit into one process.
DIVIDE_THE_NETWORK = ("DEEPSPEED", "FSDP", "MEGATRON_LM")

#: How long the others wait for the main process when it evaluates and measures. One that is gone is noticed earlier.
PATIENCE = timedelta(minutes=30)


class ManyProcesses:
    """One of several processes that train together; see `engine.Engine`.

    Gradients are summed here and not by torch's `DistributedDataParallel`: it can't follow parameters that lose rows
    and columns, nor those of terms, which are not the network's, nor a batch too small to give each process an example.

    Args:
        device: on which this process computes.
        mixed_precision: `no` or `bf16`.
        accumulate: in how many parts to compute each share.
        seed: of the order in which to go through a `DataLoader`.

    Raises:
        ModelError: accelerate is not installed, or the processes can't reach each other.
    """

    def __init__(self, device: torch.device, mixed_precision: str, accumulate: int, seed: int) -> None:
        self._accelerator = _accelerator(device, seed)
        self.accumulate = accumulate
        self.processes: int = self._accelerator.num_processes
        self.is_main: bool = self._accelerator.is_main_process
        self._rank: int = self._accelerator.process_index
        self._device, self.mixed_precision = device, mixed_precision
        self._shares: dict[int, Shared] = {}

    def share(self, loader: Loader) -> Loader:
        # One for each loader, however often it is asked for: its passes are counted.
        if id(loader) not in self._shares:
            self._shares[id(loader)] = self._new_share(loader)
        return self._shares[id(loader)]

    def _new_share(self, loader: Loader) -> Shared:
        if isinstance(loader, ResidentBatches):
            return ResidentShare(loader, self._rank, self.processes)
        if not isinstance(loader, DataLoader):
            return SlicedShare(loader, self._rank, self.processes, self.check_alike)
        try:
            prepared = self._accelerator.prepare_data_loader(loader, device_placement=False)
        except ValueError as error:
            raise DataError(f"the loader can't be shared by {self.processes} processes: {error}") from error
        return LoaderShare(prepared, self.processes)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        # Not accelerate's own: it has one precision for the life of a process.
        return in_precision(self.mixed_precision, self._device)

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            with self._in_touch():
                total = self._accelerator.reduce(torch.cat([tensor.flatten() for tensor in bucket]), "sum")
            for tensor, part in zip(bucket, total.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def begin(self, *modules: nn.Module) -> None:
        from accelerate.utils import broadcast

        with self._in_touch():
            for tensor in (tensor for module in modules for _, tensor in _named_tensors(module)):
                tensor.copy_(broadcast(tensor.clone()))
        if self._rank:
            # Drawn from what all have in common after a start or a resumption; the main one draws as if it were alone.
            torch.manual_seed((int(torch.randint(2**62, ())) + self._rank) % 2**63)

    @torch.no_grad()
    def level_buffers(self, module: nn.Module) -> None:
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self.add_up(buffers)
        for buffer in buffers:
            buffer.div_(self.processes)

    def from_main(self, value: Callable[[], float]) -> float:
        from accelerate.utils import broadcast

        # float64 is not known to every device that trains.
        known = torch.tensor([value() if self.is_main else 0.0], dtype=torch.float64)
        bits = known.view(torch.int32).to(self._device)
        with self._in_touch():
            shared: Tensor = broadcast(bits)
        return float(shared.cpu().view(torch.float64)[0])

    def check_alike(self, tensors: Mapping[str, Tensor], where: str) -> None:
        if not tensors:
            return
        own = torch.stack([checksum(tensor).to(self._device) for tensor in tensors.values()])
        with self._in_touch():
            all_sums: Tensor = self._accelerator.gather(own[None])
        same = (all_sums == all_sums[:1]).cpu()
        if same.all():
            return
        rank, which = (int(index) for index in (~same).nonzero()[0])
        raise TrainingError(
            f"{where}: {list(tensors)[which]} of process {rank} is not that of process 0, so they no longer train the "
            "same network. Are versions, devices and data the same on all machines?"
        )

    def describe(self, device: str) -> str:
        return f"{self.processes} × {device}"

    @contextlib.contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise TrainingError(
                "this process has lost touch with the others; what ended them was said by them "
                f"({type(error).__name__}: {str(error).splitlines()[0][:120]}…)"
            ) from error


def _accelerator(device: torch.device, seed: int) -> "Accelerator":
    try:
        from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
    except ImportError as error:
        raise ModelError(
            "several processes were launched; together they need accelerate: pip install 'bayeszip[distributed]'"
        ) from error
    # Batches are split, not multiplied: results don't depend on the number of processes.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=seed)
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    try:
        accelerator = Accelerator(cpu=device.type == "cpu", dataloader_config=loading, kwargs_handlers=[patience])
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the processes can't work together: {error}") from error
    kind = accelerator.distributed_type.value
    if kind in DIVIDE_THE_NETWORK:
        raise RecipeError(f"every process trains the whole network; leave {kind} out of Accelerate's configuration")
    return accelerator


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type at a time, together at most `BUCKET` elements unless one alone has more."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_type.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket
