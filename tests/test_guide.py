"""The user guide: every snippet runs, in order and in one folder; every message it explains is one that is written."""

import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bayeszip import data
from bayeszip.cli import app, main

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide"

#: At most so many snippets may be left out, each with its reason beside it.
MOST_LEFT_OUT = 2

BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[a-z ]+): (?P<detail>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.S | re.M
)


class Snippet(NamedTuple):
    """A fenced block: Python or commands to run; with a mark before it, a file to write or something to leave out."""

    page: str
    line: int
    language: str
    text: str
    mark: str | None
    detail: str | None

    def __str__(self):
        return f"docs/guide/{self.page}:{self.line}"


def pages():
    """In the order in which the first page links them."""
    index = (GUIDE / "index.md").read_text(encoding="utf-8")
    return ["index.md", *re.findall(r"^\d+\. \[[^]]+\]\(([\w-]+\.md)\)", index, re.M)]


def snippets():
    for page in pages():
        text = (GUIDE / page).read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("language")) + 1
            yield Snippet(page, line, found["language"], found["text"], found["mark"], found["detail"])


def test_the_first_page_links_every_other():
    assert sorted(pages()) == sorted(path.name for path in GUIDE.glob("*.md"))


def test_few_snippets_are_left_out_and_none_silently():
    found = list(snippets())
    assert {snippet.language for snippet in found} <= {"python", "bash"}
    assert {snippet.mark for snippet in found} <= {None, "file", "not run"}
    left_out = [snippet for snippet in found if snippet.mark == "not run"]
    assert len(left_out) <= MOST_LEFT_OUT
    assert all(len(snippet.detail) > 20 for snippet in left_out)
    # A mark that is not right before its block would be read as none.
    marks = sum((GUIDE / page).read_text(encoding="utf-8").count("<!--") for page in pages())
    assert marks == sum(snippet.mark is not None for snippet in found)


def commands(text):
    return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def run_command(words, monkeypatch, where):
    """`bayeszip` in this process, since importing torch takes longer than most commands."""
    assert words[0] == "bayeszip", f"{where}: {words[0]} is not known here"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code, f"{where}: {shlex.join(words)} ends with status {left.value.code}"


@pytest.fixture
def small_mnist(tmp_path_factory, monkeypatch):
    """One in ten of MNIST's images, where the guide's commands find them: they take seconds less."""
    folder, mnist = tmp_path_factory.mktemp("mnist"), data.load("mnist")
    for prefix, split in (("train", mnist.train), ("t10k", mnist.test)):
        pixels = (255 * split.images[::10, 0]).round().to(torch.uint8).numpy()
        for kind, values in (("images-idx3", pixels), ("labels-idx1", split.labels[::10].numpy().astype("uint8"))):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + values.tobytes())
    monkeypatch.setenv("BAYESZIP_DATA", str(folder))


@pytest.mark.usefixtures("small_mnist")
def test_every_snippet_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {}
    for snippet in snippets():
        if snippet.page != names.get("page of the guide"):
            names = {"page of the guide": snippet.page, "__name__": "guide"}
        if snippet.mark == "not run":
            continue
        if snippet.mark == "file":
            (tmp_path / snippet.detail).write_text(snippet.text, encoding="utf-8")
        elif snippet.language == "bash":
            for words in commands(snippet.text):
                run_command(words, monkeypatch, snippet)
        else:
            try:
                exec(compile(snippet.text, str(snippet), "exec"), names)
            except Exception as error:
                raise AssertionError(f"{snippet} fails: {type(error).__name__}: {error}") from error
    for name in ("net.bayz", "report.html", "net.onnx", "sweep/front.svg"):
        assert (tmp_path / name).stat().st_size > 0


def test_commands_named_anywhere_in_the_guide_exist():
    known = {command.callback.__name__ for command in app.registered_commands}
    text = "\n".join((GUIDE / page).read_text(encoding="utf-8") for page in pages())
    named = set(re.findall(r"`bayeszip (\w+)", text)) | {
        words[words.index("bayeszip") + 1]
        for snippet in snippets()
        if snippet.language == "bash"
        for words in commands(snippet.text)
        if "bayeszip" in words
    }
    assert {"compress", "evaluate", "info", "verify", "export", "report", "sweep", "recipes"} <= named <= known


def test_messages_that_are_explained_are_ones_that_are_written():
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "bayeszip").rglob("*.py")))
    # Literals that continue on the next line are one.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| `([^`]+)` \|", (GUIDE / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 15
    assert [message for message in rows if message not in source] == []


def test_the_pages_are_built_and_no_link_is_broken(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "guide" / "first.html").read_text(encoding="utf-8")
    assert "bayeszip compress lenet-300-100" in re.sub("<[^>]*>", "", page)  # without its colors
