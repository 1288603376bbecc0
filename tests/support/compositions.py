"""Recipes drawn at random from the registries: plug-ins by name, settings by their declared types and bounds.

What a type does not tell (a text, a column, an address, sizes that keep a run short) stands in tables here. A drawn
recipe is valid for pydantic alone; whether its parts go together is what the test asks.
"""

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from simulated_world import TOOLS

from opd.registry import Registry
from student.plugin.controllers import CONTROLLERS
from student.plugin.strategy import STRATEGIES
from student.plugin.terms import AGGREGATIONS, OBJECTIVES
from student.rl import ADVANTAGES, REWARDS
from student.rl.advantages.base import Modifier
from student.settings.evaluation import EvalSettings
from student.settings.model import LoraSettings
from student.settings.rollout import RolloutSettings
from student.settings.teachers import EmaSettings
from student.settings.train import TrainSettings

Drawn = dict[str, Any]
ANSWERING = "http://answering"
"""Stands for the address of a judge and chat model."""
CHAT = {"endpoint": ANSWERING, "model": "m", "max_tokens": 4}
COLUMNS = {"depth": 1, "hint": "2", "constraints": ["short"], "solution": "3", "calls": [], "schema": {}}
COLUMNS |= {"rubric": ["short", "right"]}
UNSERVED = ("grpc_judge",)
UNDRAWN = {"name", "key_variable", "cache", "run", "file", "question", "timeout", "attempts", "security", "within"}
UNDRAWN |= {"json_schema", "schema_column", "column", "critic", "answer_start", "answer_end", "start", "quantize"}
UNDRAWN |= {"targets", "served", "folder", "seconds", "leakage", "loss"}
COUNTS: dict[str, list[int]] = {
    "workers": [1],
    "prompts": [2, 4],
    "rows": [8],
    "folds": [2],
    "delay": [1],
    "tries": [1, 2],
    "fits": [1, 4],
    "buckets": [256, 1000],
    "k": [1, 4, 8, 64, 300],
    "batch": [1, 8],
    "tokens": [1, 3, 6, 100],
    "longest": [1, 4, 30],
    "limit": [1, 4, 8, 12],
}
"""Sizes with which runs stay short, and which matter for answers of a dozen tokens."""
CHOICES: dict[str, list[Any]] = {
    "aggregation": list(AGGREGATIONS),
    "strata": ["domain", "credit", "context"],
    "by": ["prompt", "domain", "depth"],
    "before": ["="],
    "endpoint": [ANSWERING],
    "model": ["m"],
    "teacher": [CHAT],
    "judge": [CHAT],
    "function": ["plain_rewards:length"],
    "group": [["step", "uid", "turn", "agent"], ["uid"], ["step"], ["uid", "sample"], []],
    "spans": [[{"pattern": "[0-9]+", "weight": 0.5}]],
    "domain_reward_scale": [{}, {"d0": 2.0}],
    "domains": [{}, {"d0": {"false_positive": 0.1}}],
    "edges": [[0.5], [0.2, 0.4, 0.8]],
    "stages": [[{"step": 0, "domains": ["d0"]}, {"step": 1, "max_new_tokens": 3}]],
    "phases": [[{"step": 1, "keep": 0.5}], [{"step": 1, "keep": 0.1, "samples": 3}]],
    "templates": [[{"text": "{prompt}"}, {"text": "{prompt} ", "prefix": "1", "format": "1"}]],
    "ended": [["tokens"], ["turns", "failure"]],
    "examples": [["1+1=2"]],
    "windows": [[2], [2, 4], [1, 3, 8]],
}
"""What types leave open, and values of which most would be refused."""
ALWAYS: dict[str, list[Drawn]] = {
    "adwin": [{"windows": [2, 4], "rows": 8, "folds": 2, "delay": 1}],
    "effopd": [{"tries": 2, "gate": {"kind": "accuracy", "prompts": 3}}],
    "expert_rows": [
        {"share": 0.5},
        {"share": 0.5, "source": "answer"},
        {"cold_steps": 1},
        {"share": 1.0, "source": "path"},
    ],
    "fixed_window": [{"tokens": 6, "fraction": None}, {"tokens": None, "fraction": 0.5}],
    "mask_tokens": [{"tokens": {"ids": list(range(4, 60))}}, {"tokens": {"special": True}}],
    "token_budget": [{"tokens": 20}, {"tokens": 10_000}],
    "episode_filter": [{"ended": ["tokens"]}],
    "icpo": [{"examples": ["1+1=2"]}],
    "function": [{"workers": 1}],
    "noisy_verifier": [{"false_negative": 0.3}],
}
"""Settings that a plug-in cannot do without, or that keep it short."""
WANTS: list[tuple[str, str]] = [
    ('"gae"|"ppo"|"prompt_value"|"a_lol"|"dapo_direct"', "critic"),
    ('"archer"', "archer_critic"),
    ('"hiper"', "hiper_critic"),
    ('"expert"|"sft"|"asft"|"chord"|"otr"', "expert_rows"),
]
"""Methods that parts of an objective need."""
OF_EPISODES = {"tcod", "turnopd", "prefix_replay", "episode_filter", "sopd", "rltf", "sage", "seeupo", "trustee", "prs"}
OF_EPISODES |= {"infopo", "turn_judge"}
OF_EPISODES |= {"archer_critic", "hiper_critic", "profiling", "igpo", "matchtir", "arpo", "future_bridge"}
PLAYED: list[Drawn] = [
    {"task": "lock", "options": {"digits": 3, "turns": 5}},
    {"task": "student_plugins:TwoTries", "options": {"digits": 1}},
    {"task": "student_plugins:Measured", "options": {"digits": 1}},
]
CONTEXTS: list[Drawn] = [
    {"prompt": "1{{ prompt }}"},
    {"prompt": "{% if group.best %}9{% endif %}{{ prompt }}", "success": 0.5},
    {"prompt": "{{ group.best }}{{ prompt }}", "skip_without": ["group.best"]},
]


