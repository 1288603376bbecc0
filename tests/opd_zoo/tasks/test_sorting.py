"""Letters put in order."""

from opd.tasks import TaskSettings, build_prompts


def test_a_worked_solution_is_an_insertion_sort_and_is_judged_by_its_result() -> None:
    source = build_prompts(TaskSettings(task="sorting", options={"letters": 4}), seed=0)
    for prompt in source.prompts("train", 20):
        letters, solution = str(prompt.text).rstrip("="), prompt.extra["solution"]
        steps, _, result = solution.partition(":")
        assert [len(step) for step in steps.split()] == [1, 2, 3, 4]
        assert all(step == "".join(sorted(letters[: len(step)])) for step in steps.split())
        assert result == prompt.answer == "".join(sorted(letters))
        assert source.verify(prompt, solution).value == 1.0
        assert source.verify(prompt, solution + "x").value == source.verify(prompt, "zz").value == 0.0


def test_a_mark_stands_before_every_prompt_and_changes_no_answer() -> None:
    plain = build_prompts(TaskSettings(task="sorting"), seed=0)
    marked = build_prompts(TaskSettings(task="sorting", mark="S"), seed=0)
    for one, two in zip(plain.prompts("train", 5), marked.prompts("train", 5), strict=True):
        assert two.text == f"S{one.text}" and two.answer == one.answer
        assert marked.verify(two, two.extra["solution"]).value == 1.0
