"""The `runsc` program: where it is, which version, and its verbs with the flags that a sandbox without daemon and network needs.

As an ordinary user `runsc` asks `newuidmap` and `newgidmap` to write its user namespace's maps. A map of one's own id alone needs no
privilege, so two scripts of our own stand in for the two set-uid programs, and no package is needed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from gnomon.errors import SandboxError, SandboxTimeout, Unsupported

UID_SCRIPT = '#!/bin/sh\necho "$2 $3 $4" > "/proc/$1/uid_map"\n'
GID_SCRIPT = '#!/bin/sh\necho deny > "/proc/$1/setgroups" && echo "$2 $3 $4" > "/proc/$1/gid_map"\n'
JOIN_SCRIPT = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 97; shift; n=$((n-1)); done; exec "$@"'


def find() -> Path:
    """The program that `RUNSC_PATH` names, or the one on the path. Raises `Unsupported` with the remedy where there is none."""
    named = os.environ.get("RUNSC_PATH")
    found = shutil.which(named or "runsc")
    if found is None:
        where = f"RUNSC_PATH={named} is no program" if named else "there is no runsc on the path"
        raise Unsupported(f"gvisor: {where}; `apt-get install runsc`, or set RUNSC_PATH to a current build from gvisor.dev")
    return Path(found)


def version(binary: Path) -> str:
    """What the program calls itself, for instance `0.0~20221219.0`."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(f"gvisor: {binary} --version failed: {error}") from error
    return said.split("\n")[0].removeprefix("runsc version ").strip()


class Runsc:
    """The program with its flags. One `state` folder for each sandbox makes removal a matter of removing a folder."""

    def __init__(self, binary: Path, scripts: Path) -> None:
        self.binary = binary
        self.rootless = os.geteuid() != 0
        self.scripts = scripts
        self.slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))

    def prepare(self) -> None:
        """Write the two scripts that an ordinary user needs."""
        self.scripts.mkdir(parents=True, exist_ok=True)
        for name, text in (("newuidmap", UID_SCRIPT), ("newgidmap", GID_SCRIPT)):
            path = self.scripts / name
            if not path.exists():
                path.write_text(text)
                path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """A small environment, so that nothing of the launcher's is readable anywhere."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": f"{self.scripts}:{path}" if self.rootless else path}

    def arguments(self, box: Path) -> list[str]:
        """The program and the flags that come before every verb."""
        state, log = box / "state", box / "runsc.log"
        return [
            str(self.binary),
            f"--root={state}",
            "--network=none",
            "--ignore-cgroups",
            "--overlay2=root:memory",
            f"--log={log}",
        ]

    async def verb(self, box: Path, *words: str, seconds: float = 60.0) -> None:
        """Run one verb to its end. Raises `SandboxError` with what the program said."""
        await self._run(box, [*self.arguments(box), *words], None, None, seconds)

    async def launch(self, box: Path, name: str, image: Path | None, ends: tuple[int, int], groups: tuple[Path, ...]) -> int:
        """Start a sandbox, from a checkpoint if `image` is one, with these standard streams and control groups; its process id."""
        verb = ["run"] if image is None else ["restore", f"--image-path={image}"]
        pid_file = box / "pid"
        words = [*self.arguments(box), *verb, "--detach", f"--bundle={box / 'bundle'}", f"--pid-file={pid_file}", name]
        if groups:
            files = [str(group / "cgroup.procs") for group in groups]
            words = ["/bin/sh", "-c", JOIN_SCRIPT, "sh", str(len(files)), *files, *words]
        (box / "state").mkdir(exist_ok=True)
        async with self.slots:
            await self._run(box, words, *ends, 120.0)
        return int(pid_file.read_text())

    async def _run(self, box: Path, words: list[str], source: int | None, sink: int | None, seconds: float) -> None:
        """A child with these standard streams; standard error goes to a file, which a detached sandbox may keep open."""
        with (box / "errors").open("w+b") as errors:
            child = await asyncio.create_subprocess_exec(
                *words,
                stdin=subprocess.DEVNULL if source is None else source,
                stdout=subprocess.DEVNULL if sink is None else sink,
                stderr=errors,
                env=self.environment(),
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(seconds):
                    code = await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
                raise SandboxTimeout(f"gvisor: `{' '.join(words[-4:])}` took more than {seconds:g} s") from None
            except asyncio.CancelledError:
                child.kill()
                raise
            if code != 0:
                errors.seek(0)
                said = errors.read(4000).decode("utf-8", "replace").strip()
                raise SandboxError(f"gvisor: runsc ended with status {code}: {said or 'no message; see ' + str(box / 'runsc.log')}")
