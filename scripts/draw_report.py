"""Take the picture of a run's report for the documentation: python scripts/draw_report.py RUN OUT.png [WIDTH HEIGHT].

Headless Chromium draws the page without the sections on what was run, the fleet and the costs, which show where it ran.
The browser is the one on the PATH, or the one that `make browser` unpacks.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from student.report.page.page import write_report


def browser() -> str | None:
    """Path of a Chromium, None where there is none."""
    unpacked = Path(sys.prefix) / "chromium"
    names = ("chromium", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), shutil.which("chromium", path=unpacked))


def screenshot(page: Path, out: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Draw the top of a page.

    Raises:
        RuntimeError: when there is no browser.
    """
    program = browser()
    if program is None:
        raise RuntimeError("Chromium is not installed; run `make browser`, which gets Debian's")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        size, picture = f"--window-size={width},{height}", f"--screenshot={out.absolute()}"
        command = [program, *flags, scheme, size, picture, page.absolute().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def without_places(html: str) -> str:
    """The page without the sections that say where a run was made."""
    for first, following in (("what", "curves"), ("fleet", "answers")):
        html = re.sub(rf'<h2 id="{first}">.*?(?=<h2 id="{following}">)', "", html, flags=re.DOTALL)
    return html


if __name__ == "__main__":
    run, target = Path(sys.argv[1]), Path(sys.argv[2])
    wide, high = (int(word) for word in (*sys.argv[3:5], "1200", "2000")[:2])
    with tempfile.TemporaryDirectory() as scratch:
        path = write_report(run, Path(scratch) / "report.html")
        path.write_text(without_places(path.read_text(encoding="utf-8")), encoding="utf-8")
        screenshot(path, target, wide, high)
