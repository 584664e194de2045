"""Speculation: tokens gained per step by length of draft, by context and by load, and what drafting costs.

Tables are measured acceptances. Beyond the context at which they were measured, what drafting gains over the certain token falls as a
power of the context. Whether it pays is then arithmetic: a checking step touches more experts and computes more, and gains may be few.
"""

from dataclasses import dataclass, replace

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.plan.quantity import Badge, Estimate
from gnomon.plan.workload import Speculation

MEASURED_CONTEXT = 8192
"""Context up to which the tables hold."""

DECAY = 0.63
"""Exponent with which the gain falls with context: 2.84 at 8k, about 0.43 at 165k (InferenceX pull 2380: 1.18 to 1.68 at 118 to 230k)."""

DRAFT_COST = 0.12
"""Drafting's time as a share of a single-token step: a block of drafts from one small model (vLLM and SGLang on K3, TP8, one request)."""

DRAFT_CACHE_SHARE = 0.25
"""Share of the cache pool that a draft model's own cache takes (InferenceX pull 2380)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Tokens gained per step, the certain one included, for 1, 2, 3 … drafts at short context, and how far texts differ."""

    gained: tuple[float, ...] = setting(doc="one value per length of draft")
    spread: float = setting(doc="80 % band over texts of the kind")
    source: str = setting(doc="where it was measured")


ACCEPTANCE = {
    "coding": Acceptance(gained=(1.85, 2.51, 3.00, 3.36, 3.62, 3.75, 3.84, 4.00), spread=0.25,
                         source="InferenceX golden acceptance, SPEED-Bench coding; vLLM has 4.73 at 7 drafts"),
    "writing": Acceptance(gained=(1.37, 1.65, 1.86, 2.02, 2.13, 2.18, 2.22, 2.29), spread=0.25,
                          source="vLLM, 2.61 against 4.73 on coding at 7 drafts, applied to the coding table"),
}
"""Tables by kind of text."""


def gained(speculation: Speculation | None, context: float) -> Estimate:
    """Tokens per step at a context; exactly one without speculation. Raises `ConfigError` for an unknown table or too long a draft."""
    if speculation is None:
        return Estimate(value=1.0, low=1.0, high=1.0, unit="", badge="exact", because="one token per step")
    most = float(speculation.drafts + 1)
    if isinstance(speculation.acceptance, str):
        table = ACCEPTANCE.get(speculation.acceptance)
        if table is None:
            raise ConfigError(f"no acceptance table '{speculation.acceptance}'{suggestion(speculation.acceptance, list(ACCEPTANCE))} "
                              f"(tables: {', '.join(ACCEPTANCE)}; or tokens gained per step, e.g. 2.5)")
        if speculation.drafts > len(table.gained):
            raise ConfigError(f"'drafts' is {speculation.drafts}; acceptance '{speculation.acceptance}' was measured up to "
                              f"{len(table.gained)}")
        value, spread, source = table.gained[speculation.drafts - 1] - 1, table.spread, table.source
        beyond = max(1.0, context / MEASURED_CONTEXT)
        value *= beyond**-DECAY
        badge: Badge = "validated" if beyond == 1.0 else "calibrated"
        spread *= 1 if beyond == 1.0 else 2
        return Estimate(value=1 + value, low=1 + value / (1 + spread), high=max(1 + value, min(most, 1 + value * (1 + spread))), unit="",
                        badge=badge, because=source)
    value = float(speculation.acceptance)
    return Estimate(value=value, low=1 + (value - 1) / 1.25, high=min(most, 1 + (value - 1) * 1.25), unit="", badge="calibrated",
                    because="acceptance as given")


def draft_cost(speculation: Speculation | None) -> float:
    """Drafting's time as a share of a single-token step."""
    if speculation is None:
        return 0.0
    return DRAFT_COST if speculation.draft_cost is None else speculation.draft_cost


def shorter(speculation: Speculation, drafts: int) -> Speculation:
    """The same speculation with another length of draft."""
    return replace(speculation, drafts=drafts)
