"""The whole system in miniature, some ten minutes on two cores: `gnomon tour`, `make tour`.

Each step does the real thing at a small size and says in a few lines what it shows. What it prints is kept in `tour.html`, its figures
in `tour.json`, and the training run's own report beside them. The same command again goes on where it stopped.
Read next: `recipes/tour.toml` for the run, then whichever step you want to see at full size.
"""

import asyncio
import json
import lzma
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gnomon
from gnomon.agent.demonstration import three_policies
from gnomon.agent.evaluate_reading import shown
from gnomon.data.images import ImageLimits
from gnomon.data.pictures import Pictures, PicturesConfig
from gnomon.data.shards import Shards
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError, SandboxError, TrainingError
from gnomon.kernels import mxfp, native
from gnomon.model.config import ModelConfig, preset
from gnomon.model.generate import Sampling, generate
from gnomon.model.inference import InferenceModel, refuse, runner
from gnomon.model.runs import load_seeing
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained, save_pretrained
from gnomon.plan.scaleup import TIMES, scaled
from gnomon.posttrain.lab.progress import Display
from gnomon.posttrain.lab.recipe import load as load_lab
from gnomon.posttrain.lab.run import run as run_lab
from gnomon.sandbox.branches import two_branches
from gnomon.sandbox.layers import LayerStore
from gnomon.serve.demonstration import converse, describe, in_blocks
from gnomon.serve.runner import TorchRunner
from gnomon.train import metrics
from gnomon.train.checkpoint import load_run
from gnomon.train.evaluate import HeldOut, frozen, held_out, loss_by_position, share_read
from gnomon.train.loop import RunSummary, train
from gnomon.train.material import HELD_OUT_SEED, shard_folders
from gnomon.train.recipe import SourceConfig, TrainRecipe
from gnomon.train.recipe import load as load_recipe
from gnomon.units import format_bytes, format_count, format_dollars, format_flops, format_seconds

PROMPT = '    def __init__(self, name):\n        """'
RELEASED = "k3-2.8t"
WIDTH = 100  # columns at most
DOCUMENT = 1200  # tokens of the text that the served model is asked about
PICTURES = 200  # pictures that the model with an eye is asked about
WINDOW = 128
"""Tokens that a piece of text may see in the comparison that shows what context is worth."""


