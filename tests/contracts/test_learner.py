"""The trainer's side of post-training: rollouts end to end, their log-probabilities, and updates."""

import math

import pytest
import torch
from torch import Tensor

from gnomon.errors import ConfigError, TrainingError
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain import learner as learning
from gnomon.posttrain.learner import Document, Learner, LearnerConfig, in_pieces, stream, token_logprobs
from gnomon.train.settings import MuonConfig

SHAPE = ("vocab_size=48", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
DOCUMENTS = (Document(token_ids=(1, 2, 3, 4), mask=(False, False, True, True)),
             Document(token_ids=(5, 6), mask=(False, True)),
             Document(token_ids=(7, 8, 9, 10, 11), mask=(False, True, False, False, True)))


def model() -> Transformer:
    """Small and untrained."""
    return Transformer(preset("tiny", SHAPE)).initialise(1)


def test_documents_lie_end_to_end_and_do_not_see_each_other() -> None:
    """Log-probabilities are those of each document alone."""
    net, piece = model(), stream(DOCUMENTS)
    assert piece.bounds.tolist() == [0, 3, 4, 8] and piece.lengths.tolist() == [2, 1, 2]
    assert piece.targets.tolist() == [3, 4, 6, 8, 11] and piece.owner.tolist() == [0, 0, 1, 2, 2]
    alone: list[float] = []
    for each in DOCUMENTS:
        scores = net(torch.tensor([each.token_ids[:-1]])).log_softmax(-1)[0]
        alone += [scores[i - 1, each.token_ids[i]].item() for i, learnt in enumerate(each.mask) if learnt]
    assert token_logprobs(net, piece).tolist() == pytest.approx(alone, abs=1e-5)
    wrong = token_logprobs(net, learning.shifted(piece, 1)).tolist()
    assert max(abs(a - b) for a, b in zip(alone, wrong, strict=True)) > 0.1, "one token off is seen"


def test_many_scores_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, with the same values and gradients."""
    net, piece = model(), stream(DOCUMENTS)
    whole = token_logprobs(net, piece, 0.7)
    (expected,) = torch.autograd.grad(whole.sum(), net.lm_head.weight)
    monkeypatch.setattr(learning, "SCORES", 2 * 48)
    parts = token_logprobs(net, piece, 0.7)
    (found,) = torch.autograd.grad(parts.sum(), net.lm_head.weight)
    assert torch.allclose(parts, whole, atol=1e-6) and torch.allclose(found, expected, atol=1e-5)


def test_pieces_add_up() -> None:
    """Two micro-batches make the update that one makes."""
    nets = [model(), model()]
    sizes = [[list(DOCUMENTS)], list(in_pieces(list(DOCUMENTS), [4, 2, 5], 6))]
    assert [len(piece) for piece in sizes[1]] == [2, 1]
    for net, pieces in zip(nets, sizes, strict=True):
        made = Learner(net, LearnerConfig(), 10)
        assert made.update(pieces, lambda piece: -token_logprobs(net, stream(piece)).sum() / 5) > 0  # noqa: B023
        assert made.updates == 1
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in pairs)


@pytest.mark.parametrize("matrices", [False, True])
def test_it_learns_what_it_is_told(matrices: bool) -> None:
    """Both optimisers raise the likelihood of what is learnt, and AdamW for everything has no matrices."""
    net = model()
    config = LearnerConfig(optimizer=MuonConfig(learning_rate=0.02, matrices=matrices, weight_decay=0.01))
    made = Learner(net, config, 20)
    assert bool(made.optimizer.matrices) == matrices
    before = torch.cat(made.logprobs(DOCUMENTS)).mean()

    def loss(piece: list[Document]) -> Tensor:
        return -token_logprobs(net, stream(piece)).mean()

    for _ in range(20):
        made.update([list(DOCUMENTS)], loss)
    assert torch.cat(made.logprobs(DOCUMENTS)).mean() > before + 1


def test_what_cannot_be_learnt_from() -> None:
    """Each is said before the weights change."""
    with pytest.raises(ConfigError, match="document 0: 1 ids"):
        stream([Document(token_ids=(1,), mask=(False,))])
    with pytest.raises(ConfigError, match="the first is read"):
        stream([Document(token_ids=(1, 2), mask=(True, True))])
    with pytest.raises(ConfigError, match="1 log-probabilities for 2"):
        stream([Document(token_ids=(1, 2, 3), mask=(False, True, True), logprobs=(-1.0,))])
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(TrainingError, match="update 1"):
        Learner(net, LearnerConfig(), 1).update([0], lambda _: token_logprobs(net, stream(DOCUMENTS)).sum() * math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
