"""Anchored edits: what a template says, and what it makes of an upstream file.

A template (TOML) lists new files and edits. An edit names an anchor, whole upstream lines
that must occur exactly once, and text that goes before, after or instead of it. Anchors
carry the series from one llama.cpp version to the next; line numbers would not.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WHERE = ("before", "after", "replace")


class EditError(Exception):
    """An edit that cannot be made; the message names the template, the file and the anchor."""


@dataclass(frozen=True)
class Edit:
    path: str
    anchor: str
    where: str
    text: str


@dataclass(frozen=True)
class NewFile:
    """``each_format`` makes one file per registered format; path and template may then say {{ fmt.name }}.
    ``each_pair`` one per pair of fattn_pairs.py, {{ pair.name }}.
    """

    path: str
    template: str
    each_format: bool = False
    each_pair: bool = False


@dataclass(frozen=True)
class Patch:
    """One patch of the series: a subject, a reason, new files and edits."""

    name: str
    subject: str
    why: str
    files: tuple[NewFile, ...]
    edits: tuple[Edit, ...]


def load(path: Path) -> Patch:
    """Read one template. Raises EditError for a missing or unknown key."""
    with path.open("rb") as handle:
        raw = tomllib.load(handle)
    try:
        files = tuple(NewFile(**entry) for entry in raw.pop("file", []))
        edits = tuple(Edit(**entry) for entry in raw.pop("edit", []))
        patch = Patch(path.stem, raw.pop("subject"), raw.pop("why"), files, edits)
    except (KeyError, TypeError) as error:
        raise EditError(f"{path.name}: {error}") from None
    if raw:
        raise EditError(f"{path.name}: unknown keys {sorted(raw)}")
    for edit in edits:
        if edit.where not in WHERE:
            raise EditError(f"{path.name}: {edit.path}: where = {edit.where!r}, not one of {WHERE}")
    return patch


@dataclass(frozen=True)
class Span:
    """Lines [start, stop) of the original that ``lines`` replace."""

    start: int
    stop: int
    lines: tuple[str, ...]


def locate(original: list[str], edit: Edit, patch_name: str) -> list[Span]:
    """The spans that an edit changes. Raises EditError unless its anchor occurs exactly once."""
    anchor = edit.anchor.strip("\n").split("\n")
    hits = [i for i in range(len(original) - len(anchor) + 1) if original[i : i + len(anchor)] == anchor]
    if len(hits) != 1:
        found = "not found" if not hits else f"found {len(hits)} times"
        raise EditError(f"{patch_name}: {edit.path}: anchor {found}:\n{edit.anchor.strip(chr(10))}")
    lines = tuple(edit.text.strip("\n").split("\n")) if edit.text.strip("\n") else ()
    start, stop = hits[0], hits[0] + len(anchor)
    if edit.where == "before":
        return [Span(start, start, lines)]
    if edit.where == "after":
        return [Span(stop, stop, lines)]
    # Anchor lines that the replacement keeps are context, not change.
    changes = difflib.SequenceMatcher(None, anchor, lines, autojunk=False).get_opcodes()
    return [Span(start + i0, start + i1, lines[j0:j1]) for tag, i0, i1, j0, j1 in changes if tag != "equal"]


def apply_spans(original: list[str], spans: list[Span]) -> list[str]:
    """The edited lines."""
    out: list[str] = []
    position = 0
    for span in spans:
        out += original[position : span.start]
        out += span.lines
        position = span.stop
    return out + original[position:]


def ordered(spans: list[Span], path: str) -> list[Span]:
    """Spans in file order, those that insert at one place in template order. Raises EditError if two overlap."""
    result = sorted(spans, key=lambda s: (s.start, s.stop))
    for first, second in zip(result, result[1:]):
        if first.stop > second.start:
            raise EditError(f"{path}: edits of lines {first.start + 1} and {second.start + 1} overlap")
    return result


def unified(path: str, original: list[str] | None, spans: list[Span], context: int = 3) -> str:
    """A git-style diff of one file. ``original`` None means a new file given by its single span."""
    if original is None:
        body = spans[0].lines
        head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        return head + f"@@ -0,0 +1,{len(body)} @@\n" + "".join(f"+{line}\n" for line in body)
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.start - groups[-1][-1].stop <= 2 * context:
            groups[-1].append(span)
        else:
            groups.append([span])
    out = [f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"]
    shift = 0
    for group in groups:
        start = max(0, group[0].start - context)
        stop = min(len(original), group[-1].stop + context)
        lines: list[str] = []
        position, added, removed = start, 0, 0
        for span in group:
            lines += [f" {line}\n" for line in original[position : span.start]]
            lines += [f"-{line}\n" for line in original[span.start : span.stop]]
            lines += [f"+{line}\n" for line in span.lines]
            removed += span.stop - span.start
            added += len(span.lines)
            position = span.stop
        lines += [f" {line}\n" for line in original[position:stop]]
        old = stop - start
        out.append(f"@@ -{start + 1},{old} +{start + 1 + shift},{old - removed + added} @@\n" + "".join(lines))
        shift += added - removed
    return "".join(out)
