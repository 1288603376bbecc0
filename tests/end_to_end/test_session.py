"""A session leaves the loop to its caller, who gets the weights of `student.train` by writing that loop down."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import student
from opd.errors import ConfigError, PluginError
from student.settings.recipe import Recipe

GRPO: dict[str, Any] = {
    "objective": [{"name": "grpo"}],
    "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
}


def token_losses(self: Any, *arguments: Any) -> Any:
    """A method of a plug-in with a fault."""
    raise KeyError("a fault of the plug-in")


@pytest.mark.parametrize("changes", [{}, GRPO], ids=["distil", "rewards"])
def test_the_five_calls_give_the_weights_of_the_loop(
    make_recipe: Callable[..., Recipe], tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = make_recipe(**changes, eval={"prompts": 0}, train={"steps": 3})
    with student.session(recipe) as session:
        for _ in range(3):
            rows = session.rollout()
            session.score(rows)
            session.loss(rows)
            metrics = session.step()
            assert metrics["grad_norm"] > 0
            if changes:
                assert len({row.verdict_value for row in rows}) > 1, "equal rewards would teach nothing"
        saved = session.save(tmp_path / "own")
    assert not recipe.run.exists()
    trained = Path(student.train(recipe)["checkpoint"]) / "model"
    assert (saved / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize("changes", [{}, GRPO], ids=["distil", "rewards"])
def test_a_call_that_was_left_out_is_named(make_recipe: Callable[..., Recipe], changes: dict[str, Any]) -> None:
    with student.session(make_recipe(**changes)) as session:
        rows = session.rollout()
        with pytest.raises(RuntimeError, match=r"call score\(rows\) first"):
            session.loss(rows)
        with pytest.raises(RuntimeError, match=r"call loss\(rows\) first"):
            session.step()


def test_a_loss_replaces_the_gradient_and_a_prompt_is_answered_anew(make_recipe: Callable[..., Recipe]) -> None:
    with student.session(make_recipe()) as session:
        rows = session.rollout()
        again = session.rollout([row.prompt for row in rows])
        assert not {row.key for row in rows} & {row.key for row in again}
        session.score(rows)
        once = session.loss(rows)
        assert session.loss(rows) == once
        gradient = [p.grad.clone() for p in session.job.learner.student.parameters() if p.grad is not None]
        session.loss(rows)
        now = [p.grad for p in session.job.learner.student.parameters() if p.grad is not None]
        assert gradient and all(a.equal(b) for a, b in zip(gradient, now, strict=True))


def test_a_fault_of_a_plug_in_is_named(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(PluginError, match=r"plug-in '.*' failed in token_losses: KeyError: 'a fault"),
        student.session(make_recipe()) as session,
    ):
        rows = session.rollout()
        session.score(rows)
        (term, *_) = session.job.learner.objective.terms
        monkeypatch.setattr(type(term), "token_losses", token_losses)
        session.loss(rows)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"methods": [{"name": "tcod"}]}, "methods"),
        ({"rollout": {"strategy": {"name": "dynamic_sampling"}}}, "rollout.strategy"),
        ({"train": {"minibatches": 2}}, "train.minibatches"),
    ],
)
def test_what_only_the_loop_carries_out_is_refused(
    make_recipe: Callable[..., Recipe], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is set"), student.session(make_recipe(**changes)):
        pass
