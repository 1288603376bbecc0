"""Teachers by prompt and several teachers on one row, over a real server that holds two models."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rows import make_row
from run_records import metrics_of
from slow_cases import slow

from opd import TeacherFleet
from opd.errors import ConfigError, IncompatibleTeacherError
from opd.tasks.arithmetic import Addition
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.data.plan import plan_step
from student.data.row import Row
from student.job.job import build_job
from student.job.session import train
from student.scoring.score import Scoring
from student.scoring.verify import Verification
from student.settings.recipe import Recipe

MIX = {
    "mix": [
        {"task": "addition", "options": {"digits": 2}, "domain": "sums"},
        {"task": "subtraction", "options": {"digits": 2}, "domain": "differences"},
    ]
}


def row_of(prompt: Any) -> Row:
    ids = np.arange(4, 12, dtype=np.uint32)
    candidates = np.arange(20, 24, dtype=np.uint32)[None].repeat(5, 0)
    return make_row(ids[3:], prompt=prompt, prompt_ids=ids[:3], candidates=candidates)


def test_each_domain_is_scored_by_its_own_teacher(teacher: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        prompts=MIX, teachers={"default": None, "routes": {"sums": "teacher", "differences": "student"}}
    )
    source = build_prompts(recipe.prompts, seed=0)
    needs = Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))
    assert recipe.teachers is not None
    with TeacherFleet.connect(teacher.address) as fleet:
        scorer = Scoring(fleet, recipe.teachers, needs, Verification(source, 2), torch.device("cpu"))
        rows = [row_of(prompt) for prompt in source.prompts("train", 6)]
        for row in rows:
            scorer.ask(row)
        scorer.wait(rows)
        assert {(r.prompt.domain, r.teacher) for r in rows} == {("sums", "teacher"), ("differences", "student")}
        assert scorer.teachers(source.labels() or frozenset()) == {"teacher", "student"}, "without a row they are known"
        for row in rows:
            direct = fleet.score(row.teacher, [row.asked(gather=False)[0][0]], PayloadSpec.sampled())[0]
            np.testing.assert_array_equal(row.signals[TEACHER, PayloadKind.SAMPLED].sampled, direct.sampled)


def test_weighted_teachers_are_mixed_in_probability_space(teacher: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(teachers={"default": {"teacher": 3.0, "student": 1.0}})
    source = build_prompts(recipe.prompts, seed=0)
    spec = PayloadSpec.gather(4, "f32")
    assert recipe.teachers is not None
    with TeacherFleet.connect(teacher.address) as fleet:
        scorer = Scoring(
            fleet, recipe.teachers, Needs((SignalNeed(TEACHER, spec),), 4), Verification(source, 2), torch.device("cpu")
        )
        row = row_of(source.prompts("train", 1)[0])
        scorer.ask(row)
        scorer.wait([row])
        assert scorer.positions([row]) == {TEACHER: 2 * 8}
        parts = [fleet.score(name, [row.asked(gather=True)[0][0]], spec)[0] for name in ("teacher", "student")]
    mixed = row.signals[TEACHER, PayloadKind.GATHER]
    for field in ("sampled", "values", "log_tail"):
        one, two = (np.exp(getattr(part, field).astype(np.float64)) for part in parts)
        np.testing.assert_allclose(getattr(mixed, field), np.log(0.75 * one + 0.25 * two), atol=1e-5)


def gradient_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The gradient of the recipe's first step, by parameter."""
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        prompts = job.source.prompts("train", 4)
        rows = job.services.rollout(plan_step(0, prompts, samples=2, max_new_tokens=8, temperature=1.0))
        job.learner.accumulate(job.services.score(rows))
        return {name: p.grad.clone() for name, p in job.learner.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("payload", ["gather", "hidden", *slow("sampled", "topk")])
def test_the_divergences_to_weighted_teachers_are_summed(make_recipe: Callable[..., Recipe], payload: str) -> None:
    entry = {"name": "opd", "payload": payload, **({"k": 8} if payload in ("gather", "topk") else {})}
    common = {"prompts": MIX, "objective": [entry], "eval": {"prompts": 0}}

    def found(sums: Any) -> dict[str, torch.Tensor]:
        routes = {"sums": sums, "differences": "teacher"}
        teachers = {"default": None, "routes": routes, "combine": "divergence"}
        return gradient_of(make_recipe(teachers=teachers, **common))

    one, two, both = found("teacher"), found("student"), found({"teacher": 3.0, "student": 1.0})
    assert any(not torch.equal(one[name], two[name]) for name in one)
    for name, ours in both.items():
        torch.testing.assert_close(ours, 0.75 * one[name] + 0.25 * two[name], rtol=1e-3, atol=1e-6)
    alone = found({"teacher": 1.0})
    assert all(torch.equal(alone[name], one[name]) for name in one)


def test_a_run_that_sums_divergences_trains_and_measures_them(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        teachers={"default": {"teacher": 0.5, "student": 0.5}, "combine": "divergence"},
        objective=[{"name": "opd", "payload": "hidden"}],
        train={"steps": 2},
        eval={"prompts": 4},
    )
    summary = train(recipe)
    assert summary["steps"] == 2
    # Half of it is the divergence to the student's own first weights, so it is about half of the teacher's.
    alone = train(make_recipe(run=str(recipe.run) + "2", train={"steps": 1}, eval={"prompts": 4}))
    assert summary["before"]["reverse_kl"] == pytest.approx(alone["before"]["reverse_kl"] / 2, rel=1e-3)
    first, other = (metrics_of(run)[0] for run in (recipe.run, recipe.run.with_name("run2")))
    assert first["reverse_kl"] > 0
    # The rows are the same ones, and each goes to both teachers.
    assert first["cost/train/teacher_positions"] == 2 * other["cost/train/teacher_positions"]


def test_a_run_with_two_domain_teachers_trains(make_recipe: Callable[..., Recipe]) -> None:
    routes = {"sums": "teacher", "differences": {"teacher": 0.5, "student": 0.5}}
    recipe = make_recipe(
        prompts=MIX,
        teachers={"default": None, "routes": routes},
        train={"steps": 2},
        eval={"prompts": 8, "every": 1},
    )
    summary = train(recipe)
    assert summary["steps"] == 2
    first, _ = metrics_of(recipe.run)
    found = summary["before"]["by_domain"]
    assert set(found) == {"sums", "differences"} and sum(count for _, count in found.values()) == 8
    assert sum(accuracy * count for accuracy, count in found.values()) / 8 == pytest.approx(
        summary["before"]["accuracy"]
    )
    assert {"domain_accuracy/sums", "domain_accuracy/differences"} <= set(first)
    assert set(json.loads((recipe.run / "provenance.json").read_text())["fleet"]) == {"teacher", "student"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": MIX, "teachers": {"default": None, "routes": {"sums": "teacher"}}}, "differences"),
        (
            {
                "teachers": {"default": {"teacher": 1, "student": 1}},
                "objective": [{"name": "opd", "payload": "hidden"}],
            },
            "teachers.combine to divergence",
        ),
        (
            {
                "teachers": {"default": {"teacher": 1, "student": 1}, "combine": "divergence"},
                "objective": [{"name": "reopold"}],
            },
            "reopold cannot learn from several teachers",
        ),
    ],
)
def test_an_unmapped_prompt_or_an_impossible_mixture_stops_the_run_before_its_first_step(
    make_recipe: Callable[..., Recipe], changes: dict[str, Any], words: str
) -> None:
    recipe = make_recipe(**changes)
    with pytest.raises(ConfigError, match=words):
        train(recipe)
    assert not recipe.run.exists()


