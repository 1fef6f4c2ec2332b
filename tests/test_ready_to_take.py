"""What others take from the repository: the image, the GitHub Action, hooks, `plan check`."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from planner.cli import app
from planner.commands.printed_tables import print_markdown

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# In place of the planner: a fleet as dear as the question's rate, and none above 100 requests/s.
PLAN = """#!/bin/sh
if [ "$1" = compare ]; then shift; echo "| compared | $* |"; exit 0; fi
while [ $# -gt 0 ]; do case $1 in --slo) slo=$2 ;; -o) out=$2 ;; esac; shift; done
rate=$(sed -n 's/rate: //p' "$slo")
if [ "$rate" -gt 100 ]; then echo "plan: no fleet carries $rate" >&2; exit 3; fi
mkdir -p "$out"; touch "$out/plan.yaml"; echo "Buy $rate GPUs"; echo "written to $out"
"""
GH = """#!/bin/sh
echo "$@" >> "$GH_LOG"
[ ! -e "$GH_LOG.forbidden" ] || exit 1
case "$*" in *--paginate*) cat "$GH_LOG.comments" 2>/dev/null || true ;; esac
"""


def _git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def pull_request(tmp_path: Path) -> Path:
    """A repository with a question of 5 requests/s on main, in a branch that is to change it."""
    repository, programs = tmp_path / "repository", tmp_path / "programs"
    for folder in (repository, programs):
        folder.mkdir()
    for name, script in (("plan", PLAN), ("gh", GH)):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    _git(repository, "init", "-q", "-b", "main")
    (repository / "slo.yaml").write_text("rate: 5\n")
    _git(repository, "add", ".")
    _git(repository, "commit", "-qm", "before")
    _git(repository, "checkout", "-qb", "change")
    return repository


def _replan(repository: Path, rate: int, **more: str) -> tuple[int, str, list[str], str]:
    """Commit a rate and run the action's script: exit code, comment, calls of `gh`, what was printed."""
    (repository / "slo.yaml").write_text(f"rate: {rate}\n")
    _git(repository, "commit", "-qam", "after", "--allow-empty")
    parent = repository.parent
    report, log = parent / "fleetplan-report.md", parent / "gh.log"
    for file in (report, log):
        file.unlink(missing_ok=True)
    environment = {
        "PATH": f"{parent / 'programs'}:{os.environ['PATH']}",
        "HOME": str(parent),
        "SLO": "slo.yaml",
        "BASE_SHA": _git(repository, "rev-parse", "main"),
        "PULL_REQUEST": "7",
        "GITHUB_REPOSITORY": "an/owner",
        "RUNNER_TEMP": str(parent),
        "GH_LOG": str(log),
        **more,
    }
    done = subprocess.run(
        ["bash", str(ROOT / "action" / "replan.sh")],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    calls = log.read_text().splitlines() if log.exists() else []
    return (done.returncode, report.read_text() if report.exists() else "", calls, done.stdout + done.stderr)


def test_the_action_comments_the_difference_and_later_writes_it_anew(pull_request: Path) -> None:
    code, report, calls, _ = _replan(pull_request, 8)
    assert code == 0
    assert "| compared | --markdown --fleet before=" in report and "--slo slo.yaml" in report
    assert "Buy 8 GPUs" in report and "written to" not in report and "+rate: 8" in report
    assert "--method POST repos/an/owner/issues/7/comments" in calls[-1]
    (pull_request.parent / "gh.log.comments").write_text("42\n43\n")
    _, _, calls, _ = _replan(pull_request, 9)
    assert "--method PATCH repos/an/owner/issues/comments/42" in calls[-1]
    assert _git(pull_request, "worktree", "list").count("\n") == 0


def test_the_action_plans_nothing_for_an_unchanged_question(pull_request: Path) -> None:
    assert _replan(pull_request, 5)[:3] == (0, "", [])


def test_the_action_fails_where_no_fleet_keeps_the_slo_and_says_so(pull_request: Path) -> None:
    code, report, calls, _ = _replan(pull_request, 200)
    assert code == 3 and "No fleet was planned" in report and "no fleet carries 200" in report and calls
    assert _replan(pull_request, 201, FAIL_ON_INFEASIBLE="false")[0] == 0


def test_the_action_of_a_fork_warns_that_it_may_not_comment(pull_request: Path) -> None:
    (pull_request.parent / "gh.log.forbidden").touch()
    code, report, _, printed = _replan(pull_request, 8)
    assert code == 0 and report and "::warning::no comment was written" in printed


def test_the_action_gives_its_script_all_that_it_needs() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = next(each for each in action["runs"]["steps"] if each.get("id") == "replan")
    script = (ROOT / "action" / "replan.sh").read_text()
    needed = set(re.findall(r"\$\{([A-Z_]+)[:}]", script))
    given_by_github = {"GITHUB_REPOSITORY", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"}
    assert needed - given_by_github <= set(step["env"])
    assert not any("${{" in str(each.get("run", "")) for each in action["runs"]["steps"])


def test_workflows_use_actions_by_commit() -> None:
    """Tags can be moved: what runs with the right to publish is named by its hash."""
    for path in (ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")):
        used = re.findall(r"^\s*- uses: (\S+)", path.read_text(), re.MULTILINE)
        assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each) for each in used)


def test_a_release_publishes_without_a_stored_token() -> None:
    release: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["permissions"] == {} and "secrets." not in str(release)
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"


def test_the_image_has_all_that_the_wheel_is_built_of_and_no_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if re.match(r"COPY (?!--)", line) for word in line.split()[1:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", PROJECT["project"]["readme"]}
    assert needed <= copied and all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == copied
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    assert [stage[-1] for stage in stages] == ["build", "base", "router", "plan"]
    assert [stage[1] for stage in stages[2:]] == ["base", "base"] and "USER 10001:10001" in lines
    commands = re.findall(r'^ENTRYPOINT \["plan"(?:, "(\w+)")?', "\n".join(lines), re.MULTILINE)
    assert commands == ["serve", ""]


def test_the_hook_checks_the_files_that_it_is_for() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "plan check"
    named = ("slo.yaml", "a/slo-prod.yml", "fleet.yaml", "myslo.yaml", "slo.yaml.bak")
    assert [bool(re.search(hook["files"], name)) for name in named] == [True, True, True, False, False]


def test_check_reads_every_file_and_says_one_line_for_each_that_is_bad(tmp_path: Path) -> None:
    examples = [str(path) for path in (ROOT / "examples").glob("*.yaml")]
    good = CliRunner().invoke(app, ["check", *examples])
    assert good.exit_code == 0 and good.output.count(": ok") == len(examples) >= 5
    bad = tmp_path / "slo.yaml"
    bad.write_text("llm: meta-llama/Llama-3.1-8B\nslo: {ttft: {p90: 2 parsecs}}\n")
    done = CliRunner().invoke(app, ["check", examples[0], str(bad)])
    assert f"{examples[0]}: ok" in done.output and "parsecs" in done.output


def test_a_table_in_markdown_keeps_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_markdown([{"": "fleet", "a|b": "2 | 3", "c": None}], "1 request")
    assert (
        capsys.readouterr().out
        == "1 request:\n\n|  | a\\|b | c |\n|---|---|---|\n| **fleet** | 2 \\| 3 | - |\n\n"
    )
