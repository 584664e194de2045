"""The bundle that `runsc` starts: a root folder of an image and a configuration in the OCI runtime format (opencontainers/runtime-spec).

The image's folder is only ever read: writes go to an overlay in the sandbox's own memory, and so into its checkpoints. The agent comes in
as a read-only folder with the host's Python, which needs to be in no image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from gnomon.errors import Unsupported
from gnomon.sandbox import guest
from gnomon.sandbox.sandbox import Spec

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT",
    "MKNOD", "AUDIT_WRITE", "SETFCAP", "SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN",
)  # fmt: skip
"""Powers over the sandbox's own kernel, none over the host's: `mount`, package managers and debuggers work inside."""

PROGRAM = ("agent.py", "agent_calls.py", "agent_child.py", "agent_door.py", "agent_files.py", "agent_kernel.py", "agent_seal.py")
"""The files of the agent inside."""

HOST_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_ETC = ("alternatives", "ssl", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types", "os-release", "debian_version", "perl")
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "var/lib", "run", "root", "home", "opt", "mnt", "srv", ".gnomon")
USERS = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
GROUPS = "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"


def agent_folder(place: Path) -> Path:
    """The agent's files in a folder named after their content, so that a checkpoint finds the agent that it was made with."""
    source = Path(guest.__file__).parent
    files = {name: (source / name).read_bytes() for name in PROGRAM}
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:16]
    folder = place / f"agent-{digest}"
    if not folder.exists():
        fresh = place / f".agent-{digest}-{os.getpid()}"
        fresh.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (fresh / name).write_bytes(content)
            (fresh / name).chmod(0o644)
        fresh.chmod(0o755)
        try:
            fresh.rename(folder)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def host_root(place: Path) -> Path:
    """The root folder of the `host` image: links, empty folders and a small `/etc`; the host's `/usr` is mounted into it, read-only."""
    root = place / "host-root"
    if root.exists():
        return root
    fresh = place / f".host-root-{os.getpid()}"
    for name in FOLDERS:
        (fresh / name).mkdir(parents=True, exist_ok=True)
    for name in HOST_LINKS:
        link = Path("/") / name
        if link.is_symlink():
            (fresh / name).symlink_to(os.readlink(link))
    (fresh / "etc/passwd").write_text(USERS)
    (fresh / "etc/group").write_text(GROUPS)
    (fresh / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (fresh / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for name in HOST_ETC:
        _copy(Path("/etc") / name, fresh / "etc" / name)
    for name in ("tmp", "var/tmp"):
        (fresh / name).chmod(0o1777)
    try:
        fresh.rename(root)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
    return root


def _copy(source: Path, target: Path) -> None:
    """A readable file or folder of the host's `/etc`, links kept as links, private keys left out."""
    if not source.exists():
        return
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("private", "*.key"), ignore_dangling_symlinks=True)
    elif os.access(source, os.R_OK):
        shutil.copy2(source, target)


def python() -> tuple[str, ...]:
    """The command that runs the agent, wherever the host's `/usr` is mounted inside. Raises `Unsupported` without a system Python."""
    if not os.access("/usr/bin/python3", os.X_OK):
        raise Unsupported("gvisor: the agent inside needs /usr/bin/python3; `apt-get install python3-minimal`")
    return ("/usr/bin/python3", "-I", "-S", "-B", "/.gnomon/agent.py")


def foreign_python() -> tuple[str, ...]:
    """The same for an image of its own, where the host's `/usr` is at `/.gnomon/usr`: its loader and libraries are named, not found."""
    usr = "/.gnomon/usr"
    loader = next((name for name in ("lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1") if (Path("/usr") / name).exists()), None)
    if loader is None:
        raise Unsupported("gvisor: no loader under /usr is known for this machine; images of their own need x86-64 or aarch64 with glibc")
    libraries = sorted(str(found) for found in Path("/usr/lib").glob("*-linux-gnu"))
    paths = ":".join(usr + path.removeprefix("/usr") for path in libraries)
    return (f"{usr}/{loader}", "--library-path", paths, *(usr + python()[0].removeprefix("/usr"),), *python()[1:])


def configuration(spec: Spec, root: Path, agent: Path, *, host: bool) -> dict[str, object]:
    """The configuration of one sandbox over a root folder."""
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "nodev", "noexec"]},
        _bind(agent, "/.gnomon"),
    ]
    if host:
        mounts += [_bind(Path("/") / name, f"/{name}") for name in ("usr", *HOST_LINKS) if _plain(Path("/") / name)]
    else:
        mounts.append(_bind(Path("/usr"), "/.gnomon/usr"))
    environment = ["PATH=/usr/bin:/bin"] if host else ["PATH=/usr/bin:/bin", "PYTHONHOME=/.gnomon/usr"]
    powers = [f"CAP_{name}" for name in CAPABILITIES]
    limits = (("NOFILE", spec.limits.open_files), ("FSIZE", spec.limits.disk_bytes), ("CORE", 0))
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]}
    if os.geteuid() != 0:
        linux = {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "user")],
            "uidMappings": [{"containerID": 0, "hostID": os.geteuid(), "size": 1}],
            "gidMappings": [{"containerID": 0, "hostID": os.getegid(), "size": 1}],
        }
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(python() if host else foreign_python()),
            "env": environment,
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted"), powers),
            "rlimits": [{"type": f"RLIMIT_{name}", "hard": value, "soft": value} for name, value in limits],
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": spec.hostname,
        "mounts": mounts,
        "linux": linux,
    }


def _plain(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _bind(source: Path, target: str) -> dict[str, object]:
    return {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", "ro", "nosuid", "nodev"]}


def write(folder: Path, content: dict[str, object]) -> None:
    """The bundle's folder with its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
