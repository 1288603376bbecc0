"""Episodes that the student summarises: what each turn reads, what is learnt from, and how they end."""

from random import Random
from typing import Any

import numpy as np
import pytest
from rows import make_row
from summarised import LOCK, PATH, PROMPT, SUMMARY, TURN, limits, played

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.turns import with_observation
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.outcome import Outcome, outcome_of
from student.data.row import Row
from student.data.states import row_from_state, row_to_state
from student.job.plugins import build_plugins
from student.methods.curricula.turns import note_turns, turn_metrics
from student.methods.windows.probe import cut_row
from student.model.ranks import Ranks
from student.report.samples import sample_of
from student.report.telemetry import StageClock
from student.rollout.sampling import Sampling
from student.settings.recipe import Recipe
from tests.support.chat_templates import FAMILIES, family_tokenizer
from tests.support.scripted import Scripted, make_player, plan

NAUGHTY = {"environment": {"name": "tests.support.environments:Naughty", "options": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def test_a_summary_stands_before_the_observation_that_would_not_fit(tokenizer: Any) -> None:
    row, student = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    text = tokenizer.decode(row.response_ids, skip_special_tokens=True)
    a, b, c, d = PATH  # a lock shows the digit that was right
    assert text == f"{a}{a}{b}sum7{b}{c}sum8{c}{d}" and row.tags["ended"] == "success"
    assert row.summaries == (2, 4) and len(row.turns) == 6 and len(row.actions) == 4
    assert [row.response_ids[start] for start, _ in row.actions] == [tokenizer(digit)["input_ids"][0] for digit in PATH]
    first, second = (row.turns[turn][0] for turn in row.summaries)
    assert row.windows == ((0, 0, row.turns[2][1]), (first, row.turns[3][0], row.turns[4][1]), (second, *row.turns[5]))
    for asked, (start, _) in zip(student.asked, row.turns, strict=True):
        assert row.read_before(start).tolist() == [*row.prompt_ids, *asked.prefix_ids]
    assert [asked.max_new_tokens for asked in student.asked] == [TURN, TURN, SUMMARY, TURN, SUMMARY, TURN]
    assert [asked.key.turn for asked in student.asked] == list(range(6))


def test_the_students_tokens_alone_are_trained_on_its_summaries_among_them(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    own = np.zeros(row.length, np.bool_)
    for start, end in row.turns:
        own[start:end] = True
    assert (row.loss_mask == own).all() and (row.written == own).all()
    inside = np.concatenate([np.arange(start, end) for _, start, end in row.windows])
    assert len(set(inside)) == len(inside) and set(np.flatnonzero(own)) <= set(inside)
    asked = row.asked(gather=False, own=True)
    places = [first + item.pick(np.arange(item.response_length)) for item, first in asked]
    assert np.concatenate(places).tolist() == np.flatnonzero(own).tolist()
    # The environment rewards actions alone; a summary has a state of its own to be compared at.
    assert row.turn_rewards == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0) and len(set(row.episode.states)) == 6
    assert row.notes["turns"] == 4


@pytest.mark.parametrize("name", ["qwen-instruct", "llama-3.1", "gemma-3"])
@pytest.mark.parametrize("cut", [(), (2,)])
def test_in_a_chat_the_summary_is_a_turn_and_the_window_is_what_the_template_writes(
    name: str, cut: tuple[int, ...]
) -> None:
    chat = family_tokenizer(FAMILIES[name])
    prompt = Prompt.make([{"role": "user", "content": "Go."}], extra=NAUGHTY)
    first = len(encode_prompt(with_observation(prompt, "", chat), chat))
    settings = {"context_tokens": first + 250, "tokens": 8, "instruction": "Sum up."}
    player = make_player(chat, turn_tokens=64, turns=3, history="summary", summary=settings)
    long = "b" * 60
    student = Scripted(chat, {prompt.uid: ["one", long, "all", "two"]}, cut)
    planned = [plan([prompt], max_new_tokens=2000)[0]]
    (row,) = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    player.close()
    # What a window holds is the conversation of task, summary and what followed, as the template writes it.
    seen = ["you said one, 1", f"you said {long}, 2"]
    user = prompt.messages[0] if prompt.messages else {}
    whole = [
        user,
        *said("one", seen[0]),
        {"role": "assistant", "content": long},
        {"role": "user", "content": "Sum up."},
    ]
    fresh = [user, *said("all", seen[1])]
    assert row.summaries == (2,) and row.tags["ended"] == "turns" and len(row.actions) == 3
    for messages, asked in zip((whole, fresh), student.asked[2:], strict=True):
        ids = [*row.prompt_ids, *asked.prefix_ids]
        assert chat.decode(ids) == chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert row.read_before(row.turns[asked.key.turn][0]).tolist() == ids


def said(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}, {"role": "user", "content": answer}]


def test_empty_and_cut_summaries_stand_as_they_are_and_are_counted(tokenizer: Any) -> None:
    empty, student = played(tokenizer, [PATH[0], PATH[1], "", PATH[2], PATH[3]])
    assert student.asked[3].prefix_ids == tuple(empty.response_ids[empty.turns[2][0] : empty.turns[3][0]].tolist())
    cut, _ = played(tokenizer, [PATH[0], PATH[1], "888", PATH[2], "8", PATH[3]], cut=(2,))
    assert empty.tags["ended"] == cut.tags["ended"] == "success"
    counted = [[row.notes[f"summaries{name}"] for name in ("", "_empty", "_cut")] for row in (empty, cut)]
    assert counted == [[1.0, 1.0, 0.0], [2.0, 0.0, 1.0]]


def test_the_tokens_of_context_that_were_saved_are_those_of_the_whole_history_less_those_read(tokenizer: Any) -> None:
    row, student = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    whole = [0, 3, None, 6, None, 9]  # two ids of each action and one of each observation
    saved = sum(n - len(one.prefix_ids) for n, one in zip(whole, student.asked, strict=True) if n is not None)
    assert row.notes["context_saved"] == saved == (6 - 3) + (9 - 3)


@pytest.mark.parametrize(("most", "room", "says"), [(1, 2, 4), (8, 0, 3)])
def test_an_episode_without_room_or_summaries_ends_by_context_and_has_failed(
    tokenizer: Any, most: int, room: int, says: int
) -> None:
    # With most 1 the last window needs no room for a summary, and holds one turn more.
    row, _ = played(tokenizer, [PATH[0], PATH[1], "77", "b", "a", "b"], room=room, most=most)
    assert row.tags["ended"] == "context" and row.truncated and row.trained and len(row.turns) >= says
    assert row.notes["summaries"] == 1 and row.verdict is not None and row.verdict.value == 0.0


def test_a_summary_counts_as_no_turn_of_the_episode(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]], turns=3)
    assert row.tags["ended"] == "turns" and len(row.actions) == 3 and row.summaries == (2,)


