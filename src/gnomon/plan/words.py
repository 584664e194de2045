"""From words to a question: `serve prompt=8k output=1k concurrency=16 speed=30` and two options become one frozen `Question`.

What is not said is assumed and listed, so that it can be printed beside the answer. Read next: `solve.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.model.config import PRESETS, ModelConfig, preset
from gnomon.plan.choice import Phase
from gnomon.plan.families import families, family
from gnomon.plan.goals import DEFAULT_GOAL, METRICS, Goal, Limit, checked, duration, metric, number
from gnomon.plan.hardware import Device
from gnomon.plan.shapes import shape
from gnomon.plan.workload import RL, Layout, Precision, Serving, Speculation
from gnomon.units import format_count, parse_count

PHASES: tuple[Phase, ...] = ("serve", "train", "rl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: what is fixed, what is free (`None`), what is wanted and allowed, and what was assumed in silence."""

    phase: Phase
    name: str
    model: ModelConfig | None
    device: Device
    devices: int | None
    work: Mapping[str, Any]
    layout: Mapping[str, int]
    precision: Mapping[str, str]
    goal: Goal
    limits: tuple[Limit, ...]
    assumptions: tuple[str, ...]

    def limit(self, name: str) -> float | None:
        """The bound on a metric, where one was given."""
        return next((limit.bound for limit in self.limits if limit.metric.name == name), None)


Reader = Callable[[str], Any]


def _count(text: str) -> int:
    found = parse_count(text)
    if found > LARGEST_COUNT:
        raise ConfigError(f"'{text}' is more than anything here can be counted to ({LARGEST_COUNT:.0e})")
    return found


def _share(text: str) -> float:
    return number(text.removesuffix("%")) / 100 if text.endswith("%") else number(text)


WORK: dict[Phase, dict[str, tuple[str, Reader]]] = {
    "serve": {
        "prompt": ("prompt", _count), "output": ("output", _count), "concurrency": ("concurrency", _count),
        "users": ("concurrency", _count), "cached": ("cached_share", _share), "effort": ("effort", number),
        "sessions": ("sessions", _count), "drafts": ("drafts", _count), "acceptance": ("acceptance", str),
        "arrivals": ("arrivals_per_second", number), "requests_per_task": ("requests_per_task", number),
    },
    "train": {
        "tokens": ("tokens", _count), "batch": ("global_batch_tokens", _count), "context": ("context", _count),
        "optimiser": ("optimiser", str), "recompute": ("recompute", str), "micro_batch": ("micro_batch", _count),
    },
    "rl": {
        "tasks": ("tasks", _count), "group": ("group", _count), "prompt": ("prompt", _count), "output": ("output_tokens", _count),
        "turns": ("turns", _count), "observation": ("observation_tokens", _count), "sandbox": ("sandbox_seconds", duration),
        "grading": ("grading_seconds", duration), "graders": ("graders", _count), "concurrency": ("concurrency", _count),
        "partial": ("partial_share", _share),
    },
}
"""Words about the work of each phase: the field they set and how they are read."""

LAYOUT = {"tp": "tensor", "ep": "expert", "pp": "pipeline", "cp": "context", "dp": "data", "dcp": "kv_shards", "zero": "zero"}
FORMATS = tuple(field.name for field in fields(Precision))
ASSUMED: dict[Phase, dict[str, tuple[Any, str]]] = {
    "serve": {"prompt": (8192, "prompt=8192"), "output": (1024, "output=1024"), "concurrency": (1, "concurrency=1")},
    "train": {},
    "rl": {"tasks": (64, "tasks=64"), "group": (8, "group=8"), "prompt": (1024, "prompt=1024"), "output_tokens": (4096, "output=4096")},
}
"""What is taken where nothing is said; each is printed."""

ACCEPTANCE = "coding"
LARGEST_COUNT = 10**18
TOKENS_PER_PARAMETER = 20.0  # the dense law's optimum (arXiv 2404.10102)


