"""`gnomon eval`: tasks × policies × harnesses × efforts into a table with intervals and pages. Its arguments, and what it does.

Nothing heavy is imported until the verb runs. Read next: `evaluate_recipe.py`, `evaluate_assembly.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnomon.agent.evaluate_recipe import EvalRecipe

EXAMPLE = "for example: gnomon eval recipes/eval.toml samples=4 harnesses='[\"minimal\", \"codex\"]'"


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.epilog = EXAMPLE
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipes/eval.toml, one of yours, or the folder of an evaluation")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of the recipe to change")
    parser.add_argument("--validate", action="store_true",
                        help="attempt nothing; try each task's own solution, which must score 1, and doing nothing, which must score 0")
    parser.add_argument("--json", action="store_true", help="print what eval.json holds, for programs")


def run(parsed: argparse.Namespace) -> None:
    """Evaluate; the same command again goes on. Raises `PolicyError` where attempts are missing at the end, `DataError` where a task does
    not hold."""
    from gnomon.agent.evaluate_recipe import load

    path = parsed.recipe / "recipe.toml" if parsed.recipe.is_dir() else parsed.recipe
    recipe = load(path, tuple(parsed.overrides))
    if parsed.validate:
        _validate(recipe)
    else:
        _evaluate(recipe, parsed.json)


def _evaluate(recipe: EvalRecipe, as_json: bool) -> None:
    import asyncio
    import sys

    from rich.console import Console
    from rich.text import Text

    from gnomon.agent import evaluate_assembly, evaluate_table
    from gnomon.agent.evaluate_progress import Display
    from gnomon.errors import PolicyError

    with Display(Console(stderr=True, highlight=False)) as display:
        results = asyncio.run(evaluate_assembly.run(recipe, display))
    if as_json:
        sys.stdout.write((recipe.folder / "eval.json").read_text(encoding="utf-8"))
    else:
        console = Console(highlight=False)
        evaluate_table.show(results, console)
        console.print(Text(f"read each attempt turn by turn: {recipe.folder / 'index.html'}; for programs: {recipe.folder / 'eval.json'}"),
                      soft_wrap=True)
    missing = sum(each.missing for each in results.columns)
    if missing:
        raise PolicyError(f"{missing} attempts are missing: {'; '.join(results.notices)}. The same command again goes on")


def _validate(recipe: EvalRecipe) -> None:
    import asyncio

    from rich.console import Console
    from rich.text import Text

    from gnomon.agent import evaluate_assembly
    from gnomon.errors import DataError

    console = Console(highlight=False)
    refused = tried = 0
    for found in asyncio.run(evaluate_assembly.validate(recipe)):
        tried, refused = tried + 1, refused + (not found.holds)
        said = Text("holds", style="green") if found.holds else Text(f"refused: {found.reason}", style="yellow")
        console.print(Text(f"{found.task_id}: ") + said, soft_wrap=True)
    if refused:
        raise DataError(f"{refused} of {tried} tasks are refused")
