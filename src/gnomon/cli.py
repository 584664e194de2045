"""`gnomon VERB [RECIPE.toml] [key=value …]`: one function per verb, each importing only what it runs.

Nothing here imports torch until a verb needs it. A `GnomonError` becomes one line on stderr and its exit status; usage errors
end with 2, an interruption with 130. Read next: `gnomon.tour`, then the module that a verb's function imports.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gnomon.errors import ConfigError, GnomonError
from gnomon.extend import suggestion
from gnomon.plan import command as plan

# OpenMP's own 300000 spins make a step fifty times as long while another program wants a core; large tensors of a training step come
# and go, and in huge pages that costs less (docs/log.md).
ENVIRONMENT = {"GOMP_SPINCOUNT": "3000", "THP_MEM_ALLOC_ENABLE": "1"}
EPILOG = "Recipes are TOML files in recipes/; any field can be set as a.b=c. `gnomon VERB --help` describes a verb."


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `ConfigError`s, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """The command line: seven verbs."""
    top = _Parser(prog="gnomon", description="Text in, a trained model of the Kimi K3 family out.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=_version())
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    tour = verbs.add_parser("tour", help="the whole system in miniature, a few minutes on two cores")
    tour.add_argument("overrides", nargs="*", metavar="key=value", help="fields of recipes/tour.toml to change")
    tour.add_argument("--data", type=Path, action="append", metavar="PATH", help="file, folder or glob (default: this machine's text)")
    tour.add_argument("--out", type=Path, default=Path("tour"), help="folder for the run and its report (default: tour)")

    train = verbs.add_parser("train", help="pre-train from a recipe; the same command again resumes")
    train.add_argument("recipe", type=Path, help="a recipe, or the recipe.toml of a run folder")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="fields to change, e.g. optimizer.learning_rate=1e-3")

    sample = verbs.add_parser("sample", help="let a trained model continue a text")
    sample.add_argument("run", type=Path, help="run folder, or a checkpoint in a released layout")
    sample.add_argument("--prompt", default="The", help="text to continue (default: The)")
    sample.add_argument("--tokens", type=int, default=200, help="tokens to add at most (default: 200)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    sample.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")

    export = verbs.add_parser("export", help="write a run as a checkpoint in the released Hugging Face layout")
    export.add_argument("run", type=Path, help="run folder")
    export.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    export.add_argument("--plain", action="store_true", help="keep every weight as trained instead of rounding to bf16 and MXFP4")

    show = verbs.add_parser("show", help="a recipe resolved, with a line about each field; or what a model costs")
    show.add_argument("what", help="recipe.toml, run folder, preset name or config.json")
    show.add_argument("overrides", nargs="*", metavar="key=value", help="fields to change before showing")

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
        resumes = "; the same command again goes on from the last checkpoint" if arguments[:1] in (["train"], ["tour"]) else ""
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


def _train(parsed: argparse.Namespace) -> None:
    from gnomon.train.loop import train
    from gnomon.train.recipe import load

    train(load(parsed.recipe, tuple(parsed.overrides)))


def _sample(parsed: argparse.Namespace) -> None:
    from gnomon.data.tokenizer import Tokenizer
    from gnomon.model.generate import Sampling, generate
    from gnomon.model.inference import load_runner, runner
    from gnomon.train.checkpoint import load_run

    sampling = Sampling(temperature=parsed.temperature, max_tokens=parsed.tokens, seed=parsed.seed)
    if (parsed.run / "config.json").is_file():
        model, tokenizer = load_runner(parsed.run), Tokenizer.load(parsed.run)
    else:
        trained, tokenizer, _ = load_run(parsed.run)
        model = runner(trained)
    ids, shown = [], ""
    print(parsed.prompt, end="")
    for token in generate(model, tokenizer.encode(parsed.prompt), sampling, frozenset(tokenizer.stop_ids)):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may need more tokens than have come
            print(text[len(shown):], end="", flush=True)
            shown = text
    print(tokenizer.decode(ids)[len(shown):])


def _export(parsed: argparse.Namespace) -> None:
    import torch

    from gnomon.model.weights import save_pretrained
    from gnomon.train.checkpoint import load_run

    model, tokenizer, _ = load_run(parsed.run)
    save_pretrained(model, parsed.out, quantize=not parsed.plain, dtype=None if parsed.plain else torch.bfloat16, tokenizer=tokenizer)
    rounded = not parsed.plain and model.config.family == "kimi_k3" and model.config.moe is not None
    print(f"wrote {parsed.out}" + (": routed experts rounded to MXFP4 (--plain keeps them as trained)" if rounded else ""))


def _show(parsed: argparse.Namespace) -> None:
    from gnomon.config import to_toml
    from gnomon.model.config import PRESETS, preset

    what, path = parsed.what, Path(parsed.what)
    if path.is_dir():
        path = path / "recipe.toml"
    if path.suffix == ".toml":
        from gnomon.train.recipe import load

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


VERBS = {"tour": _tour, "train": _train, "sample": _sample, "export": _export, "show": _show, "plan": plan.run, "kernels": _kernels}

if __name__ == "__main__":
    sys.exit(main())
