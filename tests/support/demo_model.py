"""A fixture for the demo's model, which test modules import."""

import os

import pytest

from fp8core import demo
from fp8core.errors import CheckpointError


@pytest.fixture(scope="session")
def folder():
    """Return the model's folder; the model is fetched if it is not installed."""
    found = demo.model_folder()
    if found is not None:
        return found
    try:
        return demo.fetch_model()
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the model cannot be fetched: {error}")
