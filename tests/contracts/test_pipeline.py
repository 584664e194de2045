"""A model in stages over 2 ranks: loss and gradients of one rank, each block sent to a rank once, as the planner counts it."""

from collections.abc import Callable
from typing import Any

import pytest

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.pipeline import Cuts, cut, spans
from gnomon.plan.exchange import pipeline_payload
from gnomon.plan.inventory import stages
from gnomon.plan.workload import Layout


def test_stages_over_ranks_are_the_model(on_ranks: Callable[..., list[Any]]) -> None:
    found = on_ranks("pipeline_ranks.py", 2)[0]
    assert len(found) == 5
    for name, every in found.items():
        assert max(rank["losses"] for rank in every) < 1e-12, name
        assert max(rank["gradients"] for rank in every) < 1e-12, name
        assert sum(rank["sent"] for rank in every) == every[0]["counted"], name
        assert sum(rank["held"] for rank in every) == every[0]["whole"], name  # no parameter is nowhere or twice


def even(blocks_per_stage: int, stages_: int, mode: str = "block") -> ModelConfig:
    """Layers that stages share evenly, and a planner that finds so too: no experts, one kind of mixer, small tables."""
    return preset("tiny", (f"num_hidden_layers={2 * blocks_per_stage * stages_}", "attn_res_block_size=2", "vocab_size=8",
                           'layer_pattern=["kda"]', f"attention_residuals={mode}", "moe=none"))


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 1), (2, 3), (4, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize("mode", ["block", "full", "off"])
def test_what_is_sent_is_what_the_planner_counts(ranks: int, virtual: int, mode: str) -> None:
    config = even(2, ranks * virtual, mode)
    cuts = Cuts(config=config, ranks=ranks, virtual=virtual)
    assert [(s.start, s.stop) for s in cuts.layers] == [(s.start, s.stop) for s in stages(config, Layout(pipeline=ranks * virtual))]
    assert cuts.payload() == pipeline_payload(config, Layout(pipeline=ranks), virtual)


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (4, 2), (8, 4)])
def test_each_block_reaches_each_rank_once(ranks: int, virtual: int) -> None:
    """The bound: a rank must be sent every block that others made before its last stage, and one running sum per hop."""
    cuts = Cuts(config=even(1, ranks * virtual), ranks=ranks, virtual=virtual)
    made = [cuts.before(stage + 1) - cuts.before(stage) for stage in range(ranks * virtual)]
    last = [rank + ranks * (virtual - 1) for rank in range(ranks)]
    foreign = sum(made[stage] for rank in range(ranks) for stage in range(last[rank]) if stage % ranks != rank)
    assert cuts.payload() == foreign + ranks * virtual - 1


def test_what_cannot_be_cut_is_refused() -> None:
    assert spans(5, 2) == [range(3), range(3, 5)]
    with pytest.raises(ConfigError, match="is 4 stages, but the model has 3 layers"):
        spans(3, 4)
    model = Transformer(preset("tiny", ("tie_word_embeddings=true",)))
    with pytest.raises(ConfigError, match=r"which 'model\.tie_word_embeddings' makes one"):
        cut(model, 2, 1, 0, None, model.head_weight.device)
