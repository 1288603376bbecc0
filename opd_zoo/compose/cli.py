"""`opd compose`: joins prompts that are already solved into deeper ones."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.printable import echo

if TYPE_CHECKING:
    from opd_zoo.compose.compose import Problem


def compose(
    prompts: Annotated[
        Path, typer.Argument(metavar="PROMPTS.jsonl", help="Table of problems, one per row, with prompt and answer.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Table to write the compositions to.")] = Path("composed.jsonl"),
    onto: Annotated[
        Path | None, typer.Option("--onto", help="Table of the second problems of pairs. Default: PROMPTS.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Maximum number of compositions.")] = 1000,
    solved: Annotated[
        float,
        typer.Option(
            "--solved",
            min=0,
            max=1,
            help="Minimum pass_rate of the rows to use, as a fraction; rows without one are always used. 1 means "
            "solved every time.",
        ),
    ] = 1.0,
    prompt_column: Annotated[str, typer.Option("--prompt-column", help="Column that holds the problem.")] = "prompt",
    answer_column: Annotated[str, typer.Option("--answer-column", help="Column that holds the answer.")] = "answer",
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            help="OpenAI-compatible endpoint of a chat model that writes the link between two problems. Default: a "
            "template.",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Name of the model at --endpoint.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Seed for the choice of pairs and numbers.")] = 0,
) -> None:
    """Join pairs of problems with numeric answers, so that the second needs the answer to the first.

    Each row has a `depth`, the number of problems in it, for method depth_curriculum (prompts.keep_columns: [depth]).
    Composing OUT again with `--onto` PROMPTS makes rows deeper. Every composition is read again and its numbers
    recomputed before it is kept. Prints why pairs gave no composition.
    """
    from opd.config import parse_settings
    from opd.errors import DataError
    from opd.files import check_out, write_out
    from opd.tasks.chat import ChatClient, ChatSettings
    from opd_zoo.compose.chat import ByChat
    from opd_zoo.compose.compose import Linker, Problem, by_template, compositions

    check_out(out)
    columns = {"prompt_column": prompt_column, "answer_column": answer_column}
    left: Counter[str] = Counter()
    first = _problems(prompts, columns, solved, left)
    second = first if onto is None else _problems(onto, columns, solved, left)
    linker: Linker = by_template
    if endpoint is not None:
        asked = parse_settings(ChatSettings, {"endpoint": endpoint, "model": model}, source="the options")
        linker = ByChat(ChatClient(asked))
    depths: Counter[int] = Counter()
    lines = []
    for found in compositions(first, second, linker, count=count, seed=seed):
        if isinstance(found, Problem):
            depths[found.depth] += 1
            row = {prompt_column: found.text, answer_column: found.answer, "depth": found.depth}
            lines.append(json.dumps(row | {"parts": found.parts, "hidden": found.hidden}, ensure_ascii=False))
        else:
            left[found] += 1
    # Before the error below, so that the reasons are seen even if nothing could be composed.
    for reason, times in left.most_common():
        echo(f"left out, {reason}: {times}")
    if not lines:
        raise DataError(
            f"no two problems of {prompts} could be composed; answers must be numbers, and problems must contain some."
        )
    write_out(out, "\n".join(lines) + "\n")
    by_depth = ", ".join(f"{times} of depth {depth}" for depth, times in sorted(depths.items()))
    echo(f"{out}: {by_depth}")


def _problems(path: Path, columns: dict[str, str], solved: float, left: "Counter[str]") -> "list[Problem]":
    from opd.errors import DataError
    from opd.tasks.rows import file_rows
    from opd_zoo.compose.compose import PairRefused, Problem

    found = []
    for place, row in file_rows(path):
        rate = row.get("pass_rate")
        if rate is not None and not isinstance(rate, int | float):
            raise DataError(f"{place} has pass_rate {rate!r}; give a number from 0 to 1, or leave it out.")
        if rate is not None and rate < solved:
            left["the problem is not solved often enough"] += 1
            continue
        try:
            found.append(Problem.of(row, **columns))
        except PairRefused as reason:
            left[str(reason)] += 1
    return found
