"""`opd watch RUN`: a run as it goes, in a terminal of 80 columns, from its folder and, where it has one, its /metrics.

It only reads files, so it works during the run, after it, and over ssh.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from opd.console import Console, Table
from opd.errors import RunFolderError
from opd.files import is_locked
from student.report.page.chart import number
from student.report.shown import Figures, held, read_shown
from student.run.progress import duration, status_of
from student.run.reading import as_record, as_step, group, is_number, read_mapping, read_recipe

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = (
    *("eval/reverse_kl", "eval/accuracy", "verdict", "reward", "student_entropy"),
    *("response_length", "truncation_rate", "repetition", "grad_norm", "tokens_per_second"),
)
"""Metrics that are shown of every run that has them, after those of its terms."""
_RECENT = 10
"""Steps that times are averaged over."""
_MOST_STEPS = 1e12
_AWAY = 5.0
"""Seconds after which a teacher that no replica serves is an outage rather than a slow ping."""
_WIDTH = 36
_LINES = 3


class Follower:
    """Reads the complete records of a growing file of JSON lines, continuing where it stopped.

    Args:
        path: the file; it may not exist yet, and may be cut when the run is resumed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All records so far."""
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size < self._offset:
            self._offset, self.records = 0, []
        if size > self._offset:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                # The last line may still be incomplete; it is read next time.
                whole, end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            self.records += [record for line in whole.splitlines() if (record := as_record(line)) is not None]
        return self.records


class View:
    """The state of a run, in a form to print.

    Args:
        run: the run folder.

    Raises:
        RunFolderError: if it is not a run folder.
    """

    def __init__(self, run: Path) -> None:
        if not (run / "recipe.yaml").is_file():
            raise RunFolderError(f"{run} is not a run folder: it has no recipe.yaml.")
        self._run = run
        self._problems: list[str] = []
        self._recipe = read_recipe(run, self._problems)
        self._metrics, self._samples = Follower(run / "metrics.jsonl"), Follower(run / "samples.jsonl")

    @property
    def ended(self) -> str:
        """How the run says it ended; "" while it is running."""
        return str(read_mapping(self._run / "ending.json", [], needed=False).get("how", ""))

    @property
    def over(self) -> bool:
        """Whether the run has ended, or no process writes it any more."""
        return bool(self.ended) or is_locked(self._run / ".lock") is False

    def frame(self) -> RenderableType:
        """The current state, ready to print."""
        metrics = [step for record in self._metrics.read() if (step := as_step(record)) is not None]
        samples = self._samples.read()
        fleet, away = self._teachers()
        parts: list[RenderableType] = [self._head(metrics, away=bool(away))]
        parts += [Text(line, "red") for line in (*away, *self._problems)]
        if metrics:
            # Read every time: the run writes the file after its first evaluation, and again when it is resumed.
            parts += [Text(), _curves(metrics, read_shown(self._run, [])), Text(), _stages(metrics)]
        parts += [Text(), fleet]
        if samples:
            parts += [Text(), _sample(samples[-1])]
        return Group(*parts)

    def _how(self, metrics: Sequence[dict[str, Any]]) -> str:
        """How the run ended; "stalled" or "killed" if it did not say; "" while it goes."""
        how = self.ended or str(status_of(self._run, metrics, {}, {}, 0)["how"])
        return "" if how in ("running", "open") else how

    def _head(self, metrics: Sequence[dict[str, Any]], *, away: bool) -> Text:
        planned = group(self._recipe, "train").get("steps")
        total = int(planned) if is_number(planned) and 0 < planned < _MOST_STEPS else 0
        done = int(metrics[-1]["step"]) if metrics else 0
        filled = min(20, max(0, round(20 * done / total))) if total else 0
        text = Text(f"{self._run.name}  ", style="bold", no_wrap=True, overflow="ellipsis")
        text.append("█" * filled + "░" * (20 - filled), style="cyan")
        text.append(f" step {done}/{total or '?'}", style="default")
        recent = [sum(r["seconds"].values()) for r in metrics[-_RECENT:] if "seconds" in r]
        if how := self._how(metrics):
            text.append(f"  {how}", style="green" if how == "finished" else "red")
        elif recent and not away:
            mean = sum(recent) / len(recent)
            left = f", {duration(mean * (total - done))} left" if done < total else ""
            text.append(f"  {mean:.1f} s a step{left}", style="dim")
        return text

    def _teachers(self) -> tuple[RenderableType, list[str]]:
        """The state of the fleet, and a sentence for each teacher that is away."""
        from opd.http import Connection, NoReplyError

        port, host = self._recipe.get("metrics_port"), self._recipe.get("metrics_host", "127.0.0.1")
        if self.ended or not port:
            why = "see the report" if self.ended else "not visible, since the recipe sets no metrics_port"
            return Text(f"fleet: {why}", "dim"), []
        place = f"http://{host}:{port}/metrics"
        try:
            with Connection(place, seconds=2.0) as connection:
                reply = connection.send()
            families = list(text_string_to_metric_families(reply.raw.decode() if reply.ok else ""))
        except (NoReplyError, ValueError) as error:  # another program may hold the port by now
            return Text(f"fleet: {place} does not answer ({error})", "dim"), []
        values: dict[str, dict[str, float]] = {}
        for sample in (s for family in families for s in family.samples if "teacher" in s.labels):
            name = sample.name.removeprefix("opd_student_fleet_")
            key = f"{name}/{sample.labels['state']}" if "state" in sample.labels else name
            held = values.setdefault(sample.labels["teacher"], {})
            held[key] = held.get(key, 0.0) + sample.value
        table = _table("teacher", "replicas", "queued tokens", "in flight", "tokens/s", "away")
        gone = []
        for teacher, found in sorted(values.items()):
            states = [f"{n:.0f} {k.partition('/')[2]}" for k, n in found.items() if k.startswith("replicas/") and n]
            away = found.get("down_seconds", 0.0)
            cells = [", ".join(states) or "none"]
            cells += [number(found.get(k)) for k in ("queued_tokens", "in_flight_rows", "replica_tokens_per_second")]
            table.add_row(teacher, *cells, f"{away:.0f} s" if away else "")
            if away >= _AWAY:
                gone.append(f"teacher {teacher} has been away for {duration(away)}: {cells[0]}")
        return table, gone


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """`values` as block characters, at most `width`, each the mean of a stretch."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / span))] if high > low else BLOCKS[3] for mean in means)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index > 1 else "left", no_wrap=True, overflow="ellipsis")
    return table


