"""The page in a real browser: it renders, quietly, light and dark, on a wide screen and on a phone."""

import html
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from bayeszip import CompressedModel, QuantizedTensor, codec
from bayeszip.report import gather, page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; apt-get install chromium")

#: Shows a page as wide as a phone (a browser's own window can't be as narrow) and measures what lies in it.
RULER = """<!DOCTYPE html><body>
<iframe style="width:{width}px;height:800px;border:0" srcdoc="{page}"></iframe><pre id="measured"></pre>
<script>
const frame = document.querySelector("iframe");
const sticksOut = (text, view) => {{
  const box = text.getBBox();
  return box.x < -2 || box.y < -2 || box.x + box.width > view.width + 14 || box.y + box.height > view.height + 4;
}};
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const charts = [...page.querySelectorAll("svg.chart")];
  const texts = chart => [...chart.querySelectorAll("text")].filter(text => sticksOut(text, chart.viewBox.baseVal));
  document.getElementById("measured").textContent = JSON.stringify({{
    width: root.scrollWidth, shown: root.clientWidth, height: root.scrollHeight,
    empty: [...page.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().height < 4).length,
    outside: charts.flatMap(texts).map(text => text.textContent),
    scripts: page.querySelectorAll("script, img").length, broken: root.dataset.broken || ""
  }});
}};
</script>"""


def browse(target, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    folder = target.parent / f"profile-{len(os.listdir(target.parent))}"
    run = subprocess.run(
        [*command, "--enable-logging=stderr", f"--user-data-dir={folder}", *options, target.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run


def said(run):
    """What the page wrote to the browser's console: errors of scripts, of styles, of what it may not fetch."""
    return [line for line in run.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture(scope="module")
def written(finished, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(finished.contents), encoding="utf-8")
    return path


def picture(path, scheme):
    target = path.with_name(f"{scheme}.png")
    number = {"dark": 0, "light": 1}[scheme]
    run = browse(
        path, f"--screenshot={target}", "--window-size=1000,1400", f"--blink-settings=preferredColorScheme={number}"
    )
    assert said(run) == []
    return imread(target)[..., :3]


def test_it_renders_light_and_dark(written):
    light, dark = picture(written, "light"), picture(written, "dark")
    assert light.shape == dark.shape == (1400, 1000, 3)
    assert light.mean() > 0.8 > 0.25 > dark.mean()
    for shown in (light, dark):
        shades = np.rint(255 * shown).astype(int) @ [1, 256, 65536]
        assert len(np.unique(shades)) > 50  # so not blank


def measured(text, folder, width):
    path = folder / f"ruler-{width}.html"
    path.write_text(RULER.format(page=html.escape(text), width=width), encoding="utf-8")
    run = browse(path, "--dump-dom", "--window-size=1400,1000", "--virtual-time-budget=5000")
    assert said(run) == []
    return json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', run.stdout, re.DOTALL).group(1)))


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_sticks_out_of_the_page(finished, tmp_path, width):
    seen = measured(page(finished.contents), tmp_path, width)
    assert seen["shown"] == width
    assert seen["width"] <= width
    assert seen["height"] > 2000
    assert seen["empty"] == 0
    assert seen["outside"] == []


def test_hostile_and_long_names_do_nothing(tmp_path):
    names = ["<img src=x onerror=document.documentElement.dataset.broken=1>", "block." * 150]
    tensor = QuantizedTensor(np.array([[0, 1], [1, 0]]), np.array([0, 1.5], np.float32))
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(dict.fromkeys(names, tensor))))
    seen = measured(page(gather(tmp_path / "net.bayz")), tmp_path, 390)
    assert (seen["scripts"], seen["broken"]) == (0, "")
    assert seen["width"] <= 390


def test_the_console_would_have_been_heard(tmp_path):
    """A page that does go wrong, so that the silence of the others means something."""
    path = tmp_path / "bad.html"
    path.write_text("<body><script>console.error('heard')</script>", encoding="utf-8")
    assert any("heard" in line for line in said(browse(path, "--dump-dom")))
