"""Runs whose teacher or reference is the student itself: no server, contexts of their own, equal after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_records import metrics_of
from slow_cases import slow

from opd.config import parse_settings
from opd.errors import ConfigError, DataError, TeacherNotFoundError
from student.commands.dry_run import check
from student.commands.evaluate_model import evaluate_model
from student.data import batch
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.job.session import train
from student.model.model import load_tokenizer
from student.scoring.score import Scoring
from student.settings.recipe import Recipe

SELF = {"teachers": {"default": "ema", "ema": {"decay": 0.5, "every": 1}}}
SECRET = "@@@"
HINTED = {"teacher": {"prompt": "{{ solution }}{{ prompt }}"}}


VERIFIER = """
from opd.tasks.verdict import Verdict

class Even:
    def __init__(self, timeout):
        pass

    def verify(self, prompt, completion):
        return Verdict.of(len(completion) % 2 == 0, f"@@@{len(completion)} letters")

    def close(self):
        pass
"""


@pytest.fixture
def alone(recipe_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A recipe without a server, on prompts with a column `solution`; answers of even length are right."""
    (tmp_path / "verifier_of_lengths.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [{"prompt": f"{i + 10}+{i}=", "answer": str(i + 10 + i), "solution": f"{SECRET}{i}"} for i in range(60)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make(**changes: Any) -> Recipe:
        data = {name: value for name, value in recipe_data.items() if name != "teachers"}
        data["prompts"] = {"file": str(file), "keep_columns": ["solution"], "heldout": 0.2}
        data["prompts"]["verifier"] = "verifier_of_lengths:Even"
        return parse_settings(Recipe, data | changes)

    return make


@pytest.mark.parametrize("payload", ["hidden", *slow("sampled", "gather")])
def test_the_initial_weights_are_a_reference_without_a_server(
    alone: Callable[..., Recipe], make_recipe: Callable[..., Recipe], tmp_path: Path, payload: str
) -> None:
    objective = [{"name": "rloo"}, {"name": "reference_kl", "payload": payload}]
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 12, "max_prompt_tokens": 32}
    changes = {"objective": objective, "rollout": rollout, "eval": {"prompts": 0}}
    mine = alone(run=str(tmp_path / "mine"), teachers={"reference": "initial"}, **changes)
    train(mine)
    prompts = mine.prompts.model_dump(mode="json")
    served = make_recipe(run=str(tmp_path / "served"), prompts=prompts, teachers={"reference": "student"}, **changes)
    train(served)
    first, theirs = metrics_of(mine.run)[0], metrics_of(served.run)[0]
    assert first["cost/train/local_positions"] == theirs["cost/train/reference_positions"] > 0
    assert "cost/train/reference_positions" not in first and "cost/train/local_positions" not in theirs
    # Before the first update the student is its reference; on the wire hidden states are rounded to bfloat16.
    assert abs(first["reference_kl"]) < 1e-5 and abs(theirs["reference_kl"]) < 0.02
    second, other = metrics_of(mine.run)[1], metrics_of(served.run)[1]
    if payload == "sampled":
        assert second["reference_kl"] == pytest.approx(other["reference_kl"], rel=1e-3)
    assert abs(metrics_of(mine.run)[-1]["reference_kl"]) > 1e-4


def test_a_run_with_a_teacher_that_follows_resumes_bit_for_bit(
    alone: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    changes = SELF | {
        "teachers": {**SELF["teachers"], "reference": "initial"},
        "contexts": HINTED,
        "objective": [{"name": "opd", "payload": "hidden"}, {"name": "reference_kl", "weight": 0.1}],
    }
    calm = train(alone(run=str(tmp_path / "calm"), **changes))
    steps = {"steps": 2, "learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1}
    train(alone(run=str(tmp_path / "cut"), **changes, train=steps))
    resumed = train(alone(run=str(tmp_path / "cut"), **changes), resume=True)
    one, two = hashes(Path(calm["checkpoint"])), hashes(Path(resumed["checkpoint"]))
    assert one == two and "trainer/local.safetensors" in one
    lines = metrics_of(tmp_path / "calm")
    assert all(line["reverse_kl"] > 0.01 and line["ema_distance"] > 0 for line in lines)


@pytest.mark.parametrize("payload", ["topk", *slow("sampled", "gather", "hidden")])
def test_a_term_may_name_its_teacher_itself(
    alone: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]], payload: str
) -> None:
    term = {"name": "opd", "payload": payload, "k": 8, "discount": 0.5}
    routed = {**SELF, "contexts": HINTED, "objective": [term], "eval": {"prompts": 0}}
    named = {
        "teachers": {"ema": SELF["teachers"]["ema"]},
        "contexts": {"ema": HINTED["teacher"]},
        "objective": [{**term, "role": "ema"}],
        "eval": {"prompts": 0},
    }
    one, other = (train(alone(run=str(tmp_path / n), **c)) for n, c in (("routed", routed), ("named", named)))
    assert hashes(Path(one["checkpoint"])) == hashes(Path(other["checkpoint"]))
    assert all(line["loss/opd"] != 0 and line["ema_distance"] > 0 for line in metrics_of(tmp_path / "named"))


