"""One rank of a data-parallel training with a Compressor: run by test_ranks.py; prints what it came to."""

import hashlib
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bayeszip.compressor import Compressor
from bayeszip.recipe import recipe

N = 256


def data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 3
    inputs = torch.randn(N, 12, generator=generator)
    inputs[:, :4] += 3 * F.one_hot(labels, 4).float()
    return inputs, labels


def main(rank, world, meeting, settings):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    compressor = Compressor(model, recipe("quick").override(*settings), n_data=N)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    torch.manual_seed(100 + rank)
    inputs, labels = (part.view(4, world, 64 // world, -1)[:, rank] for part in data())
    for step in range(compressor.total_steps):
        loss = F.cross_entropy(parallel(inputs[step % 4]), labels[step % 4].flatten()) + compressor.regularizer()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        compressor.step()
    digest = hashlib.sha256()
    for parameter in (*model.parameters(), *compressor.terms[1].parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    stats = compressor.stats()
    result = compressor.finalize(example_inputs=(data()[0][:2],)) if rank == 0 else None
    dist.barrier()
    dist.destroy_process_group()
    outcome = {"weights": digest.hexdigest(), "zeros": stats.zeros, "file": None if result is None else result.bytes}
    print(json.dumps(outcome))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
