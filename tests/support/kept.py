"""Cache folders for results that are expensive and the same in the next test run."""

from pathlib import Path

import pytest


def kept_folder(request: pytest.FixtureRequest, name: str) -> Path:
    """Return a folder in pytest's cache or, with ``-p no:cacheprovider``, a temporary folder of this run."""
    cache = getattr(request.config, "cache", None)
    if cache is not None:
        made: Path = cache.mkdir(name)
        return made
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.mktemp(name)
