"""The optimizer, its schedule and checkpoints, `train` in a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from opd.config import Settings

Decay = Annotated[float, Field(ge=0, lt=1)]


class TrainSettings(Settings):
    """The optimizer and its schedule."""

    steps: int = Field(
        100,
        ge=1,
        description="Number of steps in the run. Each samples a batch of rows and makes epochs x minibatches "
        "optimizer updates on it.",
    )
    epochs: int = Field(1, ge=1, description="Number of passes over the rows of a step.")
    minibatches: int = Field(
        1,
        ge=1,
        description="Number of optimizer updates per pass, each on its share of the groups. From the second update of "
        "a step on, the student differs from the policy that sampled, so importance ratios differ from 1 and clipping "
        "acts.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of steps by which the sampling weights lag the trained ones. 0 alternates sampling and "
        "training. With k, step n is sampled with exactly the weights of step n - k, while earlier steps are trained "
        "on. This takes k + 1 copies of the trained tensors on the host, one on the device, and an objective that "
        "allows for it (docs/rollouts.md).",
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="Optimizer. adamw_8bit holds AdamW's moments in 8 bits (bitsandbytes; extra quantized): 2 bytes a "
        "parameter instead of 8, at the price of more coarsely rounded updates (docs/scale.md).",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate, reached after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up to the peak.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the decay after the warm-up."
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of the decay, as a fraction of the peak."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's decay rates of the first and second moments.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Maximum norm of the gradient; a larger gradient is scaled down to it."
    )
    micro_batch_tokens: int = Field(
        16_384,
        ge=1,
        description="Maximum size of a micro-batch, one forward and backward pass, as rows times padded length in "
        "tokens; a prompt that rows share counts once, and an eighth for each row.",
    )
    shared_prompts: bool = Field(
        True,
        description="Read the prompt of a group, and what else all of its rows begin with, once per micro-batch and "
        "not once per row, forward and backward. Done where it spares an eighth of the positions and more work than a "
        "second pass costs, and where the model reproduces its hidden states that way, which is tried: not beyond a "
        "sliding window, with other states than keys and values, with flash attention, with model.dropout or with "
        "methods that act on the model's layers. Gradients differ in the last bits.",
    )
    logit_scratch_mib: int = Field(
        0, ge=0, description="Maximum MiB that tiles of logits may take; 0 means 1024 on a GPU and 128 on CPU."
    )
    mixed_precision: Literal["auto", "no", "bf16"] = Field(
        "auto", description="Autocast: auto means bf16 on a GPU that supports it, otherwise no."
    )
    sharding: Literal["none", "fsdp"] = Field(
        "none",
        description="none: every rank holds a whole copy of the model (DDP). fsdp: every rank holds only its shard of "
        "weights, gradients and moments (FSDP2); with mixed_precision bf16 the shards stay in model.dtype, and layers "
        "are gathered in bf16.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Number of torch threads of the student; 0 leaves it to torch and OMP_NUM_THREADS.",
    )
    checkpoint_every: int = Field(0, ge=0, description="Steps between checkpoints; 0 writes only the last one.")
    keep_checkpoints: int = Field(2, ge=1, description="Number of checkpoints to keep; older ones are deleted.")
    disk_patience: float = Field(
        3600.0,
        ge=0,
        description="Seconds that the run waits for space, with everything in memory, when the disk of the run folder "
        "or of the weights for rollout servers is full. 0 ends the run at once.",
    )
    rank_patience: float = Field(
        300.0,
        gt=0,
        description="Seconds in which all ranks must have started. A rank that misses another one after them ends.",
    )
    async_checkpoints: bool = Field(
        False,
        description="Write checkpoints in the background, from copies in host memory. If a write fails, the run "
        "reports it and continues. The next checkpoint, and the end of the run, wait for the previous write.",
    )
