"""SOPD and SAGE-OPD: teachers that write turns, and judges that weigh them, over real HTTP."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from opd_zoo.curricula.sage import Sage, SageSettings
from opd_zoo.curricula.sopd import Sopd, SopdSettings
from opd_zoo.distil.sage_opd import token_weights
from opd_zoo.turns import with_answer
from student.data.needs import TEACHER
from student.data.outcome import outcome_of
from student.data.row import EpisodeTrace, Row, RowKey
from student.job.plugins import build_plugins
from student.plugin.controllers import begin
from student.plugin.terms import build_terms
from student.settings.recipe import Recipe
from tests.support.answering import answering

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with answering() as url:
        yield url


def ids(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER(text, add_special_tokens=False)["input_ids"]]


def episode(sample: int = 0) -> Row:
    """Program 31, register 7: the student says 4 (wrong), sees a letter, and says b."""
    prompt = Prompt.make("31:")
    response = [*ids("4"), END, *ids("g"), *ids("b"), END]
    return Row(
        key=RowKey(2, prompt.uid, sample),
        prompt=prompt,
        prompt_ids=np.array(ids("31:7"), np.uint32),
        response_ids=np.array(response, np.uint32),
        behaviour_logp=np.array([-1, -1, np.nan, -1, -1], np.float32),
        policy_version=np.full(5, 2, np.int32),
        loss_mask=np.array([1, 1, 0, 1, 1], np.bool_),
        truncated=False,
        text="4\nb",
        episode=EpisodeTrace(np.array([0, 0, 1, 0, 0], np.bool_)),
        turns=((0, 2), (3, 5)),
        tags={"ended": "turns"},
    )


def sopd(endpoint: str, **settings: Any) -> Sopd:
    teacher = {"endpoint": endpoint, "model": "m", "max_tokens": 4, "attempts": 1, "timeout": 60}
    made = Sopd(parse_settings(SopdSettings, {"name": "sopd", "teacher": teacher, **settings}))
    begin(made, SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[arg-type]
    return made


def test_the_teacher_writes_a_turn_at_each_history_of_the_student(address: str) -> None:
    method, row = sopd(address), episode()
    own, first, second = method.compose([row])
    assert own is row
    assert first.prompt_ids.tolist() == ids("31:7") and first.response_ids.tolist() == [*ids("0"), END]
    assert second.prompt_ids.tolist() == [*ids("31:7"), *row.response_ids[:3].tolist()]
    assert second.response_ids.tolist() == [*ids("b"), END] and second.text == "b"
    for turn, made in enumerate((first, second)):
        assert made.origin == "expert" and not made.on_policy and made.loss_mask.all()
        assert made.key == RowKey(2, row.key.uid, 0, turn, "teacher")
    services: Any = SimpleNamespace(outcomes=[outcome_of(one) for one in (own, first, second)])
    assert method.after_update(2, services) == {
        "teacher_turns": 2.0,
        "teacher_turn_tokens": 4.0,
        "teacher_unanswered": 0.0,
    }
    assert len(sopd(address, trained_under=4).compose([episode()])) == 2  # the second history is longer


def test_a_turn_that_fills_its_limit_was_cut_and_teaches_no_end(address: str) -> None:
    teacher = {"endpoint": address, "model": "m", "max_tokens": 1, "attempts": 1, "timeout": 60}
    _, first, second = sopd(address, teacher=teacher).compose([episode()])
    assert first.response_ids.tolist() == ids("0") and second.response_ids.tolist() == ids("b")


def test_only_trained_episodes_of_the_student_are_taken_on(address: str) -> None:
    given, left_out = replace(episode(), origin="expert"), replace(episode(), trained=False)
    assert sopd(address).compose([given, left_out]) == [given, left_out]


def test_turns_that_a_teacher_does_not_answer_are_left_out_and_counted() -> None:
    method, row = sopd("http://127.0.0.1:9"), episode()
    assert method.compose([row]) == [row]
    services: Any = SimpleNamespace(outcomes=[outcome_of(row)])
    assert method.after_update(2, services)["teacher_unanswered"] == 1.0


def build(objective: list[dict[str, Any]], method: dict[str, Any]) -> Any:
    data = {
        "run": "run",
        "model": {"path": "student"},
        "prompts": {"task": "lock"},
        "teachers": {"endpoints": ["h:1"]},
        "objective": objective,
        "methods": [method],
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 64},
        "train": {"steps": 1, "learning_rate": 1e-3},
    }
    return build_plugins(parse_settings(Recipe, data))


def test_objectives_that_cannot_learn_from_words_are_refused() -> None:
    method = {"name": "sopd", "teacher": {"endpoint": "http://h", "model": "m"}}
    build([{"name": "sft"}], method)
    with pytest.raises(ConfigError, match="needs scores"):
        build([{"name": "sft"}, {"name": "opd", "rows": "sampled"}], method)
    with pytest.raises(ConfigError, match="add term sft"):
        build([{"name": "sft", "rows": "sampled"}], method)
    judge = {"name": "sage", "judge": {"endpoint": "http://h", "model": "m"}}
    with pytest.raises(ConfigError, match="use objective sage_opd"):
        build([{"name": "opd"}], judge)
    assert not build([{"name": "sage_opd"}], judge).remarks


def judged(row: Row, lengths: tuple[int, int]) -> None:
    """Give the teacher certainties of 0.5 in the first turn and 0.8 in the second."""
    values = np.log(np.array([[0.5, 0.1], [0.5, 0.1], [0.9, 0.1], [0.8, 0.1], [0.8, 0.1]], np.float32))
    row.signals[TEACHER, PayloadKind.TOPK] = Scores(sampled=values[:, 0], values=values)


def test_turns_weigh_by_the_judges_word_and_the_teachers_certainty(address: str) -> None:
    row = episode()
    judged(row, (2, 2))
    # "31:74g" and "31:74gb" follow a question whose length decides the word: the second has one letter more.
    words = []
    for offset in range(4):
        judge = {"endpoint": address, "model": "m"}
        settings = {"name": "sage", "judge": judge, "question": "?" * offset + "{history}"}
        method = Sage(parse_settings(SageSettings, settings))
        begin(method, SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[arg-type]
        row.notes.clear()
        method.compose([row])
        words.append((row.notes["turn_weight/0"] / 0.5, row.notes["turn_weight/1"] / 0.8, row.notes["turns_judged"]))
    # Lengths 6 and 7, 7 and 8, 8 and 9, 9 and 10: strong, none of the words, Skip, Weak.
    expected = [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.5, 2.0), (0.5, 1.0, 2.0)]
    assert words == [pytest.approx(one, rel=1e-6) for one in expected]
    services: Any = SimpleNamespace(outcomes=[outcome_of(row), outcome_of(episode())])
    assert method.after_update(2, services) == {"turns_skipped": 0.0, "turns_judged": 1.0}
    row.notes |= {"turns_skipped": 1.0}
    services.outcomes[0] = outcome_of(row)
    assert method.after_update(2, services)["turns_skipped"] == 0.5


def test_a_judge_reads_what_the_environment_answered_behind_a_summary_too() -> None:
    """Ids are their places: turns 0-2, 3-5, a summary 6-8 and a turn 9-10, answers between."""
    row = make_row(
        12, turns=((0, 2), (3, 5), (6, 8), (9, 10)), episode=EpisodeTrace(np.zeros(12, np.bool_), summaries=(2,))
    )
    row.response_ids = np.arange(100, 112, dtype=np.uint32)

    def read(turn: int) -> list[int]:
        return (with_answer(row, turn)[len(row.prompt_ids) :] - 100).tolist()

    assert read(0) == [0, 1, 2] and read(3) == [*range(10), 10, 11]
    assert read(1) == [0, 1, 2, 3, 4, 8]


def test_the_mean_weight_of_a_token_is_one_and_skipped_turns_have_no_gradient(toy: Any) -> None:
    made = toy(lengths=(4, 4), group=2, masked=False)
    weights = [{"turn_weight/0": 0.0, "turn_weight/1": 0.6}, {"turn_weight/0": 0.2}]
    turns = [((0, 2), (2, 4)), ((0, 4),)]
    for row, notes, spans in zip(made.rows, weights, turns, strict=True):
        row.notes, row.turns = dict(notes), spans
    (term,) = build_terms([{"name": "sage_opd", "k": 3}])
    (plain,) = build_terms([{"name": "opd", "payload": "topk", "k": 3}])
    term.assess(made.rows, [outcome_of(row) for row in made.rows], [0, 1])
    found, base = term.token_losses(made.batch()), plain.token_losses(made.batch())
    assert found.loss is not None and base.loss is not None
    mean = (2 * 0.6 + 4 * 0.2) / 8
    expected = [w / mean for w in (0, 0, 0.6, 0.6, 0.2, 0.2, 0.2, 0.2)]
    assert (found.loss / base.loss).tolist() == pytest.approx(expected, rel=1e-5)
    top, bottom = found.metrics["turn_weight"]
    assert float(top) / float(bottom) == pytest.approx(1.0)
    assert token_weights({}, turns[0], 4).tolist() == [1.0] * 4
