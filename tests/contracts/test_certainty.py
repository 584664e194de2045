"""A change of a knob, a price of a limit and the worth of a better machine each have a band, narrower than that of either plan."""

import math
from dataclasses import replace

from gnomon.plan import laws
from gnomon.plan.answer import coster
from gnomon.plan.calibration import best_record
from gnomon.plan.certainty import Doubt
from gnomon.plan.effects import effects, hardware_worth
from gnomon.plan.hardware import Cluster
from gnomon.plan.solve import solve
from gnomon.plan.words import Question, question


def asked(text: str, hardware: str = "h100:8", model: str = "small") -> Question:
    """The question of a command line."""
    cluster = Cluster.parse(hardware)
    return question(text.split(), (cluster.device, cluster.count), model)


def test_changes_and_prices_have_bands_that_hold_them() -> None:
    record = best_record(asked("serve", "h100:8").device)
    asked_for = asked("serve concurrency=8", "h100:8", "1B")
    doubt, real = Doubt(record=record, loss_law=laws.loss), coster(record)
    plan = solve(asked_for, real, doubt)
    assert plan.best is not None
    found = effects(asked_for, plan.best, real, doubt=doubt)
    turned = [effect for effect in found if effect.change]
    assert turned
    for effect in turned:
        assert effect.band is not None and effect.change is not None and effect.outcome is not None
        assert effect.band[0] <= effect.change <= effect.band[1]
        speeds = plan.best.metrics["speed"], effect.outcome.metrics["speed"]
        apart = math.log(speeds[1].high / speeds[0].low), math.log(speeds[1].low / speeds[0].high)
        inside = math.log1p(effect.band[0]), math.log1p(effect.band[1])
        assert inside[1] - inside[0] < apart[0] - apart[1]  # what both sides share has dropped out
    for worth in hardware_worth(asked_for, plan.best, real, doubt).values():
        assert worth.low <= worth.share <= worth.high
        assert worth.high < 0.1  # no more than all of it
    week = solve(asked("train time=30h budget=$500"), coster(record), doubt)
    assert week.binding is not None and week.binding.price_band is not None
    low, high = week.binding.price_band
    assert 0 < low < week.binding.price < high


def test_a_record_that_is_surer_gives_narrower_bands() -> None:
    asked_for = asked("serve concurrency=8", "h100:8", "1B")
    widths = []
    for spread in (0.1, 0.3, 0.9):
        record = replace(best_record(asked_for.device), spread=spread, spread_beyond=spread)
        plan = solve(asked_for, coster(record))
        assert plan.best is not None
        first = max(effects(asked_for, plan.best, coster(record), doubt=Doubt(record=record, loss_law=laws.loss)),
                    key=lambda effect: abs(effect.change or 0))
        assert first.band is not None
        widths.append(first.band[1] - first.band[0])
    assert widths == sorted(widths) and widths[0] < 0.6 * widths[2]
