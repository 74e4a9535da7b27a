"""Write lines of journals by hand: what the tests of the demo's pure parts are fed with."""

from __future__ import annotations

from ftkit.demo.journal import Draw, End, Event, Hash, Line, Place, Start, Step


def start(replica: str, at: float, *, pid: int = 1, training: int = 100, seed: int = 0) -> Start:
    return Start(replica=replica, monotonic=at, pid=pid, training=training, seed=seed)


def step(
    replica: str, at: float, epoch: int, number: int, members: str, *, committed: bool = True, pid: int = 1
) -> Step:
    """`members` are letters: "ab" are the replicas a and b."""
    return Step(
        replica=replica,
        monotonic=at,
        pid=pid,
        epoch=epoch,
        step=number,
        committed=committed,
        members=tuple(members),
        loss=5.0 / number,
    )


def event(replica: str, at: float, kind: str, epoch: int, **detail: float) -> Event:
    return Event(replica=replica, monotonic=at, pid=1, kind=kind, epoch=epoch, step=0, **detail)  # type: ignore[arg-type]


def draw(replica: str, at: float, epoch: int, number: int, samples: list[int]) -> Draw:
    return Draw(replica=replica, monotonic=at, pid=1, epoch=epoch, step=number, samples=tuple(samples))


def digest(replica: str, version: str, sha256: str) -> Hash:
    return Hash(replica=replica, monotonic=0.0, pid=1, version=version, sha256=sha256)


def end(
    replica: str, at: float, version: str, position: int, *, holes: tuple[tuple[int, int], ...] = ()
) -> End:
    return End(
        replica=replica,
        monotonic=at,
        pid=1,
        step=int(version.split("-")[1]),
        version=version,
        sha256="0",
        data=Place(position=position, holes=holes),
    )


def together(letters: str, epoch: int, numbers: range, begin: float, pace: float = 0.1) -> list[Line]:
    """Steps that replicas commit together, one every `pace` seconds, the first at `begin`."""
    return [step(r, begin + pace * i, epoch, n, letters) for i, n in enumerate(numbers) for r in letters]
