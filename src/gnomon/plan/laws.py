"""Loss laws: what a model of some size, sparsity and granularity reaches on so many tokens, and what an idea multiplies compute by.

Every coefficient is a published one, with its source and the range over which it was fitted; nothing here is ours. Absolute losses of
published laws belong to their authors' text and tokenizer, so they are badged as extrapolated: fit your own runs (`fit.py`) for those.
Where no law is known, the list says so. Read next: `fit.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from gnomon.errors import ConfigError
from gnomon.extend import find, suggestion
from gnomon.model.config import ModelConfig
from gnomon.plan.inventory import ByValue
from gnomon.plan.quantity import Badge, Estimate

Numbers = tuple[float, float, float]
"""Value, and the ends of the 80 % band."""

Z80 = 1.2816
"""Half-width of an 80 % interval in standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What laws look at: a model's size and shape, and the tokens it learns from."""

    active: float
    """Parameters at work for each token, the head included."""
    total: float
    """All parameters."""
    tokens: float
    """Training tokens."""
    activation: float = 1.0
    """Share of a layer's experts that a token visits, shared ones included; 1 for a dense model."""
    granularity: float = 1.0
    """2 · hidden size / inner width of an expert, as arXiv 2507.17702 counts it; 1 for a dense model."""
    kda_share: float = 0.0
    """Share of the layers that are KDA."""
    depth_reads: bool = False
    """Whether sublayers choose what they read from earlier blocks (AttnRes)."""

    @property
    def compute(self) -> float:
        """FLOPs of training, by 6 per active parameter and token."""
        return 6 * self.active * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A published relation: `value` computes it from a scale, `valid` is the range in which it was fitted."""

    name: str
    title: str
    gives: Literal["loss", "compute multiplier", "nothing"]
    formula: str
    source: str
    checked: str
    """How the coefficients were checked when they were written down here."""
    coefficients: dict[str, float] = field(default_factory=dict)
    valid: dict[str, tuple[float, float]] = field(default_factory=dict)
    contested: str = ""
    value: Callable[[Scale], Numbers] | None = None

    def outside(self, scale: Scale) -> list[str]:
        """The quantities of a scale that lie outside the fitted range, in words."""
        found = []
        for name, (low, high) in self.valid.items():
            value = getattr(scale, name)
            if not low <= value <= high:
                found.append(f"{name.replace('_', ' ')} {value:.3g} outside {low:.3g} to {high:.3g}")
        return found

    def at(self, scale: Scale) -> Estimate:
        """The law at a scale. Raises `ConfigError` where no law exists, with what to do instead."""
        if self.value is None:
            raise ConfigError(f"'{self.name}': {self.formula}; fit one from small runs of your own (a table with --fit)")
        value, low, high = self.value(scale)
        beyond = self.outside(scale)
        badge: Badge = "extrapolated" if beyond or self.gives == "loss" else "validated"
        reason = f"{self.title} ({self.source})" + (f"; {'; '.join(beyond)}" if beyond else "")
        return Estimate(value=value, low=min(low, value), high=max(high, value), unit="nat/token" if self.gives == "loss" else "",
                        badge=badge, because=reason + (f"; contested: {self.contested}" if self.contested else ""))


REFIT = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
"""Refit of the Chinchilla data; standard errors 0.03, 124.58, 1293.23, 0.02, 0.02 (arXiv 2404.10102)."""

FIRST_FIT = {"E": 1.6934, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849}
"""The first publication's own fit in its unrounded form (arXiv 2203.15556, as quoted by 2404.10102)."""

E_ERROR = 0.03
LEVERAGE = {"a": 1.23, "d": -7.61e-2, "gamma": 1.67e-2, "beta": -1.17e-1, "A_start": 1.63e-2, "A_max": 5.28e16}
GRANULAR = {"c": 0.47, "g": 2.1, "gamma": 0.58, "a": 18.1, "alpha": 0.115, "b": 30.8, "beta": 0.147}
SPARSE = {"a": 16612.50, "alpha": 0.5962, "b": 5455.67, "beta": 0.3954, "c": 0.4598, "lambda": -0.1666, "d": 17.26, "delta": 0.1603,
          "gamma": 0.1595, "e": 0.94}
