"""What it costs that a teacher is read in its canonical tokens of a text and not in all of its tokenizations.

A student writes four letters, a or b, as a chain. A teacher has the tokens a, b and ab; its canonical tokens of a text
have ab wherever it stands. It gives the token b after a, which is never canonical, a logit that is lower by `trained`.
"""

from itertools import product

import torch
from torch import Tensor

LETTERS = 4
TEXTS = ["".join(letters) for letters in product("ab", repeat=LETTERS)]
_TOKENS = ("a", "b", "ab")


def tokenizations(text: str) -> list[tuple[int, ...]]:
    """All ways to cut a text into the teacher's tokens, the canonical one first."""
    if not text:
        return [()]
    return [
        (token, *rest)
        for token in (2, 0, 1)
        if text.startswith(_TOKENS[token])
        for rest in tokenizations(text[len(_TOKENS[token]) :])
    ]


def biases(trained: float, seed: int) -> tuple[float, float]:
    """Mean log T(text) - log T(canonical) in nats per letter, and the bias of the gradient of the KL, relative."""
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(3, 2, generator=generator, dtype=torch.float64).requires_grad_()  # at the start, after a, b
    teacher = torch.randn(4, 3, generator=generator, dtype=torch.float64)  # at the start, after a, b and ab
    teacher[1, 1] -= trained
    spoken, log_q = student.log_softmax(-1), teacher.log_softmax(-1)

    def written(tokens: tuple[int, ...], model: Tensor) -> Tensor:
        before = (0, *(token + 1 for token in tokens[:-1]))
        return torch.stack([model[state, token] for state, token in zip(before, tokens, strict=True)]).sum()

    log_p = torch.stack([written(tuple("ab".index(letter) for letter in text), spoken) for text in TEXTS])
    every = [torch.stack([written(tokens, log_q) for tokens in tokenizations(text)]) for text in TEXTS]
    whole, canonical = (
        torch.stack(found) for found in zip(*((one.logsumexp(0), one[0]) for one in every), strict=True)
    )
    gradients = [
        torch.autograd.grad((log_p.exp() * (log_p - target)).sum(), student, retain_graph=True)[0]
        for target in (whole, canonical)
    ]
    gap = float((log_p.exp() * (whole - canonical)).sum().detach() / LETTERS)
    return gap, float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
