"""Prompts that are too long, found before a run."""

import json

import pytest

from opd.errors import DataError
from opd.tasks import FileSettings, MixSettings, TaskSettings, build_prompts


def lengths(prompts):
    return [len(prompt.text) for prompt in prompts]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * i}) + "\n" for i in range(1, 21)))
    return FileSettings(file=path, heldout=0.2)


def test_a_long_row_is_named_with_file_and_line_and_the_others_counted(table):
    words = r"p\.jsonl line \d+ has \d+ tokens, over the limit of 17, and 2 more"
    with pytest.raises(DataError, match=words) as caught:
        build_prompts(table, seed=0).limit(lengths, 17, drop=False)
    assert "rollout.max_prompt_tokens" in str(caught.value) and "rollout.long_prompts" in str(caught.value)


def test_long_rows_are_left_out_of_both_splits(table):
    source = build_prompts(table, seed=0)
    before = len(source.prompts("heldout", 4))
    assert source.limit(lengths, 10, drop=True) == 10
    train = {prompt.text for prompt in source.prompts("train", 40)}
    heldout = [prompt.text for n in range(before, -1, -1) for prompt in _heldout(source, n)]
    assert {len(text) for text in train} | {len(text) for text in heldout} == set(range(1, 11))


def _heldout(source, count):
    try:
        return source.prompts("heldout", count)
    except DataError:
        return []


def test_a_file_of_long_rows_alone_says_how_short_the_shortest_is(table):
    with pytest.raises(DataError, match=r"all 16 training prompts .*longer than 0"):
        build_prompts(table, seed=0).limit(lengths, 0, drop=True)


def test_generated_prompts_are_drawn_anew_or_refused(table):
    settings = TaskSettings(task="addition", options={"digits": 2})
    source = build_prompts(settings, seed=0)
    assert max(len(prompt.text) for prompt in source.prompts("train", 50)) == 6
    assert source.limit(lengths, 5, drop=True) == 0
    for split in ("train", "heldout"):
        assert max(len(prompt.text) for prompt in source.prompts(split, 50)) == 5
    strict = build_prompts(settings, seed=0)
    strict.limit(lengths, 5, drop=False)
    with pytest.raises(DataError, match=r"6 tokens, .*limit of 5"):
        strict.prompts("train", 50)


def test_a_mix_limits_each_of_its_sources(table):
    mix = MixSettings(mix=[table, TaskSettings(task="addition", options={"digits": 2})])
    source = build_prompts(mix, seed=0)
    assert source.limit(lengths, 5, drop=True) == 15
    assert max(len(prompt.text) for prompt in source.prompts("train", 40)) == 5
