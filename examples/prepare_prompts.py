"""Write the prompt files of the recipes for real models: one JSON line per prompt, the chat template applied.

    python examples/prepare_prompts.py deepmath data/deepmath.jsonl --tokenizer Qwen/Qwen3-4B
    python examples/prepare_prompts.py eurus-code data/eurus-code.jsonl --tokenizer Qwen/Qwen3-4B
    python examples/prepare_prompts.py gsm8k data/gsm8k.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct

deepmath is DeepMath-103K at difficulty 6 and above, eurus-code the code part of Eurus-2-RL-Data: the training prompts
of G-OPD (arXiv 2602.12125). docs/first-hour.md uses gsm8k and gsm8k-test (the two splits of GSM8K), deepmath-medium
(DeepMath-103K at difficulty 3 to 5) and math-500 (held out from MATH). The template is applied here, with thinking
switched off, because the student starts from the non-thinking mode. The prompts are then text, to which nothing is
added later.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def deepmath(
    rows: Iterable[Mapping[str, Any]], lowest: float = 6, highest: float = math.inf
) -> Iterator[tuple[str, str | None]]:
    """Questions and answers of the problems within a range of difficulty."""
    for row in rows:
        if lowest <= float(row["difficulty"]) <= highest:
            yield row["question"] + _INSTRUCTION, str(row["final_answer"])


def deepmath_medium(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Questions and answers at difficulty 3 to 5."""
    return deepmath(rows, 3, 5)


def gsm8k(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Questions, and the number behind the mark of the worked solution."""
    for row in rows:
        yield row["question"] + _INSTRUCTION, row["answer"].rpartition("####")[2].strip().replace(",", "")


def math_500(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Problems and answers."""
    for row in rows:
        yield row["problem"] + _INSTRUCTION, str(row["answer"])


def eurus_code(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Problems of the code part, without answers: their tests are not run here."""
    for row in rows:
        if row["ability"] == "code":
            yield next(m["content"] for m in row["prompt"] if m["role"] == "user"), None


_DEEPMATH, _GSM8K = {"path": "zwhe99/DeepMath-103K"}, {"path": "openai/gsm8k", "name": "main"}
SETS = {
    "deepmath": (_DEEPMATH, "train", deepmath),
    "deepmath-medium": (_DEEPMATH, "train", deepmath_medium),
    "eurus-code": ({"path": "PRIME-RL/Eurus-2-RL-Data"}, "train", eurus_code),
    "gsm8k": (_GSM8K, "train", gsm8k),
    "gsm8k-test": (_GSM8K, "test", gsm8k),
    "math-500": ({"path": "HuggingFaceH4/MATH-500"}, "test", math_500),
}
"""Name -> the data set on the hub, its split, and the function that yields its prompts."""


def line(question: str, answer: str | None, tokenizer: Any) -> str:
    """One JSON line: the prompt as the model reads it, and the answer where there is one."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    entry = {"prompt": prompt} | ({} if answer is None else {"answer": answer})
    return json.dumps(entry, ensure_ascii=False) + "\n"


def main() -> None:
    """Read the arguments, write the file."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SETS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", required=True, help="Folder or hub id of the student.")
    parser.add_argument("--rows", help="A local .jsonl file with the data set's columns, in place of the hub.")
    arguments = parser.parse_args()
    hub, split, pick = SETS[arguments.name]
    # A local file is one split, which is always called train.
    source = (
        {"path": "json", "data_files": arguments.rows, "split": "train"} if arguments.rows else {**hub, "split": split}
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with arguments.out.open("w", encoding="utf-8") as file:
        for question, answer in pick(load_dataset(**source)):
            file.write(line(question, answer, tokenizer))
            count += 1
    print(f"{arguments.out}: {count} prompts")


if __name__ == "__main__":
    main()
