"""Post-training by several ranks is that of one: the same update from the same rollouts, one folder, one set of metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon import config as toml
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.model.runs import load_model
from gnomon.model.transformer import Transformer
from gnomon.posttrain.keeping import Shape
from gnomon.posttrain.recipe import load_distill, load_rl, load_sft
from gnomon.train import checkpoint, metrics

CHAT = {"messages": [{"role": "user", "content": "Say two."}, {"role": "assistant", "content": "two"}]}
UPDATES = ("k25", "grpo", "sampled", "topk", "sft", "one")
SHAPE = ("hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1", "mixers.kda.head_dim=16",
         "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16", "mixers.mla.qk_nope_head_dim=16",
         "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4", "moe.num_experts_per_token=2",
         "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32", "initializer_range=0.2")
POOL = "[train]\nsteps = 2\nupdates = 2\n[train.pool]\nprompts = 6\ngroup_size = 4\n[train.sampling]\nslots = 16\ncache_tokens = 1024\n"


def write_recipes(folder: Path) -> None:
    """A start with a tokenizer, and a recipe of each verb."""
    tokenizer = train_tokenizer(["Say two. one and one is two, three is more"] * 4, 300)
    model, start = Transformer(preset("tiny", (*SHAPE, f"vocab_size={tokenizer.vocab_size}"))).initialise(0), folder / "start"
    for run, seed in ((start, 0), (folder / "teacher", 1)):
        run.mkdir()
        (run / "recipe.toml").write_text(toml.to_toml(Shape(model=model.config)))
        checkpoint.save(run, 1, {}, {"model": checkpoint.model_tensors(model.initialise(seed))}, 1)
    tokenizer.save(start / "tokenizer")
    (folder / "chats.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(9)))
    begins = f'start_from = "{start}"\n'
    (folder / "sft.toml").write_text(f'{begins}data = ["{folder}/*.jsonl"]\n[train]\nepochs = 2\nbatch_tokens = 99\nheld_out = 0.2\n')
    (folder / "rl.toml").write_text(f'{begins}problems = "posttrain_ranks:Source"\nbudget_rollouts = 11\n{POOL}[train.tau]\ntarget = 1.2\n')
    teachers = "".join(f'[[teachers]]\ndomain = "{domain}"\neffort = "max"\nrun = "{folder}/teacher"\n' for domain in "ab")
    (folder / "distill.toml").write_text(f'{begins}problems = "posttrain_ranks:Source"\n{teachers}{POOL}')


@pytest.fixture(scope="module")
def found(on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Everything on one rank, then on two; the folder and what each rank measured."""
    folder = tmp_path_factory.mktemp("ranks")
    write_recipes(folder)
    return folder, on_ranks("posttrain_ranks.py", 1, 2, str(folder))


@pytest.mark.parametrize("name", UPDATES)
def test_the_update_of_two_ranks_is_that_of_one(name: str, found: tuple[Path, list[dict[str, Any]]]) -> None:
    """In fp64 what the updates changed is equal but for the order of sums (depth queries have theirs in fp32), on both ranks."""
    folder, (one, two) = found
    wanted = torch.load(folder / f"{name}-1-0.pt")
    start = Transformer(preset("tiny", (*SHAPE, "vocab_size=48"))).initialise(5).double().state_dict()
    moved = distance(wanted, start)
    assert moved > 0.01, "it learnt"
    for rank in (0, 1):
        reached = torch.load(folder / f"{name}-2-{rank}.pt")
        assert distance(reached, wanted) < 1e-5 * moved
        assert two[name][rank] == two[name][0]
    assert near(two[name][0], one[name][0], 1e-5)


def test_ranks_know_the_same_pool(found: tuple[Path, list[dict[str, Any]]]) -> None:
    """What is sampled is what one rank samples; groups are whole, and what is carried over is known to all."""
    _, (one, two) = found
    assert two["pool"][0] == two["pool"][1] and two["pool"][0]["whole"] == one["pool"][0]["whole"]
    part = two["pool"][0]["part"]
    assert part["carried"] > 0 and part["state"]["waiting"] and all(len(group) == 3 for group in part["ids"])


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    return sum((one[key] - other[key]).square().sum().item() for key in one) ** 0.5


def near(found: Any, wanted: Any, relative: float) -> bool:
    """Equal numbers but for rounding, whatever they are in."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(near(found[key], wanted[key], relative) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(near, found, wanted, [relative] * len(wanted)))
    return found == (pytest.approx(wanted, rel=relative, abs=1e-6) if isinstance(wanted, float) else wanted)


@pytest.mark.parametrize("verb", ["sft", "rl", "distill"])
def test_a_verb_on_two_ranks_writes_one_run(verb: str, found: tuple[Path, list[dict[str, Any]]]) -> None:
    """The first step's metrics are those of one rank in fp32, each step is there once, and the folder is one that other programs read."""
    folder, (one, two) = found
    assert one["verbs"][0][verb] == 0 and [each[verb] for each in two["verbs"]] == [0, 0]
    alone, both = (metrics.read(folder / f"runs-{ranks}" / verb) for ranks in (1, 2))
    assert [row["step"] for row in both] == [row["step"] for row in alone] and len(both) >= 2
    plain = [{key: value for key, value in row.items() if "seconds" not in key} for row in (both[0], alone[0])]
    assert near(*plain, 1e-5), plain
    assert len(list((folder / "runs-2" / verb / "checkpoints").iterdir())) == 1
    assert torch.isfinite(load_model(folder / "runs-2" / verb)[0].lm_head.weight).all()
    if verb == "rl":
        assert (folder / "runs-1" / "budgets.json").read_text() == (folder / "runs-2" / "budgets.json").read_text()


def test_ranks_have_the_whole_model(tmp_path: Path) -> None:
    """Other axes than copies are refused by name."""
    write_recipes(tmp_path)
    for load, verb in ((load_sft, "sft"), (load_rl, "rl"), (load_distill, "distill")):
        with pytest.raises(ConfigError, match=r"'mesh.expert' is 2; in post-training each rank has the whole model"):
            load(tmp_path / f"{verb}.toml", ("mesh.expert=2",))
        with pytest.raises(ConfigError, match=r"'mesh.zero' is 1; in post-training"):
            load(tmp_path / f"{verb}.toml", ("mesh.zero=1",))


@pytest.mark.slow
def test_under_torchrun_and_on_with_one_process(tmp_path: Path, repository: Path) -> None:
    """Two ranks as torchrun starts them; one process then takes over and trains the steps that are left."""
    write_recipes(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{repository}/src:{repository}/tests/contracts", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for start in (torchrun, []):
        typed = [sys.executable, *start, "-m", "gnomon", "rl", str(tmp_path / "rl.toml"), f"run={tmp_path}/run",
                   f"budgets={tmp_path}/budgets.json", "train.pool.share=0.6", "train.keep.every=1", "train.keep.keep=9"]
        done = subprocess.run(typed, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = metrics.read(tmp_path / "run")
        assert [row["step"] for row in rows] == [1, 2]
        later = tmp_path / "run" / "checkpoints" / "step-000002"  # as if it had died in step 2
        for file in later.iterdir():
            file.unlink()
        later.rmdir()
