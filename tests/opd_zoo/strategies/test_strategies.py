"""What each rollout strategy makes of rewards: its choices, its numbers, and what a second pass is told."""

from collections import Counter
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import thread_ranks
from thread_ranks import Ordered, build, metrics_of, of, place, sampled, together

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.prompt import Prompt
from opd_zoo.prompts import in_template
from student.data.outcome import outcome_of
from student.data.plan import PlannedRow
from student.data.report import StepReport
from student.data.row import Row
from student.data.states import row_from_state, row_to_state
from student.job.plugins import build_plugins
from student.plugin.strategy import STRATEGIES
from student.plugin.terms import build_terms
from student.rl.advantages.chain import AdvantageChain
from student.settings.recipe import Recipe


def test_oversampling_grows_with_what_the_last_steps_lost() -> None:
    made = build("adaptive_oversampling", decay=0.0)
    sizes = []
    for waste in (0.0, 0.5, 0.75, 0.9, 1.0):
        made.observe(StepReport(0, {"adaptive_oversampling/discarded_share": waste}, []))
        sizes.append(made.size(8))
    assert sizes == [8, 16, 32, 32, 32]
    made.observe(StepReport(0, {"adaptive_oversampling/discarded_share": 0.6}, []))
    ((rows, sampling, cursor),) = together(1, lambda: made)
    assert sampling.rounds == 1 and cursor.taken == 10
    assert all(len({r.verdict.value for r in rows if r.key.group == row.key.group}) == 2 for row in rows)
    assert len({row.key.group for row in rows}) <= 4
    assert 0 < metrics_of(sampling)["adaptive_oversampling/discarded_share"] < 1


def test_answers_are_added_until_both_kinds_are_there_and_all_count_in_the_mean() -> None:
    def third(planned: PlannedRow) -> Row:
        return sampled(planned, float(place(planned) > 0 and planned.key.sample in (1, 9, 11)))

    ((rows, sampling, _),) = together(1, lambda: build("reinforce_ada", rounds=2), third, plan=of(8), groups=6)
    assert sampling.rounds == 2
    groups = {row.key.uid: [r for r in rows if r.key.uid == row.key.uid] for row in rows}
    for mine in groups.values():
        assert len(mine) == 16 and sum(row.trained for row in mine) == 4
        right = [row for row in mine if row.verdict.value]
        assert len(right) in (0, 3) and sum(row.trained for row in right) == min(2, len(right))
        chain = AdvantageChain({"name": "group_mean", "scale": "none"}, "a test")
        credit = dict(zip([r.key for r in mine], chain.estimate([outcome_of(r) for r in mine]), strict=True))
        if right:
            assert credit[right[0].key] == 0.8125 and min(credit.values()) == -0.1875
    assert 0 < metrics_of(sampling)["reinforce_ada/mixed_share"] < 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_compares_the_answers_of_all_rounds(ranks: int) -> None:
    """Majority votes: what the first round was paid changes with the answers of the second."""

    def vote(planned: PlannedRow) -> Row:
        row = sampled(planned, 0.0)
        row.text = "a" if planned.key.sample == 0 else f"b{planned.key.sample // 4}"
        return row

    parts = together(
        ranks, lambda: build("reinforce_ada", rounds=2), vote, plan=of(4), rewards=[{"name": "ttrv", "diversity": 0.0}]
    )
    rows = [row for part, _, _ in parts for row in part]
    groups = {row.key.uid: [r for r in rows if r.key.uid == row.key.uid] for row in rows}
    assert len(groups) == 4
    for mine in groups.values():
        assert len(mine) == 8
        votes = {text: sum(row.text == text for row in mine) / 8 for text in ("a", "b0", "b1")}
        assert {row.text: outcome_of(row).reward for row in mine} == votes == {"a": 1 / 8, "b0": 3 / 8, "b1": 4 / 8}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adaptive_oversampling", {}),
        ("self_interference", {}),
        ("lte", {}),
        ("guide", {"column": "solution"}),
        ("icpo", {"examples": ["1+1=2"]}),
    ],
)
def test_models_are_asked_about_what_a_strategy_keeps_and_nothing_else(name: str, settings: dict[str, Any]) -> None:
    ((rows, sampling, _),) = together(1, lambda: build(name, **settings), hopeless, plan=of(4), groups=6)
    asked = sampling._scorer.asked
    assert asked == sampling.scored and {id(row) for row in asked} == {id(row) for row in rows}
    assert len(asked) == len(rows) < len(sampling.rows)


