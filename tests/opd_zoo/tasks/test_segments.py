"""Text as problems: what is shown of it, what is kept back, and what the judge's word makes of a prediction."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.chat import ChatFailed
from opd.tasks.verdict import VerdictStatus
from opd_zoo.tasks.segments import Segments

JUDGE = {"endpoint": "http://x/v1", "model": "m"}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Segments]:
    def made(texts: list[Any], **options: Any) -> Segments:
        file = tmp_path / "texts.jsonl"
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        return Segments(parse_settings(Segments.Options, {"file": str(file), "judge": JUDGE, **options}))

    return made


def test_a_segment_is_never_in_its_own_prompt_and_texts_stay_on_one_side(make: Callable[..., Segments]) -> None:
    texts = ["\n\n".join(f"t{number}s{k} {{after}}" for k in range(5)) for number in range(16)]
    task = make(texts, before=2, middle=0.5)
    drawn = {split: [task.draw_from(Random(seed), split) for seed in range(80)] for split in ("train", "heldout")}
    forms = set()
    for prompt in drawn["train"]:
        text, number = str(prompt.text), prompt.extra["text"]
        place = int(str(prompt.answer).split("s")[1][0])
        forms.add(prompt.extra["form"])
        assert str(prompt.answer) not in text and f"t{number}s{place - 1}" in text
        assert (f"t{number}s{place + 1}" in text) == (prompt.extra["form"] == "middle")
        assert f"t{number}s{place - 3}" not in text
    assert forms == {"next", "middle"}
    sides = [{prompt.extra["text"] for prompt in found} for found in drawn.values()]
    assert not sides[0] & sides[1] and sides[1] == {0, 8}


@pytest.mark.parametrize(
    ("says", "status"),
    [("It does. Yes", "correct"), ("no", "wrong"), ("hm", "unknown"), (ChatFailed("down"), "unknown")],
)
def test_the_word_of_the_judge_is_the_verdict(make: Callable[..., Segments], says: Any, status: str) -> None:
    task, asked = make(["a\n\nb", "c\n\nd"]), []

    def ask(messages: Any) -> str:
        asked.append(messages[0]["content"])
        if isinstance(says, Exception):
            raise says
        return str(says)

    task.client.ask = ask  # type: ignore[method-assign]
    prompt = task.draw_from(Random(0), "train")
    assert task.verify(prompt, "guess").status is VerdictStatus(status)
    assert "guess" in asked[0] and str(prompt.answer) in asked[0]
    assert task.verify(prompt, " ").status is VerdictStatus.WRONG and len(asked) == 1


@pytest.mark.parametrize(("texts", "said"), [(["a"], "has 0 texts"), ([3], "cannot be read as texts")])
def test_a_file_without_segments_is_refused(make: Callable[..., Segments], texts: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(texts).draw_from(Random(0), "train")
