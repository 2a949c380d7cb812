"""Retrieval on a stored context: values that a document hides (bench/prompts.py), asked for after the cache was changed."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from bench.lab.cache import Stored
from bench.lab.score import log_softmax
from bench.lab.session import Session
from bench.prompts import Hidden


def recall(session: Session, stored: Stored, asked: Sequence[Hidden]) -> tuple[np.ndarray, np.ndarray]:
    """For each hidden value: 1.0 if greedy decoding would give it, and its negative log-likelihood in nats.

    The state is loaded anew for each question, question and value evaluated at once.
    """
    right, nll, data = [], [], stored.bytes()
    for hidden in asked:
        question = session.tokenize(hidden.question, begin=False)
        whole = session.tokenize(f"{hidden.question} {hidden.value}", begin=False)
        session.load(data)
        logits = session.decode(whole[:-1])[len(question) - 1 :].astype(np.float64)
        answer = np.array(whole[len(question) :])
        right.append(float((logits.argmax(axis=1) == answer).all()))
        nll.append(float(-log_softmax(logits)[np.arange(len(answer)), answer].sum()))
    return np.array(right), np.array(nll)
