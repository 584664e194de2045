"""Checkpoints in the released Hugging Face layouts, read and written as a stream (report §4.1.4 for the MXFP4 experts).

K3: every name has the prefix `language_model.`, routed experts are packed MXFP4, `A_log` is padded with zeros to a multiple of 128,
and `A_log`, `dt_bias`, convolutions, `o_norm` and the router bias are fp32. Kimi-Linear: no prefix, plain experts, `A_log` as
`[1, 1, H, 1]`. Routed experts are one tensor each in a file and one stack per layer in the model.

Reading checks every header before it loads anything, then fills a model built on the meta device, parameter by parameter.
Read next: `tensorfile.py` for the file format, `huggingface.py` for `config.json`.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnomon.errors import CheckpointError
from gnomon.kernels import mxfp
from gnomon.model import huggingface, tensorfile
from gnomon.model.config import ModelConfig
from gnomon.model.parts import A_LOG_PADDING, MX_BLOCK
from gnomon.model.tensorfile import Planned, Stored
from gnomon.model.transformer import Transformer

PREFIX = {"kimi_k3": "language_model.", "kimi_linear": ""}
"""What stands before each text tensor's name."""

ALWAYS_FP32 = ("A_log", "dt_bias", "e_score_correction_bias")
"""Ends of the names of tensors that are fp32 in any checkpoint: rounding them changes choices of experts and rates of decay."""

K3_FP32 = ("_conv1d.weight", "o_norm.weight")
"""Ends of the names of tensors that the K3 release stores as fp32 besides."""

VISION = ("vision_tower.", "mm_projector.")
"""Beginnings of the names of tensors that a text model carries along untouched."""

SHARD_BYTES = 5_000_000_000
"""Size at which a new shard begins."""

_FLOATS = ("F32", "BF16", "F16")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_SHOWN = 20  # problems listed in full


class SavesItself(Protocol):
    """A tokenizer, as far as a checkpoint is concerned."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A tensor of the released layout and the place in the model that it fills; `expert` is its row in a stack."""

    name: str
    target: str
    shape: tuple[int, ...]
    expert: int | None = None


Match = tuple[Slot, tuple[Stored, ...]]
"""A slot and what fills it: one stored tensor, or the codes and scales of packed weights."""


def slots(model: Transformer) -> Iterator[Slot]:
    """The released layout of a model in order, routed experts one by one; works on the meta device."""
    prefix = PREFIX[model.config.family]
    for target, tensor in model.state_dict(keep_vars=True).items():
        stack = re.fullmatch(r"(.*\.experts)\.(w[123])", target)
        if stack is None:
            yield Slot(name=prefix + target, target=target, shape=tuple(tensor.shape))
            continue
        for expert in range(tensor.shape[0]):
            name = f"{prefix}{stack[1]}.{expert}.{stack[2]}.weight"
            yield Slot(name=name, target=target, shape=tuple(tensor.shape[1:]), expert=expert)


def load_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Transformer:
    """Read a checkpoint of either family.

    With `dtype` the bulk of the weights is converted; without it each has the type of the file, and packed experts that of
    `config.json`. fp32 tensors of the release stay fp32. Vision tensors are kept in `model.untouched` and written back unchanged.
    Raises one `CheckpointError` that lists every missing, unknown, misshapen or truncated tensor; nothing half-loaded is returned.
    """
    folder = Path(folder)
    table = _read_json(folder / "config.json")
    model, plan, untouched = _plan(folder, table)
    bulk = dtype or _dtype(table)
    total = sum(stored.stop - stored.start for _, parts in plan for stored in parts)
    with tensorfile.progress_bar(f"reading {folder.name}", total) as advance:
        for group in _by_target(plan):
            _materialise(model, group, dtype, bulk, torch.device(device))
            advance(sum(stored.stop - stored.start for _, parts in group for stored in parts))
    model.untouched = {name: stored.read() for name, stored in untouched.items()}
    model.untouched_config = huggingface.carried(table)
    return model


