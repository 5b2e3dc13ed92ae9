#!/usr/bin/env python3
"""Rules that the authors keep and a fork need not: how much a reader has to carry, and that
documents name what is there. Prints what breaks them.

The whole has no limit of size: a mended fault must not be paid for by denser lines."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from test_architecture import FILES, PACKAGES, SCRIPTS, branches_of, imported, package_of, trees  # noqa: E402

FLOORS = 14  # modules that import each other in a row, the script among them
MAIN_LINES, FUNCTION_LINES, LINE = 65, 50, 110
LONG_LINES = 2  # of a test file, longer than LINE
FLAG_LINES = 400  # between main and the first stage of train_ppo_vl.py
# whose signatures follow papers and kernels
FORMULAS = ("losses", "logprobs", "attention", "linear_attention")
# whose ValueErrors are bugs, or are read where a user's program is called
THEIR_VALUE_ERRORS = (
    "buffers losses rollout model.attention data.loader child answers rewards.sources"
)
# of a variable, they do not tell what it holds
NAMES = {"found", "own", "said", "kept", "shown", "given"}
TOP = {*SCRIPTS, "common", "launch", "tests", "requirements.txt", "README.md"}
MADE = {"toy", "toy_describe", "runs", "real", "__pycache__"}  # by commands; not tracked

READMES = ("README.md", "common/README.md", "launch/README.md", "tests/README.md")
PAGES = (*READMES, ".github/CONTRIBUTING.md", ".github/NEWS.md")
# torchrun, SLURM and apptainer, pip and tensorboard, real_words.sh, tests/run.sh, the experiments
FLAGS_OF_OTHERS = """help config
standalone nproc_per_node nnodes rdzv_backend rdzv_endpoint rdzv_id max_restarts
nodes gpus-per-node time partition signal output open-mode job-name ntasks-per-node requeue exclusive cpus-per-task array
export wait nv
quiet disable-pip-version-check no-compile no-deps dry-run no-index offline python version logdir
force-reinstall index-url no-build-isolation shutdown-timeout
critic teacher fetch imitation_coef versions
"""

Problems = Iterator[str]


def flags_of(modules: dict[str, ast.Module]) -> set[str]:
    """The fields that are flags, by the call that declares them."""
    nodes = [
        node
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
    ]
    return {
        node.target.id
        for node in nodes
        if getattr(getattr(node.value, "func", None), "id", "") == "flag"
    }


def functions(modules: dict[str, ast.Module]) -> Problems:
    for module, tree in modules.items():
        for function in (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            names = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)} - {
                "self",
                "cls",
            }
            measured = {
                "lines": (
                    function.end_lineno - function.lineno + 1,
                    MAIN_LINES if function.name == "main" else FUNCTION_LINES,
                ),
                "branches": (branches_of(function), 15),
                "parameters": (len(names), 9 if module.rpartition(".")[2] in FORMULAS else 6),
            }
            for what, (count, limit) in measured.items():
                if count > limit:
                    yield f"{module}.{function.name}: {count} {what}, at most {limit}"


def packages(modules: dict[str, ast.Module]) -> Problems:
    unlisted = {package_of(module) for module in modules} - {""} ^ PACKAGES.keys()
    if unlisted:
        yield f"TABLE of tests/test_architecture.py: {', '.join(sorted(unlisted))} is there or here, not both"
    before: set[str] = set()
    for package, imports in PACKAGES.items():
        if imports - before:
            yield f"TABLE of tests/test_architecture.py: {package} comes before {', '.join(imports - before)}"
        before.add(package)
    arrows = {module: imported(module, tree) & modules.keys() for module, tree in modules.items()}
    floors: dict[str, int] = {}

    def floor(module: str) -> int:
        if module not in floors:
            floors[module] = 1 + max(map(floor, arrows[module]), default=0)
        return floors[module]

    highest = max(modules.keys() - {"launch.plan"}, key=floor)
    if floors[highest] > FLOORS:
        yield f"{highest}: {floors[highest]} modules import each other in a row, at most {FLOORS}"


def prints(modules: dict[str, ast.Module]) -> Problems:
    """What files, servers and user code say is made fit for a terminal at these doors. A plan is numbers."""
    doors = {"common.ground.files": "print", "common.logging": "tqdm.write", "launch.plan": "print"}
    for module, tree in modules.items():
        for node in ast.walk(tree):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if call in ("print", "tqdm.write", "traceback.print_exc") and call != doors.get(module):
                yield f"{module}:{node.lineno}: {call}, not common.ground.files.say or RunLogger.line"


def owners(modules: dict[str, ast.Module]) -> Problems:
    """A ValueError is shown as a bug: what a user can mend is a UserError."""
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and "raise ValueError" in ast.unparse(node):
                if module.removeprefix("common.") not in THEIR_VALUE_ERRORS.split():
                    yield f"{module}:{node.lineno}: a ValueError, which a user cannot mend; or UserError?"


def lines() -> Problems:
    for path in FILES:
        count = sum(len(line) > LINE for line in path.read_text(encoding="utf-8").splitlines())
        if count:
            yield f"{path.relative_to(ROOT)}: {count} lines of more than {LINE} characters"


def long_lines_of_tests() -> Problems:
    for path in (ROOT / "tests").rglob("*.py"):
        count = sum(len(line) > LINE for line in path.read_text(encoding="utf-8").splitlines())
        if count > LONG_LINES:
            yield f"{path.relative_to(ROOT)}: {count} lines of more than {LINE} characters, at most {LONG_LINES}"


def first_stage(modules: dict[str, ast.Module]) -> Problems:
    """How far a reader scrolls over flags."""
    stages = {getattr(node, "name", ""): node for node in modules["train_ppo_vl"].body}
    count = stages["load_programs"].lineno - stages["main"].end_lineno - 1
    if count > FLAG_LINES:
        yield f"train_ppo_vl.py: {count} lines between main and load_programs, at most {FLAG_LINES}"


def variables() -> Problems:
    """Tests and tools too."""
    for path in [*FILES, *(ROOT / "launch").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in NAMES:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name} does not tell what it holds"


def aliases(modules: dict[str, ast.Module]) -> Problems:
    """A module of ours under another name hides where a thing lives."""
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common"):
                for name in node.names:
                    if name.asname:
                        yield f"{module}:{node.lineno}: {name.name} under the name {name.asname}"


def senses(modules: dict[str, ast.Module]) -> Problems:
    """A name that two modules define has two senses. The scripts are twins: they share names with each other."""
    homes: dict[str, str] = {}
    for module, tree in modules.items():
        if module == "launch.plan":  # a program
            continue
        home = "the scripts" if f"{module}.py" in SCRIPTS else module
        for node in tree.body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            )
            for target in targets:
                name = getattr(target, "id", getattr(target, "name", ""))
                if name and homes.setdefault(name, home) != home:
                    yield f"{module}:{node.lineno}: {name} is defined in {homes[name]}, too"


def top_level() -> Problems:
    for path in ROOT.iterdir():
        # toy.*: being made
        if path.name not in TOP | MADE and not path.name.startswith((".", "toy.")):
            yield f"{path.name}: not at the top, where {', '.join(sorted(TOP))} are"


def unread_flags(modules: dict[str, ast.Module]) -> Problems:
    """As an attribute of something; checks do not count. A judge's templates are read by name."""
    statements = [
        node
        for tree in modules.values()
        for node in tree.body
        if not getattr(node, "name", "").startswith("check_")
    ]
    nodes = [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
    ]
    for name in sorted(
        flags_of(modules) - {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}
    ):
        if not name.endswith("_template"):
            yield f"--{name} is never read"


