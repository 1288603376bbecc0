from opd.config.reference import describe_keys
from student.recipe import Recipe


def test_every_key_of_a_recipe_is_listed_with_a_default_and_a_meaning() -> None:
    keys = {key: (default, text) for key, default, text in describe_keys(Recipe)}
    assert keys["train.learning_rate"] == ("1e-05", "Peak learning rate of AdamW.")
    assert keys["run"][0] == "required"
    assert keys["teachers.fleet.outage.budget_seconds"][0] == "1800.0"
    assert any(key.startswith("prompts(") for key in keys)
    assert all(text for _, text in keys.values()), [key for key, (_, text) in keys.items() if not text]
