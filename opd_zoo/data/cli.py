"""`opd data`: prepares tables of prompts offline: lineage, decontamination, hints, corrections, programs.

opd data decontaminate prompts.jsonl --against math500.jsonl --against aime.jsonl --out clean.jsonl
opd data trace prompts.jsonl --source gsm8k.jsonl --source math.jsonl --out traced.jsonl
opd data hints problems.jsonl --endpoint http://host:8000/v1 --model student --out hinted.jsonl
opd data intervene attempts.jsonl --endpoint http://host:8000/v1 --model student --out corrected.jsonl
opd data round-trip programs.jsonl --endpoint http://host:8000/v1 --model coder --out problems.jsonl

Tables are read and written row by row, and answers of models are kept in `--cache`, so a command that was interrupted
goes on where it stopped when it is started again. Each says what it dropped and why.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.printable import echo

app = typer.Typer(no_args_is_help=True, help="Prepare tables of prompts offline.")

Table = Annotated[Path, typer.Argument(metavar="PROMPTS.jsonl", help="Table of prompts, one per row.")]
Out = Annotated[Path, typer.Option("--out", help="Table to write.")]
Column = Annotated[str, typer.Option("--prompt-column", help="Column that holds the prompt, of all tables.")]
Words = Annotated[int, typer.Option("--words", min=1, help="Number of words in a sequence that texts may share.")]
Least = Annotated[
    float, typer.Option("--least", min=0, max=1, help="Share of equal word sequences from which texts are the same.")
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="OpenAI-compatible endpoint of a chat model.")]
Model = Annotated[str, typer.Option("--model", help="Name of the model at --endpoint.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Folder that keeps the model's answers for a later start.")]


@app.command()
def decontaminate(
    prompts: Table,
    against: Annotated[list[Path], typer.Option("--against", help="Benchmark that prompts must not repeat.")],
    out: Out = Path("clean.jsonl"),
    least: Least = 0.5,
    asked: Annotated[
        float, typer.Option("--asked", min=0, max=1, help="With a model: share from which it is asked.")
    ] = 0.15,
    words: Words = 5,
    endpoint: Endpoint = "",
    model: Model = "",
    cache: Cache = None,
    prompt_column: Column = "prompt",
) -> None:
    """Drop prompts that repeat a benchmark's, whatever their spaces and punctuation; a model may judge paraphrases."""
    from opd_zoo.asking import word_of
    from opd_zoo.data.decontaminate import Named
    from opd_zoo.data.decontaminate import decontaminate as found_in

    # Kept for the model alone: an index needs no texts.
    texts = [text for path in against for _, text in _rows(path, prompt_column)] if endpoint else []
    client = _client(endpoint, model, cache) if endpoint else None

    def same(text: str, place: int) -> bool:
        question = (
            f"First problem:\n{text}\n\nSecond problem:\n{texts[place]}\n\nAre these the same problem, in other words "
            "or with other numbers that change nothing? End with yes or no."
        )
        # A model that says nothing clear does not show that a prompt is clean.
        return client is not None and word_of(client, question, ("yes", "no")) != "no"

    benchmarks = Named([(path.stem, _texts(path, prompt_column)) for path in against], words)
    rows = _rows(prompts, prompt_column)
    found = found_in(rows, benchmarks, least=least, asked=asked if endpoint else 1.1, same=same)
    dropped: Counter[str] = Counter()
    with _writing(out) as write:
        for one in found:
            if one.kept:
                write(one.row)
            else:
                dropped[f"repeats {one.name}"] += 1
    _report(out, write.count, dropped)


@app.command()
def trace(
    prompts: Table,
    source: Annotated[list[Path], typer.Option("--source", help="Table that prompts may come from, the oldest first.")],
    out: Out = Path("traced.jsonl"),
    least: Least = 0.5,
    words: Words = 5,
    prompt_column: Column = "prompt",
) -> None:
    """Write where each prompt comes from as column `source`, and drop those that go back to the same text."""
    from opd_zoo.data.decontaminate import Named
    from opd_zoo.data.decontaminate import trace as traced

    sources = Named([(path.stem, _texts(path, prompt_column)) for path in source], words)
    origins, dropped = Counter[str](), Counter[str]()
    with _writing(out) as write:
        for one in traced(_rows(prompts, prompt_column), sources, least=least):
            if one.kept:
                write(one.row)
                origins[one.name or "no source"] += 1
            else:
                dropped[f"goes back to a text of {one.name} that came before"] += 1
    _report(out, write.count, dropped)
    echo(", ".join(f"{count} from {name}" for name, count in origins.most_common()))


