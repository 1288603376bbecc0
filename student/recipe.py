"""The recipe: all settings of `opd train`, in groups. Each key is documented here and nowhere else."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opd.config import Settings
from opd.errors import ConfigError
from opd.fleet.membership.discovery import parse_endpoints, recorded_folder
from opd.fleet.settings import FleetSettings
from opd.tasks.modes import ModeSettings
from opd.tasks.settings import PromptSettings
from student.rollout.episodes import EpisodeSettings
from student.run.trackers import TrackerSettings
from student.scoring.contexts import ContextSettings

Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Settings):
    """Low-rank adapters over a frozen base; only the adapters are trained and saved (extra lora)."""

    rank: int = Field(16, ge=1, description="Rank of the factors, r.")
    alpha: float = Field(32, gt=0, description="Scale: the adapter's output is multiplied by alpha / rank.")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Layers that get an adapter: all-linear (all linear layers except the head), or endings of layer "
        "names, for example [q_proj, v_proj].",
    )
    dora: bool = Field(False, description="DoRA: also train the norm of each row of the adapted weights.")
    quantize: Literal["nf4"] | None = Field(
        None,
        description="Hold the frozen base in 4 bits (QLoRA; extra quantized): nf4, with doubly quantized scales. Head, "
        "embeddings and norms keep model.dtype, and products are computed in it.",
    )
    start: str | None = Field(
        None, description="Folder of a PEFT adapter to start from, with the same rank, alpha and targets."
    )


class ModelSettings(Settings):
    """The student."""

    path: str = Field(description="Folder or hub id of the student's initial weights and tokenizer.")
    revision: str | None = Field(None, description="Branch, tag or commit, for a hub id.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the weights. Use bfloat16 only for the base under adapters, which are float32: "
        "trained weights would be rounded to it after every update.",
    )
    attention: str | None = Field(None, description="Attention implementation, for example sdpa or flash_attention_2.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    lora: LoraSettings | None = Field(None, description="Train low-rank adapters instead of the weights.")


class EmaSettings(Settings):
    """The exponential moving average of the student's weights, which recipes name as model `ema`."""

    decay: float = Field(
        0.999, ge=0, lt=1, description="Share of the average that is kept at each update of it; 0 copies the student."
    )
    every: int = Field(1, ge=0, description="Steps between updates of the average; 0 leaves them to a method.")
    copy_every: int = Field(
        0, ge=0, description="Steps after which the average is reset to the student; 0 means never."
    )
    served: str | None = Field(
        None,
        description="Served teacher that follows the student: its servers load the average before the first step and "
        "after each update of it. They must serve a model of the student's architecture (BASE+ADAPTER for a"
        " LoRA student) and allow the run's token to update weights (scope admin).",
    )
    folder: Path | None = Field(
        None,
        description="Folder where the average is written for these servers, which must see it under the same path. null"
        " means a folder NAME.teacher next to the run folder.",
    )
    seconds: float = Field(
        600.0,
        gt=0,
        description="Seconds that a server may take to load the average. A slower server keeps its old weights.",
    )


