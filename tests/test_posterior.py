"""The posterior is a frozen copy, named as the state dict names it."""

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip.posterior import Posterior
from bayeszip.variational import Divergence, GaussianMixture, MixturePrior, to_variational
from bayeszip.variational.distributions import HALF_LOG_2PI, log_joint


def test_a_frozen_copy_of_every_tensor():
    network = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Conv1d(2, 2, 1, bias=False)).bfloat16()
    to_variational(network)
    prior = MixturePrior(5, 0.3)
    posterior = Posterior.of(network, (Divergence(), prior))
    assert list(posterior.weights) == ["0.weight", "0.bias", "2.weight"]
    for name, weight in posterior.weights.items():
        assert weight.theta.dtype == weight.log_sigma2.dtype == np.float32
        np.testing.assert_array_equal(weight.theta, network.state_dict()[name].float().numpy())
        assert (weight.log_sigma2 == -10).all()
    before = posterior.weights["0.weight"].theta.copy()
    with torch.no_grad():
        network[0].weight.zero_()
        prior.means.zero_()
    np.testing.assert_array_equal(posterior.weights["0.weight"].theta, before)
    assert len(posterior.mixture) == 5
    assert posterior.mixture.means[0] == 0
    assert (posterior.mixture.means[1:] != 0).all()
    assert list(posterior.left) == ["mixture"]
    assert Posterior.of(network).mixture is None


def test_log_joint_is_the_priors_but_for_a_constant():
    prior = MixturePrior(5, 0.3)
    parts = [part.detach() for part in prior.components()]
    values = np.linspace(-1, 1, 9)
    ours = GaussianMixture(*(part.double().numpy() for part in parts)).log_joint(values)
    theirs = log_joint(torch.from_numpy(values), *(part.double() for part in parts)).numpy()
    assert ours - HALF_LOG_2PI == pytest.approx(theirs)
