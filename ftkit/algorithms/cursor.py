"""Move a replicated place through a stream of samples: forward on commit, and only then.

The place is part of the state that a healing member receives. It follows from the state before, from who
began the step and who committed it, which all members see alike. It knows nothing of datasets, workers or
tensors; the arithmetic is in `stream`.
"""

from __future__ import annotations

import logging

from ftkit.algorithms.protocols import DataManager
from ftkit.algorithms.stream import Draw, Place, Stream
from ftkit.errors import ConfigError, FtkitError, JobMismatch

__all__ = ["Cursor"]

logger = logging.getLogger(__name__)


class Cursor:
    """The place of a job in its stream, equal on all replicas at the start of each step.

    `group_rank` and `group_world_size` other than 0 and 1 make the ranks of a replica group split the
    group's batch among them. `name` tells several streams of one job apart.
    """

    def __init__(
        self,
        manager: DataManager,
        stream: Stream,
        *,
        batch_size: int,
        group_rank: int = 0,
        group_world_size: int = 1,
        name: str = "data",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
        if not 0 <= group_rank < group_world_size:
            raise ConfigError(f"group rank {group_rank} is not within a group of {group_world_size}")
        self.stream = stream
        self.batch_size = batch_size
        self.place = Place()
        """What the whole job has trained on, in committed steps."""
        self.draws: list[Draw] = []
        """What this rank has drawn in the current step; after the vote, until the next draw, in the last."""
        self._manager = manager
        self._group_rank = group_rank
        self._ranks = group_world_size
        self._name = name
        self._begun_by: tuple[str, ...] = ()
        self._voted_by: tuple[str, ...] | None = None
        """The members of a vote that failed; one in doubt may turn out to be won, in another epoch."""
        self._voted = False
        self._pending = False
        manager.register_state_dict_fn(name, self.load_state_dict, self.state_dict)
        manager.on_commit(self._commit)
        manager.on_abort(self._abort)

    @property
    def finished(self) -> bool:
        """Whether every sample of the stream has been committed."""
        return self.place.ended(self.stream.total)

    def draw(self) -> Draw | None:
        """Start the step if need be and take this rank's part of the next global batch.

        Several draws in one step (gradient accumulation) follow each other. After a failed vote the
        same positions are drawn again, split anew. None means that the stream has ended: then no step
        is started, since the peers may have left already.
        """
        if self.finished:
            return None
        self._manager.start_step()
        start = self.draws[-1].after if self.draws and not self._voted else self.place
        if start.ended(self.stream.total):
            return None
        if self._voted:
            self.draws, self._voted, self._voted_by = [], False, None
        # Not who is a member now: that may change in the middle of a step, and not for all at once.
        self._begun_by = self._manager.step_members()
        drawn = Draw.at(
            start,
            batch_size=self.batch_size,
            shares=len(self._begun_by) * self._ranks,
            share=self._begun_by.index(self._manager.replica_id) * self._ranks + self._group_rank,
            ranks=self._ranks,
            total=self.stream.total,
        )
        self.draws.append(drawn)
        self._pending = True
        if drawn.short:
            # All replicas see the same short batch, so all of them set a weight in this step.
            self._weigh(float(sum(d.weight for d in self.draws)))
        return drawn

    def _weigh(self, weight: float) -> None:
        try:
            self._manager.set_weight(weight)
        except FtkitError as error:
            # The member with the only samples has died: nobody can commit this step, the next is split anew.
            self._manager.report_error(error)

    def rewind(self) -> None:
        """Forget what was drawn since the last vote: it will be drawn again."""
        if not self._voted:
            self.draws, self._pending = [], False

    def state_dict(self) -> dict[str, object]:
        """Return the place in the stream, and what the stream is made of."""
        return {
            "position": self.place.position,
            "holes": [list(span) for span in self.place.holes],
            "length": self.stream.length,
            "shuffle": self.stream.shuffle,
            "seed": self.stream.seed,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: object) -> None:
        """Take over a place in the same stream; a different stream is refused.

        Raises:
            JobMismatch: the dataset's length, the seed or the shuffling differ.
        """
        if not isinstance(state, dict) or not isinstance(state.get("position"), int):
            raise JobMismatch(f"the state of {self._name!r} is not a place in a stream: {state!r:.200}")
        mine = self.state_dict()
        for key in ("length", "shuffle", "seed"):
            if state.get(key) != mine[key]:
                raise JobMismatch(
                    f"{key} of {self._name!r} is {mine[key]} here, {state.get(key)} in the state received: "
                    "samples would be repeated and lost. Give all replicas the same dataset and arguments"
                )
        if state.get("batch_size") != self.batch_size:
            logger.warning(
                "batch_size of %r is %s here and %s in the state received: right after a restart from a "
                "checkpoint, wrong between members of one epoch",
                self._name,
                self.batch_size,
                state.get("batch_size"),
            )
        holes = tuple((int(start), int(stop)) for start, stop in state.get("holes", ()))
        self.place = Place(state["position"], holes)
        self.draws, self._voted, self._voted_by, self._pending = [], False, None, False

    def _commit(self) -> None:
        if self._pending:
            voters = self._manager.members() if self._voted_by is None else self._voted_by
            unused = [
                span
                for draw in self.draws
                for rank, replica_id in enumerate(self._begun_by)
                if replica_id not in voters
                for span in draw.of_replica(rank)
            ]
            self.place = self.draws[-1].after.without(unused)
        self._voted, self._pending, self._voted_by = True, False, None

    def _abort(self) -> None:
        # What was drawn is kept: if the vote was in doubt and turns out to be won, it has been trained on.
        self._voted, self._voted_by = True, self._manager.members()
