"""The house rules: which room may import which, and how much a reader has to carry.

Sizes are counted in expressions (`ast.expr` nodes), which do not change when lines are broken elsewhere.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo_vl.py", "train_grm_vl.py")
FILES = [ROOT / name for name in (*SCRIPTS, "launch/plan.py")] + sorted((ROOT / "common").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert)

# Most expressions of the whole, of each script, of any other file.
SIZES = {"product": 64_500, "train_ppo_vl.py": 9_200, "train_grm_vl.py": 3_200, "file": 2_360}

# Modules from the ground up, and what each may import of its own floor. Lower floors are open to all above.
FLOORS = (
    {
        "common.files": (),
        "common.process": ("common.files",),
        "common.flags": ("common.process",),
        "common.settings": ("common.flags",),
        "common.cards": (),
        "common.losses": (),
        "common.logprobs": (),
        "common.distributed": ("common.process",),
        "common.deadlines": (),
        "common.conversations": ("common.process", "common.distributed"),
        "common.buffers": ("common.distributed", "common.conversations"),
        "common.logging": (
            "common.files", "common.process", "common.settings", "common.cards", "common.distributed",
        ),
    },
    {
        "common.vlm": (),
        "common.vlm.images": (),
        "common.vlm.families": ("common.vlm.images",),
        "common.vlm.folder": (),
        "common.vlm.rows": ("common.vlm.images", "common.vlm.families"),
        "common.vlm.data": (
            "common.vlm.images", "common.vlm.families", "common.vlm.folder", "common.vlm.rows",
        ),
        "common.vlm.linear_attention": (),
        "common.vlm.attention": ("common.vlm.families", "common.vlm.linear_attention"),
        "common.vlm.model": (
            "common.vlm.families", "common.vlm.attention", "common.vlm.linear_attention",
        ),
        "common.vlm.layers": (),
        "common.vlm.compilation": (
            "common.vlm.attention", "common.vlm.linear_attention", "common.vlm.model",
        ),
        "common.graphs": (),
        "common.fsdp": (),
        "common.vlm.weights": (
            "common.vlm.families", "common.vlm.folder", "common.vlm.data", "common.vlm.attention",
            "common.vlm.linear_attention", "common.vlm.model", "common.vlm.layers",
            "common.vlm.compilation", "common.fsdp",
        ),
        "common.staging": ("common.fsdp",),
        "common.storage": ("common.vlm.weights", "common.fsdp", "common.staging"),
        "common.checkpoint": (
            "common.vlm.weights", "common.fsdp", "common.staging", "common.storage",
        ),
        "common.vlm.replies": (
            "common.vlm.images", "common.vlm.rows", "common.vlm.data", "common.vlm.attention", "common.vlm.model",
        ),
        "common.memory": (
            "common.vlm.attention", "common.vlm.linear_attention", "common.vlm.model",
        ),
        "common.budget": ("common.vlm.attention", "common.memory"),
    },
    {
        "common.judge": (),
        "common.accuracy": ("common.judge",),
        "common.rules": ("common.judge",),
        "common.remote": (),
        "common.reward_functions": ("common.remote", "common.rules"),
        "common.transcripts": (),
        "common.reward_models": ("common.judge", "common.accuracy", "common.transcripts"),
        "common.rewards": ("common.reward_functions", "common.transcripts"),
        "common.environments": ("common.reward_functions",),
        "common.dialogue": ("common.environments",),
        "common.records": ("common.transcripts",),
        "common.looks": (),
    },
    {
        "train_ppo_vl": (),
        "train_grm_vl": (),
        "launch.plan": ("train_ppo_vl", "train_grm_vl"),
    },
)


def trees() -> dict[str, ast.Module]:
    """Of every file that is not empty, by its module's name: common/vlm/data.py is common.vlm.data."""
    found = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body:
            found[name] = tree
    return found


def imported(module: str, tree: ast.Module) -> set[str]:
    """What a file imports, by full names; of `from a import b` both a and a.b, which may be a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[:-node.level] if node.level else []
            base = ".".join([*above, node.module or ""]).strip(".")
            names |= {base, *(f"{base}.{name.name}" for name in node.names)}
    return names - {module}


def wrong_imports(module: str, names: set[str]) -> list[str]:
    """Those that go up, or sideways without leave."""
    floors = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    packages = {room for room in floors if any(other.startswith(f"{room}.") for other in floors)}
    wrong = []
    for name in sorted(names & floors.keys() - packages):
        if floors[name] > floors[module] or floors[name] == floors[module] and name not in FLOORS[floors[module]][module]:
            wrong.append(f"{module} imports {name}")
    scripts_and_tests = {name for name in names if name.split(".")[0] in ("launch", "tests")}
    return wrong + [f"{module} imports {name}" for name in sorted(scripts_and_tests)]


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return trees()


def test_imports_go_down(modules):
    for module, tree in modules.items():
        if "." in module or module.startswith("train_"):
            assert wrong_imports(module, imported(module, tree)) == [], module
    assert wrong_imports("common.losses", {"common.buffers"}) and wrong_imports("common.judge", {"launch.toy"})


def test_every_module_has_a_floor_and_imports_only_what_is_listed_before_it(modules):
    assert {room for floor in FLOORS for room in floor} >= modules.keys() - {"common"}
    for floor in FLOORS:
        before = set()
        for room, opened in floor.items():
            assert set(opened) <= before, room
            before.add(room)


def test_sizes(modules):
    sizes = {name: sum(isinstance(node, ast.expr) for node in ast.walk(tree)) for name, tree in modules.items()}
    assert sum(sizes.values()) <= SIZES["product"]
    for name, size in sizes.items():
        assert size <= SIZES.get(f"{name}.py", SIZES["file"]), name


def test_functions_fit_on_a_page(modules):
    """At most 50 lines (`main` 80), 15 branches and, but for formulas, 6 parameters."""
    for module, tree in modules.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            place = f"{module}.{function.name}"
            assert function.end_lineno - function.lineno < (80 if function.name == "main" else 50), place
            nodes = list(ast.walk(function))
            ors = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
            assert 1 + ors + sum(isinstance(node, BRANCHES) for node in nodes) <= 15, place
            names = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)} - {"self", "cls"}
            formula = module.rpartition(".")[2] in ("losses", "logprobs", "attention", "linear_attention")
            assert len(names) <= (9 if formula else 6), place


def test_lines_are_not_long():
    for path in FILES:
        assert max(map(len, path.read_text(encoding="utf-8").splitlines()), default=0) <= 110, path


def test_the_top_level_is_fixed():
    allowed = {*SCRIPTS, "common", "launch", "tests", "requirements.txt", "README.md"}
    made = {"toy", "toy_describe", "runs", "real", "__pycache__"}  # by commands; not tracked
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "toy."))}  # toy.*: being made
    assert there <= allowed | made
