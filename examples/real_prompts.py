"""The prompts of examples/real.py: questions by templates, with answers that can be found in a reply by their words.

Two thirds are to train on, a third is to evaluate on. The domain "open" has no reference answers.
"""

import json
from collections.abc import Iterator
from itertools import chain, combinations_with_replacement, zip_longest
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_CAPITALS = (
    "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Russia Moscow, Egypt Cairo, Greece Athens, "
    "Austria Vienna, Ireland Dublin, Portugal Lisbon, Sweden Stockholm, Finland Helsinki, Cuba Havana, Peru Lima, "
    "Kenya Nairobi, China Beijing, Iran Tehran, Iraq Baghdad, Hungary Budapest, Belgium Brussels, Turkey Ankara, "
    "Canada Ottawa, Chile Santiago, Thailand Bangkok, Vietnam Hanoi, Norway Oslo, Poland Warsaw, Denmark Copenhagen, "
    "Romania Bucharest, Bulgaria Sofia, Scotland Edinburgh, Ukraine Kyiv, Nepal Kathmandu, Syria Damascus, "
    "Lebanon Beirut, Morocco Rabat, Venezuela Caracas, Indonesia Jakarta, Australia Canberra, Iceland Reykjavik, "
    "England London, Bolivia Sucre, Uruguay Montevideo"
)
_CONTINENTS = (
    "France Europe, Japan Asia, Egypt Africa, Spain Europe, China Asia, Kenya Africa, Italy Europe, India Asia, "
    "Nigeria Africa, Germany Europe, Thailand Asia, Ghana Africa, Poland Europe, Vietnam Asia, Greece Europe, "
    "Nepal Asia, Morocco Africa, Sweden Europe, Iran Asia, Ethiopia Africa, Norway Europe, Korea Asia, Senegal Africa, "
    "Ireland Europe, Mongolia Asia, Uganda Africa, Austria Europe, Iraq Asia, Angola Africa, Portugal Europe"
)
_OPPOSITES = (
    "hot cold, big small, up down, old young, fast slow, day night, happy sad, open closed, black white, early late, "
    "full empty, hard soft, high low, in out, left right, light dark, long short, rich poor, strong weak, wet dry, "
    "good bad, love hate, start end, north south, east west, true false, win lose, buy sell, push pull, above below"
)
_WORDS = (
    "river table garden window silver planet bridge candle forest market pencil castle dragon basket orange violin "
    "rocket island mirror bottle ladder button carpet circle copper desert engine feather guitar hammer jacket kitten "
    "lemon magnet needle ocean pepper rabbit saddle turtle"
)
_OPEN = (
    "Write one sentence about {}.",
    "Name three things about {}.",
    "Explain in one sentence what {} is.",
)
_THEMES = (
    "the sea, music, winter, bread, a garden, football, the moon, rain, a library, coffee, a horse, gold, a city, "
    "sleep, friendship, a river, school, fire, a mountain, glass, tea, the sun, a train, paper, a market, honey"
)


def _pairs(text: str) -> Iterator[list[str]]:
    return (pair.split() for pair in text.split(", "))


def _domains() -> dict[str, list[Row]]:
    def row(prompt: str, answer: object = None) -> Row:
        return {"prompt": prompt} | ({} if answer is None else {"answer": str(answer)})

    return {
        "capital": [row(f"What is the capital of {land}?", city) for land, city in _pairs(_CAPITALS)],
        "continent": [row(f"On which continent is {land}?", where) for land, where in _pairs(_CONTINENTS)],
        "copy": [row(f"Repeat this word: {word}", word) for word in _WORDS.split()],
        "opposite": [row(f"What is the opposite of {one}?", other) for one, other in _pairs(_OPPOSITES)],
        "sum": [row(f"What is {a} + {b}?", a + b) for a, b in combinations_with_replacement(range(1, 10), 2)],
        "open": [row(_OPEN[i % 3].format(theme)) for i, theme in enumerate(_THEMES.split(", "))],
    }


def write(folder: Path) -> tuple[Path, Path]:
    """Write the prompts to train on and those to evaluate on into `folder`.

    Domains take turns, so that the first six prompts are of six domains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = [], []
    for domain, rows in _domains().items():
        labelled = [{**row, "domain": domain} for row in rows]
        train.append([row for i, row in enumerate(labelled) if i % 3])
        heldout.append(labelled[::3])
    files = folder / "train.jsonl", folder / "heldout.jsonl"
    for file, groups in zip(files, (train, heldout), strict=True):
        turns = (row for row in chain.from_iterable(zip_longest(*groups)) if row is not None)
        file.write_text("".join(json.dumps(row) + "\n" for row in turns), encoding="utf-8")
    return files