GRANULAR_RMSE = 0.019  # on its validation runs
SPARSE_RMSE = math.sqrt(0.0058)  # on the sparsity that was held out
LEVERAGE_SPREAD = 7.0 / 5.37  # the paper states "more than 7" at A 3.1 %, G 12, 1e22 FLOPs, where its printed coefficients give 5.37
MIX_GAIN, DEPTH_GAIN, RECIPE_GAIN = 1.16, 1.25, 2.5
KDA_SHARE = 0.75  # the mix that was measured: three KDA layers for each MLA layer
MIX_TOLERANCE = 0.02  # K3's 69 of 93 layers and Kimi Linear's 20 of 27 count as 3:1


def additive(coefficients: dict[str, float], parameters: float, tokens: float) -> float:
    """E + A / parameters^alpha + B / tokens^beta."""
    c = coefficients
    return c["E"] + c["A"] * parameters ** -c["alpha"] + c["B"] * tokens ** -c["beta"]


def _dense(scale: Scale) -> Numbers:
    return _dense_at(scale.active, scale.tokens)


def _dense_at(parameters: float, tokens: float) -> Numbers:
    """The refit; its band holds the first publication's fit and the standard error of the floor."""
    value, other = (additive(fit, parameters, tokens) for fit in (REFIT, FIRST_FIT))
    margin = Z80 * E_ERROR
    return value, min(value, other) - margin, max(value, other) + margin


def _leverage(scale: Scale) -> Numbers:
    if scale.activation >= 1:
        return 1.0, 1.0, 1.0
    c = LEVERAGE
    saturated = 1 / (1 / (scale.activation + 1 / (1 / c["A_start"] - 1 / c["A_max"])) + 1 / c["A_max"])
    fineness = math.log10(max(1.0, scale.granularity))
    exponent = c["a"] + c["d"] * math.log10(scale.compute) + c["gamma"] * fineness**2 + c["beta"] * fineness
    value = saturated**exponent
    return value, value / LEVERAGE_SPREAD, value * LEVERAGE_SPREAD


def _granular(scale: Scale) -> Numbers:
    c = GRANULAR
    value = c["c"] + (c["g"] / scale.granularity ** c["gamma"] + c["a"]) / scale.total ** c["alpha"] + c["b"] / scale.tokens ** c["beta"]
    return value, value - Z80 * GRANULAR_RMSE, value + Z80 * GRANULAR_RMSE


def _sparse(scale: Scale) -> Numbers:
    c, open_share = SPARSE, scale.activation
    value = (c["a"] / scale.total ** c["alpha"] + c["b"] / scale.tokens ** c["beta"] + c["c"] / open_share ** c["lambda"]
             + c["d"] / (open_share ** c["delta"] * scale.total ** c["gamma"]) + c["e"])
    return value, value - Z80 * SPARSE_RMSE, value + Z80 * SPARSE_RMSE


def _mix(scale: Scale) -> Numbers:
    if scale.kda_share == 0:
        return 1.0, 1.0, 1.0
    if abs(scale.kda_share - KDA_SHARE) <= MIX_TOLERANCE:
        return MIX_GAIN, 1.0 + (MIX_GAIN - 1) / 2, 1.0 + (MIX_GAIN - 1) * 1.5
    return math.sqrt(MIX_GAIN), 1.0, MIX_GAIN


def _depth(scale: Scale) -> Numbers:
    return (DEPTH_GAIN, 1.0, DEPTH_GAIN) if scale.depth_reads else (1.0, 1.0, 1.0)


