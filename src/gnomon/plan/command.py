"""`gnomon plan`: what fits, which wall binds, which knob is cheapest to turn. Its arguments, and what each of its options does.

Nothing heavy is imported until the verb runs. Read next: `answer.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError

WORDS = """words are key=value: what is asked (prompt=8k output=1k concurrency=16; tokens=20B batch=1M context=4k; tasks=64 group=8), axes
(tp=8 ep=8 pp=2 dp=4 cp=2 dcp=8 zero=1), formats (experts=mxfp4 rest=fp8 kv=fp8), bounds (speed=30 latency=2s cost=$1 time=7d budget=$500
devices=16 memory=80GB loss=2.5), goal=speed, price=2.5 ($ per device and hour), stack=NAME, model.FIELD=VALUE"""
ONE_VALUE = ("--hardware", "--model", "--html", "--record", "--knob", "--list")
PHASES = ("serve", "train", "rl")
LISTS = ("hardware", "knobs", "laws", "records")


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.add_argument("words", nargs="*", metavar="serve|train|rl|key=value", help=WORDS)
    parser.add_argument("--hardware", metavar="DEVICE[:N]", help="h200:8, gb300:72x2, a file.toml; no number: as many as needed")
    parser.add_argument("--model", metavar="MODEL", help="preset, config.json, run folder, or a size such as 1B (active parameters)")
    parser.add_argument("--json", action="store_true", help="the answer for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--fit", nargs="+", type=Path, metavar="RUN", help="loss law from run folders, or a curve from a table.csv")
    parser.add_argument("--record", metavar="NAME", help="calibration record: a name or a file.toml (default: the best one for the device)")
    parser.add_argument("--knob", action="append", default=[], metavar="PKG.MODULE:KNOB", help="also weigh a knob of yours")
    parser.add_argument("--compare", action="store_true", help="the model beside other architectures: cache, traffic, FLOPs, speed")
    parser.add_argument("--list", choices=LISTS, help="what is known")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine (at most 30 s) and keep the record")


def ordered(arguments: Sequence[str]) -> list[str]:
    """The verb's arguments with words before options, so that they may be mixed: argparse takes positional arguments only in one place."""
    words, options = [], []
    rest = list(arguments)
    while rest:
        item = rest.pop(0)
        if not item.startswith("-"):
            words.append(item)
            continue
        options.append(item)
        if item in ONE_VALUE and rest:
            options.append(rest.pop(0))
        while item == "--fit" and rest and not rest[0].startswith("-") and "=" not in rest[0] and rest[0] not in PHASES:
            options.append(rest.pop(0))
    return [*words, *options]


def run(parsed: argparse.Namespace) -> None:
    """Do what the arguments say. Raises `ConfigError` for a question that cannot be understood."""
    if parsed.calibrate:
        _calibrate()
    elif parsed.list:
        _list(parsed.list)
    elif parsed.compare:
        _compare(parsed)
    elif parsed.fit and not parsed.words and not parsed.hardware:
        _show_fit(parsed.fit)
    else:
        _answer(parsed)


def _answer(parsed: argparse.Namespace) -> None:
    import json

    from rich.console import Console

    from gnomon.plan import report
    from gnomon.plan.answer import as_dict, ask

    question, record, law = _question(parsed)
    from gnomon.plan.knobs import KNOBS, knob

    answer = ask(question, record, (*KNOBS, *map(knob, parsed.knob)), law)
    if parsed.html:
        from gnomon.plan.page import write

        write(answer, parsed.html)
    if parsed.json:
        sys.stdout.write(json.dumps(as_dict(answer), indent=2) + "\n")
        return
    report.show(answer, Console(highlight=False))
    if parsed.html:
        Console(highlight=False).print(f"wrote {parsed.html}")


