"""Cost of a teacher with another tokenizer on the student's side: what translating the rows of a step takes.

    python benchmarks/student_translation.py [--rows 1024] [--tokens 512] [--student FOLDER] [--teacher FOLDER]

Prints the CPU seconds of encoding alone (the library's part) and of the whole translation with its scores, and the
share of a step that takes `--step-seconds`. Without folders, two byte-level tokenizers of 8,000 and 32,000 pieces are
trained on the project's own pages.
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opd.tasks.prompt import Prompt
from opd.wire.types import Scores
from opd.wire.v1 import teacher_pb2 as pb
from student.scoring.translate import Translator

ROOT = Path(__file__).parent.parent


def trained(size: int, texts: list[str]) -> Any:
    """A byte-level BPE tokenizer of `size` pieces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--student")
    parser.add_argument("--teacher")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="CPU seconds of a step, for the share")
    asked = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    student, teacher = (
        AutoTokenizer.from_pretrained(folder) if folder else trained(size, texts)
        for folder, size in ((asked.student, 8000), (asked.teacher, 32000))
    )
    info = pb.TeacherInfo(
        name="teacher",
        limits=pb.Limits(max_sequence_tokens=1 << 20),
        tokenizer=pb.TokenizerInfo(eos_id=teacher.eos_token_id),
    )
    translator = Translator(info, teacher, student, [student.eos_token_id])
    ids = np.array(student("\n".join(texts), add_special_tokens=False)["input_ids"], np.uint32)
    starts = np.random.default_rng(0).integers(0, len(ids) - asked.tokens, asked.rows)
    rows = [ids[start : start + asked.tokens] for start in starts]
    behaviour, prompt = np.full(asked.tokens, -1.0, np.float32), Prompt.make("Say it.")
    begin = time.process_time()
    for row in rows:
        answer = SimpleNamespace(response_ids=row, episode=None)
        found = translator.translate(answer, prompt)  # type: ignore[arg-type]
        found.scores(Scores(sampled=np.full(len(found.of), -1.0, np.float32)), behaviour)
    whole = time.process_time() - begin
    words = [translator.student.words.text(row).tobytes().decode(errors="replace") for row in rows]
    begin = time.process_time()
    for text in words:
        teacher.backend_tokenizer.encode(text, add_special_tokens=False)
    alone = time.process_time() - begin
    share = f", {whole / asked.step_seconds:.2%} of a step" if asked.step_seconds else ""
    print(
        f"{asked.rows} rows of {asked.tokens} tokens: {whole:.2f} CPU s ({1e6 * whole / asked.rows / asked.tokens:.2f} "
        f"us a token), {whole / alone:.2f} times the library's encoding alone{share}"
    )


if __name__ == "__main__":
    main()
