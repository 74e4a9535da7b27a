"""What a rank's mailbox says of an epoch that was offered, taken, or never taken."""

from __future__ import annotations

from ftkit.core.model import Epoch, Seat, Version
from ftkit.keeper.messages import EpochOffer
from ftkit.runtime.inbox import Inbox


def offer(number: int) -> EpochOffer:
    seats = (Seat(replica_id="a", incarnation="i", version=Version(0, 0)),)
    return EpochOffer(epoch=Epoch(id=number, seats=seats, proposer="a", reason="start"), records={})


def test_an_offer_that_was_taken_was_not_missed():
    """Else each planned change would look like a failure to the others, and cut off their last vote."""
    inbox = Inbox(lambda _: None)
    inbox.deliver(offer(3))
    taken = inbox.take_offer(1.0, lambda: False)
    assert taken is not None
    assert taken.epoch.id == 3
    assert inbox.clear_epoch() is None
    assert inbox.offered == 3


def test_an_offer_that_nobody_took_is_told_when_its_epoch_is_left():
    inbox = Inbox(lambda _: None)
    inbox.deliver(offer(3))
    assert inbox.take_offer(1.0, lambda: False) is not None
    inbox.deliver(offer(4))
    assert inbox.clear_epoch() == 4
    assert inbox.take_offer(0.01, lambda: False) is None
