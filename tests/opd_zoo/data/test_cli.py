"""`opd data` as a user types it: what each command keeps, drops and says."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_servers import Server, serving
from typer.testing import CliRunner

from opd_zoo.data.cli import app

LONG = "A farmer has {} hens, each lays {} eggs a week, and sells them by the dozen at the market on Monday. How many?"


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, rows: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return make


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def ran(tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert not out.with_name("out.jsonl.part").exists()
    return [json.loads(line) for line in out.read_text().splitlines()], " ".join(result.output.split())


def test_prompts_that_repeat_a_benchmark_are_dropped_and_a_clean_table_stays_as_it_is(
    tmp_path: Path, table: Callable[..., str]
) -> None:
    bench = table("bench.jsonl", [{"prompt": LONG.format(7, 5)}, {"prompt": "What is 2+2?"}])
    clean = [{"prompt": f"Unlike {i}: what has {i} legs and {i + 1} arms?", "answer": str(i)} for i in range(20)]
    planted = [{"prompt": LONG.format(7, 6)}, {"prompt": "what  is 2 + 2"}]
    kept, said = ran(tmp_path, "decontaminate", table("p.jsonl", [*clean, *planted]), "--against", bench)
    assert kept == clean and "left out, repeats bench: 2" in said and "20 rows" in said


def test_a_model_decides_about_what_is_only_similar(tmp_path: Path, table: Callable[..., str], server: Server) -> None:
    bench = table("bench.jsonl", [{"prompt": LONG.format(7, 5)}])
    near = LONG.format(7, 5).replace("eggs a week", "big eggs in one").replace("market", "old fair")
    rows = [{"prompt": near + " Now."}, {"prompt": near + " Later."}, {"prompt": "Unlike all."}]
    server.say = lambda path, body: {
        "choices": [{"message": {"content": "No." if "Later" in str(body) else "They are. Yes"}}]
    }
    model = ["--endpoint", f"{server.url}/v1", "--model", "m", "--least", "0.95", "--words", "3"]
    kept, _ = ran(tmp_path, "decontaminate", table("p.jsonl", rows), "--against", bench, *model)
    assert kept == rows[1:] and len(server.asked) == 2


def test_a_prompt_is_traced_to_its_oldest_source_and_kept_once(tmp_path: Path, table: Callable[..., str]) -> None:
    old = table("old.jsonl", [{"prompt": LONG.format(7, 5)}])
    new = table("new.jsonl", [{"prompt": LONG.format(7, 5) + " Tell."}, {"prompt": "Which number comes after 41?"}])
    rows = [{"prompt": LONG.format(7, 5).upper()}, {"prompt": "Which number comes after 41?"}, {"prompt": "Mine."}]
    again = {"prompt": LONG.format(7, 5) + " "}
    kept, said = ran(tmp_path, "trace", table("p.jsonl", [*rows, again]), "--source", old, "--source", new)
    assert [row["source"] for row in kept] == ["old", "new", None]
    assert "1 from old" in said and "goes back to a text of old that came before: 1" in said


def test_the_hints_that_help_together_are_kept(tmp_path: Path, table: Callable[..., str], server: Server) -> None:
    """The model is right with both or none of the first two hints, and never needs the third."""

    def says(path: str, body: Any) -> Any:
        text = body["messages"][-1]["content"]
        right = ("one" in text) == ("two" in text) and "one" in text
        return {"choices": [{"message": {"content": "7" if right else "8"}}]}

    server.say = says
    rows = [{"prompt": "3+4=", "answer": "7", "hints": ["one", "two", "three"]}, {"prompt": "bare", "answer": "1"}]
    options = ["--endpoint", f"{server.url}/v1", "--model", "m", "--samples", "2", "--verifier", "numeric"]
    kept, said = ran(tmp_path, "hints", table("p.jsonl", rows), *options)
    assert kept == [{**rows[0], "hint": "one\ntwo", "hint_accuracy": 1.0}]
    assert "has no hints or no answer: 1" in said and "2 of 3 hints are left" in said


@pytest.mark.parametrize("whole", [False, True])
def test_a_correction_takes_the_place_of_the_first_mistake(
    tmp_path: Path, table: Callable[..., str], server: Server, whole: bool
) -> None:
    said = {"fine": '{"step": 2, "correction": "b2"}', "far": '{"step": 9, "correction": "x"}', "mute": "No idea."}
    server.say = lambda path, body: {
        "choices": [{"message": {"content": next(text for name, text in said.items() if name in str(body))}}]
    }
    rows = [{"prompt": f"{name}: ", "solution": "s", "attempt": "a\nb\nc", "level": 3} for name in said]
    options = ["--endpoint", f"{server.url}/v1", "--model", "m", *(["--whole"] if whole else [])]
    kept, told = ran(tmp_path, "intervene", table("p.jsonl", [*rows, {"prompt": "x"}]), *options)
    made = {"prompt": "fine: ", "answer": "a\nb2"} if whole else {"prompt": "fine: a\n", "answer": "b2"}
    assert kept == [{**made, "solution": "s", "level": 3, "step": 2}]
    assert "the model names no step of the attempt: 2" in told and "no text in column solution: 1" in told


def test_a_table_without_prompts_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, table: Callable[..., str]
) -> None:
    bench, bad = table("bench.jsonl", [{"prompt": "a"}]), table("p.jsonl", [{"question": "b"}])
    result = CliRunner().invoke(app, ["decontaminate", bad, "--against", bench, "--out", str(tmp_path / "out.jsonl")])
    assert "--prompt-column" in str(result.exception) and not (tmp_path / "out.jsonl").exists()


def test_a_program_is_kept_where_its_words_lead_back_to_it(
    tmp_path: Path, table: Callable[..., str], server: Server
) -> None:
    programs = {
        "double": "print(2 * int(input()))",
        "crash": "print(1 / 0)  # crash",
        "constant": "input(); print('constant')",
        "lossy": "print(3 * int(input()))  # lossy",
    }

    def says(path: str, body: Any) -> Any:
        text = body["messages"][0]["content"]
        if "JSON alone" in text:
            said = json.dumps({"inputs": ["1", "2", "x", "30", "2"]})
        elif "Write a Python program" in text:
            said = "Here:\n```python\nprint(0)\n```\nor rather\n```python\nn = int(input())\nprint(n + n)\n```"
        else:
            said = "Read a number and print twice of it."
        return {"choices": [{"message": {"content": said}}]}

    server.say = says
    rows = [{"code": code, "from": name} for name, code in programs.items()]
    options = ["--endpoint", f"{server.url}/v1", "--model", "m"]
    kept, told = ran(tmp_path, "round-trip", table("p.jsonl", [*rows, {"text": "none"}]), *options)
    (row,) = kept
    assert (
        row["from"] == "double" and row["prompt"].startswith("Read a number") and row["solution"] == programs["double"]
    )
    assert [(test["input"], test["output"].strip()) for test in row["tests"]] == [("1", "2"), ("2", "4"), ("30", "60")]
    for reason in (
        "the program works on too few of the inputs: 1",
        "all outputs are equal: 1",
        "the program written from the words does something else: 1",
        "no text in column code: 1",
    ):
        assert reason in told
