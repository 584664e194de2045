"""`gnomon sft`, `gnomon rl`, `gnomon distill`: their arguments, and what they do. Nothing heavy is imported until a verb runs.

Under torchrun each of them is one run of several ranks: the first one writes and speaks.
Read next: `recipe.py`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.model.transformer import Transformer
    from gnomon.parallel.axes import Axes
    from gnomon.parallel.mesh import Mesh
    from gnomon.posttrain.effort import Budgets
    from gnomon.posttrain.keeping import Setup
    from gnomon.posttrain.opening import Makes
    from gnomon.posttrain.problem import ProblemSource
    from gnomon.posttrain.recipe import RLRecipe
    from gnomon.posttrain.rl import Start
    from gnomon.posttrain.rollout import Rollout
    from gnomon.posttrain.tournament import Tournament


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, which all three verbs share, to a parser."""
    parser.add_argument("recipe", type=Path, help="a recipe; docs/posttraining.md has one of each kind")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value",
                        help="fields to change, e.g. train.learner.optimizer.learning_rate=1e-4")


FILES = ("sft.toml", "rl.toml", "distill.toml")
"""What each verb's recipe is called in the folder of its run."""


def recipe_of(path: Path) -> str | None:
    """The module that reads a recipe of the three verbs, or of the lab, by what is in it; None for any other."""
    from gnomon.config import read_toml
    from gnomon.model.config import PRESETS

    table = read_toml(path, PRESETS)
    if {"cold", "expert", "domains", "student", "seesaw"} & table.keys():
        return "gnomon.posttrain.lab.recipe"
    if "start_from" in table and ("problems" in table or "agents" in table or isinstance(table.get("data"), list)):
        return "gnomon.posttrain.recipe"
    return None


def sft(parsed: argparse.Namespace) -> None:
    """Fine-tune on conversations."""
    from gnomon.data.chat import chat_format
    from gnomon.data.tokenizer import Tokenizer
    from gnomon.posttrain import demonstrations
    from gnomon.posttrain.recipe import load_sft
    from gnomon.posttrain.sft import fit

    recipe = load_sft(parsed.recipe, tuple(parsed.overrides))
    with _ranks(recipe.mesh) as mesh:
        say = _say(mesh)
        model, folder = starting(recipe.start_from, recipe.expert_weights, recipe.expert_inputs)
        keep_tokenizer(folder, recipe.run, mesh)
        form = chat_format(Tokenizer.load(recipe.run / "tokenizer"), recipe.chat_format)
        examples = list(demonstrations.read(files(recipe.data), form))
        say(f"{len(examples)} examples, {sum(len(each.token_ids) for each in examples):,} tokens")
        rows = fit(model, examples, recipe.train, recipe.run, seed=recipe.seed, say=say, setup=_setup(mesh, "sft.toml", recipe))
        last = f"last loss {rows[-1]['loss']:.4f}" if rows else "nothing was left to do"
        say(f"{recipe.run}: {last}")


def rl(parsed: argparse.Namespace) -> None:
    """Reinforce one cell."""
    from dataclasses import replace

    from gnomon.model.runs import latest
    from gnomon.posttrain.recipe import load_rl
    from gnomon.posttrain.rl import Start, train

    recipe = load_rl(parsed.recipe, tuple(parsed.overrides))
    with _ranks(recipe.mesh) as mesh:
        model, folder = starting(recipe.start_from)
        keep_tokenizer(folder, recipe.run, mesh)
        (source, make), say = _problems(recipe), _say(mesh)
        cold = model if recipe.cold_start is None else starting(recipe.cold_start)[0]
        setup = _setup(mesh, "rl.toml", recipe, problems=recipe.problems, agents=recipe.agents, tournament=recipe.tournament)
        start = Start(model=cold, source=source, seed=recipe.seed, say=say, setup=setup, sampler=make)
        if recipe.gate and mesh.agree(latest(recipe.run) is None):
            _ask(recipe, start)
        start = replace(start, model=model, budgets=_budgets(recipe, start), tournament=_tournament(recipe, start))
        for row in train(start, recipe.train, recipe.run)[-1:]:
            say(f"{recipe.run}: accuracy {row['accuracy']:.2f}, within budget {row['score']:.2f}, T {row['spent']:.1f}")


