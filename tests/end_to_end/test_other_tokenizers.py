"""Teachers with another tokenizer, on the tiny world: the same tokens under other numbers change nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_tokenizers import byte_level
from run_records import metrics_of
from safetensors.numpy import load_file

from opd.errors import IncompatibleTeacherError
from opd.fleet.client import TeacherFleet
from opd.wire.tokenizer import tokenizer_from
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import Shape
from opd_lab.tiny.tokenizer import make_tokenizer
from student.commands.dry_run import check
from student.job.session import train
from student.scoring import translate
from student.settings.recipe import Recipe

SPANS = [{"name": "span_opd"}]


@pytest.fixture(scope="session")
def renumbered(world: Path, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The world's teacher with its bytes numbered in reverse order, served; and one that writes words."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("renumbered")
    model, old, new = (
        AutoModelForCausalLM.from_pretrained(world / "teacher"),
        make_tokenizer(),
        make_tokenizer(shuffled=True),
    )
    numbers = new.get_vocab()
    order = [numbers[piece] for piece, _ in sorted(old.get_vocab().items(), key=lambda one: one[1])]
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not model.get_input_embeddings() and layer.weight is model.get_input_embeddings().weight:
                continue
            rows = layer.weight.clone()
            layer.weight[order] = rows[: len(order)]
    model.save_pretrained(folder / "same")
    new.save_pretrained(folder / "same")
    words = byte_level(320)
    shape = Shape(hidden=32, layers=1, heads=2, vocabulary=len(words))
    make_model(shape, 3, max_length=512).save_pretrained(folder / "words")
    words.save_pretrained(folder / "words")
    return serve("--model", f"same={folder / 'same'}", "--model", f"words={folder / 'words'}", "--deterministic")


def test_a_served_tokenizer_gives_the_teachers_own_ids(renumbered: Any) -> None:
    with TeacherFleet.connect(renumbered.address) as fleet:
        found = tokenizer_from(fleet.tokenizer("words"), fleet.describe("words").tokenizer, "words")
    text = "12345 naïve <|note|>"
    assert found(text)["input_ids"] == byte_level(320)(text)["input_ids"]


def weights(summary: dict[str, Any]) -> dict[str, Any]:
    return load_file(next(Path(summary["checkpoint"]).rglob("model.safetensors")))


@pytest.mark.parametrize("discount", [0.0, 0.9])
@pytest.mark.parametrize("by", ["number", "text"])
def test_one_tokenizer_under_other_numbers_gives_the_weights_of_ordinary_distillation(
    by: str,
    discount: float,
    renumbered: Any,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Read as text, a character that the limit has cut is left out; that happens in the third step.
    steps = 10 if by == "number" else 2
    settings: dict[str, Any] = {"train": {"steps": steps, "checkpoint_every": steps}, "eval": {"prompts": 0}}
    plain = make_recipe(objective=[{"name": "opd", "payload": "sampled", "discount": discount}], **settings)
    if by == "text":
        numbers = translate._numbers
        monkeypatch.setattr(translate, "_numbers", lambda student, teacher: (numbers(student, teacher)[0], False))
    teachers = {"endpoints": [renumbered.address], "default": "same"}
    objective = [{"name": "span_opd", "discount": discount}]
    spans = make_recipe(objective=objective, teachers=teachers, run=str(tmp_path / "spans"), **settings)
    want, found = weights(train(plain)), weights(train(spans))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, rtol=0)
    for one, other in zip(metrics_of(plain.run), metrics_of(spans.run), strict=True):
        assert other["reverse_kl"] == pytest.approx(one["reverse_kl"], abs=1e-5)
        assert other["span_tokens"] == 1 and other["student_tokens_per_span"] == 1


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_marginalised_top_k_of_one_tokenizer_gives_the_weights_of_ordinary_distillation(
    divergence: str, renumbered: Any, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"train": {"steps": 10, "checkpoint_every": 10}, "eval": {"prompts": 0}}
    which = {"k": 16, "divergence": divergence, **({"mixture": 0.5} if divergence == "jsd" else {})}
    plain = make_recipe(objective=[{"name": "opd", "payload": "topk", **which}], **settings)
    teachers = {"endpoints": [renumbered.address], "default": "same"}
    found = make_recipe(objective=[{"name": "bpm", **which}], teachers=teachers, run=str(tmp_path / "bpm"), **settings)
    want, got = weights(train(plain)), weights(train(found))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, rtol=0)
    assert metrics_of(found.run)[-1]["bpm_positions"] == 1


def of_words(make_recipe: Callable[..., Recipe], renumbered: Any, **changes: Any) -> Recipe:
    return make_recipe(
        **{"objective": SPANS, "teachers": {"endpoints": [renumbered.address], "default": "words"}, **changes}
    )


def test_a_run_with_another_tokenizer_is_interrupted_and_resumed_to_the_same_weights(
    renumbered: Any, make_recipe: Callable[..., Recipe], interrupted: Any, hashes: Any, tmp_path: Path
) -> None:
    calm, cut = (
        of_words(make_recipe, renumbered, run=str(tmp_path / name), eval={"prompts": 4}) for name in ("calm", "cut")
    )
    ended, resumed = train(calm), interrupted(cut)
    assert hashes(Path(ended["checkpoint"])) == hashes(Path(resumed["checkpoint"]))
    after = ended["after"]
    assert after["bytes_per_token"] > 0 and "log-ratio" in after["reverse_kl_estimator"]
    step = metrics_of(calm.run)[-1]
    assert 0.9 < step["span_tokens"] <= 1 and step["spans_per_row"] > 1 and step["teacher_tokens_per_span"] >= 1


def test_marginalised_top_k_of_another_tokenizer_teaches(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = of_words(make_recipe, renumbered, objective=[{"name": "bpm", "k": 32}, *SPANS])
    train(recipe)
    steps = metrics_of(recipe.run)
    assert steps[-1]["loss/bpm"] > 0
    assert steps[-1]["bpm_positions"] > 0.5 and steps[-1]["grad_norm"] > 0


def test_what_compares_single_tokens_is_refused_by_name(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    recipe = of_words(make_recipe, renumbered, objective=[*SPANS, {"name": "opd", "payload": "sampled"}])
    with pytest.raises(IncompatibleTeacherError, match=r"id \d+ is .*; opd needs ids that mean the same.*span_opd"):
        check(recipe, offline=False)


def test_a_dry_run_shows_a_prompt_as_both_models_read_it(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    text = check(of_words(make_recipe, renumbered), offline=False)
    assert "words has another tokenizer and reads it as" in text and "tokens without one: 0" in text
    assert re.search(r"\[\d\]\[\d\] = \[\d+\]|\[\d\] = \[\d\]", text) and "words reads the same ids" not in text


def test_episodes_are_refused_before_the_first_step(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    prompts = {"task": "lock", "options": {"digits": 3, "turns": 5}}
    recipe = of_words(make_recipe, renumbered, prompts=prompts, rollout={"max_prompt_tokens": 128})
    with pytest.raises(IncompatibleTeacherError, match="'words' has another tokenizer, with which episodes are not"):
        check(recipe, offline=False)


def test_two_tokenizers_cannot_be_mixed_by_probability(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    teachers = {"endpoints": [renumbered.address], "default": {"words": 1.0, "same": 1.0}}
    with pytest.raises(IncompatibleTeacherError, match=r"set teachers\.combine to divergence"):
        check(of_words(make_recipe, renumbered, teachers=teachers), offline=False)
    train(of_words(make_recipe, renumbered, teachers={**teachers, "combine": "divergence"}, train={"steps": 1}))


def test_a_run_learns_from_recorded_scores_of_another_tokenizer(
    renumbered: Any, make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Any
) -> None:
    store = tmp_path / "store"
    teachers = {"endpoints": [renumbered.address], "default": "words", "fleet": {"cache": {"folder": str(store)}}}
    live = train(of_words(make_recipe, renumbered, teachers=teachers, eval={"prompts": 0}))
    recorded = {"endpoints": [f"store:{store}"], "default": "words"}
    again = train(
        of_words(make_recipe, renumbered, teachers=recorded, eval={"prompts": 0}, run=str(tmp_path / "again"))
    )
    assert hashes(Path(live["checkpoint"])) == hashes(Path(again["checkpoint"]))


def test_adwin_probes_windows_of_rows_in_other_tokens(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    method = {"name": "adwin", "windows": [2, 4], "rows": 8, "folds": 2, "delay": 1, "null_every": 0, "rho": 0.3}
    objective = [{"name": "span_opd", "aggregation": "constant"}]
    changes = {"objective": objective, "methods": [method], "train": {"steps": 3}, "eval": {"prompts": 0}}
    recipe = of_words(make_recipe, renumbered, **changes)
    train(recipe)
    assert metrics_of(recipe.run)[-1]["span_tokens"] > 0.9


def test_rows_sampled_ahead_are_translated_too(renumbered: Any, make_recipe: Callable[..., Recipe]) -> None:
    objective = [{"name": "span_opd", "importance_cap": 2.0}]
    recipe = of_words(make_recipe, renumbered, objective=objective, train={"max_staleness": 1})
    train(recipe)
    assert metrics_of(recipe.run)[-1]["span_tokens"] > 0.9


def test_two_little_in_common_ends_the_run_with_an_example(
    renumbered: Any, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "group", lambda mine, theirs: (np.full(len(mine), -1), np.full(len(theirs), -1)))
    with pytest.raises(
        IncompatibleTeacherError, match=r"only 0% of the update's tokens .* 'words', less than min_share"
    ):
        train(of_words(make_recipe, renumbered))


@pytest.mark.slow
def test_two_ranks_learn_from_another_tokenizer_like_one(
    renumbered: Any, make_recipe: Callable[..., Recipe], two_ranks: Any, tmp_path: Path
) -> None:
    changes = {
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "train": {"steps": 3, "micro_batch_tokens": 64},
        "eval": {"prompts": 0},
    }
    one, two = (of_words(make_recipe, renumbered, run=str(tmp_path / name), **changes) for name in ("one", "two"))
    train(one)
    two_ranks(two)
    for mine, theirs in zip(metrics_of(one.run), metrics_of(two.run), strict=True):
        for name in ("reverse_kl", "span_tokens", "span_bytes", "teacher_tokens_per_span", "grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
