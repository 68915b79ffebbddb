"""The tree keeps the shape that DESIGN.md and CONTRIBUTING.md promise.

Each check reads files only. The last one builds a wheel, since that is what volunteers install.
"""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

import dugnad.dht

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("averaging", "dashboard", "dht", "peer", "simulation")
FUNCTION_LINES_MAX = 60  # a function fits a screen (CONTRIBUTING.md)
MODULE_LINES_MAX = 500  # a module has one noun

# Where `except Exception` may stand without ending in `raise`, how often, and why.
BROAD_EXCEPTS: dict[str, tuple[int, str]] = {
    "dht/book.py": (1, "hivemind raises whatever a foreign answer makes it raise"),
    "dht/memory.py": (1, "the driver of handlers, as in dht/sockets.py"),
    "dht/substrate.py": (1, "hivemind's own exceptions have no common base"),
    "dht/sockets.py": (1, "the driver of handlers: one bad stream must not end the daemon"),
    "peer/rostershell.py": (3, "errors of our own become DialFailed or StreamDown, or are logged"),
}

# Protocol rules: a plain class with `handle(event, now)`, the same in daemon and simulator.
CORE_MODULES = (
    "dht/roster.py",
    "averaging/*.py",
    "peer/rendezvous.py",
    "peer/unit*.py",
    "simulation/*.py",
)
# What a core may not import, since it would bring a clock, chance, waiting or weight.
CORE_BANNED = {"asyncio", "hivemind", "secrets", "socket", "threading", "time", "torch", "uvloop"}
# Chance is passed in as one of these.
CORE_RANDOM = {"Random"}

# The first bytes of an Ed25519 private key in libp2p's format, as bytes and as base64 text.
LIBP2P_PRIVATE = bytes((8, 1, 18, 64))
KEY_TEXT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----[\\rn\s]*[A-Za-z0-9+/]{20}|\bCAESQ[A-Za-z0-9+/]{60}"
)

WALK_SKIPS = re.compile(
    r"\.venv.*|\.typing|\.git|\..*cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info"
)


class Source(NamedTuple):
    """One Python file of the tree."""

    path: str
    text: str
    tree: ast.Module


@cache
def tree_files() -> tuple[PurePosixPath, ...]:
    """Files of the tree that git tracks or would track; every file where there is no git."""
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    try:
        out = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode()
        names = [name for name in out.split("\0") if name and (ROOT / name).is_file()]
    except (FileNotFoundError, subprocess.CalledProcessError):
        names = list(_walk(ROOT))
    return tuple(PurePosixPath(name) for name in sorted(set(names)))


def _walk(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        if WALK_SKIPS.fullmatch(entry.name):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry.relative_to(ROOT).as_posix()


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the tree, parsed."""
    texts = {str(p): (ROOT / p).read_text() for p in tree_files() if p.suffix == ".py"}
    return tuple(Source(path, text, ast.parse(text, path)) for path, text in texts.items())


@cache
def packages() -> dict[str, str]:
    """Import name → folder, for each folder of the tree that holds modules."""
    folders = {str(p.parent) for p in tree_files() if p.suffix == ".py" and p.parts[0] in FOLDERS}
    return {"dugnad." + folder.replace("/", "."): folder for folder in sorted(folders)}


def _setuptools() -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings: dict[str, object] = project["tool"]["setuptools"]
    return settings


def test_every_package_is_listed_with_its_folder() -> None:
    settings = _setuptools()
    assert settings["packages"] == sorted(packages())
    assert settings["package-dir"] == packages()


def test_every_package_has_a_docstring_and_no_parent_above_it() -> None:
    bare = [
        folder
        for folder in packages().values()
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    ]
    assert bare == []
    assert not (ROOT / "__init__.py").exists()  # dugnad is a namespace


def test_no_generic_name_reaches_site_packages() -> None:
    site = Path(sysconfig.get_path("purelib"))
    assert [name for name in FOLDERS if (site / name).exists()] == []


def test_what_is_tested_is_the_tree_or_in_ci_the_installed_wheel() -> None:
    tested = Path(dugnad.dht.__file__ or "").resolve()
    installed = tested.is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    assert installed or (tested.is_relative_to(ROOT) and os.environ.get("CI") != "true")


def test_functions_fit_a_screen() -> None:
    long = [
        f"{source.path}:{node.lineno} {node.name} has {lines} lines"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_modules_have_one_noun() -> None:
    long = [
        f"{source.path} has {lines} lines"
        for source in sources()
        if (lines := source.text.count("\n")) > MODULE_LINES_MAX
    ]
    assert long == []


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and may keep it (one that ends in a bare `raise` tidies up)."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    kind = handler.type
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in {"Exception", "BaseException"})
        for name in names
    )


def test_broad_excepts_are_the_listed_ones() -> None:
    found = {
        source.path: count
        for source in sources()
        if (
            count := sum(
                isinstance(node, ast.ExceptHandler) and _is_broad(node)
                for node in ast.walk(source.tree)
            )
        )
    }
    assert found == {path: count for path, (count, _) in BROAD_EXCEPTS.items()}


def test_no_private_key_is_in_the_tree() -> None:
    keys = [
        str(path)
        for path in tree_files()
        if (data := (ROOT / path).read_bytes()).startswith(LIBP2P_PRIVATE) or KEY_TEXT.search(data)
    ]
    assert keys == []


def _marks(node: ast.AST) -> set[str]:
    """Names N of each `pytest.mark.N` below a node."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Attribute)
        and part.value.attr == "mark"
    }


