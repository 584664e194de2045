"""Fine-tuning: what is learnt from chat files, ATIF documents and trajectories, and a run that goes on after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon import config as toml
from gnomon.agent import trajectory_file
from gnomon.agent.atif import to_atif
from gnomon.agent.trajectory import Span, Trajectory, Turn
from gnomon.cli import main
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Message, Text
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError, DataError
from gnomon.model.config import preset
from gnomon.model.runs import load_model
from gnomon.model.transformer import Transformer
from gnomon.posttrain import demonstrations
from gnomon.posttrain.demonstrations import Example
from gnomon.posttrain.keeping import KeepConfig, Shape
from gnomon.posttrain.learner import LearnerConfig
from gnomon.posttrain.recipe import load_distill, load_rl, load_sft
from gnomon.posttrain.sft import SFTConfig, divided, fit
from gnomon.train import checkpoint
from gnomon.train.settings import MuonConfig

SHAPE = ("hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1", "mixers.kda.head_dim=16",
         "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16", "mixers.mla.qk_nope_head_dim=16",
         "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4", "moe.num_experts_per_token=2",
         "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32")
CHAT = {"messages": [{"role": "user", "content": "Say two."}, {"role": "assistant", "content": "two", "reasoning_content": "one and one"}],
        "reasoning_effort": "low"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A small vocabulary with the markers of the chat format."""
    return train_tokenizer(["Say two. one and one is two, three is more"] * 4, 300)


@pytest.fixture(scope="module")
def form(tokenizer: Tokenizer) -> ChatFormat:
    """Its chat format."""
    return chat_format(tokenizer)


def network(vocabulary: int) -> Transformer:
    """Small and untrained."""
    return Transformer(preset("tiny", (*SHAPE, f"vocab_size={vocabulary}"))).initialise(0)


def test_only_what_assistants_wrote_is_learnt(tokenizer: Tokenizer, form: ChatFormat, tmp_path: Path) -> None:
    """From a chat file, and the same words from the ATIF document of a trajectory."""
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n" + json.dumps(CHAT) + "\n")
    first, second = demonstrations.read([path], form)
    assert first == second
    learnt = tokenizer.decode([i for i, w in zip(first.token_ids, first.weights, strict=True) if w])
    assert "one and one" in learnt and "two" in learnt and "Say" not in learnt
    said = (Message(role="user", content=(Text(text="Say two."),)),
            Message(role="assistant", content=(Text(text="two"),), reasoning="one and one"))
    trajectory = Trajectory(id="a", task_id="t", effort="low", turns=(Turn(messages=said),))
    (tmp_path / "atif.json").write_text(json.dumps(to_atif(trajectory)))
    assert list(demonstrations.read([tmp_path / "atif.json"], form)) == [first]
    assert list(demonstrations.of_trajectory(trajectory, form)) == [first]


def test_sampled_ids_are_taken_as_they_are(form: ChatFormat, tmp_path: Path) -> None:
    """A trajectory that kept its ids is not encoded again."""
    spans = (Span(token_ids=(5, 6)), Span(token_ids=(7, 8), logprobs=(-1.0, -2.0), loss_mask=(True, False), policy_version=0))
    turn = Turn(messages=(Message(role="assistant", content=(Text(text="x"),)),), spans=spans)
    trajectory_file.write(Trajectory(id="a", task_id="t", turns=(turn,)), tmp_path / "t.jsonl")
    assert list(demonstrations.read([tmp_path / "t.jsonl"], form)) == [Example(token_ids=(5, 6, 7, 8), weights=(0.0, 0.0, 1.0, 0.0))]


@pytest.mark.parametrize(("record", "words"), [
    ("{", "no JSON"), ("[]", "expected an object"), ('{"text": "x"}', "neither 'messages'"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to learn"), ('{"messages": [{"role": "elf", "content": "x"}]}', "role"),
    ('{"schema_version": "ATIF-v1.8"}', "'steps' is missing"), ('{"schema_version": "ATIF-v1.8", "steps": [["x"]]}', "indices"),
    ('{"schema_version": "ATIF-v1.8", "steps": [{"source": "agent", "observation": "x"}]}', "no attribute 'get'"),
])
def test_what_is_no_conversation_is_named(record: str, words: str, form: ChatFormat, tmp_path: Path) -> None:
    """With file and line."""
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + record + "\n")
    with pytest.raises(DataError, match=f"bad.jsonl:2: .*{words}|bad.jsonl:2.*{words}"):
        list(demonstrations.read([path], form))


def examples(count: int) -> list[Example]:
    """Texts in which an id is followed by the next."""
    return [Example(token_ids=(5, *range(6 + i % 20, 14 + i % 20)), weights=(0.0, 0.0, *(1.0 + i % 2 for _ in range(7))))
            for i in range(count)]


