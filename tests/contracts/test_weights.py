"""Checkpoints: what a reader must accept, what it must refuse and how it says so, and what a writer must produce.

The files come from an independent writer (`tests/parity/released.py`); files that gnomon writes are read with the safetensors library.
"""

import errno
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import released
import torch
from safetensors import safe_open

from gnomon.errors import CheckpointError
from gnomon.kernels import mxfp
from gnomon.model import tensorfile
from gnomon.model.weights import encode, load_pretrained, save_pretrained

ARCHITECTURES = ("kimi_k3", "kimi_linear")
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight"
NORM = "language_model.model.layers.2.input_layernorm.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One checkpoint of each family: architecture → (folder, stored entries, values)."""
    result = {}
    for arch in ARCHITECTURES:
        folder = tmp_path_factory.mktemp(arch)
        vision = released.vision_tensors(64) if arch == "kimi_k3" else ()
        config = released.config(arch, num_hidden_layers=5, num_experts=6, num_experts_per_token=2)
        config["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4, 5]}
        result[arch] = (folder, *released.write(folder, config, extra=vision))
    return result


@pytest.fixture
def k3(written, tmp_path):
    """A copy of the K3 checkpoint that a test may damage."""
    return shutil.copytree(written["kimi_k3"][0], tmp_path / "damaged")


def read(folder):
    """Every tensor of a folder as (dtype tag, bytes, shape), through the safetensors library."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
                tensor = file.get_tensor(name)
                result[name] = (tensorfile.TAGS[tensor.dtype], tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
                                tuple(tensor.shape))
    return result


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(folder, change):
    """Apply `change` to the list of (name, tag, array) of all shards and write them back as one."""
    entries = [(name, tag, np.frombuffer(data, np.uint8).reshape(*shape, -1).view(released_type(tag)).reshape(shape))
               for name, (tag, data, shape) in read(folder).items()]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    released.write_shard(folder / "model.safetensors", change(entries))


def released_type(tag):
    return {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8}[tag]


def change_config(folder, change):
    table = json.loads((folder / "config.json").read_text())
    change(table)
    (folder / "config.json").write_text(json.dumps(table))


# ---- reading


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_values_and_types_are_those_of_the_file(written, arch):
    folder, entries, values = written[arch]
    state = load_pretrained(folder).state_dict()
    prefix = "language_model." if arch == "kimi_k3" else ""
    for name, value in values.items():
        if ".experts." in name:
            stem, expert, which = name.rsplit(".", 3)[0], int(name.split(".experts.")[1].split(".")[0]), name.split(".")[-2]
            found, tag = state[f"{stem}.{which}"][expert], "BF16"
        else:
            found, tag = state[name], entries[prefix + name][0]
        assert found.dtype == tensorfile.DTYPES[tag], name
        np.testing.assert_array_equal(found.float().numpy(), value, err_msg=name)


def test_one_type_for_the_bulk_leaves_fp32_tensors_alone(written):
    model = load_pretrained(written["kimi_k3"][0], dtype=torch.bfloat16)
    mixer = model.model.layers[0].self_attn
    assert {p.dtype for p in (mixer.A_log, mixer.dt_bias, mixer.o_norm.weight, mixer.q_conv1d.weight)} == {torch.float32}
    assert model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in load_pretrained(written["kimi_k3"][0], dtype=torch.float32).parameters()} == {torch.float32}


def test_convolutions_and_norms_in_bf16_are_accepted(k3):
    def change(entries):
        return [(n, "BF16", released.to_bf16(a)) if "conv1d" in n or "o_norm" in n else (n, t, a) for n, t, a in entries]

    rewrite(k3, change)
    assert load_pretrained(k3).model.layers[0].self_attn.q_conv1d.weight.dtype == torch.bfloat16


def test_plain_experts_in_a_k3_checkpoint_are_accepted(k3, written):
    def change(entries):
        stored = {n: a for n, _, a in entries}
        result = [e for e in entries if not e[0].endswith(("_packed", "_scale"))]
        for name in [n.removesuffix("_packed") for n in stored if n.endswith("_packed")]:
            result.append((name, "BF16", released.to_bf16(released.unpack(stored[name + "_packed"], stored[name + "_scale"]))))
        return result

    rewrite(k3, change)
    ours, theirs = load_pretrained(k3), load_pretrained(written["kimi_k3"][0])
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_unpadded_a_log_is_accepted(k3, written):
    rewrite(k3, lambda entries: [(n, t, a[:4]) if n.endswith("A_log") else (n, t, a) for n, t, a in entries])
    ours, theirs = (load_pretrained(folder).model.layers[0].self_attn.A_log for folder in (k3, written["kimi_k3"][0]))
    assert torch.equal(ours, theirs)


def test_a_text_only_k3_checkpoint_is_accepted(k3):
    rewrite(k3, lambda entries: [e for e in entries if e[0].startswith("language_model.")])
    assert load_pretrained(k3).untouched == {}


def test_frozen_parameters_stay_frozen(written):
    layer = load_pretrained(written["kimi_k3"][0]).model.layers[0]
    assert not layer.self_attention_res_proj.weight.requires_grad
    assert layer.mlp_res_proj.weight.requires_grad


def test_reads_larger_than_one_call_are_continued(written, monkeypatch):
    expected = load_pretrained(written["kimi_k3"][0])
    monkeypatch.setattr(tensorfile, "READ_LIMIT", 1000)
    monkeypatch.setattr(tensorfile, "PIECE", 2000)
    found = load_pretrained(written["kimi_k3"][0])
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    wide = load_pretrained(written["kimi_k3"][0], dtype=torch.float32)
    assert all(torch.equal(a, b.float()) for a, b in zip(wide.parameters(), expected.parameters(), strict=True))


@pytest.mark.slow
def test_a_tensor_above_two_gib_is_read_whole(tmp_path):
    size = 2**31 + 4096
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(size - 3, 1)
        file.write(b"\1\2\3")
    tensor = tensorfile.read_header(tmp_path / "big.safetensors")["x"].read()
    assert tensor[-4:].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_loading_needs_little_more_memory_than_the_model(repository):
    """The peak of resident memory over the loaded bytes, on a checkpoint of a gigabyte of each family: at most 1.15."""
    program = [sys.executable, str(repository / "benchmarks" / "checkpoint_memory.py"), "--runs", "1", "--no-save"]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=repository)
    assert result.returncode == 0, result.stdout + result.stderr


# ---- what a reader refuses


def drop(name):
    return lambda entries: [e for e in entries if e[0] != name]


def replace(name, tag, array):
    return lambda entries: [(n, tag, array) if n == name else (n, t, a) for n, t, a in entries]


def add(name, shape=(3, 5)):
    return lambda entries: [*entries, (name, "F32", np.zeros(shape, np.float32))]


def poke(name, index, value):
    def change(entries):
        return [(n, t, np.where(np.arange(a.size).reshape(a.shape) == index, value, a).astype(a.dtype)) if n == name else (n, t, a)
                for n, t, a in entries]
    return change


@pytest.mark.parametrize(("change", "message"), [
    (drop(NORM), f"missing {NORM} [64]"),
    (drop(EXPERT + "_scale"), f"missing {EXPERT}_scale"),
    (drop("vision_tower.encoder.blocks.1.wqkv.weight"), "missing vision_tower.encoder.blocks.1.wqkv.weight [36, 8]"),
    (add("language_model.model.layers.2.rotary.inv_freq"), "unknown language_model.model.layers.2.rotary.inv_freq [3, 5] F32"),
    (add("vision_tower.encoder.blocks.7.wo.weight"), "unknown vision_tower.encoder.blocks.7.wo.weight [3, 5] F32"),
    (add("model.norm.weight"), "unknown model.norm.weight"),
    (replace(NORM, "BF16", np.zeros(63, np.uint16)), f"misshapen {NORM}: [63], expected [64]"),
    (replace(EXPERT + "_packed", "U8", np.zeros((32, 31), np.uint8)), f"misshapen {EXPERT}_packed: [32, 31] U8, expected [32, 32] U8"),
    (replace(NORM, "U8", np.zeros(64, np.uint8)), f"wrong type {NORM}: U8"),
    (replace("language_model.model.layers.0.self_attn.A_log", "BF16", np.zeros(128, np.uint16)),
     "wrong type language_model.model.layers.0.self_attn.A_log: BF16, expected F32"),
    (replace("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "BF16", np.zeros(6, np.uint16)),
     "e_score_correction_bias: BF16, expected F32"),
    (poke("language_model.model.layers.0.self_attn.A_log", 77, 1.0), "A_log: entries 4 to 127 are padding and must be zero"),
    (poke(EXPERT + "_scale", 9, 255), f"{EXPERT}_scale: holds the byte 255"),
])
def test_wrong_tensors_are_named(k3, change, message):
    rewrite(k3, change)
    with pytest.raises(CheckpointError) as error:
        load_pretrained(k3)
    assert message in str(error.value)


def test_all_problems_come_at_once_and_the_list_is_bounded(k3):
    def change(entries):
        kept = [e for e in entries if not (".layers.4." in e[0] or e[0] == NORM)]
        return add("language_model.extra")(replace("language_model.lm_head.weight", "BF16", np.zeros((320, 63), np.uint16))(kept))

    rewrite(k3, change)
    with pytest.raises(CheckpointError) as error:
        load_pretrained(k3)
    text = str(error.value)
    assert f"missing {NORM}" in text
    assert "(" in text.splitlines()[0]
    assert text.splitlines()[-1].strip().startswith("… and")
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: data[:-100], "is truncated"),
    (lambda data: data[:50], "too short for its header"),
    (lambda data: b"", "too short for its header"),
    (lambda data: data + b"\0" * 8, "longer than it should be"),
    (lambda data: data[:8] + b"X" + data[9:], "the header is damaged"),
    (lambda data: data.replace(b'"shape": [64]', b'"shape": [63]', 1), "the header is damaged"),
    (lambda data: data.replace(b'"BF16"', b'"F4_X"', 1), "the unknown type F4_X"),
])
def test_damaged_shards_are_named(k3, damage, message):
    shard = k3 / "model-00002-of-00003.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors") as error:
        load_pretrained(k3)
    assert message in str(error.value)


def test_a_missing_shard_is_named(k3):
    (k3 / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: cannot be read"):
        load_pretrained(k3)


def test_a_folder_without_a_checkpoint_says_what_belongs_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"a checkpoint folder has config.json and \*.safetensors"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update(model_type="llama"), "model_type is 'llama'"),
    (lambda t: t["text_config"].pop("hidden_size"), "'hidden_size' is missing"),
    (lambda t: t["text_config"].update(mla_use_nope=False), "rotary positions"),
    (lambda t: t["text_config"].update(num_key_value_heads=2), "'num_key_value_heads' is 2"),
    (lambda t: t["text_config"].update(moe_router_activation_func="softmax"), "'moe_router_activation_func' is 'softmax'"),
    (lambda t: t["text_config"].update(num_nextn_predict_layers=1), "multi-token prediction"),
    (lambda t: t["text_config"].update(hidden_act="gelu"), "hidden_act"),
    (lambda t: t["text_config"]["linear_attn_config"].update(kda_layers=[0, 1, 2]), "must name each of the layers 1..5 once"),
    (lambda t: t["text_config"].update(num_experts_per_token=99), "'num_experts_per_token' is 99"),
    (lambda t: t.update(dtype="int3"), "'dtype' is 'int3'"),
])
def test_a_configuration_that_is_not_implemented_is_refused(k3, change, message):
    change_config(k3, change)
    with pytest.raises(CheckpointError) as error:
        load_pretrained(k3)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\ufffe"])
def test_a_broken_configuration_file_is_refused(k3, text):
    (k3 / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_pretrained(k3)


# ---- writing


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_released_checkpoint_comes_back_tensor_for_tensor(written, arch, tmp_path):
    """Names, types, shapes and bytes of every tensor; a block of experts may be scaled differently and then holds the same values."""
    folder, entries, _ = written[arch]
    save_pretrained(load_pretrained(folder), tmp_path / "out")
    found = read(tmp_path / "out")
    assert set(found) == set(entries)
    for name, (tag, array) in entries.items():
        assert found[name][0] == tag, name
        assert found[name][2] == array.shape, name
        if not name.endswith(("_packed", "_scale")):
            assert found[name][1] == array.tobytes(), name
    again = load_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in load_pretrained(folder).state_dict().items())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_save_load_save_is_the_same_files(written, arch, dtype, tmp_path):
    save_pretrained(load_pretrained(written[arch][0], dtype=torch.float32), tmp_path / "a", dtype=dtype)
    save_pretrained(load_pretrained(tmp_path / "a"), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_codes_survive_decoding_and_encoding():
    """Every code in every block position and every usual scale, negative zeros included."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    packed[:, ::16] = packed[:, ::16] & 0xF0 | torch.tensor([6, 7, 14, 15], dtype=torch.uint8).repeat(16)[:, None]  # a block reaches 4 or 6
    scale = torch.randint(100, 150, (64, 4), dtype=torch.uint8, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        again = encode(mxfp.decode_mxfp4(packed, scale, dtype))
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scale)


def test_vision_comes_back_byte_for_byte(written, tmp_path):
    folder, entries, _ = written["kimi_k3"]
    save_pretrained(load_pretrained(folder, dtype=torch.float32), tmp_path / "out")
    found = read(tmp_path / "out")
    vision = [name for name in entries if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(vision) == 18
    assert all(found[name][1] == entries[name][1].tobytes() for name in vision)
    configs = [json.loads((f / "config.json").read_text())["vision_config"] for f in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]


def test_shards_hold_whole_tensors_and_the_index_adds_up(written, tmp_path):
    model = load_pretrained(written["kimi_linear"][0])
    save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) > 10
    assert sum(len(data) for _, data, _ in read(tmp_path / "out").values()) == index["metadata"]["total_size"]
    for shard in shards:
        entries = tensorfile.read_header(shard)
        assert all(index["weight_map"][name] == shard.name for name in entries)
        assert len(entries) == 1 or sum(e.stop - e.start for e in entries.values()) <= 100_000
        assert all(entry.start % tensorfile.DTYPES[entry.tag].itemsize == 0 for entry in entries.values())
    again = load_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_padding_and_layout_of_a_log(written, tmp_path):
    for arch, shape in (("kimi_k3", (128,)), ("kimi_linear", (1, 1, 4, 1))):
        save_pretrained(load_pretrained(written[arch][0]), tmp_path / arch)
        found = {name: value for name, value in read(tmp_path / arch).items() if name.endswith("A_log")}
        assert len(found) == 3
        assert {(tag, form) for tag, _, form in found.values()} == {("F32", shape)}
        assert all(not any(data[16:]) for _, data, _ in found.values())


def test_unquantised_experts_keep_their_values(written, tmp_path):
    model = load_pretrained(written["kimi_k3"][0], dtype=torch.float32)
    experts = model.model.layers[3].block_sparse_moe.experts
    with torch.no_grad():
        experts.w1.normal_()
    save_pretrained(model, tmp_path / "out", quantize=False)
    assert torch.equal(load_pretrained(tmp_path / "out").model.layers[3].block_sparse_moe.experts.w1, experts.w1)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]


