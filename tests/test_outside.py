"""What people outside meet first: the workflow, the pages beside it, the versions, and the flag of the profiler."""

import json
import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import common
import train_ppo_vl as ppo
from common import identity
from common.ground import versions
from conftest import ROOT, user_error

WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()


def test_the_workflow_runs_what_the_authors_run_and_can_change_nothing():
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads `on` as true
    assert "secrets" not in WORKFLOW and "pull_request_target" not in WORKFLOW
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name) for name in used)
        assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]


def test_versions_that_were_tried_together_are_allowed():
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = [
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"
    ]
    for requirement in map(Requirement, wanted):
        assert tried[requirement.name] in requirement.specifier
    for name in ("torch", "transformers"):
        oldest, newest = map(Version, versions.TRIED[name])
        assert oldest.release <= Version(tried[name]).release[:2] <= newest.release


def test_the_digest_of_the_project_covers_both_scripts_and_all_of_common():
    names = {path.relative_to(ROOT).as_posix() for path in identity.project_files()}
    assert {"train_ppo_vl.py", "train_grm_vl.py"} < names
    assert names >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "common").rglob("*.py")}


def test_the_news_begin_with_this_version():
    news = (ROOT / ".github" / "NEWS.md").read_text()
    assert re.findall(r"^## (\S+)", news, re.MULTILINE)[0] == common.VERSION


@pytest.mark.parametrize("text", ["5", "3-2", "0-4", "a-b", "-1"])
def test_profiled_steps_are_two(text):
    with user_error(f"--profile_steps '{text}' must be the first and the last step, such as 5-6"):
        ppo.parse_args([f"--profile_steps={text}"])


def test_a_profile_has_the_operators_and_the_memory_of_its_steps(flags, out):
    """The second of two steps alone."""
    ppo.main([*flags(out), "--profile_steps", "2-2"])
    (trace,) = (out / "tensorboard").glob("*.pt.trace.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::mm", "[memory]"} <= names
