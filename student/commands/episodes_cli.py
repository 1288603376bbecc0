"""`opd episodes show RUN` and `opd episodes record TASK`: transcripts of a run, and paths for methods that replay."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import ConfigError, DataError
from opd.files import check_out, write_out
from opd.printable import echo
from student.run.reading import is_number, is_token, read_records

app = typer.Typer(no_args_is_help=True, help="Read a run's episodes, or record paths that solve problems.")
_LEVELS = ((0.1, "green"), (1.0, "yellow"))
"""Nats up to which a token has this colour; above them it is red."""


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, whose samples.jsonl holds the episodes.")],
    step: Annotated[int | None, typer.Option(help="Show only episodes of this step.")] = None,
    ended: Annotated[
        str | None, typer.Option(help="Show only episodes that ended this way: success, failure, turns, broken ...")
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Maximum number of episodes to show, the last ones of the run.")
    ] = 3,
) -> None:
    """Print episodes turn by turn, with each of the student's tokens coloured by its divergence from the teacher."""
    from opd.console import Console

    found = [
        sample
        for sample in samples_of(run)
        if step in (None, sample.get("step")) and (ended is None or sample["episode"]["ended"].startswith(ended))
    ]
    if not found:
        raise DataError(
            f"samples.jsonl of {run} has no episode that matches; choose another --step or --ended, or keep more of "
            "them with `samples` in the recipe."
        )
    console = Console()
    for sample in found[-count:]:
        _print(sample, console)


@app.command()
def record(
    task: Annotated[
        str, typer.Argument(help="Task whose problems come with a solution path (lock, rooms), or a run folder.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="Settings of the task, for example depth=12.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Output file, JSON lines with prompt, environment and path.")
    ] = Path("paths.jsonl"),
    count: Annotated[int, typer.Option(min=1, help="Number of problems to take from a task.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
) -> None:
    """Write prompts with paths that solve them: a task's own paths, or the student's successes in a run."""
    check_out(out)
    folder = Path(task)
    lines = list(successes(folder) if (folder / "samples.jsonl").is_file() else gold(task, options or [], count, seed))
    if not lines:
        raise DataError(f"no problem of {task} was solved, so there is no path to write.")
    write_out(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    echo(f"wrote {len(lines)} paths to {out}")


def samples_of(run: Path) -> list[dict[str, Any]]:
    """The episodes among a run's kept answers.

    Raises:
        DataError: when the folder keeps no answers.
    """
    problems: list[str] = []
    found = read_records(run / "samples.jsonl", problems)
    if problems and not found:
        raise DataError(f"the samples.jsonl of {run} cannot be read: {problems[0].rstrip('.')}; name a run folder.")
    for problem in problems:
        echo(problem, err=True)
    return [sample for sample in found if _is_episode(sample)]


def _is_episode(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has what is read of an episode here."""
    episode = sample.get("episode")
    if not isinstance(episode, dict) or not {"ended", "opening", "segments", "environment"} <= episode.keys():
        return False
    texts = all(isinstance(episode[name], str) for name in ("ended", "opening"))
    segments = episode["segments"]
    return texts and isinstance(segments, list) and all(_is_segment(one) for one in segments)


def _is_segment(segment: Any) -> bool:
    if not isinstance(segment, dict):
        return False
    known = isinstance(segment.get("text"), str) and isinstance(segment.get("who"), str)
    places = all(isinstance(segment.get(name), int) for name in ("start", "end"))
    return known and places and (segment.get("kl") is None or is_number(segment["kl"]))


def successes(run: Path) -> Iterator[dict[str, Any]]:
    """A line for every problem that the student solved, with the actions of its shortest success."""
    best: dict[str, dict[str, Any]] = {}
    for sample in samples_of(run):
        if not {"uid", "answers", "prompt", "reference", "domain"} <= sample.keys():
            continue
        episode = sample["episode"]
        actions = sample["answers"]
        known = best.get(sample["uid"])
        if episode["ended"] == "success" and (known is None or len(actions) < len(known["path"])):
            line = {"prompt": sample["prompt"], "answer": sample["reference"], "domain": sample["domain"]}
            played = {"environment": episode["environment"], "path": actions}
            best[sample["uid"]] = {**episode.get("columns", {}), **line, **played}
    yield from best.values()


def gold(task: str, options: list[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """A line for every problem whose own path, played in the environment, solves it.

    Raises:
        ConfigError: for a task that knows no paths.
    """
    from opd.config import parse_settings
    from opd.config.text import read_options
    from opd.tasks.build import build_prompts
    from opd.tasks.environments.base import ENVIRONMENT, PATH
    from opd.tasks.environments.service import make_environment
    from opd.tasks.settings import TaskSettings

    chosen = read_options("option", options)
    source = build_prompts(parse_settings(TaskSettings, {"task": task, "options": chosen}), seed=seed)
    try:
        for prompt in source.prompts("train", count):
            if not {ENVIRONMENT, PATH} <= prompt.extra.keys():
                raise ConfigError(
                    f"problems of task {task!r} do not come with a solution path under these options; name a run "
                    "folder, to record its paths instead."
                )
            world = make_environment(dict(prompt.extra[ENVIRONMENT]))
            seen = world.reset(prompt, 0)
            for action in prompt.extra[PATH]:
                seen = world.step(action)
            world.close()
            if seen.success:
                content = prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages]
                yield {"prompt": content, "answer": prompt.answer, "domain": prompt.domain, **prompt.extra}
    finally:
        source.close()


def _print(sample: Mapping[str, Any], console: Any) -> None:
    from rich.text import Text

    held, episode = sample.get("pieces"), sample["episode"]
    pieces = held if isinstance(held, list) and all(map(is_token, held)) else []
    reward = f", reward {sample['reward']:.3g}" if is_number(sample.get("reward")) else ""
    console.rule(f"step {sample.get('step')} ({sample.get('label')}), {episode['ended']}{reward}")
    console.print(Text(episode["opening"], style="dim"))
    turn = 0
    for segment in episode["segments"]:
        if segment["who"] == "environment":
            console.print(Text(segment["text"], style="dim"))
            continue
        turn += segment["who"] == "student"
        name = f"turn {turn}" if segment["who"] == "student" else "summary"
        kl = "" if segment["kl"] is None else f", {segment['kl']:.3f} nats"
        line = Text(f"[{name}, {segment['end'] - segment['start']} tokens{kl}] ", style="bold")
        known = pieces[segment["start"] : segment["end"]]
        if len(known) == segment["end"] - segment["start"]:
            for text, value, _ in known:
                line.append(text, style=_colour(value))
        else:  # long answers are kept with their first tokens alone
            line.append(segment["text"])
        console.print(line)


def _colour(value: float | None) -> str:
    if value is None:
        return ""
    return next((colour for most, colour in _LEVELS if abs(value) <= most), "red")
