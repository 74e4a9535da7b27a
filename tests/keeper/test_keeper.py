"""The keeper's life with real processes and a real etcd."""

from __future__ import annotations

from tests.keeper.conftest import World


def test_a_group_becomes_a_member_gets_an_epoch_and_leaves(world: World):
    (a,) = world.train("a")
    record = world.member("a")
    assert record["pid"] == a.process.pid
    assert world.get(world.keys.epoch)["id"] == 1
    assert world.get(world.keys.history_of(1)) == world.get(world.keys.epoch)
    a.do("goodbye", False)
    a.wait("Gone")
    assert world.member("a") is None
    assert world.get(world.keys.departed_of("a"))["how"] == "left"