class TeacherSettings(Settings):
    """The models that score rows.

    Besides served models there are three in the student's process, which need no server: student (the current
    weights), initial (those of step 0) and ema (their moving average). A served model of the same name takes
    precedence.
    """

    endpoints: list[str] | dict[str, list[str]] = Field(
        default_factory=list,
        description="Addresses host:port of teacher servers, or a mapping from teacher name to its replicas. Also "
        "file:PATH (re-read when it changes), dns:NAME:PORT and store:FOLDER. May be omitted if only "
        "in-process models are named.",
    )
    default: str | dict[str, float] | None = Field(
        None,
        description="Teacher for prompts that do not name one, or several teachers with weights (see combine). May be "
        "omitted if the fleet serves a single teacher.",
    )
    combine: Literal["probability", "divergence"] = Field(
        "probability",
        description="What several weighted teachers of one row mean. probability: one teacher whose distribution is "
        "the weighted mean of theirs (payloads sampled and gather). divergence: the weighted sum of the divergences to "
        "each, with every payload (objectives opd, gopd, exopd and vopd).",
    )
    routes: dict[str, str | dict[str, float]] = Field(
        default_factory=dict, description="Mapping from a prompt's domain to its teacher, or to weighted teachers."
    )
    reference: str | None = Field(
        None,
        description="Model that objectives use as their reference (G-OPD, KL to reference): a served one, or initial.",
    )
    map_stops: bool = Field(
        False,
        description="Move the teacher's probability of stopping to the student's stop tokens, from the teacher's stop "
        "tokens that do not end the student's responses. For a base student of a chat teacher; payloads "
        "sampled, gather and topk.",
    )
    ema: EmaSettings = Field(default_factory=EmaSettings, description="How model ema follows the student.")
    fleet: FleetSettings = Field(default_factory=FleetSettings, description="How the fleet is used.")

    @field_validator("endpoints")
    @classmethod
    def _addresses(cls, endpoints: list[str] | dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
        try:
            if endpoints and recorded_folder(endpoints) is None:
                parse_endpoints(endpoints)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return endpoints

    @property
    def several(self) -> bool:
        """Whether a row can have several teachers."""
        return any(len(to) > 1 for to in (self.default, *self.routes.values()) if isinstance(to, dict))

    @property
    def sums_divergences(self) -> bool:
        """Whether a row can have several teachers whose divergences are summed."""
        return self.combine == "divergence" and self.several


class RolloutSettings(Settings):
    """How the student samples responses."""

    prompts_per_step: int = Field(64, ge=1, description="Prompts per step.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses to each prompt: the group size.")
    max_new_tokens: int = Field(512, ge=1, description="Longest response in tokens.")
    max_prompt_tokens: int = Field(2048, ge=1, description="Longest prompt in tokens.")
    long_prompts: Literal["drop", "error"] = Field(
        "error",
        description="What to do with longer prompts, both training and held-out: drop leaves them out, error refuses "
        "the run. All rows of files and datasets are measured before the run begins; generated prompts are "
        "measured when they are drawn.",
    )
    stop_tokens: list[int | str] = Field(
        default_factory=list,
        description="Tokens, by text or id, that end a response in addition to those of the tokenizer and of the "
        "model's generation_config.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature; the loss uses it too.")
    batch_rows: int = Field(
        64,
        ge=1,
        description="Maximum number of responses decoded together. A response that ends makes room for the next.",
    )
    cache_tokens: int = Field(
        262_144,
        ge=1,
        description="Bound on the tokens whose keys and values are held at once: the number of responses decoded "
        "together, times the longest prompt and response. If responses may become long, fewer are decoded "
        "together, but always at least four.",
    )
    verify_workers: int = Field(
        4,
        ge=1,
        le=256,
        description="Number of answers verified in parallel, in separate processes if the verifier uses them.",
    )
    strategy: dict[str, Any] = Field(
        default_factory=lambda: {"name": "single"},
        description="How the plan of a step becomes rows: the name of a rollout strategy and its settings; see `opd "
        "plugins list`.",
    )
    engine: dict[str, Any] = Field(
        default_factory=lambda: {"name": "transformers"},
        description="What samples: the name of a rollout engine and its settings; see `opd plugins list`.",
    )
    episodes: EpisodeSettings = Field(
        default_factory=EpisodeSettings, description="How prompts that name an environment are played."
    )

    @model_validator(mode="after")
    def _check_summaries(self) -> "RolloutSettings":
        summary, turn, prompt = self.episodes.summary, self.episodes.turn_tokens, self.max_prompt_tokens
        least = prompt + turn + 2 * summary.tokens
        if self.episodes.summarised is not None and summary.context_tokens < least:
            raise ValueError(
                f"episodes.summary.context_tokens ({summary.context_tokens}) is under {least}, which the longest "
                f"prompt (max_prompt_tokens {prompt}), a summary (tokens {summary.tokens}), a turn (turn_tokens "
                f"{turn}) and the next summary may take; raise it, or lower those"
            )
        return self

    def longest_sequence(self, prompt: int) -> int:
        """The most tokens of prompt and response in one forward pass, for prompts of up to `prompt` tokens."""
        limit = self.episodes.summarised
        response = self.max_new_tokens if limit is None else min(self.max_new_tokens, limit)
        longest = prompt + response
        return longest if limit is None or prompt > self.max_prompt_tokens else min(longest, limit)


class TrainSettings(Settings):
    """The optimizer and its schedule."""

    steps: int = Field(
        100,
        ge=1,
        description="Steps of the run; each samples a batch of rows and makes epochs x minibatches optimizer updates "
        "on it.",
    )
    epochs: int = Field(1, ge=1, description="Passes over the rows of a step.")
    minibatches: int = Field(
        1,
        ge=1,
        description="Optimizer updates per pass, each on its share of the groups. From the second update of a step, the"
        " student is no longer the policy that sampled, so importance ratios differ from 1 and clipping "
        "acts.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of steps by which the sampling weights lag the trained ones. 0 alternates sampling and "
        "training. With k, step n is sampled with exactly the weights of step n - k, while earlier steps "
        "are trained on. Needs k + 1 copies of the trained tensors on the host, one on the device, and an "
        "objective that allows for it (docs/scale.md).",
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="adamw_8bit holds AdamW's moments in 8 bits (bitsandbytes; extra quantized): 2 bytes a parameter "
        "instead of 8, and updates rounded accordingly.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="Fraction of the peak where the decay ends.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's decay rates.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Maximum gradient norm; larger gradients are scaled down to it."
    )
    micro_batch_tokens: int = Field(
        16_384, ge=1, description="Size of a micro-batch: rows times padded length of one forward and backward pass."
    )
    logit_scratch_mib: int = Field(
        0, ge=0, description="Bound on tiles of logits in MiB; 0 means 1024 on a GPU and 128 on CPU."
    )
    mixed_precision: Literal["auto", "no", "bf16"] = Field(
        "auto", description="Autocast: auto means bf16 on a GPU that has it, else no."
    )
    sharding: Literal["none", "fsdp"] = Field(
        "none",
        description="none: every rank holds a whole copy (DDP). fsdp: every rank holds only its shard of weights, "
        "gradients and moments (FSDP2); with mixed_precision bf16 the shards stay in model.dtype and layers"
        " are gathered in bf16.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Torch threads of the student; 0 leaves it to torch and OMP_NUM_THREADS."
    )
    checkpoint_every: int = Field(0, ge=0, description="Steps between checkpoints; 0 keeps only the last one.")
    keep_checkpoints: int = Field(2, ge=1, description="Number of checkpoints to keep; older ones are removed.")
    disk_patience: float = Field(
        3600.0,
        ge=0,
        description="If the disk of the run folder or of the weights for rollout servers is full: seconds that the run "
        "waits for space, with everything in memory, before it ends. 0 means it ends at once.",
    )
    async_checkpoints: bool = Field(
        False,
        description="Write checkpoints in the background, from copies in host memory. A failed write is reported and "
        "the run continues. The next checkpoint, and the end of the run, wait for the previous one.",
    )


class EvalSettings(Settings):
    """Evaluation on held-out prompts."""

    every: int = Field(
        0, ge=0, description="Steps between evaluations; 0 means only before the first step and after the last."
    )
    prompts: int = Field(256, ge=0, description="Number of held-out prompts; 0 turns evaluation off.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    samples: int = Field(
        1, ge=1, description="Responses per prompt, n. Above 1, pass@k is estimated without bias for k up to n."
    )
    reverse_kl: bool = Field(True, description="Also measure KL(student || teacher) on sampled responses.")
    mode_slack: float = Field(
        1.0,
        ge=1,
        description="Answers in a mode may be up to this many times its budget long, to show how far the student would "
        "go. Answers over the budget still count as wrong.",
    )
    leakage: int = Field(
        0,
        ge=0,
        description="Number of problems whose answers in every mode are scored by the teachers of all modes; 0 means "
        "none.",
    )


class SampleSettings(Settings):
    """Which answers are written to samples.jsonl in the run folder."""

    every: int = Field(
        10,
        ge=0,
        description="Keep training answers every this many steps; 0 keeps only those of evaluations, which are always "
        "kept.",
    )
    count: int = Field(8, ge=0, description="Number of answers to keep per step or evaluation; 0 keeps none.")


class Recipe(Settings):
    """All settings of a student job."""

    run: Path = Field(description="Run folder. It must not exist unless the run is resumed.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed for everything random: prompts, rollouts, evaluation.")
    model: ModelSettings = Field(description="The student.")
    teachers: TeacherSettings | None = Field(None, description="The served models; may be absent for plain RL.")
    prompts: PromptSettings = Field(description="Training and held-out prompts.")
    modes: dict[str, ModeSettings] = Field(
        default_factory=dict,
        description="Modes in which prompts are asked, by name: a mark, a budget and a teacher each (ORBIT).",
    )
    contexts: dict[str, ContextSettings] = Field(
        default_factory=dict,
        description="What a model reads before a response instead of the student's prompt (hints, solutions, its own "
        "system prompt), by role (teacher, reference) or by teacher name. The student never sees it.",
    )
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, description="What the student samples.")
    objective: list[dict[str, Any]] = Field(
        default_factory=lambda: [{"name": "opd"}],
        min_length=1,
        examples=["[{name: opd}]"],
        description="Terms of the objective, each with its name and settings; see `opd plugins list`.",
    )
    rewards: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Rewards in addition to the verifier's verdict, each with its name and settings. One may replace "
        "the verdict; the others add to it. See `opd plugins list reward`.",
    )
    methods: list[dict[str, Any]] = Field(
        default_factory=list,
        examples=["[{name: adwin}]"],
        description="Controllers of the loop (windows, curricula, jumps), each with its name.",
    )
    train: TrainSettings = Field(default_factory=TrainSettings, description="The optimizer and its schedule.")
    eval: EvalSettings = Field(default_factory=EvalSettings, description="Evaluation on held-out prompts.")
    samples: SampleSettings = Field(default_factory=SampleSettings, description="The answers in samples.jsonl.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the student's Prometheus metrics; 0 turns them off."
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Address of those metrics, which are unencrypted and need no token."
    )
    trackers: list[TrackerSettings] = Field(
        default_factory=list,
        examples=["[{name: tensorboard}]"],
        description="Experiment trackers that also get metrics, answers and the report (extra trackers). If one fails, "
        "it is dropped and the run continues.",
    )
    tracing: bool = Field(False, description="Export OpenTelemetry spans of every step (extra otel, OTEL_* variables).")

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.train.warmup_steps > self.train.steps:
            raise ValueError(
                f"train.warmup_steps ({self.train.warmup_steps}) is over train.steps ({self.train.steps}); lower it"
            )
        if self.train.minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) is over rollout.prompts_per_step "
                f"({self.rollout.prompts_per_step}), but a minibatch holds whole groups of answers; lower it"
            )
        return self
