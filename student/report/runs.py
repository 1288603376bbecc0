"""`opd runs`: the runs below some folders, with the state and the result of each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import RunFolderError
from opd.printable import echo
from student.report.page.chart import number
from student.run.progress import duration, evaluations, quiet, seconds_of, status_of
from student.run.reading import group, is_number, read_mapping, read_recipe, read_steps

_DEEPEST = 4
_COLOURS = {"running": "cyan", "finished": "green", "stopped": "yellow", "open": "dim"}


def find_runs(folder: Path, deepest: int = _DEEPEST) -> Iterator[Path]:
    """The run folders at or below a folder, without what is inside them."""
    if (folder / "recipe.yaml").is_file():
        yield folder
    elif deepest:
        try:
            inner = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
        except OSError:
            return  # not ours to read
        for one in inner:
            yield from find_runs(one, deepest - 1)


def overview(run: Path) -> dict[str, Any]:
    """State and result of a run, in words and figures.

    Returns:
        run, state, step, accuracy and reverse_kl from the first evaluation to the latest, tokens, time, device,
        started, and quiet, the seconds since it last wrote anything.
    """
    recipe, summary, ending, provenance = (
        read_recipe(run, []),
        *(read_mapping(run / name, [], needed=False) for name in ("summary.json", "ending.json", "provenance.json")),
    )
    steps = read_steps(run, [])
    planned = group(recipe, "train").get("steps")
    measured = evaluations(steps, summary)
    tokens = [record["response_tokens"] for record in steps if is_number(record.get("response_tokens"))]
    done = int(steps[-1]["step"]) if steps else 0
    return {
        "run": str(run),
        "state": status_of(run, steps, summary, ending, planned)["how"],
        "step": f"{done}/{planned}" if is_number(planned) else str(done),
        "accuracy": _course([held["accuracy"] for _, held in measured if "accuracy" in held]),
        "reverse_kl": _course([held["reverse_kl"] for _, held in measured if "reverse_kl" in held]),
        "tokens": sum(tokens),
        "time": duration(seconds_of(steps, summary)),
        "device": str(provenance.get("device") or ""),
        "started": str(provenance.get("started") or ""),
        "quiet": round(quiet(run)),
    }


def _course(values: Sequence[float]) -> str:
    """The first and the last of some figures."""
    ends = dict.fromkeys([number(round(values[0], 3)), number(round(values[-1], 3))]) if values else {}
    return " → ".join(ends)


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each run: the last folders of its path, as many as tell the runs apart."""
    parts = [run.absolute().parts for run in runs]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run) for run in runs]


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER...]", help="Folders with runs, at any depth up to four.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run instead of a table.")] = False,
) -> None:
    """List runs, the latest first: state, step, accuracy and KL from the first evaluation to the latest, time.

    A run is running, stalled (its process lives, but has written nothing for long), finished, stopped (--resume goes
    on), failed, or killed (it ended without a word). Default: the runs below runs/.
    """
    from opd.console import Console, Table

    places = folders or [Path("runs")]
    for place in places:
        if not place.is_dir():
            raise RunFolderError(f"{place} is not a folder; name folders that hold runs.")
    found = sorted({run for place in places for run in find_runs(place)})
    if not found:
        raise RunFolderError(f"there are no runs in {', '.join(map(str, places))}; name folders that hold some.")
    listed = sorted(map(overview, found), key=lambda one: float(one["quiet"]))
    if as_json:
        for one in listed:
            echo(json.dumps(one, ensure_ascii=False))
        return
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(("run", "state", "step", "accuracy", "reverse KL", "time")):
        table.add_column(name, justify="right" if index == 2 else "left", no_wrap=index > 0, overflow="fold")
    for one in listed:
        state = Text(one["state"], _COLOURS.get(one["state"], "red"))
        table.add_row(one["run"], state, one["step"], one["accuracy"], one["reverse_kl"], one["time"])
    Console().print(table)
