"""Move a replicated position through a stream of samples: forward on commit, and only then.

The position is part of the state that a healing member receives. It knows nothing of datasets, workers
or tensors; the arithmetic is in `stream`.
"""

from __future__ import annotations

import logging

from ftkit.algorithms.protocols import DataManager
from ftkit.algorithms.stream import Draw, Stream
from ftkit.errors import ConfigError, JobMismatch

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
        self.position = 0
        """How many samples have been trained on, in committed steps, by the whole job."""
        self.draws: list[Draw] = []
        """What this rank has drawn in the current step; after the vote, until the next draw, in the last."""
        self._manager = manager
        self._group_rank = group_rank
        self._ranks = group_world_size
        self._name = name
        self._drawn_in = 0
        self._voted = False
        self._pending = False
        manager.register_state_dict_fn(name, self.load_state_dict, self.state_dict)
        manager.on_commit(self._commit)
        manager.on_abort(self._abort)

    @property
    def finished(self) -> bool:
        """Whether every sample of the stream has been committed."""
        return self._is_end(self.position)

    def draw(self) -> Draw | None:
        """Start the step if need be and take this rank's part of the next global batch.

        Several draws in one step (gradient accumulation) follow each other. After a failed vote the
        same positions are drawn again, split anew. None means that the stream has ended: then no step
        is started, since the peers may have left already.
        """
        if self.finished:
            return None
        self._manager.start_step()
        if self.draws and not self._voted and self._drawn_in != self._manager.epoch:
            # The step was given up without a vote, for instance by an exception in the training loop.
            self.rewind()
        start = self._head()
        if self._is_end(start):
            return None
        if self._voted:
            self.draws, self._voted = [], False
        drawn = Draw(
            start=start,
            batch_size=self.batch_size,
            shares=self._manager.num_participants() * self._ranks,
            share=self._manager.participating_rank() * self._ranks + self._group_rank,
            ranks=self._ranks,
            total=self.stream.total,
        )
        self.draws.append(drawn)
        self._drawn_in, self._pending = self._manager.epoch, True
        if drawn.short:
            # All replicas see the same short batch, so all of them set a weight in this step.
            self._manager.set_weight(float(sum(d.weight for d in self.draws)))
        return drawn

    def rewind(self) -> None:
        """Forget what was drawn since the last vote: it will be drawn again."""
        if not self._voted:
            self.draws, self._pending = [], False

    def state_dict(self) -> dict[str, object]:
        """Return the place in the stream, and what the stream is made of."""
        return {
            "position": self.position,
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
        self.position = state["position"]
        self.draws, self._voted, self._pending = [], False, False

    def _is_end(self, position: int) -> bool:
        return self.stream.total is not None and position >= self.stream.total

    def _head(self) -> int:
        """Return the position at which the next draw begins."""
        return self.draws[-1].stop if self.draws and not self._voted else self.position

    def _commit(self) -> None:
        # An abort keeps what was drawn: when the vote was in doubt and turns out to have been passed, or
        # when the loop tries the same batch again, that batch is what this commit has trained on.
        if self._pending:
            self.position = self.draws[-1].stop
        self._voted, self._pending = True, False

    def _abort(self) -> None:
        self._voted = True
