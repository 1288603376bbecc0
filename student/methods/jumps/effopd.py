"""EffOPD (arXiv 2605.11739): jump along the path that the weights have taken, as long as a gate accepts.

After updates t = 1, 2, 4, 8, ... with d = W - anchor, the candidates

    W + 2k d,   k = 1 ... 5,   that is 3, 5, 7, 9, 11 times the displacement

are tried in order. The search stops at the first candidate that the gate refuses, the last accepted one is kept (W
itself if none was), and the anchor is moved. Nothing is done between powers of two. Only attention and MLP matrices
move; embeddings, norms and the head never do, as in the authors' code.

Paper and code differ in the gate's comparison (`gate.strict`; code: strict) and in the anchor, which is the weights
that the last search kept (code, `anchor: kept`) or those that it started from (paper, `anchor: raw`). The code leaves
the optimizer's moments as they are (`moments: keep`); reset and rescale are ours.

Memory: two copies of the moved tensors in their own dtype during a search (anchor and start), and one between
searches. All operations are elementwise, so sharded weights are handled shard by shard. A refused jump restores the
weights bit for bit.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd.errors import ConfigError
from student.methods.jumps.gates import GateSettings, passes
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from opd.tasks.prompt import Prompt
    from student.data.report import EvalReport
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_MOVED = re.compile(r"\.(self_attn|attn|attention|mlp|feed_forward|experts)\.")
_NORM = re.compile(r"norm", re.IGNORECASE)


class EffOpdSettings(ControllerSettings):
    """Settings of EffOPD."""

    tries: int = Field(5, ge=1, le=20, description="Maximum number of candidates k per search.")
    tensors: Literal["attention_mlp", "all"] = Field(
        "attention_mlp", description="Which tensors jump: attention and MLP matrices, or all trained tensors."
    )
    anchor: Literal["kept", "raw"] = Field(
        "kept",
        description="Where displacements start: kept, the weights that the last search kept; raw, those that it "
        "started from.",
    )
    moments: Literal["keep", "reset", "rescale"] = Field(
        "keep",
        description="What happens to AdamW's moments of moved tensors after a jump: keep leaves them; reset sets them "
        "to zero; rescale divides the first moment by the growth of the displacement.",
    )
    until: int | None = Field(None, ge=1, description="Last update after which a search is made; null sets no limit.")
    gate: GateSettings = Field(default_factory=GateSettings, description="Test that a candidate must pass.")


def moves(name: str, tensors: str) -> bool:
    """Whether the tensor called `name` takes part in jumps."""
    return tensors == "all" or (_MOVED.search(f".{name}") is not None and _NORM.search(name) is None)


class EffOpd(Controller[EffOpdSettings]):
    """Jumps along the path of the weights, as long as a gate accepts (EffOPD).

    Its state is the anchor.
    """

    traits = Traits(works_ahead=True)

    def __init__(self, settings: EffOpdSettings) -> None:
        super().__init__(settings)
        self._anchor: dict[str, Tensor] = {}
        self._jumps = 0
        self._prompts: list[Prompt] = []

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a gate on reverse KL without a teacher, and adapters."""
        if recipe.model.lora is not None:
            raise ConfigError(
                "method effopd extrapolates along the line of the weights, but under model.lora the weights change by "
                "a product B A, and a jump along A and B leaves that line; remove model.lora or method effopd."
            )
        if self.settings.moments != "keep" and recipe.train.optimizer != "adamw":
            raise ConfigError(
                f"method effopd with moments: {self.settings.moments} changes AdamW's moments in float32, but "
                f"train.optimizer {recipe.train.optimizer} stores them in 8 bits; set moments: keep, or optimizer: "
                "adamw."
            )
        if self.settings.gate.kind == "reverse_kl" and recipe.teachers is None:
            raise ConfigError("method effopd's gate reverse_kl needs a teacher; set teachers, or use another gate.")

    def start(self, services: Services) -> None:
        """Take the first anchor, unless one was restored.

        Raises:
            ConfigError: if no tensor would move.
        """
        moved = self._moved(services)
        if not moved:
            raise ConfigError("method effopd finds no attention or MLP tensors by name; set tensors: all.")
        if self._anchor:
            from student.model.sharding import placed

            self._anchor = {name: placed(self._anchor[name], p) for name, p in moved.items()}
        else:
            self._anchor = _clone(moved)
        self._prompts = services.training_prompts(self.settings.gate.prompts, seed_names=("effopd",))

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Search after updates 1, 2, 4, ...; metrics effopd/* of that step."""
        updates = step + 1
        late = self.settings.until is not None and updates > self.settings.until
        if updates & (updates - 1) or late:
            return {}
        return self._search(updates, services)

    def state_dict(self) -> dict[str, Any]:
        """The anchor and the number of accepted jumps."""
        return {"anchor": dict(self._anchor), "jumps": self._jumps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._anchor, self._jumps = dict(state["anchor"]), int(state["jumps"])

    def _search(self, updates: int, services: Services) -> dict[str, float]:
        moved = self._moved(services)
        start = _clone(moved)
        first = best = self._evaluate(services, updates, 0)
        kept = tried = 0
        try:
            for k in range(1, self.settings.tries + 1):
                tried = k
                _displace(moved, start, self._anchor, 2.0 * k)
                report = self._evaluate(services, updates, k)
                if not passes(self.settings.gate, report, best):
                    break
                kept, best = k, report
        except BaseException:
            # Interrupted by a signal or a lost teacher: restore the weights; a resumed run repeats the search.
            _displace(moved, start, self._anchor, 0.0)
            raise
        if kept != tried:
            # The same arithmetic reproduces the accepted candidate bit for bit; kept = 0 copies the weights back.
            _displace(moved, start, self._anchor, 2.0 * kept)
        self._anchor = start if self.settings.anchor == "raw" else _clone(moved)
        if kept:
            self._jumps += 1
            self._treat_moments(services, 1.0 + 2.0 * kept)
        return self._metrics(kept, tried, first, best)

    def _evaluate(self, services: Services, updates: int, k: int) -> EvalReport:
        gate = self.settings.gate
        # Common random numbers within a search, except for the paper's gate, which draws afresh each time.
        names: tuple[object, ...] = ("effopd", updates) + ((k,) if gate.kind == "accuracy" else ())
        report = services.evaluate(
            self._prompts, seed_names=names, samples=gate.samples, reverse_kl=gate.kind == "reverse_kl"
        )
        if gate.kind == "reverse_kl" and report.reverse_kl is None:
            raise ConfigError(
                "method effopd's gate reverse_kl cannot be measured: no teacher of the objective serves it."
            )
        if gate.kind != "reverse_kl" and math.isnan(report.accuracy):
            raise ConfigError(
                f"method effopd's gate {gate.kind} cannot be measured, because no answer to its {gate.prompts} "
                "prompts can be judged; use gate reverse_kl, or prompts with reference answers."
            )
        return report

    def _metrics(self, kept: int, tried: int, first: EvalReport, best: EvalReport) -> dict[str, float]:
        metrics = {
            "effopd/displacement": 1.0 + 2.0 * kept,
            "effopd/accepted": float(kept),
            "effopd/tried": float(tried),
            "effopd/jumps": float(self._jumps),
            "effopd/gate_accuracy_before": first.accuracy,
            "effopd/gate_accuracy": best.accuracy,
        }
        if first.reverse_kl is not None and best.reverse_kl is not None:
            metrics |= {"effopd/gate_reverse_kl_before": first.reverse_kl, "effopd/gate_reverse_kl": best.reverse_kl}
        return metrics

    def _moved(self, services: Services) -> dict[str, Tensor]:
        return {name: p for name, p in services.parameters() if moves(name, self.settings.tensors)}

    def _treat_moments(self, services: Services, growth: float) -> None:
        """Keep, reset or rescale AdamW's moments of the moved tensors after a jump."""
        if self.settings.moments == "keep":
            return
        for name, state in services.optimizer_moments():
            if not state or not moves(name, self.settings.tensors):
                continue
            if self.settings.moments == "reset":
                for value in state.values():
                    value.zero_()
            else:
                state["exp_avg"].div_(growth)


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _displace(moved: dict[str, Tensor], start: dict[str, Tensor], anchor: dict[str, Tensor], factor: float) -> None:
    """Set each tensor to start + factor * (start - anchor), in float32 rounded once; factor 0 copies bits."""
    import torch

    with torch.no_grad():
        for name, tensor in moved.items():
            if factor == 0.0:
                tensor.copy_(start[name])
                continue
            origin = start[name].float()
            tensor.copy_(origin + factor * (origin - anchor[name].float()))
