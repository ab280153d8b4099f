"""What each architecture is said to offer, and that every feature is offered by some target and lacked by another."""

from typing import get_args

import pytest

from fp8core.features import Feature, features
from fp8core.target import HOST, Target

MATRIX = {
    ("cuda", 80): set(),
    ("cuda", 89): {"fp8_mma"},
    ("cuda", 90): {"wgmma", "tma", "clusters", "pdl"},
    ("cuda", 100): {"tcgen05", "mxfp8", "tma", "clusters", "pdl"},
    ("cuda", 103): {"tcgen05", "mxfp8", "tma", "clusters", "pdl"},
    ("cuda", 120): {"fp8_mma", "mxfp8", "tma", "clusters", "pdl"},
    ("hip", 0x90A): set(),
    ("hip", 0x942): {"fp8_mma"},
    ("hip", 0x950): {"fp8_mma", "mxfp8"},
    ("hip", 0x1100): set(),
    ("hip", 0x1201): {"fp8_mma"},
}


@pytest.mark.parametrize(("platform", "arch"), MATRIX)
def test_features_are_those_of_the_architecture(platform, arch):
    assert features(Target(platform, arch, 3, 100, 32, 65536)) == MATRIX[platform, arch]


def test_the_host_has_none_and_no_feature_is_dead():
    assert features(HOST) == frozenset()
    assert set().union(*MATRIX.values()) == set(get_args(Feature))
