"""The knobs: what can be turned, by one notch up or down, what turning costs, and whether its worth is agreed upon.

A knob is an object with these few fields, so yours goes by dotted path: `gnomon plan … --knob your_pkg.knobs:KNOB`. What a knob is worth
is never written here: `solve.py` turns it and looks. Read next: `solve.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from gnomon.errors import ConfigError
from gnomon.extend import find, suggestion
from gnomon.model.config import ModelConfig
from gnomon.plan.choice import Choice, Phase
from gnomon.plan.hardware import Cluster, Device, device, device_names
from gnomon.plan.laws import law
from gnomon.plan.shapes import with_depth, with_experts, with_latent, with_mix
from gnomon.plan.workload import Serving, Speculation, Training

Turn = Callable[[Choice], Choice | None]
"""A notch: the choice after it, or nothing where the knob has no further position."""

Price = Literal["free", "retraining", "money", "another question"]
"""What turning costs: nothing, a new training, a bill that changes; or it is a change of what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One idea that can be turned. `up` and `down` are one notch each; `shown` says where it stands."""

    name: str
    title: str
    changes: Literal["model", "precision", "layout", "work", "cluster"]
    costs: Price
    shown: Callable[[Choice], str]
    up: Turn
    down: Turn
    notch: str
    phases: tuple[Phase, ...] = ("serve", "train", "rl")
    contested: str = ""

    def turned(self, choice: Choice, up: bool) -> Choice | None:
        """The choice after one notch; nothing where the knob does not apply or the result would be no valid model, layout or work."""
        if choice.phase not in self.phases:
            return None
        try:
            after = (self.up if up else self.down)(choice)
            return None if after is None or after == choice else after
        except ConfigError:
            return None


def _model(change: Callable[[ModelConfig], ModelConfig | None]) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        changed = change(choice.model)
        return None if changed is None else replace(choice, model=changed)
    return turn


def _experts(factor: float, per_token: float = 1.0) -> Turn:
    def change(config: ModelConfig) -> ModelConfig | None:
        if config.moe is None:
            return None
        pool, visited = round(config.moe.num_experts * factor), round(config.moe.num_experts_per_token * per_token)
        return None if visited < 1 or visited > pool else with_experts(config, pool, visited)
    return _model(change)


def _depth(factor: float) -> Turn:
    return _model(lambda config: with_depth(config, config.num_hidden_layers + max(1, round(abs(factor) * config.num_hidden_layers))
                                            * (1 if factor > 0 else -1)))


def _latent(factor: float) -> Turn:
    return _model(lambda config: None if config.moe is None or config.moe.routed_expert_hidden_size is None
                  else with_latent(config, round(config.moe.routed_expert_hidden_size * factor)))


MIXES = (0, 1, 3, 7, 15)
"""KDA layers for each MLA layer."""


def _mix_of(config: ModelConfig) -> int:
    kda, mla = (config.layers.count(kind) for kind in ("kda", "mla"))
    return min(MIXES, key=lambda n: abs(n - kda / max(1, mla)))


def _mix(step: int) -> Turn:
    def change(config: ModelConfig) -> ModelConfig | None:
        place = MIXES.index(_mix_of(config)) + step
        return with_mix(config, MIXES[place]) if 0 <= place < len(MIXES) else None
    return _model(change)


FINER = {
    "experts": ("mxfp4", "fp8", "bf16", "fp32"), "rest": ("mxfp4", "fp8", "bf16", "fp32"), "kv": ("fp8", "bf16", "fp32"),
    "state": ("bf16", "fp32"), "activations": ("fp8", "bf16", "fp32"),
}
"""Formats of each part, fewest bits first."""


def _format(part: str, step: int) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        now, formats = getattr(choice.precision, part), FINER[part]
        place = formats.index(now) + step if now in formats else -1
        return choice.changed("precision", **{part: formats[place]}) if 0 <= place < len(formats) else None
    return turn


def _work(field: str, factor: float, least: float = 1) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        if not hasattr(choice.work, field):
            return None
        value = getattr(choice.work, field)
        after = type(value)(max(least, value * factor))
        return None if after == value else choice.changed("work", **{field: after})
    return turn


def _context(factor: float) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        if isinstance(choice.work, Training):
            return choice.changed("work", context=max(128, round(choice.work.context * factor)))
        return choice.changed("work", prompt=max(1, round(choice.work.prompt * factor)))
    return turn


def _cached(step: float) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        if not isinstance(choice.work, Serving):
            return None
        return choice.changed("work", cached_share=round(min(0.99, max(0.0, choice.work.cached_share + step)), 4))
    return turn


DRAFTS = (0, 1, 3, 7)


def _drafts_of(choice: Choice) -> int:
    work = choice.work
    return work.speculation.drafts if isinstance(work, Serving) and work.speculation else 0


def _drafts(step: int) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        now = min(DRAFTS, key=lambda n: abs(n - _drafts_of(choice)))
        place = DRAFTS.index(now) + step
        if not 0 <= place < len(DRAFTS):
            return None
        known = choice.work.speculation if isinstance(choice.work, Serving) else None
        kind = known.acceptance if known and isinstance(known.acceptance, str) else "coding"
        drafts = DRAFTS[place]
        return choice.changed("work", speculation=Speculation(drafts=drafts, acceptance=kind) if drafts else None)
    return turn


AXES = ("tensor", "expert", "pipeline", "context", "data", "kv_shards")


def _axis(axis: str, factor: float) -> Turn:
    """Move ranks between an axis and the copies, so that the number of devices stays."""
    def turn(choice: Choice) -> Choice | None:
        layout = choice.layout
        size = getattr(layout, axis) * factor
        if size < 1 or size != int(size):
            return None
        fields = {axis: int(size)}
        if axis in ("tensor", "pipeline", "context"):
            copies = layout.data / factor
            if copies < 1 or copies != int(copies):
                return None
            fields["data"] = int(copies)
        work = choice.work
        if isinstance(work, Serving) and "data" in fields:
            work = work.dealt(work.users(layout.data), layout.data, fields["data"])
        after = replace(choice, layout=replace(layout, **fields), work=work)
        after.layout.check(after.model, after.cluster.count)
        return after
    return turn


def with_devices(choice: Choice, count: int) -> Choice:
    """The same work on another number of devices, copies of the model added or taken away. Raises `ConfigError` where it cannot."""
    size = choice.cluster.device.scale_up_size
    per_domain = min(count, choice.cluster.devices_per_domain if choice.cluster.domains > 1 else size)
    if count % per_domain:
        raise ConfigError(f"{count} devices do not fill whole domains of {per_domain}")
    cluster = Cluster(device=choice.cluster.device, devices_per_domain=per_domain, domains=count // per_domain)
    per_copy = choice.layout.ranks // choice.layout.data
    if count % per_copy:
        raise ConfigError(f"{count} devices do not hold whole copies of {per_copy}")
    return replace(choice, cluster=cluster, layout=replace(choice.layout, data=count // per_copy))


def _devices(factor: float) -> Turn:
    def turn(choice: Choice) -> Choice | None:
        count = choice.cluster.count * factor
        return with_devices(choice, int(count)) if count >= 1 and count == int(count) else None
    return turn


@cache
def _known() -> tuple[Device, ...]:
    return tuple(map(device, device_names()))


def _kind(step: int) -> Turn:
    """The next device up or down in memory bandwidth among those with a price, in the same number."""
    def turn(choice: Choice) -> Choice | None:
        now = choice.cluster.device
        size = choice.cluster.devices_per_domain
        others = [d for d in _known() if d.price_per_hour and d.flops and d.scale_up_size >= size]
        ladder = sorted((d for d in others if (d.bandwidth - now.bandwidth) * step > 0),
                        key=lambda d: (step * d.bandwidth, d.price_per_hour or (0.0,) * 3))
        return replace(choice, cluster=replace(choice.cluster, device=ladder[0])) if ladder else None
    return turn


def _moe(choice: Choice, name: str) -> str:
    return "none" if choice.model.moe is None else f"{getattr(choice.model.moe, name) or 0:,}"


def _axis_knob(name: str, axis: str, title: str, phases: tuple[Phase, ...] = ("serve", "train", "rl")) -> Knob:
    return Knob(name=name, title=title, changes="layout", costs="free", phases=phases, notch="twice, half",
                shown=lambda choice: f"{getattr(choice.layout, axis)}", up=_axis(axis, 2), down=_axis(axis, 0.5))


def _format_knob(part: str, title: str, phases: tuple[Phase, ...] = ("serve", "train", "rl"), contested: str = "") -> Knob:
    return Knob(name=f"{part}-format", title=title, changes="precision", costs="free", phases=phases, contested=contested,
                notch="next format", shown=lambda choice: getattr(choice.precision, part), up=_format(part, 1), down=_format(part, -1))


def _work_knob(name: str, title: str, field: str, phases: tuple[Phase, ...], contested: str = "") -> Knob:
    return Knob(name=name, title=title, changes="work", costs="another question", phases=phases, notch="twice, half", contested=contested,
                shown=lambda choice: f"{getattr(choice.work, field):g}", up=_work(field, 2), down=_work(field, 0.5, 0.01))


SERVING: tuple[Phase, ...] = ("serve",)
KNOBS: tuple[Knob, ...] = (
    Knob(name="experts", title="experts in the pool", changes="model", costs="retraining", notch="twice, half",
         shown=lambda choice: _moe(choice, "num_experts"), up=_experts(2), down=_experts(0.5)),
    Knob(name="top-k", title="experts per token", changes="model", costs="retraining", notch="twice, half",
         shown=lambda choice: _moe(choice, "num_experts_per_token"), up=_experts(1, 2), down=_experts(1, 0.5)),
    Knob(name="depth", title="layers", changes="model", costs="retraining", notch="a tenth",
         shown=lambda choice: str(choice.model.num_hidden_layers), up=_depth(0.1), down=_depth(-0.1)),
    Knob(name="latent", title="width in which experts work", changes="model", costs="retraining", notch="twice, half",
         contested=law("latent-width").formula, shown=lambda choice: _moe(choice, "routed_expert_hidden_size"), up=_latent(2),
         down=_latent(0.5)),
    Knob(name="mix", title="KDA layers for each MLA layer", changes="model", costs="retraining", notch="next of 0, 1, 3, 7, 15",
         contested="only 3:1 against all MLA has a published gain", shown=lambda choice: f"{_mix_of(choice.model)}:1", up=_mix(1),
         down=_mix(-1)),
    Knob(name="context", title="tokens of context", changes="work", costs="another question", notch="twice, half",
         shown=lambda choice: f"{choice.work.context if isinstance(choice.work, Training) else choice.work.prompt:,}",
         up=_context(2), down=_context(0.5)),
    _format_knob("experts", "format of the routed experts", contested="needs training with that rounding in view to keep quality"),
    _format_knob("rest", "format of all other weights", contested="fp8 is common, fp4 costs quality unless trained for"),
    _format_knob("kv", "format of the cache", SERVING), _format_knob("state", "format of the recurrent states", SERVING),
    _format_knob("activations", "format of activations"),
    _axis_knob("tensor-ranks", "tensor", "ranks that share each matrix"),
    _axis_knob("expert-ranks", "expert", "ranks over which experts are spread"),
    _axis_knob("pipeline-stages", "pipeline", "stages of layers"),
    _axis_knob("context-ranks", "context", "ranks that share a sequence", ("train", "rl")),
    _axis_knob("kv-ranks", "kv_shards", "ranks over which cached latents are dealt", SERVING),
    Knob(name="devices", title="number of devices", changes="cluster", costs="money", notch="twice, half",
         shown=lambda choice: f"{choice.cluster.count:,}", up=_devices(2), down=_devices(0.5)),
    Knob(name="device-kind", title="kind of device", changes="cluster", costs="money", notch="next in memory bandwidth",
         shown=lambda choice: choice.cluster.device.name, up=_kind(1), down=_kind(-1)),
    Knob(name="speculation", title="tokens drafted per step", changes="work", costs="free", phases=SERVING, notch="next of 0, 1, 3, 7",
         contested="acceptance falls with context and its worth with load: measure yours", shown=lambda choice: str(_drafts_of(choice)),
         up=_drafts(1), down=_drafts(-1)),
    _work_knob("effort", "tokens written per answer, against the base", "effort", SERVING, law("effort").formula),
    _work_knob("rl-length", "tokens per rollout", "output_tokens", ("rl",), law("rl-length").formula),
    Knob(name="cached-share", title="share of the prompt found in the cache", changes="work", costs="another question", phases=SERVING,
         notch="0.1 more or less", shown=lambda choice: f"{choice.work.cached_share:g}" if isinstance(choice.work, Serving) else "none",
         up=_cached(0.1), down=_cached(-0.1)),
    _work_knob("concurrency", "requests in flight on one copy", "concurrency", ("serve", "rl")),
    _work_knob("batch", "tokens per optimiser step", "global_batch_tokens", ("train",)),
)


def knob(name: str) -> Knob:
    """A knob by name, or by dotted path `your_pkg.knobs:KNOB`. Raises `ConfigError` for an unknown one."""
    if ":" in name:
        return find("gnomon.plan", name, "KNOB")
    for known in KNOBS:
        if known.name == name:
            return known
    names = [known.name for known in KNOBS]
    raise ConfigError(f"unknown knob '{name}'{suggestion(name, names)} (knobs: {', '.join(names)}; or a dotted path "
                      "'your_pkg.knobs:KNOB')")
