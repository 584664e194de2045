"""The guest's kernel, and the small archive that it starts from: modules, a shell for the first steps, and the agent.

Any Linux from 5.19 on will do that has these modules or has them built in. The archive (an initramfs in the `newc` format of cpio) mounts
the drives read-only, a memory file system with the sandbox's limits over them, takes from root inside what would let it reach the agent or
change the kernel, and hands process 1 to the agent.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import secrets
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import ConfigError, Unsupported
from gnomon.sandbox import guest
from gnomon.sandbox.gvisor.bundle import PROGRAM

VARIABLE = "GNOMON_MICROVM_KERNEL"
NEEDED = ("virtio_pci", "virtio_blk", "virtio_console", "erofs", "overlay")
WELCOME = ("fuse", "loop")
"""Modules that programs inside have a use for, where the kernel has them."""

REMEDY = (
    f"`apt-get install linux-image-cloud-amd64`, or without root: apt-get download $(apt-cache depends linux-image-cloud-amd64 | "
    f"awk '/Depends/{{print $2}}') && dpkg -x linux-image-*.deb kernel && export {VARIABLE}=$PWD/kernel"
)
INIT = r"""#!/bin/busybox sh
B=/bin/busybox
fail() { $B echo "gnomon: $*"; $B sync; $B poweroff -f; $B sleep 5; }
$B mount -t proc proc /proc && $B mount -t devtmpfs dev /dev && $B mount -t sysfs sys /sys || fail "no devices"
for word in $($B cat /proc/cmdline); do case $word in gnomon.*) eval "${word#gnomon.}" ;; esac; done
for module in MODULES; do $B insmod /modules/$module.ko || fail "module $module"; done
$B mount -t tmpfs -o size=$disk,nr_inodes=$inodes,mode=755 files /files || fail "no room for files"
$B mkdir /files/root /files/usr /files/w1 /files/w2
drive() { $B mkdir /drives/$1; $B mount -t erofs -o ro /dev/vd$1 /drives/$1 || fail "drive $1"; }
over() { $B mount -t overlay -o lowerdir=$1,upperdir=/files/$2,workdir=/files/$3,index=off,metacopy=off $2 $4 || fail "overlay of $2"; }
drive a
lower=
for letter in $layers; do drive $letter; lower=$lower:/drives/$letter; done
over ${lower#:} root w1 /new
for folder in proc dev sys run tmp .gnomon; do $B test -d /new/$folder || $B mkdir /new/$folder; done
if $B test -n "$usr"; then
    drive $usr
    lower=
    for letter in $layers; do $B test -d /drives/$letter/usr && lower=$lower:/drives/$letter/usr; done
    lower=$lower:/drives/$usr
    over ${lower#:} usr w2 /new/usr
fi
$B mount -t tmpfs -o mode=755,size=4m agent /new/.gnomon && $B cp /agent/* /new/.gnomon/ && $B mkdir /new/.gnomon/usr || fail "no agent"
$B mount --bind /drives/a /new/.gnomon/usr && $B mount -o remount,ro /new/.gnomon || fail "no agent"
$B ifconfig lo 127.0.0.1 up
echo 0 > /proc/sys/kernel/printk_ratelimit_burst
echo $(($($B cut -d/ -f2 /proc/loadavg | $B cut -d' ' -f1) + tasks)) > /proc/sys/kernel/threads-max
echo "POWERS" > /proc/sys/kernel/usermodehelper/bset
echo 1 > /proc/sys/kernel/kexec_load_disabled
echo 1 > /proc/sys/kernel/modules_disabled
$B mount --move /dev /new/dev && $B mount --move /proc /new/proc && $B mount --move /sys /new/sys || fail "no devices"
$B mkdir /new/dev/pts /new/dev/shm
$B mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 pts /new/dev/pts
$B mount -t tmpfs -o size=$disk,nr_inodes=$inodes,mode=1777,nosuid,nodev shm /new/dev/shm
$B mount -t cgroup2 -o nosuid,nodev,noexec groups /new/sys/fs/cgroup
for link in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
    $B ln -s ${link#*:} /new/dev/${link%%:*}
done
$B umount -l /files; for letter in a $layers $usr; do $B umount -l /drives/$letter; done
ulimit -c 0; ulimit -n $open
export PATH=/usr/bin:/bin HOME=/
exec $B switch_root /new PYTHON
"""
POWERS = f"{0xFFFFFFFF & ~(1 << 16 | 1 << 17 | 1 << 19 | 1 << 22)} 0"
"""For programs that the kernel itself starts: neither modules, devices' memory, tracing nor a restart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel's image, its version, and the folder of its modules."""

    image: Path
    version: str
    modules: Path


def find() -> Kernel:
    """The kernel that `GNOMON_MICROVM_KERNEL` names (an image, or a folder that a package was unpacked to), or the newest in `/boot`.

    Raises `Unsupported` with the remedy where there is none, `ConfigError` where the variable names none.
    """
    named = os.environ.get(VARIABLE)
    place = Path(named) if named else Path("/")
    found = [place] if place.is_file() else sorted((place / "boot").glob("vmlinuz-*"), key=_age)
    for image in reversed(found):
        version = image.name.partition("-")[2]
        for modules in (image.parent.parent / "lib/modules" / version, image.parent.parent / "usr/lib/modules" / version,
                        Path("/lib/modules") / version):  # fmt: skip
            if version and modules.is_dir() and os.access(image, os.R_OK):
                return Kernel(image=image, version=version, modules=modules)
    if named:
        raise ConfigError(f"{VARIABLE}={named}: neither a vmlinuz-VERSION with lib/modules/VERSION beside its folder, nor a folder with "
                          f"boot and lib; get one by {REMEDY}")
    raise Unsupported(f"microvm: no kernel for the guest in /boot that may be read and has its modules; {REMEDY}")


def _age(image: Path) -> tuple[bool, list[int]]:
    """Kernels for virtual machines last, newer ones later."""
    return "cloud" in image.name, [int(number) for number in re.findall(r"\d+", image.name)]


def modules(kernel: Kernel) -> list[tuple[str, bytes]]:
    """The modules that a guest loads, in an order that works, with their content. Raises `Unsupported` naming one that is missing."""
    files = {_plain(path.name.partition(".ko")[0]): path for path in kernel.modules.rglob("*.ko*")}
    builtin = kernel.modules / "modules.builtin"
    inside = {_plain(Path(line).name.partition(".ko")[0]) for line in builtin.read_text().split()} if builtin.exists() else set()
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in found or name in inside:
            return
        if name not in files:
            raise Unsupported(f"microvm: kernel {kernel.version} has no {name}; take a kernel for virtual machines: {REMEDY}")
        content = _unpacked(files[name])
        needs = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in needs[1].decode().split(",") if needs else ():
            if other:
                add(_plain(other))
        found[name] = content

    for name in NEEDED:
        add(name)
    for name in WELCOME:
        if name in files:
            add(name)
    names = list(found)
    if "virtio" in found and "virtio_ring" in found and names.index("virtio_ring") > names.index("virtio"):
        names.remove("virtio_ring")
        names.insert(names.index("virtio"), "virtio_ring")
    return [(name, found[name]) for name in names]


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _unpacked(path: Path) -> bytes:
    """A module's content, however it is packed."""
    content = path.read_bytes()
    if path.name.endswith(".xz"):
        return lzma.decompress(content)
    if path.name.endswith(".gz"):
        return gzip.decompress(content)
    if path.name.endswith(".zst"):
        program = shutil.which("zstd")
        if program is None:
            raise Unsupported("microvm: this kernel's modules are packed with zstd; `apt-get install zstd`")
        return subprocess.run([program, "-dcq"], input=content, capture_output=True, check=True).stdout
    return content


def bare(kernel: Kernel) -> bytes | None:
    """The kernel without its packing, which takes a translating qemu a second to undo; `None` where it is packed in a way not known here.

    Where the payload lies is in the image's header (Documentation/arch/x86/boot.rst: `setup_sects`, `payload_offset`, `payload_length`).
    """
    image, program = kernel.image.read_bytes(), shutil.which("lz4")
    if program is None or image[0x202:0x206] != b"HdrS":
        return None
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[(sectors + 1) * 512 + offset :][:length]
    if payload[:4] != b"\x02\x21\x4c\x18":  # lz4 in its older framing; the last four bytes are the unpacked length
        return None
    done = subprocess.run([program, "-dcq"], input=payload[:-4], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 and done.stdout[:4] == b"\x7fELF" else None


def shell() -> bytes:
    """A busybox that needs no libraries. Raises `Unsupported` where there is none."""
    found = shutil.which("busybox")
    content = Path(found).read_bytes() if found else b""
    if content[:4] != b"\x7fELF" or _interpreted(content):
        raise Unsupported("microvm: the guest's first steps need a busybox without libraries; `apt-get install busybox-static`")
    return content


def _interpreted(program: bytes) -> bool:
    """Whether a 64-bit program asks for a loader (a program header of type 3)."""
    start, size, count = struct.unpack_from("<Q", program, 32)[0], *struct.unpack_from("<HH", program, 54)
    return any(struct.unpack_from("<I", program, start + index * size)[0] == 3 for index in range(count))


def archive(kernel: Kernel, python: Iterable[str], place: Path) -> Path:
    """The archive that a kernel starts from, made once for each content; `python` is the command that runs the agent, its device last."""
    found = modules(kernel)
    first = INIT.replace("MODULES", " ".join(name for name, _ in found)).replace("POWERS", POWERS).replace("PYTHON", " ".join(python))
    source = Path(guest.__file__).parent
    files = [("init", 0o100755, first.encode()), ("bin/busybox", 0o100755, shell())]
    files += [(f"modules/{name}.ko", 0o100644, content) for name, content in found]
    files += [(f"agent/{name}", 0o100644, (source / name).read_bytes()) for name in PROGRAM]
    folders = ("bin", "modules", "agent", "proc", "dev", "sys", "files", "drives", "new")
    content = b"".join(_records([*((name, 0o040755, b"") for name in folders), *files, ("TRAILER!!!", 0, b"")]))
    return kept(place / f"start-{hashlib.sha256(content).hexdigest()[:16]}", content)


def _records(entries: Iterable[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """Entries of a `newc` archive: thirteen hexadecimal numbers, the name, the content, each part padded to four bytes."""
    for number, (name, mode, content) in enumerate(entries, 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def kept(path: Path, content: bytes) -> Path:
    """A file with this content, written once; anyone may read it, as qemu runs as a user of its own."""
    if not path.exists():
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        fresh.write_bytes(content)
        fresh.chmod(0o644)
        fresh.rename(path)
    return path
