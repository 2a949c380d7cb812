"""Prompts from a seed: short ones, hard ones, long ones, and documents that hide values to be recalled.

The same seed gives the same prompts everywhere; their hash goes into every row.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvfmt.errors import UnknownName
from kvfmt.subjects import Text

_TOPICS = (
    "the tides", "a steam engine", "bees", "the invention of paper", "a violin", "volcanoes", "the human heart", "a sailing ship",
    "money", "the moon", "glass", "a lighthouse", "bread", "the telephone", "rivers", "a library", "snow", "the compass", "wool", "a clock",
)
_FORMS = (
    "Explain to a child how {t} came to be important.",
    "Write the first paragraph of a short story about {t}.",
    "List five facts about {t}, each in one sentence.",
    "What would a world without {t} look like?",
    "Compare {t} with {u}.",
    "Write a letter in which a traveller describes {t} to a friend who only knows {u}.",
)
_ADJECTIVES = ("amber", "silent", "northern", "hollow", "crimson", "gentle", "rusty", "early", "distant", "velvet", "broken", "golden", "narrow", "winter", "humble", "bitter")
_NOUNS = ("falcon", "harbour", "lantern", "meadow", "anchor", "garden", "mirror", "station", "bridge", "orchard", "quarry", "tunnel", "castle", "island", "engine", "market")
_PEOPLE = ("The miller", "A clerk", "The captain", "My neighbour", "The gardener", "A student", "The baker", "An old surveyor", "The teacher", "A stranger")
_DEEDS = (
    "walked along the canal", "mended the fence behind the barn", "counted the boats before noon", "wrote two letters", "swept the yard",
    "carried water up the hill", "looked for the lost key", "painted the door green", "sold apples at the gate", "slept through the storm",
)
_TIMES = ("On Monday", "Late in spring", "Before the rain", "That evening", "In the coldest week", "After the fair", "At first light", "A year later", "Towards the end of summer", "Once")
_ENDS = (
    "and nobody asked why.", "as people in the village used to do.", "while the children watched.", "because there was nothing else to do.",
    "and came home tired.", "although the wind was strong.", "and thought about the sea.", "just as the bells began to ring.",
)

SETS = ("short", "hard", "long")


def _sum(rng: random.Random) -> str:
    a, b = rng.randint(120, 989), rng.randint(120, 989)
    sign = rng.choice("+-")
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def _arithmetic(rng: random.Random) -> str:
    lines = "\n".join(_sum(rng) for _ in range(8))
    return f"Exact results of sums and differences:\n{lines}\n{_sum(rng).split('=')[0]}="


def _code(rng: random.Random) -> str:
    noun, field = rng.choice(_NOUNS), rng.choice(("weight", "height", "price", "age", "count"))
    task = rng.choice((
        f"Return the {noun} with the largest {field}, or None if there is none.",
        f"Group the {noun}s by {field} and return a dictionary from {field} to a sorted list of names.",
        f"Yield running means of the {field} of the last n {noun}s.",
        f"Parse lines like 'name: {field}' into {noun}s, skipping blank lines and comments.",
    ))
    return (
        f"from dataclasses import dataclass\n\n\n@dataclass\nclass {noun.title()}:\n    name: str\n    {field}: int\n\n\n"
        f"def solve({noun}s: list[{noun.title()}], n: int = {rng.randint(2, 9)}):\n    \"\"\"{task}\"\"\"\n"
    )


def _sentence(rng: random.Random) -> str:
    return f"{rng.choice(_TIMES)} {rng.choice(_PEOPLE).lower()} {rng.choice(_DEEDS)} {rng.choice(_ENDS)}"


def _short(rng: random.Random) -> str:
    t, u = rng.sample(_TOPICS, 2)
    return f"Question: {rng.choice(_FORMS).format(t=t, u=u)}\nAnswer:"


def _long(rng: random.Random) -> str:
    story = " ".join(_sentence(rng) for _ in range(70))
    return f"{story}\n\nQuestion: {rng.choice(('What happens next in this story?', 'Sum up the story in three sentences.', 'Who appears in this story, and what do they do?'))}\nAnswer:"


def prompts(kind: str, count: int, seed: int) -> list[str]:
    """Prompts of a set: "short" questions of two dozen tokens, "hard" (code and arithmetic by turns), "long" ones of
    about a thousand tokens. Raises UnknownName."""
    if kind not in SETS:
        raise UnknownName(f"unknown set of prompts '{kind}'", "Known: " + ", ".join(SETS))
    rng = random.Random(f"{kind} {seed}")
    makers = {"short": (_short,), "hard": (_code, _arithmetic), "long": (_long,)}[kind]
    made: dict[str, None] = {}
    while len(made) < count:
        made[makers[len(made) % len(makers)](rng)] = None
    return list(made)


def as_text(name: str, parts: list[str]) -> Text:
    """Prompts as one text, for its hash."""
    return Text(name, "\0".join(parts))


@dataclass(frozen=True)
class Hidden:
    """A value to be recalled: ``question`` continues with ``value``; it stands at ``depth``, 0 to 1, of the document."""

    question: str
    value: str
    depth: float


@dataclass(frozen=True)
class Document:
    """Sentences, some of which hide values."""

    sentences: list[str]
    hidden: list[Hidden]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def document(n_sentences: int, keys: int, seed: str) -> Document:
    """``keys`` values at even depths among ``n_sentences`` others."""
    rng = random.Random(f"document {seed}")
    sentences = [_sentence(rng) for _ in range(n_sentences)]
    pairs = [f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS]
    hidden = []
    for i, name in enumerate(rng.sample(pairs, keys)):
        depth = (i + 0.5) / keys
        fact = f"The secret code of the {name} is"
        value = f"{rng.randint(10000, 99999)}"
        # From the front, so that earlier ones move by one place each.
        sentences.insert(round(depth * n_sentences) + i, f"{fact} {value}.")
        hidden.append(Hidden(f"\n\nAs the text says, the secret code of the {name} is", value, depth))
    return Document(sentences, hidden)