READ = "coefficients read in two independent quotations of the paper"
LAWS: tuple[Law, ...] = (
    Law(name="dense", title="dense law, corrected Chinchilla fit", gives="loss", formula="E + A / N^alpha + B / D^beta",
        source="arXiv 2404.10102", checked=READ + ", standard errors too", coefficients=REFIT,
        valid={"active": (7e7, 1.6e10), "tokens": (5e9, 5e11)}, value=_dense),
    Law(name="leverage", title="efficiency leverage of experts", gives="compute multiplier",
        formula="Â^(a + d log10 C + gamma log10(G)^2 + beta log10 G), Â = A saturating at A_start", source="arXiv 2507.17702",
        checked="formula and table read in a full copy; base of the logarithm not stated there: only base 10 gives sizes like the figures",
        coefficients=LEVERAGE, valid={"activation": (0.008, 1.0), "granularity": (2.0, 16.0), "compute": (1e18, 1e22)},
        contested="at its own example the printed coefficients give 5.4 where the text says more than 7", value=_leverage),
    Law(name="fine-grained", title="fine-grained experts", gives="loss", formula="c + (g / G^gamma + a) / N^alpha + b / D^beta",
        source="arXiv 2402.07871", checked="read in one quotation; expansion 64 throughout", coefficients=GRANULAR,
        valid={"total": (1.29e8, 3.7e9), "tokens": (1.6e10, 1.3e11), "granularity": (1.0, 16.0)},
        contested="it has no best granularity, 2507.17702 finds one near 12", value=_granular),
    Law(name="sparsity", title="parameters against FLOPs", gives="loss",
        formula="a / N^alpha + b / D^beta + c / (1 - S)^lambda + d / ((1 - S)^delta N^gamma) + e", source="arXiv 2501.12370",
        checked=READ, coefficients=SPARSE, valid={"activation": (0.02, 1.0), "compute": (3e19, 1e21)},
        contested="on the sparsity that was held out it explains 68 % of the variance", value=_sparse),
    Law(name="kda-mix", title="three KDA layers for each MLA layer, against all MLA", gives="compute multiplier", formula="1.16",
        source="arXiv 2510.26692 §5.3: losses 2.2879 C^-0.0527 and 2.3092 C^-0.0536, C in PFLOP/s-days",
        checked="both curves read in a quotation of the figure; other mixes have no multiplier", coefficients={"gain": MIX_GAIN},
        valid={"active": (6.5e8, 1.7e9)}, value=_mix),
    Law(name="depth-reads", title="Attention Residuals in blocks, against plain residuals", gives="compute multiplier", formula="1.25",
        source="arXiv 2603.15031: losses 1.870 C^-0.058 and 1.891 C^-0.057, C in PFLOP/s-days", checked=READ,
        coefficients={"gain": DEPTH_GAIN}, valid={"active": (1.94e8, 5.28e8)},
        contested="one reimplementation sees a lower loss, another could not reproduce a gain (nanochat 648, 646); test locally",
        value=_depth),
    Law(name="k3-recipe", title="the whole K3 recipe against K2", gives="nothing",
        formula="a gain of 2.5 times in compute is published as a curve without coefficients (arXiv 2607.24653, figure 7)",
        source="arXiv 2607.24653", checked="stated in the text; nothing to evaluate", coefficients={"gain": RECIPE_GAIN}),
    Law(name="latent-width", title="width of the experts' latent", gives="nothing",
        formula="no law is published: one pair of runs favours it (arXiv 2601.18089), independent runs see a cost that more experts half "
                "recover (marin 9320, 8105)", source="none", checked="searched", contested="even its sign"),
    Law(name="rl-length", title="length of reinforcement-learning trajectories", gives="nothing",
        formula="no published law ties trajectory length to score", source="none", checked="searched"),
    Law(name="effort", title="tokens of thought per answer", gives="nothing",
        formula="no published law ties effort to score, only curves of single models that saturate", source="none", checked="searched"),
)