def test_an_unmapped_prompt_anywhere_in_a_file_stops_the_run_before_its_first_step(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "domain": "sums"} for i in range(3000)] + [{"prompt": "1-1=", "domain": "rare"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    recipe = make_recipe(
        prompts={"file": str(file), "verifier": "exact"}, teachers={"default": None, "routes": {"sums": "teacher"}}
    )
    with pytest.raises(ConfigError, match="rare"):
        train(recipe)
    assert not recipe.run.exists()


def test_a_teacher_that_only_prompts_name_is_checked_before_the_first_step(
    make_recipe: Callable[..., Recipe], tmp_path: Path, world: Path, serve: Any
) -> None:
    server = serve("--model", f"teacher={world / 'teacher'}", "--model", f"stranger={world / 'stranger'}")
    rows = [{"prompt": f"{i}+1=", "teacher": "stranger" if i == 70 else "teacher"} for i in range(200)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    teachers = {"endpoints": [server.address], "default": "teacher"}
    recipe = make_recipe(prompts={"file": str(file), "verifier": "exact"}, teachers=teachers)
    with pytest.raises(IncompatibleTeacherError, match=r"'stranger'.*different tokenizers"):
        train(recipe)
    assert not recipe.run.exists()
    file.write_text("\n".join(json.dumps(row) for row in rows if row["teacher"] == "teacher"))
    # A served model that no prompt goes to needs not fit.
    assert train(make_recipe(prompts=recipe.prompts.model_dump(), teachers={**teachers, "default": None}))


def test_a_penalty_to_a_reference_needs_no_teacher(make_recipe: Callable[..., Recipe], world: Path, serve: Any) -> None:
    server = serve("--model", f"start={world / 'student'}")
    summary = train(
        make_recipe(
            teachers={"endpoints": [server.address], "default": None, "reference": "start"},
            objective=[{"name": "grpo"}, {"name": "reference_kl", "weight": 0.1}],
            rollout={"samples_per_prompt": 2},
            train={"steps": 1},
        )
    )
    assert summary["steps"] == 1


class Surprising(Addition):
    """Additions of which some, undeclared, are of another domain."""

    labels = None  # type: ignore[assignment]
    rare: ClassVar[dict[str, str]] = {"domain": "rare"}

    def draw(self, random: Any) -> Prompt:
        drawn = super().draw(random)
        rare = drawn.content_hash % 11 == 3
        labels = self.rare if rare else {"domain": "sums"}
        return Prompt.make(str(drawn.text), answer=drawn.answer, extra=drawn.extra, **labels)


def test_an_unmapped_prompt_that_nobody_declared_stops_the_run_with_its_state_saved(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, hashes: Callable[[Path], dict[str, str]]
) -> None:
    monkeypatch.setitem(sys.modules, "surprising", SimpleNamespace(Surprising=Surprising))
    common: dict[str, Any] = {
        "prompts": {"task": "surprising:Surprising", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 2},
        "train": {"steps": 24, "checkpoint_every": 0},
        "eval": {"prompts": 0},
    }
    settings = make_recipe(**common).prompts

    def first_rare(seed: int) -> int:
        prompts = build_prompts(settings, seed=seed).prompts("train", 48)
        return next((i for i, prompt in enumerate(prompts) if prompt.domain == "rare"), 48)

    # Behind the first prompts, which are looked at before the run.
    common["seed"] = next(seed for seed in range(100) if 10 <= first_rare(seed) < 30)
    step = first_rare(common["seed"]) // 2
    common["train"] = {**common["train"], "steps": step + 1}
    recipe = make_recipe(teachers={"default": None, "routes": {"sums": "teacher"}}, **common)
    monkeypatch.setattr("student.scoring.handshake._ROUTED_PROMPTS", 1)
    with pytest.raises(ConfigError, match=f"'rare'.*step-{step:06d}.*--resume") as caught:
        train(recipe)
    assert caught.value.exit_code == 2
    mapped = make_recipe(teachers={"default": "teacher", "routes": {}}, **common)
    resumed = train(mapped, resume=True)
    calm = train(make_recipe(run=str(recipe.run) + "2", teachers={"default": "teacher", "routes": {}}, **common))
    ended, expected = (hashes(Path(summary["checkpoint"]) / "model") for summary in (resumed, calm))
    assert ended == expected and ended


def test_a_teacher_that_nobody_declared_is_not_learnt_from(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Surprising, "rare", {"domain": "sums", "teacher": "student"})
    monkeypatch.setitem(sys.modules, "surprising", SimpleNamespace(Surprising=Surprising))
    monkeypatch.setattr("student.scoring.handshake._ROUTED_PROMPTS", 1)
    common: dict[str, Any] = {"prompts": {"task": "surprising:Surprising"}, "eval": {"prompts": 0}}
    with pytest.raises(ConfigError, match="'student', which was not checked"):
        train(make_recipe(teachers={"default": "teacher"}, rollout={"prompts_per_step": 40}, **common))