def _question(parsed: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The question, the calibration record and the loss law that the arguments name."""
    from gnomon.plan.words import question, taken

    words, options = taken(parsed.words, ("hardware", "model", "record", "stack", "price"))
    hardware = _once("hardware", parsed.hardware, options)
    if hardware is None:
        raise ConfigError("which hardware? say e.g. --hardware h200:8 (gnomon plan --list hardware), or --hardware here after "
                          "gnomon plan --calibrate")
    device, count, record = machine(hardware, _once("record", parsed.record, options), options.get("stack"), options.get("price"))
    law = None
    if parsed.fit:
        from gnomon.plan import fit

        law = fit.fit(fit.read_runs(parsed.fit))
    return question(words, (device, count), _once("model", parsed.model, options)), record, law


def machine(text: str, record_name: str | None, stack: str | None, price: str | None) -> tuple[Any, int | None, Any]:
    """Device, number (none: free) and calibration record of `h200:8`, `h200` or `here`."""
    from dataclasses import replace

    from gnomon.plan.calibration import best_record, record
    from gnomon.plan.goals import dollars
    from gnomon.plan.hardware import Cluster

    cluster = Cluster.parse(text)
    device = cluster.device
    if price is not None:
        amount = dollars(price)
        device = replace(device, price_per_hour=(amount, amount, amount), price_source="given")
    if cluster.domains > 1 and cluster.devices_per_domain < device.scale_up_size:
        device = replace(device, scale_up_size=cluster.devices_per_domain)  # domains as they are asked for
    known = record(record_name) if record_name else best_record(device, stack)
    return device, cluster.count if ":" in text.removesuffix(".toml") else None, known


def _once(name: str, option: str | None, words: dict[str, str]) -> str | None:
    if option is not None and name in words:
        raise ConfigError(f"'{name}' is given as an option ({option}) and as a word ({words[name]}); keep one")
    return option if option is not None else words.get(name)


def _show_fit(paths: list[Path]) -> None:
    from rich.console import Console

    from gnomon.plan import fit
    from gnomon.plan.listing import curve_table, fit_table

    if len(paths) == 1 and paths[0].suffix == ".csv":
        Console(highlight=False).print(curve_table(fit.fit_table(paths[0])))
    else:
        Console(highlight=False).print(fit_table(fit.fit(fit.read_runs(paths))))


def _list(what: str) -> None:
    from rich.console import Console

    from gnomon.plan.listing import table

    Console(highlight=False).print(table(what))


def _compare(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from gnomon.plan.comparison import beside, compared, comparison_table
    from gnomon.plan.hardware import Cluster
    from gnomon.plan.words import read_model, taken

    words, options = taken(parsed.words, ("hardware", "model", "record", "stack"))
    if words:
        raise ConfigError(f"'{words[0]}' does not go with --compare; it takes --model, --hardware and --record")
    hardware, name = _once("hardware", parsed.hardware, options), _once("model", parsed.model, options) or "k3-2.8t"
    cluster, record = None, None
    if hardware is not None:
        device, count, record = machine(hardware, _once("record", parsed.record, options), options.get("stack"), None)
        cluster = Cluster.parse(hardware) if count else Cluster(device=device, devices_per_domain=1)
    rows = compared(beside(name, read_model(name)), cluster, record)
    console = Console(highlight=False)
    console.print(comparison_table(rows))
    console.print(f"one sequence, bf16 cache; bytes moved and GFLOP are of one token; variants of {name} have as many active parameters"
                  + (f"; speed of one user, `?` beyond what was measured; record: {record.title}, {record.date}" if record else ""))


def _calibrate() -> None:
    """Measure in a process of its own, so that the planner itself never loads torch."""
    from rich.console import Console

    from gnomon.plan.local import calibrate

    done = calibrate()
    console = Console(highlight=False)
    console.print(f"{done.device.title}: reads {done.device.bandwidth / 1e9:.1f} GB/s, "
                  + ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in done.device.flops.items()))
    console.print(f"small models: trained within {done.made.training_spread:.0%}, sampled within {done.made.spread:.0%} (80 %), "
                  f"measured in {done.seconds:.0f} s")
    console.print(f"wrote {done.hardware} and {done.record}; use --hardware here")
