"""Errors as objects: each survives a pickle whole, which is how a pool of processes passes it on."""

import copy
import pickle

import pytest

from fp8core.errors import Fp8Error
from fp8core.runtime.launches import LaunchError

ARGUMENTS = {LaunchError: ("launching a kernel failed", 720)}
"""Of the errors that take more than a message."""


def kinds(base):
    """Return a class of errors and all below it, as far as they are imported."""
    return [base, *(kind for below in base.__subclasses__() for kind in kinds(below))]


@pytest.mark.parametrize("kind", kinds(Fp8Error), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))],
    ids=["copy", "deepcopy", *(f"pickle {p}" for p in range(6))],
)
def test_an_error_survives_a_copy(kind, again):
    error = kind(*ARGUMENTS.get(kind, ("x needs float32, got int32",)))
    error.add_note("on the second GPU")
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.__notes__, vars(other)) == (str(error), error.__notes__, vars(error))