@app.command()
def hints(
    prompts: Table,
    endpoint: Endpoint,
    model: Model,
    out: Out = Path("hinted.jsonl"),
    column: Annotated[str, typer.Option("--hints-column", help="Column with a list of hints.")] = "hints",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of answers with each set of hints.")] = 8,
    delta: Annotated[
        float, typer.Option("--delta", min=0, max=1, help="Fall in accuracy that makes a hint needed.")
    ] = 0.0,
    most: Annotated[int, typer.Option("--most", min=1, max=12, help="Most hints whose subsets are all tried.")] = 4,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, help="Sampling temperature.")] = 1.0,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum tokens of an answer.")] = 4096,
    verifier: Annotated[str, typer.Option("--verifier", help="Verifier that judges answers.")] = "math",
    cache: Cache = None,
    prompt_column: Column = "prompt",
) -> None:
    """Choose the smallest set of a problem's hints with which a model answers best, and write it as column `hint`."""
    from opd.tasks.function import load_verifier
    from opd_zoo.data.hints import accuracy_with, chosen_hints, told

    client, judge = (
        _client(endpoint, model, cache, temperature=temperature, max_tokens=tokens),
        load_verifier(verifier, 10.0),
    )
    dropped: Counter[str] = Counter()
    before = after = 0
    with _writing(out) as write:
        for row, text in _rows(prompts, prompt_column):
            given = row.get(column)
            if not isinstance(given, list) or not given or not row.get("answer"):
                dropped["has no hints or no answer"] += 1
                continue
            measure = accuracy_with(text, str(row["answer"]), [str(hint) for hint in given], client, judge, samples)
            places = chosen_hints(len(given), measure, delta=delta, most=most)
            before, after = before + len(given), after + len(places)
            write({**row, "hint": told([str(hint) for hint in given], places), "hint_accuracy": measure(places)})
    judge.close()
    _report(out, write.count, dropped)
    echo(f"{after} of {before} hints are left")


@app.command()
def intervene(
    prompts: Table,
    endpoint: Endpoint,
    model: Model,
    out: Out = Path("corrected.jsonl"),
    mark: Annotated[str, typer.Option("--mark", help="Text that ends a step of an attempt.")] = "\n",
    whole: Annotated[bool, typer.Option("--whole", help="Learn the right steps before the mistake too.")] = False,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum tokens of a correction.")] = 1024,
    cache: Cache = None,
) -> None:
    """Turn wrong attempts into corrections of their first mistake: rows with prompt, solution and attempt."""
    from opd_zoo.data.intervene import intervened

    client = _client(endpoint, model, cache, max_tokens=tokens)
    _made(prompts, out, lambda row: intervened(row, client, mark=mark, whole=whole))


@app.command()
def round_trip(
    programs: Annotated[Path, typer.Argument(metavar="PROGRAMS.jsonl", help="Table of Python programs, column code.")],
    endpoint: Endpoint,
    model: Model,
    out: Out = Path("problems.jsonl"),
    count: Annotated[int, typer.Option("--count", min=2, help="Number of inputs of the tests of a program.")] = 8,
    least: Annotated[int, typer.Option("--least-inputs", min=2, help="Minimum number on which it must work.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Seconds that one program may run.")] = 10.0,
    tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum tokens of the model's answers.")] = 4096,
    cache: Cache = None,
) -> None:
    """Make problems with tests from programs, and keep those from whose words the model writes the program again."""
    from opd.tasks.code import CodeVerifier
    from opd_zoo.data.round_trip import round_tripped

    client, verifier = _client(endpoint, model, cache, max_tokens=tokens), CodeVerifier(seconds)
    _made(programs, out, lambda row: round_tripped(row, client, verifier, count=count, least=least))


def _made(table: Path, out: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write what is made of each row, and say of which rows nothing was."""
    from opd.tasks.chat import ChatFailed
    from opd.tasks.rows import file_rows
    from opd_zoo.data.intervene import NotMade

    dropped: Counter[str] = Counter()
    with _writing(out) as write:
        for _, row in file_rows(table):
            try:
                write(make(dict(row)))
            except NotMade as reason:
                dropped[str(reason)] += 1
            except ChatFailed:
                dropped["the model did not answer"] += 1
    _report(out, write.count, dropped)


def _rows(path: Path, column: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, text of its prompt), the last user message of a chat.

    Raises:
        DataError: for a row without one.
    """
    from opd.errors import DataError
    from opd.tasks.messages import message_text
    from opd.tasks.rows import file_rows

    for place, row in file_rows(path):
        found = row.get(column)
        if isinstance(found, list):
            found = next((message_text(one) for one in reversed(found) if one.get("role") == "user"), None)
        if not isinstance(found, str) or not found.strip():
            raise DataError(f"{place} has no prompt in column {column!r}; name the column with --prompt-column.")
        yield dict(row), found


def _texts(path: Path, column: str) -> Iterator[str]:
    return (text for _, text in _rows(path, column))


def _client(endpoint: str, model: str, cache: Path | None, **settings: Any) -> Any:
    from opd.config import parse_settings
    from opd.tasks.chat import ChatClient, ChatSettings

    given = {"endpoint": endpoint, "model": model, "cache": cache, **settings}
    return ChatClient(parse_settings(ChatSettings, given, source="the options"))


class _Write:
    """Writes rows, and counts them."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self.count = write, 0

    def __call__(self, row: dict[str, Any]) -> None:
        self._write(json.dumps(row, ensure_ascii=False) + "\n")
        self.count += 1


@contextmanager
def _writing(out: Path) -> Iterator[_Write]:
    """A table that takes its place only when it is whole."""
    from opd.files import check_out

    check_out(out)
    scratch = out.with_name(f"{out.name}.part")
    with scratch.open("w", encoding="utf-8") as file:
        yield _Write(file.write)
    scratch.replace(out)


def _report(out: Path, kept: int, dropped: Counter[str]) -> None:
    for reason, times in dropped.most_common():
        echo(f"left out, {reason}: {times}")
    echo(f"{out}: {kept} rows")
