"""Requests about files, changes and use: a part of `agent`, used by it alone; runs inside under any Python from 3.9 on."""

from __future__ import annotations

import json
import os
import selectors

import agent_files
import agent_kernel


class Calls:
    """The part of the agent that answers them. The rest of it is in `agent`."""

    watches: agent_files.Watches
    uploads: dict[int, agent_files.Upload]
    selector: selectors.PollSelector
    whole: bool
    """Whether the kernel is this machine's alone, so that its file system holds nothing else."""

    def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        """One frame to the host."""
        raise NotImplementedError

    def reply(self, header: dict, payload: bytes = b"", **fields: object) -> None:
        """The answer to a request."""
        self.send({"ev": "reply", "id": header["id"], **fields}, payload)

    def do_read(self, header: dict, payload: bytes) -> None:
        """A file's content in pieces."""
        for piece in agent_files.read(header["path"], header["max"]):
            self.send({"ev": "part", "id": header["id"]}, piece)
        self.reply(header)

    def do_write(self, header: dict, payload: bytes) -> None:
        """A piece of a file; the last one puts it in its place."""
        upload = self.uploads.pop(header["file"], None) or agent_files.Upload(header["path"], header.get("mode"))
        upload.add(payload)
        if header["last"]:
            if upload.fresh and self.watches.queues:
                self.watches.fresh.add(upload.target)
            upload.finish()
        else:
            self.uploads[header["file"]] = upload
        self.reply(header)

    def do_list(self, header: dict, payload: bytes) -> None:
        """The entries of a directory, in pieces."""
        for rows in agent_files.entries(header["path"], header["depth"]):
            self.send({"ev": "part", "id": header["id"]}, json.dumps(rows).encode())
        self.reply(header)

    def do_remove(self, header: dict, payload: bytes) -> None:
        """A file, or a directory and all below it, goes."""
        agent_files.remove(header["path"])
        self.reply(header)

    def do_mkdir(self, header: dict, payload: bytes) -> None:
        """A directory and those above it."""
        os.makedirs(header["path"], exist_ok=True)
        self.reply(header)

    def do_link(self, header: dict, payload: bytes) -> None:
        """A symbolic link, in place of a file or link that is there."""
        os.makedirs(os.path.dirname(header["path"]), exist_ok=True)
        if os.path.lexists(header["path"]):
            os.unlink(header["path"])
        os.symlink(header["target"], header["path"])
        self.reply(header)

    def do_watch(self, header: dict, payload: bytes) -> None:
        """Report changes below a directory from now on."""
        handle = self.watches.open(header["id"], header["path"], bool(header["recursive"]))
        self.selector.register(handle, selectors.EVENT_READ, ("watch", None))
        self.reply(header)

    def do_unwatch(self, header: dict, payload: bytes) -> None:
        """Stop reporting."""
        for handle in self.watches.close(header["watch"]):
            self.selector.unregister(handle)
        self.reply(header)

    def changed(self, handle: int) -> None:
        """Pass on what happened in a watched directory."""
        key, events = self.watches.read(handle)
        for path, kind in events:
            self.send({"ev": "change", "id": key, "path": path, "kind": kind})

    def do_usage(self, header: dict, payload: bytes) -> None:
        """Processes besides this one, processor seconds of all, bytes of files that were written here."""
        self.reply(header, processes=len(agent_files.others()), seconds=sum(os.times()[:4]),
                   disk=agent_kernel.used() if self.whole else agent_files.written())
