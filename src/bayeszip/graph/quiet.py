"""torch's exporters without what they say on the way: `quiet`."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

__all__ = ["quiet"]

#: Those that speak when a network is followed. torch sets levels of some by themselves, so parents don't do for all.
_LOGGERS = (
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log below critical, nothing on stderr: what goes wrong is told by what is raised.

    torch.export prints, not logs, the whole graph that it had when it gave up. Loggers that somebody has set to tell
    more than warnings go on.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [(logger, logger.level) for logger in loggers if logger.getEffectiveLevel() >= logging.WARNING]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
