"""What the teacher's weights add to the prediction: ExOPD's fixed point, and the line through the teacher."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from opd.errors import ConfigError
from opd_lab import predict_weights
from opd_lab.fixed_point import Pair
from opd_lab.predict_cli import premise
from opd_lab.predict_weights import WeightsReport, measure_weights, verdicts
from student.data.intervals import Interval, t_interval
from student.settings.recipe import Recipe


def _recipe(student: Path, **more: Any) -> dict[str, Any]:
    return {
        "run": "unused",
        "model": {"path": str(student)},
        "prompts": {"task": "addition"},
        "rollout": {"max_new_tokens": 16, "max_prompt_tokens": 64},
        "train": {"threads": 1},
        **more,
    }


@pytest.fixture(scope="module")
def near(world: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher of the student's shape: the student with a little noise."""
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("near")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(folder)
    return str(folder)


def test_scales_and_places_meet_at_the_teacher(world: Path, near: str) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student"))
    report = measure_weights(recipe, near, rows=24)
    assert report.prompts == 24 and set(report.scales) == {1.0, 1.25, 1.5}
    assert all(0 <= accuracy <= 1 for accuracy in report.scales.values())
    assert report.gains[1.25].count == 24
    assert report.gains[1.25].mean == pytest.approx(report.scales[1.25] - report.scales[1.0])
    assert report.places[1.0] == report.scales[1.0], "the line does not lead through the teacher"
    assert report.beyond is not None
    assert report.beyond.mean == pytest.approx(report.places[1.5] - report.places[1.0])


def test_the_better_of_two_lambdas_is_judged_by_an_interval_that_holds_for_both(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {scale: torch.rand(24, generator=torch.Generator().manual_seed(int(4 * scale))) for scale in (1, 1.25, 1.5)}
    monkeypatch.setattr(predict_weights, "judge", lambda pair, prompts, source, scale, longest: drawn[scale].tolist())
    report = measure_weights(Recipe.model_validate(_recipe(world / "student")), str(world / "teacher"), rows=24)
    for scale, gain in report.gains.items():
        assert gain == t_interval((drawn[scale] - drawn[1]).tolist(), level=0.975)


def test_a_teacher_that_is_its_own_reference_has_nothing_to_extrapolate(world: Path) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student"))
    teacher = str(world / "teacher")
    report = measure_weights(recipe, teacher, reference=teacher, rows=12)
    assert len(set(report.scales.values())) == 1 and report.gains[1.5].mean == 0


def test_models_of_different_shapes_have_no_line(world: Path) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student"))
    report = measure_weights(recipe, str(world / "teacher"), rows=8)
    assert not report.places and report.beyond is None
    assert "different shapes" in verdicts(report)[-1]


def test_a_stranger_s_tokenizer_is_refused(world: Path) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student"))
    with pytest.raises(ConfigError, match="different tokenizers: id 4 is"):
        measure_weights(recipe, str(world / "stranger"), rows=8)


def test_the_command_says_both_and_keeps_the_figures(world: Path, serve: Any, tmp_path: Path) -> None:
    server = serve("--model", f"teacher={world / 'teacher'}", "--deterministic")
    teachers = {"endpoints": [server.address], "default": "teacher"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(_recipe(world / "student", teachers=teachers)))
    verb = typer.Typer()
    verb.command()(premise)
    options = ["--rows", "8", "--teacher", str(world / "teacher"), "--out", str(tmp_path / "premise.json")]
    result = CliRunner().invoke(verb, [str(tmp_path / "recipe.yaml"), *options], catch_exceptions=False)
    assert result.exit_code == 0 and "ExOPD" in result.output and "EffOPD" in result.output
    assert set(json.loads((tmp_path / "premise.json").read_text())["weights"]["scales"]) == {"1.0", "1.25", "1.5"}
    with pytest.raises(ConfigError, match="give both"):
        CliRunner().invoke(
            verb, [str(tmp_path / "recipe.yaml"), "--reference", str(world / "student")], catch_exceptions=False
        )


def test_what_follows_is_as_strong_as_the_interval() -> None:
    report = WeightsReport(64, {}, {1.25: Interval(0.1, 0.05, 0.15, 64)}, {1.0: 0.6}, Interval(0.01, -0.01, 0.03, 64))
    assert [line.split(":")[0] for line in verdicts(report)] == ["ExOPD can pay", "EffOPD can pay"]
    worse = replace(report, gains={1.25: Interval(-0.1, -0.15, -0.05, 64)}, beyond=Interval(-0.4, -0.5, -0.3, 64))
    assert verdicts(worse)[0].startswith("ExOPD is unlikely") and "is lost, -0.400 beside" in verdicts(worse)[1]
    for mean in (-0.01, -0.03):  # on either side of what may be lost, and neither is shown
        open_ = replace(
            report, gains={1.25: Interval(0.02, -0.05, 0.09, 64)}, beyond=Interval(mean, mean - 0.1, mean + 0.1, 64)
        )
        assert verdicts(open_)[0].startswith("ExOPD: no difference shown by 64 prompts")
        assert verdicts(open_)[1].startswith("EffOPD: not decided by 64 prompts")


def test_a_single_judged_answer_is_refused_in_a_sentence(world: Path) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student"))
    with pytest.raises(ConfigError, match="answers to 1 of 1 prompts"):
        measure_weights(recipe, str(world / "teacher"), rows=1)


def test_a_prompt_that_comes_again_is_counted_once(world: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+4=", "answer": str(number + 4)} for number in range(40, 48)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = {"file": str(tmp_path / "prompts.jsonl"), "heldout": 0.0, "verifier": "numeric"}
    recipe = Recipe.model_validate(_recipe(world / "student", prompts=table))
    report = measure_weights(recipe, str(world / "teacher"), rows=100)
    assert report.prompts == 8 and report.gains[1.25].count == 8


def test_answers_are_drawn_as_a_run_of_the_recipe_draws_them(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Pair, Any]] = []

    def judge(pair: Pair, prompts: Any, *_: Any) -> list[float]:
        seen.append((pair, prompts))
        return [0.0] * len(prompts)

    monkeypatch.setattr(predict_weights, "judge", judge)
    modes = {"long": {"budget": 12, "prefix": "L"}, "short": {"budget": 3, "prefix": "S"}}
    rollout = {"max_new_tokens": 12, "max_prompt_tokens": 64, "temperature": 0.7, "stop_tokens": [":"]}
    recipe = Recipe.model_validate(_recipe(world / "student", modes=modes, rollout=rollout))
    measure_weights(recipe, str(world / "teacher"), rows=4)
    pair, prompts = seen[0]
    assert pair.temperature == 0.7 and pair.tokenizer.encode(":")[0] in pair.stops
    assert {(prompt.text[0], prompt.max_new_tokens) for prompt in prompts} == {("L", 12), ("S", 3)}


def test_contexts_are_refused_because_only_the_prompt_is_read(world: Path) -> None:
    recipe = Recipe.model_validate(_recipe(world / "student", contexts={"teacher": {"prompt": "{{ answer }}"}}))
    with pytest.raises(ConfigError, match=r"contexts and episodes; .*--teacher\.$"):
        measure_weights(recipe, str(world / "teacher"), rows=8)


def test_a_base_with_an_adapter_is_the_model_that_both_make(world: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(world / "teacher", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(world / "teacher").save_pretrained(tmp_path / "merged")
    recipe = Recipe.model_validate(_recipe(world / "student"))
    both = measure_weights(recipe, f"{world / 'teacher'}+{tmp_path / 'adapter'}", rows=8)
    assert both == measure_weights(recipe, str(tmp_path / "merged"), rows=8)
