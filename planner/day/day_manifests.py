"""Writes the manifests of the controller that a day study chose, for every target that can run it."""

from planner.day import autoscaling
from planner.day.day_study import STATIC, ControllerDay, DayAnswer
from planner.errors import InputError

_MANIFEST_PATHS = ("manifests/*/*.*", "manifests/*/*/*.*", "manifests/README.md")
# Files that an earlier run into the same folder may have left; they are removed.
OUTDATED = (*_MANIFEST_PATHS, *(f"{name}/{path}" for name in autoscaling.PAIRS for path in _MANIFEST_PATHS))


def controller_manifests(answer: DayAnswer, row: ControllerDay | None = None) -> dict[str, str]:
    """The files manifests/TARGET/... of this row's controller, or of the winner's.

    manifests/README.md says which targets have none, and why.
    """
    day, fleet = row or answer.winner, answer.question.fleet
    # Only the optimum lacks both: no controller runs its sequence of sizes.
    assert day.chosen is not None and day.knowledge is not None
    trace = answer.question.trace
    longest_tokens = int((trace.input_tokens + trace.output_tokens).max())
    files: dict[str, str] = {}
    refused: list[str] = []
    for target in autoscaling.PAIRS.get(day.name, {}):
        try:
            scaler = autoscaling.autoscaler_of(day.chosen, day.knowledge, fleet)
            scaler_files = autoscaling.render(fleet, longest_tokens, target, scaler)
        except InputError as error:
            refused.append(f"- {target}: {error}")
            continue
        files |= {f"manifests/{target}/{path}": text for path, text in scaler_files.items()}
    if refused or not files:
        why = "\n".join(refused) or f"Nothing here runs {day.name}."
        files["manifests/README.md"] = f"# Targets without a manifest of {day.name}\n\n{why}\n"
    return files


def manifests_of_all(answer: DayAnswer) -> dict[str, str]:
    """CONTROLLER/manifests/TARGET/... for every controller that has any, with the settings chosen for it."""
    return {
        f"{row.name}/{path}": text
        for row in answer.rows
        if row.name != STATIC and row.name in autoscaling.PAIRS
        for path, text in controller_manifests(answer, row).items()
    }