def write_prompts(file: Path) -> Drawn:
    """Sums of two domains in a file, with a value in every column that a plug-in may read; returns `prompts`."""
    sums = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "domain": f"d{i % 2}"} for i in range(16)]
    file.write_text("\n".join(json.dumps(COLUMNS | line) for line in sums))
    return {"file": str(file), "verifier": "student_plugins:Even", "heldout": 0.2, "keep_columns": list(COLUMNS)}


class Drawing:
    """One recipe.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def value(self, kind: Any, bounds: list[Any], default: Any, name: str) -> Any:
        """A value of an annotation, within its bounds."""
        if name in CHOICES:
            return self.random.choice(CHOICES[name])
        origin, parts = get_origin(kind), get_args(kind)
        if origin is Annotated:
            more = [one for part in parts[1:] for one in (part.metadata if isinstance(part, FieldInfo) else [part])]
            return self.value(parts[0], [*bounds, *more], default, name)
        if origin in (Union, UnionType):
            return self.value(self.random.choice(parts), bounds, default, name)
        if origin is Literal:
            return self.random.choice(parts)
        if origin is tuple:
            return [self.value(part, [], None, name) for part in parts]
        if kind is bool:
            return self.chance(0.5)
        if kind is int:
            return self.whole(bounds, name)
        if kind is float:
            return self.real(bounds)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self.settings(kind)
        return None if kind is type(None) else default

    def whole(self, bounds: list[Any], name: str) -> int:
        low, high = _range(bounds, 1)
        able = [count for count in COUNTS.get(name, ()) if low <= count <= high]
        start = int(low) if math.isfinite(low) else -2
        return self.random.choice(able) if able else int(min(start + self.random.choice([0, 0, 1, 2, 3, 9]), high))

    def real(self, bounds: list[Any]) -> float:
        """A bound, or a number between bounds, or one of any size beyond a bound."""
        low, high = _range(bounds, 1e-4)
        if math.isfinite(low) and math.isfinite(high):
            return self.random.choice([low, high, round(self.random.uniform(low, high), 4)])
        far = round(math.exp(self.random.uniform(-5, 2)), 5)
        if math.isfinite(low):
            return self.random.choice([low, low + far, max(low, 1.0)])
        return self.random.choice([high, high - far]) if math.isfinite(high) else round(self.random.gauss(0, 1), 3)

    def settings(self, model: type[BaseModel], share: float = 0.2, without: tuple[str, ...] = ()) -> Drawn:
        """Some fields of a settings model; the others keep their defaults."""
        found: Drawn = {}
        for name, field in model.model_fields.items():
            if name in UNDRAWN or name in without or not (field.is_required() or self.chance(share)):
                continue
            if name == "advantage":
                found[name] = self.advantage()
                continue
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            value = self.value(field.annotation, list(field.metadata), default, name)
            found[field.alias or name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        return found

    def plugin(self, registry: Registry, name: str = "") -> Drawn:
        """A plug-in with some settings."""
        name = name or self.random.choice([entry.name for entry in registry if entry.name not in UNSERVED])
        needed = self.random.choice(ALWAYS.get(name, [{}]))
        return {"name": name, **self.settings(registry.load(name).settings_type, 0.12), **needed}

    def advantage(self) -> list[Drawn]:
        """An estimator, and sometimes modifiers behind it."""
        loaded = {entry.name: ADVANTAGES.load(entry.name) for entry in ADVANTAGES}
        firsts = [name for name, cls in loaded.items() if not issubclass(cls, Modifier)]
        chain = [self.plugin(ADVANTAGES, self.random.choice(firsts))]
        while self.chance(0.25):
            chain.append(self.plugin(ADVANTAGES, self.random.choice(sorted(loaded.keys() - firsts))))
        return chain

    def recipe(self, world: Path, experts: Path, address: str, file: Drawn) -> Drawn:
        """The recipe, without its run folder: two steps, a checkpoint after each.

        Args:
            world: folder of models `student` and `teacher`.
            experts: folder of a student of experts.
            address: of a server of both.
            file: prompts from a file, see `write_prompts`.
        """
        pick = self.random.choice
        terms = [self.plugin(OBJECTIVES) for _ in range(pick([1, 1, 1, 2, 2, 3]))]
        rewards = [self.plugin(REWARDS) for _ in range(pick([0, 0, 0, 1, 1, 2]))]
        methods = [self.plugin(CONTROLLERS) for _ in range(pick([0, 0, 1, 1, 2, 3]))]
        rollout, train = self.rollout(), self.train()
        if self.chance(0.3):
            rollout["strategy"] = self.plugin(STRATEGIES)
        names = {method["name"] for method in methods}
        wanted = [name for words, name in WANTS if re.search(words, json.dumps(terms)) and name not in names]
        methods += [self.plugin(CONTROLLERS, name) for name in wanted]
        data = {"objective": terms, "rewards": rewards, "methods": methods, "rollout": rollout, "train": train}
        named = {part["name"] for part in (*methods, *rewards, rollout.get("strategy", {"name": ""}))}
        plays = self.chance(0.93 if named & OF_EPISODES else 0.2)
        digits = {"task": "student_plugins:Digits", "options": {"digits": 2}}
        data["prompts"] = pick(PLAYED) if plays else pick([file, file, digits, {"mix": [file, digits]}])
        if "trustee" in named:
            self.simulate(data)
        if plays:
            rollout["max_new_tokens"] = pick([16, 40])
            rollout["episodes"] = {"turns": pick([1, 2, 5]), "turn_tokens": pick([1, 3]), "isolation": "none"}
            rollout["episodes"] |= pick([{}, {}, {"history": 1}])
        data["seed"], data["eval"] = pick([0, 7]), {"prompts": 0}
        if self.chance(0.15):
            data["eval"] = {"prompts": 2, **self.settings(EvalSettings, without=("prompts",))}
        mixture = self.chance(0.7 if "routing_replay" in named else 0.05)
        data["model"] = {"path": str(experts if mixture else world / "student")}
        if self.chance(0.15):
            data["model"]["lora"] = {"rank": 2, **self.settings(LoraSettings, without=("rank",))}
        if self.chance(0.9):
            data["teachers"] = self.teachers(address)
        if self.chance(0.1):
            data["contexts"] = {pick(["teacher", "reference", "ema", "student"]): pick(CONTEXTS)}
        if self.chance(0.06) or "modes" in named:
            short = {"budget": 3, "prefix": "S", "teacher": "student"}
            data["modes"] = {
                "long": {"budget": rollout["max_new_tokens"], "prefix": "L", "teacher": "teacher"},
                "short": short,
            }
        drawn: Drawn = json.loads(json.dumps(data))
        return drawn

    def rollout(self) -> Drawn:
        pick = self.random.choice
        size = {"prompts_per_step": pick([2, 3, 4]), "samples_per_prompt": pick([1, 2, 4, 4])}
        size |= {"max_new_tokens": pick([1, 8, 12]), "max_prompt_tokens": 48, "verify_workers": 1}
        size |= {"engine": {"name": "transformers", "mismatch_rows": 2}} if self.chance(0.05) else {}
        return self.settings(RolloutSettings, 0.08, (*size, "strategy", "engine", "episodes", "stop_tokens")) | size

    def train(self) -> Drawn:
        pick = self.random.choice
        fixed: Drawn = {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1}
        fixed |= {"learning_rate": pick([1e-4, 1e-3, 1e-2]), "epochs": pick([1, 1, 2]), "minibatches": pick([1, 1, 2])}
        fixed |= {"max_staleness": pick([0, 0, 0, 1, 2]), "micro_batch_tokens": pick([1, 64, 16_384])}
        without = (*fixed, "sharding", "optimizer", "disk_patience", "logit_scratch_mib", "warmup_steps")
        return self.settings(TrainSettings, 0.1, without) | fixed

    def teachers(self, address: str) -> Drawn:
        pick = self.random.choice
        found: Drawn = {"endpoints": [address], "default": "teacher", "reference": pick(["initial", "student"])}
        if self.chance(0.2):
            found["default"] = pick(["ema", "initial", {"teacher": 0.7, "student": 0.3}, {"teacher": 1.0, "ema": 1.0}])
        elif self.chance(0.2):
            found = {"default": pick(["ema", "initial"]), "reference": "initial"}
        found |= {"combine": "divergence"} if self.chance(0.15) else {}
        found |= {"routes": {"d0": pick(["initial", {"teacher": 0.5, "student": 0.5}])}} if self.chance(0.15) else {}
        if self.chance(0.3):
            found["ema"] = {"decay": pick([0.0, 0.5, 0.9]), **self.settings(EmaSettings, without=("decay",))}
        return found

    def simulate(self, data: Drawn) -> None:
        """TRUSTEE's world, method and reward, which belong together."""
        tools = {"sums": TOOLS["sums"][1:]}
        data["prompts"] = {"task": "simulated", "options": {"simulator": CHAT | {"max_tokens": 512}, "tools": tools}}
        data["rollout"] |= {"max_new_tokens": 60, "max_prompt_tokens": 440}
        for kind in ("methods", "rewards"):
            if all(part["name"] != "trustee" for part in data[kind]):
                data[kind].append({"name": "trustee"})


