"""docs/report-lenet-5.png, the README's picture of a report: its page on two columns, as Chromium shows it.

python docs/build_thumbnail.py RUN
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from bayeszip.report import gather, page

TARGET = Path(__file__).with_name("report-lenet-5.png")
WIDTH, HEIGHT, SCALE = 2100, 1460, 0.62
#: What a thumbnail has no room for is left out.
STYLE = f"""
main {{ max-width: none; height: {HEIGHT}px; columns: 2; column-gap: 5rem; column-fill: auto; padding: 3rem 3.5rem 0; }}
section {{ margin-top: 2.2rem; }}
details, section:nth-of-type(1) .scroll, section:nth-of-type(2) .note, section:nth-of-type(n + 6) {{ display: none; }}
section, figure {{ break-inside: avoid; }}
.tiles.kernels {{ grid-template-columns: repeat(auto-fill, minmax(3.4rem, 1fr)); gap: .6rem; max-width: none; }}
html, body {{ overflow: hidden; }}
"""


def main() -> None:
    folder = Path(sys.argv[1])
    text = page(gather(folder / "net.bayz", folder)).replace("</style>", f"{STYLE}</style>", 1)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "report.html"
        source.write_text(text, encoding="utf-8")
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={scratch}/profile",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--force-device-scale-factor={SCALE}",
                "--blink-settings=preferredColorScheme=1",
                f"--screenshot={TARGET}",
                source.as_uri(),
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
