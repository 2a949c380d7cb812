"""The contexts that methods are measured on: made once with an f16 cache, then loaded once per method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator, Optional, Sequence

import numpy as np

from bench.lab.cache import Geometry, Stored
from bench.lab.keys import Keys, evaluate
from bench.lab.policies import Layout
from bench.lab.score import Scores, compare
from bench.lab.session import LabError, Session

#: Length of the greedy continuation, in tokens: the study's horizon.
HORIZON = 50


@dataclass(frozen=True)
class Setting:
    """``prompt`` + ``decoded`` tokens are stored, ``scored`` more are scored; ``count`` such pieces of the text."""

    name: str
    prompt: int
    decoded: int
    scored: int = 128
    count: int = 3

    @property
    def stored(self) -> int:
        return self.prompt + self.decoded

    def as_setup(self) -> dict:
        return {"setting": self.name, "prompt": self.prompt, "decoded": self.decoded, "scored": self.scored, "contexts": self.count}


#: Rankings flip between short and long prompts: both are measured, always.
SHORT = Setting("short prompt", 64, 128)
LONG = Setting("long prompt", 640, 128)
SETTINGS = (SHORT, LONG)


@dataclass
class Context:
    """One piece of text: its stored cache, what follows, and what the f16 cache made of it."""

    tokens: list[int]
    follow: list[int]
    stored: Stored
    keys: Keys
    layout: Layout
    first: int
    logits: np.ndarray
    greedy: Optional[tuple[list[int], np.ndarray]] = field(default=None)


def pieces(tokens: Sequence[int], setting: Setting) -> Iterator[tuple[list[int], list[int]]]:
    """Stored and scored tokens of each piece, spread evenly over the text. Raises LabError if it is too short.

    Every piece begins with the text's first token, which the model wants there if it wants one.
    """
    need = setting.stored + setting.scored + 1
    if len(tokens) < need * setting.count:
        raise LabError(
            f"the text has {len(tokens)} tokens; {setting.count} contexts of {need} need {need * setting.count}",
            "Give a longer text, or fewer or shorter contexts.",
        )
    stride = (len(tokens) - need) // max(1, setting.count - 1) if setting.count > 1 else 0
    for i in range(setting.count):
        piece = [tokens[0], *tokens[i * stride + 1 : i * stride + need]]
        yield piece[: setting.stored], piece[setting.stored :]


def make(session: Session, geometry: Geometry, old: list[int], follow: list[int], prompt: int) -> Context:
    """Evaluates a context, and checks that the lab itself changes nothing.

    Raises LabError if writing back an untouched state gives other bytes or other logits.
    """
    data, keys, last = evaluate(session, old, geometry)
    stored = Stored.read(data, geometry, keys.order)
    if stored.bytes() != data:
        raise LabError("reading and writing the state changed it", "The harness is wrong: report it.")
    positions = tuple(stored.positions(i) for i in range(geometry.layers))
    layout = Layout(positions, len(old), prompt)
    # The reference goes through the same door as every method: saved, loaded, continued.
    session.load(data)
    logits = session.decode(follow[:-1])
    session.load(stored.changed(lambda layer, side, x: x.copy()).bytes())
    again = session.decode(follow[:-1])
    kld = compare(logits, again, follow).kld.max()
    if kld != 0.0:
        raise LabError(f"an untouched cache is at KLD {kld:.3g} from itself", "The harness is wrong: report it.")
    return Context(old, follow, stored, keys, layout, int(last[0].argmax()), logits)


def score(session: Session, context: Context, changed: Stored) -> Scores:
    """The continuation on a changed cache against the same on the untouched one."""
    session.load(changed.bytes())
    return compare(context.logits, session.decode(context.follow[:-1]), context.follow)


def agreement(session: Session, context: Context, changed: Stored) -> float:
    """Share of HORIZON greedy tokens before the first that differs from the f16 cache's.

    The f16 cache's own greedy text is evaluated at once on the changed cache: up to the first token that another
    one would beat, that is what greedy decoding gives, and what follows a difference cannot be compared.
    """
    if context.greedy is None:
        session.load(context.stored.bytes())
        made = [context.first, *session.greedy(context.first, HORIZON - 1)]
        session.load(context.stored.bytes())
        # Evaluated at once, a near tie may fall the other way than one by one: the reference is the same batch.
        context.greedy = (made, session.decode(made).argmax(axis=1))
    tokens, top = context.greedy
    session.load(changed.bytes())
    return float(np.cumprod(session.decode(tokens).argmax(axis=1) == top).mean())
