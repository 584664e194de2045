"""Held-out evaluation: position buckets, byte counts, and that looking changes nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gnomon.data.bpe import train_ranks
from gnomon.data.special_tokens import block
from gnomon.data.tokenizer import Tokenizer
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.train.evaluate import buckets, byte_lengths, frozen


def test_buckets_double_and_cover_the_context_once():
    assert buckets(20) == [(0, 20)]
    assert buckets(300) == [(0, 32), (32, 64), (64, 128), (128, 256), (256, 300)]


def test_bytes_behind_ids_add_up_to_the_text():
    tokenizer = Tokenizer(train_ranks(["naïve café and naïve words, with a few more of them"] * 50, 262), block(262, 32))
    text = "a naïve text — with café"
    lengths = byte_lengths(tokenizer)
    assert int(lengths[torch.tensor(tokenizer.encode(text))].sum()) == len(text.encode())
    assert lengths[tokenizer.document_end_id] == 0


def test_looking_changes_no_counter_and_keeps_no_graph():
    model = Transformer(preset("tiny")).initialise()
    for router in model.routers():
        router.start_observing()
    for mixer in model.mla_layers().values():
        mixer.watch_logits = True
    with frozen(model):
        logits = model(torch.arange(20).unsqueeze(0))
        assert not logits.requires_grad
    assert all(router.observing and router.load.sum() == 0 for router in model.routers())
    assert all(mixer.watch_logits and mixer.max_logits is None for mixer in model.mla_layers().values())
    assert model.training


def test_a_uniform_model_has_the_loss_of_its_vocabulary():
    from gnomon.train.evaluate import held_out

    model = Transformer(preset("tiny", ("vocab_size=302",)))
    model.initialise()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    tokenizer = Tokenizer(train_ranks(["some words to merge, some words"] * 50, 270), block(270, 32))
    ids = [*tokenizer.encode("some words here and there " * 40), tokenizer.document_end_id]
    documents = [np.array(ids, dtype=np.uint16)] * 3

    class Part(list):
        lengths = np.array([len(d) for d in documents])

    result = held_out(model, [Part(documents)], tokenizer, context=64, tokens=10_000)
    assert result.loss == pytest.approx(np.log(302), rel=1e-5)
    predicted_bytes = sum(len(tokenizer.decode_bytes(d[1:-1].tolist())) for d in documents)
    predicted = sum(len(d) - 1 for d in documents)
    assert result.tokens == predicted
    assert result.bits_per_byte == pytest.approx(np.log2(302) * predicted / predicted_bytes, rel=1e-5)
    assert [row[:2] for row in result.by_position] == [(0, 32), (32, 64)]
    assert all(row[2] == pytest.approx(np.log(302), rel=1e-5) for row in result.by_position)


def test_results_are_plain_values():
    from gnomon.train.evaluate import HeldOut

    row = HeldOut(context=64, loss=1.0, bits_per_byte=2.0, tokens=3, by_position=((0, 32, 1.0, 3),)).row()
    assert row["by_position"] == ((0, 32, 1.0, 3),)
    assert SimpleNamespace(**row).context == 64
