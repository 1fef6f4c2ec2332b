"""`engine:` of slo.yaml and fleet.yaml, and rows of catalogs/engines.yaml, the constants of engines.

    engine: {name: vllm, version: 0.15.1, async_scheduling: true}

Only the name is needed: the version is then the one our manifests deploy, with its default for
async_scheduling. A file without the key `engine` means the same; with `engine: none` step times are used as
they are. For `trtllm` neither constants nor scheduler were checked: vLLM's are simulated, and the plan says
so. `mixed_steps` and the constants (`host`, `rest`, `front_end`, `prompt_token`, `hand_off`,
`first_hand_off`, `first_token`, `latent_launch`, `tokens_per_s`) replace those of the row in the catalog.
planner/models/engine.py explains these keys, and `poll_steps`, which SGLang alone has;
planner/documents/speculative.py reads `speculative`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, is_number, refused_value
from planner.fleet import Policies
from planner.models.engine import DEPLOYED_VERSION, NAMES, Engine, FirstToken, HostTime
from planner.units import show_exactly

NONE = "none"  # Step times are used as they are.
# Keys of an engine's constants, in the section and in a row of the catalog alike.
_CONSTANTS = (
    *("async_scheduling", "mixed_steps", "latent_launch", "host", "rest", "front_end"),
    *("prompt_token", "hand_off", "first_hand_off", "first_token"),
)
# The keys of the section. Only a plan.yaml has the four from `basis` to `images`: where the constants come
# from, whether they are of the nearest version, whether they were checked, and the images that the manifests
# deploy. Nothing reads `images`.
KEYS = (
    *("name", "version"),
    *_CONSTANTS,
    *("poll_steps", "tokens_per_s", "basis", "nearest", "checked", "images", "speculative"),
)
# The keys of a row of catalogs/engines.yaml.
ROW_KEYS = ("engine", "from", "to", "checked", *_CONSTANTS, "error")
HOST_KEYS = ("step", "sequence", "log2_tp")
# Seconds above which a value is refused, because it was probably meant in milliseconds. They are set by hand.
MOST_S = {
    "step": 1.0,
    "sequence": 0.01,
    "log2_tp": 1.0,
    "front_end": 10.0,
    "prompt_token": 0.001,
    "hand_off": 10.0,
    "first_hand_off": 60.0,
    "latent_launch": 0.1,
}
FIRST_TOKENS: tuple[FirstToken, ...] = get_args(FirstToken)
FIRST_ASYNC = "0.10"  # The first version of vLLM with --async-scheduling.
MINORS = 10_000  # More than any minor version number, so that versions can be compared as one integer.
# YAML reads the version 0.10, without quotes, as the number 0.1. No 0.40 exists.
AMBIGUOUS = (0.1, 0.2, 0.3)
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Constants of an engine's versions `first` to `last`, both with all their patch releases."""

    engine: str
    first: str
    last: str
    async_scheduling: bool
    host: HostTime
    rest: HostTime
    front_end_s: float
    prompt_token_s: float
    hand_off_s: float
    first_hand_off_s: float
    first_token: FirstToken
    source: str
    is_checked: bool = True
    mixed_steps: bool = True
    latent_launch_s: float = 0.0

    def version_distance(self, version: str) -> int:
        """By how many minor versions `version` lies outside of `first` to `last`: 0 if it lies inside."""
        minor, first, last = map(_minor_number, (version, self.first, self.last))
        return max(first - minor, minor - last, 0)


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, (0, 15, 1) for "0.15.1", so that versions can be compared."""
    return tuple(int(part) for part in version.split("."))


def _minor_number(version: str) -> int:
    """A version without its patch release, as one integer."""
    major, minor, *_ = version_numbers(version)
    return major * MINORS + minor


def parse_row(row: Section) -> EngineRow:
    """Read a row of catalogs/engines.yaml. Raises InputError."""
    first, last = (row.read(key, _parse_version) for key in ("from", "to"))
    if version_numbers(last) < version_numbers(first):
        raise row.error("to", f"is {last}, must not be before {first}")
    row.plain_text("error")  # Says for people how far the constants are off; only checked to be text.
    return EngineRow(
        engine=check_one_of(row.get_required("engine"), tuple(NAMES), row.path_of("engine")),
        first=first,
        last=last,
        async_scheduling=row.flag("async_scheduling"),
        host=_parse_host(row.subsection("host", HOST_KEYS)),
        rest=_parse_host(row.subsection("rest", HOST_KEYS)),
        front_end_s=_parse_seconds(row, "front_end"),
        prompt_token_s=_parse_seconds(row, "prompt_token", 0.0),
        hand_off_s=_parse_seconds(row, "hand_off", 0.0),
        first_hand_off_s=_parse_seconds(row, "first_hand_off", 0.0),
        first_token=_parse_first_token(row, "prefill"),
        source=row.plain_text("source"),
        is_checked=row.flag("checked", True),
        mixed_steps=row.flag("mixed_steps", True),
        latent_launch_s=_parse_seconds(row, "latent_launch", 0.0),
    )


def default_engine(rows: Iterable[EngineRow]) -> Engine | None:
    """The engine that our manifests deploy; None where the catalog has no row of vLLM.

    Where no row is of the deployed version, the nearest row is used without a warning, because the user did
    not choose that version.
    """
    vllm_rows = [row for row in rows if row.engine == "vllm"]
    if not vllm_rows:
        return None
    engine = parse_engine({}, vllm_rows, "engine")
    # `parse_engine` gives None for "none" alone, which this is not.
    return None if engine is None else replace(engine, is_nearest=False)


def parse_engine(value: object, rows: Iterable[EngineRow], where: str) -> Engine | None:
    """The engine of the section `engine`, with constants of the nearest of `rows`; None for "none"."""
    if value == NONE:
        return None
    section = Section.from_document({"name": value} if isinstance(value, str) else value, where, KEYS)
    name = section.one_of("name", tuple(NAMES), "vllm")
    engine_rows = [row for row in rows if row.engine == name]
    if not engine_rows:
        raise InputError(f"{where}: catalogs/engines.yaml has no row of {name}")
    # DEPLOYED_VERSION is a version of vLLM; another engine's default is its newest version with constants.
    default_version = (
        DEPLOYED_VERSION if name == "vllm" else max((row.last for row in engine_rows), key=version_numbers)
    )
    version = _parse_version(section.get("version", default_version), section.path_of("version"))
    row = min(engine_rows, key=lambda row: row.version_distance(version))
    basis = f"constants of {name} {row.first} to {row.last}: {row.source}"
    if row.version_distance(version):
        basis = f"nearest row: {name} {version} has no constants of its own, taken are {basis}"
    async_scheduling = section.flag("async_scheduling", row.async_scheduling)
    if name == "vllm" and async_scheduling and version_numbers(version) < version_numbers(FIRST_ASYNC):
        key_path = section.path_of("async_scheduling")
        raise InputError(f"{key_path}: {name} {version} has none; {FIRST_ASYNC} is the first")
    poll_steps = section.whole_number("poll_steps", 1)
    if poll_steps > 1 and not (name == "sglang" and async_scheduling):
        raise section.error(
            "poll_steps",
            f"must be 1, found {poll_steps}; more is simulated for sglang alone, with async_scheduling",
        )
    # A front end that was measured includes its tokenizer and router, and a plan.yaml older than the three
    # keys below states a front end and none of them. In both cases the row's values would be added wrongly.
    has_own_front_end = "front_end" in section
    if has_own_front_end:
        row = replace(row, prompt_token_s=0.0, hand_off_s=0.0, first_hand_off_s=0.0)
    # Only a plan.yaml has the key `basis`. If it is older than the keys first_token, mixed_steps and
    # latent_launch, its plan was made with first tokens of prefill workers, mixed steps and no time for
    # launches; these are then the defaults.
    is_of_plan = "basis" in section
    return Engine(
        name=name,
        version=version,
        async_scheduling=async_scheduling,
        host=_parse_host(section.subsection("host", HOST_KEYS), row.host),
        rest=_parse_host(section.subsection("rest", HOST_KEYS), row.rest),
        front_end_s=_parse_seconds(section, "front_end", row.front_end_s),
        prompt_token_s=_parse_seconds(section, "prompt_token", row.prompt_token_s),
        hand_off_s=_parse_seconds(section, "hand_off", row.hand_off_s),
        first_hand_off_s=_parse_seconds(section, "first_hand_off", row.first_hand_off_s),
        first_token=_parse_first_token(section, "prefill" if is_of_plan else row.first_token),
        basis=section.text("basis", "constants of your own" if "host" in section else basis),
        is_nearest=section.flag("nearest", "host" not in section and row.version_distance(version) > 0),
        tokens_per_s=section.number("tokens_per_s", math.inf, above=0.0),
        is_checked=section.flag("checked", row.is_checked),
        mixed_steps=section.flag("mixed_steps", is_of_plan or row.mixed_steps),
        latent_launch_s=_parse_seconds(section, "latent_launch", 0.0 if is_of_plan else row.latent_launch_s),
        poll_steps=poll_steps,
    )


def engine_document(engine: Engine) -> dict[str, Any]:
    """The mapping that `parse_engine` reads as the same engine, whatever the catalog's row says by then."""
    optional_s = {
        "prompt_token": engine.prompt_token_s,
        "hand_off": engine.hand_off_s,
        "first_hand_off": engine.first_hand_off_s,
        "latent_launch": engine.latent_launch_s,
    }
    return {
        "name": engine.name,
        "version": engine.version,
        "async_scheduling": engine.async_scheduling,
        "host": _host_document(engine.host),
        "rest": _host_document(engine.rest),
        "front_end": show_exactly(engine.front_end_s, "s"),
        **{key: show_exactly(seconds, "s") for key, seconds in optional_s.items() if seconds > 0},
        **({"first_token": engine.first_token} if engine.first_token != "prefill" else {}),
        **({"tokens_per_s": engine.tokens_per_s} if engine.tokens_per_s < math.inf else {}),
        "basis": engine.basis,
        **({"nearest": True} if engine.is_nearest else {}),
        **({} if engine.is_checked else {"checked": False}),
        **({} if engine.mixed_steps else {"mixed_steps": False}),
        **({"poll_steps": engine.poll_steps} if engine.poll_steps > 1 else {}),
    }


