"""`gnomon lab`: its arguments, and what it does. Nothing heavy is imported until the verb runs. Read next: `recipe.py`, `run.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "for example: gnomon lab recipes/lab.toml --seed 2 run=runs/lab workers=2; the same command again goes on where it stood"


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.epilog = EXAMPLE
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipes/lab.toml, one of yours, or the recipe.toml of a lab's folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of the recipe to change")
    parser.add_argument("--seed", type=int, help="run this seed instead of the recipe's")
    parser.add_argument("--only", metavar="STAGE", help="stop after this stage and what it needs: cold start, gate, experts, student, "
                        "export, see-saw or quantisation")
    parser.add_argument("--report", action="store_true", help="compute nothing; write the report of what is done so far")


def run(parsed: argparse.Namespace) -> None:
    """Run the lab, or go on with it. Raises `ConfigError` for a recipe or a stage that makes no sense."""
    from dataclasses import replace

    from rich.console import Console

    from gnomon.errors import ConfigError
    from gnomon.extend import suggestion
    from gnomon.posttrain.lab import plan, report
    from gnomon.posttrain.lab.progress import Display
    from gnomon.posttrain.lab.recipe import load
    from gnomon.posttrain.lab.run import run as whole

    recipe = load(parsed.recipe, tuple(parsed.overrides))
    if parsed.seed is not None:
        recipe = replace(recipe, seeds=(parsed.seed,))
    if parsed.only is not None and parsed.only not in plan.STAGES:
        raise ConfigError(f"--only '{parsed.only}' is no stage{suggestion(parsed.only, list(plan.STAGES))} "
                          f"(stages: {', '.join(plan.STAGES)})")
    console = Console(highlight=False)
    if parsed.report:
        path = report.write(recipe)
    else:
        with Display(console) as display:
            path = whole(recipe, display, parsed.only)
    console.print(f"read: {path}", soft_wrap=True)
