"""The student's weights, `model` in a recipe."""

from typing import Literal

from pydantic import Field

from opd.config import Settings


class LoraSettings(Settings):
    """Low-rank adapters over a frozen base; only the adapters are trained and saved (extra lora)."""

    rank: int = Field(16, ge=1, description="Rank r of the two low-rank factors of each adapter.")
    alpha: float = Field(32, gt=0, description="Scale: the adapter's output is multiplied by alpha / rank.")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Layers that get an adapter: all-linear (every linear layer except the head), or a list of "
        "suffixes of layer names, for example [q_proj, v_proj].",
    )
    dora: bool = Field(False, description="DoRA: also train the norm of each row of the adapted weights.")
    quantize: Literal["nf4"] | None = Field(
        None,
        description="nf4 holds the frozen base in 4 bits with doubly quantized scales (QLoRA; extra quantized), to "
        "save memory. Head, embeddings and norms stay in model.dtype, which is also the type of the matrix products. "
        "null leaves the base in model.dtype.",
    )
    start: str | None = Field(
        None,
        description="Folder of a PEFT adapter to start from. Its rank, alpha and targets must be those of this recipe.",
    )


class ModelSettings(Settings):
    """The student."""

    path: str = Field(description="Folder or hub id of the student's initial weights and tokenizer.")
    revision: str | None = Field(None, description="Branch, tag or commit to load, if path is a hub id.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type in which the weights are held. Use bfloat16 only for the frozen base under LoRA "
        "adapters, which are always float32: trained weights in bfloat16 would be rounded after every update.",
    )
    attention: str | None = Field(
        None,
        description="Attention implementation of transformers, for example sdpa or flash_attention_2; null leaves the "
        "choice to it.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Save memory by recomputing activations in the backward pass."
    )
    dropout: bool = Field(
        False,
        description="Learn with the dropout, router noise and skipped layers that the model's config has for training. "
        "false learns exactly the distribution that is sampled. With true, importance ratios of fresh tokens differ "
        "from 1 at random, and a student that equals its teacher still has a loss. Adapters never have dropout.",
    )
    lora: LoraSettings | None = Field(None, description="Train low-rank adapters instead of the weights.")