def small(**changes: Any) -> SFTConfig:
    """A run of a moment."""
    return SFTConfig(**{"epochs": 3, "batch_tokens": 120, "held_out": 0.1, "keep": KeepConfig(every=4, keep=99), "learner": LearnerConfig(
        optimizer=MuonConfig(learning_rate=0.01, clip_logits=None), micro_tokens=64)} | changes)


def test_it_learns_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Losses fall on what is held out too, and a run that died gives the same metrics."""
    whole = fit(network(64), examples(60), small(), tmp_path / "run", seed=1)
    held = [row["held_out_loss"] for row in whole if "held_out_loss" in row]
    assert len(held) == 3 and held[-1] < held[0] and whole[-1]["loss"] < whole[0]["loss"] - 0.5
    last = tmp_path / "run" / "checkpoints" / f"step-{len(whole):06d}"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    again = fit(network(64), examples(60), small(), tmp_path / "run", seed=1)
    plain = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in (whole[-len(again):], again)]
    assert plain[0] == plain[1] and 0 < len(again) < len(whole)


def test_what_is_left_out() -> None:
    """Too long examples and those without a learnt token are counted; nothing left is an error."""
    said: list[str] = []
    given = [*examples(5), Example(token_ids=(1,) * 99, weights=(1.0,) * 99), Example(token_ids=(1, 2), weights=(0.0, 0.0))]
    trained, held = divided(given, small(context=50, held_out=0.2), 0, said.append)
    assert (len(trained), len(held)) == (4, 1) and "2 of 7" in said[0]
    with pytest.raises(ConfigError, match="no example is left"):
        divided(given[5:6], small(context=50), 0, said.append)


def test_the_command(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run folder to a run folder, quantised from here on; a wrong path is one line."""
    model, start = network(tokenizer.vocab_size), tmp_path / "start"
    start.mkdir()
    (start / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
    checkpoint.save(start, 1, {}, {"model": checkpoint.model_tensors(model)}, 1)
    tokenizer.save(start / "tokenizer")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(6)))
    recipe = tmp_path / "sft.toml"
    recipe.write_text(f'run = "{tmp_path}/run"\nstart_from = "{start}"\ndata = ["{tmp_path}/*.jsonl"]\n'
                      "[train]\nepochs = 1\nbatch_tokens = 99\n")
    assert main(["sft", str(recipe), "train.held_out=0.0"]) == 0
    made, _ = load_model(tmp_path / "run")
    assert made.config.moe is not None and made.config.moe.expert_weights == "mxfp4" and made.config.moe.expert_inputs == "mxfp8"
    assert torch.isfinite(made.model.embed_tokens.weight).all() and Tokenizer.load(tmp_path / "run" / "tokenizer").vocab_size
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert 'expert_weights = "mxfp4"' in shown and "batch_tokens = 99" in shown and main(["show", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["sft", str(tmp_path / "run" / "sft.toml")]) == 0, "the recipe in the folder goes on"
    assert main(["sft", str(recipe), "train.held_out=0.0", "train.epochs=2"]) == 2 and "train.epochs: 1 → 2" in capsys.readouterr().err
    assert main(["sft", str(recipe), "train.held_out=0.0", "expert_weights=full"]) == 2
    assert "model.moe.expert_weights: 'mxfp4' → 'full'" in capsys.readouterr().err
    assert main(["sft", str(recipe), 'data=["nowhere.jsonl"]']) == 2 and "nowhere.jsonl" in capsys.readouterr().err


def test_recipes_of_all_three_verbs(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They resolve, and are shown whatever they are called; what is missing is named."""
    assert load_sft(repository / "recipes" / "sft.toml").expert_weights == "mxfp4"
    path = tmp_path / "x.toml"
    path.write_text('start_from = "a"\nproblems = "my.tasks:Source"\n[train.tau]\ntarget = 1.2\n')
    assert load_rl(path).train.tau.target == 1.2
    path.write_text('start_from = "a"\nproblems = "my:Source"\n[[teachers]]\ndomain = "math"\neffort = "low"\nrun = "b"\n')
    assert load_distill(path).teachers[0].run == Path("b")
    for kind, known in (("sft", "expert_inputs"), ("lab", "quantised")):
        again = tmp_path / f"mine-{kind}.toml"
        again.write_text((repository / "recipes" / f"{kind}.toml").read_text())
        assert main(["show", str(again)]) == 0 and known in capsys.readouterr().out
    path.write_text('problems = "my:Source"\n')
    with pytest.raises(ConfigError, match="start_from"):
        load_rl(path)