def _may_sleep(source: Source) -> bool:
    """Whether the whole file is marked slow or net (`pytestmark = …`)."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        and _marks(node) & {"slow", "net"}
        for node in source.tree.body
    )


def _sleeps(node: ast.AST) -> Iterator[int]:
    """Lines of `time.sleep(…)` and `asyncio.sleep(…)`; `asyncio.sleep(0)` only yields."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        _marks(decorator) & {"slow", "net"} for decorator in node.decorator_list
    ):
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in {"asyncio", "time"}
        and [ast.unparse(argument) for argument in node.args] != ["0"]
    ):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _sleeps(child)


def test_fast_tests_never_sleep() -> None:
    sleeping = [
        f"{source.path}:{line}"
        for source in sources()
        if source.path.startswith("tests/") and not _may_sleep(source)
        for line in _sleeps(source.tree)
    ]
    assert sleeping == []


def _core_faults(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
            chance = {a.name for a in node.names} - CORE_RANDOM if node.module == "random" else ()
            yield from (f"{node.lineno} random.{name}" for name in chance)
        else:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                whole = (node.value.id, node.attr)
                if whole == ("os", "urandom") or (
                    node.value.id == "random" and node.attr not in CORE_RANDOM
                ):
                    yield f"{node.lineno} {'.'.join(whole)}"
            continue
        yield from (f"{node.lineno} {name}" for name in sorted(names & CORE_BANNED))


def test_cores_have_no_clock_no_chance_and_no_waiting() -> None:
    faults = [
        f"{source.path}:{fault}"
        for source in sources()
        if any(PurePosixPath(source.path).match(pattern) for pattern in CORE_MODULES)
        and not source.path.startswith("tests/")
        for fault in _core_faults(source.tree)
    ]
    assert faults == []


def _readme_folders() -> set[str]:
    """Folders in README's tree: each line is `name/  phrase`, two spaces deeper per level."""
    block = re.search(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block, "README.md has no ```text block with the tree"
    folders: set[str] = set()
    parents: list[str] = []
    for indent, name in re.findall(r"^( *)([\w.-]+)/(?= |$)", block[1], re.M):
        parents = [*parents[: len(indent) // 2], name]
        folders.add("/".join(parents))
    return folders


def test_readme_shows_every_folder() -> None:
    shown = _readme_folders()
    top = {path.parts[0] for path in tree_files() if len(path.parts) > 1}
    assert top | set(packages().values()) <= shown
    assert [folder for folder in sorted(shown) if not (ROOT / folder).is_dir()] == []


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for path in tree_files():
        if path.parts[0] in FOLDERS or len(path.parts) == 1:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes((ROOT / path).read_bytes())
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    subprocess.run(build, cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("dugnad-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {f"dugnad/{path}" for path in tree_files() if path.parts[0] in FOLDERS}