def documents(modules: dict[str, ast.Module]) -> Problems:
    """Flags, files, links, sentences, and in the tables of parity and sentences tests, that are not there."""
    known = flags_of(modules) | set(FLAGS_OF_OTHERS.split())
    for path in (ROOT / "launch").rglob("*.py"):
        known |= set(re.findall(r"\"--([a-z][\w-]+)\"", path.read_text(encoding="utf-8")))
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for name, text in pages.items():
        for path in re.findall(r"\b(?:launch|tests|common)/[\w/]+\.\w+", text):
            if (
                not (ROOT / path).exists() and name != ".github/NEWS.md"
            ):  # which names what was before
                yield f"{name}: there is no {path}"
        yield from links(name, text)
    step = pages["README.md"].partition("```python\n")[2].partition("```")[0]
    if step not in (ROOT / SCRIPTS[0]).read_text(encoding="utf-8"):
        yield f"README.md: one step is not that of {SCRIPTS[0]}"
    parity = pages["tests/README.md"].partition("**LightRFT `PPO")[2]
    tests = {
        path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    }
    for file, test in re.findall(r"\b(\w+)::(\w+)", parity):
        if f"def test_{test}(" not in tests.get(f"test_{file}", ""):
            yield f"tests/README.md: there is no {file}::{test}"
    yield from sentences(pages)
    yield from lines_of_modules(pages["common/README.md"])
    for path in (*(ROOT / "launch").rglob("*.s*"), *(ROOT / name for name in READMES)):
        text = path.read_text(encoding="utf-8").replace("--remote_*", "")
        text = "\n".join(
            line for line in text.splitlines() if "sbatch" not in line and "scancel" not in line
        )
        named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text))
        off = {flag for flag in named if flag.removeprefix("no-") in known}
        for flag in sorted(named - known - off):
            yield f"{path.relative_to(ROOT)}: there is no --{flag}"


