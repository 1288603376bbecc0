"""Settings of engine vllm, and the checks before anything is loaded; imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd.errors import ConfigError
from opd.extras import require
from student.rollout.engine import RolloutEngineSettings

if TYPE_CHECKING:
    from student.settings.recipe import Recipe


class VllmSettings(RolloutEngineSettings):
    """Settings of rollout engine vllm."""

    mismatch_rows: int = Field(
        16,
        ge=0,
        description="Number of rows per rank and step whose log-probs the student recomputes, to measure the "
        "mismatch between vLLM and the student; 0 measures nothing.",
    )
    mismatch_limit: float | None = Field(
        0.2,
        gt=0,
        description="Largest accepted mismatch of a step, the mean |log p - log q| per token in nats between student "
        "and vLLM; beyond it the run stops. null never stops it.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of vLLM's weights, keys and values; auto is the type in which the student's own "
        "forward pass computes.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest accepted difference in nats between the log-probs of vLLM and student on a known row, "
        "checked after each sync. null means 0.005, or 0.3 if either computes in half precision.",
    )
    sleep: bool = Field(
        False,
        description="Free the GPU memory of vLLM between rollouts: its weights move to host memory, its keys and "
        "values are dropped.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further arguments of vllm.LLM, by name.")


_OURS = frozenset(
    {"model", "dtype", "seed", "load_format", "logits_processors", "skip_tokenizer_init", "async_scheduling", "runner"}
    | {"speculative_config", "tensor_parallel_size", "pipeline_parallel_size", "enable_sleep_mode", "max_model_len"}
)


def check_vllm(settings: VllmSettings, recipe: Recipe) -> None:
    """Refuse a recipe that vLLM cannot run.

    Raises:
        ConfigError: if vLLM is not installed, lacks the student's family, or `options` has a key that opd sets itself.
    """
    require("rollout.engine vllm", "vllm", "vllm", "set rollout.engine to {name: transformers}")
    ours = sorted(_OURS & settings.options.keys())
    if ours:
        raise ConfigError(f"rollout.engine.options.{ours[0]} is set by the engine itself; remove it.")
    families = _families(recipe)
    known = _known_families() if families else {}
    if families and not known.keys() & set(families):
        raise ConfigError(
            f"vLLM does not support the model family {' or '.join(families)} of student {recipe.model.path!r}; set "
            "rollout.engine to {name: transformers}."
        )
    for family in families:
        if known.get(family, "").startswith("Transformers"):
            raise ConfigError(
                f"vLLM runs {family} with transformers' own class, which it changes for the whole process, so student "
                f"{recipe.model.path!r} could not run beside it; set rollout.engine to {{name: transformers}}, or to "
                "vllm_server, which runs in another process."
            )
    if recipe.model.lora is not None:
        from student.rollout.weights import check_merges

        check_merges(recipe.model, settings.name)


def _families(recipe: Recipe) -> list[str]:
    """The student's architectures from its config; empty without a config, which loading the model refuses."""
    from transformers import PretrainedConfig

    from student.model.model import Weights

    weights = Weights.of(recipe.model)
    try:
        found, _ = PretrainedConfig.get_config_dict(weights.base, revision=weights.revision)
    except (OSError, ValueError):
        return []
    return [str(name) for name in found.get("architectures") or []]


def _known_families() -> dict[str, str]:
    """The architectures that vLLM implements, with the names of its classes."""
    from student.rollout.vllm.launch import prepare

    prepare()
    from vllm import ModelRegistry

    return {name: getattr(model, "class_name", "") for name, model in ModelRegistry.models.items()}
