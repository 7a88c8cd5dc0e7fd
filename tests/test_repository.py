"""Rules of the repository that no linter knows."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Each package and what it may import: the floors of docs/architecture.md.
FLOORS = {
    "kernels_pallas": set(),
    "kvjax": {"kernels_pallas"},
    "models": {"kernels_pallas", "kvjax"},
    "evals": {"kernels_pallas", "kvjax", "models"},
    "train": {"kernels_pallas", "kvjax", "models", "evals"},
    "benchmarks": {"kernels_pallas", "kvjax", "models", "evals", "train"},
    "papers": {"kernels_pallas", "kvjax", "models", "evals", "train", "benchmarks"},
}
# What importing a package may need, by extra; what lies behind a function may need more.
EXTRAS = {"kernels_pallas": [], "kvjax": [], "models": [], "evals": ["eval"], "train": ["train"]}
EXTRAS |= {"benchmarks": ["eval"], "papers": ["eval", "train"]}
# Where the import's name is not the distribution's; what comes with jax.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "jaxlib": "jax", "ml_dtypes": "jax"}

TEXT = {".py", ".md", ".rst", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ".ini", ".ipynb", ".sh", ".html", ""}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The top-level name of every absolute import in a tree, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0], node.lineno


def on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The import statements that run when a module is imported: none inside functions or under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from on_import(node)


def repository_files() -> list[Path]:
    """What git tracks or would add; without git, all that isn't hidden or built."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        return [ROOT / name for name in sorted(set(names)) if name and (ROOT / name).is_file()]
    skipped = {"__pycache__", "build", "dist", "demo", "runs", "venv"}
    files = (path for path in ROOT.rglob("*") if path.is_file())
    return sorted(
        path for path in files if not any(p in skipped or p.startswith(".") for p in path.relative_to(ROOT).parts)
    )