def _range(bounds: list[Any], least: float) -> tuple[float, float]:
    """The lowest and the highest value; an excluded bound is left by `least`."""
    low, high = -math.inf, math.inf
    for bound in bounds:
        match bound:
            case annotated_types.Ge(ge=found):
                low = float(found)  # type: ignore[arg-type]
            case annotated_types.Gt(gt=found):
                low = float(found) + least  # type: ignore[arg-type]
            case annotated_types.Le(le=found):
                high = float(found)  # type: ignore[arg-type]
            case annotated_types.Lt(lt=found):
                high = float(found) - least  # type: ignore[arg-type]
    return low, high


def lightened(data: Drawn, said: str, random: Random) -> Drawn | None:
    """A refused recipe without one thing that the refusal names; None where it names nothing that can go.

    Most recipes that are drawn are refused, and the parts that they are left with are still several.
    """
    data, words = copy.deepcopy(data), set(re.findall(r"\w+", said))
    if "samples_per_prompt" in words:
        data["rollout"]["samples_per_prompt"] = 4
        return data
    if {"aggregation", "constant"} <= words:
        for term in data["objective"]:
            term["aggregation"] = "constant"
        return data
    named = [one for one in _parts(data) if one[0]["name"].rpartition(":")[2] in words or f"{one[3]}:" in said]
    settings = [(part, key) for part, *_ in named for key in part.keys() & words - {"name", "advantage"}]
    groups = [(data[group], key) for group in ("train", "rollout") for key in data[group].keys() & words - _KEPT]
    whole = [(data, key) for key in ("contexts", "modes") if key in data and key in words]
    able = (
        sorted(settings, key=str) or sorted([*groups, *whole], key=str) or [(where, key) for _, where, key, _ in named]
    )
    if not able:
        return None
    where, key = random.choice(able)
    del where[key]
    data["objective"] = data["objective"] or [{"name": "grpo"}]
    return data


_KEPT = {"steps", "checkpoint_every", "keep_checkpoints", "prompts_per_step", "max_new_tokens", "max_prompt_tokens"}


def _parts(data: Drawn) -> Iterator[tuple[Drawn, Any, Any, str]]:
    """Plug-ins of a recipe: each with what holds it, its key there, and its name in messages."""
    for kind in ("objective", "rewards", "methods"):
        for index, part in enumerate(data[kind]):
            yield part, data[kind], index, f"{kind}.{index}"
            for place, advantage in enumerate(part.get("advantage", ())):
                yield advantage, *((part, "advantage") if place == 0 else (part["advantage"], place)), "advantage"
    if "strategy" in data["rollout"]:
        yield data["rollout"]["strategy"], data["rollout"], "strategy", "rollout.strategy"
