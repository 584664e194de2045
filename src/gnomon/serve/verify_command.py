"""`gnomon verify MODEL_OR_URL`: its arguments, the checks that apply, a table or JSON, and an exit status.

Nothing heavy is imported until the verb runs. Read next: `verify.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import ConfigError
from gnomon.extend import suggestion

if TYPE_CHECKING:
    from gnomon.model.transformer import Transformer
    from gnomon.serve.verify import Check

MOST_PARAMETERS = 4_000_000_000
"""Parameters above which the reference model, whole in fp32 beside the served one, is left out."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.add_argument("subject", metavar="MODEL_OR_URL", help="run folder, checkpoint, or http://…/v1 of any OpenAI-compatible server")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="only this check (again for more)")
    parser.add_argument("--list", action="store_true", help="name the checks and what they show, run none")
    parser.add_argument("--operations", type=int, default=60, metavar="N", help="random operations of the interleavings (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the interleavings (default: 0)")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of the check for long contexts (default: 4096)")
    parser.add_argument("--weights", choices=("stored", "fp32"), default="stored", help="a model's weights (default: stored)")
    parser.add_argument("--model", help="a server's model (default: the first it lists)")
    parser.add_argument("--key", help="API key of a server (default: OPENAI_API_KEY)")
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="X",
                        help="difference of log-probabilities that a server may show (default: 0.02)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts for programs; - for standard output alone")


def run(parsed: argparse.Namespace) -> None:
    """Verify and print. Ends the program with status 1 when a check failed. Raises `ConfigError` for what cannot be verified."""
    from rich.console import Console

    from gnomon.serve import verify

    if parsed.operations < 1 or parsed.context < 1:
        raise ConfigError(f"--operations {parsed.operations} --context {parsed.context}: both need at least 1")
    name, checks = _remote(parsed) if parsed.subject.startswith(("http://", "https://")) else _local(parsed)
    checks = _chosen(checks, parsed.only)
    console = Console(stderr=True) if parsed.json == Path("-") else Console()
    if parsed.list:
        for check in checks:
            console.print(f"{check.name:14} {check.shows}")
        return
    with console.status("") as status:
        verdicts = verify.verify(checks, lambda check: status.update(f"{check} …"))
    console.print(verify.table(name, verdicts))
    if parsed.json is not None:
        text = json.dumps(verify.as_dict(name, verdicts), indent=1) + "\n"
        if parsed.json == Path("-"):
            sys.stdout.write(text)
        else:
            parsed.json.write_text(text, encoding="utf-8")
    if not verify.passed(verdicts):
        sys.exit(1)


def _chosen(checks: list[Check], names: list[str]) -> list[Check]:
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no check '{name}'{suggestion(name, known)} (checks: {', '.join(known)})")
    return [check for check in checks if not names or check.name in names]


def _remote(parsed: argparse.Namespace) -> tuple[str, list[Check]]:
    try:
        from gnomon.serve.verify_remote import RemoteSubject
    except ImportError as error:
        raise ConfigError(f"a client for servers is missing ({error}); install it: pip install 'gnomon[serve]'") from None
    from gnomon.serve.verify_checks import shared_checks

    key = parsed.key or os.environ.get("OPENAI_API_KEY")
    subject = RemoteSubject(parsed.subject, model=parsed.model, key=key, tolerance=parsed.tolerance)
    return subject.described, shared_checks(subject, parsed.operations, parsed.seed)


def _local(parsed: argparse.Namespace) -> tuple[str, list[Check]]:
    from gnomon.serve.load import load
    from gnomon.serve.verify_checks import shared_checks
    from gnomon.serve.verify_engine import EngineSubject, engine_checks
    from gnomon.serve.verify_forward import CLOSE, forward_checks

    folder = Path(parsed.subject)
    loaded = load(folder, parsed.weights)
    subject = EngineSubject(loaded.runner, name=loaded.name, fingerprint=loaded.fingerprint)
    trained = not (folder / "config.json").is_file()
    small = loaded.runner.config.num_parameters() <= MOST_PARAMETERS
    forward = forward_checks(subject, _meaning(folder, trained) if small else None, parsed.context, FP32_CLOSE if trained else CLOSE)
    shared = shared_checks(subject, parsed.operations, parsed.seed)
    return f"{loaded.name} ({type(loaded.runner).__name__}, {parsed.weights} weights)", [*shared, *engine_checks(subject), *forward]


FP32_CLOSE = 1e-3
"""How near a run's own fp32 weights must come to the model that was trained."""


def _meaning(folder: Path, trained: bool) -> Callable[[], Transformer]:
    """What makes the model that a folder means: its training twin, experts decoded."""

    def build() -> Transformer:
        import torch

        if trained:
            from gnomon.model.runs import load_model

            return load_model(folder)[0].eval()
        from gnomon.model.weights import load_pretrained

        return load_pretrained(folder, dtype=torch.float32)

    return build