def distill(parsed: argparse.Namespace) -> None:
    """Several teachers into one student."""
    from gnomon.posttrain.distill import distill as run
    from gnomon.posttrain.recipe import load_distill
    from gnomon.posttrain.rl import Start
    from gnomon.posttrain.teachers import Teachers

    recipe = load_distill(parsed.recipe, tuple(parsed.overrides))
    with _ranks(recipe.mesh) as mesh:
        model, folder = starting(recipe.start_from)
        keep_tokenizer(folder, recipe.run, mesh)
        tokenizer, say = recipe.run / "tokenizer", _say(mesh)
        teachers = Teachers(recipe.teachers, model.config, tokenizer=tokenizer if tokenizer.is_dir() else None,
                            temperature=recipe.train.sampling.temperature)
        setup = _setup(mesh, "distill.toml", recipe, problems=recipe.problems)
        start = Start(model=model, source=source_of(recipe.problems), seed=recipe.seed, say=say, setup=setup)
        for row in run(start, teachers, recipe.train, recipe.run)[-1:]:
            say(f"{recipe.run}: divergence from the teachers {row['kl']:.3f} nats per token")


def _setup(mesh: Mesh, name: str, recipe: Any, **decides: Any) -> Setup:
    """What a loop needs to know of its recipe beside its own settings."""
    from gnomon.config import to_toml
    from gnomon.posttrain.keeping import Setup

    decides = {name: value for name, value in decides.items() if value is not None}
    return Setup(mesh=mesh, decides=decides, recipe=(name, to_toml(recipe, docs=True)))


@contextmanager
def _ranks(axes: Axes) -> Iterator[Mesh]:
    """The ranks that torchrun started, or this process alone; one that is lost is named."""
    from gnomon.parallel.mesh import join
    from gnomon.parallel.roll import named

    with join("cpu", axes) as mesh, named(mesh.roll):
        yield mesh


def starting(folder: Path, weights: str | None = None, inputs: str | None = None) -> tuple[Transformer, Path]:
    """The model of a run folder or a released checkpoint, and where its tokenizer is; experts quantised as asked, None: as they are."""
    from gnomon.model.runs import load_model
    from gnomon.model.transformer import Transformer
    from gnomon.model.weights import load_pretrained
    from gnomon.posttrain.sft import quantised

    released = (folder / "config.json").is_file()
    model = load_pretrained(folder).float() if released else load_model(folder)[0]
    if weights is not None and inputs is not None:
        tensors = model.state_dict()
        model = Transformer(quantised(model.config, weights, inputs))  # type: ignore[arg-type]
        model.load_state_dict(tensors)
    return model, folder if released else folder / "tokenizer"


def keep_tokenizer(source: Path, run: Path, mesh: Mesh) -> None:
    """Copy a tokenizer into a run folder, unless it has one or there is none; the first rank does."""
    target = run / "tokenizer"
    if mesh.is_main and source.is_dir() and not target.is_dir():
        from gnomon.data.tokenizer import Tokenizer

        run.mkdir(parents=True, exist_ok=True)
        if (source / "config.json").is_file():
            Tokenizer.load(source).save(target)
        else:
            shutil.copytree(source, target)
    mesh.wait()


