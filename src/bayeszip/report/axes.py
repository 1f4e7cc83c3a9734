"""Where things lie in a chart: scales, their ticks, and the frame that shows them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bayeszip.report.markup import Markup, element, join

__all__ = ["Frame", "Scale", "padded"]


@dataclass(frozen=True)
class Scale:
    """From values, `low` to `high`, to places, `start` to `end`; evenly, or evenly in ratio."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def onto(self, start: float, end: float) -> "Scale":
        """The same values at other places."""
        return Scale(self.low, self.high, start, end, self.log)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside, at most about `most`."""
        return list(self._log_ticks(most) if self.log else self._even_ticks(most))

    def _even_ticks(self, most: int) -> Iterator[float]:
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            yield self.low
            return
        rough = span / most
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        for number in range(first, math.floor(self.high / step + 1e-9) + 1):
            yield number * step

    def _log_ticks(self, most: int) -> Iterator[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = max(1, last - first)
        factors = (1, 2, 5) if 3 * decades <= 2 * most else (1,)
        stride = max(1, math.ceil(decades / most))
        start = first if factors != (1,) else math.ceil(math.log10(self.low) - 1e-9)
        for power in range(start, last + 1, stride):
            for factor in factors:
                value = factor * 10.0**power
                if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9):
                    yield value


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """The span of `values` with some room on both sides."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


@dataclass(frozen=True)
class Frame:
    """A chart's size, its two axes, and what they are called."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    x_tick: Callable[[float], str] = "{:g}".format
    y_tick: Callable[[float], str] = "{:g}".format
    width: int = 440
    height: int = 250
    left: int = 52
    right: int = 12
    top: int = 34
    bottom: int = 40

    def place(self) -> tuple[Scale, Scale]:
        """Both scales, onto the chart's own area."""
        return (
            self.x.onto(self.left, self.width - self.right),
            self.y.onto(self.height - self.bottom, self.top),
        )

    def drawn(self, label: str, *marks: object, behind: object = None) -> Markup:
        """The whole chart; `label` says to those who don't see it what it shows."""
        viewed = f"0 0 {self.width} {self.height}"
        return element(
            "svg", behind, self._axes(), *marks, viewBox=viewed, role="img", aria_label=label, class_="chart"
        )

    def _axes(self) -> Markup:
        x, y = self.place()
        base, left, right = self.height - self.bottom, self.left, self.width - self.right
        across = join(
            join(
                (
                    element("line", x1=left, x2=right, y1=y(value), y2=y(value), class_="rule"),
                    element("text", self.y_tick(value), x=left - 7, y=y(value) + 4, class_="tick end"),
                )
            )
            for value in self.y.ticks(5)
        )
        along = join(
            element("text", self.x_tick(value), x=x(value), y=base + 16, class_="tick middle")
            for value in self.x.ticks()
        )
        return join(
            (
                across,
                along,
                element("line", x1=left, x2=right, y1=base, y2=base, class_="axis"),
                element("text", self.x_label, x=(left + right) / 2, y=self.height - 5, class_="label middle"),
                element("text", self.y_label, x=0, y=11, class_="label"),
            )
        )
