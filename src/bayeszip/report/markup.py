"""HTML and SVG built from elements: text is escaped where it enters, so no name in a file can become markup."""

import html
from collections.abc import Iterable

from bayeszip.errors import printable

__all__ = ["Markup", "element", "join"]

#: Elements of HTML that have no content and no end.
VOID = {"meta"}


class Markup(str):
    """Text that is HTML already. Any other text is escaped as soon as it is put among elements."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. In names of attributes `_` stands for `-`, and one at the end for nothing; None leaves one out.

    >>> element("a", "1 < 2", class_="x", data_y=0.5, title=None)
    '<a class="x" data-y="0.5">1 &lt; 2</a>'
    """
    opening = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{opening}>" if name in VOID else f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Iterable[object], between: str = "") -> Markup:
    """Children one after the other, escaped unless they are markup; None is nothing."""
    written = (
        child if isinstance(child, Markup) else _escaped(_shown(child)) for child in children if child is not None
    )
    return Markup(between.join(written))


def _shown(value: object) -> str:
    """Coordinates need no more than hundredths."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) >= 0.005 else "0"
    return str(value)


def _escaped(text: str) -> str:
    return html.escape(printable(text))
