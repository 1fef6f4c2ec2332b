"""Notes in manifests: sentences on how a deployment routes or queues differently from what was simulated."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.fleet import Fleet, Role
from planner.manifests import engine_command, helm_chart, kustomize
from planner.policies import (
    QUEUE,
    ROUTERS,
    ROUTERS_OF,
    ROUTING,
    VLLM,
    Policy,
    RouterDifference,
    find_router_difference,
)

# Files without notes: optional files, the Dockerfile of the router's image, and templates, which are the same
# for every plan.
_OPTIONAL = (
    kustomize.COMPONENTS,
    engine_command.ROUTER_FOLDER,
    *(f"{helm_chart.FOLDER}/{folder}/" for folder in ("templates", "optional")),
)
KEPT_IN_PLAN = "and plan.yaml says under `routers` whether the SLO is kept so"
NOT_SIMULATED = "and whether an SLO is kept so was not simulated"
_UNCOMMENTED = (".json", ".tpl", "Dockerfile")  # Endings of files to which we add no comments.


def routing_notes(fleet: Fleet, target: str, *, is_simulated: bool = True) -> list[str]:
    """A sentence for every policy of the plan that the target lacks or implements differently.

    `is_simulated`: the plan was simulated under the target's router; the fleet of a fleet.yaml was not.
    """
    policies = fleet.policies
    mixed, prefill, decode = ROUTERS_OF[target]
    routing_differences: list[str] = []
    router_and_routing_by_role: tuple[tuple[Role, str, str], ...] = (
        ("mixed", mixed, policies.routing),
        ("prefill", prefill, policies.routing),
        ("decode", decode, policies.decode_routing),
    )
    for role, router, planned_routing in router_and_routing_by_role:
        if engine_command.count_workers(fleet, role) < 2:
            continue  # There is nothing to route among.
        difference = find_router_difference(ROUTING[planned_routing], router)
        for_prompts = find_router_difference(ROUTING[policies.routing], router)
        # A router with a single rule (`is_single`) uses its rule for prompts (`for_prompts.name`) for decode
        # workers too. If the planned decode routing needs another rule, the router lacks it.
        if role == "decode" and ROUTERS[router].is_single and for_prompts.name != difference.name:
            difference = RouterDifference(for_prompts.name, is_lacking=True)
        lacking = KEPT_IN_PLAN if is_simulated else NOT_SIMULATED
        routing_differences += _difference_text(router, ROUTING[planned_routing], difference, lacking)
    return [
        *dict.fromkeys(routing_differences),  # Without repeated sentences.
        *_difference_text(
            VLLM,
            QUEUE[policies.queue],
            find_router_difference(QUEUE[policies.queue], VLLM),
            "which the plan was not made for",
        ),
    ]


def _difference_text(program: str, planned: Policy, difference: RouterDifference, lacking: str) -> list[str]:
    """A sentence on the difference; empty without a difference. `program`, a key of ROUTERS, is a router or
    vLLM's scheduler. If it lacks the policy, the sentence ends with `lacking`.
    """
    title, planned_text = ROUTERS[program].title, f"{planned.name} ({planned.words})"
    if difference.is_lacking:
        return [f"{title} lacks {planned_text}: {difference.name} is in its place, {lacking}."]
    # `differs` is a clause, empty if the rules are the same.
    return (
        [f"{planned_text} at {title}: {difference.name} {difference.differs}."] if difference.differs else []
    )


def with_notes(files: Mapping[str, str], note_lines: Iterable[str]) -> dict[str, str]:
    """A target's files, with the notes as comments in files with "router" in their name; if there are none,
    in all files without the optional ones.
    """
    lines = "".join(f"# {note}\n" for note in note_lines)
    main = [path for path in files if not path.startswith(_OPTIONAL) and not path.endswith(_UNCOMMENTED)]
    routers = [path for path in main if "router" in Path(path).name] or main
    return {
        path: _below_first_comment(text, lines) if path in routers else text for path, text in files.items()
    }


def _below_first_comment(text: str, lines: str) -> str:
    """`lines` before the text, but below a comment in its first line (the shell's, or a title)."""
    first, newline, rest = text.partition("\n")
    return f"{first}{newline}{lines}{rest}" if first.startswith("#") else lines + text


def with_first_line(files: Mapping[str, str], line: str) -> dict[str, str]:
    """A target's files with the comment `line` at the top; in scripts below the line that names the shell.
    Files of formats without comments stay as they are.
    """
    if not line:
        return dict(files)
    return {
        path: text if path.endswith(_UNCOMMENTED) else _with_first(text, f"# {line}\n")
        for path, text in files.items()
    }


def _with_first(text: str, line: str) -> str:
    return _below_first_comment(text, line) if text.startswith("#!") else line + text
