"""When a weight may be read before the predecessor on the stream has ended: only if nothing can still be writing it."""

import pytest

from fp8core.core import prefetch
from fp8core.core.prefetch import WeightHistory
from fp8core.core.watched import Watched
from fp8core.runtime import device
from fp8core.target import Target
from support.captures import captures  # noqa: F401

PLACES, SPANS = [0, 0x1000, 0x3000, 0x4000], [(0, 0), (0, 0x1000), (0, 0x40), (0, 0x20)]
MOVED = [0, 0x9000, 0x3000, 0x4000]
WEIGHT, SCALE, BIAS = (0x1000, 0x2000), (0x3000, 0x3040), (0x4000, 0x4020)


@pytest.fixture
def history(captures):
    made = WeightHistory()
    made.move_to(PLACES, SPANS, 0)
    return made


def written_over(ranges, stream):
    """Return whether a launch of the library that writes there, and that has been made, wrote over a weight."""
    found = prefetch.announce_write(ranges, stream)
    found.end()
    return bool(found)


def test_the_first_launch_on_each_stream_waits(history):
    for stream in (7, 8):
        assert not history.may_prefetch(stream, PLACES)
        history.waited(stream, PLACES, SPANS, history.writes)
        assert history.may_prefetch(stream, PLACES)


def test_the_stream_of_a_thread_is_no_stream_to_rely_on(history):
    history.waited(device.PER_THREAD, PLACES, SPANS, history.writes)
    assert not history.may_prefetch(device.PER_THREAD, PLACES)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_another_address_waits_and_so_does_the_way_back(history, place):
    history.waited(7, PLACES, SPANS, history.writes)
    moved = [at + 0x10 * (i == place) for i, at in enumerate(PLACES)]
    assert not history.may_prefetch(7, moved)
    history.waited(7, moved, SPANS, history.writes)
    assert history.may_prefetch(7, moved)
    assert not history.may_prefetch(7, PLACES)


@pytest.mark.parametrize("written", [WEIGHT, SCALE, BIAS, (0x1FFF, 0x2000), (0, 0x1001), (0x4010, 0x9000)], ids=str)
def test_what_the_library_writes_is_waited_for_once(history, written):
    history.waited(7, PLACES, SPANS, history.writes)
    assert written_over([written], 9)
    assert not history.may_prefetch(7, PLACES)
    history.waited(7, PLACES, SPANS, history.writes)
    assert history.may_prefetch(7, PLACES)


def test_a_launch_of_another_thread_may_come_before_the_write_that_has_been_announced(history):
    """What waits on the stream before the writing kernel says nothing of what comes after it."""
    before = history.writes
    found = prefetch.announce_write([WEIGHT], 7)
    history.waited(7, PLACES, SPANS, before)  # launched before the announcement
    assert not history.may_prefetch(7, PLACES)
    within = history.writes
    history.waited(7, PLACES, SPANS, within)
    assert not history.may_prefetch(7, PLACES)
    found.end()
    history.waited(7, PLACES, SPANS, within)  # launched before the writing kernel, noted after it
    assert not history.may_prefetch(7, PLACES)
    history.waited(7, PLACES, SPANS, history.writes)
    assert history.may_prefetch(7, PLACES)


def test_what_waited_before_a_write_is_at_no_time_relied_on_after_it(captures, monkeypatch):
    """Another thread may ask amid the noting, which is more than one step."""
    monkeypatch.setattr(prefetch, "WATCHED", Watched())
    history = WeightHistory()
    history.move_to(PLACES, SPANS, 0)
    within, found = history.writes, []

    class Noted(dict):
        def __setitem__(self, stream, noted):
            super().__setitem__(stream, noted)
            found.append(history.may_prefetch(stream, PLACES))

    history._waited_with = Noted()
    written_over([WEIGHT], 7)
    history.waited(7, PLACES, SPANS, within)  # launched before the writing kernel, noted after it
    history.waited(7, PLACES, SPANS, history.writes)
    assert found == [False, True]


def test_what_waits_amid_the_end_of_a_write_is_not_relied_on_after_it(captures, monkeypatch):
    """The end of a write is two steps, between which another thread may note a launch that came before the write."""
    monkeypatch.setattr(prefetch, "WATCHED", Watched())

    class Calls(set):
        def discard(self, call):
            super().discard(call)
            history.waited(7, PLACES, SPANS, within)

    history = WeightHistory()
    history.move_to(PLACES, SPANS, 0)
    history.writing = Calls()
    found = prefetch.announce_write([WEIGHT], 7)
    within = history.writes
    found.end()
    assert not history.may_prefetch(7, PLACES)


def test_a_write_that_is_given_up_between_announcing_and_launching_is_not_waited_for_ever_after(history):
    """As Ctrl-C may end a call anywhere: nobody has what was announced then."""
    history.waited(7, PLACES, SPANS, history.writes)
    found = prefetch.announce_write([WEIGHT], 7)
    assert history.writing
    del found
    assert not history.writing
    assert not history.may_prefetch(7, PLACES)
    history.waited(7, PLACES, SPANS, history.writes)
    assert history.may_prefetch(7, PLACES)