def question(words: Sequence[str], hardware: tuple[Device, int | None], model: str | None) -> Question:
    """Read the words of one command. Raises `ConfigError` for an unknown word, a missing unit, or words that contradict each other."""
    phase, pairs = _split(words)
    work: dict[str, Any] = {}
    layout: dict[str, int] = {}
    formats: dict[str, str] = {}
    model_fields: list[str] = []
    limits: list[Limit] = []
    goal_word: str | None = None
    for key, value in pairs:
        if key in WORK[phase]:
            name, read = WORK[phase][key]
            work[name] = _read(key, value, read)
        elif key in LAYOUT or key in ("tensor", "expert", "pipeline", "data"):
            layout[LAYOUT.get(key, key)] = _read(key, value, _count)
        elif key in FORMATS:
            formats[key] = _format(key, value)
        elif key.startswith("model."):
            model_fields.append(f"{key.removeprefix('model.')}={value}")
        elif key == "goal":
            goal_word = value
        else:
            limits.append(_limit(key, value, phase))
    if model is None and phase != "train":
        raise ConfigError("which model? say e.g. --model k3-2.8t, a config.json, a run folder, or a size such as --model 1B")
    config = None if model is None else read_model(model, tuple(model_fields))
    said = {limit.metric.name for limit in limits} | ({goal_word} if goal_word else set())
    assumptions = _assume(phase, work, config, said)
    goal = _goal(goal_word, phase, work, config, limits)
    checked(goal, limits)
    Layout(**layout)
    return Question(phase=phase, name=model or "free", model=config, device=hardware[0], devices=hardware[1], work=work, layout=layout,
                    precision=formats, goal=goal, limits=tuple(limits), assumptions=tuple(assumptions))