def test_tied_embeddings_have_no_head(tmp_path):
    released.write(tmp_path / "in", released.config("kimi_k3", tie_word_embeddings=True))
    save_pretrained(load_pretrained(tmp_path / "in"), tmp_path / "out")
    assert not [name for name in read(tmp_path / "out") if "lm_head" in name]
    assert load_pretrained(tmp_path / "out").config.tie_word_embeddings


class Tokenizer:
    """Writes one file, or fails as a full disk does."""

    def __init__(self, full=False):
        self.full = full

    def save(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_the_tokenizer_travels_along(written, tmp_path):
    save_pretrained(load_pretrained(written["kimi_linear"][0]), tmp_path / "out", tokenizer=Tokenizer())
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_full_disk_leaves_the_previous_checkpoint(written, tmp_path):
    model = load_pretrained(written["kimi_linear"][0])
    save_pretrained(model, tmp_path / "out")
    before = files(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(CheckpointError, match=r"No space left on device.*previous checkpoint is untouched"):
        save_pretrained(model, tmp_path / "out", tokenizer=Tokenizer(full=True))
    assert files(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    save_pretrained(model, tmp_path / "out")
    assert files(tmp_path / "out") != before


def test_a_writer_that_was_killed_between_renames_loses_nothing(written, tmp_path):
    model = load_pretrained(written["kimi_linear"][0])
    save_pretrained(model, tmp_path / "out")
    before = files(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(CheckpointError):
        save_pretrained(model, tmp_path / "out", tokenizer=Tokenizer(full=True))
    assert files(tmp_path / "out") == before


def test_a_folder_with_other_files_is_not_replaced(written, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save_pretrained(load_pretrained(written["kimi_linear"][0]), tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    with pytest.raises(CheckpointError, match=r"thesis\.tex: is a file"):
        save_pretrained(load_pretrained(written["kimi_linear"][0]), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_model_without_values_is_not_saved(written, tmp_path):
    model = load_pretrained(written["kimi_linear"][0], device="meta")
    with pytest.raises(CheckpointError, match="shapes but no values"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
