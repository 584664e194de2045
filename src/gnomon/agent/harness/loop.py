"""The turn loop: ask, carry out, show, again; until the policy says that it has finished, or nothing more may be used.

Whatever a policy answers, the loop goes on or ends in order: each call gets one result, a call that cannot be carried out gets the reason,
and after some messages in a row without a usable call the attempt ends as `refused`. Failures of the machine and a spent budget are left
to whoever runs the attempt. Read next: `composed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.agent.harness.context import Context, Talk
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen, bounded, shown
from gnomon.agent.harness.tool import Bound
from gnomon.agent.harness.wire import Wire, Wish, said
from gnomon.agent.trajectory import StopReason
from gnomon.data.messages import Message
from gnomon.extend import suggestion

CUT = "Your message reached the limit of its length and was cut. Nothing that was cut is carried out; write less at once."
EMPTY = "Your message was empty. Go on, or say what came of the task."


class Loop:
    """The tools, the wire and the context of one agent; `run` may be called for several talks, one after the other."""

    def __init__(self, tools: Sequence[Bound], wire: Wire, context: Context) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.wire = wire
        self.context = context

    async def run(self, talk: Talk, desk: Desk, turns: int) -> StopReason:
        """One agent from its first message to its end. What stands last in `talk` is what it said last."""
        spec, fruitless = desk.spec, 0
        for _ in range(turns):
            await self.context.before(talk, desk)
            completion = await desk.model.complete(talk.conversation(), desk.sampling, purpose=talk.purpose)
            talk.took(completion)
            cut = completion.stop == "length"
            try:
                wishes = self._wishes(completion.message, cut)
            except Fault as fault:
                talk.messages += [*_unread(completion.message), said(bounded(str(fault), spec.observations.characters))]
                fruitless += 1
                if fruitless >= spec.patience:
                    return "refused"
                continue
            if not wishes:
                return "finished"
            seen = await self._carried_out(wishes, desk, cut)
            talk.messages += self.wire.answers(wishes, seen)
            if any(each.done for each in seen):
                return "finished"
            fruitless = fruitless + 1 if all(each.error for each in seen) and self._unusable(wishes, cut) else 0
            if fruitless >= spec.patience:
                return "refused"
        return "budget"

    def _wishes(self, message: Message, cut: bool) -> Sequence[Wish]:
        """The calls of a message; none means that the agent has finished. Raises `Fault` for a message that is neither."""
        if not self.tools or (self.wire.always and not message.text.strip() and not message.tool_calls):
            wishes: Sequence[Wish] = ()
        else:
            wishes = self.wire.wishes(message, [*self.tools.values()])
        if [wish.id for wish in wishes if wish.id is not None] != [call.id for call in message.tool_calls]:
            raise Fault("no tool is declared, so none can be called that way; nothing was done")
        if not wishes and cut:
            raise Fault(CUT)
        if not wishes and not message.text.strip():
            raise Fault(EMPTY)
        return wishes

    async def _carried_out(self, wishes: Sequence[Wish], desk: Desk, cut: bool) -> list[Seen]:
        """What came of each call, in order; after one that ends the attempt, none is carried out."""
        seen: list[Seen] = []
        for number, wish in enumerate(wishes):
            if any(each.done for each in seen):
                seen.append(Seen(text="not carried out: the attempt ended before", error=True))
            elif number >= desk.spec.calls_per_turn:
                seen.append(Seen(text=f"not carried out: one message may hold {desk.spec.calls_per_turn} calls", error=True))
            else:
                seen.append(await self._one(wish, desk, whole=not cut))
        return seen

    async def _one(self, wish: Wish, desk: Desk, whole: bool) -> Seen:
        limits = desk.spec.observations
        try:
            tool, given = self._understood(wish, whole)
            seen = await tool.kind.call(desk, given)
        except Fault as fault:
            seen = Seen(text=f"Error: {fault}", error=True)
        return Seen(text=bounded(seen.text, limits.characters, limits.keep), error=seen.error, done=seen.done)

    def _understood(self, wish: Wish, whole: bool) -> tuple[Bound, dict[str, object]]:
        """The tool of a call and its arguments. Raises `Fault` for a tool that is not there, and for arguments that do not fit."""
        tool = self.tools.get(wish.name)
        if tool is None:
            names = [*self.tools]
            raise Fault(f"there is no tool {shown(wish.name)}{suggestion(wish.name[:100], names)} (there are: {', '.join(names)})")
        return tool, tool.read(wish.text, whole) if wish.value is None else tool.named(dict(wish.value))

    def _unusable(self, wishes: Sequence[Wish], cut: bool) -> bool:
        """Whether none of the calls could be understood; one that was understood and failed is work, not noise."""
        for wish in wishes:
            try:
                self._understood(wish, not cut)
            except Fault:
                continue
            return False
        return True


def _unread(message: Message) -> tuple[Message, ...]:
    """An answer for each call of a message that could not be read, so that none stays open."""
    return tuple(Message(role="tool", name=call.name, tool_call_id=call.id, content=said("nothing was done").content)
                 for call in message.tool_calls)