def engine_of_fleet(
    document: Mapping[str, Any], rows: Iterable[EngineRow], where: str, *, batching: str
) -> Engine | None:
    """The engine of a fleet.yaml or plan.yaml.

    A fleet.yaml without `engine` has the engine that our manifests deploy, if it batches as that engine does.
    A plan.yaml always names the engine that it deploys. It was planned with that engine only if the constants
    stand there too; otherwise with step times as they are (None).
    """
    value = document.get("engine")
    is_plan = "status" in document
    if is_plan and not (isinstance(value, Mapping) and "host" in value):
        return None
    if value is None:
        return default_engine(rows) if batching == Policies().batching else None
    return parse_engine(value, rows, where)


def _host_document(host: HostTime) -> dict[str, str]:
    """The mapping that `_parse_host` reads; a key is the name of a field without its `_s`."""
    return {key: show_exactly(getattr(host, f"{key}_s"), "s") for key in HOST_KEYS}


def _parse_host(section: Section, default: HostTime | None = None) -> HostTime:
    """The times of HOST_KEYS. Without a `default` the section must have all of them."""
    defaults = {} if default is None else {key: getattr(default, f"{key}_s") for key in HOST_KEYS}
    return HostTime(*(_parse_seconds(section, key, defaults.get(key)) for key in HOST_KEYS))


def _parse_seconds(section: Section, key: str, default: float | None = None) -> float:
    """Seconds of at most MOST_S. Without a `default` the key must be there."""
    # `at_least` tells a key without a default from one whose default is None.
    value_s = section.at_least(key, "s") if default is None else section.at_least(key, "s", default)
    if value_s > MOST_S[key]:
        raise section.refused(key, f"must be at most {MOST_S[key]:g} s", section.get(key))
    return value_s


def _parse_first_token(section: Section, default: FirstToken) -> FirstToken:
    value = section.get("first_token", default)
    check_one_of(value, FIRST_TOKENS, section.path_of("first_token"))
    return "decode" if value == "decode" else "prefill"  # For the type checker, `value` is no literal.


def _parse_version(value: object, where: str) -> str:
    """A version without a leading v; YAML may have read "0.9" as a number."""
    if value in AMBIGUOUS and is_number(value):
        raise InputError(f"{where}: {value} may mean {value} or {value}0; write it in quotes, such as '0.10'")
    version = (str(value) if is_number(value) or isinstance(value, str) else "").removeprefix("v")
    if not _VERSION.fullmatch(version):
        raise refused_value(where, "expected a version such as 0.15.1", value)
    return version
