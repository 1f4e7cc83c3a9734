"""Every odd tensor, type and module in a loop of one's own: compressed, or refused with one error that names it."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bayeszip import codec
from bayeszip.compressor import Compressor
from bayeszip.errors import BayeszipError, TrainingError

#: The same list as for `compress`.
LISTED = runpy.run_path(str(Path(__file__).parents[1] / "test_inputs_compress.py"))
INPUTS, LABELS, QUICK = LISTED["INPUTS"], LISTED["LABELS"], LISTED["QUICK"]


def compress(network, inputs, settings=QUICK):
    compressor = Compressor(network, settings, n_data=len(inputs), batch_size=8)
    optimizer = torch.optim.Adam(compressor.parameter_groups(), fused=True)
    compressor.set_rates_of(optimizer)
    for step in range(compressor.total_steps):
        rows = slice(step % 3 * 8, step % 3 * 8 + 8)
        loss = F.cross_entropy(network(inputs[rows]).float(), LABELS[rows]) + compressor.regularizer()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        compressor.step()
    return compressor.finalize(example_inputs=inputs[:2])


def inputs_for(network):
    dtype = next(parameter.dtype for parameter in network.parameters() if parameter.is_floating_point())
    return INPUTS.to(dtype) if dtype.itemsize > 1 else INPUTS


@pytest.mark.parametrize("name", [*LISTED["TENSORS"], *LISTED["MODULES"]])
@pytest.mark.filterwarnings("ignore:.*torch.compile.*", "ignore::DeprecationWarning:torch")
def test_tensors_types_and_modules(name):
    network = {**LISTED["TENSORS"], **LISTED["MODULES"]}[name]()
    inputs = inputs_for(network)
    result = compress(network, inputs)
    assert codec.decode(result.blob) == result.compressed
    with torch.no_grad():
        outputs = result.network()(inputs)
        assert torch.isfinite(outputs.float()).all()
        assert outputs.shape == network.eval()(inputs).shape


@pytest.mark.parametrize("name", [*LISTED["REFUSED_TENSORS"], *LISTED["REFUSED_MODULES"]])
def test_what_is_refused_is_named(name):
    build, message = {**LISTED["REFUSED_TENSORS"], **LISTED["REFUSED_MODULES"]}[name]
    with pytest.raises(BayeszipError, match=message) as caught:
        compress(build(), INPUTS)
    assert len(str(caught.value)) < 400


def test_nan_in_the_data_is_caught_within_a_step():
    with pytest.raises(TrainingError, match=r"phase vd, step 1: .* is no longer finite"):
        compress(LISTED["mlp"](), INPUTS * torch.nan)


@pytest.mark.parametrize("change", ["all.tau1=0", "all.rate_theta=0", "mixture.components=1", "all.rate_log_sigma2=0"])
def test_settings_at_their_ends(change):
    result = compress(LISTED["mlp"](), INPUTS, QUICK.override(change))
    assert codec.decode(result.blob) == result.compressed


def test_one_example():
    network = LISTED["mlp"]()
    compressor = Compressor(network, QUICK, n_data=1)
    for _ in range(compressor.total_steps):
        (F.cross_entropy(network(INPUTS[:1]), LABELS[:1]) + compressor.regularizer()).backward()
        compressor.step()
    assert compressor.finalize(example_inputs=INPUTS[:1]).bytes > 0