def _curves(metrics: Sequence[dict[str, Any]], shown: Figures) -> Table:
    table = _table("metric", "course", "first", "now")
    names = dict.fromkeys(name for record in metrics for name in record)
    losses = [name for name in names if name.startswith(("loss/", "domain_accuracy/"))]
    for name in dict.fromkeys([*held(shown, names).values(), *(name for name in SHOWN if name in names), *losses]):
        values = [r[name] for r in metrics if is_number(r.get(name))]
        if values:
            table.add_row(name, Text(sparkline(values), "cyan"), number(values[0]), number(values[-1]))
    return table


def _stages(metrics: Sequence[dict[str, Any]]) -> RenderableType:
    recent = [r["seconds"] for r in metrics[-_RECENT:] if r.get("seconds")]
    if not recent:
        return Text("no times are recorded", "dim")
    names = dict.fromkeys(name for seconds in recent for name in seconds)
    means = {name: sum(s.get(name, 0.0) for s in recent) / len(recent) for name in names}
    whole = sum(means.values()) or 1.0
    table = _table("stage", "share", "s a step")
    for name, mean in sorted(means.items(), key=lambda item: -item[1]):
        table.add_row(name, Text("▇" * max(1, round(_WIDTH * mean / whole)), "magenta"), f"{mean:.3f}")
    return table


def _sample(sample: dict[str, Any]) -> Text:
    verdict = sample.get("verdict")
    text = Text(f"latest answer, {sample.get('label')}, step {sample.get('step')}", style="dim")
    if verdict:
        text.append(f": {verdict}", style="green" if verdict == "correct" else "red")
    prompt = sample.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content", "") if prompt and isinstance(prompt[-1], dict) else ""
    for mark, part in (("> ", prompt), ("", sample.get("answer"))):
        lines = str(part or "").splitlines()[:_LINES] or [""]
        text.append("\n" + "\n".join(f"{mark}{line[:76]}" for line in lines), style="dim" if mark else "default")
    return text


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, then exit.")] = False,
) -> None:
    """Watch a run: curves, stages of a step, teachers and the latest answer. Ends with the run or on Ctrl-C.

    Teachers are shown live if the recipe has a metrics_port. Without a terminal, the state is printed once.
    """
    console, view = Console(), View(run)
    if once or view.over or not console.is_terminal:
        console.print(view.frame())
        return
    with Live(view.frame(), console=console, auto_refresh=False) as live:
        while not view.over:
            time.sleep(every)
            live.update(view.frame(), refresh=True)
