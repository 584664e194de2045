"""`gnomon sandbox`: run untrusted programs, see and end what exists, build images, serve the E2B API. Its arguments, and what each does.

Nothing heavy is imported until the verb runs. Read next: `open.py`, then `sandbox.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLE = "for example: gnomon sandbox run -- python3 -c 'print(6 * 7)'"


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.epilog = EXAMPLE
    verbs = parser.add_subparsers(dest="do", metavar="WHAT", required=True, parser_class=type(parser))
    run = verbs.add_parser("run", help="run a program in a new sandbox, which ends with it", epilog=EXAMPLE)
    _backend(run)
    _limits(run)
    run.add_argument("--detach", action="store_true", help="leave the sandbox running; says its id, for exec and kill")
    run.add_argument("--stdin", action="store_true", help="the program reads this command's standard input")
    run.add_argument("--copy", nargs=2, action="append", default=[], metavar=("FILE", "PATH"), help="copy in before it runs")
    run.add_argument("--fetch", nargs=2, action="append", default=[], metavar=("PATH", "FILE"), help="copy out after it ran")
    run.add_argument("--keep", metavar="NAME", help="keep the files afterwards as an image")
    run.add_argument("argv", nargs="*", metavar="PROGRAM", help="program and arguments, after --")

    listed = verbs.add_parser("ls", help="what exists: state, age, memory, owner")
    listed.add_argument("--json", action="store_true", help="for programs")
    execute = verbs.add_parser("exec", help="run a program in a sandbox that exists")
    execute.add_argument("id", help="its id, or the first characters of it")
    execute.add_argument("--timeout", default="1h", metavar="TIME", help="end the program after this long (default: 1h)")
    execute.add_argument("argv", nargs="+", metavar="PROGRAM", help="program and arguments, after --")
    kill = verbs.add_parser("kill", help="end sandboxes and all that runs in them")
    kill.add_argument("ids", nargs="*", metavar="ID", help="their ids, or the first characters of them")
    kill.add_argument("--all", action="store_true", help="every sandbox of this user")
    gc = verbs.add_parser("gc", help="end what nobody owns any more, remove layers that nothing needs")
    gc.add_argument("--cache", action="store_true", help="also forget the results of builds")
    probe = verbs.add_parser("probe", help="which backends work here, found out by using them")
    probe.add_argument("--json", action="store_true", help="for programs")
    _serve(verbs.add_parser("serve", help="the E2B API over a backend of this machine"))
    _images(verbs)


def _images(verbs: Any) -> None:
    images = verbs.add_parser("images", help="images and snapshots of this user")
    images.add_argument("--forget", nargs="+", default=[], metavar="NAME", help="drop these names")
    images.add_argument("--json", action="store_true", help="for programs")
    build = verbs.add_parser("build", help="make an image from a Dockerfile, an archive, a folder or a distribution")
    build.add_argument("source", nargs="?", type=Path, metavar="PATH", help="a Dockerfile, or the folder that has one")
    build.add_argument("--name", required=True, help="the image's name")
    build.add_argument("--archive", type=Path, metavar="FILE", help="an OCI layout, or what `docker save` wrote")
    build.add_argument("--tag", help="which image of the archive")
    build.add_argument("--folder", type=Path, metavar="FOLDER", help="a root file system, copied")
    build.add_argument("--debian", metavar="SUITE", help="a release such as bookworm, by mmdebstrap")
    build.add_argument("--packages", default="", metavar="A,B", help="packages beside the smallest set")
    build.add_argument("--mirror", metavar="URL", help="where packages come from")
    build.add_argument("--max-size", default="16GiB", metavar="SIZE", help="the most that an archive may unpack to (default: 16GiB)")
    build.add_argument("--fresh", action="store_true", help="build anew what was built before")
    _backend(build)
    build.add_argument("--allow", action="append", default=[], metavar="HOST:PORT", help="what RUN may reach")


def _backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", metavar="NAME", help="namespaces, gvisor, … (default: the first that works)")
    parser.add_argument("--isolation", default="standard", choices=("standard", "strong"), help="strong: another kernel, or nothing")


def _limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", default="host", help="image, snapshot or ./folder (default: host, this machine's /usr, read-only)")
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="memory in all (default: 512MiB)")
    parser.add_argument("--disk", default="256MiB", metavar="SIZE", help="files in all (default: 256MiB)")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="processors (default: 1)")
    parser.add_argument("--processes", type=int, default=128, metavar="N", help="processes at a time (default: 128)")
    parser.add_argument("--timeout", default="1h", metavar="TIME", help="end it after this long (default: 1h)")
    parser.add_argument("--allow", action="append", default=[], metavar="HOST:PORT", help="let it reach this (*.DOMAIN:PORT too)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set in its environment")
    parser.add_argument("--user", default="root", help="its user inside (default: root, who is nobody outside)")
    parser.add_argument("--workdir", default="/home/user", metavar="PATH", help="where it starts (default: /home/user)")


def _serve(parser: argparse.ArgumentParser) -> None:
    _backend(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=3000, help="port to bind (default: 3000; 0 takes a free one)")
    parser.add_argument("--template", action="append", default=[], metavar="NAME=IMAGE", help="another name for an image")
    parser.add_argument("--timeout", default="5m", metavar="TIME", help="how long a sandbox lives unless its creation says (default: 5m)")


def run(parsed: argparse.Namespace) -> None:
    """Do what the arguments say; for a program that ran, ends with its exit status."""
    import asyncio

    from gnomon.sandbox import verbs

    status = asyncio.run(getattr(verbs, parsed.do)(parsed))
    if status:
        sys.exit(status)
