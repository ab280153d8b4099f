"""The memory of weights that may be read early: whose is found where something is written, amid every change, too."""

import random
from contextlib import nullcontext
from itertools import accumulate

import pytest

from fp8core.core import prefetch
from fp8core.core.prefetch import WeightHistory
from fp8core.core.watched import SPARE, Watched
from support.captures import captures  # noqa: F401
from support.threads import in_time

WEIGHT = 0x1000, 0x2000


def test_what_is_watched_is_found_among_many_that_overlap_come_and_go(captures, monkeypatch):
    """Against all ranges of the living, looked at one by one; what the dead had may be found a while longer."""
    watched = Watched()
    monkeypatch.setattr(prefetch, "WATCHED", watched)
    chance = random.Random(5)
    living, rebuilt = [], 0
    for step in range(600):
        if living and chance.random() < 0.3:
            living.pop(chance.randrange(len(living)))
        history = chance.choice(living) if living and chance.random() < 0.2 else WeightHistory()
        places = [0, *(chance.randrange(1, 1 << 14) for _ in range(3))]
        most = watched._rebuild_above
        ends = [0, chance.choice((0, 300)), chance.randrange(1, 60), chance.choice((0, 8))]
        history.move_to(places, [(0, end) for end in ends], 0)
        rebuilt += watched._rebuild_above != most
        if history not in living:
            living.append(history)
        assert watched.starts == sorted(watched.starts)
        assert watched._reach == list(accumulate(watched._reach, max))
        assert len(watched.starts) == len(watched._reach) == len(watched._owners) <= 2 * (3 * 600)
        for _ in range(4):
            start = chance.randrange(1 << 14)
            written = start, start + chance.randrange(1, 80)
            wanted = {one for one in living if any(a < written[1] and written[0] < b for a, b in one.ranges)}
            found = watched.owners_reached_by([(1 << 15, 1 << 16), written])
            assert wanted <= set(found), (step, written)
            assert len(set(found)) == len(found)
        assert not watched.owners_reached_by([(1 << 15, 1 << 16), (0, 1)])
    assert rebuilt < 40


def test_ranges_that_nobody_has_are_left_out_in_the_end(captures, monkeypatch):
    watched = Watched()
    monkeypatch.setattr(prefetch, "WATCHED", watched)
    for at in range(1000):
        WeightHistory().move_to([0, 1000 + 10 * at, 0, 0], [(0, 0), (0, 5), (0, 0), (0, 0)], 0)
    assert len(watched.starts) <= SPARE + 1
    assert not watched.owners_reached_by([(1000, 1005)])
    last = WeightHistory()
    last.move_to([0, 1000 + 10 * 1000, 0, 0], [(0, 0), (0, 5), (0, 0), (0, 0)], 0)
    assert watched.owners_reached_by([(1000 + 10 * 1000, 1000 + 10 * 1000 + 1)]) == [last]


def test_a_write_asks_no_weights_but_those_that_it_reaches(captures, monkeypatch):
    """Or a refresh of all weights would take time with the square of their number."""
    monkeypatch.setattr(prefetch, "WATCHED", Watched())
    asked, plain = [], WeightHistory.write_begins
    monkeypatch.setattr(WeightHistory, "write_begins", lambda self, *given: asked.append(self) or plain(self, *given))
    histories = [WeightHistory() for _ in range(300)]
    for at, history in enumerate(histories):
        history.move_to([0, 1000 * (1 + at), 0, 0], [(0, 0), (0, 900), (0, 0), (0, 0)], 0)
    found = prefetch.announce_write([(150_000, 150_010), (149_950, 151_001)], 7)
    assert set(found) == set(asked) == {histories[149], histories[150]}
    assert len(asked) == 2


@pytest.mark.parametrize("which", ["starts", "_owners", "_reach"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_watched_is_found_amid_a_change_and_after_one_that_was_interrupted(
    captures, monkeypatch, which, interrupted
):
    """By a destructor that a collection of garbage runs, and after Ctrl-C."""
    watched = Watched()
    monkeypatch.setattr(prefetch, "WATCHED", watched)
    histories = [WeightHistory() for _ in range(4)]
    places = [[0, 1000 * at, 0, 0] for at in (2, 3, 4, 1)]
    spans = [(0, 0), (0, 900), (0, 0), (0, 0)]
    written = [(at, at + 1) for _, at, _, _ in places[:3]]
    for history, at in zip(histories[:3], places, strict=False):
        history.move_to(at, spans, 0)
    found = []

    class Changing(list):
        def insert(self, at, one):
            super().insert(at, one)
            found.append(prefetch.announce_write(written, 7))
            if interrupted:
                raise KeyboardInterrupt

    setattr(watched, which, Changing(getattr(watched, which)))
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        histories[3].move_to(places[3], spans, 0)
    assert len(found) == 1
    assert set(found[0]) >= set(histories[:3])
    assert set(prefetch.announce_write(written, 7)) == set(histories[:3])
    setattr(watched, which, list(getattr(watched, which)))
    histories[3].move_to(places[3], spans, 0)
    for history, at in zip(histories, places, strict=True):
        assert prefetch.announce_write([(at[1], at[1] + 1)], 7) == [history]


def test_a_destructor_amid_a_change_of_what_is_watched_may_make_calls(captures, monkeypatch):
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    watched = Watched()
    monkeypatch.setattr(prefetch, "WATCHED", watched)
    found = []

    class Examined(set):
        def clear(self):
            found.append(prefetch.announce_write([WEIGHT], 7))  # as a destructor would

    examiner = type("Examiner", (), {})()
    examiner.examined = Examined()
    prefetch.WATCHED.clear_on_change(examiner)
    made = WeightHistory()
    in_time(made.move_to, [0, WEIGHT[0], 0, 0], [(0, 0), (0, 0x1000), (0, 0), (0, 0)], 0)
    assert found == [[made]]
