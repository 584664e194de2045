"""The lowest layer of the `host` image: the folders that every system has, users of its own, and the few files of `/etc` that programs
need.

Nothing of the host's `/home`, `/root` or `/var` is in it, and of `/etc` only what every package puts there for everyone.
"""

from __future__ import annotations

import os

from gnomon.sandbox.ns.mounts import MERGED

FOLDERS = ("etc", "usr", "home", "root", "opt", "srv", "mnt", "media", "run", "proc", "sys", "dev", "var", "var/lib", "var/cache",
           "var/log", "var/spool")  # fmt: skip
OPEN_FOLDERS = ("tmp", "var/tmp", "run/lock")
COPIED = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "nsswitch.conf", "protocols", "services", "mime.types", "localtime",
          "timezone", "os-release", "debian_version", "ssl/certs", "ssl/openssl.cnf", "ca-certificates.conf", "pki/tls/certs",
          "bash.bashrc", "profile", "skel", "magic", "host.conf", "gai.conf", "inputrc", "python3", "python3.11", "terminfo", "apt",
          "dpkg")  # fmt: skip
MAX_COPY = 4 << 20
USERS = """root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
GROUPS = "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nuser:x:1000:\nnogroup:x:65534:\n"


def copy(source: str, target: str) -> None:
    """Copy files, folders and links that everyone may read; what cannot be read is left out."""
    try:
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            for name in os.listdir(source):
                copy(f"{source}/{name}", f"{target}/{name}")
        elif os.path.isfile(source) and os.stat(source).st_mode & 0o004 and os.path.getsize(source) <= MAX_COPY:
            with open(source, "rb") as data:
                content = data.read()
            with open(target, "wb") as file:
                file.write(content)
            os.chmod(target, os.stat(source).st_mode & 0o755)
    except OSError:
        pass


def make(folder: str, one_user: bool) -> None:
    """Fill a folder with the layer. With `one_user` all belongs to root, the only user there is."""
    for name in FOLDERS:
        os.mkdir(f"{folder}/{name}", 0o755)
    for name in OPEN_FOLDERS:
        os.mkdir(f"{folder}/{name}", 0o755)
        os.chmod(f"{folder}/{name}", 0o1777)
    os.chmod(f"{folder}/root", 0o700)
    os.mkdir(f"{folder}/home/user", 0o755)
    if not one_user:
        os.chown(f"{folder}/home/user", 1000, 1000)
    for name in MERGED:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{folder}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{folder}/{name}", 0o755)
    for name in COPIED:
        os.makedirs(os.path.dirname(f"{folder}/etc/{name}"), exist_ok=True)
        copy(f"/etc/{name}", f"{folder}/etc/{name}")
    written = {"passwd": USERS, "group": GROUPS, "hostname": "sandbox\n", "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
               "resolv.conf": "", "fstab": "", "shells": "/bin/sh\n/bin/bash\n"}  # fmt: skip
    for name, text in written.items():
        with open(f"{folder}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    os.symlink("/proc/self/mounts", f"{folder}/etc/mtab")