def test_episodes_with_and_without_summaries_share_their_rounds(tokenizer: Any) -> None:
    prompts = [PROMPT, LOCK.draw(Random(1))]
    settings = limits(PROMPT, tokenizer)
    script = {PROMPT.uid: [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]]}
    wrong = str((int(prompts[1].extra["path"][0]) + 1) % 10)
    script[prompts[1].uid] = [wrong, "b", "9", wrong, "b", "9"] + [wrong] * 6
    rows = {}
    for batch in ([0, 1], [0], [1]):
        player = make_player(tokenizer, turn_tokens=TURN, history="summary", summary=settings)
        planned = plan([prompts[i] for i in batch])
        found = player.play(planned, Scripted(tokenizer, script), purpose=("rollout",), on_row=lambda row: None)
        player.close()
        for i, row in zip(batch, found, strict=True):
            rows.setdefault(i, []).append(row)
    for together, alone in rows.values():
        assert together.response_ids.tolist() == alone.response_ids.tolist()
        assert (together.turns, together.windows, together.summaries) == (alone.turns, alone.windows, alone.summaries)


def test_a_short_episode_is_not_summarised_and_the_step_says_so(tokenizer: Any) -> None:
    row, _ = played(tokenizer, PATH, room=99)
    assert row.summaries == () and row.windows == () and row.notes["summaries"] == 0
    assert metrics_of([row])["summaries"] == 0 and metrics_of([row])["context_saved"] == 0
    long, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "", PATH[3]])
    found = metrics_of([row, long])
    assert found["summaries"] == 1.0 and found["summaries_empty"] == 0.5 and found["summaries_cut"] == 0.0
    assert found["context_saved"] == long.notes["context_saved"] / 8 and found["episode_windows"] == 3
    assert "summaries" not in metrics_of([make_row(tags={"ended": "turns"})])


def metrics_of(rows: list[Row]) -> dict[str, float]:
    nothing: Any = None
    sampling = Sampling(nothing, nothing, nothing, plan, nothing, Ranks(), StageClock())
    sampling.rows = rows
    return sampling.metrics(sampling.counts())


