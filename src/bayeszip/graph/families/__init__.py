"""The operators of the closed list, family by family: a file holds all that is known about each of its operators."""

from bayeszip.graph.composed import COMPOSED
from bayeszip.graph.families import elementwise, layout, norms, pooling, recurrent, reduction, tables, weighted
from bayeszip.graph.families.base import Rule
from bayeszip.graph.lowering import Lower

__all__ = ["ATEN", "RULES"]

_FAMILIES = (tables, weighted, recurrent, norms, pooling, elementwise, reduction, layout)

#: An operator's name → all that is known about it.
RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.OPERATORS.items()}

#: A call of ATen's → what it becomes: one of our operators as a rule, several where it is composed.
ATEN: dict[str, Lower] = {call: lower for family in _FAMILIES for call, lower in family.ATEN.items()} | COMPOSED
