import json
from collections import Counter

import pytest

from opd.errors import DataError
from opd.tasks import FileSettings, MixSettings, TaskSettings, VerdictStatus, build_prompts

MIX = MixSettings(
    mix=[
        TaskSettings(task="addition", teacher="a", weight=3),
        TaskSettings(task="subtraction", teacher="b"),
    ]
)


def test_weights_are_exact_in_every_block_and_evenly_spread():
    prompts = build_prompts(MIX, seed=0).prompts("train", 8)
    assert Counter(prompt.domain for prompt in prompts[:4]) == {"addition": 3, "subtraction": 1}
    assert [prompt.domain for prompt in prompts[:4]] == [prompt.domain for prompt in prompts[4:]]
    assert {prompt.domain: prompt.teacher for prompt in prompts} == {"addition": "a", "subtraction": "b"}


def test_each_source_gives_its_own_stream_without_gaps():
    mixed = build_prompts(MIX, seed=0).prompts("train", 40)
    alone = build_prompts(MIX.mix[0], seed=0).prompts("train", 30)
    assert [prompt.uid for prompt in mixed if prompt.domain == "addition"] == [prompt.uid for prompt in alone]


def test_what_one_table_holds_out_no_other_one_trains_on(tmp_path):
    def table(name, first, last):
        (tmp_path / name).write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(first, last)))
        return tmp_path / name

    many, few, held = table("many.jsonl", 0, 200), table("few.jsonl", 100, 220), table("held.jsonl", 150, 170)
    parts = [FileSettings(file=many, heldout=0.3), FileSettings(file=few, heldout=0.1)]
    for first in (parts[0], FileSettings(file=many, heldout_file=held)):
        alone = [build_prompts(part, seed=0) for part in (first, parts[1])]
        out = {prompt.uid for part in alone for prompt in part.prompts("heldout", len(part._heldout))}
        trained = {
            prompt.uid for prompt in build_prompts(MixSettings(mix=[first, parts[1]]), seed=0).prompts("train", 800)
        }
        assert not trained & out and len(trained) + len(out) == 220
    with pytest.raises(DataError, match=r"few\.jsonl leaves no prompt"):
        build_prompts(MixSettings(mix=[FileSettings(file=many, heldout_file=few), parts[1]]), seed=0)


def test_what_each_source_reads_of_one_file_is_known(tmp_path):
    lines = [json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(20)]

    def contents(lines):
        (tmp_path / "p.jsonl").write_text("".join(lines))
        parts = [FileSettings(file=tmp_path / "p.jsonl", limit=limit) for limit in (None, 5, 5)]
        return build_prompts(MixSettings(mix=parts), seed=0).contents()

    before = contents(lines)
    assert sorted(held.rows for held in before.values()) == [5, 5, 20]
    after = contents([*lines[:10], lines[0], *lines[11:]])  # a change that only the first source sees
    assert {name for name in before if before[name] != after[name]} == {str(tmp_path / "p.jsonl")}


def test_completions_go_to_the_verifier_of_their_source():
    source = build_prompts(MIX, seed=0)
    for prompt in source.prompts("heldout", 8):
        assert source.verify(prompt, prompt.extra["solution"]).status is VerdictStatus.CORRECT
    stranger = build_prompts(MIX.mix[0], seed=0).prompts("train", 1)[0]
    assert source.verify(stranger, "1").status is VerdictStatus.UNKNOWN


def test_positions_in_the_mix_are_random_access():
    whole = build_prompts(MIX, seed=0).prompts("train", 30)
    assert build_prompts(MIX, seed=0).prompts("train", 7, start=13) == whole[13:20]


def test_labels_are_those_of_all_sources():
    assert build_prompts(MIX, seed=0).labels() == {("a", None), ("b", None)}
    unnamed = MixSettings(mix=[TaskSettings(task="addition"), TaskSettings(task="restate", domain="long")])
    assert build_prompts(unnamed, seed=0).labels() == {(None, "addition"), (None, "long")}
