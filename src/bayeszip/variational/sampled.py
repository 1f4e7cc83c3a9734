"""Layers whose weights themselves are sampled: w = θ + σε, for whatever is computed with them.

Local reparameterization needs to know how outputs depend on weights. A sampled layer needs to know nothing: its class
is exchanged for one in which the names of its Gaussian parameters give a sample in training, and θ otherwise, to
whoever reads them. So recurrent layers (one sample for a whole sequence, as in Chirkova et al. 2018), attention,
bilinear layers and modules of a user's own keep the forward they have. Within one call of the layer a parameter is
drawn once.
"""

from typing import Any

from torch import Tensor, nn

from bayeszip.variational.layers import VariationalLayer
from bayeszip.variational.sampling import standard_normal_like

__all__ = ["sampled_class"]


class SampledLayer(VariationalLayer):
    """What classes that `sampled_class` makes share. Abstract."""

    #: What was drawn in the call that goes on; None: there is none.
    drawn: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        # Not in `forward`, whose signature others look at.
        if self.drawn is not None:
            return super().__call__(*args, **options)
        self.__dict__["drawn"] = {}
        try:
            return super().__call__(*args, **options)
        finally:
            del self.__dict__["drawn"]

    def read(self, role: str) -> Any:
        """A sample of the parameter while the layer is trained with noise, else its mean."""
        theta = self._parameters[role]
        log_sigma2 = self._parameters.get(f"{role}_log_sigma2")
        if theta is None or log_sigma2 is None or not (self.training and self.noise):
            return theta
        if self.drawn is None:
            return self._draw(theta, log_sigma2)
        if role not in self.drawn:
            self.drawn[role] = self._draw(theta, log_sigma2)
        return self.drawn[role]

    def _draw(self, theta: Tensor, log_sigma2: Tensor) -> Tensor:
        noise = standard_normal_like(log_sigma2, self.generator)
        padding = getattr(self, "padding_idx", None)
        if isinstance(padding, int) and theta.dim() == 2:
            # The row of a table that stands for nothing.
            noise[padding] = 0.0
        return theta + ((0.5 * log_sigma2).exp() * noise).to(theta.dtype)


class SampledRecurrent(SampledLayer):
    """`nn.RNNBase` hands torch a list of its weights, which is made when it is asked for."""

    @property
    def _flat_weights(self) -> list[Any]:
        # A type check or two reads it outside of a call; what is computed is computed inside.
        return [self.read(name) if name in self._parameters else None for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Any]) -> None:
        """Others set it to the same."""

    _flat_weights_names: list[str]

    def _update_flat_weights(self) -> None:
        """There is nothing to keep up to date."""

    def flatten_parameters(self) -> None:
        """A sample has no place in memory to keep."""

    def end_posterior(self) -> None:
        super().end_posterior()
        self.__dict__["_flat_weights"] = [self._parameters.get(name) for name in self._flat_weights_names]


#: Classes made so far: those of two layers of a kind are the same.
_MADE: dict[tuple[type, tuple[str, ...]], Any] = {}


def sampled_class(kind: type[nn.Module], roles: tuple[str, ...], makes_columns: bool = False) -> type[SampledLayer]:
    """`kind` with these of its parameters sampled.

    Args:
        makes_columns: as `VariationalLayer.makes_columns`; always the same for a kind.
    """
    base = SampledRecurrent if issubclass(kind, nn.RNNBase) else SampledLayer
    if (kind, roles) not in _MADE:
        members: dict[str, Any] = {role: _reader(role) for role in roles}
        members |= {"roles": roles, "makes_columns": makes_columns}
        _MADE[kind, roles] = type(f"Variational{kind.__name__}", (base, kind), members)
    made: type[SampledLayer] = _MADE[kind, roles]
    return made


def _reader(role: str) -> property:
    return property(lambda layer: layer.read(role))