def taken(words: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Words without those that set one of `names`, and those apart."""
    apart = {key: value for key, _, value in (word.partition("=") for word in words if "=" in word) if key in names}
    return [word for word in words if word.partition("=")[0] not in names or "=" not in word], apart


def read_model(text: str, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """A preset, a published family, a `config.json`, a run folder, or a size such as `1B`: our shape with so many active parameters.

    Raises `ConfigError` for anything else, with the nearest preset.
    """
    path = Path(text)
    if path.suffix == ".json" or (path.is_dir() and (path / "config.json").is_file()):
        from gnomon.model.huggingface import read_config

        return read_config(path if path.suffix == ".json" else path / "config.json")
    if path.is_dir() and (path / "recipe.toml").is_file():
        from gnomon.train.recipe import load

        return load(path / "recipe.toml").model
    names = sorted(p.stem for p in PRESETS.glob("*.toml"))
    if text in names:
        return preset(text, overrides)
    if text in families():
        if overrides:
            raise ConfigError(f"'model.{overrides[0]}' changes a preset, but '{text}' is a published family; start from a preset")
        return family(text).config
    if path.is_dir():
        raise ConfigError(f"'{text}' is a folder, but no run and no model: it has neither recipe.toml nor config.json")
    names += [name for name in families() if name not in ("k3", "kimi-linear")]
    try:
        active = parse_count(text)
    except ConfigError:
        raise ConfigError(f"unknown model '{text}'{suggestion(text, names)} (known: {', '.join(names)}; a config.json; a run folder; "
                          "or a size such as 1B active parameters)") from None
    if overrides:
        raise ConfigError(f"'model.{overrides[0]}' changes a preset, but '{text}' is a size; start from a preset")
    return shape(active)


def _split(words: Sequence[str]) -> tuple[Phase, list[tuple[str, str]]]:
    bare = [word for word in words if "=" not in word]
    for word in bare:
        if word not in PHASES:
            raise ConfigError(f"'{word}' is no kind of work{suggestion(word, list(PHASES))}; write serve, train or rl, and everything else "
                              "as key=value")
    if len(set(bare)) > 1:
        raise ConfigError(f"one question at a time: it says both '{bare[0]}' and '{bare[1]}'")
    pairs = [(key.strip().replace("-", "_"), value.strip()) for key, _, value in (word.partition("=") for word in words if "=" in word)]
    seen: set[str] = set()
    for key, value in pairs:
        if not value:
            raise ConfigError(f"'{key}=' has no value")
        if key in seen:
            raise ConfigError(f"'{key}' is given twice")
        seen.add(key)
    return (bare[0] if bare else "serve"), pairs  # type: ignore[return-value]


def _read(key: str, value: str, read: Reader) -> Any:
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"'{key}': {error}") from None


def _format(key: str, value: str) -> str:
    if value.replace(".", "").isdigit():
        raise ConfigError(f"'{key}={value}' should be a format such as fp8; the number of experts is model.moe.num_experts={value}")
    return value


def _limit(key: str, value: str, phase: Phase) -> Limit:
    words = [word for known in METRICS if phase in known.phases for word in (known.name, *known.words)]
    known = [*WORK[phase], *LAYOUT, *FORMATS, "goal", *words]
    if key not in words and not any(key in (m.name, *m.words) for m in METRICS):
        raise ConfigError(f"unknown word '{key}'{suggestion(key, known)} (for {phase}: {', '.join(known)}, model.FIELD)")
    found = metric(key, phase)
    return Limit(metric=found, bound=_read(key, value, found.read))


def _assume(phase: Phase, work: dict[str, Any], config: ModelConfig | None, said: set[str]) -> list[str]:
    assumptions = []
    for name, (value, text) in ASSUMED[phase].items():
        if name not in work:
            work[name] = value
            assumptions.append(text)
    if "drafts" in work or "acceptance" in work:
        if work.get("drafts") and "acceptance" not in work:
            assumptions.append(f"acceptance={ACCEPTANCE}")
        work["speculation"] = _speculation(work.pop("drafts", None), work.pop("acceptance", None))
    if phase != "train":  # what a copy gets of it is always valid: say here what is not
        (Serving if phase == "serve" else RL)(**work)
    if phase == "train" and config is not None and "tokens" not in work and not said & {"time", "budget", "loss"}:
        work["tokens"] = int(TOKENS_PER_PARAMETER * config.activated_parameters())
        assumptions.append(f"tokens={format_count(work['tokens'])} (20 per active parameter)")
    return assumptions


def _speculation(drafts: int | None, acceptance: str | None) -> Speculation | None:
    if drafts is None:
        raise ConfigError("'acceptance' is given without 'drafts'; write e.g. drafts=3")
    if drafts == 0:
        return None
    kind = acceptance or ACCEPTANCE
    try:
        return Speculation(drafts=drafts, acceptance=float(kind))
    except ValueError:
        return Speculation(drafts=drafts, acceptance=kind)


def _goal(word: str | None, phase: Phase, work: Mapping[str, Any], config: ModelConfig | None, limits: Sequence[Limit]) -> Goal:
    """The goal in words, or the natural one: the lowest loss where tokens or size are free, else the phase's default."""
    bounded = {limit.metric.name for limit in limits}
    free = phase == "train" and ("tokens" not in work or config is None)
    if word is None:
        natural = "loss" if free and "loss" not in bounded else DEFAULT_GOAL[phase]
        if natural in bounded:
            natural = "budget" if phase != "serve" else "bill"
        return Goal(metric=metric(natural, phase))
    found = metric(word, phase)
    if found.name == "loss" and not free:
        raise ConfigError("the goal is the loss, but model and tokens are both fixed, so it cannot change; leave tokens or the model out")
    if free and found.name in ("time", "budget") and "loss" not in bounded:
        raise ConfigError(f"the goal is {found.name}, but nothing says how much to train: give tokens=20B, or loss=2.5 to be reached")
    if not found.is_goal:
        raise ConfigError(f"'{found.name}' can be a limit but no goal")
    return Goal(metric=found)
