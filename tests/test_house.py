"""The house keeps its plan: arrows between the rooms of utils/ go up only, and no module imports itself by way of others."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

FLOORS = ["core", "options", "data optim", "diffusion runs", "diagnostics", "evaluation", "training"]
FLOORS = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "utils").rglob("*.py")}
IMPORTS = {name: set() for name in MODULES}
for _name, _path in MODULES.items():
    for _node in ast.walk(ast.parse(_path.read_text())):
        if isinstance(_node, ast.ImportFrom) and _node.module:
            IMPORTS[_name] |= {_node.module, *(f"{_node.module}.{part.name}" for part in _node.names)} & MODULES.keys()
        elif isinstance(_node, ast.Import):
            IMPORTS[_name] |= {part.name for part in _node.names} & MODULES.keys()


def room(module: str) -> str:
    return module.split(".")[1]


def test_arrows_go_up_only():
    inside = {name: imported for name, imported in IMPORTS.items() if name.count(".") > 1}
    assert {room(name) for name in inside} == FLOORS.keys() and sum(map(len, inside.values())) > 200
    between = {(name, other) for name, imported in inside.items() for other in imported if room(name) != room(other)}
    assert [pair for pair in between if FLOORS[room(pair[1])] >= FLOORS[room(pair[0])]] == []


def test_there_is_no_circle():
    assert len(list(TopologicalSorter(IMPORTS).static_order())) == len(MODULES)  # raises where there is one


def test_nobody_waits_in_a_barrier_for_a_process_that_works_alone():
    """A collective call gives up after --collective_timeout: see `waited_for` and `main_process_first`."""
    barriers = ["wait_for_everyone", "main_process_first", "local_main_process_first", "barrier", "monitored_barrier"]
    for path in [*MODULES.values(), *ROOT.glob("*.py")]:
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not called.intersection(barriers), path


def test_packages_are_empty_and_no_utility_imports_a_script():
    written = [name for name, path in MODULES.items() if path.name == "__init__.py" and path.read_text()]
    assert written == []
    scripts = {path.stem for path in Path(ROOT).glob("*.py")}
    for name, path in MODULES.items():
        words = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not words & scripts, name


def test_the_doctor_of_any_script_imports_nothing_of_the_trainer():
    paths = list((ROOT / "steady_doctor").rglob("*.py"))
    assert len(paths) > 5
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [part.name for part in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if str(name).split(".")[0] in ("utils", "models", "benchmarks")], path
