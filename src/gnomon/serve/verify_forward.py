"""The equivalences of a runner alone: however a sequence is cut into calls, wherever its state is copied, it is the same function; and that
function is the one that the checkpoint means. Read next: `verify_remote.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.model.transformer import Transformer
from gnomon.serve.runner import Runner
from gnomon.serve.verify import Ask, Check, Finding, skipped
from gnomon.serve.verify_engine import EngineSubject, rounding

CLOSE = 0.1
"""What weights and activations of fewer bits may change log-probabilities by, in the median over positions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """What a sequence gave: logits [T, V] and the pool that it ended in."""

    logits: Tensor
    pool: StatePool


def walk(runner: Runner, ids: Tensor, cuts: Sequence[int], copies: Sequence[int] = ()) -> Walk:
    """Run a sequence in calls that end at `cuts`; the state after each of `copies` tokens is left in slots 1, 2, …"""
    runner.steady(True)
    pool = runner.new_pool(1 + len(copies), len(ids))
    parts = [step(runner, pool, ids, (start, stop), 0, copies) for start, stop in pairwise([0, *cuts])]
    return Walk(logits=torch.cat(parts), pool=pool)


def step(runner: Runner, pool: StatePool, ids: Tensor, span: tuple[int, int], slot: int, copies: Sequence[int] = ()) -> Tensor:
    """Logits [stop - start, V] of one call over positions `start` to `stop` of the sequence in a slot."""
    start, stop = span
    wanted = [(0, copy - start, 1 + i) for i, copy in enumerate(copies) if start < copy <= stop]
    rows = PackedRows(
        tokens=ids[start:stop].contiguous(), bounds=torch.tensor([0, stop - start]), past=torch.tensor([start]), slots=torch.tensor([slot]),
        pages=torch.arange(pool.pages, dtype=torch.int32)[None], wanted=torch.arange(stop - start),
        copies=torch.tensor(wanted, dtype=torch.int64) if wanted else None,
    )
    logits = runner.forward(rows, pool).logits
    assert logits is not None
    return logits


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference of log-probabilities; infinite for what is not a number."""
    if torch.equal(a, b):
        return 0.0
    found = (torch.log_softmax(a.double(), -1) - torch.log_softmax(b.double(), -1)).abs().max().item()
    return float("inf") if math.isnan(found) else found


def recurrent(subject: EngineSubject) -> Finding:
    """One call with all tokens ≡ a call per token."""
    ids = torch.tensor(subject.text(2 * subject.block + 9, 200))
    whole, each = walk(subject.runner, ids, [len(ids)]), walk(subject.runner, ids, range(1, len(ids) + 1))
    return Finding(worst=apart(whole.logits, each.logits), note=f"{len(ids)} tokens in one call, and in {len(ids)} calls")


def splits(subject: EngineSubject, ways: int = 6) -> Finding:
    """Any cuts of a prompt ≡ none."""
    ids, draw, worst = torch.tensor(subject.text(4 * subject.block + 21, 201)), random.Random(0), 0.0
    whole = walk(subject.runner, ids, [len(ids)])
    for _ in range(ways):
        cuts = sorted({*draw.sample(range(1, len(ids)), draw.randint(1, 5)), len(ids)})
        worst = max(worst, apart(walk(subject.runner, ids, cuts).logits, whole.logits))
    return Finding(worst=worst, note=f"{len(ids)} tokens, {ways} ways to cut them")


def checkpoints(subject: EngineSubject) -> Finding:
    """The state copied on the way after n tokens ≡ the state of a prompt of n tokens."""
    block = subject.block
    ids = torch.tensor(subject.text(4 * block + 5, 202))
    places = [1, block, 2 * block, 2 * block + 1, 3 * block + 7]
    whole, worst = walk(subject.runner, ids, [len(ids)], places), 0.0
    for slot, length in enumerate(places, 1):
        logits = step(subject.runner, whole.pool, ids, (length, len(ids)), slot)
        worst = max(worst, apart(logits, whole.logits[length:]))
    return Finding(worst=worst, note=f"continued from copies after {', '.join(map(str, places))} tokens")


def loop(subject: EngineSubject) -> Finding:
    """The engine's text ≡ the plain loop over the runner: one call with the prompt, then one per token."""
    prompt, count = subject.text(subject.block + 31, 203), 12
    ids = torch.tensor([*prompt, *[0] * count])
    pool, tokens = subject.runner.new_pool(1, len(ids)), list[int]()
    subject.runner.steady(True)
    logits = step(subject.runner, pool, ids, (0, len(prompt)), 0)[-1]
    for place in range(len(prompt), len(ids)):
        tokens.append(int(logits.argmax()))
        ids[place] = tokens[-1]
        logits = step(subject.runner, pool, ids, (place, place + 1), 0)[-1]
    answer = subject.ask([Ask(prompt=prompt, tokens=count)])[0]
    same = next((i for i, (a, b) in enumerate(zip(answer.tokens, tokens, strict=True)) if a != b), count)
    return Finding(worst=float(count - same), bound=0.0, note=f"{same} of {count} greedy tokens are the same")


