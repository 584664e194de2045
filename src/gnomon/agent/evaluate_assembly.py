"""From a recipe to an evaluation that runs: sources, policies and their servers, harnesses, a sandbox backend, all closed at the end.

Whatever can be wrong with a recipe is said before anything is asked of a policy. Read next: `evaluate.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.agent import policy, program, task_source, verifier
from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.evaluate import Entrants, Evaluation, Watch, slug
from gnomon.agent.evaluate_recipe import BudgetSettings, EvalRecipe, PolicySettings
from gnomon.agent.evaluate_results import Results
from gnomon.agent.evaluate_serving import serving
from gnomon.agent.harness import draw, harness
from gnomon.agent.task import Budget, Task
from gnomon.agent.validate import Validation, validated
from gnomon.config import to_dict, to_toml
from gnomon.errors import ConfigError
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Backend


async def run(recipe: EvalRecipe, watch: Watch) -> Results:
    """Open what a recipe names, attempt what is left, write what was found."""
    async with entrants(recipe) as opened:
        recipe.folder.mkdir(parents=True, exist_ok=True)
        (recipe.folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        with open(recipe.folder / "tasks.jsonl", "w", encoding="utf-8") as file:
            file.writelines(task.text + "\n" for task in opened.tasks)
        return await Evaluation(recipe, opened, watch).run()


async def validate(recipe: EvalRecipe) -> list[Validation]:
    """Try the solution of each task, and doing nothing."""
    async with contextlib.AsyncExitStack() as stack:
        tasks, backend = await _tasks(recipe, stack)
        return [found async for _, found in validated(tasks, backend, concurrency=recipe.concurrency)]


@contextlib.asynccontextmanager
async def entrants(recipe: EvalRecipe) -> AsyncIterator[Entrants]:
    """Who takes part, opened; closed with the block. Raises `ConfigError` and `DataError` naming what does not fit."""
    harnesses = {_label(name): harness.opened(name) for name in recipe.harnesses}
    kept = {spec.name: spec for spec in draw.Sampler(recipe.draw).held_out(recipe.held_out_mixes)} if recipe.held_out_mixes else {}
    if len(harnesses) < len(recipe.harnesses):
        raise ConfigError(f"'harnesses': two have one name: {', '.join(recipe.harnesses)}")
    harnesses = {**{name: harness.Composed(spec) for name, spec in kept.items()}, **harnesses}
    for name, settings in recipe.policies.items():
        if settings.serve is None or settings.kind == "endpoint":  # one of ours opens nothing, so that it can be tried before it is served
            _can_think(name, policy.opened(settings.kind, _table(name, settings, "http://127.0.0.1")), recipe.efforts)
    async with contextlib.AsyncExitStack() as stack:
        tasks, backend = await _tasks(recipe, stack)
        if backend is not None:
            for name in recipe.harnesses:
                program.check_backend(name, backend.name)
        policies = {name: await _policy(name, settings, recipe.folder, stack) for name, settings in recipe.policies.items()}
        made_of: dict[str, Any] = {_label(name): _rests_on(name) for name in recipe.harnesses}
        made_of |= {name: to_dict(spec) for name, spec in kept.items()}
        made_of |= {name: _answers(settings) for name, settings in recipe.policies.items()}
        yield Entrants(tasks=tasks, policies=policies, harnesses=harnesses, backend=backend, made_of=made_of)


async def _tasks(recipe: EvalRecipe, stack: contextlib.AsyncExitStack) -> tuple[list[Task], Backend | None]:
    """All tasks, with the images that they start from made, and the backend, where any needs a machine."""
    sources = [task_source.opened(table, f"tasks[{i}]") for i, table in enumerate(recipe.tasks)]
    tasks = [_within(task, recipe.budget) for task in task_source.every(sources)]
    for task in tasks:
        _refuse(task)
    if all(task.image is None for task in tasks):
        return tasks, None
    backend = await stack.enter_async_context(_machines(recipe))
    for source in sources:
        await source.prepare(backend, LayerStore())
    return tasks, backend


def _refuse(task: Task) -> None:
    """Raises what is wrong with a task, before anybody attempts it."""
    verifier.opened(task.check, f"task {task.id}")
    for step in task.steps:
        try:
            verifier.opened(step.check, f"task {task.id}: step '{step.name}'")
        except ConfigError as error:
            raise ConfigError(f"task {task.id}: step '{step.name}': {error}") from None
    if task.diagnosis is not None:
        Diagnosis(task)


def _label(name: str) -> str:
    return Path(name).stem if name.endswith(".toml") else name


def _rests_on(name: str) -> Any:
    if program.known(name):
        return to_dict(program.program(name))
    return name if ":" in name and not name.endswith(".toml") else to_dict(harness.spec(name))


def _within(task: Task, budget: BudgetSettings) -> Task:
    """A task whose budget is the smaller of its own and the recipe's."""
    own = task.budget
    limits: dict[str, Any] = {name: min((v for v in (getattr(own, name), getattr(budget, name)) if v is not None), default=None)
                              for name in ("tokens", "turns", "dollars")}
    merged = Budget(seconds=own.seconds, **limits)
    return task if merged == own else replace(task, budget=merged)


@contextlib.asynccontextmanager
async def _machines(recipe: EvalRecipe) -> AsyncIterator[Backend]:
    backend = await open_backend(recipe.backend, isolation=recipe.isolation)
    try:
        yield backend
    finally:
        await backend.close()


async def _policy(name: str, settings: PolicySettings, folder: Path, stack: contextlib.AsyncExitStack) -> policy.Policy:
    url = ""
    if settings.serve is not None:
        url = await stack.enter_async_context(serving(settings.serve, _served(name, settings), folder / f"serve-{slug(name)}.log"))
    return policy.opened(settings.kind, _table(name, settings, url))


def _served(name: str, settings: PolicySettings) -> dict[str, Any]:
    return {"name": slug(name), **settings.serving}


def _table(name: str, settings: PolicySettings, url: str) -> dict[str, Any]:
    """A policy's settings; those of one that is served say where."""
    if settings.serve is None:
        return settings.settings
    if "url" in settings.settings:
        raise ConfigError(f"'policies.{name}': has both 'serve' and 'settings.url'; keep one")
    tokenizer = settings.serve / "tokenizer"
    ids = {"tokens": True, "tokenizer": str(tokenizer)} if tokenizer.is_dir() else {}
    return {"url": f"{url}/v1", "model": _served(name, settings)["name"], **ids, **settings.settings}


def _can_think(name: str, opened: policy.Policy, efforts: Sequence[str]) -> None:
    """Raises `ConfigError` for an effort that a policy's format has no word for: each of its attempts would fail."""
    known = opened.efforts if isinstance(opened, policy.KnowsEfforts) else None
    for effort in efforts:
        if known is not None and effort not in ("none", *known):
            raise ConfigError(f"'efforts': '{effort}': policy '{name}' can be asked for {', '.join(('none', *known))}; its chat format has "
                              "no other")


def _answers(settings: PolicySettings) -> Any:
    """What a policy rests on: its settings and, where a run is served, its weights, by their files' names, sizes and dates."""
    if settings.serve is None:
        return to_dict(settings)
    files = sorted(settings.serve.rglob("*.safetensors")) if settings.serve.is_dir() else [settings.serve]
    weights = [[str(file), status.st_size, status.st_mtime_ns] for file in files if file.exists() and (status := file.stat())]
    return {**to_dict(settings), "weights": weights}
