"""What can't be collected everywhere, and what no test may leave to the next."""

import importlib.util
import signal
import sys
from collections.abc import Iterator

import pytest

# Kernels in triton, which comes with torch for GPUs alone.
KERNELS = ["src/bayeszip/variational/gpu_kernels.py", "src/bayeszip/variational/gpu_layers.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS


def pytest_configure() -> None:
    """Hear Ctrl-C, which tests press: a shell that starts something in the background has it ignored, by all below."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def modules_of_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Networks and loaders that a test wrote into its folder are not found by another one of the same name."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
