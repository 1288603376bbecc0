"""`opd doctor --student`: do a student and the teachers of a fleet end their answers with the same tokens?

The student answers a few questions, sampled at temperature 1 as in training. Where an answer ends, the teachers score
its last token and their own stop tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import IncompatibleTeacherError
from opd.fleet.same_tokens import check_same_tokens
from opd.model_path import refuse_missing
from opd.pretrained import check_ids, read_causal_lm, read_config, read_tokenizer
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.stops import STOP_ADVICE, StopSet, ends_differ, generation_stops, shown, stop_set
from opd.wire.bounds import RequestBounds
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem

if TYPE_CHECKING:
    from opd.fleet.source import ScoreSource
    from opd.wire.v1 import teacher_pb2 as pb

_QUESTIONS = ("Say hello.", "What is 2 + 3?", "Name a colour.", "Is the sea salty? Answer yes or no.")
_TOKENS = 128


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An answer that ended by itself: ids of prompt and answer, and log S of the last token, in nats."""

    ids: "np.ndarray[Any, np.dtype[np.uint32]]"
    log_prob: float


class StopExaminer:
    """Holds a student's tokenizer and the ends of its answers.

    Args:
        path: folder or hub id of the student.
        questions: what it is asked; a few simple questions if there are none.

    Raises:
        ConfigError: if the model cannot be loaded.
        UnavailableError: if the hub cannot be reached for it.
    """

    def __init__(self, path: str, questions: Sequence[str] = ()) -> None:
        refuse_missing(path)
        self.tokenizer = read_tokenizer(path)
        check_ids(self.tokenizer, path)
        model = read_causal_lm(path, config=read_config(path), dtype="auto").eval()
        self.stops: StopSet = stop_set(self.tokenizer, generation_stops(path))
        self.questions = tuple(questions) or _QUESTIONS
        self.endings = list(_answers(model, self.tokenizer, self.stops.ids, self.questions))

    def examine(self, fleet: "ScoreSource", info: "pb.TeacherInfo") -> Iterator[tuple[bool, str]]:
        """(whether all is well, finding) pairs for one teacher."""
        try:
            check_same_tokens(fleet, info, self.tokenizer)
        except IncompatibleTeacherError as error:
            yield False, str(error)
            return
        # From here on, ids mean the same text on both sides.
        theirs = sorted(set(info.stop_token_ids) or {info.tokenizer.eos_id} - {-1})
        foreign = [token for token in theirs if token not in self.stops.ids]
        if foreign:
            yield False, f"also ends with {shown(foreign, self.tokenizer)}, after which the student goes on writing"
        if not self.endings:
            yield (
                False,
                (
                    f"none of {len(self.questions)} answers of the student ended within {_TOKENS} tokens; ask it "
                    "something else with --question"
                ),
            )
            return
        ratio, event = self._measure(fleet, info, theirs)
        text = f"where {len(self.endings)} answers of the student end, log T - log S is {ratio:.2f} nats"
        if ends_differ(ratio, event):
            yield False, f"{text}, but {event:.2f} if its own stop tokens count too: {STOP_ADVICE}"
        else:
            yield True, text

    def _measure(self, fleet: "ScoreSource", info: "pb.TeacherInfo", theirs: list[int]) -> tuple[float, float | None]:
        """Mean of log T - log S at the last tokens, and the same with all of the teacher's stop tokens for T; nats.

        The latter is None if the teacher cannot score ids that the caller chooses, as with SGLang.
        """
        spec, gather = PayloadSpec.sampled(), None
        if theirs and RequestBounds.from_info(info).payloads >= {PayloadKind.GATHER}:
            spec, gather = PayloadSpec.gather(len(theirs), "f32"), np.array([theirs], dtype=np.uint32)
        items = [ScoreItem(ending.ids, len(ending.ids) - 1, gather) for ending in self.endings]
        ratios, events = [], []
        for ending, scores in zip(self.endings, fleet.score(info.name, items, spec), strict=True):
            if scores.sampled is not None:
                ratios.append(float(scores.sampled[0]) - ending.log_prob)
            if scores.values is not None:
                events.append(float(np.logaddexp.reduce(scores.values[0].astype(np.float64))) - ending.log_prob)
        return float(np.mean(ratios)), float(np.mean(events)) if events else None


def _answers(model: Any, tokenizer: Any, stops: Sequence[int], questions: Sequence[str]) -> Iterator[EndedAnswer]:
    """The student's answers that ended by themselves."""
    import torch

    for question in questions:
        chat = bool(getattr(tokenizer, "chat_template", None))
        prompt = Prompt.make([{"role": "user", "content": question}] if chat else question)
        ids = torch.tensor([encode_prompt(prompt, tokenizer)])
        # Seeded per question, so that answers are the same each time and do not depend on earlier questions.
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(stops) or None,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        whole, last = found.sequences[0], int(found.sequences[0, -1])
        if last in stops:
            # Without the columns that pad the head, which belong to no token and which servers leave out as well.
            logits = found.logits[-1][0, : len(tokenizer)].float()
            yield EndedAnswer(whole.numpy().astype(np.uint32), float(logits.log_softmax(-1)[last]))