def test_rewards_that_read_what_models_say_get_it_for_every_row() -> None:
    ((rows, sampling, _),) = together(1, lambda: build("lte"), hopeless, plan=of(4), groups=6, judges_first=False)
    assert len(rows) < len(sampling.scored) == len(sampling.rows) == len(sampling._scorer.asked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_surplus_of_a_round_is_cut_in_the_order_drawn_so_no_prompt_loses_more_than_others(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All orders of four prompts, one of which teaches nothing; two are wanted."""
    prompts = thread_ranks.SOURCE.prompts("train", 4)
    dull = prompts[0].uid

    def answer(planned: PlannedRow) -> Row:
        return sampled(planned, float(planned.key.uid == dull and planned.temperature == 0.0))

    chosen: Counter[str] = Counter()
    for order in permutations(prompts):
        monkeypatch.setattr(thread_ranks, "SOURCE", Ordered(order))
        parts = together(ranks, lambda: build("self_interference", rounds=2), answer, groups=2)
        found = {row.key.uid for part, _, _ in parts for row in part}
        assert found == set([prompt.uid for prompt in order if prompt.uid != dull][:2])
        chosen.update(found)
    assert dull not in chosen and set(chosen.values()) == {24 * 2 // 3}


def test_a_prompt_that_is_solved_draws_no_more() -> None:
    def lucky(planned: PlannedRow) -> Row:
        return sampled(planned, float(planned.key.sample == 0))

    ((rows, sampling, _),) = together(1, lambda: build("reinforce_ada", rule="positive"), lucky, plan=of(8))
    assert sampling.rounds == 1 and len(rows) == 32


def test_prompts_that_greedy_decoding_solves_are_passed_over() -> None:
    seen: list[PlannedRow] = []

    def greedy(planned: PlannedRow) -> Row:
        seen.append(planned)
        return sampled(planned, float(place(planned) == 0 and planned.temperature == 0.0))

    ((rows, sampling, _),) = together(1, lambda: build("self_interference", rounds=8), greedy)
    assert len(rows) == 8 and all(int(row.key.uid, 16) % 3 for row in rows)
    assert {row.key for row in rows}.isdisjoint(p.key for p in seen if p.temperature == 0.0)
    assert 0 < metrics_of(sampling)["self_interference/solved_share"] < 1


def hopeless(planned: PlannedRow) -> Row:
    """Wrong, but for the second answer of every third prompt, and for every other hinted one."""
    right = planned.key.sample % 2 == 0 if planned.behaviour_prompt else not place(planned) and planned.key.sample == 1
    row = sampled(planned, float(right))
    row.text = f"answer {planned.key.sample}"
    return row


def test_lte_tells_all_wrong_groups_of_their_answers_and_right_ones_take_places() -> None:
    told: list[PlannedRow] = []

    def answer(planned: PlannedRow) -> Row:
        told.append(planned)
        return hopeless(planned)

    ((rows, sampling, _),) = together(1, lambda: build("lte"), answer, plan=of(4), groups=6)
    hinted = [planned for planned in told if planned.behaviour_prompt]
    assert hinted and all(place(planned) for planned in hinted)
    for planned in hinted:
        text = str(planned.behaviour_prompt.text)  # type: ignore[union-attr]
        assert (
            text.startswith(str(planned.prompt.text)) and f"wrong: {', '.join(f'answer {i}' for i in range(4))}" in text
        )
        assert planned.prompt.answer is not None and planned.prompt.answer not in text[len(str(planned.prompt.text)) :]
    for uid in {row.key.uid for row in rows}:
        mine = [row for row in rows if row.key.uid == uid]
        helped = [row for row in mine if row.origin == "hinted"]
        assert len(mine) == 4 and len(helped) == (2 if int(uid, 16) % 3 else 0)
        assert all(row.verdict.value == 1 and row.tags["context"] == "hinted" for row in helped)
    assert metrics_of(sampling)["lte/helped_share"] == 1.0 and 0 < metrics_of(sampling)["hinted_share"] < 0.5


def shown(made: Any, rows: list[Row], answers: list[str]) -> list[str | None]:
    """What the prompt "q" becomes under each hint."""
    return [in_template(Prompt.make("q"), *hint).text for hint in made.hints(rows, answers)]


def test_the_hint_of_lte_goes_by_what_was_cut_off() -> None:
    made = build("lte")
    (cut,) = [sampled(PlannedRow(plan.key, plan.prompt, 4, 1.0), 0.0) for plan in of(1)([Prompt.make("q")]).rows]
    whole = row_from_state(row_to_state(cut))
    cut.truncated = True
    texts = partial(shown, made)
    assert texts([cut, cut], ["1", "2"]) == ["q\nThink concisely."]
    both, shorter = texts([cut, whole], ["1", "2"])
    assert both.splitlines()[1:] == ["Think concisely.", "These answers are wrong: 2. Do not mention this note."]
    assert shorter == "q\nThink concisely."
    (alone,) = texts([whole, whole], ["2", "2"])
    assert "Think" not in alone and alone.count("2") == 1
    assert [text.count(",") for text in texts([whole] * 3, ["2", "3", "4"])] == [2, 1, 0]
    (odd,) = texts([whole], ["the {prompt}"])  # an answer that looks like a place is left alone
    assert odd.startswith("q\nThese answers are wrong: the {prompt}.") and odd.count("q") == 1


def test_guide_replaces_whole_groups_and_keeps_the_band() -> None:
    ((rows, sampling, _),) = together(1, lambda: build("guide", column="solution"), hopeless, plan=of(4), groups=6)
    for row in rows:
        assert (row.origin == "hinted") == bool(int(row.key.uid, 16) % 3)
    assert all(sum(r.key.uid == row.key.uid for r in rows) == 4 for row in rows)
    assert metrics_of(sampling)["guide/tried_share"] > 0
    with pytest.raises(DataError, match="keep_columns"):
        build("guide")._hint(Prompt.make("q"))


@pytest.mark.parametrize(
    ("name", "settings", "longest", "hinted"),
    [
        ("lte", {}, 10_000, "whole"),
        ("lte", {}, 70, "cut"),  # "11+22=", then room for one of the wrong answers
        ("lte", {}, 10, "none"),
        ("guide", {"column": "solution"}, 10, "none"),
        ("icpo", {"examples": ["1+1=2" * 9, "1+1=2"]}, 30, "cut"),
        ("icpo", {"examples": ["1+1=2" * 9, "1+1=2"]}, 10, "none"),
    ],
)
def test_a_hint_over_the_length_limit_is_cut_or_left_out_and_counted(
    name: str, settings: dict[str, Any], longest: int, hinted: str, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[PlannedRow] = []

    def answer(planned: PlannedRow) -> Row:
        read.append(planned)
        return hopeless(planned)

    made = build(name, **settings)
    for _ in range(2):
        ((rows, sampling, _),) = together(1, lambda: made, answer, plan=of(4), groups=6, longest=longest)
    assert rows and max(len(str((planned.behaviour_prompt or planned.prompt).text)) for planned in read) <= longest
    assert any(planned.behaviour_prompt for planned in read) == (hinted != "none")
    found = metrics_of(sampling)
    assert found["hint/too_long_share"] == (hinted == "none") and (found["hint/cut_share"] > 0) == (hinted == "cut")
    said = [record.getMessage() for record in caplog.records if "max_prompt_tokens" in record.getMessage()]
    assert len(said) == (hinted != "whole")
    if name == "icpo" and hinted == "none":
        assert all(outcome_of(row).reward in (0.0, 1.0) for row in rows) and len(rows) == 24


def test_icpo_keeps_the_answer_after_an_example_where_it_is_right_and_pays_it() -> None:
    def answer(planned: PlannedRow) -> Row:
        return sampled(planned, float(planned.behaviour_prompt is not None and place(planned) > 0))

    made = build("icpo", examples=["1+1=2"], steps=4, beta=1.0)
    ((rows, sampling, _),) = together(1, lambda: made, answer, plan=of(4, step=1), groups=6)
    for uid in {row.key.uid for row in rows}:
        mine = [row for row in rows if row.key.uid == uid]
        experts = [row for row in mine if row.origin == "hinted"]
        assert len(mine) == (4 if int(uid, 16) % 3 else 3) and len(experts) == len(mine) - 3
        assert all(outcome_of(row).reward == 1.75 for row in experts)
    assert 0 < metrics_of(sampling)["icpo/kept_share"] < 1


def test_examples_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    # A line separator of Unicode within a text ends no line of the file.
    path.write_text('{"prompt": "2+2=\u2028", "answer": "4"}\n', encoding="utf-8")
    assert build("icpo", file=str(path), examples=["1+1=2"]).examples() == ["1+1=2", "2+2=\u20284"]
    path.write_text('{"prompt": "2+2="}\n')
    with pytest.raises(ConfigError, match="worked examples"):
        build("icpo", file=str(path)).examples()


@pytest.mark.parametrize(
    ("strategy", "objective", "said"),
    [
        ({"name": "lte"}, {"name": "grpo"}, "mixed_context"),
        ({"name": "icpo"}, {"name": "mixed_context"}, "no worked example"),
        ({"name": "replay"}, {"name": "cispo"}, "rows: all"),
        ({"name": "replay"}, {"name": "cispo", "rows": "all", "ratio_to": "old"}, "ratio_to: behaviour, or rows: sam"),
        ({"name": "replay"}, {"name": "policy_gradient", "rows": "all", "ratio": "none"}, "older weights"),
        ({"name": "rorecomp"}, [{"name": "cispo", "rows": "all"}, {"name": "chord"}], "given answers"),
        ({"name": "replay"}, {"name": "cispo", "rows": "all"}, None),
        ({"name": "guide"}, {"name": "mixed_context"}, None),
    ],
)
def test_what_no_term_would_learn_from_is_refused(
    strategy: dict[str, Any], objective: dict[str, Any] | list[dict[str, Any]], said: str | None
) -> None:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4, "strategy": strategy},
        "objective": objective if isinstance(objective, list) else [objective],
    }
    recipe = parse_settings(Recipe, data)
    if said is None:
        build_plugins(recipe)
        return
    with pytest.raises(ConfigError, match=said):
        build_plugins(recipe)


def test_every_strategy_says_how_its_formula_is_known() -> None:
    assert build_terms([{"name": "mixed_context"}])[0].settings.rows == "all"
    for entry in STRATEGIES:
        if entry.path.startswith("opd_zoo."):
            assert STRATEGIES.load(entry.name).evidence in {"text and code", "text", "abstract", "inferred", "own"}
