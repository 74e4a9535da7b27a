"""`ftkit launch` with real processes: restarts, ends, signals, and that none is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from ftkit.config import FIELDS
from tests.cli.conftest import Running, Start, alive, eventually

NO_ETCD = ("--etcd", "http://127.0.0.1:1")
"""The scripts here need none; launch itself does not talk to etcd."""
FAST = ("--restart-delay", "0.05", "--max-restart-delay", "0.1")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def write(script: Path, body: str) -> Path:
    script.write_text(
        "import os, signal, subprocess, sys, time\nme = os.environ['FTKIT_REPLICA_ID']\n" + body
    )
    return script


def pids(running: Running, word: str = "pid") -> list[int]:
    return [int(m) for m in re.findall(rf"\b{word} (\d+)", "\n".join(running.out))]


def test_all_groups_run_and_their_lines_carry_their_names(start: Start, script: Path) -> None:
    write(script, "print('hello', *sys.argv[1:]); print('trouble', file=sys.stderr)")
    run = start("launch", "--groups", 3, *NO_ETCD, "--", script, "--lr", "0.1")
    assert run.wait() == 0
    for i in range(3):
        assert f"[trainer-{i}] hello --lr 0.1" in run.out
        assert f"[trainer-{i}] trouble" in run.out
    assert "[ftkit]     all 3 replica groups ended well" in run.err


def test_a_group_is_told_what_it_is(start: Start, script: Path) -> None:
    write(script, "print(*(os.environ.get(n) for n in sys.argv[1:]))")
    names = ("FTKIT_ETCD", "FTKIT_JOB", "FTKIT_REPLICA_ID", "FTKIT_MIN_REPLICAS", "OMP_NUM_THREADS", "RANK")
    more = ("--job", "llm", "--min-replicas", 2, "--first-index", 4)
    run = start("launch", "--groups", 1, *NO_ETCD, *more, "--", script, *names)
    assert run.wait() == 0
    assert run.out == ["[trainer-4] http://127.0.0.1:1 llm trainer-4 2 1 None"]


def test_a_groups_settings_are_flags_and_beat_the_variables(start: Start, script: Path) -> None:
    names = ("LEASE_TTL", "TIMEOUT", "PROGRESS_TIMEOUT", "INIT_SYNC", "SUSPECT_GRACE", "KEEPER_LOG")
    write(script, "print(*(os.environ.get('FTKIT_' + n) for n in sys.argv[1:]))")
    flags = ("--lease-ttl", 3, "--timeout", 20, "--progress-timeout", "off", "--no-init-sync")
    variables = {"FTKIT_LEASE_TTL": "9", "FTKIT_PROGRESS_TIMEOUT": "30", "FTKIT_KEEPER_LOG": "info"}
    run = start("launch", "--groups", 1, *NO_ETCD, *flags, "--", script, *names, env=variables)
    assert run.wait() == 0
    assert run.out == ["[trainer-0] 3 20 off 0 None info"]


def test_settings_that_contradict_each_other_are_refused_before_anything_starts(
    start: Start, script: Path
) -> None:
    write(script, "print('started')")
    run = start("launch", "--groups", 1, "--lease-ttl", 70, "--", script, env={"FTKIT_OUTAGE_GRACE": "50"})
    assert run.wait() == 2
    assert "lease_ttl (70) must be less than outage_grace (50, from FTKIT_OUTAGE_GRACE)" in run.text
    assert "started" not in run.text


def test_every_setting_that_groups_share_is_a_flag_and_no_secret_is(start: Start) -> None:
    """A token on the command line could be read by every user of the machine."""
    run = start("launch", "--help")
    assert run.wait() == 0
    own = {"replica_id", "group_rank", "group_world_size", "master_addr", "master_port", "token"}
    flags = set(re.findall(r"--[a-z-]+", run.text))
    assert {f.flag for f in FIELDS if f.name not in own} <= flags
    assert "--token" not in flags


def test_ranks_of_a_group_can_meet(start: Start, script: Path) -> None:
    """They get torchrun's variables, with one port per group."""
    names = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')"
    write(script, f"print(*(os.environ[n] for n in {names}))")
    run = start("launch", "--groups", 2, "--nproc-per-group", 2, *NO_ETCD, "--", script)
    assert run.wait() == 0
    ports = {}
    for group in (0, 1):
        for rank in (0, 1):
            head = f"[trainer-{group}/{rank}] "
            [line] = [x.removeprefix(head) for x in run.out if x.startswith(head)]
            assert line.startswith(f"{rank} 2 {rank} 127.0.0.1 ")
            ports.setdefault(group, set()).add(line.split()[-1])
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]


