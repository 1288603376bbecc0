"""Students that a method cannot work with are refused in a dry run, before their weights are loaded."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from opd.config import parse_settings
from opd.errors import ConfigError
from student.commands.dry_run import check
from student.settings.recipe import Recipe

SPARSITY, ROUTING = {"name": "update_sparsity"}, {"name": "routing_replay", "source": "old"}


def recipe(folder: Path, student: Path, **method: Any) -> Recipe:
    data = {
        "run": str(folder / "run"),
        "model": {"path": str(student)},
        "prompts": {"task": "addition"},
        "objective": [{"name": "grpo"}],
        "methods": [method],
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8},
        "eval": {"prompts": 0},
    }
    return parse_settings(Recipe, data)


@pytest.fixture
def mixture(world: Path, tmp_path: Path) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=260, **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


def test_joined_experts_whose_first_weights_have_other_names_are_refused(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"update_sparsity .*tensor '.*experts\.\w+'"):
        check(recipe(tmp_path, mixture, **SPARSITY), offline=False)
    assert "needs: " in check(recipe(tmp_path, mixture, **ROUTING), offline=False)


def test_a_dense_student_has_its_first_weights_and_no_experts(world: Path, tmp_path: Path) -> None:
    assert "needs: " in check(recipe(tmp_path, world / "student", **SPARSITY), offline=False)
    with pytest.raises(ConfigError, match="no router of experts"):
        check(recipe(tmp_path, world / "student", **ROUTING), offline=False)


def test_a_model_beside_its_adapter_has_its_first_weights_in_no_file(world: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigError, match="adapter beside them"):
        check(recipe(tmp_path, Path(f"{world / 'student'}+{tmp_path / 'adapter'}"), **SPARSITY), offline=True)
