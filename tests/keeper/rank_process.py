"""A trainer without a model: one rank, told what to do on standard input, reporting on standard output."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import msgspec

from ftkit.config import Settings
from ftkit.core.model import Epoch, Version
from ftkit.keeper import messages as msg
from ftkit.keeper.client import KeeperAddress, KeeperClient
from ftkit.keeper.progress import Phase, ProgressWriter


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    settings = Settings.resolve({}, **setup["settings"])
    running: list[Epoch | None] = [None]
    writer: list[ProgressWriter] = []

    def say(kind: str, value: object) -> None:
        sys.stdout.buffer.write(
            msgspec.json.encode({"kind": kind, "at": time.monotonic(), "value": value}) + b"\n"
        )
        sys.stdout.buffer.flush()

    def on_message(message: msg.ToRank) -> None:
        if isinstance(message, msg.EpochOffer):
            running[0] = message.epoch
        if isinstance(message, msg.Welcome) and message.progress_file and not writer:
            writer.append(ProgressWriter(message.progress_file, setup["rank"]))
        say(type(message).__name__, message)

    def hello() -> msg.Hello:
        return msg.Hello(
            rank=setup["rank"],
            pid=os.getpid(),
            host=socket.gethostname(),
            transport=f"127.0.0.1:{7000 + setup['rank']}",
            rendezvous="127.0.0.1:6000",
            fingerprint=setup.get("fingerprint", ""),
            layout=tuple(setup.get("layout", ())),
            running=running[0],
        )

    client = KeeperClient(
        settings,
        rank=setup["rank"],
        incarnation=setup["incarnation"],
        hello=hello,
        on_message=on_message,
        on_lost=lambda error: say("lost", str(error)),
    )
    if setup["rank"] == 0:
        address = client.start()
    else:
        address = msgspec.convert(setup["address"], KeeperAddress)
    client.connect(address)
    say("up", {"address": address, "keeper": client._process.pid if client._process else 0})
    version = Version(0, 0)
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "want":
            version = Version(*rest[0])
            client.send(msg.WantEpoch(version=version, failed=rest[1]))
            running[0] = None
        elif word == "mark":
            writer[0].mark(epoch=version.epoch, step=version.step, phase=Phase(rest[0]), pending=rest[1])
        elif word == "goodbye":
            client.send(msg.GoodbyeKeeper(version=version, planned=rest[0]))
        elif word == "fork":
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            say("forked", None)
        elif word == "keeper":
            say("keeper", client._process.pid if client._process else 0)
        elif word == "exit":
            os._exit(rest[0])
    client.close()


if __name__ == "__main__":
    main()
