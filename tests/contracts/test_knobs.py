"""Every knob turns both ways to a valid choice, comes back, says what it costs; shapes of any size keep the family's proportions."""

import pytest

from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.plan.choice import Choice
from gnomon.plan.hardware import Cluster
from gnomon.plan.knobs import KNOBS, Knob, knob
from gnomon.plan.shapes import shape
from gnomon.plan.workload import RL, Layout, Precision, Serving, Training

K3 = preset("k3-2.8t")
WORK = {
    "serve": Serving(prompt=8192, output=1024, concurrency=16),
    "train": Training(tokens=1e12, global_batch_tokens=1 << 24, context=8192),
    "rl": RL(tasks=64, group=8, prompt=2048, output_tokens=8192),
}


def choice(phase: str) -> Choice:
    """K3 on two domains, laid out so that every axis can move."""
    return Choice(name="k3-2.8t", model=K3, cluster=Cluster.parse("b300:8x4"), layout=Layout(tensor=8, expert=8, data=4, kv_shards=2),
                  precision=Precision(experts="fp8", rest="bf16", kv="bf16", activations="bf16", state="fp32"), work=WORK[phase])


@pytest.mark.parametrize("known", KNOBS, ids=lambda k: k.name)
def test_each_knob_turns_and_is_shown(known: Knob) -> None:
    assert knob(known.name) is known
    assert known.title and known.notch and known.costs in ("free", "retraining", "money", "another question")
    turned = 0
    for phase in known.phases:
        before = choice(phase)
        assert known.shown(before)
        for up in (True, False):
            after = known.turned(before, up)
            if after is None:
                continue
            turned += 1
            assert after != before
            after.layout.check(after.model, after.cluster.count)
            parts = ("model", "cluster", "layout", "precision", "work")
            changed = {part for part in parts if getattr(after, part) != getattr(before, part)}
            assert known.changes in changed
            if isinstance(before.work, Serving) and known.changes == "layout":  # users are dealt anew, none is lost
                assert isinstance(after.work, Serving)
                assert after.work.users(after.layout.data) == before.work.users(before.layout.data)
                changed -= {"work"}
            if known.changes != "cluster":
                assert changed == {known.changes} and after.layout.ranks == before.layout.ranks
    assert turned, f"{known.name} never turns"


@pytest.mark.parametrize("name", ["experts", "top-k", "latent", "kv-format", "effort", "batch", "concurrency", "devices", "tensor-ranks"])
def test_up_then_down_comes_back(name: str) -> None:
    known = knob(name)
    before = choice(known.phases[0] if name != "batch" else "train")
    after = known.turned(before, up=False)
    assert after is not None and known.turned(after, up=True) == before


def test_a_knob_of_ones_own_goes_by_dotted_path(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "myknob.py").write_text(
        "from gnomon.plan.knobs import Knob\n"
        "KNOB = Knob(name='head', title='heads', changes='model', costs='retraining', notch='one', shown=lambda c: '1',\n"
        "            up=lambda c: None, down=lambda c: None)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert knob("myknob:KNOB").title == "heads"
    with pytest.raises(ConfigError, match="did you mean 'experts'"):
        knob("expert")


@pytest.mark.parametrize("active", [3e5, 5e6, 1e8, 1e9, 3e10, 1e11])
def test_shapes_have_the_size_asked_for(active: float) -> None:
    model = shape(active)
    assert model.activated_parameters() == pytest.approx(active, rel=0.2)
    assert model.num_parameters() > model.activated_parameters()
    assert 0.7 < model.layers.count("kda") / len(model.layers) < 0.8


@pytest.mark.parametrize("active", [1.0, 1e14])
def test_shapes_out_of_range_are_refused(active: float) -> None:
    with pytest.raises(ConfigError, match="outside"):
        shape(active)
