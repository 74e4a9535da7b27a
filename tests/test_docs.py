"""The documents say what is true of the code: settings, commands, names, links, snippets.

Run as a program, it writes README's table of settings anew.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ftkit.cli import main as cli
from ftkit.config import FIELDS, settings_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "ftkit-demo" not in path.as_posix()
)
BEGIN = re.compile(r"<!-- settings: .* -->\n")
END = "<!-- end of settings -->"

INTERNAL_VARIABLES: set[str] = set()
"""Variables with our prefix that are no settings, and where they are explained."""


def split_readme() -> tuple[str, str, str]:
    """Return README's text before the table, the table, and the rest."""
    text = README.read_text(encoding="utf-8")
    start = BEGIN.search(text)
    assert start, "README.md has lost the mark where the table of settings begins"
    table, _, rest = text[start.end() :].partition(END)
    return text[: start.end()], table.strip() + "\n", END + rest


def write_table() -> None:
    before, _, after = split_readme()
    README.write_text(f"{before}\n{settings_table()}\n{after}", encoding="utf-8")


def blocks(text: str) -> str:
    """Return the code blocks of a document, indented or fenced, as lines."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
    indented = re.findall(r"^ {4}(\S.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), flags=re.M)
    return "\n".join([*fenced, *indented])


def python_snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def test_the_readme_has_the_current_table_of_settings():
    _, table, _ = split_readme()
    assert table == settings_table(), f"write it anew: python {Path(__file__).name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in headings(file), f"{path.name} links to {target}"


def headings(path: Path) -> set[str]:
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_variables_that_are_named_exist(path):
    known = {variable for field in FIELDS for variable in field.variables} | INTERNAL_VARIABLES
    named = set(re.findall(r"\b(?:FTKIT|ETCDCTL)_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    assert named - known <= {"ETCDCTL_PASSWORD"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_commands_and_flags_that_are_named_exist(path):
    """A first hour fails at the first command that is not there."""
    installed = {entry.name for entry in cli.available()}
    for line in blocks(path.read_text(encoding="utf-8")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["ftkit"]:
            continue
        assert words[1] in installed, line
        own = words[: words.index("--")] if "--" in words else words
        parser, _ = cli.build_parser(words[1])
        help_text = subcommand_help(parser, words[1])
        for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text), line


def subcommand_help(parser, name):
    for action in parser._actions:
        if isinstance(action.choices, dict) and name in action.choices:
            return action.choices[name].format_help()
    raise AssertionError(name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_and_scripts_that_are_named_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    text = path.read_text(encoding="utf-8")
    for line in blocks(text).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
    for name in re.findall(r"\b(?:scripts|tests|docs|\.ci)/[\w./-]*\w", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_snippets_are_python(path):
    for snippet in python_snippets(path):
        ast.parse(snippet)


def test_the_readmes_script_trains_on_two_replica_groups(tmp_path):
    """It is the first thing that somebody copies."""
    (snippet,) = (s for s in python_snippets(README) if "Manager(" in s)
    assert "< 1000" in snippet
    ending = "\nprint('done', manager.current_step())\n"
    (tmp_path / "train.py").write_text(snippet.replace("< 1000", "< 5") + ending, encoding="utf-8")
    launch = [sys.executable, "-m", "ftkit.cli.main", "launch", "--groups", "2", "--max-restarts", "0"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTKIT_", "ETCDCTL_"))}
    words = [*launch, "--", "train.py"]
    ran = subprocess.run(
        words, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done 5") == 2, ran.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_yaml_snippets_are_yaml(path):
    for snippet in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.S | re.M):
        assert isinstance(yaml.safe_load(snippet), dict)


def test_reasons_for_waiting_that_operations_explains_are_those_that_are_given():
    """A person searches the page for what the program said."""
    given = (ROOT / "ftkit/core/quorum.py").read_text(encoding="utf-8")
    section = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("## When nobody trains")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, flags=re.M)
    assert len(quoted) >= 5
    names = r"\b(?:trainer-\d+|\d+)\b"
    for text in quoted:
        for part in re.split(names, text):
            assert part.strip(" ,") in given, text


def test_names_imported_by_snippets_are_public():
    import ftkit

    for path in DOCUMENTS:
        for snippet in python_snippets(path):
            for node in ast.walk(ast.parse(snippet)):
                if isinstance(node, ast.ImportFrom) and node.module == "ftkit":
                    for alias in node.names:
                        assert getattr(ftkit, alias.name, None) is not None, f"{path.name}: {alias.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_public_names_that_are_named_exist(path):
    """`ftkit.Something` in a document is a promise."""
    text = path.read_text(encoding="utf-8")
    for package, name in re.findall(r"`(ftkit|transport)\.([A-Z]\w+)`", text):
        assert getattr(importlib.import_module(package), name, None) is not None, f"{package}.{name}"


def test_the_changelog_has_a_place_for_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text
    assert "Keep a Changelog" in text


if __name__ == "__main__":
    write_table()