def test_the_end_of_a_write_that_is_told_twice_is_not_that_of_another(history):
    first, second = (prefetch.announce_write([WEIGHT], 7) for _ in range(2))
    first.end()
    writes = history.writes
    first.end()
    del first
    assert history.writes == writes
    history.waited(7, PLACES, SPANS, writes)
    assert not history.may_prefetch(7, PLACES)
    second.end()


def test_of_two_threads_that_write_the_last_one_counts(history):
    first, second = (prefetch.announce_write([WEIGHT], stream) for stream in (7, 8))
    first.end()
    history.waited(7, PLACES, SPANS, history.writes)
    assert not history.may_prefetch(7, PLACES)
    second.end()
    history.waited(7, PLACES, SPANS, history.writes)
    assert history.may_prefetch(7, PLACES)


@pytest.mark.parametrize("written", [(0, 0x1000), (0x2000, 0x3000), (0x3040, 0x4000), (0x4020, 0x5000)], ids=str)
def test_what_is_written_beside_a_weight_is_not(history, written):
    history.waited(7, PLACES, SPANS, history.writes)
    assert not written_over([written], 7)
    assert history.may_prefetch(7, PLACES)


def test_a_capture_reads_early_what_was_known_before_it(history, captures):
    captures[7] = 1
    assert history.may_prefetch(7, PLACES)
    assert not history.may_prefetch(7, MOVED)


def test_what_becomes_known_or_is_written_in_a_capture_waits_in_it_and_not_in_the_next(history, captures):
    captures[7] = 1
    history.waited(7, MOVED, SPANS, history.writes)
    assert not history.may_prefetch(7, MOVED)
    captures[7] = 2
    assert history.may_prefetch(7, MOVED)
    assert written_over([(0x9000, 0x9001)], 7)
    assert not history.may_prefetch(7, MOVED)
    captures[7] = 3
    assert history.may_prefetch(7, MOVED)
    del captures[7]
    assert not history.may_prefetch(7, MOVED)


def test_captures_under_way_at_a_time_each_wait_for_what_they_write(history, captures):
    captures.update({7: 1, 8: 2})
    for stream in (7, 8):
        assert written_over([WEIGHT], stream)
    assert not history.may_prefetch(7, PLACES)
    assert not history.may_prefetch(8, PLACES)
    captures[9] = 3
    assert history.may_prefetch(9, PLACES)


def test_a_reversed_scale_is_watched_where_it_lies(captures):
    """Its address is that of its last element in memory."""
    history = WeightHistory()
    history.move_to(PLACES, [(0, 0), (0, 0x1000), (-0x3C, 4), (0, 0x20)], 0)
    history.waited(7, PLACES, SPANS, history.writes)
    assert not written_over([(0x3004, 0x3040)], 7)
    assert history.may_prefetch(7, PLACES)
    assert written_over([(0x2FC4, 0x2FC8)], 7)
    assert not history.may_prefetch(7, PLACES)


def test_a_capture_settles_nothing(history, captures):
    captures[7] = 1
    history.waited(7, PLACES, SPANS, history.writes)
    del captures[7]
    assert not history.may_prefetch(7, PLACES)


def test_what_is_written_in_a_capture_waits_afterwards_too(history, captures):
    history.waited(7, PLACES, SPANS, history.writes)
    captures[7] = 1
    assert history.may_prefetch(7, PLACES)
    assert written_over([WEIGHT], 7)
    assert not history.may_prefetch(7, PLACES)
    del captures[7]
    assert not history.may_prefetch(7, PLACES)


def test_ranges_of_several_layers_are_found(history):
    tied, other = WeightHistory(), WeightHistory()
    tied.move_to(PLACES, SPANS, 0)
    other.move_to([0, 0x100000, 0, 0], [(0, 0), (0, 0x100000), (0, 0), (0, 0)], 0)
    for each, places in ((history, PLACES), (tied, PLACES), (other, [0, 0x100000, 0, 0])):
        each.waited(7, places, SPANS, each.writes)
    version = prefetch.WATCHED.version
    assert written_over([(0x1800, 0x1801)], 7)
    assert not history.may_prefetch(7, PLACES)
    assert not tied.may_prefetch(7, PLACES)
    assert other.may_prefetch(7, [0, 0x100000, 0, 0])
    assert prefetch.WATCHED.version == version
    another = WeightHistory()
    another.move_to(MOVED, SPANS, 0)
    assert prefetch.WATCHED.version > version


def test_only_devices_with_programmatic_launches_are_concerned():
    assert prefetch.applies(Target("cuda", 90, 0, 132, 32, 1))
    assert not prefetch.applies(Target("cuda", 80, 0, 108, 32, 1))
    assert not prefetch.applies(Target("hip", 0x942, 0, 304, 64, 1))
