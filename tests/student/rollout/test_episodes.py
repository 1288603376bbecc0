"""Episodes: what is sampled is what is trained, what breaks costs its own row, and the batch decides nothing."""

import selectors
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from socket import socket
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.procs import children
from opd.tasks.encode import encode_prompt
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.outcome import Outcome, outcome_of
from student.data.plan import EpisodePlan, PlannedRow, StepPlan, plan_step
from student.data.row import Row
from student.data.states import plan_from_state, plan_to_state, row_from_state, row_to_state
from student.rollout.episodes import EpisodePlayer
from student.rollout.requests import RolloutSpec
from student.rollout.transformers import rollout
from student.settings.episodes import EpisodeSettings
from tests.support.chat_templates import FAMILIES, family_tokenizer
from tests.support.scripted import Scripted, make_player, plan

LOCK = Lock(LockOptions(digits=4, turns=6))
NAUGHTY = "tests.support.environments:Naughty"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def player(tokenizer: Any) -> Iterator[EpisodePlayer]:
    made = make_player(tokenizer)
    yield made
    made.close()


def test_a_won_episode_is_one_row_with_the_environment_masked(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    path = prompt.extra["path"]
    student = Scripted(tokenizer, {prompt.uid: path})
    finished: list[Row] = []
    (row,) = player.play(plan([prompt]), student, purpose=("rollout",), on_row=finished.append)
    assert finished == [row] and row.tags["ended"] == "success"
    assert row.verdict is not None and row.verdict.value == 1.0 and row.turn_rewards == (0.0, 0.0, 0.0, 1.0)
    assert row.key == plan([prompt])[0].key and len(row.turns) == 4
    assert tokenizer.decode(row.prompt_ids) == f"{prompt.text}{prompt.extra['register']}"
    own = [tokenizer.decode(row.response_ids[a:b], skip_special_tokens=True) for a, b in row.turns]
    assert own == path
    between = [
        tokenizer.decode(row.response_ids[a:b]) for (_, a), (b, _) in zip(row.turns, row.turns[1:], strict=False)
    ]
    assert between == path[:-1]  # the register that is shown is the digit that was right
    assert row.episode is not None and (row.loss_mask == row.written).all()
    assert np.isnan(row.behaviour_logp[~row.written]).all() and (row.behaviour_logp[row.loss_mask] == -1).all()
    assert row.candidates is not None and len(row.candidates) == row.length


def test_each_turn_continues_the_very_ids_of_all_earlier_ones(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    student = Scripted(tokenizer, {prompt.uid: prompt.extra["path"]})
    (row,) = player.play(plan([prompt]), student, purpose=("rollout",), on_row=lambda row: None)
    for asked, (start, _) in zip(student.asked, row.turns, strict=True):
        assert list(asked.prefix_ids) == row.response_ids[:start].tolist()
    assert [asked.key.turn for asked in student.asked] == [0, 1, 2, 3]


def test_the_samples_of_a_prompt_begin_with_one_seed_of_the_environment(player: EpisodePlayer, tokenizer: Any) -> None:
    place = {"name": "tests.support.environments:Seeded", "options": {}}
    prompts = [Prompt.make(text, extra={"environment": place}) for text in ("1+", "2+")]
    student = Scripted(tokenizer, {prompt.uid: ["1"] for prompt in prompts})
    steps = [plan_step(step, prompts, samples=2, max_new_tokens=20, temperature=1.0) for step in (1, 2)]
    planned = [row for step in steps for row in step.rows]
    rows = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    seeds = {(row.key.step, row.key.uid, tokenizer.decode(row.prompt_ids)[2:]) for row in rows}
    assert len(rows) == 8 and len(seeds) == len({seed for *_, seed in seeds}) == 4


@pytest.mark.parametrize("history", [0, 2.5, "all"])
def test_a_wrong_history_is_refused_in_one_sentence(history: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe: history = {history!r} .*number[^.]*\.$"):
        parse_settings(EpisodeSettings, {"history": history}, source="recipe")


@pytest.mark.parametrize("history", [1, 2, 5])
def test_with_a_short_history_each_turn_continues_the_last_turns_alone(tokenizer: Any, history: int) -> None:
    prompt = LOCK.draw(Random(0))
    path = prompt.extra["path"]
    with_history = make_player(tokenizer, history=history)
    student = Scripted(tokenizer, {prompt.uid: path})
    (row,) = with_history.play(plan([prompt]), student, purpose=("rollout",), on_row=lambda row: None)
    full = make_player(tokenizer)
    (whole,) = full.play(
        plan([prompt]), Scripted(tokenizer, {prompt.uid: path}), purpose=("rollout",), on_row=lambda row: None
    )
    for name in ("response_ids", "loss_mask", "written", "behaviour_logp"):
        np.testing.assert_array_equal(getattr(row, name), getattr(whole, name))
    assert row.turns == whole.turns and row.turn_rewards == whole.turn_rewards and whole.windows == ()
    for turn, (asked, (start, _)) in enumerate(zip(student.asked, row.turns, strict=True)):
        since = row.turns[turn - history][0] if turn > history else 0
        assert list(asked.prefix_ids) == row.response_ids[since:start].tolist()
        assert row.read_before(start).tolist() == [*row.prompt_ids, *asked.prefix_ids]
    if history >= 3:  # as in the first turns of any episode, all is seen
        assert row.windows == ()
    else:  # the turns that saw everything share a window, and every sampled token is in one
        assert row.windows[0] == (0, 0, row.turns[history][1]) and len(row.windows) == 4 - history
        inside = np.concatenate([np.arange(start, end) for _, start, end in row.windows])
        assert len(set(inside)) == len(inside) and set(np.flatnonzero(row.loss_mask)) <= set(inside)
    for player in (with_history, full):
        player.close()


def test_replayed_turns_count_as_history(tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    path = prompt.extra["path"]
    player = make_player(tokenizer, history=1)
    planned = plan([prompt], episode=EpisodePlan(replay=tuple(path[:2])))
    student = Scripted(tokenizer, {prompt.uid: path[2:]})
    (row,) = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    player.close()
    first = tokenizer(path[0] + path[0], add_special_tokens=False)["input_ids"]
    assert student.asked[0].prefix_ids == tuple(row.response_ids[len(first) + 1 : row.turns[0][0]].tolist())
    assert [since for since, _, _ in row.windows] == [len(first) + 1, row.turns[0][0]]


@pytest.mark.parametrize(
    ("changes", "settings", "ended", "turns"),
    [
        ({"episode": EpisodePlan(turns=2)}, {}, "turns", 2),
        ({}, {"turns": 3}, "turns", 3),
        ({"max_new_tokens": 6}, {}, "tokens", 2),
    ],
)
def test_an_episode_is_cut_by_turns_or_tokens_and_then_not_won(
    tokenizer: Any, changes: dict[str, Any], settings: dict[str, Any], ended: str, turns: int
) -> None:
    prompt = LOCK.draw(Random(0))
    student = Scripted(tokenizer, {prompt.uid: prompt.extra["path"]})
    player = make_player(tokenizer, **settings)
    (row,) = player.play(plan([prompt], **changes), student, purpose=("rollout",), on_row=lambda row: None)
    assert (row.tags["ended"], len(row.turns), row.truncated) == (ended, turns, True)
    assert row.verdict is not None and row.verdict.known and row.verdict.value == 0.0 and row.trained


def test_a_turn_knows_the_state_that_it_began_at_however_it_was_reached(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    path = prompt.extra["path"]
    wrong = str((int(path[0]) + 1) % 10)
    ways = {0: path[:3], 1: [wrong, "b", path[0]]}  # straight on, and back to the start from a letter
    student = Scripted(tokenizer, {prompt.uid: []})
    student._row = lambda one: say(student, one, ways[one.key.sample][one.key.turn])  # type: ignore[method-assign]
    planned = plan([prompt, prompt], episode=EpisodePlan(turns=3))
    straight, detour = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    assert len(straight.episode.states) == len(detour.episode.states) == 3
    assert straight.episode.states[0] == detour.episode.states[0] == detour.episode.states[2]
    assert len({*straight.episode.states, *detour.episode.states}) == 4 and straight.episode.agents == ()
    assert row_from_state(row_to_state(detour)).episode.states == detour.episode.states
    assert Outcome.from_dict(outcome_of(detour).to_dict()) == outcome_of(detour)


def test_a_given_path_is_learnt_from_but_for_its_slips(player: EpisodePlayer, tokenizer: Any) -> None:
    world = Lock(LockOptions(digits=4, turns=8, slips=0.6))
    prompt = next(p for p in map(world.draw, map(Random, range(99))) if len(p.extra["slips"]) == 2)
    path, slips = prompt.extra["path"], prompt.extra["slips"]
    episode = EpisodePlan(replay=tuple(path), given=True, passed_over=tuple(slips))
    (row,) = player.play(
        plan([prompt], episode=episode), Scripted(tokenizer, {}), purpose=("rollout",), on_row=lambda row: None
    )
    assert row.tags["ended"] == "success" and row.origin == "expert" and row.trained and not row.on_policy
    learnt = [tokenizer.decode(row.response_ids[a:b], skip_special_tokens=True) for a, b in row.turns]
    assert learnt == [action for place, action in enumerate(path) if place not in slips] and learnt.count("b") == 2
    assert row.loss_mask.sum() == 2 * len(learnt)  # each with its end
    assert all(row.response_ids[b - 1] == tokenizer.eos_token_id for _, b in row.turns)
    assert [tokenizer.decode(row.response_ids[~row.loss_mask]).count(path[slip]) for slip in slips]
    assert np.isnan(row.behaviour_logp).all() and row.prompt_ids.tolist() == encode_prompt(
        replace(prompt, text=f"{prompt.text}{prompt.extra['register']}"), tokenizer
    )
    state = plan_to_state(StepPlan(1, tuple(plan([prompt], episode=episode))))
    assert plan_from_state(state).rows[0].episode == episode


def test_a_given_path_that_leads_nowhere_has_failed(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    episode = EpisodePlan(replay=tuple(prompt.extra["path"][:2]), given=True)
    (row,) = player.play(
        plan([prompt], episode=episode), Scripted(tokenizer, {}), purpose=("rollout",), on_row=lambda row: None
    )
    assert row.tags["ended"] == "turns" and row.verdict is not None and row.verdict.value == 0.0


def say(student: Scripted, one: PlannedRow, text: str) -> Row:
    student.script[one.key.uid] = [text] * (one.key.turn + 1)
    return Scripted._row(student, one)


def test_an_environment_may_say_who_acts_next(tokenizer: Any) -> None:
    prompt = Prompt.make("Solve.", extra={"environment": {"name": "tests.support.environments:Pair"}})
    student = Scripted(tokenizer, {prompt.uid: ["a", "b", "c"]})
    (row,) = make_player(tokenizer).play(plan([prompt]), student, purpose=("rollout",), on_row=lambda row: None)
    assert row.episode.agents == ("solver", "critic", "solver")


def test_replayed_actions_are_in_the_history_and_not_trained_on(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    path = prompt.extra["path"]
    student = Scripted(tokenizer, {prompt.uid: path[2:]})
    planned = plan([prompt], episode=EpisodePlan(replay=tuple(path[:2])))
    (row,) = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    assert row.tags["ended"] == "success" and len(row.turns) == 2 and row.notes["replayed"] == 2
    first, _ = row.turns[0]
    assert not row.loss_mask[:first].any()
    assert tokenizer.decode(row.response_ids[:first], skip_special_tokens=True) == "".join(a + a for a in path[:2])


def test_an_episode_that_ends_during_the_replay_is_not_trained_on(player: EpisodePlayer, tokenizer: Any) -> None:
    prompt = LOCK.draw(Random(0))
    planned = plan([prompt], episode=EpisodePlan(replay=tuple(prompt.extra["path"])))
    (row,) = player.play(planned, Scripted(tokenizer, {}), purpose=("rollout",), on_row=lambda row: None)
    assert row.tags["ended"] == "replay" and not row.loss_mask.any() and not row.trained
    assert row.verdict is not None and not row.verdict.known


class Hangs(selectors.DefaultSelector):
    """Waits of a pool: for as long as it takes while anyone may answer, and none at all for those that hang.

    Attributes:
        silent: connections to environments that were told to hang.
        passed: seconds that were passed over.
    """

    silent: ClassVar[list[socket]] = []
    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if any(key.fileobj not in self.silent for key in self.get_map().values()):
            return super().select(None)
        assert timeout is not None and not super().select(0.0)
        Hangs.passed += timeout
        return []


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> type[Hangs]:
    """Time passes for pools only when all that is waited for hangs: no load makes anyone else late."""
    send = children.Child.send

    def sent(child: children.Child, request: dict[str, Any], seconds: float) -> None:
        if request.get("action") == "hang":
            Hangs.silent.append(child.connection)
        send(child, request, seconds)

    monkeypatch.setattr(children.Child, "send", sent)
    monkeypatch.setattr(children, "selectors", SimpleNamespace(DefaultSelector=Hangs, EVENT_READ=selectors.EVENT_READ))
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: Hangs.passed))
    monkeypatch.setattr(Hangs, "silent", [])
    monkeypatch.setattr(Hangs, "passed", 0.0)
    return Hangs


def test_what_breaks_costs_its_own_episode(tokenizer: Any, hangs: type[Hangs]) -> None:
    prompts = [
        Prompt.make(text, extra={"environment": {"name": NAUGHTY, "options": {}}}) for text in ("a", "b", "c", "d")
    ]
    says = (["hi", "raise"], ["hi", "ho"], ["hang"], ["exit"])
    script = {prompt.uid: list(said) + ["ho"] * 3 for prompt, said in zip(prompts, says, strict=True)}
    player = make_player(tokenizer, turns=3, isolation="process", limits={"step_seconds": 12.0})
    try:
        rows = player.play(plan(prompts), Scripted(tokenizer, script), purpose=("rollout",), on_row=lambda row: None)
    finally:
        player.close()
    assert [row.tags["ended"] for row in rows] == ["broken: raised", "turns", "broken: hung", "broken: died"]
    assert [row.trained for row in rows] == [False, True, False, False]
    assert [row.verdict.known for row in rows if row.verdict] == [False, True, False, False]
    assert not any(row.loss_mask.any() for row in rows if not row.trained)


def test_a_first_observation_over_the_prompt_limit_costs_its_own_episode(tokenizer: Any) -> None:
    prompts = [Prompt.make(text, extra={"environment": {"name": NAUGHTY}}) for text in ("1" * 600, "1")]
    player = make_player(tokenizer, turns=1)  # prompts of 1024 tokens; this environment repeats them
    script = {prompt.uid: ["hi"] for prompt in prompts}
    rows = player.play(plan(prompts), Scripted(tokenizer, script), purpose=("rollout",), on_row=lambda row: None)
    assert [row.tags["ended"] for row in rows] == ["broken: invalid", "turns"]
    assert not rows[0].trained and rows[0].prompt_ids.tolist() == encode_prompt(prompts[0], tokenizer)


def test_an_episode_in_which_nothing_was_sampled_is_of_the_step_that_planned_it(tokenizer: Any) -> None:
    prompt = Prompt.make("raise", extra={"environment": {"name": NAUGHTY, "options": {}}})
    (one,) = plan([prompt])
    planned = [replace(one, key=replace(one.key, step=7))]
    player = make_player(tokenizer, turns=3, isolation="none")
    (row,) = player.play(planned, Scripted(tokenizer, {}), purpose=("rollout",), on_row=lambda row: None)
    assert row.tags["ended"] == "broken: raised" and not row.trained and row.policy_version.tolist() == [7]


def test_a_hundred_episodes_with_crashes_and_hangs_lose_no_row_and_leave_nothing(
    tokenizer: Any, hangs: type[Hangs]
) -> None:
    """Five in a hundred go wrong: three crash at different turns, one raises, one hangs."""
    prompts = [Prompt.make(f"p{i}", extra={"environment": {"name": NAUGHTY, "options": {}}}) for i in range(100)]
    wrong = {7: ["exit"], 31: ["hi", "exit"], 55: ["hi", "ho", "exit"], 70: ["raise"], 99: ["hi", "hang"]}
    script = {prompt.uid: wrong.get(i, []) + ["hi"] * 3 for i, prompt in enumerate(prompts)}
    player = make_player(tokenizer, turns=3, isolation="process", limits={"step_seconds": 12.0})
    others = psutil.Process().children(recursive=True)
    processes: list[int] = []
    memory: list[int] = []
    try:
        for _ in range(2):
            finished: list[Row] = []
            rows = player.play(plan(prompts), Scripted(tokenizer, script), purpose=("x",), on_row=finished.append)
            assert [row.key for row in rows] == [planned.key for planned in plan(prompts)]
            assert sorted(map(id, finished)) == sorted(map(id, rows))  # each once, none twice
            assert {i for i, row in enumerate(rows) if row.tags["ended"].startswith("broken")} == wrong.keys()
            assert all(row.tags["ended"] == "turns" for i, row in enumerate(rows) if i not in wrong)
            children = [child for child in psutil.Process().children(recursive=True) if child not in others]
            processes.append(len([child for child in children if child.status() != psutil.STATUS_ZOMBIE]))
            memory.append(psutil.Process().memory_info().rss)
    finally:
        player.close()
    assert hangs.passed == 2 * 12.0
    # The slots of what broke are closed; the next batch opens as many again.
    assert processes[0] == processes[1] <= 1 + 100
    assert memory[1] - memory[0] < 8 * 2**20
    assert not [child for child in psutil.Process().children(recursive=True) if child not in others]


def test_episodes_of_a_real_student_do_not_depend_on_their_batch(world: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    model = AutoModelForCausalLM.from_pretrained(world / "student").eval()
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=64)

    def engine(planned: Sequence[PlannedRow], purpose: tuple[object, ...]) -> list[Row]:
        return rollout(model, tokenizer, planned, spec, policy_version=5, purpose=purpose)

    prompts = [LOCK.draw(Random(seed)) for seed in range(5)]
    settings = parse_settings(EpisodeSettings, {"turn_tokens": 4, "isolation": "none"})

    def play(planned: list[PlannedRow]) -> list[Row]:
        player = EpisodePlayer(settings, tokenizer, spec)
        return player.play(planned, engine, purpose=("rollout",), on_row=lambda row: None)

    together = play(plan(prompts))
    for planned, row in zip(plan(prompts), together, strict=True):
        (alone,) = play([planned])
        assert alone.response_ids.tolist() == row.response_ids.tolist() and alone.tags == row.tags
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, len(row.prompt_ids) - 1 : -1].float(), -1)
        expected = logp.gather(-1, ids[0, len(row.prompt_ids) :, None]).squeeze(-1).numpy()
        np.testing.assert_allclose(row.behaviour_logp[row.loss_mask], expected[row.loss_mask], atol=1e-4)
        assert set(row.policy_version.tolist()) == {5}


@pytest.mark.parametrize("name", ["qwen-instruct", "llama-3.1", "gemma-3"])
def test_an_episode_with_tools_calls_them_and_reads_their_results(name: str) -> None:
    tokenizer = family_tokenizer(FAMILIES[name])
    place = {"name": "python", "options": {}}
    prompt = Prompt.make([{"role": "user", "content": "6 * 7?"}], answer="42", extra={"environment": place})
    call = '{"name": "python", "arguments": {"code": "print(6 * 7)"}}'
    student = Scripted(
        tokenizer, {prompt.uid: [call if name == "llama-3.1" else f"<tool_call>{call}</tool_call>", "42."]}
    )
    player = make_player(tokenizer, turn_tokens=200)
    try:
        planned = [replace(row, max_new_tokens=1000) for row in plan([prompt])]
        (row,) = player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)
    finally:
        player.close()
    assert row.tags["ended"] == "success" and len(row.turns) == 2
    (_, first), (second, _) = row.turns
    between = tokenizer.decode(row.response_ids[first:second])
    assert '"42"' in between if name == "llama-3.1" else "<tool_response>\n42\n</tool_response>" in between
    assert not row.written[first:second].any() and '"name": "python"' in tokenizer.decode(row.prompt_ids)