NAMED = {"objective": [{"name": "opd", "role": "ema"}]}
TOLD = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "max_new_tokens": 12, "max_prompt_tokens": 32},
    "eval": {"prompts": 0},
    "contexts": {
        "ema": {
            "prompt": "{{ prompt }}{% if group.best %}@@@{{ group.best }}{% endif %}{{ row.feedback }}",
            "skip_without": ["group.best"],
            "max_tokens": 64,
        }
    },
    "objective": [{"name": "opd", "role": "ema", "payload": "hidden"}, {"name": "rloo", "weight": 0.1}],
}
"""SDPO: the average of the student reads another right answer and the verifier's word, else the row teaches nothing."""


def test_a_teacher_reads_what_became_of_the_row_and_the_best_answer_of_its_group(
    alone: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    told, plain = (
        alone(run=str(tmp_path / "told"), **TOLD),
        alone(run=str(tmp_path / "plain"), **TOLD | {"contexts": {}}),
    )
    straight = train(told)
    train(plain)
    lines, others = metrics_of(told.run), metrics_of(plain.run)
    assert lines[0]["response_tokens"] == others[0]["response_tokens"]  # the same responses
    assert lines[0]["cost/train/local_positions"] > others[0]["cost/train/local_positions"]
    assert lines[0]["reverse_kl"] > 1e-3 > abs(others[0]["reverse_kl"])
    assert any(0 < line["context_missing_share"] < 1 for line in lines)
    assert all(line["hinted_share"] == pytest.approx(1 - line["context_missing_share"]) for line in lines)
    half = {"steps": 2, "learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1}
    train(alone(run=str(tmp_path / "cut"), **TOLD, train=half))
    resumed = train(alone(run=str(tmp_path / "cut"), **TOLD), resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(straight["checkpoint"]))


@pytest.mark.slow
def test_two_ranks_make_the_contexts_of_one(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    told = {"prompt": "{{ prompt }}@@@{{ group.best }}", "success": 0.4, "skip_without": ["group.best"]}
    changes = TOLD | {
        "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
        "contexts": {"ema": {**told, "max_tokens": 64}},
        "train": {"steps": 2, "checkpoint_every": 0},
    }
    one, two = (make_recipe(run=str(tmp_path / run), **changes) for run in ("one", "two"))
    train(one)
    two_ranks(two)
    for mine, theirs in zip(metrics_of(one.run), metrics_of(two.run), strict=True):
        assert 0 < mine["context_missing_share"] < 1
        for name in ("context_missing_share", "reverse_kl", "grad_norm", "cost/train/local_positions"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3), name


@pytest.mark.parametrize("told", [False, True])
def test_no_id_of_a_hint_reaches_the_students_input(
    alone: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    seen: list[torch.Tensor] = []
    rows: list[Row] = []
    lay_out, wait = batch.collate, Scoring.wait

    def collate(*arguments: Any, **options: Any) -> TokenBatch:
        seen.append((micro := lay_out(*arguments, **options)).input_ids)
        return micro

    def watched(self: Scoring, mine: list[Row], *arguments: Any, **options: Any) -> None:
        rows.extend(mine)
        wait(self, mine, *arguments, **options)

    monkeypatch.setattr("student.learning.learner.collate", collate)
    monkeypatch.setattr(Scoring, "wait", watched)
    recipe = alone(run=str(tmp_path / "run"), **(TOLD if told else {**SELF, "contexts": HINTED}))
    train(recipe)
    mark = torch.tensor(load_tokenizer(str(recipe.model.path))(SECRET)["input_ids"])

    def holds(ids: torch.Tensor) -> bool:
        return bool((ids.unfold(-1, len(mark), 1) == mark).all(-1).any())

    hints = [torch.from_numpy(ids.astype(np.int64)) for row in rows for ids in row.contexts.values()]
    assert seen and hints and all(map(holds, hints)) and not any(map(holds, seen))


def test_a_served_teacher_reads_a_context_too(alone: Callable[..., Recipe], teacher: Any, tmp_path: Path) -> None:
    served = {"teachers": {"endpoints": [teacher.address], "default": "teacher"}, "eval": {"prompts": 0}}
    plain = alone(run=str(tmp_path / "plain"), **served)
    hinted = alone(run=str(tmp_path / "hinted"), contexts=HINTED, **served)
    train(plain)
    train(hinted)
    one, other = metrics_of(plain.run)[0], metrics_of(hinted.run)[0]
    assert one["response_tokens"] == other["response_tokens"]
    # The same responses under prompts that are longer by the solution, of four or five characters.
    assert 4 * 8 <= other["cost/train/teacher_positions"] - one["cost/train/teacher_positions"] <= 5 * 8
    assert abs(one["reverse_kl"] - other["reverse_kl"]) > 1e-3


def test_a_dry_run_says_what_is_answered_in_process_and_what_it_reads(
    alone: Callable[..., Recipe], tmp_path: Path
) -> None:
    text = check(alone(**SELF, contexts=HINTED), offline=False)
    assert "model ema: the moving average of the student's weights, computed in process" in text
    assert f"teacher reads: '{SECRET}" in text


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"contexts": {"teacher": {"prompt": "{{ missing }}"}}},
            DataError,
            ["contexts.teacher", "missing"],
        ),
        ({"contexts": {"teacher": {"prompt": "{{ prompt }}"}}}, DataError, ["contexts.teacher", "changes nothing"]),
        ({"contexts": {"teacher": {"prompt": "{{ prompt"}}}, ConfigError, ["contexts.teacher.prompt", "template"]),
        ({"contexts": {"teacher": {"system": "hint"}}}, DataError, ["plain text", "contexts.teacher.prompt"]),
        ({"contexts": {"ema": {"prompt": "{{ row.reason }}"}}, **NAMED}, DataError, ["contexts.ema", "reason"]),
        ({"contexts": {"ema": {"prompt": "{{ prompt }}!", "skip_without": ["group.best"]}}}, ConfigError, ["reads"]),
        (
            {"objective": [{"name": "opd", "role": "student"}]},
            ConfigError,
            ["teaches nothing under the same prompt", "contexts.student"],
        ),
        (
            {
                "contexts": {"student": {"prompt": "{{ solution }}{{ prompt }}"}},
                "objective": [{"name": "opd", "role": "student"}, {"name": "grpo", "ratio_to": "old"}],
            },
            ConfigError,
            ["contexts.student", "old policy", "grpo"],
        ),
        (
            {"objective": [{"name": "opd", "role": r, "payload": "topk", "k": 4} for r in ("ema", "initial")]},
            ConfigError,
            ["topk", "ema and initial"],
        ),
        ({"contexts": {"reference": {"prompt": "x"}}}, ConfigError, ["contexts.reference", "has no effect"]),
        (
            {"contexts": {"teacher": {"prompt": "{{ solution * 99 }}"}}},
            DataError,
            ["over the limit of 32", "contexts.teacher.max_tokens"],
        ),
        ({"teachers": {"default": "emma"}}, TeacherNotFoundError, ["emma", "student, initial, ema"]),
        ({"teachers": {}}, ConfigError, ["no teacher is mapped"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    alone: Callable[..., Recipe], changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        check(alone(**SELF | changes), offline=False)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_saved_student_is_evaluated_without_the_models_of_its_run(alone: Callable[..., Recipe], world: Path) -> None:
    model = str(world / "student")
    with pytest.raises(ConfigError, match=r"'ema' .*eval.reverse_kl=false"):
        evaluate_model(alone(**SELF, contexts=HINTED, eval={"prompts": 8}), model)
    ahead = {"train": {"steps": 4, "max_staleness": 2}}  # which an evaluation has no use for
    report = evaluate_model(alone(**SELF, **ahead, contexts=HINTED, eval={"prompts": 8, "reverse_kl": False}), model)
    assert report["reverse_kl"] is None and report["prompts"] == 8
    hinted = evaluate_model(alone(teachers={"default": "student"}, contexts=HINTED, eval={"prompts": 8}), model)
    assert hinted["reverse_kl"] > 1e-3


def test_a_table_without_a_kept_column_is_refused(alone: Callable[..., Recipe]) -> None:
    recipe = alone(**SELF)
    prompts = recipe.prompts.model_dump(mode="json") | {"keep_columns": ["solutoin"]}
    with pytest.raises(DataError, match=r"no column 'solutoin'; correct prompts\.keep_columns"):
        check(alone(**SELF, prompts=prompts), offline=False)
