"""Random use of the prefix cache, and two models to use it with: one that computes, and one whose state is a hash of its tokens.

The second is cheap and unforgiving: before it goes on from a state or reads a latent it looks whether they are those of exactly the tokens
that the sequence claims, so a wrong restore, a page that somebody else wrote or a slot used twice cannot go unnoticed.
"""

from hashlib import blake2b

import torch

from gnomon.errors import CapacityError
from gnomon.model.config import ModelConfig
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.model.parts import KDAConfig, MLAConfig
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, attn_res_block_size=1, layer_pattern=("kda", "mla"),
    final_mixer=None, moe=None,
    mixers={"kda": KDAConfig(num_heads=1, head_dim=4), "mla": MLAConfig(
        num_attention_heads=1, q_lora_rank=None, kv_lora_rank=3, qk_nope_head_dim=4, qk_rope_head_dim=1, v_head_dim=4)},
)


class HashModel:
    """A model whose state is a hash of the tokens so far, in numbers that bf16 and int8 hold exactly; its latents are token and place."""

    config = CONFIG

    def new_pool(self, slots, tokens, page_tokens=64, dtype=torch.float32):
        """A real pool, poisoned where it is small enough."""
        pool = StatePool(self.config, slots, -(-tokens // page_tokens), page_tokens, dtype)
        for x in (pool.matrices, pool.conv, pool.latents):
            x.fill_(torch.nan)
        return pool

    def run(self, jobs, pool):
        """Each job is (held, past tokens, new tokens, copies); look at all that is read, write all that is written."""
        for held, past, *_ in jobs:
            assert held.length == len(past)
            assert not past or read_state(pool, held.slot) == state_of(past), "the state is of other tokens"
            self.look(held, past, pool)
        for held, past, new, copies in jobs:
            state, kept = state_of(past), dict(copies)
            for i, token in enumerate(new):
                state, place = after(state, token), len(past) + i
                page = int(held.pages[place // pool.page_tokens])
                pool.latents[page, :, place % pool.page_tokens] = torch.tensor([token, place, 0.0, 0.0])
                if i + 1 in kept:
                    write_state(pool, kept[i + 1], state)
            write_state(pool, held.slot, state)
        for held, past, new, _ in jobs:
            self.look(held, past + new, pool)

    def look(self, held, tokens, pool):
        """The pages hold these tokens."""
        if tokens:
            rows = pool.latents[held.pages.long(), 0].reshape(-1, 4)[:len(tokens)]
            assert rows[:, 0].tolist() == tokens and rows[:, 1].tolist() == list(range(len(tokens))), "a page has other tokens"


class RealModel:
    """A small model that computes; each step's log-probabilities are compared with an uncached run of the same tokens."""

    def __init__(self, network, bound=1e-4):
        self.network, self.bound = InferenceModel.from_transformer(network, "fp32"), bound
        self.config, self.new_pool = self.network.config, self.network.new_pool
        self.worst = 0.0
        self._known = {}

    def exact(self, tokens):
        """Log-probabilities after each of these tokens, computed at once and from nothing."""
        key = tuple(tokens)
        if key not in self._known:
            pool, count = self.new_pool(1, len(tokens)), len(tokens)
            rows = PackedRows(tokens=torch.tensor(tokens), bounds=torch.tensor([0, count]), past=torch.tensor([0]),
                              slots=torch.tensor([0]), pages=torch.arange(pool.pages, dtype=torch.int32)[None], wanted=torch.arange(count))
            self._known = dict(list(self._known.items())[-20:])
            self._known[key] = self.network.forward(rows, pool).logits.log_softmax(-1)
        return self._known[key]

    def logits(self, held, tokens, chunk):
        """Logits after these further tokens of one sequence that is open, computed in chunks."""
        assert held.reserve(len(tokens))
        for start in range(0, len(tokens), chunk):
            piece = tokens[start:start + chunk]
            rows = PackedRows(tokens=torch.tensor(piece), bounds=torch.tensor([0, len(piece)]), past=torch.tensor([held.length + start]),
                              slots=torch.tensor([held.slot]), pages=held.pages[None].contiguous())
            last = self.network.forward(rows, held.memory.pool).logits[0]
        return last

    def run(self, jobs, pool):
        """All jobs in one call."""
        bounds, width = [0], max(len(held.pages) for held, *_ in jobs)
        pages = torch.zeros(len(jobs), width, dtype=torch.int32)
        copies = []
        for i, (held, past, new, kept) in enumerate(jobs):
            assert held.length == len(past)
            pages[i, :len(held.pages)] = held.pages
            bounds.append(bounds[-1] + len(new))
            copies += [(i, seen, slot) for seen, slot in kept]
        rows = PackedRows(
            tokens=torch.tensor([t for _, _, new, _ in jobs for t in new]), bounds=torch.tensor(bounds),
            past=torch.tensor([len(past) for _, past, _, _ in jobs]), slots=torch.tensor([held.slot for held, *_ in jobs]), pages=pages,
            wanted=torch.arange(bounds[-1]), copies=torch.tensor(copies) if copies else None,
        )
        scores = self.network.forward(rows, pool).logits.log_softmax(-1)
        for i, (_, past, new, _) in enumerate(jobs):
            exact, ours = self.exact(past + new)[len(past):], scores[bounds[i]:bounds[i + 1]]
            difference = float((exact - ours).abs().max())
            self.worst = max(self.worst, difference)
            assert difference <= self.bound, f"log-probabilities differ by {difference} after {len(past)} tokens"
            best = exact.max(-1).values
            assert bool((best - exact.gather(1, ours.argmax(-1, keepdim=True))[:, 0] <= 2 * self.bound).all()), "another greedy token"


class Talk:
    """One sequence that is open: what it should be, beside what the cache holds."""

    def __init__(self, held, prompt, salt):
        self.held, self.tokens, self.todo, self.salt = held, list(prompt[:held.length]), list(prompt[held.length:]), salt


class World:
    """A cache under random use. Each method is one operation; `check` recounts everything."""

    def __init__(self, model, *, budget, block=8, page_tokens=8, disk=None, **settings):
        self.model, self.budget, self.page_tokens, self.disk = model, budget, page_tokens, disk
        self.settings = CacheSettings(hash_block=block, **settings)
        self.past: list[tuple[list[int], str]] = []
        self.operations = self.refused = 0
        self.start()

    def start(self):
        """A fresh process: memory and cache from nothing."""
        self.talks: list[Talk] = []
        self.memory = Memory(self.model, self.budget, self.page_tokens)
        more = {} if self.disk is None else {"disk": self.disk}
        self.cache = PrefixCache(self.memory, self.settings, "world", **more)

    def open(self, prompt, salt="", boundaries=(), reuse=True):
        """Begin a sequence, if there is room."""
        try:
            held = self.cache.open(tuple(prompt), salt=salt, boundaries=boundaries, reuse=reuse)
        except CapacityError:
            self.refused += 1
            part = self.memory.page_bytes * len(self.talks)  # of a page that is not full, a sequence may have a copy of its own
            assert self.memory.live_bytes + self.memory.slot_bytes + part > self.budget
            return None
        assert held.cached_tokens == held.length < len(prompt) and held.cached_tokens % self.settings.hash_block == 0 and held.note
        assert reuse or held.cached_tokens == 0
        talk = Talk(held, prompt, salt)
        self.talks.append(talk)
        return talk

    def step(self, plan):
        """One forward over several sequences: (talk, tokens)."""
        jobs, talks = [], []
        for talk, new in plan:
            if not talk.held.reserve(len(new)):
                self.refused += 1
                continue
            jobs.append([talk.held, talk.tokens, new])
            talks.append(talk)
        if not jobs:
            return
        for job in jobs:
            held, past, new = job
            job.append(held.copies(len(past), len(past) + len(new)))
        self.model.run(jobs, self.memory.pool)
        for talk, (held, past, new, _) in zip(talks, jobs, strict=True):
            held.advance(new)
            talk.tokens = past + new
            talk.todo = talk.todo[len(new):]

    def fork(self, talk):
        """Go on twice."""
        try:
            held = talk.held.fork()
        except CapacityError:
            self.refused += 1
            return
        other = Talk(held, [], talk.salt)
        other.tokens, other.todo = list(talk.tokens), list(talk.todo)
        self.talks.append(other)

    def close(self, talk, keep=True):
        """End a sequence; what it said can come back."""
        talk.held.close(keep)
        self.talks.remove(talk)
        if talk.tokens:
            self.past = [*self.past[-30:], (talk.tokens, talk.salt)]

    def restart(self):
        """The process ends and another begins."""
        self.talks.clear()
        self.cache.close()
        self.start()

    def check(self):
        """Recount what everybody owns, and compare."""
        self.operations += 1
        memory, nodes = self.memory, self.cache.index.nodes()
        references, live = torch.zeros(len(memory._references), dtype=torch.int64), set()
        for node in nodes:
            assert node.children or node.pins or node.checkpoint, "a block that is of no use is kept"
            for page in node.pages:
                references[page] += 1
        for talk in self.talks:
            live |= set(talk.held.pages.tolist())
            for page in talk.held.pages.tolist():
                references[page] += 1
        assert references.tolist() == memory._references.tolist()
        assert memory._live_pages == len(live) and memory.pages_used == int((references > 0).sum())
        slots = [talk.held.slot for talk in self.talks]
        kept = [node.checkpoint for node in nodes if node.checkpoint is not None]
        slots += [checkpoint.slot for checkpoint in kept if checkpoint.slot is not None]
        assert memory.loose_bytes == sum(checkpoint.packed.bytes for checkpoint in kept if checkpoint.packed is not None)
        assert len(set(slots)) == len(slots) == memory.slots_used and len(memory._live_slots) == len(self.talks)
        assert memory.used_bytes <= self.budget and memory.committed_bytes <= self.budget
        assert self.cache.store.checkpoints == sum(node.checkpoint is not None for node in nodes) and self.cache.index.count == len(nodes)
        pins = sum(node.pins for node in (*nodes, *self.cache.index.roots()))
        assert pins == sum(talk.held._tip is not None for talk in self.talks)

    def finish(self):
        """Close all, forget all: nothing is left."""
        for talk in list(self.talks):
            self.close(talk)
        self.check()
        self.cache.clear()
        assert self.memory.used_bytes == 0 and self.cache.index.count == 0 and not self.cache.index.roots()
        self.cache.close()


def random_operation(world, draw):
    """One operation of all that clients do; `draw` is a `random.Random`."""
    kind = draw.random()
    words = 3 if draw.random() < 0.8 else 61
    fresh = [draw.randrange(words) for _ in range(draw.choice((1, 3, 8, 16, 30)))]
    if kind < 0.3 or not world.talks:
        prompt, salt = fresh, draw.choice(("", "", "", "mine"))
        if world.past and draw.random() < 0.85:
            old, salt = draw.choice(world.past)
            cut = draw.choice((len(old), len(old), draw.randrange(len(old) + 1)))
            prompt = old[:cut] + (fresh if draw.random() < 0.8 or not cut else [])
            salt = draw.choice((salt, salt, salt, "mine"))
        prompt = prompt[:120]
        if len(world.talks) < 5:
            world.open(prompt, salt, [draw.randrange(len(prompt) + 1)], reuse=draw.random() < 0.93)
    elif kind < 0.78:
        plan = []
        for talk in draw.sample(world.talks, draw.randint(1, len(world.talks))):
            new = talk.todo[:draw.choice((1, 5, 8, 16, 64, 200))] or [draw.randrange(words) for _ in range(draw.choice((1, 1, 1, 9)))]
            if len(talk.tokens) + len(new) <= 160:
                plan.append((talk, new))
        world.step(plan)
    elif kind < 0.84 and len(world.talks) < 5:
        world.fork(draw.choice(world.talks))
    elif kind < 0.845:
        world.cache.clear()
    elif kind < 0.85 and world.disk is not None:
        world.restart()
    else:
        world.close(draw.choice(world.talks), keep=draw.random() < 0.9)
    world.check()


def after(state, token):
    """The state after one more token: twelve numbers from 0 to 254."""
    return bytes(b % 255 for b in blake2b(state + bytes([token]), digest_size=12).digest())


def state_of(tokens):
    """The state after these tokens."""
    state = bytes(12)
    for token in tokens:
        state = after(state, token)
    return state


def write_state(pool, slot, state):
    """Twelve numbers in a matrix whose rows have 127 as their largest, so that no rounding loses them."""
    matrix = torch.full((4, 4), 127.0)
    matrix[:, 1:] = torch.tensor(list(state)).view(4, 3) - 127.0
    pool.matrices[slot] = matrix
    pool.conv[slot] = float(state[0])


def read_state(pool, slot):
    """The twelve numbers again."""
    matrix = pool.matrices[slot, 0, 0]
    assert bool((matrix[:, 0] == 127).all()), "not a state at all"
    state = bytes(int(x) + 127 for x in matrix[:, 1:].flatten().tolist())
    assert float(pool.conv[slot].flatten()[0]) == state[0], "half a state"
    return state
