"""What kvfmt raises when something is wrong that the user can put right."""

from __future__ import annotations


class KvfmtError(Exception):
    """An expected fault. `message` says what is wrong, `hint` what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UnknownPin(KvfmtError):
    """A llama.cpp version that the patch series does not support."""


class ChecksumMismatch(KvfmtError):
    """A file whose bytes are not the ones that were pinned."""


class DownloadFailed(KvfmtError):
    """The package index could not be reached, or does not have the package."""


class MissingTool(KvfmtError):
    """A program that the build needs is not installed."""


class NoSpace(KvfmtError):
    """Too little free disk space to begin."""


class PatchRefused(KvfmtError):
    """The patch series was not applied; the tree is as it was."""


class BuildFailed(KvfmtError):
    """A compiler, CMake or pip stopped with an error."""


class Busy(KvfmtError):
    """Another process is at work in the same folder."""


class UnknownName(KvfmtError):
    """A model, corpus or format that kvfmt does not have."""
