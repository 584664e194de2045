"""Many sandboxes of one user at once: the limit of one must not count the processes of all. Prints what went wrong."""

import asyncio
import sys

from gnomon.sandbox.backends.namespaces import Backend
from gnomon.sandbox.sandbox import Command, Limits, Spec


async def many(count: int) -> list[str]:
    """Make so many, run a program in each while all are alive, end them."""
    backend = Backend()
    try:
        boxes = await asyncio.gather(*(backend.create(Spec(limits=Limits(processes=16))) for _ in range(count)))
        results = await asyncio.gather(*(box.exec(Command(argv=("/bin/true",))) for box in boxes), return_exceptions=True)
        return [str(result) for result in results if isinstance(result, BaseException) or result.code]
    finally:
        await backend.close()


if __name__ == "__main__":
    sys.stdout.write(repr(asyncio.run(many(int(sys.argv[1])))))
