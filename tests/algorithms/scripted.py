"""A world of replicas in one process that goes the way a test scripts it.

It plays the manager's part towards data and optimizer: who is a member, who is healed, how the vote ends.
No tensors travel here; what needs collectives is tested over gloo.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

from ftkit.errors import FtkitError

_names = itertools.count()


class ScriptedManager:
    """One replica's view; `World.form` decides about its membership, the test calls `vote`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.replica_id = f"replica-{next(_names):06d}"
        self.step = 0
        self.in_step = False
        self._begun_by: tuple[str, ...] = ()
        self.updates: list[Callable[[], bool | None]] = []
        self.dropped = 0
        self.weight: float | None = None
        self.no_weight = False
        self.errors: list[Exception] = []
        self.starts = 0
        self.finished_with: list[BaseException | None] = []
        self.next_votes: list[bool] = []
        self._states: dict[str, tuple[Callable[[object], None], Callable[[], object]]] = {}
        self._on_commit: list[Callable[[], None]] = []
        self._on_abort: list[Callable[[], None]] = []

    def register_state_dict_fn(
        self, name: str, load: Callable[[object], None], save: Callable[[], object]
    ) -> None:
        self._states[name] = (load, save)

    def on_commit(self, fn: Callable[[], None]) -> None:
        self._on_commit.append(fn)

    def on_abort(self, fn: Callable[[], None]) -> None:
        self._on_abort.append(fn)

    def start_step(self) -> None:
        self.starts += 1
        if self.in_step:
            return
        self._world.admit(self)
        self._begun_by = self.members()
        self.in_step = True

    def step_members(self) -> tuple[str, ...]:
        return self._begun_by

    def members(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self._world.members)

    def register_update(self, fn: Callable[[], bool | None]) -> None:
        self.updates.append(fn)

    def drop_gradients(self) -> None:
        self.dropped += 1

    def current_step(self) -> int:
        return self.step

    def set_weight(self, w: float) -> None:
        if self.no_weight:
            raise FtkitError("the weights of all members are zero in this step")
        self.weight = w

    def report_error(self, e: Exception) -> None:
        self.errors.append(e)

    def should_commit(self) -> bool:
        committed = self.next_votes.pop(0) if self.next_votes else True
        if not committed:
            self.abort()
        return committed

    def finish_step(self, error: BaseException | None = None) -> None:
        self.finished_with.append(error)
        if error is None:
            self.commit()

    def commit(self) -> None:
        self.step += 1
        self.weight, self.in_step = None, False
        for fn in self._on_commit:
            fn()

    def abort(self) -> None:
        self.weight, self.in_step = None, False
        for fn in self._on_abort:
            fn()

    def heal_from(self, source: ScriptedManager) -> None:
        for name, (load, _) in self._states.items():
            load(copy.deepcopy(source._states[name][1]()))
        self.step = source.step


class World:
    """The members of the current epoch, in rank order."""

    def __init__(self, num_members: int = 0) -> None:
        self.members: list[ScriptedManager] = []
        self._waiting: set[ScriptedManager] = set()
        self.form([ScriptedManager(self) for _ in range(num_members)])

    def form(self, members: list[ScriptedManager]) -> None:
        """Begin an epoch; each member enters it, healed, in its next `start_step`."""
        self.members = sorted(members, key=lambda m: m.replica_id)
        self._waiting = set(members)

    def lose(self, manager: ScriptedManager) -> None:
        """A member dies in the middle of a step, which the others go on with."""
        self.members = [m for m in self.members if m is not manager]

    def admit(self, manager: ScriptedManager) -> None:
        if manager not in self._waiting:
            return
        self._waiting.discard(manager)
        source = max(self.members, key=lambda m: m.step)
        if source.step > manager.step:
            manager.heal_from(source)
