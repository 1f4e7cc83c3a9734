"""Writes docs/operators.md from the closed list of operators.

python docs/build_operators.py
"""

from pathlib import Path

from bayeszip.operators import OPERATORS, Attribute, Operator

PAGE = Path(__file__).with_name("operators.md")


def page() -> str:
    """The list as a table."""
    rows = [_row(operator) for operator in sorted(OPERATORS.values(), key=lambda operator: operator.opcode)]
    return "\n".join(
        [
            "# Operators",
            "",
            "Written by `python docs/build_operators.py` from `src/bayeszip/operators.py`; don't edit.",
            "docs/format.md says how a node is written. A number of inputs of −1 stands for any from one up.",
            "Attributes are given with their kind and the default that costs no bytes; a choice is stored as its place",
            "in the list.",
            "",
            "| opcode | operator | inputs | tensors, by role | attributes |",
            "|---:|---|---:|---|---|",
            *rows,
            "",
        ]
    )


def _row(operator: Operator) -> str:
    attributes = "; ".join(map(_shown, operator.attributes))
    return (
        f"| {operator.opcode} | `{operator.name}` | {operator.inputs} | {', '.join(operator.tensors)} | {attributes} |"
    )


def _shown(attribute: Attribute) -> str:
    kind = "/".join(attribute.choices) if attribute.choices else attribute.kind
    return f"{attribute.name} ({kind}) = {attribute.default}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
