"""The manifests that run the controller that a day chose, for every target that can."""

from __future__ import annotations

from planner.day import autoscaling
from planner.day.day_study import DayAnswer
from planner.errors import InputError

OUTDATED = ("manifests/*/*.*", "manifests/*/*/*.*", "manifests/README.md")  # An earlier winner left these.


def controller_manifests(answer: DayAnswer) -> dict[str, str]:
    """manifests/TARGET/... for the winner; where a target has none, manifests/README.md says why."""
    winner, fleet = answer.winner, answer.question.fleet
    assert winner.chosen is not None and winner.deployment is not None
    trace = answer.question.trace
    longest_tokens = int((trace.input_tokens + trace.output_tokens).max())
    files: dict[str, str] = {}
    refused: list[str] = []
    for target in autoscaling.PAIRS.get(winner.name, {}):
        try:
            names, sizes = zip(*((pool.name, pool.count) for pool in fleet.pools), strict=True)
            scaler = autoscaling.of_chosen(winner.chosen, winner.deployment, names, sizes)
            scaler_files = autoscaling.render(fleet, longest_tokens, target, scaler)
        except InputError as error:
            refused.append(f"- {target}: {error}")
            continue
        files |= {f"manifests/{target}/{path}": text for path, text in scaler_files.items()}
    if refused or not files:
        why = "\n".join(refused) or f"Nothing here runs {winner.name}."
        files["manifests/README.md"] = f"# Targets without a manifest of {winner.name}\n\n{why}\n"
    return files