def law(name: str) -> Law:
    """A law by name, or by dotted path `your_pkg.laws:LAW`. Raises `ConfigError` for an unknown one."""
    if ":" in name:
        return find("gnomon.plan", name, "LAW")
    for known in LAWS:
        if known.name == name:
            return known
    names = [known.name for known in LAWS]
    raise ConfigError(f"unknown law '{name}'{suggestion(name, names)} (laws: {', '.join(names)}; or a dotted path 'your_pkg.laws:LAW')")


def sizes(config: ModelConfig) -> tuple[int, int]:
    """Active and total parameters, counted once per model."""
    return _counted(ByValue(config))


@lru_cache(maxsize=256)
def _counted(key: ByValue) -> tuple[int, int]:
    return key.config.activated_parameters(), key.config.num_parameters()


def scale_of(config: ModelConfig, tokens: float) -> Scale:
    """What the laws see of a model."""
    moe = config.moe
    kinds = config.layers
    if moe is None:
        shape = {"activation": 1.0, "granularity": 1.0}
    else:
        visited, pool = (n + moe.num_shared_experts for n in (moe.num_experts_per_token, moe.num_experts))
        shape = {"activation": visited / pool, "granularity": 2 * config.hidden_size / moe.moe_intermediate_size}
    active, total = sizes(config)
    return Scale(active=active, total=total, tokens=tokens,
                 kda_share=kinds.count("kda") / len(kinds), depth_reads=config.attention_residuals != "off", **shape)


def multiplier(scale: Scale) -> Estimate:
    """What a model's shape multiplies its compute by, against a dense model of plain attention: the published gains together.

    The gains were measured one at a time; their product assumes that they do not overlap, and the band says how far each was checked.
    """
    return law("leverage").at(scale) * law("kda-mix").at(scale) * law("depth-reads").at(scale)


def _gain(scale: Scale) -> Numbers:
    """`multiplier` as plain numbers: solving asks for it many thousand times."""
    parts = (_leverage(scale), _mix(scale), _depth(scale))
    return math.prod(p[0] for p in parts), math.prod(p[1] for p in parts), math.prod(p[2] for p in parts)


def far(scale: Scale) -> bool:
    """Whether a scale is more than ten times beyond the dense law's fit: there it only says that more helps, not how much is reached."""
    ranges = (law("dense").valid[name] for name in ("active", "tokens"))
    return any(not low / 10 <= value <= high * 10 for value, (low, high) in zip((scale.active, scale.tokens), ranges, strict=True))


def loss(config: ModelConfig, tokens: float) -> Estimate:
    """Nats per token after training: the dense law at the size of the dense model that would need as much compute to be as good.

    The multiplier goes to parameters at equal tokens, as in the one test that was published of it (0.855B active as good as 6.1B dense
    after the same 1T tokens, arXiv 2507.17702 §5).
    """
    scale = scale_of(config, tokens)
    gain = _gain(scale)
    guess = math.log(config.vocab_size)  # far below the fitted range the power laws pass what guessing evenly would give
    value, low, high = (min(guess, _dense_at(scale.active * factor, tokens)[index])
                        for index, factor in enumerate((gain[0], gain[2], gain[1])))
    if far(scale):
        low, high = min(value, REFIT["E"]), max(value, guess)
    return Estimate(value=value, low=low, high=high, unit="nat/token", badge="extrapolated",
                    because=f"dense law at {gain[0]:.3g} times the active parameters; your own text and tokenizer shift it")


def best_split(compute: float) -> tuple[float, float]:
    """Parameters and tokens that give a dense model the lowest loss for a number of FLOPs (the refit's optimum)."""
    a, b = REFIT["alpha"], REFIT["beta"]
    g = (a * REFIT["A"] / (b * REFIT["B"])) ** (1 / (a + b))
    parameters = g * (compute / 6) ** (b / (a + b))
    return parameters, compute / 6 / parameters