def distribution(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, f"pyproject.toml: {requirement!r} is no requirement"
    return name.group().lower().replace("_", "-")


@pytest.mark.parametrize("package", FLOORS)
def test_imports_run_one_way(package: str):
    forbidden = (set(FLOORS) | {"tests", "notebooks"}) - FLOORS[package] - {package}
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name in forbidden
    ]
    assert not found, f"{package} may import {sorted(FLOORS[package]) or 'no other package of ours'}: {found}"


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions count, those under TYPE_CHECKING do not."""
    files = {path.relative_to(ROOT).with_suffix(""): path for package in FLOORS for path in sources(package)}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}
    left = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text("utf-8"))
        hidden = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        ignored = {id(x) for node in hidden if "TYPE_CHECKING" in ast.unparse(node.test) for x in ast.walk(node)}
        named = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in ignored]
        each = [(str(node.module), f"{node.module}.{alias.name}") for node in named for alias in node.names]
        names = {name if name in modules else package for package, name in each} & modules.keys()
        left[module] = names - {module, *FLOORS}
    while free := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in free}
    assert not left, f"these files import one another in a circle: {sorted(left)}"


@pytest.mark.parametrize("package", sorted(set(FLOORS) - {"kernels_pallas"}))
def test_a_function_has_at_most_eight_parameters(package: str):
    found = []
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found += [(path.name, node.name)] if len(set(names) - {"self", "cls"}) > 8 else []
    assert not found, f"more than eight parameters: {found}; join those that belong together"


def test_the_library_imports_no_command():
    """Users call what is in models/; models/commands/ stands on it, with an entry point for each command."""
    entries = {path.name for path in sources("models/commands")}
    for path in sorted((ROOT / "models").glob("**/*.py")):
        text = path.read_text(encoding="utf-8")
        if "commands" in path.parts or (path.name in entries and "raise SystemExit(main())" in text):
            continue
        assert "models.commands" not in text and not re.search(r"from models import .*\bcommands\b", text), path


@pytest.mark.parametrize("package", FLOORS)
def test_what_a_package_imports_is_declared(package: str):
    project = PYPROJECT["project"]
    declared = {distribution(r) for r in project["dependencies"]}
    for extra in EXTRAS[package]:
        declared |= {distribution(r) for r in project["optional-dependencies"][extra]}
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for statement in on_import(ast.parse(path.read_text(encoding="utf-8")))
        for name, line in imports(statement)
        if name not in sys.stdlib_module_names
        and name not in FLOORS
        and DISTRIBUTIONS.get(name, name.lower().replace("_", "-")) not in declared
    ]
    assert not found, (
        f"not among {package}'s dependencies (the core's, extras {EXTRAS[package]}): {found}. "
        "Declare it in pyproject.toml or import it inside the function that needs it."
    )


def test_no_file_names_this_machine():
    folders = "|".join(["root", "work", "home", "Users", "mnt", "scratch", "workspace"])
    pattern = re.compile(rf"(?<![\w.:/~*-])/(?:{folders})/[\w.]|file:///\w|--(?:extra-)?index-url[ =]\S")
    found = []
    for path in repository_files():
        if path.suffix not in TEXT:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {match.group()}"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := pattern.search(line))
        ]
    assert not found, f"absolute paths and package indexes stay out of the repository: {found}"


PUBLIC_MODULES = ("allocation", "schedule", "sources")


@pytest.mark.parametrize("package", ["kvjax", "models"])
def test_each_public_function_has_an_example(package: str):
    module = importlib.import_module(package)
    missing_names = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing_names, f"{package}.__all__ names what {package} does not have: {missing_names}"
    public = {name: getattr(module, name) for name in module.__all__}
    functions = {n: f for n, f in public.items() if callable(f) and not isinstance(f, type)}
    missing = [name for name, function in functions.items() if ">>> " not in (function.__doc__ or "")]
    assert not missing, f"no docstring with an example (>>> ...): {', '.join(f'{package}.{n}' for n in missing)}"


@pytest.mark.parametrize(("package", "known"), [("kvjax", PUBLIC_MODULES), ("models", ("ask", "generate"))])
def test_no_module_stands_where_a_public_name_does(package: str, known: tuple[str, ...]):
    """Names are imported when they are used; models.ask and models.generate refuse to be imported."""
    modules = {path.stem for path in (ROOT / package).iterdir()}
    assert modules & set(importlib.import_module(package).__all__) == set(known)


PAGES = [*sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md"]


def test_what_is_no_public_module_of_kvjax_is_in_its_src():
    found = {
        path.stem for path in (ROOT / "kvjax").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert found == {"__init__", "_src", *PUBLIC_MODULES}


def test_what_users_copy_imports_public_names():
    texts = {
        page: re.findall(r"^ *```python\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for page in PAGES
    }
    code = [*ROOT.glob("docs/examples/**/*.py"), *ROOT.glob("notebooks/[0-9]*")]
    texts |= {path: [path.read_text("utf-8")] for path in code}
    assert [str(path.relative_to(ROOT)) for path, parts in texts.items() if "kvjax._src" in "".join(parts)] == []


def test_the_reference_describes_each_public_name_once():
    texts = {page: page.read_text("utf-8") for page in PAGES if page.is_relative_to(ROOT / "docs/reference")}
    described = re.findall(r"^\.\. auto(?:function|class):: kvjax\.(\w+)$", "\n".join(texts.values()), re.MULTILINE)
    listed = re.findall(r"^   kvjax\.(\w+)$", texts[ROOT / "docs/reference/kvjax.md"], re.MULTILINE)
    kvjax = importlib.import_module("kvjax")
    # A public module's page describes what is in it.
    of_modules = [name for name in kvjax.__all__ if _is_of_a_module(getattr(kvjax, name))]
    assert sorted(described) == sorted(set(kvjax.__all__) - {*of_modules, *PUBLIC_MODULES})
    assert sorted(listed) == sorted([*described, *PUBLIC_MODULES])


def _is_of_a_module(thing: object) -> bool:
    return getattr(thing, "__module__", "") in {f"kvjax.{name}" for name in PUBLIC_MODULES}


def test_packages_in_pyproject_exist():
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(set(FLOORS) - {"benchmarks", "papers"})  # those run from a checkout
    for package in packages:
        assert (ROOT / package / "__init__.py").is_file(), f"{package}/__init__.py is missing"
        assert (ROOT / package / "py.typed").is_file(), f"{package}/py.typed is missing"
    assert set(packages) <= set(PYPROJECT["tool"]["pytest"]["testpaths"]), "docstring examples of a package do not run"


def test_test_folders_are_packages():
    # Else two test files of one name collide, or a folder tests/kvjax hides kvjax.
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    missing = [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()]
    assert not missing, f"add an empty __init__.py to {missing}"


def test_constraints_are_exact_versions_of_what_is_declared():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    bad = [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.!+]+", pin)]
    assert not bad, f"constraints.txt holds lines other than name==version: {bad}"
    pinned = {distribution(pin) for pin in pins}
    project = PYPROJECT["project"]
    declared = {distribution(r) for r in project["dependencies"]}
    for extra, requirements in project["optional-dependencies"].items():
        if extra not in ("cuda", "data"):  # hundreds of megabytes that CI does not install
            declared |= {distribution(r) for r in requirements}
    assert declared - {"kvjax"} <= pinned, f"not pinned: {sorted(declared - {'kvjax'} - pinned)}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("source", "installs"), [(ROOT, True), (ROOT / "elsewhere", False)])
def test_make_installs_nothing_into_the_environment_of_another_checkout(tmp_path, source, installs):
    (tmp_path / "bin").mkdir()
    python, said = tmp_path / "bin" / "python", tmp_path / "said"
    url = json.dumps({"url": f"file://{source}"})
    python.write_text(f'#!/bin/sh\necho "$@" >> {said}\ncase "$*" in *direct_url*) echo \'{url}\';; esac\n')
    python.chmod(0o755)
    made = subprocess.run(["make", "setup", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert ("-m pip install" in said.read_text()) == installs
    assert ("environment of another checkout" in made.stdout) != installs
