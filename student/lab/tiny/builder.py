"""Train, measure and save the models of one world; everything here needs torch."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from opd.errors import DataError
from opd.tasks import MixSettings, PromptSource, build_prompts
from student.lab.tiny.generate import accuracy
from student.lab.tiny.model import make_model
from student.lab.tiny.plans import ModelPlan, Progress, SftPlan, WorldPlan
from student.lab.tiny.reinforce import train_reinforce
from student.lab.tiny.sft import train_sft
from student.lab.tiny.summary import ModelSummary, WorldSummary
from student.lab.tiny.tokenizer import make_tokenizer


class Builder:
    """Trains, measures and saves single models of one world."""

    def __init__(self, world: WorldSummary, plan: WorldPlan, progress: Progress | None) -> None:
        self.world, self.plan, self.progress = world, plan, progress

    def build(self, name: str, seed: int) -> ModelSummary:
        """Make one model and move its folder into place."""
        begun = time.perf_counter()
        plan = self.plan.models[name]
        tokenizer = make_tokenizer(shuffled=plan.shuffled)
        model = self._start(plan, seed, tokenizer)
        self._train(name, plan, model, tokenizer, seed)
        draft = self.world.folder / f".{name}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        except Exception as error:  # a full disk is an error of its own kind in each of three libraries
            raise DataError(
                f"model {name!r} cannot be written to {self.world.folder}: {error}; make room there and build again."
            ) from error
        greedy, sampled = (self._measure(model, tokenizer, temperature) for temperature in (0.0, 1.0))
        final = self.world.folder / name
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
        return ModelSummary(
            path=final,
            parameters=sum(weight.numel() for weight in model.parameters()),
            hidden=plan.shape.hidden,
            layers=plan.shape.layers,
            vocabulary=plan.shape.vocabulary,
            greedy=greedy,
            sampled=sampled,
            seconds=time.perf_counter() - begun,
        )

    def _start(self, plan: ModelPlan, seed: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        if plan.parent is not None:
            parent: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.world.models[plan.parent].path)
            return parent
        return make_model(plan.shape, seed, pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id)

    def _train(
        self, name: str, plan: ModelPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        total = sum(stage.plan.steps for stage in plan.stages)
        done = 0
        for stage in plan.stages:

            def report(step: int, _: int, before: int = done) -> None:
                if self.progress is not None:
                    self.progress(name, before + step, total)

            source = self._source(stage.tasks)
            if isinstance(stage.plan, SftPlan):
                longest = self.plan.max_new_tokens
                train_sft(model, tokenizer, source, stage.plan, seed=seed, max_new_tokens=longest, progress=report)
            else:
                train_reinforce(model, tokenizer, source, stage.plan, seed=seed, progress=report)
            done += stage.plan.steps

    def _source(self, tasks: Sequence[str]) -> PromptSource:
        parts = [self.plan.tasks[name] for name in tasks]
        return build_prompts(parts[0] if len(parts) == 1 else MixSettings(mix=[*parts]), seed=self.world.seed)

    def _measure(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float
    ) -> dict[str, float]:
        return {
            name: accuracy(
                model,
                tokenizer,
                self._source([name]),
                self.plan.measured,
                max_new_tokens=self.plan.max_new_tokens,
                temperature=temperature,
                seed=self.world.seed,
            )
            for name in self.plan.tasks
        }


@contextmanager
def quiet_thread() -> Iterator[None]:
    """One torch thread, because tiny matrices are faster so and sums keep their order; no progress bars of others."""
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()
