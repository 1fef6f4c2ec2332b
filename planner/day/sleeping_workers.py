"""Several LLMs whose workers sleep and wake on one stock, as vLLM's sleep mode does.

Every LLM has an engine, awake or asleep, on every group of GPUs that its workers may take. A worker that the
controller removes finishes its requests and falls asleep; a worker that the controller adds wakes as soon as
GPUs are free. Waking needs neither an image nor compiled kernels, so it takes seconds instead of minutes.
But nodes are never given back: the peak number of GPUs in use is paid all day.

    ready_s = longest fall_asleep_s of any LLM + own wake_s                 (catalogs/startup.yaml, sleep)

This is the slowest case: the only free GPUs are those of a worker that has just begun to fall asleep. A GPU
counts as in use from the moment at which the controller adds its worker.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.day.day_study import DayQuestion
from planner.documents.startup_times import StartupFacts, gpu_weight_bytes
from planner.models.startup import SleepLevel


def sleeping_questions(
    questions: Mapping[str, DayQuestion], level: int, storage: str, facts: StartupFacts
) -> dict[str, DayQuestion]:
    """The questions with workers that wake instead of starting; level 2 reads weights from `storage`."""
    longest_s = max(
        facts.fall_asleep_s(question.fleet.llm, pool.type, level)
        for question in questions.values()
        for pool in question.fleet.pools
    )
    sleep_level = facts.find_sleep_level(level)
    place = "host memory" if sleep_level.keeps_weights else storage
    basis = f"weights from {place}, {'measured' if sleep_level.is_measured else 'estimated'}"
    sleep_notes = tuple(sleep_lines(questions, sleep_level))

    def sleeping(question: DayQuestion) -> DayQuestion:
        llm, pools, notes = question.fleet.llm, [], []
        for pool, elastic in zip(question.fleet.pools, question.pools, strict=True):
            wake_s = facts.wake_s(llm, pool.type, level, storage)
            pools.append(replace(elastic, start_s=longest_s + wake_s, warm=0))
            notes.append(
                f"{pool.name} wakes from level {level} in {wake_s:.1f} s ({basis}), after at most "
                f"{longest_s:.1f} s in which another worker falls asleep"
            )
        return replace(
            question, pools=tuple(pools), start_notes=tuple(notes), sleep_level=level, sleep_notes=sleep_notes
        )

    return {name: sleeping(question) for name, question in questions.items()}


def sleep_lines(questions: Mapping[str, DayQuestion], sleep_level: SleepLevel) -> list[str]:
    """What sleeping takes: memory of the host and of each GPU, and someone who calls the engines."""
    lines, host_bytes = list[str](), dict[str, float]()
    # A level that drops the weights keeps nothing in host memory.
    for question in questions.values() if sleep_level.keeps_weights else ():
        for pool in question.fleet.pools:
            gpu, worker = pool.type.gpu, pool.type
            # A worker larger than a node (the `max`) counts as a whole.
            gpus = max(gpu.gpus_per_node // worker.gpus, 1) * worker.gpus
            size_bytes = gpus * gpu_weight_bytes(question.fleet.llm, worker)
            host_bytes[gpu.base] = host_bytes.get(gpu.base, 0.0) + size_bytes
    lines += [
        f"a node of {gpu} takes {size_bytes / 1e9:,.0f} GB of host memory, if each engine is on all its GPUs"
        for gpu, size_bytes in host_bytes.items()
    ]
    lines.append(
        f"a sleeping engine keeps about {sleep_level.kept_gpu_bytes / 1e9:.1f} GB of each of its GPUs, which "
        "KV caches must leave free; that is not simulated"
    )
    lines.append("no manifests are written, as theirs start pods: call /sleep and /wake_up of the engines")
    return lines
