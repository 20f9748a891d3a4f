"""Python's garbage collector passes by old objects for a while."""

import gc
import weakref

import pytest

from shardwise.core.collector import old_objects_passed_by


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    """The workers that run the tests have frozen what they imported."""
    gc.unfreeze()


class Ring:
    def __init__(self) -> None:
        self.own = self


def test_old_objects_are_passed_by_and_new_ones_are_not() -> None:
    gc.disable()  # so that it collects when it is asked, and not before
    try:
        old = weakref.ref(Ring())
        with old_objects_passed_by():
            new = weakref.ref(Ring())
            gc.collect()
            assert new() is None
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with old_objects_passed_by():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_an_error_leaves_nothing_frozen() -> None:
    try:
        with old_objects_passed_by():
            raise KeyError
    except KeyError:
        assert gc.get_freeze_count() == 0