def test_a_group_that_fails_is_restarted_and_the_others_go_on(
    start: Start, script: Path, tmp_path: Path
) -> None:
    write(
        script,
        f"""
mark = {str(tmp_path)!r} + '/' + me
if me == 'trainer-1' and not os.path.exists(mark):
    open(mark, 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
print('done')
""",
    )
    run = start("launch", "--groups", 2, *FAST, *NO_ETCD, "--", script)
    assert run.wait() == 0
    assert "trainer-1: SIGKILL" in run.text
    assert "trainer-0: SIGKILL" not in run.text
    assert sorted(run.out) == ["[trainer-0] done", "[trainer-1] done"]


def test_launch_ends_with_the_code_of_the_first_group_that_failed_for_good(
    start: Start, script: Path
) -> None:
    write(script, "print('go'); sys.exit(7 if me == 'trainer-1' else 0)")
    run = start("launch", "--groups", 2, *FAST, "--max-restarts", 2, *NO_ETCD, "--", script)
    assert run.wait() == 7
    assert run.out.count("[trainer-1] go") == 3
    assert "restarted 2 times in a row" in run.text


def test_a_configuration_error_is_not_restarted(start: Start, script: Path) -> None:
    write(script, "sys.exit('unused') if False else sys.exit(2)")
    run = start("launch", "--groups", 1, *FAST, *NO_ETCD, "--", script)
    assert run.wait() == 2
    assert "does not go away by a restart" in run.text


def test_a_rank_that_dies_takes_its_group_along_and_no_other(
    start: Start, script: Path, tmp_path: Path
) -> None:
    write(
        script,
        f"""
mark = {str(tmp_path)!r} + '/' + me + '.'
mine = mark + os.environ['RANK']
if me == 'trainer-0' and not os.path.exists(mine):
    signal.signal(signal.SIGTERM, lambda *_: (print('sibling ends'), sys.exit(0)))
    open(mine, 'w').close()
    while os.environ['RANK'] == '0' or not os.path.exists(mark + '0'):
        time.sleep(0.01)
    sys.exit(5)
print('done')
""",
    )
    run = start("launch", "--groups", 2, "--nproc-per-group", 2, *FAST, *NO_ETCD, "--", script)
    assert run.wait() == 0
    assert "trainer-0: rank 1 ended (exit 5), ending its siblings" in run.text
    assert "trainer-0: exit 5" in run.text
    assert sorted(x for x in run.out if "done" in x) == [
        f"[trainer-{g}/{r}] done" for g in (0, 1) for r in (0, 1)
    ]


def test_sigterm_lets_the_groups_leave_in_order(start: Start, script: Path) -> None:
    """A spot instance's notice: each trainer finishes its step, and launch reports success."""
    write(
        script,
        """
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), print('left in order'), sys.exit(0)))
print('ready')
time.sleep(60)
""",
    )
    run = start("launch", "--groups", 2, *NO_ETCD, "--", script)
    run.says("[trainer-0] ready")
    run.says("[trainer-1] ready")
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    assert {f"[trainer-{i}] left in order" for i in (0, 1)} <= set(run.out)