def files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that names and globs stand for, in order. Raises `ConfigError` for one that stands for none."""
    from glob import glob

    from gnomon.errors import ConfigError

    found = []
    for pattern in patterns:
        matches = sorted(glob(pattern, recursive=True))
        if not matches:
            raise ConfigError(f"'data' names {pattern}, and there is no such file; check the path")
        found += [Path(match) for match in matches]
    return found


def source_of(name: str) -> ProblemSource:
    """The problems that a dotted path stands for."""
    from gnomon import extend

    made: Any = extend.find("gnomon.posttrain", name, "Source")()
    return made


def _problems(recipe: RLRecipe) -> tuple[ProblemSource, Makes | None]:
    """The problems of a recipe, and what makes their sampler where they need one of their own."""
    if recipe.agents is not None:
        from gnomon.posttrain import opening

        return opening.agents(recipe.agents, recipe.train.sampling, recipe.run)
    assert recipe.problems is not None
    return source_of(recipe.problems), None


def _tournament(recipe: RLRecipe, cold: Start) -> Tournament | None:
    """The tournament of a recipe, or None where it is off."""
    if recipe.tournament is None:
        return None
    from gnomon.posttrain import opening

    measured = partial(_sampled, recipe, cold, recipe.budget_rollouts, 10, graded=False)
    return opening.tournament(recipe.tournament, recipe.run, cold.model, measured, cold.setup.mesh)


def _ask(recipe: RLRecipe, cold: Start) -> None:
    """The gate: is the cold start more often right where it thinks longer? Raises `TrainingError` with the picture's place where not."""
    from gnomon.posttrain import gate

    rollouts = _sampled(recipe, cold, recipe.gate, 8, graded=True)
    gates = gate.by_domain(dict.fromkeys(each.problem.domain for each in rollouts), rollouts)
    picture = recipe.run / "gate.svg"
    if cold.setup.mesh.is_main:
        recipe.run.mkdir(parents=True, exist_ok=True)
        picture.write_text(gate.picture(gates), encoding="utf-8")
    for each in gates:
        cold.say(f"gate of {each.domain}: {each.gain:+.2f} from the shortest to the longest third ({each.low:+.2f} to {each.high:+.2f})")
    gate.require(gates, picture)


def _sampled(recipe: RLRecipe, cold: Start, count: int, purpose: int, *, graded: bool) -> Sequence[Rollout]:
    """So many rollouts of the cold start, each rank's share of them sampled there and known to all."""
    from gnomon.posttrain.partial import exchanged

    sampling, mesh = recipe.train.sampling, cold.setup.mesh
    fresh = _fresh(recipe, cold.source, count, purpose)
    own = fresh[mesh.rank :: mesh.world]
    with closing((cold.sampler or sampling.sampler)(cold.model, 0, recipe.run, mesh)) as sampler:
        found = sampling.graded(sampler, own) if graded else sampler.sample(own).finished
    return sorted(exchanged(mesh, found, {each.group: each.problem for each in fresh}), key=lambda each: each.group)


def _fresh(recipe: RLRecipe, source: ProblemSource, count: int, purpose: int) -> list[Rollout]:
    from gnomon.posttrain.rollout import Rollout, seed_of

    return [Rollout(problem=source.problem(i), group=i, member=0, seed=seed_of(recipe.seed, purpose, i)) for i in range(count)]


def _budgets(recipe: RLRecipe, cold: Start) -> Budgets | None:
    """b0 from its file, or measured on the cold start."""
    from gnomon.posttrain import effort, opening

    def measured(name: str) -> Budgets:
        found = effort.measure(_sampled(recipe, cold, recipe.budget_rollouts, 9, graded=False), name)
        shown = ", ".join(f"{domain}/{kind} {tokens:.1f}" for (domain, kind), tokens in sorted(found.tokens.items()))
        cold.say(f"b0 measured on {recipe.cold_start or recipe.start_from}: {shown}")
        return found

    return opening.of_weights("budgets", recipe.budgets, cold.model, measured, cold.setup.mesh)


def _say(mesh: Mesh) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    return (lambda line: console.print(line, highlight=False, markup=False)) if mesh.is_main else (lambda line: None)
