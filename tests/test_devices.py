"""Devices by name."""

import pytest
import torch

from bayeszip.devices import resolve_device
from bayeszip.errors import ModelError, UsageError


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_a_name_that_no_device_has_is_answered_with_names(name):
    with pytest.raises(ModelError) as refused:
        resolve_device(name)
    assert str(refused.value) == f"there is no device {name!r}; give auto, cpu, cuda or cuda:1"
    assert isinstance(refused.value, UsageError)


def test_a_device_that_is_not_here_is_no_mistake_in_its_name():
    with pytest.raises(ModelError, match="device cuda:99 can't be used here: ") as refused:
        resolve_device("cuda:99")
    assert not isinstance(refused.value, UsageError)


def test_devices_by_name():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
