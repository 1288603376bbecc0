from typing import Literal

from pydantic import Field

from opd.config import Settings
from opd.config.reference import describe_keys
from student.settings.recipe import Recipe


def test_every_key_of_a_recipe_is_listed_with_a_default_and_a_meaning() -> None:
    keys = {key: (default, text) for key, default, text in describe_keys(Recipe)}
    assert keys["train.learning_rate"] == ("1.0e-05", "Peak learning rate, reached after the warm-up.")
    assert [keys[key][0] for key in ("model.dtype", "model.revision", "model.lora.dora")] == [
        "float32",
        "null",
        "false",
    ]
    assert keys["run"][0] == "required"
    assert keys["teachers.fleet.outage.budget_seconds"][0] == "1800.0"
    assert any(key.startswith("prompts(") for key in keys)
    assert all(text for _, text in keys.values()), [key for key, (_, text) in keys.items() if not text]


class Choices(Settings):
    """Keys that take a word out of several."""

    shape: Literal["round", "square"] = Field("round", description="Outline.")
    named: Literal["round", "square"] = Field("round", description="round, or square where corners fit.")
    optional: Literal["round", "square"] | None = Field(None, description="Outline; null for none.")
    open: Literal["all"] | tuple[str, ...] = Field("all", description="Names.")


def test_a_key_that_takes_one_of_several_words_says_which() -> None:
    meanings = {key: text for key, _, text in describe_keys(Choices)}
    assert meanings == {
        "shape": "Outline. One of round, square.",
        "named": "round, or square where corners fit.",
        "optional": "Outline; null for none. One of round, square.",
        "open": "Names.",
    }
