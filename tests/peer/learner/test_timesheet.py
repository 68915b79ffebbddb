"""What a learner's time between steps is booked as."""

from dugnad.peer.learner.protocol import Spent
from dugnad.peer.learner.timesheet import Timesheet


def test_waiting_is_rest_up_to_its_owners_share_and_want_of_work_after_it() -> None:
    times = Timesheet()
    times.waited(10.0, 13.0, 12.0)
    assert times.take() == Spent(rested=2.0, starved=1.0)


def test_waiting_without_a_rest_that_is_due_is_want_of_work() -> None:
    times = Timesheet()
    times.waited(10.0, 13.0, 4.0)
    assert times.take() == Spent(starved=3.0)


def test_a_rest_that_a_message_ends_early_counts_no_further_than_it_lasted() -> None:
    times = Timesheet()
    times.waited(10.0, 10.5, 12.0)
    times.served(0.25)
    times.waited(10.75, 12.0, 12.0)
    assert times.take() == Spent(served=0.25, rested=1.75)


def test_what_was_taken_is_not_counted_again() -> None:
    times = Timesheet()
    times.served(1.0)
    first = times.take()
    times.served(0.5)
    assert (first, times.take()) == (Spent(served=1.0), Spent(served=0.5))
    assert first + Spent(0.5, 4.0, 1.0, 2.0) == Spent(1.5, 4.0, 1.0, 2.0)


def test_other_work_among_what_the_daemon_asks_is_counted_once() -> None:
    times = Timesheet()
    times.asked(2.0, served=True)
    times.served(2.5)
    times.asked(1.0)
    assert times.take() == Spent(served=0.5, asked=3.0)
