"""Settings as documented, checked fields of frozen dataclasses, and their way to JSON and back."""

import dataclasses
import math
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bayeszip.errors import RecipeError

__all__ = [
    "as_number",
    "at_least",
    "between",
    "check",
    "choice",
    "from_dict",
    "parsed",
    "positive",
    "printable",
    "setting",
    "to_dict",
]

Rule = tuple[str, Callable[[Any], bool]]


def at_least(low: float) -> Rule:
    return f"at least {low:g}", lambda value: value >= low


def between(low: float, high: float) -> Rule:
    return f"between {low:g} and {high:g}", lambda value: low <= value <= high


def choice(*options: str) -> Rule:
    return f"one of {', '.join(options)}", lambda value: value in options


positive: Rule = ("greater than 0", lambda value: value > 0)

#: For names: a recipe may come from anyone, and what it calls things is shown on a terminal.
printable: Rule = ("a line of printable characters", str.isprintable)


def setting(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A dataclass field with its documentation and the rule that `check` holds it to."""
    return dataclasses.field(default=default, metadata={"doc": doc, "rule": rule})


def check(settings: Any, where: str) -> None:
    """Hold every field to its type and its rule.

    Raises:
        RecipeError: names `where.field`, the value and what it must be.
    """
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        kind = hints[field.name]
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            value = _as_float(value)
            object.__setattr__(settings, field.name, value)
        if kind in (bool, int, float, str) and type(value) is not kind:
            raise RecipeError(f"{where}.{field.name} must be of type {kind.__name__}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError(f"{where}.{field.name} must be finite, not {value!r}")
        rule = field.metadata.get("rule")
        if rule and not rule[1](value):
            raise RecipeError(f"{where}.{field.name} must be {rule[0]}, not {value!r}")


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_number(name: str, value: Any, *, whole: bool) -> Any:
    """A number that a caller gives, numpy's among them, as Python's own.

    Raises:
        RecipeError: it is none, or not whole.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
        raise RecipeError(f"{name} must be a {'whole ' * whole}number, not {value!r}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as what JSON can hold."""
    return dataclasses.asdict(settings)


def from_dict(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Settings of `kind` from `to_dict`'s form; fields left out take their defaults, unknown ones are refused."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where} must be an object of settings, not {values!r}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    _refuse_unknown(set(values) - known, known, where)
    return kind(**{name: _value_from(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def parsed(settings: Any, texts: Mapping[str, str], where: str, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Plain fields of `settings`, each read from its text; who misspells one is told those `beside` these too."""
    hints = typing.get_type_hints(type(settings))
    plain = {field.name for field in dataclasses.fields(settings) if hints[field.name] in (bool, int, float, str)}
    _refuse_unknown(set(texts) - plain, plain, where, beside)
    return {name: _parse(hints[name], text, f"{where}.{name}") for name, text in texts.items()}


def _parse(kind: type, text: str, where: str) -> Any:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise RecipeError(f"{where} must be true or false, not {text!r}")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"{where} must be of type {kind.__name__}, not {text!r}") from None


def _value_from(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return from_dict(kind, value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where} must be a list of settings, not {value!r}")
        item = typing.get_args(kind)[0]
        return tuple(_value_from(item, part, f"{where}[{index}]") for index, part in enumerate(value))
    return value


def _refuse_unknown(unknown: set[str], known: set[str], where: str, beside: Sequence[str] = ()) -> None:
    if unknown:
        listed = ", ".join((*sorted(known), *beside))
        raise RecipeError(f"{where} has no setting {', '.join(sorted(unknown))}; known: {listed}")