def test_a_group_that_still_imports_ends_in_order_too(start: Start, script: Path) -> None:
    """It has no manager yet that could turn SIGTERM into a leave, and no step to lose."""
    write(script, "print('importing'); time.sleep(60)")
    run = start("launch", "--groups", 2, *NO_ETCD, "--", script)
    run.says("[trainer-0] importing")
    run.says("[trainer-1] importing")
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    assert "all 2 replica groups ended well" in run.text


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])
print(f'pid {os.getpid()} pid {child.pid}')
time.sleep(300)
"""
"""Ignores SIGTERM and has a child."""

WITH_HELPER = (
    """
helper = subprocess.Popen(
    [sys.executable, '-c', 'import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(300)'],
    start_new_session=True)
print(f'pid {helper.pid}')
"""
    + STUBBORN
)
"""Has also a helper in a session of its own, as a keeper is; such are given 3 s to end by themselves."""


def test_what_ignores_sigterm_is_killed_after_the_grace_with_all_it_started(
    start: Start, script: Path
) -> None:
    run = start("launch", "--groups", 2, "--grace", "0.3", *NO_ETCD, "--", write(script, WITH_HELPER))
    eventually(lambda: len(pids(run)) == 6, "all processes")
    run.signal(signal.SIGINT)
    assert run.wait() == 137
    assert "grace period over" in run.text
    assert not [pid for pid in pids(run) if alive(pid)]


def test_a_second_signal_does_not_wait_for_the_grace(start: Start, script: Path) -> None:
    run = start("launch", "--groups", 1, "--grace", "600", *NO_ETCD, "--", write(script, STUBBORN))
    eventually(lambda: len(pids(run)) == 2, "all processes")
    run.signal(signal.SIGTERM)
    run.says("groups have 600 s")
    run.signal(signal.SIGTERM)
    assert run.wait() == 137
    assert not [pid for pid in pids(run) if alive(pid)]


def test_no_process_outlives_a_killed_launch(start: Start, script: Path) -> None:
    """Whatever ends launch, a forgotten trainer would go on under a name that its successor needs."""
    run = start("launch", "--groups", 2, "--nproc-per-group", 2, *NO_ETCD, "--", write(script, WITH_HELPER))
    eventually(lambda: len(pids(run)) == 12, "all processes")
    run.signal(signal.SIGKILL)
    eventually(lambda: not [pid for pid in pids(run) if alive(pid)], "the end of all processes", 10)


def test_after_nohup_a_hangup_is_no_reason_to_stop(start: Start, script: Path) -> None:
    write(script, "print('ready'); time.sleep(0.5); print('done')")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        run = start("launch", "--groups", 1, *NO_ETCD, "--", script)
    finally:
        signal.signal(signal.SIGHUP, before)
    run.says("[trainer-0] ready")
    run.signal(signal.SIGHUP)
    assert run.wait() == 0
    assert "[trainer-0] done" in run.out


def guardians_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"guardian.py" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_a_killed_guardian_is_replaced(start: Start, script: Path) -> None:
    """An out-of-memory killer may take it first, and launch next."""
    run = start("launch", "--groups", 1, *NO_ETCD, "--", write(script, STUBBORN))
    eventually(lambda: len(pids(run)) == 2, "all processes")
    [first] = guardians_of(run.process.pid)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: guardians_of(run.process.pid) not in ([], [first]), "another guardian")
    run.signal(signal.SIGKILL)
    eventually(lambda: not [pid for pid in pids(run) if alive(pid)], "the end of all processes", 10)


def test_what_a_finished_rank_leaves_behind_is_ended(start: Start, script: Path) -> None:
    write(script, "c = subprocess.Popen(['sleep', '300']); print(f'pid {c.pid}')")
    run = start("launch", "--groups", 1, *NO_ETCD, "--", script)
    assert run.wait() == 0
    assert not [pid for pid in pids(run) if alive(pid)]


def test_each_group_has_its_log_file(start: Start, script: Path, tmp_path: Path) -> None:
    write(script, "print('to the file of', me)")
    run = start("launch", "--groups", 2, "--log-dir", "logs/run", *NO_ETCD, "--", script)
    assert run.wait() == 0
    assert "to the file of trainer-1\n" in (tmp_path / "logs/run/trainer-1.log").read_text()


def test_modules_and_commands_can_be_launched(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text("import sys; print('module', *sys.argv[1:])")
    for words in (("--", "-m", "my_train", "-x"), ("-m", "my_train", "-x")):
        run = start("launch", "--groups", 1, *NO_ETCD, *words)
        assert run.wait() == 0
        assert run.out == ["[trainer-0] module -x"]
    run = start("launch", "--groups", 1, *NO_ETCD, "my_train.py", "--groups", "5")
    assert run.wait() == 0
    assert run.out == ["[trainer-0] module --groups 5"], "after the program all flags are its own"
    run = start("launch", "--groups", 1, *NO_ETCD, "--", "sh", "-c", "echo $FTKIT_REPLICA_ID; exit 0")
    assert run.wait() == 0
    assert run.out == ["[trainer-0] trainer-0"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--groups", "0", "--", "true"), "--groups must be at least 1"),
        (("--groups", "1"), "nothing to launch: give the training script after --"),
        (("--groups", "1", "--", "no_such.py"), "there is no file no_such.py"),
        (("--groups", "2", "--min-replicas", "3", "--", "true"), "no step could ever commit"),
        (("--groups", "x", "--", "true"), "--groups"),
        (("--", "true"), "--groups"),
        (("--groups", "1", "train.py", "--", "true"), "stands before --"),
    ],
)
def test_a_senseless_command_line_is_refused_with_code_2(
    start: Start, words: tuple[str, ...], hint: str
) -> None:
    run = start("launch", *words)
    assert run.wait() == 2
    assert hint in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, None])
def test_the_embedded_etcd_lives_as_long_as_the_launch(
    start: Start, script: Path, tmp_path: Path, how: signal.Signals | None
) -> None:
    """With no word about etcd one is started, launch says so, and neither it nor its data stays."""
    write(
        script,
        """