def stored_layout(folder: str | Path) -> tuple[ModelConfig, list[Match]]:
    """The model of a checkpoint and where each of its tensors is stored, all headers checked and nothing read yet.

    Raises `CheckpointError` as `load_pretrained` does.
    """
    folder = Path(folder)
    model, plan, _ = _plan(folder, _read_json(folder / "config.json"))
    return model.config, plan


def _plan(folder: Path, table: dict[str, Any]) -> tuple[Transformer, list[Match], dict[str, Stored]]:
    """The model without values, where its tensors are stored, and the vision tensors."""
    with torch.device("meta"):
        model = Transformer(huggingface.to_model_config(table))
    found, problems = _headers(folder)
    plan, untouched = _match(model, found, problems)
    if problems:
        raise CheckpointError(_report(folder, problems))
    return model, plan, untouched


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Where every tensor of a checkpoint lies. Raises `CheckpointError` for files that are missing or damaged."""
    found, problems = _headers(folder)
    if problems:
        raise CheckpointError(_report(folder, problems))
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); a checkpoint folder has config.json and *.safetensors") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return table


def _dtype(table: dict[str, Any]) -> torch.dtype:
    """What packed weights are decoded to: the type that config.json states (`torch_dtype` in older files)."""
    names = [part.get(key) for part in (table, table.get("text_config", {})) for key in ("dtype", "torch_dtype")]
    name = next(filter(None, names), "bfloat16")
    if name not in _DTYPES:
        raise CheckpointError(f"config.json: 'dtype' is {name!r}; gnomon reads {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _headers(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Every stored tensor of all shards, and what is wrong with the shards."""
    index = folder / "model.safetensors.index.json"
    where: dict[str, str] = _read_json(index).get("weight_map", {}) if index.exists() else {}
    files = sorted(set(where.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    found: dict[str, Stored] = {}
    problems = [] if files else ["no *.safetensors file"]
    for file in files:
        try:
            entries = tensorfile.read_header(folder / file)
        except CheckpointError as error:
            problems.append(f"shard {error}")
            continue
        problems += [f"duplicate {name} in {found[name].path.name} and {file}" for name in entries if name in found]
        found |= entries
    return found, problems


def _match(model: Transformer, found: dict[str, Stored], problems: list[str]) -> tuple[list[Match], dict[str, Stored]]:
    """Pair slots with stored tensors and note what does not fit; returns the pairs and the vision tensors."""
    k3 = model.config.family == "kimi_k3"
    plan, rest = [], dict(found)
    for slot in slots(model):
        alias = slot.name.replace(".mlp.", ".block_sparse_moe.")  # what transformers 5 calls a dense feed-forward when it saves
        plain = slot.name if slot.name in found else alias
        names = (plain,) if plain in found else (f"{slot.name}_packed", f"{slot.name}_scale")
        if missing := [name for name in names if name not in found]:
            shown = slot.name if len(missing) == len(names) else missing[0]
            problems.append(f"missing {shown} {list(slot.shape)}")
        parts = tuple(rest.pop(name) for name in names if name in found)
        if not missing:
            problems += _misfits(slot, names, parts, k3)
            plan.append((slot, parts))
    vision = {name: rest.pop(name) for name in list(rest) if k3 and name.startswith(VISION)}
    problems += [f"unknown {name} {list(stored.shape)} {stored.tag}" for name, stored in rest.items()]
    if vision and model.config.vision is not None:
        problems += _vision_problems({spec.name: spec.shape for spec in model.config.vision.tensors(model.config.hidden_size)}, vision)
    return plan, vision


def _misfits(slot: Slot, names: tuple[str, ...], parts: tuple[Stored, ...], k3: bool) -> Iterator[str]:
    if len(parts) == 2:
        rows, columns = slot.shape
        for name, stored, shape in zip(names, parts, ((rows, columns // 2), (rows, columns // MX_BLOCK)), strict=True):
            if stored.shape != shape or stored.tag != "U8":
                yield f"misshapen {name}: {list(stored.shape)} {stored.tag}, expected {list(shape)} U8"
        return
    stored = parts[0]
    shapes = _a_log_shapes(slot.shape[0]) if slot.name.endswith("A_log") else (slot.shape,)
    if stored.shape not in shapes:
        yield f"misshapen {slot.name}: {list(stored.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
    tags = ("F32",) if k3 and slot.name.endswith(ALWAYS_FP32) else _FLOATS
    if stored.tag not in tags:
        yield f"wrong type {slot.name}: {stored.tag}, expected {' or '.join(tags)}"


def _a_log_shapes(heads: int) -> tuple[tuple[int, ...], ...]:
    return (heads,), (heads + -heads % A_LOG_PADDING,), (1, 1, heads, 1)


def _vision_problems(expected: dict[str, tuple[int, ...]], vision: dict[str, Stored]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in vision:
            yield f"missing {name} {list(shape)}"
        elif vision[name].shape != shape:
            yield f"misshapen {name}: {list(vision[name].shape)}, expected {list(shape)}"
    yield from (f"unknown {name} {list(stored.shape)} {stored.tag}" for name, stored in vision.items() if name not in expected)


def _report(folder: Path, problems: list[str]) -> str:
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    lines = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
    return f"{folder}: does not hold the model that its config.json describes ({len(problems)} problems){lines}{more}"


def _by_target(plan: list[Match]) -> Iterator[list[Match]]:
    group: list[Match] = []
    for match in plan:
        if group and group[0][0].target != match[0].target:
            yield group
            group = []
        group.append(match)
    if group:
        yield group


def _materialise(model: Transformer, group: list[Match], dtype: torch.dtype | None, bulk: torch.dtype, device: torch.device) -> None:
    """Give one parameter or buffer its values."""
    slot, parts = group[0]
    owner, _, leaf = slot.target.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    stored = tensorfile.DTYPES[parts[0].tag]
    released_fp32 = slot.name.endswith(K3_FP32) and model.config.family == "kimi_k3"
    kept = slot.name.endswith(ALWAYS_FP32) or (released_fp32 and stored == torch.float32)
    own = torch.float32 if kept else dtype or (stored if len(parts) == 1 else bulk)
    new = torch.empty(old.shape, dtype=own, device=device)
    for slot, parts in group:
        read(slot, parts, new if slot.expert is None else new[slot.expert])
    setattr(module, leaf, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new)


def read(slot: Slot, parts: tuple[Stored, ...], out: Tensor) -> None:
    """Fill `out` with the values of a slot, converted to its type."""
    if len(parts) == 2:
        _read_packed(slot.name, parts, out)
    elif slot.name.endswith("A_log"):
        values = parts[0].read().flatten()
        heads = out.numel()
        if bool(values[heads:].any()):  # the release pads with zeros; values there would mean a decay per channel, another model
            raise CheckpointError(f"{slot.name}: entries {heads} to {values.numel() - 1} are padding and must be zero")
        out.copy_(values[:heads])
    else:
        parts[0].read_into(out)


def read_codes(name: str, parts: tuple[Stored, ...]) -> tuple[Tensor, Tensor]:
    """The MXFP4 codes and scales of packed weights as they are stored."""
    packed, scale = (part.read() for part in parts)
    if bool((scale == 255).any()):
        raise CheckpointError(f"{name}_scale: holds the byte 255, which stands for not-a-number")
    return packed, scale


def _read_packed(name: str, parts: tuple[Stored, ...], out: Tensor) -> None:
    packed, scale = read_codes(name, parts)
    rows = max(1, tensorfile.PIECE // 4 // out.shape[1])
    for first in range(0, out.shape[0], rows):
        part = slice(first, first + rows)
        out[part].copy_(mxfp.decode_mxfp4(packed[part], scale[part], out.dtype))


def save_pretrained(
    model: Transformer, folder: str | Path, *, quantize: bool = True, dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES, tokenizer: SavesItself | None = None,
) -> None:
    """Write a checkpoint that engines written for the release can read; the folder appears whole or not at all.

    `quantize` packs the routed experts of the K3 family as MXFP4. With `dtype` the bulk is converted (fp32 tensors of the release stay
    fp32), without it every tensor keeps its type. An existing checkpoint in `folder` is replaced.
    Raises `CheckpointError` when the disk fills (the previous checkpoint stays) or the layout cannot express the model.
    """
    folder = Path(folder)
    quantize = quantize and model.config.family == "kimi_k3" and model.config.moe is not None
    bulk = dtype or model.model.embed_tokens.weight.dtype
    table = huggingface.to_released(model.config, str(bulk).removeprefix("torch."), quantize)
    table |= model.untouched_config
    planned = list(_planned(model, quantize, dtype))
    total = sum(item.nbytes for item in planned)
    with tensorfile.replacing(folder) as fresh, tensorfile.progress_bar(f"writing {folder.name}", total) as advance:
        _write_json(fresh / "config.json", table)
        _write_json(fresh / "generation_config.json", huggingface.generation_config(model.config))
        if tokenizer is not None:
            tokenizer.save(fresh)
        shards = _shards(planned, max_shard_bytes)
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensorfile.write(fresh / file, shard, advance)
            where |= {item.name: file for item in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _write_json(fresh / "model.safetensors.index.json", index)


def _planned(model: Transformer, quantize: bool, dtype: torch.dtype | None) -> Iterator[Planned]:
    tensors = model.state_dict()
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(f"{len(meta)} tensors have shapes but no values (first: {meta[0]}); load or initialise before saving")
    k3, moe = model.config.family == "kimi_k3", model.config.moe
    rule = "even" if moe is None else moe.expert_scales
    for slot in slots(model):
        tensor = tensors[slot.target] if slot.expert is None else tensors[slot.target][slot.expert]
        if slot.expert is not None and quantize:
            yield from _packed(slot.name, tensor, rule)
            continue
        kept = slot.name.endswith(ALWAYS_FP32) or (k3 and dtype is not None and slot.name.endswith(K3_FP32))
        own = torch.float32 if kept else dtype or tensor.dtype
        if slot.name.endswith("A_log"):
            heads = tensor.numel()
            tensor = nn.functional.pad(tensor.detach(), (0, -heads % A_LOG_PADDING)) if k3 else tensor.view(1, 1, heads, 1)
        yield _plain(slot.name, tensor, own)
    for name, tensor in model.untouched.items():
        yield _plain(name, tensor, tensor.dtype)


def _plain(name: str, tensor: Tensor, dtype: torch.dtype) -> Planned:
    return Planned(name=name, dtype=dtype, shape=tuple(tensor.shape), pieces=lambda: tensorfile.pieces(tensor, dtype))


def _packed(name: str, tensor: Tensor, rule: str) -> Iterator[Planned]:
    """The two tensors of one packed weight; it is encoded when the first is written and kept until the second is."""
    rows, columns = tensor.shape
    encoded: list[tuple[Tensor, Tensor]] = []

    def packed() -> Iterator[Tensor]:
        encoded.append(encode(tensor, rule))
        yield encoded[0][0]

    def scale() -> Iterator[Tensor]:
        yield encoded.pop()[1] if encoded else encode(tensor)[1]

    yield Planned(name=f"{name}_packed", dtype=torch.uint8, shape=(rows, columns // 2), pieces=packed)
    yield Planned(name=f"{name}_scale", dtype=torch.uint8, shape=(rows, columns // MX_BLOCK), pieces=scale)


def encode(weight: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """MXFP4 codes and scales of a matrix, such that what was read is written again byte for byte.

    The encoder gives an exact -0 the code of +0, as compressed-tensors does; a decoded -0 has code 8, which is put back here.
    """
    weight = weight.detach().cpu()
    packed, scale = mxfp.encode_mxfp4(weight, rule)
    negative_zero = ((weight == 0) & weight.signbit()).to(torch.uint8)
    return (packed | negative_zero[:, 0::2] << 3 | negative_zero[:, 1::2] << 7).contiguous(), scale.contiguous()


def _shards(planned: list[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for item in planned:
        if shards[-1] and size + item.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def _write_json(path: Path, table: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(table, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
