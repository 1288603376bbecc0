"""Trains, measures and saves the models of a world. Importing this module imports torch."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers.utils import logging

from opd.files import share
from opd.tasks import build_prompts
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import MergePlan, Progress, WorldPlan
from opd_lab.tiny.summary import ModelSummary, WorldSummary
from opd_lab.tiny.tokenizer import make_tokenizer
from opd_lab.tiny.training import Examiner, recipe_of, train_stage
from student.orbit.merge import MergeModel, MergeSettings, merge
from student.run.space import drafted


class Builder:
    """Trains, measures and saves single models of one world.

    Attributes:
        world: the world as far as it is built. Its models may be the starting points of later ones.
    """

    def __init__(self, world: WorldSummary, plan: WorldPlan, progress: Progress | None) -> None:
        self.world, self.plan, self.progress = world, plan, progress
        # Held-out prompts are drawn once for all models.
        self._sources = {task: build_prompts(settings, seed=world.seed) for task, settings in plan.tasks.items()}

    def build(self, name: str, seed: int) -> ModelSummary:
        """Make one model, measure it, and move its folder into place.

        Args:
            name: name of the model in the plan.
            seed: seed of its weights and of its training.

        Raises:
            OutputError: when the disk is full.
        """
        begun = time.perf_counter()
        draft = self.world.folder / f".{name}"
        with drafted(draft, f"model {name!r} in {self.world.folder}"):
            trained = self._train(name, self._begin(name, seed, draft / "begin"), seed, draft)
        longest, seed_of_answers = self.plan.max_new_tokens, self.world.seed
        with closing(Examiner(trained, longest=longest, seed=seed_of_answers, episodes=self.plan.episodes)) as examiner:
            greedy, sampled = self._measure(examiner)
        # Measured first, then moved by one rename, so that a build that is killed never leaves an incomplete model.
        final = self.world.folder / name
        shutil.rmtree(final, ignore_errors=True)
        os.replace(trained, final)
        shutil.rmtree(draft)
        plan = self.plan.models[name]
        return ModelSummary(
            path=final,
            parameters=examiner.student.lm.num_parameters(),
            hidden=plan.shape.hidden,
            layers=plan.shape.layers,
            vocabulary=plan.shape.vocabulary,
            greedy=greedy,
            sampled=sampled,
            seconds=time.perf_counter() - begun,
        )

    def _begin(self, name: str, seed: int, folder: Path) -> Path:
        """Make the folder of the weights that training starts from: a copy of the parent's, a merge, or random ones."""
        plan = self.plan.models[name]
        if isinstance(plan, MergePlan):
            return self._merge(plan, folder)
        if plan.parent is not None:
            return Path(shutil.copytree(self.world.models[plan.parent].path, folder))
        tokenizer = make_tokenizer(shuffled=plan.shuffled)
        model = make_model(plan.shape, seed, pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        share(folder.iterdir())
        return folder

    def _merge(self, plan: MergePlan, folder: Path) -> Path:
        """Make the mean of earlier models with the merge that `opd merge` and `opd orbit` use."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        models = tuple(MergeModel(path=str(self.world.models[name].path)) for name in plan.merged)
        return merge(MergeSettings(models=models, dtype="float32"), folder)

    def _train(self, name: str, model: Path, seed: int, draft: Path) -> Path:
        """Train the model through all its stages and return its folder."""
        stages = self.plan.models[name].stages
        total = sum(stage.plan.steps for stage in stages)
        done = 0
        for index, stage in enumerate(stages):

            def report(step: int, _: int, before: int = done) -> None:
                if self.progress is not None:
                    self.progress(name, before + step, total)

            recipe = recipe_of(
                stage.plan,
                [self.plan.tasks[task] for task in stage.tasks],
                model=model,
                run=draft / f"stage-{index}",
                seed=seed,
                longest=self.plan.max_new_tokens,
                episodes=self.plan.episodes,
            )
            model = train_stage(recipe, report)
            # Progress counts the steps of the model. Each stage is a run whose steps begin at 0.
            done += stage.plan.steps
        return model

    def _measure(self, examiner: Examiner) -> tuple[dict[str, float], dict[str, float]]:
        """Accuracy by task with greedy answers, and at temperature 1."""
        greedy, sampled = {}, {}
        for task, source in self._sources.items():
            greedy[task], sampled[task] = examiner.accuracy(source, self.plan.measured, (0.0, 1.0))
        return greedy, sampled


@contextmanager
def quiet_thread() -> Iterator[None]:
    """Use one torch thread and switch off the progress bars of transformers while the context is open.

    Tiny matrices are faster with one thread, and sums keep their order.
    """
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()