from ftkit.keeper.etcd import Etcd, EtcdSettings
with Etcd(EtcdSettings(endpoints=(os.environ['FTKIT_ETCD'],))) as etcd:
    etcd.put('/ftkit/x', b'1')
print('reached etcd')
time.sleep(float(sys.argv[1]))
""",
    )
    run = start(
        *("launch", "--groups", 1, "--", script, 0 if how is None else 300), env={"TMPDIR": str(tmp_path)}
    )
    run.says("[trainer-0] reached etcd")
    run.says("starting an etcd for this run (neither --etcd nor FTKIT_ETCD nor ETCDCTL_ENDPOINTS names one)")
    if how is None:
        assert run.wait() == 0
    else:
        run.signal(how)
        assert run.wait() == {signal.SIGTERM: 0, signal.SIGKILL: -9}[how]
    eventually(lambda: not list(tmp_path.glob("ftkit-etcd-*")), "the end of etcd's data", 10)
    eventually(lambda: not etcds_below(tmp_path), "the end of etcd", 10)


def test_asking_for_embedded_in_words_needs_no_explanation(start: Start) -> None:
    run = start("launch", "--groups", 1, "--", "sh", "-c", "echo $FTKIT_ETCD", env={"FTKIT_ETCD": "embedded"})
    assert run.wait() == 0
    assert run.out[0].startswith("[trainer-0] http://127.0.0.1:")
    assert "neither" not in run.text


def test_a_taken_port_does_not_stop_the_embedded_etcd(start: Start) -> None:
    """etcd's usual port is only preferred: another launch, or a real etcd, may have it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already: all the better
            taken.bind(("127.0.0.1", 2379))
            taken.listen()
        run = start("launch", "--groups", 1, "--", "sh", "-c", "echo $FTKIT_ETCD")
        assert run.wait() == 0
    assert run.out[0] != "[trainer-0] http://127.0.0.1:2379"


def etcds_below(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"--data-dir={folder}".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
