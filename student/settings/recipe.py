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
from student.report.trackers import TrackerSettings
from student.scoring.contexts import ContextSettings
from student.settings.ema import EmaSettings
from student.settings.episode_settings import EpisodeSettings
from student.settings.evaluation import EvalSettings

Decay = Annotated[float, Field(ge=0, lt=1)]


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


class TeacherSettings(Settings):
    """The models that score rows.

    Besides served models there are three in the student's process, which need no server: student (the current
    weights), initial (those of step 0) and ema (their moving average). A served model of the same name takes
    precedence.
    """

    endpoints: list[str] | dict[str, list[str]] = Field(
        default_factory=list,
        description="Addresses host:port of teacher servers, or a mapping from each teacher's name to the addresses "
        "of its replicas. An address may also be file:PATH (a list that is re-read when it changes), dns:NAME:PORT or "
        "store:FOLDER. May be omitted if the recipe names only in-process models.",
    )
    default: str | dict[str, float] | None = Field(
        None,
        description="Teacher of the prompts that do not name one, or a mapping from several teachers to their weights "
        "(see combine). May be omitted if the fleet serves a single teacher.",
    )
    combine: Literal["probability", "divergence"] = Field(
        "probability",
        description="How several weighted teachers of one row are combined. probability: into one teacher whose "
        "distribution is the weighted mean of theirs (payloads sampled and gather). divergence: the loss is the "
        "weighted sum of the divergences to each of them, with any payload (objectives opd, gopd, exopd and vopd).",
    )
    routes: dict[str, str | dict[str, float]] = Field(
        default_factory=dict,
        description="Mapping from a prompt's domain to its teacher, or to several weighted teachers.",
    )
    reference: str | None = Field(
        None,
        description="Model that objectives use as their reference (in G-OPD or a KL penalty): the name of a served "
        "model, or initial, the student's first weights.",
    )
    map_stops: bool = Field(
        False,
        description="Move the teacher's probability of ending the response to the student's stop tokens, from those "
        "stop tokens of the teacher that do not end the student's responses. Use it for a base student of a chat "
        "teacher; it needs payload sampled, gather or topk.",
    )
    ema: EmaSettings = Field(
        default_factory=EmaSettings, description="How the in-process model `ema` follows the student."
    )
    fleet: FleetSettings = Field(default_factory=FleetSettings, description="How the client uses the fleet.")

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

    prompts_per_step: int = Field(64, ge=1, description="Number of prompts in a step, over all ranks.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses to each prompt, which form its group.")
    max_new_tokens: int = Field(512, ge=1, description="Maximum length of a response in tokens.")
    max_prompt_tokens: int = Field(2048, ge=1, description="Maximum length of a prompt in tokens.")
    long_prompts: Literal["drop", "error"] = Field(
        "error",
        description="What happens to prompts over max_prompt_tokens, in training and held out: error refuses the run, "
        "drop leaves them out. Rows of files and datasets are measured before the run begins, generated prompts when "
        "they are drawn.",
    )
    stop_tokens: list[int | str] = Field(
        default_factory=list,
        description="Tokens, by text or id, that end a response in addition to those of the tokenizer and of the "
        "model's generation_config.",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature, at which the loss is computed too.")
    batch_rows: int = Field(
        64,
        ge=1,
        description="Maximum number of responses decoded together. When a response ends, the next one takes its place.",
    )
    cache_tokens: int = Field(
        262_144,
        ge=1,
        description="Maximum number of tokens whose keys and values are held at once, counted as the number of "
        "responses decoded together times the longest possible prompt and response. If it would be exceeded, fewer "
        "responses are decoded together, but never fewer than four.",
    )
    verify_workers: int = Field(
        4,
        ge=1,
        le=256,
        description="Number of answers that are verified in parallel, in separate processes if the verifier supports "
        "that.",
    )
    strategy: dict[str, Any] = Field(
        default_factory=lambda: {"name": "single"},
        description="Rollout strategy, which turns the plan of a step into rows, with its settings; see "
        "`opd plugins list rollout_strategy`.",
    )
    engine: dict[str, Any] = Field(
        default_factory=lambda: {"name": "transformers"},
        description="Rollout engine, which samples the responses, with its settings; see "
        "`opd plugins list rollout_engine`.",
    )
    episodes: EpisodeSettings = Field(
        default_factory=EpisodeSettings, description="How episodes of prompts that name an environment are played."
    )

    @model_validator(mode="after")
    def _check_summaries(self) -> "RolloutSettings":
        summary, turn, prompt = self.episodes.summary, self.episodes.turn_tokens, self.max_prompt_tokens
        least = prompt + turn + 2 * summary.tokens
        if self.episodes.summarised is not None and summary.context_tokens < least:
            raise ValueError(
                f"episodes.summary.context_tokens ({summary.context_tokens}) is below {least}, the room that the "
                f"longest prompt (max_prompt_tokens {prompt}), a summary (tokens {summary.tokens}), a turn "
                f"(turn_tokens {turn}) and the next summary may take; raise it, or lower those"
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
        "tokens.",
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


class SampleSettings(Settings):
    """Which answers are written to samples.jsonl in the run folder."""

    every: int = Field(
        10,
        ge=0,
        description="Steps between those whose answers are kept; 0 keeps only the answers of evaluations, which are "
        "always kept.",
    )
    count: int = Field(8, ge=0, description="Number of answers kept per such step or evaluation; 0 keeps none.")


class Recipe(Settings):
    """All settings of a student job."""

    run: Path = Field(description="Run folder. It must not exist yet, unless the run is resumed.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random: prompts, rollouts and evaluation.")
    model: ModelSettings = Field(description="The model that is trained.")
    teachers: TeacherSettings | None = Field(None, description="The served models; may be omitted in plain RL.")
    prompts: PromptSettings = Field(description="Prompts for training and evaluation.")
    modes: dict[str, ModeSettings] = Field(
        default_factory=dict,
        description="Modes in which prompts are asked (ORBIT), by name. Each has a mark for its prompts, a budget in "
        "tokens and a teacher.",
    )
    contexts: dict[str, ContextSettings] = Field(
        default_factory=dict,
        description="What a model reads before a response instead of the student's prompt (hints, solutions, its own "
        "system prompt), by role (teacher, reference) or by teacher name. The student never sees it.",
    )
    rollout: RolloutSettings = Field(
        default_factory=RolloutSettings, description="How the student's responses are sampled."
    )
    objective: list[dict[str, Any]] = Field(
        default_factory=lambda: [{"name": "opd"}],
        min_length=1,
        examples=["[{name: opd}]"],
        description="Terms of the objective, which are added up, each with its name and settings; see `opd plugins "
        "list objective`.",
    )
    rewards: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Rewards in addition to the verifier's verdict, each with its name and settings. One of them may "
        "replace the verdict; the others are added to it. See `opd plugins list reward`.",
    )
    methods: list[dict[str, Any]] = Field(
        default_factory=list,
        examples=["[{name: adwin}]"],
        description="Methods that control the loop (windows, curricula, jumps), each with its name and settings; see "
        "`opd plugins list method`.",
    )
    train: TrainSettings = Field(
        default_factory=TrainSettings, description="The optimizer, its schedule and checkpoints."
    )
    eval: EvalSettings = Field(default_factory=EvalSettings, description="Evaluation on held-out prompts.")
    samples: SampleSettings = Field(default_factory=SampleSettings, description="Which answers go to samples.jsonl.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the student's Prometheus metrics; 0 turns them off."
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Address on which these metrics are served, unencrypted and without authentication."
    )
    trackers: list[TrackerSettings] = Field(
        default_factory=list,
        examples=["[{name: tensorboard}]"],
        description="Experiment trackers that also receive metrics, answers and the report (extra trackers). If one "
        "fails, it is dropped and the run continues.",
    )
    tracing: bool = Field(
        False, description="Export OpenTelemetry spans of every step (extra otel; set by OTEL_* variables)."
    )

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
