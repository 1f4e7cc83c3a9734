"""What `make docs` adds to the pages: the files that they mention, the reference from docstrings, colors for code.

A line `::: NAME` becomes the signature and the docstring of `bayeszip.NAME`. A block after `<!-- file: NAME -->` gets
its name above it; a page that mentions such a file of another page, as `nets.py` or `nets:small`, shows it at its end.
"""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import bayeszip

GUIDE = Path(__file__).parent / "guide"
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n(?P<block>^```\w*\n.*?^```)", re.S | re.M)
SECTION = re.compile(r"^(Args|Returns|Raises):$", re.M)
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \w+)*): ", re.M)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page as it is built (a hook of mkdocs)."""
    return written(markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Colors for code, beside the pages (a hook of mkdocs)."""
    from pygments.formatters import HtmlFormatter

    Path(config["site_dir"], "highlight.css").write_text(HtmlFormatter().get_style_defs(".codehilite"), "utf-8")


def written(markdown: str) -> str:
    """A page with all that is added to it."""
    files = {
        found["name"]: found["block"]
        for path in sorted(GUIDE.glob("*.md"))
        for found in FILE.finditer(path.read_text("utf-8"))
    }
    own = {found["name"] for found in FILE.finditer(markdown)}
    mentioned = [
        name
        for name in files
        if name not in own and re.search(rf"\b{re.escape(name)}\b|\b{Path(name).stem}:\w", markdown)
    ]
    shown = FILE.sub(lambda found: f"`{found['name']}`:\n\n{found['block']}", markdown)
    shown = re.sub(r"^::: (\w+)$", lambda found: described(found[1]), shown, flags=re.M)
    if mentioned:
        shown += "\n## Files on this page\n"
        shown += "".join(f"\n`{name}`:\n\n{files[name]}\n" for name in mentioned)
    return shown


def described(name: str) -> str:
    """A public name: its signature, its docstring, and those of its public methods."""
    thing = getattr(bayeszip, name)
    thing = getattr(thing, name, thing) if inspect.ismodule(thing) else thing
    parts = [f"## {name}", *_told(name, thing)]
    members = vars(thing).items() if inspect.isclass(thing) else ()
    for member, value in members:
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(function):
            parts += [f"### {name}.{member}", *_told(member, function, call=not isinstance(value, property))]
    return "\n\n".join(parts)


def _told(name: str, thing: Any, *, call: bool = True) -> list[str]:
    parts = [inspect.cleandoc(inspect.getdoc(thing) or "")]
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    if call and not is_error and (inspect.isclass(thing) or inspect.isfunction(thing)):
        parts.insert(0, f"```python\n{_signature(name, thing)}\n```")
    return [_sections(part) for part in parts if part]


def _signature(name: str, thing: Any) -> str:
    """A signature, a line for each argument where one line is too long."""
    signature = inspect.signature(thing)
    whole = _short(f"{name}{signature}")
    if len(whole) <= 100:
        return whole
    shown, keyword = [], False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not keyword:
            keyword = True
            shown.append("*")
        shown.append(_short(str(each)))
    returns = "" if signature.return_annotation is signature.empty else _short(str(signature).rpartition(") -> ")[2])
    listed = "".join(f"    {each},\n" for each in shown)
    return f"{name}(\n{listed})" + (f" -> {returns}" if returns else "")


def _short(signature: str) -> str:
    """Without the modules that types come from, and with functions by their names."""
    return re.sub(r"<function (\w+) at \w+>", r"\1", re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", signature))


def _sections(text: str) -> str:
    """Arguments, results and errors as lists."""
    head, *rest = SECTION.split(text)
    shown = [head.strip()]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        entries, _, after = body.strip("\n").partition("\n\n")
        entries = textwrap.dedent(entries)
        if title == "Returns":
            shown.append(f"**{title}** {' '.join(entries.split())}")
        else:
            items = re.split(r"\n(?=\S)", entries)
            lines = [ENTRY.sub(r"`\1`: ", " ".join(item.split()), count=1) for item in items]
            shown.append("\n".join([f"**{title}**", "", *(f"- {line}" for line in lines)]))
        if after:
            shown.append(_sections(textwrap.dedent(after)))
    return "\n\n".join(part for part in shown if part)
