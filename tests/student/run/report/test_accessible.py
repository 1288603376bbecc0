"""The report for keyboards, screen readers and eyes: structure, names, contrast in light and dark (WCAG 2.2, AA)."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from run_folders import folder

from student.report.page.page import write_report

Tag = tuple[str, dict[str, str]]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = folder(tmp_path_factory.mktemp("report") / "run")
    replica = dict.fromkeys(("teacher", "address", "state", "reason", "engine", "tokens_per_second", "agreement_nats"))
    fleet = {"counters": {"hedges": 3}, "teachers": [], "silent": [], "replicas": [replica]}
    (run / "ending.json").write_text(json.dumps({"how": "finished", "error": "", "fleet": fleet}))
    return write_report(run).read_text()


@pytest.fixture(scope="module")
def tags(page: str) -> list[Tag]:
    found: list[Tag] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, {name: value or "" for name, value in attrs}))

    Reader().feed(page)
    return found


def test_a_reader_finds_its_way_by_landmarks_and_headings(tags: list[Tag]) -> None:
    names = [tag for tag, _ in tags]
    assert dict(tags)["html"]["lang"] == "en" and names.count("h1") == 1
    assert [names.count(name) for name in ("header", "nav", "main", "footer", "title")][:4] == [1, 1, 1, 1]
    levels = [int(tag[1]) for tag in names if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "no level is skipped"
    links = [found["href"] for tag, found in tags if tag == "a"]
    assert names.index("nav") < names.index("main") and len(links) == 7, "the sections can be jumped to"


def test_whatever_takes_the_focus_or_scrolls_says_what_it_is(tags: list[Tag]) -> None:
    focused = [(tag, found) for tag, found in tags if "tabindex" in found]
    assert len(focused) > 20 and all(found["tabindex"] == "0" for _, found in focused), "in the order of the page"
    assert all(found.get("role") in ("region", "note") and found.get("aria-label") for _, found in focused)
    scrolling = [found for tag, found in tags if tag == "pre" or "wide" in found.get("class", "").split()]
    assert len(scrolling) == 4 and all("tabindex" in found for found in scrolling)
    token = next(found for tag, found in focused if tag == "i" and "-0.70" in found["aria-label"])
    assert token["aria-label"] == "token <b>&: -0.70 nats; teacher: '<i>' 90%, 'x' 5%", "what hovering shows"


def test_tables_and_pictures_can_be_read_aloud(page: str, tags: list[Tag]) -> None:
    headings = [found for tag, found in tags if tag == "th"]
    assert len(headings) > 30 and all(found.get("scope") in ("row", "col") for found in headings)
    pictures = [at for at, (tag, found) in enumerate(tags) if tag == "svg" and found.get("aria-hidden") != "true"]
    assert len(pictures) > 5
    for at in pictures:
        assert tags[at][1]["role"] == "img" and [tag for tag, _ in tags[at + 1 : at + 3]] == ["title", "desc"]
    assert re.search(r"<desc>[^<]*reverse_kl from 1 to ", page), "a curve is said in words"


def palettes(page: str) -> dict[str, dict[str, tuple[float, ...]]]:
    """Colours of both schemes by name, in 0..1."""
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)

    def read(text: str) -> dict[str, tuple[float, ...]]:
        pairs = re.findall(r"--(\w+):#(\w+);", text)
        wide = {name: "".join(c * 2 for c in code) if len(code) == 3 else code for name, code in pairs}
        return {name: tuple(int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, code in wide.items()}

    return {"light": read(light), "dark": read(light) | read(dark)}


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_in_both_schemes(page: str, scheme: str) -> None:
    colours = palettes(page)[scheme]
    for ground in (colours["bg"], colours["card"]):
        for name in ("fg", "dim", "bad", "good", "c0"):
            assert contrast(colours[name], ground) >= 4.5, name
        for index in range(8):
            assert contrast(colours[f"c{index}"], ground) >= 3.0, f"curve {index}"
    for name in ("hot", "cold"):
        for depth in (0.25, 0.5, 0.75, 1.0):
            mixed = tuple(depth * a + (1 - depth) * b for a, b in zip(colours[name], colours["card"], strict=True))
            assert contrast(colours["fg"], mixed) >= 4.5, f"text on a {name} token at {depth}"