def meaning(subject: EngineSubject, reference: Callable[[], Transformer] | None) -> Finding:
    """The served forward ≡ the forward that the checkpoint means, its experts decoded to the values that training rounds to."""
    if reference is None:
        return skipped("there is no reference model here")
    ids = torch.tensor(subject.text(2 * subject.block + 9, 204))
    with torch.no_grad():
        exact = reference()(ids[None])[0].float().cpu()
    ours = walk(subject.runner, ids, [len(ids)]).logits
    a, b = (torch.log_softmax(x.double(), -1) for x in (ours, exact))
    top = b.topk(min(20, b.shape[1])).indices
    worst = float((a - b).abs().gather(1, top).amax(1).median())
    note = "median over positions of the worst of the 20 likeliest tokens"
    return Finding(worst=float("inf") if math.isnan(worst) else worst, note=note)


def finiteness(subject: EngineSubject, context: int) -> Finding:
    """Long contexts leave states and logits finite, whatever they hold: noise, one token for ever, a period."""
    period = torch.tensor(subject.text(7, 205)).repeat(-(-context // 7))[:context]
    kinds = {"noise": torch.tensor(subject.text(context, 206)), "one token": torch.full((context,), int(period[0])), "a period": period}
    for name, ids in kinds.items():
        pool = subject.runner.new_pool(1, context)
        for start in range(0, context, 512):
            stop = min(start + 512, context)
            rows = PackedRows(tokens=ids[start:stop].contiguous(), bounds=torch.tensor([0, stop - start]), past=torch.tensor([start]),
                              slots=torch.zeros(1, dtype=torch.int64), pages=torch.arange(pool.pages, dtype=torch.int32)[None])
            logits = subject.runner.forward(rows, pool).logits
            assert logits is not None
            if not bool(logits.isfinite().all() & pool.matrices.isfinite().all()):
                return Finding(failed=True, note=f"{name}: not finite within {stop} tokens")
    return Finding(worst=0.0, bound=0.0, note=f"{', '.join(kinds)}; {context} tokens each")


def forward_checks(subject: EngineSubject, reference: Callable[[], Transformer] | None = None, context: int = 4096,
                   close: float = CLOSE) -> list[Check]:
    """The checks of this page. `reference` makes the model that the checkpoint means, `close` is how near the served one must come."""
    bound = 0.0 if subject.runner.steady(True) else rounding(subject.runner)
    return [
        Check(name="recurrent", shows="chunked ≡ recurrent", run=partial(recurrent, subject), bound=bound),
        Check(name="split", shows="any split of a prompt ≡ none", run=partial(splits, subject), bound=bound),
        Check(name="checkpoint", shows="a state copied on the way ≡ the state of the shorter prompt", run=partial(checkpoints, subject),
              bound=bound),
        Check(name="loop", shows="the engine's greedy text ≡ the plain loop", run=partial(loop, subject), bound=0.0),
        Check(name="meaning", shows="served forward ≡ the forward trained for (QAT: rounded experts)", bound=close,
              run=partial(meaning, subject, reference)),
        Check(name="long context", shows="states and logits stay finite", run=lambda: finiteness(subject, context), bound=0.0),
    ]