def run(data: Sequence[Path] | None = None, out: Path = Path("tour"), overrides: Sequence[str] = (), lab: Sequence[str] = (),
        picture: Sequence[str] = ()) -> dict[str, Any]:
    """Do all steps; returns the figures that are also in `OUT/tour.json`.

    `data` replaces the machine's own text, `lab` changes fields of `recipes/lab-slice.toml`, `picture` of `recipes/tour-picture.toml`.
    Raises what its steps raise: `DataError` for unusable text, `ConfigError` for bad overrides.
    """
    began = time.monotonic()
    console = Console(record=True, highlight=False, width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    recipe = _recipe(data, Path(out), overrides)
    figures: dict[str, Any] = {}
    _welcome(console, recipe)
    summary = _train(console, recipe, figures)
    model, tokenizer, recipe = load_run(recipe.run)
    shards = [Shards.open(folder, "held_out") for folder in shard_folders(recipe.run)]
    _positions(console, summary, (model, shards), recipe, figures)
    _compression(console, summary.held_out[0], shards, tokenizer, figures)
    _sample(console, model, tokenizer, figures)
    figures["run"] = str(recipe.run)
    _serve(console, model, tokenizer, shards, figures)
    _picture(console, Path(out), recipe, picture, figures)
    _export(console, model, tokenizer, Path(out), figures, shards)
    _costs(console, recipe.model, recipe.stages[-1].context)
    _scale(console, recipe, figures)
    _sandbox(console, Path(out), figures)
    _agents(console, Path(out), figures)
    _lab(console, Path(out), lab, figures)
    figures["seconds"] = time.monotonic() - began
    _farewell(console, Path(out), recipe.run, figures)
    return figures


def recipe_file(name: str) -> Path:
    """A recipe that ships with gnomon: in the source tree, or inside the installed package."""
    package = Path(gnomon.__file__).parent
    for folder in (package.parents[1] / "recipes", package / "recipes"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"recipe '{name}' is not installed; run from a clone of the repository, or reinstall gnomon")


def _recipe(data: Sequence[Path] | None, out: Path, overrides: Sequence[str]) -> TrainRecipe:
    recipe = load_recipe(recipe_file("tour.toml"), tuple(overrides))
    if any(text.partition("=")[0].strip() == "run" for text in overrides):
        raise ConfigError(f"'run' is '{recipe.run}', but the tour keeps its run inside the folder that --out names; use --out FOLDER")
    if not recipe.data.held_out:
        raise ConfigError("'data.held_out' is 0, but the tour measures on text that it was not trained on; use a share such as 0.04")
    if data:
        recipe = replace(recipe, data=replace(recipe.data, sources=(SourceConfig(paths=tuple(map(str, data))),)))
    return replace(recipe, run=out / "run")


def _step(console: Console, title: str, text: str) -> None:
    console.print()
    console.rule(f"[bold]{title}", align="left")
    console.print(text)


def _welcome(console: Console, recipe: TrainRecipe) -> None:
    model = recipe.model
    kinds = " ".join({"kda": "K", "mla": "M"}.get(kind, "?") for kind in model.layers)
    _step(console, "gnomon: text in, a trained model of the K3 family out", (
        f"The model has {format_count(model.num_parameters())} parameters, {format_count(model.activated_parameters())} of them at work "
        f"for each token. Its {model.num_hidden_layers} layers are {kinds}: K is Kimi Delta Attention, a recurrence with a state of fixed "
        "size; M is gated latent attention. Each sublayer chooses what it reads from earlier blocks (attention residuals), and all layers "
        "but the first send each token to a few of many small experts that work in a latent space. Nothing encodes a position."))
    absent = native.unavailable()
    if absent:
        console.print(f"[yellow]Notice:[/] {absent}. Everything works in plain PyTorch, only slower.")


def _train(console: Console, recipe: TrainRecipe, figures: dict[str, Any]) -> RunSummary:
    contexts = " → ".join(f"{stage.context:,}" for stage in recipe.stages)
    source = ", ".join(recipe.data.sources[0].paths) or "the Python library and the documentation on this machine"
    _step(console, "1  Tokenizer and pre-training", (
        f"Text: {source}. A byte-level BPE is trained on it, then the model, at contexts {contexts}: the optimiser is Per-Head Muon, and "
        "Quantile Balancing sets every router's bias once per step. MaxVio says how far the busiest expert is above the mean "
        "(0 is perfect); watch it stay small from the first steps on."))
    summary = train(recipe)
    tokenizer = Tokenizer.load(recipe.run / "tokenizer")
    rows = metrics.read(recipe.run)
    tail = rows[-max(1, len(rows) // 20) :]
    violation = sum(row["max_violation"] for row in tail) / len(tail)
    figures |= {
        "loss_first": rows[0]["loss"], "loss_last": sum(row["loss"] for row in tail) / len(tail), "max_violation": violation,
        "training_tokens": rows[-1]["tokens"], "training_seconds": sum(row["seconds"] for row in rows),
        "vocabulary": tokenizer.vocab_size, "tokens_per_second": sorted(row["tokens_per_second"] for row in rows)[len(rows) // 2],
    }
    console.print(
        f"{summary.steps} steps, {format_count(rows[-1]['tokens'])} tokens in {format_seconds(figures['training_seconds'])}: loss "
        f"{figures['loss_first']:.2f} → [bold]{figures['loss_last']:.2f}[/] nats per token, MaxVio of the worst layer {violation:.2f}.")
    return summary


def _positions(
    console: Console, summary: RunSummary, trained: tuple[Transformer, Sequence[Shards]], recipe: TrainRecipe, figures: dict[str, Any]
) -> None:
    longest = max(stage.context for stage in recipe.stages)
    _step(console, "2  Longer than it was trained", (
        f"Held-out documents, loss by position. Training never went beyond {longest:,} tokens. A model with encoded positions would have "
        f"to be recalibrated there; this one has none, so the curve just goes on. What the context is worth: the same tokens once more, in "
        f"pieces of {WINDOW} tokens that do not see each other."))
    results = [result for result in summary.held_out if result.by_position]
    figures["held_out"] = [result.row() for result in summary.held_out]
    if not results:
        console.print("No held-out document is long enough for this text; give more or longer files with --data.")
        return
    widest = max(results, key=lambda result: result.context)
    pieces = loss_by_position(*trained, widest.context, recipe.evaluate.tokens, window=WINDOW)
    figures["held_out_in_pieces"] = {"window": WINDOW, "context": widest.context, "by_position": pieces}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("position in the document", "nats per token", "in pieces", "worth"):
        table.add_column(name, justify="right")
    table.add_column("")
    for (low, high, loss, _), (_, _, cut, _) in zip(widest.by_position, pieces, strict=True):
        beyond = "  beyond the trained length" if low >= longest else ""
        bar = Text.assemble(("█" * round(max(0.0, cut - loss) * 40), "cyan"), (beyond, "dim"))
        table.add_row(f"{low:,} to {high - 1:,}", f"{loss:.3f}", f"{cut:.3f}", f"{cut - loss:+.3f}", bar)
    console.print(table)


def _compression(console: Console, result: HeldOut, shards: Sequence[Shards], tokenizer: Tokenizer, figures: dict[str, Any]) -> None:
    text = b"".join(tokenizer.decode_bytes(part[index].tolist()) for part in shards for index in range(len(part)))
    packed = 8 * len(lzma.compress(text, preset=9)) / len(text)
    figures |= {"bits_per_byte": result.bits_per_byte, "xz_bits_per_byte": packed, "held_out_bytes": len(text)}
    _step(console, "3  Prediction is compression", (
        f"The held-out text is {format_bytes(len(text))}. A model that predicts well could store it in few bits. The model: "
        f"[bold]{result.bits_per_byte:.2f}[/] bits per byte (its own size not counted). `xz -9` on the same bytes: [bold]{packed:.2f}[/]. "
        "xz may repeat what it saw earlier in the same file, the model saw other documents before; neither has seen these."))


def _sample(console: Console, model: Transformer, tokenizer: Tokenizer, figures: dict[str, Any]) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=160)
    tokens = list(generate(runner(model), tokenizer.encode(PROMPT), sampling, frozenset(tokenizer.stop_ids)))
    figures["sample"] = tokenizer.decode(tokens)
    _step(console, "4  What it writes", "One token at a time over states of fixed size and a small cache. Prompt dim, continuation bright:")
    console.print(Text.assemble((PROMPT, "dim"), (figures["sample"], "bold")))


def _serve(console: Console, model: Transformer, tokenizer: Tokenizer, shards: Sequence[Shards], figures: dict[str, Any]) -> None:
    """A conversation with the engine behind `gnomon serve`. The last request is the fork again, without the cache: the same tokens."""
    document = tokenizer.decode(max((shards[0][i] for i in range(len(shards[0]))), key=len)[:DOCUMENT].tolist())
    serving = TorchRunner(model) if refuse(model.config) else InferenceModel.from_transformer(model, "fp32")
    rows = converse(serving, tokenizer, document)
    _step(console, "5  Served: ask, go on, fork, and see what was known", (
        "Each layer's state is kept at the ends of turns and on a grid, so whoever comes back to any point of a conversation, in any "
        "branch, computes only what is new there. Nothing is approximated: the fork says the same, token for token, without the cache."))
    table = Table(box=None, header_style="dim")
    for name, justify in (("request", "left"), ("prompt", "right"), ("cached", "right"), ("first token", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(row.what, f"{row.prompt_tokens:,}", f"[bold]{row.cached_tokens:,}[/]", format_seconds(row.first_token_seconds))
    console.print(table)
    console.print(f"gnomon serve {figures['run']} puts the APIs of OpenAI and Anthropic and a chat page before it.")
    figures["served"] = [[row.what, row.prompt_tokens, row.cached_tokens, row.first_token_seconds] for row in rows]
    figures["cached_equals_uncached"] = rows[3].answer == rows[5].answer


def _picture(console: Console, out: Path, recipe: TrainRecipe, overrides: Sequence[str], figures: dict[str, Any]) -> None:
    """The text model gets an eye, learns to name a shape and its colour, and is asked about pictures that it was not trained on."""
    seeing = load_recipe(recipe_file("tour-picture.toml"), tuple(overrides))
    data = replace(seeing.data, sources=(*recipe.data.sources, seeing.data.sources[-1]), held_out=recipe.data.held_out,
                   cache=recipe.data.cache or recipe.run / "data")
    model = replace(recipe.model, vision=seeing.model.vision)
    seeing = replace(seeing, run=out / "picture", start_from=recipe.run, data=data, model=model)
    _step(console, "6  Pictures described", (
        f"The same model gets an eye of {format_count(model.vision_parameters())} parameters, a small MoonViT with its projector. It is "
        f"trained for {seeing.total_steps} steps by the same loss on text and on conversations about shapes that a program draws."))
    train(seeing)
    eye, _ = load_seeing(seeing.run)
    text, tokenizer = eye.language_model, Tokenizer.load(seeing.run / "tokenizer")
    held = Pictures(tokenizer, PicturesConfig(kinds=("shape",), chat=1.0, seed=HELD_OUT_SEED), ImageLimits())
    with frozen(text):
        share = share_read(eye, held, PICTURES)
    serving = TorchRunner(text) if refuse(text.config) else InferenceModel.from_transformer(text, "fp32")
    answers = describe(serving, eye, tokenizer, tasks := [held.sample(index).shown for index in range(2)])
    figures["pictures"] = {"right": share, "asked": PICTURES, "answers": answers, "shown": [task.answer for task in tasks]}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row(*(in_blocks(part) for task in tasks for part in task.parts if isinstance(part, Image.Image)))
    table.add_row(*(Text(answer, "bold") for answer in answers))
    table.add_row(*("right" if said == task.answer else f"wrong: {task.answer}" for said, task in zip(answers, tasks, strict=True)))
    console.print(table)
    console.print(f"Of {PICTURES} pictures that it never saw it names [bold]{share:.0%}[/] without a mistake. A longer run reads lines of "
                  "twelve letters and names scenes: gnomon train recipes/pictures.toml (docs/vision.md)")


def _export(
    console: Console, model: Transformer, tokenizer: Tokenizer, out: Path, figures: dict[str, Any], shards: Sequence[Shards]
) -> None:
    folder = out / "export"
    save_pretrained(model, folder, dtype=torch.bfloat16, tokenizer=tokenizer)
    reloaded = load_pretrained(folder, dtype=torch.float32)
    expected = as_stored(model)
    tokens = torch.from_numpy(shards[0][0][:256].astype("int64")).unsqueeze(0)
    with torch.no_grad():
        difference = (reloaded(tokens) - expected(tokens)).abs().max().item()
    context = min(512, shards[0][0].size)
    before, after = (held_out(m, shards, tokenizer, max(2, context), 32_768).loss for m in (model, reloaded))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    figures |= {"export_difference": difference, "loss_before_rounding": before, "loss_after_rounding": after, "export_bytes": stored}
    _step(console, "7  Out into the world", (
        f"The run is written in the released K3 layout to {folder}: experts as MXFP4 (4 bits and a shared scale per 32 weights), the rest "
        f"bf16, {format_bytes(stored)} in all. Read back, its logits differ from those of the rounded model in memory by "
        f"[bold]{difference:g}[/]. Rounding moved the held-out loss from {before:.4f} to {after:.4f}; training with that rounding in view "
        "is what post-training adds."))


@torch.no_grad()
def as_stored(model: Transformer) -> Transformer:
    """A copy whose weights have the values that the released layout can hold: MXFP4 experts, fp32 where the release has it, else bf16."""
    copy = Transformer(model.config)
    storage = {spec.name.replace(".{}", "").removesuffix(".weight") if "{}" in spec.name else spec.name: spec.storage
               for spec in model.config.tensors()}
    values = {}
    for name, value in model.state_dict().items():
        kind = storage[name]
        if kind == "mxfp4":
            value = mxfp.fake_mxfp4(value)
        values[name] = value.bfloat16().float() if kind == "bf16" else value
    copy.load_state_dict(values)
    return copy.eval()


def _costs(console: Console, toy: ModelConfig, context: int) -> None:
    _step(console, "8  The same shape, a million times larger", "What this model costs beside the released one, from the same formulas:")
    rows = {
        "parameters": lambda c: format_count(c.num_parameters()),
        "at work per token": lambda c: format_count(c.activated_parameters()),
        "experts per token": lambda c: f"{c.moe.num_experts_per_token} of {c.moe.num_experts}" if c.moe else "none",
        f"forward pass per token at {context:,}": lambda c: format_flops(c.flops_per_token(context)),
        "cache per token of context": lambda c: format_bytes(c.kv_bytes_per_token()),
        "state per sequence": lambda c: format_bytes(c.state_bytes()),
        "checkpoint": lambda c: format_bytes(c.checkpoint_bytes()),
    }
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("", "this model", "Kimi K3"):
        table.add_column(name, justify="left" if not name else "right")
    released = preset(RELEASED)
    for label, figure in rows.items():
        table.add_row(label, figure(toy), figure(released))
    console.print(table)


def _scale(console: Console, recipe: TrainRecipe, figures: dict[str, Any]) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    larger = scaled(recipe.model, recipe.stages[0].context, (figures["training_tokens"], figures["tokens_per_second"]), memory)
    here = larger.rows[0]
    figures["hundredfold"] = {row.machine: {"seconds": row.seconds.value, "memory_bytes": row.memory_bytes, "wall": row.wall}
                              for row in larger.rows}
    _step(console, f"9  What would {TIMES} times as much take?", (
        f"{TIMES} times the compute of this run: {format_count(larger.model.activated_parameters())} parameters at work on "
        f"{format_count(larger.tokens)} tokens. On this machine [bold]{here.wall}[/] is the wall that comes first, by the speed just "
        f"measured; memory would be {here.memory_share:.0%} full."))
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("", "time", "80 % band", "memory", "money", "wall"):
        table.add_column(name, justify="left" if name in ("", "wall") else "right")
    for row in larger.rows:
        band = f"{format_seconds(row.seconds.low)} to {format_seconds(row.seconds.high)}"
        money = format_dollars(row.dollars.value) if row.dollars is not None else ""
        table.add_row(row.machine, format_seconds(row.seconds.value), band, format_bytes(row.memory_bytes), money, row.wall)
    console.print(table)
    console.print("Any other question: gnomon plan train --hardware h200:8 --model 1B time=7d (docs/planner.md)")


def _sandbox(console: Console, out: Path, figures: dict[str, Any]) -> None:
    try:
        seen = asyncio.run(two_branches(LayerStore(out / "sandboxes")))
    except SandboxError as error:
        _step(console, "10  An isolated machine, forked", f"Left out: {error}")
        return
    figures["sandbox"] = {"backend": seen.backend, "reward": seen.reward, "fork_seconds": seen.fork_seconds}
    _step(console, "10  An isolated machine, forked", (
        f"An agent's work needs a machine that it may break. Here is one ({seen.backend}, {seen.isolation} isolation), paused in "
        f"{seen.pause_seconds * 1e3:.1f} ms while the model thinks, then forked twice in {seen.fork_seconds * 1e3:.0f} ms. One branch is "
        f"wrecked: {seen.files_wrecked} of {seen.files_before} files left. The other is graded: reward [bold]{seen.reward:g}[/]. The "
        f"original still has {seen.files_after}. Yours: gnomon sandbox run -- python3 -c 'print(6 * 7)' (docs/sandbox.md)"))


def _agents(console: Console, out: Path, figures: dict[str, Any]) -> None:
    title = "11  An agent acts, a verifier decides"
    try:
        results = asyncio.run(three_policies(out / "agents", LayerStore(out / "sandboxes")))
    except SandboxError as error:
        _step(console, title, f"Left out: {error}")
        return
    figures["agents"] = {row.id: row.reward for row in results.rows}
    _step(console, title, (
        "Three policies are asked to mend a program, each in a machine of its own through the same harness. Then a test that none of them "
        "saw runs in a fresh machine, into which only their work is carried: a reward that was written beforehand is worth nothing. Where "
        "the test itself breaks there is no score, which is not 0 and is in no mean."))
    table = Table(box=None, header_style="dim")
    for name in ("policy", "says at the end", "turns", "reward", "broken test"):
        table.add_column(name, justify="left" if name.startswith(("policy", "says")) else "right")
    ends = {"mends": "It divided by one too many.", "cheats": "Mended; the reward is 1.", "talks": "Mended."}
    for policy, last in ends.items():
        judged, unjudged = [row for row in results.rows if row.column.policy == policy]
        table.add_row(policy, last, str(judged.turns), f"[bold]{shown(judged.reward)}[/]", shown(unjudged.reward))
    console.print(table)
    console.print(f"Each attempt turn by turn: {out / 'agents' / 'index.html'}. Yours: gnomon eval recipes/eval.toml (docs/agents.md)")


def _lab(console: Console, out: Path, overrides: Sequence[str], figures: dict[str, Any]) -> None:
    title = "12  Thinking at three efforts, three experts, one student"
    recipe = replace(load_lab(recipe_file("lab-slice.toml"), tuple(overrides)), run=out / "lab")
    _step(console, title, (
        f"Another model, {format_count(recipe.model.num_parameters())} parameters: it learns to look into boxes before it throws one away. "
        "First from demonstrations, whose length owes nothing to the effort they state; then the gate asks whether looking longer helps; "
        "then reinforcement makes an expert of each effort, with a budget beyond which an answer is worth -1; then a student learns from "
        "all three what its prompt asks for. What routed experts compute is rounded to MXFP4 and MXFP8 all the while, as it is served."))
    try:
        with Display(Console(stderr=True, highlight=False)) as display:
            page = run_lab(recipe, display)
    except (SandboxError, TrainingError) as error:
        console.print(f"Left out: {error}")
        return
    found = json.loads((recipe.run / "report.json").read_text(encoding="utf-8"))["seeds"][0]
    figures["lab"] = {name: {who: [each["accuracy"], each["tokens"], each["score"]] for who, each in cell.items()}
                      for name, cell in found["cells"].items()}
    table = Table(box=None, header_style="dim")
    for name in ("cell", "cold start", "expert", "student"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for name, cell in figures["lab"].items():
        table.add_row(name, *(f"{cell[who][0]:.2f} at {cell[who][1]:.1f} tokens" for who in ("gate", "teacher", "student")))
    console.print(table)
    console.print(f"Curves and the rest: {page}. All three domains, and what nine experts are worth beside one mixed run: "
                  "gnomon lab recipes/lab.toml (docs/posttraining.md)")


def _farewell(console: Console, out: Path, run_folder: Path, figures: dict[str, Any]) -> None:
    _step(console, "Done", (
        f"{format_seconds(figures['seconds'])}. Look at {run_folder / 'report.html'} (curves, load of the experts, depth reads), then:\n"
        f"  gnomon sample {run_folder} --prompt 'import '\n  gnomon show {run_folder}\n  gnomon kernels"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "tour.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (out / "tour.html").write_text(console.export_html(), encoding="utf-8")
