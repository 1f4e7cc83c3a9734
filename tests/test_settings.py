"""Settings: types, rules, JSON and back, overrides; each error names the field."""

import dataclasses
import json
from dataclasses import dataclass

import pytest

from bayeszip.errors import RecipeError
from bayeszip.settings import at_least, between, check, choice, from_dict, parsed, positive, setting, to_dict


@dataclass(frozen=True)
class Inner:
    name: str = setting("a", "a name", choice("a", "b"))
    share: float = setting(0.5, "a share", between(0, 1))

    def __post_init__(self) -> None:
        check(self, "inner")


@dataclass(frozen=True)
class Outer:
    count: int = setting(3, "a count", at_least(1))
    rate: float = setting(1e-3, "a rate", positive)
    on: bool = setting(True, "a switch")
    inner: Inner = dataclasses.field(default_factory=Inner)
    many: tuple[Inner, ...] = ()

    def __post_init__(self) -> None:
        check(self, "outer")


def test_json_and_back():
    settings = Outer(count=7, many=(Inner("b"), Inner(share=0.1)))
    text = json.dumps(to_dict(settings))
    assert from_dict(Outer, json.loads(text), "outer") == settings
    assert from_dict(Outer, {}, "outer") == Outer()


def test_whole_numbers_serve_as_floats():
    settings = Outer(rate=1)
    assert settings.rate == 1.0
    assert type(settings.rate) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "outer.count must be at least 1, not 0"),
        ({"count": True}, "outer.count must be of type int, not True"),
        ({"count": "3"}, "outer.count must be of type int, not '3'"),
        ({"rate": 0.0}, "outer.rate must be greater than 0, not 0.0"),
        ({"rate": float("inf")}, "outer.rate must be finite, not inf"),
        ({"on": 1}, "outer.on must be of type bool, not 1"),
        ({"inner": {"name": "c"}}, "inner.name must be one of a, b, not 'c'"),
        ({"inner": {"share": 1.5}}, "inner.share must be between 0 and 1, not 1.5"),
        ({"inner": {"nmae": "a"}}, r"outer\.inner has no setting nmae; known: name, share"),
        ({"many": [{}, {"x": 1, "y": 2}]}, r"outer\.many\[1\] has no setting x, y; known: name, share"),
        ({"inner": 3}, r"outer\.inner must be an object of settings, not 3"),
        ({"many": 3}, r"outer\.many must be a list of settings, not 3"),
        ({"many": "ab"}, r"outer\.many must be a list of settings, not 'ab'"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(RecipeError, match=message):
        from_dict(Outer, values, "outer")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("count", "12", 12), ("rate", "2e-4", 2e-4), ("rate", "3", 3.0), ("on", "false", False), ("on", "YES", True)],
)
def test_override(name, text, value):
    settings = dataclasses.replace(Outer(), **parsed(Outer(), {name: text}, "outer"))
    assert getattr(settings, name) == value
    assert dataclasses.replace(settings, **{name: getattr(Outer(), name)}) == Outer()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "1.5", "outer.count must be of type int, not '1.5'"),
        ("count", "0", "outer.count must be at least 1"),
        ("rate", "fast", "outer.rate must be of type float, not 'fast'"),
        ("rate", "nan", "outer.rate must be finite"),
        ("on", "maybe", "outer.on must be true or false, not 'maybe'"),
        ("speed", "1", "outer has no setting speed; known: count, on, rate"),
        ("inner", "{}", "outer has no setting inner"),
    ],
)
def test_overrides_that_are_refused(name, text, message):
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(Outer(), **parsed(Outer(), {name: text}, "outer"))


def test_who_misspells_a_setting_is_told_those_beside_it():
    with pytest.raises(RecipeError, match=r"no setting speed; known: count, on, rate, far\.speed"):
        parsed(Outer(), {"speed": "1"}, "outer", ["far.speed"])
