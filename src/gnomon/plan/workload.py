"""What is asked of a machine: how a model is laid out over ranks, in which formats, and for which work.

Four kinds of work: serving requests, training on tokens, reinforcement learning, and (through their fields) agents. Nothing here
computes time; `footprint.py` turns a layout into bytes and `cost.py` turns both into seconds. Read next: `footprint.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.model.config import ModelConfig

BITS = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "mxfp8": 8.25, "int8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25, "int4": 4.5, "q4": 4.8}
"""Bits per stored value, scales included: MX blocks of 32 share 8 bits (OCP MX 1.0), NVFP4 blocks of 16 share 8 bits, and 4-bit
integers carry a bf16 scale per 32 values; `q4` is the mixed 4-bit file of small machines (Q4_K_M)."""

MULTIPLIES_AS = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "int8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4",
                 "int4": "fp4", "q4": "fp4"}
"""The arithmetic a format could use; a product runs at the wider of its two operands' arithmetics."""

_WIDTH = ("fp4", "fp8", "bf16", "fp32")
Optimiser = Literal["muon", "adamw", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one copy of a model spreads over ranks, and how many copies share the work.

    A copy takes `tensor · pipeline · context` ranks and there are `data` copies. Experts are spread over `expert` ranks of the
    `tensor · context · data` that hold a stage; with `expert` below `tensor` each expert is also cut `tensor / expert` ways.
    """

    tensor: int = setting(1, "ranks that share each matrix (TP)")
    expert: int = setting(1, "ranks over which routed experts are spread (EP)")
    pipeline: int = setting(1, "stages of layers (PP)")
    context: int = setting(1, "ranks that share one sequence, each with its own devices (CP)")
    data: int = setting(1, "copies that work on different sequences (DP)")
    zero: int = setting(0, "what data-parallel ranks share out: 0 nothing, 1 optimiser, 2 gradients too, 3 weights too (ZeRO, FSDP)")
    kv_shards: int = setting(1, "tensor ranks over which cached latents are dealt (DCP); 1: every tensor rank holds all of them")

    def __post_init__(self) -> None:
        for name in ("tensor", "expert", "pipeline", "context", "data", "kv_shards"):
            _at_least(self, name, 1)
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"'zero' is {self.zero}; use 0, 1 (optimiser), 2 (and gradients) or 3 (and weights)")
        if self.tensor % self.kv_shards:
            raise ConfigError(f"'kv_shards' is {self.kv_shards}, which does not divide 'tensor' ({self.tensor}); latents are dealt among "
                              f"ranks that share the matrices: use {_nearest(self.tensor, self.kv_shards)}")
        stage = self.tensor * self.context * self.data
        if stage % self.expert:
            raise ConfigError(f"'expert' is {self.expert}, which does not divide the {stage} ranks of a stage "
                              f"(tensor {self.tensor} x context {self.context} x data {self.data}); use {_nearest(stage, self.expert)}")
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ConfigError(f"'expert' is {self.expert} and 'tensor' {self.tensor}; one must divide the other")

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_shards(self) -> int:
        """Ways in which the routed experts of a stage are cut: whole experts, or pieces of them."""
        return max(self.expert, self.tensor)

    def check(self, config: ModelConfig, devices: int | None = None) -> "Layout":
        """Return the layout, or raise `ConfigError` where the model or the number of devices does not allow it."""
        if devices is not None and self.ranks > devices:
            raise ConfigError(f"the layout takes {self.ranks} devices (tensor {self.tensor} x pipeline {self.pipeline} x context "
                              f"{self.context} x data {self.data}), but there are {devices}; lower one of them")
        if self.pipeline > config.num_hidden_layers:
            raise ConfigError(f"'pipeline' is {self.pipeline}, more than the model's {config.num_hidden_layers} layers; "
                              f"use {config.num_hidden_layers} or less")
        if self.expert > 1 and config.moe is None:
            raise ConfigError(f"'expert' is {self.expert}, but the model has no experts; use 1")
        for name, ways, number, what in self._cuts(config):
            if number % ways:
                raise ConfigError(f"'{name}' is {getattr(self, name)}, which does not divide the {what}; use {_nearest(number, ways)}")
        return self

    def _cuts(self, config: ModelConfig) -> Iterator[tuple[str, int, int, str]]:
        """What is cut: the field that cuts it, how many ways, the number that must divide, in words."""
        for kind in dict.fromkeys(config.layers):
            part = config.mixers[kind]
            heads = getattr(part, "num_heads", None) or getattr(part, "num_attention_heads", None)
            if heads is not None:
                yield "tensor", self.tensor, heads, f"{heads} heads of the '{kind}' mixer"
        if config.num_moe_layers < config.num_hidden_layers:
            yield "tensor", self.tensor, config.intermediate_size, f"{config.intermediate_size} channels of the dense feed-forward"
        moe = config.moe
        if moe is None:
            return
        yield "expert", self.expert, moe.num_experts, f"pool of {moe.num_experts} experts"
        inner = moe.moe_intermediate_size
        if moe.num_shared_experts:
            yield "tensor", self.tensor, moe.num_shared_experts * inner, f"{moe.num_shared_experts * inner} channels of the shared experts"
        if self.expert < self.tensor:  # each expert is cut as well; a multiple of what is left of the experts' ranks
            yield "tensor", self.tensor, inner * self.expert, f"{inner} channels of an expert that {self.expert} expert ranks leave whole"

    def __str__(self) -> str:
        names = (("TP", self.tensor), ("EP", self.expert), ("PP", self.pipeline), ("CP", self.context), ("DP", self.data),
                 ("DCP", self.kv_shards))
        text = " ".join(f"{name}{size}" for name, size in names if size > 1) or "one rank"
        return text + (f" ZeRO-{self.zero}" if self.zero else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The format of each thing that takes memory; `released` gives those of a family's checkpoint."""

    experts: str = setting(doc="routed experts")
    rest: str = setting(doc="every other weight")
    kv: str = setting("bf16", "cached latents")
    activations: str = setting("bf16", "activations: a product runs at the wider of weight and activation")
    state: str = setting("fp32", "recurrent matrices")

    def __post_init__(self) -> None:
        for name in ("experts", "rest", "kv", "activations", "state"):
            value = getattr(self, name)
            if value not in BITS:
                raise ConfigError(f"'{name}' is '{value}', which is no format{suggestion(value, list(BITS))} (formats: {', '.join(BITS)})")

    @classmethod
    def released(cls, config: ModelConfig) -> "Precision":
        """What the family's checkpoint stores, with bf16 activations, cache and fp32 states."""
        return cls(experts=config.expert_storage, rest="bf16")

    @property
    def expert_arithmetic(self) -> str:
        """The arithmetic of the experts' products: a key of a device's `flops`."""
        return _wider(MULTIPLIES_AS[self.experts], MULTIPLIES_AS[self.activations])

    @property
    def rest_arithmetic(self) -> str:
        """The arithmetic of all other products."""
        return _wider(MULTIPLIES_AS[self.rest], MULTIPLIES_AS[self.activations])


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """Drafting several tokens and checking them in one step."""

    drafts: int = setting(doc="tokens drafted per step")
    acceptance: str | float = setting("coding", "name of an acceptance table, or tokens gained per step, the certain one included")
    draft_cost: float | None = setting(None, "time of one step's drafting as a share of a single-token step; none: from the table")

    def __post_init__(self) -> None:
        _at_least(self, "drafts", 1)
        if isinstance(self.acceptance, (int, float)) and not 1 <= self.acceptance <= self.drafts + 1:
            raise ConfigError(f"'acceptance' is {self.acceptance}: a step of {self.drafts} drafts "
                              f"gains between 1 and {self.drafts + 1} tokens")
        if self.draft_cost is not None and self.draft_cost < 0:
            raise ConfigError(f"'draft_cost' is {self.draft_cost}; it is a share of a step's time, 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Requests that one copy of the model answers."""

    prompt: int = setting(doc="tokens before the answer, cached ones included")
    output: int = setting(doc="tokens of the answer at effort 1")
    concurrency: int = setting(doc="requests in flight on one copy")
    cached_share: float = setting(0.0, "share of the prompt found in a prefix cache that is large enough")
    speculation: Speculation | None = setting(None, "drafting; none: one token per step")
    effort: float = setting(1.0, "factor on the output tokens: what a higher effort writes, relative to the figure above")
    arrivals_per_second: float | None = setting(None, "requests that arrive; none: as many as leave, so that `concurrency` is kept")
    waves: float | None = setting(None, "measured in so many rounds, each sent at once (1: a single burst); none: a steady stream")
    chunk_tokens: int = setting(8192, "prompt tokens that one step may take (chunked prefill)")
    requests_per_task: float = setting(1.0, "requests that finish one task of a user")
    sessions: int | None = setting(None, "conversations whose caches should stay; none: as many as `concurrency`")
    filled: float = setting(1.0, "share of the places in flight, over all copies, that are filled: below 1 with fewer users than places")

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "concurrency", "chunk_tokens"):
            _at_least(self, name, 1)
        for name in ("effort", "requests_per_task"):
            _above_zero(self, name)
        _share(self, "cached_share")
        _share(self, "filled")
        _above_zero(self, "filled")
        for name in ("arrivals_per_second", "waves"):
            if getattr(self, name) is not None:
                _above_zero(self, name)
        if self.waves is not None and self.arrivals_per_second is not None:
            raise ConfigError("'waves' and 'arrivals_per_second' are two ways of arriving; give one")
        if self.sessions is not None and self.sessions < self.concurrency:
            raise ConfigError(f"'sessions' is {self.sessions}, fewer than 'concurrency' ({self.concurrency}): "
                              "each request in flight belongs to one")

    def users(self, copies: int) -> int:
        """Requests in flight over all copies."""
        return max(1, round(self.concurrency * self.filled * copies))

    def dealt(self, users: int, before: int, copies: int) -> "Serving":
        """The same work for so many requests in flight over all copies, whose number was `before`: the share of the fullest copy."""
        fullest = -(-users // copies)
        sessions = None if self.sessions is None else max(fullest, -(-self.sessions * before // copies))
        return replace(self, concurrency=fullest, filled=users / (fullest * copies), sessions=sessions)

    @property
    def output_tokens(self) -> float:
        """Tokens written per request at the asked effort."""
        return self.output * self.effort

    @property
    def mean_context(self) -> int:
        """Tokens that a decode step sees on average."""
        return round(self.prompt + self.output_tokens / 2)

    @property
    def final_context(self) -> int:
        """Tokens that a request holds when it ends."""
        return round(self.prompt + self.output_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Tokens to learn from."""

    tokens: float = setting(doc="tokens in all")
    global_batch_tokens: int = setting(doc="tokens per optimiser step over all copies")
    context: int = setting(doc="tokens per sequence")
    optimiser: Optimiser = setting("muon", "whose state is kept")
    recompute: Literal["none", "selective", "full"] = setting("selective", "activations computed again in the backward pass")
    micro_batch: int = setting(1, "sequences per rank in one forward pass")
    trainable_share: float = setting(1.0, "share of the parameters that learn: below 1 for adapters")

    def __post_init__(self) -> None:
        for name in ("tokens", "global_batch_tokens", "context", "micro_batch"):
            _at_least(self, name, 1)
        _share(self, "trainable_share")
        if self.trainable_share == 0:
            raise ConfigError("'trainable_share' is 0; nothing would learn")
        if self.global_batch_tokens < self.context:
            raise ConfigError(f"'global_batch_tokens' is {self.global_batch_tokens}, less than one sequence of {self.context} tokens")

    def micro_batches(self, layout: Layout) -> int:
        """Forward passes per step and copy; raises `ConfigError` when the batch does not fill every copy once."""
        per_copy = self.global_batch_tokens // (self.context * layout.data)
        if per_copy < self.micro_batch:
            raise ConfigError(f"'global_batch_tokens' is {self.global_batch_tokens}: {self.global_batch_tokens // self.context} sequences "
                              f"cannot give each of {layout.data} copies {self.micro_batch}; raise it or lower 'data' or 'micro_batch'")
        return -(-per_copy // self.micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class RL:
    """One iteration of reinforcement learning: rollouts with turns in sandboxes, grading, one update."""

    tasks: int = setting(doc="prompts per iteration")
    group: int = setting(doc="rollouts per prompt")
    prompt: int = setting(doc="tokens of the first prompt")
    output_tokens: int = setting(doc="tokens that the policy writes in one rollout, mean over rollouts")
    length_spread: float = setting(0.6, "standard deviation of the logarithm of a rollout's length; 0: all equally long")
    turns: int = setting(1, "exchanges with the sandbox per rollout")
    observation_tokens: int = setting(0, "tokens that the sandbox returns per turn")
    sandbox_seconds: float = setting(0.0, "time of the sandbox per turn")
    grading_seconds: float = setting(0.0, "time of the verifier per rollout")
    graders: int = setting(64, "verifiers that work at once")
    concurrency: int = setting(64, "rollouts in flight per copy of the policy")
    partial_share: float = setting(0.0, "share of the rollouts, the longest, that may go on in the next iteration (partial rollouts)")
    epochs: float = setting(1.0, "times that the update sees each rollout")
    colocated: bool = setting(True, "rollout and update take turns on the same devices; false: they overlap on halves")

    def __post_init__(self) -> None:
        for name in ("tasks", "group", "prompt", "output_tokens", "turns", "graders", "concurrency"):
            _at_least(self, name, 1)
        for name in ("length_spread", "observation_tokens", "sandbox_seconds", "grading_seconds"):
            _at_least(self, name, 0)
        _above_zero(self, "epochs")
        _share(self, "partial_share")

    @property
    def rollouts(self) -> int:
        """Rollouts per iteration."""
        return self.tasks * self.group

    @property
    def final_context(self) -> int:
        """Tokens of a mean rollout at its end, observations included."""
        return self.prompt + self.output_tokens + self.turns * self.observation_tokens


def _wider(left: str, right: str) -> str:
    return max(left, right, key=_WIDTH.index)


def _nearest(number: int, ways: int) -> str:
    """The largest divisor below and the smallest above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in divisors if d < ways], [d for d in divisors if d > ways]
    return " or ".join(str(d) for d in (*below[-1:], *above[:1]))


def _at_least(owner: object, name: str, least: float) -> None:
    value = getattr(owner, name)
    if not value >= least:
        raise ConfigError(f"'{name}' is {value}; it must be {least} or more")


def _above_zero(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not value > 0:
        raise ConfigError(f"'{name}' is {value}; it must be positive")


def _share(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not 0 <= value <= 1:
        raise ConfigError(f"'{name}' is {value}; it is a share, between 0 and 1")
