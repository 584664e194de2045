"""`gnomon VERB [RECIPE.toml] [key=value …]`: one function per verb, each importing only what it runs.

Nothing here imports torch until a verb needs it. A `GnomonError` becomes one line on stderr and its exit status; usage errors
end with 2, an interruption with 130. Read next: `gnomon.tour`, then the module that a verb's function imports.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gnomon.agent import command as agent
from gnomon.errors import ConfigError, GnomonError
from gnomon.extend import suggestion
from gnomon.plan import command as plan
from gnomon.posttrain import command as posttrain
from gnomon.posttrain.lab import command as lab
from gnomon.sandbox import command as sandbox
from gnomon.serve import command as serve
from gnomon.serve import verify_command as verify
from gnomon.train import command as train

# OpenMP's own 300000 spins make a step fifty times as long while another program wants a core; large tensors of a training step come
# and go, and in huge pages that costs less (docs/log.md).
ENVIRONMENT = {"GOMP_SPINCOUNT": "3000", "THP_MEM_ALLOC_ENABLE": "1"}
EPILOG = "Recipes are TOML files in recipes/; any field can be set as a.b=c. `gnomon VERB --help` describes a verb."


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `ConfigError`s, so that all errors look alike.

    `key=value` may stand before, between and after options: argparse alone takes all of a command's words in one place.
    """

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the library has it, which asks this method again for the two halves of a mixed line."""
        if self._mixing or all(action.dest != "overrides" for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """The command line: a parser for each verb."""
    top = _Parser(prog="gnomon", description="Text in, a trained model of the Kimi K3 family out.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=_version())
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    tour = verbs.add_parser("tour", help="the whole system in miniature, some ten minutes on two cores")
    tour.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of recipes/tour.toml to change")
    tour.add_argument("--data", type=Path, action="append", metavar="PATH", help="file, folder or glob (default: this machine's text)")
    tour.add_argument("--out", type=Path, default=Path("tour"), help="folder for the run and its report (default: tour)")

    train.declare_train(verbs.add_parser("train", help="pre-train from a recipe; the same command again resumes"))
    train.declare_sample(verbs.add_parser("sample", help="let a trained model continue a text"))
    train.declare_export(verbs.add_parser("export", help="write a run as a checkpoint in the released Hugging Face layout"))
    posttrain.declare(verbs.add_parser("sft", help="fine-tune on conversations, quantisation-aware; the same command again resumes"))
    posttrain.declare(verbs.add_parser("rl", help="reinforce a model on problems that are graded, at one effort; resumes"))
    posttrain.declare(verbs.add_parser("distill", help="several teachers, one for each domain and effort, into one student; resumes"))
    lab.declare(verbs.add_parser("lab", help="post-training in miniature: nine experts, one student, the report; resumes"))
    serve.declare_serve(verbs.add_parser("serve", help="OpenAI- and Anthropic-compatible API and a chat page for a model"))
    serve.declare_chat(verbs.add_parser("chat", help="talk to a model in the terminal"))

    agent.declare(verbs.add_parser("eval", help="tasks × policies × harnesses × efforts: a table with intervals, a page for each attempt"))
    verify.declare(verbs.add_parser("verify", help="is a cached answer the uncached one? a model, or any server with log-probabilities"))

    show = verbs.add_parser("show", help="a recipe resolved, with a line about each field; or what a model costs")
    show.add_argument("what", help="recipe.toml, run folder, preset name or config.json")
    show.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields to change before showing")

    sandbox.declare(verbs.add_parser("sandbox", help="run untrusted programs; images, snapshots, the E2B API"))
    plan.declare(verbs.add_parser("plan", help="what fits, which wall binds, which knob is cheapest to turn"))
    verbs.add_parser("kernels", help="each operator and implementation on this machine: used, or refused and why")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.update(ENVIRONMENT | dict(os.environ))
    try:
        known = parser()
        _check_verb(arguments)
        parsed = known.parse_args(["plan", *plan.ordered(arguments[1:])] if arguments[:1] == ["plan"] else arguments)
        if parsed.verb is None:
            known.print_help()
            return 0
        VERBS[parsed.verb](parsed)
    except GnomonError as error:
        print(f"gnomon: error: {_one_line(error)}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        resumes = "; the same command again goes on from there" if arguments[:1] in (["train"], ["tour"], ["eval"], ["lab"]) else ""
        print(f"\ngnomon: interrupted{resumes}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `gnomon show … | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk or missing rights, wherever they strike
        place = f"{error.filename}: " if error.filename else ""
        print(f"gnomon: error: {place}{error.strerror or error}; free space or check the path and its rights, then start the same "
              "command again", file=sys.stderr)
        return 1
    return 0


def _check_verb(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        raise ConfigError(f"unknown verb '{arguments[0]}'{suggestion(arguments[0], list(VERBS))} (verbs: {', '.join(VERBS)})")


def _one_line(error: GnomonError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _version() -> str:
    from gnomon import __version__

    return f"gnomon {__version__}"


def _tour(parsed: argparse.Namespace) -> None:
    from gnomon import tour

    tour.run(data=parsed.data, out=parsed.out, overrides=parsed.overrides)


def _show(parsed: argparse.Namespace) -> None:
    from gnomon.config import to_toml
    from gnomon.model.config import PRESETS, preset

    what, path = parsed.what, Path(parsed.what)
    if path.is_dir():
        path = next((path / name for name in posttrain.FILES if (path / name).exists()), path / "recipe.toml")
    if path.suffix == ".toml":
        kinds = {"serve": "gnomon.serve.settings", "eval": "gnomon.agent.evaluate_recipe", "lab": "gnomon.posttrain.lab.recipe"}
        kind = "eval" if (path.parent / "eval.json").exists() else path.stem.split("-")[0]
        load = importlib.import_module(kinds.get(kind) or posttrain.recipe_of(path) or "gnomon.train.recipe").load
        print(to_toml(load(path, tuple(parsed.overrides)), docs=True), end="")
        return
    if path.suffix == ".json":
        from gnomon.model.huggingface import read_config

        config = read_config(path)
    else:
        names = sorted(p.stem for p in PRESETS.glob("*.toml"))
        if what not in names:
            close = suggestion(what, names)
            raise ConfigError(f"'{what}' is no recipe, run folder, config.json or preset{close} (presets: {', '.join(names)})")
        config = preset(what, tuple(parsed.overrides))
    from rich.console import Console

    from gnomon.model.card import table

    Console().print(table(what, config))


def _kernels(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from gnomon.kernels.survey import table

    Console().print(table())


VERBS = {"tour": _tour, "train": train.train, "sample": train.sample, "export": train.export, "serve": serve.serve, "chat": serve.chat,
         "eval": agent.run, "verify": verify.run, "show": _show, "sandbox": sandbox.run, "plan": plan.run, "kernels": _kernels,
         "sft": posttrain.sft, "rl": posttrain.rl, "distill": posttrain.distill, "lab": lab.run}

if __name__ == "__main__":
    sys.exit(main())