def test_summaries_survive_a_checkpoint_and_a_cut_and_are_no_action_of_a_recorded_path(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    again = row_from_state(row_to_state(row))
    assert again.summaries == row.summaries and again.windows == row.windows
    assert cut_row(row, row.turns[4][0]).summaries == (2,)
    assert Outcome.from_dict(outcome_of(row).to_dict()) == outcome_of(row)
    sample = sample_of(row, tokenizer)
    assert sample["answers"] == PATH
    assert [part["who"] for part in sample["episode"]["segments"]].count("summary") == 2


def test_divergences_by_turn_leave_summaries_out_and_the_sum_does_not(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    taught = np.where(row.loss_mask, row.behaviour_logp - 0.5, np.nan).astype(np.float32)
    row.signals["teacher", PayloadKind.SAMPLED] = Scores(sampled=taught)
    note_turns(row)
    found = turn_metrics([outcome_of(row)])
    assert [found[f"kl_by_turn/{n}"] for n in (1, 2, 3, 4)] == [1.0] * 4 and "kl_by_turn/5" not in found
    assert (found["summary_kl"], found["episode_kl"], found["turns"]) == (2.0, 6.0, 4.0)


BRIDGE = {"name": "future_bridge", "teacher": {"endpoint": "http://h:1/v1", "model": "m"}}
GIVEN = {"name": "policy_gradient", "rows": "expert", "ratio": "none"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": [{"name": "tcod", "order": "b2f"}]}, "tcod does not work with it: order b2f replays"),
        ({"methods": [{"name": "tcod", "order": "mixed"}]}, "use order f2b"),
        ({"methods": [{"name": "prefix_replay"}]}, "prefix_replay does not work with it: it replays actions"),
        (
            {"methods": [{"name": "expert_rows", "source": "path", "share": 0.5}], "objective": [{"name": "sft"}]},
            "expert_rows does not work with it: its recorded paths contain no summaries",
        ),
        (
            {"rollout": {"strategy": {"name": "arpo"}, "samples_per_prompt": 2}},
            "arpo does not work with it: it repeats the turns before a branch",
        ),
        (
            {"methods": [{"name": "rltf"}], "objective": [GIVEN], "rollout": {"samples_per_prompt": 2}},
            "rltf does not work with it: it treats every turn as an attempt",
        ),
        (
            {"rollout": {"strategy": BRIDGE}, "objective": [{"name": "opd", "payload": "hidden"}]},
            "future_bridge does not work with it: it replays the turns before the bridge",
        ),
    ],
)
def test_what_replays_turns_is_refused_before_anything_is_loaded(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_plugins(recipe(**changes))


@pytest.mark.parametrize(
    "methods", [[{"name": "tcod"}], [{"name": "turnopd"}], [{"name": "episode_filter", "ended": ["context"]}]]
)
def test_methods_that_cut_episodes_go_with_summaries(methods: list[dict[str, Any]]) -> None:
    assert build_plugins(recipe(methods=methods)).controllers


def recipe(**changes: Any) -> Recipe:
    rollout = {"episodes": {"history": "summary"}, **changes.pop("rollout", {})}
    data = {"run": "run", "model": {"path": "student"}, "prompts": {"task": "lock"}, "rollout": rollout}
    return parse_settings(Recipe, {**data, "teachers": {"endpoints": ["h:1"]}, **changes})


@pytest.mark.parametrize(
    ("episodes", "words"),
    [
        ({"history": 2, "summary": {"most": 3}}, "summary is set, but history is 2"),
        ({"history": "summary", "summary": {"context_tokens": 3000}}, r"is below 3328, .*max_prompt_tokens 2048"),
        ({"history": 0}, "history"),
        ({"history": "sumary"}, "history"),
        ({"history": "summary", "summary": {"instruction": ""}}, "instruction"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(episodes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(rollout={"episodes": episodes})


def test_the_longest_sequence_of_a_summarised_episode_is_its_context() -> None:
    rollout = recipe(rollout={"max_new_tokens": 100_000, "episodes": {"history": "summary"}}).rollout
    assert rollout.longest_sequence(2048) == 8192 and rollout.longest_sequence(3000) == 3000 + 8192
    assert recipe(rollout={"episodes": {}, "max_new_tokens": 100}).rollout.longest_sequence(2048) == 2148
    assert (
        recipe(rollout={"max_new_tokens": 100, "episodes": {"history": "summary"}}).rollout.longest_sequence(9) == 109
    )