def sentences(pages: dict[str, str]) -> Problems:
    """Those that tests/README.md quotes and the page does not say any more; and rows without a test."""
    _, *parts = re.split(r"^\*\*`(.+)`\*\*$", pages["tests/README.md"], flags=re.MULTILINE)
    for page, rows in zip(parts[::2], parts[1::2]):
        quoted = re.findall(r"^\| (.+?) \|(.*)$", rows, re.MULTILINE)[1:]
        for sentence, tests in quoted:
            if sentence not in pages[page]:
                yield f"{page} does not say any more: {sentence}"
            if "::" not in tests:
                yield f"tests/README.md: no test of: {sentence}"


def lines_of_modules(page: str) -> Problems:
    """The numbers of lines in the first table of common/README.md, which are off by a tenth."""
    common = ROOT / "common"
    for row, stated in re.findall(r"^\| .* \| (.*) \| ([\d,]+) \|$", page, re.MULTILINE):
        count = 0
        for name in re.findall(r"`(\w+)/?`", row):
            for path in (*common.glob(f"{name}.py"), *common.glob(f"{name}/*.py")):
                count += path.read_text(encoding="utf-8").count("\n")
        if abs(count - int(stated.replace(",", ""))) > count / 10:
            yield f"common/README.md: {row} have {count:,} lines, not {stated}"


def experiments() -> Problems:
    """Each applies alone. In a fork it need not: its test is skipped there."""
    for diff in sorted((ROOT / "tests" / "experiments").glob("*.diff")):
        if subprocess.run(["git", "apply", "--check", str(diff)], cwd=ROOT).returncode:
            yield f"{diff.relative_to(ROOT)} does not apply"


def links(page: str, text: str) -> Problems:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            yield f"{page}: no file behind the link {target}"
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            ]
            if anchor not in anchors:
                yield f"{page}: no heading behind the link {target}"


if __name__ == "__main__":
    modules = trees()
    problems = [
        *functions(modules),
        *packages(modules),
        *prints(modules),
        *owners(modules),
        *lines(),
        *long_lines_of_tests(),
        *first_stage(modules),
        *variables(),
        *aliases(modules),
        *senses(modules),
        *top_level(),
    ]
    problems += [*unread_flags(modules), *documents(modules), *experiments()]
    print("\n".join(problems) or "all rules are kept")
    sys.exit(bool(problems))
