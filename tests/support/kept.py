"""Folders for what is dear to make and the same in the next run."""

from pathlib import Path

import pytest


def kept_folder(request: pytest.FixtureRequest, name: str) -> Path:
    """Return a folder of pytest's cache; with ``-p no:cacheprovider``, which has none, one of this run alone."""
    cache = getattr(request.config, "cache", None)
    if cache is not None:
        made: Path = cache.mkdir(name)
        return made
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.mktemp(name)
