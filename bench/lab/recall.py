"""Retrieval on a stored context: facts that were stated early, asked for after the cache was changed.

Answers are words, not numbers: the smallest models do not copy four digits even from an f16 cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from bench.lab.cache import Stored
from bench.lab.score import log_softmax
from bench.lab.session import Session

THINGS = (
    "fox", "whale", "owl", "horse", "spider", "tiger", "goose", "rabbit", "turtle", "lizard", "lamp", "table", "clock",
    "bridge", "ladder", "violin", "kettle", "basket", "mirror", "carpet", "button", "needle", "bottle", "candle", "hammer",
    "rocket", "tractor", "balloon", "castle", "garden", "river", "island", "forest", "desert", "mountain", "tunnel",
    "market", "library", "museum", "theater", "doctor", "farmer", "painter", "soldier", "teacher", "lawyer", "singer", "dancer",
)
PLACES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Cairo", "Sydney", "Boston", "Chicago", "Dallas", "Denver",
    "Moscow", "Delhi", "Toronto", "Vienna", "Dublin", "Athens", "Oslo", "Lima", "Seattle", "Miami", "Houston", "Austin",
)
@dataclass(frozen=True)
class Question:
    """``ask`` ends where the answer begins."""

    ask: str
    answer: str


def questions(seed: int, statements: int, asked: int) -> tuple[str, list[Question]]:
    """A text of ``statements`` lines, and ``asked`` questions spread evenly over it. The same for one seed."""
    rng = random.Random(seed)
    names = rng.sample(THINGS, len(THINGS))
    places = [rng.choice(PLACES) for _ in names]
    lines = [f"{name}: {place}" for name, place in zip(names[:statements], places)]
    chosen = [i * statements // asked for i in range(asked)]
    return "\n".join(lines), [Question(f"\n{names[i]}:", places[i]) for i in chosen]


def recall(session: Session, stored: Stored, found: list[Question]) -> tuple[np.ndarray, np.ndarray]:
    """For each question: 1.0 if greedy decoding would give the answer, and the answer's negative log-likelihood in nats.

    The state is loaded anew for each question, ask and answer evaluated at once.
    """
    right, nll, data = [], [], stored.bytes()
    for question in found:
        ask = session.tokenize(question.ask, begin=False)
        whole = session.tokenize(question.ask + " " + question.answer, begin=False)
        session.load(data)
        logits = session.decode(whole[:-1])[len(ask) - 1 :].astype(np.float64)
        answer = np.array(whole[len(ask) :])
        right.append(float((logits.argmax(axis=1) == answer).all()))
        nll.append(float(-log_softmax(logits)[np.arange(len(answer)), answer].sum()))
    return np.array(right), np.array(nll)
