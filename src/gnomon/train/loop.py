"""The pre-training loop, from recipe to report; read it from top to bottom (report §3, §2.5).

A step: the micro-batches add up gradients and router counts; gradients are clipped; the routers get their next bias; Muon steps;
QK-Clip looks at the logits. Everything is a function of the step number and of state that checkpoints hold, so a run that was
killed goes on with the same losses to the last bit. Under torchrun each rank takes its rows of the same global batch.
Read next: `muon.py`, `balance.py`, `checkpoint.py`.
"""

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon import config as toml
from gnomon import whole
from gnomon.data.packing import Batch, PackedBatches
from gnomon.errors import CheckpointError, ConfigError, TrainingError
from gnomon.model.balance import max_violation
from gnomon.model.multimodal import Multimodal
from gnomon.model.transformer import Transformer
from gnomon.parallel.axes import ROWS, TOKENS
from gnomon.parallel.mesh import Mesh, join
from gnomon.parallel.pipeline import Work
from gnomon.parallel.roll import named
from gnomon.parallel.rows import Rows
from gnomon.train import activations, balance, checkpoint, checkpoint_rows, ranks, report, scattered
from gnomon.train import eye as eyes
from gnomon.train.evaluate import HeldOut, buckets, frozen, held_out
from gnomon.train.material import Material, long_questions, prepare, stream
from gnomon.train.metrics import Metrics, read
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective
from gnomon.train.progress import Display
from gnomon.train.qk_clip import clip_logits, watch
from gnomon.train.recipe import TrainRecipe
from gnomon.train.units import head_rows

PICTURES = 64
"""Pictures of each kind that are asked about in the middle of a run, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What a run came to. `held_out` has one entry per evaluated context length, none without held-out text."""

    run: Path
    steps: int
    tokens: int
    loss: float
    seconds: float
    resumed_at: int
    held_out: tuple[HeldOut, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run works with; all state of the run is in them. `eye` is `model` with tower and projector, where it sees."""

    recipe: TrainRecipe
    material: Material
    mesh: Mesh
    spread: ranks.Spread
    model: Transformer
    objective: Objective
    optimizer: Muon
    batches: PackedBatches
    eye: Multimodal | None = None


def train(recipe: TrainRecipe, *, resume: bool = True, quiet: bool = False) -> RunSummary:
    """Train as the recipe says, or go on where its run folder stands; returns when the report is written.

    `resume=False` refuses a folder that already has a checkpoint. Raises `ConfigError` for a recipe that does not fit its folder or
    its data, `TrainingError` for a loss that is not finite, `CheckpointError` when a checkpoint cannot be read or written.
    """
    with join(None if recipe.device == "auto" else recipe.device, recipe.mesh) as mesh, named(mesh.roll):
        return _train_on(mesh, recipe, resume=resume, quiet=quiet)


def _train_on(mesh: Mesh, recipe: TrainRecipe, *, resume: bool, quiet: bool) -> RunSummary:
    """The run itself. What belongs to it is gone when the ranks part, since it holds on to their connection."""
    show = mesh.is_main and not quiet
    with Display(recipe.total_steps, show=show) as display:
        _check(recipe, mesh, resume)
        material = prepare(recipe, mesh, display.say, show_progress=show)
        parts = build(material, mesh)
        start, offset = restore(parts)
        if mesh.is_main:
            _write_recipe(parts.recipe)
        with _little_garbage():
            return run_steps(parts, start, offset, display)


@contextmanager
def _little_garbage() -> Iterator[None]:
    """What exists when the steps begin stays until they end: the collector need not walk through it after every few of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def build(material: Material, mesh: Mesh) -> Parts:
    """Model, objective, optimiser and batches of a run that starts."""
    recipe = material.recipe
    torch.manual_seed(recipe.seed)
    model = Transformer(recipe.model).initialise(recipe.seed).to(mesh.device)
    eye = eyes.open_eye(model, recipe.seed)
    if recipe.start_from is not None and checkpoint.latest(recipe.run) is None:  # a run that goes on needs its own folder only
        _start_from(model, eye, recipe.start_from)
    activations.attach(model, recipe.activations)
    spread = ranks.spread(model, mesh, eye)
    model.activation_checkpointing = recipe.activation_checkpointing == "block"
    balance.start(model.routers(), recipe.balance)
    if recipe.optimizer.clip_logits is not None:
        watch(model.mla_layers())
    auxiliary = recipe.balance.auxiliary_weight if recipe.balance.method == "auxiliary" else 0.0
    objective = Objective(model, auxiliary, recipe.precision == "bf16", eye)
    optimizer = Muon(spread.parameters(model, eye), recipe.optimizer, head_rows(recipe.model), spread.owners)
    return Parts(recipe=recipe, material=material, mesh=mesh, spread=spread, model=model, objective=objective, optimizer=optimizer,
                 batches=stream(material, mesh), eye=eye)


def run_steps(parts: Parts, start: int, offset: int, display: Display) -> RunSummary:
    """All steps from `start`, then the evaluation and the report."""
    recipe, mesh, began = parts.recipe, parts.mesh, time.monotonic()
    row: dict[str, Any] = {}
    display.start(start)
    with Metrics(recipe.run, offset, start) if mesh.is_main else nullcontext() as metrics:
        if metrics is not None and metrics.board_missing:
            display.say("tensorboard is not installed: metrics go to metrics.jsonl only (pip install 'gnomon[board]')")
        saved_at = time.monotonic()
        for step in range(start, recipe.total_steps):
            row = take_step(parts, step)
            if recipe.evaluate.every and (step + 1) % recipe.evaluate.every == 0 and step + 1 < recipe.total_steps:
                row |= evaluate(parts, recipe.stage_at(step)[1].context)
            display.step(row)
            if metrics is not None:
                metrics.write(row)
            if mesh.agree(_is_due(recipe, step + 1, time.monotonic() - saved_at)):
                save(parts, step + 1, metrics)
                saved_at = time.monotonic()
    whole = parts.spread.whole_model(parts.model)
    results = tuple(_final_evaluation(parts, whole, display))
    if whole is not None:
        (recipe.run / "held_out.json").write_text(json.dumps([result.row() for result in results], indent=1) + "\n")
        report.write(recipe.run, whole, parts.material, results)
        display.say(f"report: {recipe.run / 'report.html'}")
    mesh.wait()
    last = row or read(recipe.run)[-1]
    return RunSummary(run=recipe.run, steps=recipe.total_steps, tokens=last["tokens"], loss=last["loss"], held_out=results,
                      seconds=time.monotonic() - began, resumed_at=start)


def take_step(parts: Parts, step: int) -> dict[str, Any]:
    """One optimiser step; returns its row of metrics."""
    began, recipe, mesh = time.perf_counter(), parts.recipe, parts.mesh
    index, stage = recipe.stage_at(step)
    weights = stage.weights or tuple(source.weight for source in recipe.data.sources)
    parts.batches.set_stage(batch_size=recipe.batch_tokens // stage.context, context=stage.context,
                            long_exponent=stage.long_exponent, weights=weights)
    if mesh.roll is not None:
        mesh.roll.mark(step + 1)
    whole = parts.batches.next()
    pieces = [piece.to(mesh.device) for piece in whole.split(recipe.micro_batches(stage.context, mesh.size(*ROWS)))]
    losses, count = backward(parts, pieces)
    total = torch.stack(losses).double().sum()
    mesh.sum(total)
    loss, norm = total.item() / count, parts.optimizer.clip_gradient(None if mesh.world == 1 else parts.spread.norm).item()
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise TrainingError(_why_not_finite(parts, step, pieces, losses, loss, norm))
    loads = parts.spread.of_all_layers(balance.update_balance(parts.model.routers(), recipe.balance, lambda t: mesh.sum(t, *TOKENS)))
    rate = recipe.optimizer.learning_rate * recipe.schedule.factor(step, recipe.total_steps)
    parts.optimizer.step(rate)
    parts.spread.publish()
    row: dict[str, Any] = {"step": step + 1, "stage": index, "context": stage.context, "loss": loss, "learning_rate": rate}
    if recipe.optimizer.clip_logits is not None and "mla" in recipe.model.layers:
        row["max_logit"] = _clip(parts, recipe.optimizer.clip_logits)
    violations = max_violation(loads).tolist() if loads.numel() else []
    seconds = time.perf_counter() - began
    return row | {
        "gradient_norm": norm, "max_violation": max(violations, default=0.0), "max_violation_by_layer": [round(v, 4) for v in violations],
        "tokens": parts.batches.num_tokens, "seconds": seconds, "tokens_per_second": recipe.batch_tokens / seconds,
    }


def _clip(parts: Parts, threshold: float) -> float:
    """Shrink heads whose logits grew too large; returns the largest of all layers."""
    seen = clip_logits(parts.model.mla_layers(), threshold, lambda t: parts.mesh.max(t, *TOKENS)).to(parts.mesh.device)
    largest = torch.cat([seen, seen.new_full((1,), float("-inf"))]).max()
    parts.mesh.max(largest, "pipeline")
    return largest.item()


def backward(parts: Parts, pieces: list[Batch]) -> tuple[list[Tensor], int]:
    """Gradients of the step's loss from the micro-batches of all ranks; this rank's summed losses, and the learnt targets of all."""
    pipeline = parts.spread.pipeline
    losses: list[Tensor] = []
    learnt = torch.stack([piece.loss_mask.sum() for piece in pieces]).sum()
    parts.mesh.sum(learnt, *ROWS)
    count = max(1, int(learnt))
    parts.optimizer.zero_grad()
    if pipeline is not None:
        losses, pieces = pipeline.run(_stage_work(parts, pieces, count)), []
        parts.spread.arm()
    for index, piece in enumerate(pieces):
        loss, total = parts.objective(parts.spread.own(piece), count)
        if index + 1 == len(pieces):
            parts.spread.arm()
        loss.backward()
        losses.append(total)
    parts.spread.finish()
    return losses, count


def _stage_work(parts: Parts, pieces: list[Batch], count: int) -> Work:
    """What the stages of a pipeline do with a step's micro-batches."""
    objective = parts.objective
    return Work(pieces=pieces, own=parts.spread.own, loss=lambda hidden, batch: objective.of_hidden(hidden, batch, count),
                precision=lambda: objective.precision(parts.mesh.device))


def _why_not_finite(parts: Parts, step: int, pieces: list[Batch], losses: list[Tensor], loss: float, norm: float) -> str:
    bad = [i for i, total in enumerate(losses) if not torch.isfinite(total)]
    piece = pieces[bad[0] if bad else 0]
    start = parts.material.tokenizer.decode(piece.tokens[0, :24].tolist())
    saved = checkpoint.latest(parts.recipe.run)
    return (f"step {step + 1}: loss {loss}, gradient norm {norm}, in batch {parts.batches.num_batches} "
            f"(context {piece.tokens.shape[1]}, tokens up to {parts.batches.num_tokens:,} of the stream; "
            f"{'bad' if bad else 'first'} micro-batch begins {start!r}); last good checkpoint: {saved or 'none yet'}; "
            "lower optimizer.learning_rate or look at that text, then start the same command again")


def save(parts: Parts, step: int, metrics: Metrics | None) -> None:
    """Write the checkpoint after `step` steps: one rank writes files of whole tensors, several write what each of them holds."""
    state = {"data": parts.batches.state(), "metrics_bytes": 0 if metrics is None else metrics.sync(), "seed": parts.recipe.seed}
    if parts.mesh.world > 1:
        checkpoint_rows.save(parts.recipe.run, step, state, _rows(parts), parts.recipe.checkpoint.keep, parts.mesh)
        return
    tensors = {"model": checkpoint.model_tensors(parts.model), "optimizer": parts.optimizer.state_dict(), "run": _random(parts)}
    checkpoint.save(parts.recipe.run, step, state, tensors | eyes.tensors(parts.eye), parts.recipe.checkpoint.keep)


def _random(parts: Parts) -> dict[str, Tensor]:
    run: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if parts.mesh.device.type == "cuda":
        run["random.cuda"] = torch.cuda.get_rng_state()
    return run


def _rows(parts: Parts) -> dict[str, dict[str, Rows]]:
    """What this rank holds of the run, by group and name; the states of the optimiser go by kind and parameter."""
    spread, states = parts.spread, parts.optimizer.state_dict()
    return {"model": {name: spread.rows(name, tensor) for name, tensor in checkpoint.model_tensors(parts.model).items()},
            "optimizer": {name: spread.rows(name.partition(".")[2], tensor, state=True) for name, tensor in states.items()},
            "run": {name: Rows.of(tensor) for name, tensor in _random(parts).items()},
            **{group: {name: Rows.of(tensor) for name, tensor in named.items()} for group, named in eyes.tensors(parts.eye).items()}}


def restore(parts: Parts) -> tuple[int, int]:
    """Take over the newest checkpoint of the run folder; returns the steps done and the metrics' length, zeros for a new run."""
    path = checkpoint.latest(parts.recipe.run)
    if path is None:
        return 0, 0
    if parts.mesh.world > 1:
        held = _rows(parts)
        held["run"].pop("random.cuda", None)  # nothing is drawn on a device
        state = checkpoint_rows.fill(path, held)
        parts.optimizer.steps = int(held["optimizer"]["steps"].local)
        run: Mapping[str, Tensor] = {name: rows.local for name, rows in held["run"].items()}
    else:
        saved = checkpoint.load(path)
        checkpoint.restore_model(parts.model, saved.tensors["model"], path)
        eyes.restore(parts.eye, saved, path)
        parts.optimizer.load_state_dict(saved.tensors["optimizer"])
        state, run = saved.state, saved.tensors["run"]
    parts.batches.restore(state["data"])
    torch.set_rng_state(run["random.cpu"])
    if parts.mesh.device.type == "cuda" and "random.cuda" in run:
        torch.cuda.set_rng_state(run["random.cuda"])
    return state["step"], state["metrics_bytes"]


def evaluate(parts: Parts, context: int) -> dict[str, float]:
    """Held-out loss, and shares of pictures read, in the middle of a run, as metrics; the first rank's work."""
    model = parts.spread.whole_model(parts.model) if parts.material.held_out else None
    if model is None:
        return {}
    result = held_out(model, parts.material.held_out, parts.material.tokenizer, context, parts.recipe.evaluate.tokens)
    found = {"held_out_loss": result.loss, "held_out_bits_per_byte": result.bits_per_byte}
    if parts.eye is not None:
        read = eyes.read_pictures(eyes.around(parts.eye, model), parts.material, min(PICTURES, parts.recipe.evaluate.pictures))
        found |= {f"pictures_{kind}": share for kind, (share, _) in read.items()}
    return found


def _final_evaluation(parts: Parts, model: Transformer | None, display: Display) -> list[HeldOut]:
    if model is None or not parts.material.held_out:
        return []
    results, questions = [], long_questions(parts.material)
    eye = None if parts.eye is None else eyes.around(parts.eye, model)
    for context in parts.recipe.evaluation_contexts():
        display.say(f"held-out text at context {context}")
        found = held_out(model, parts.material.held_out, parts.material.tokenizer, context, parts.recipe.evaluate.tokens)
        with frozen(model):
            samples = max(1, parts.recipe.evaluate.tokens // context)
            answers = scattered.ask(model, questions, context, samples, eye)
        results.append(replace(found, answers=scattered.share(answers), kinds=scattered.by_kind(answers),
                               distances=scattered.by_distance(answers, buckets(context))))
    if eye is not None and results:
        display.say("held-out pictures")
        results[0] = replace(results[0], pictures=eyes.read_pictures(eye, parts.material, parts.recipe.evaluate.pictures))
    return results


def _is_due(recipe: TrainRecipe, done: int, seconds: float) -> bool:
    every = recipe.checkpoint
    by_step, by_time = every.every_steps and done % every.every_steps == 0, every.every_seconds and seconds >= every.every_seconds
    return bool(by_step or by_time or done == recipe.total_steps)


def _check(recipe: TrainRecipe, mesh: Mesh, resume: bool) -> None:
    """What can be known before anything is prepared."""
    for stage in recipe.stages:
        recipe.micro_batches(stage.context, mesh.size(*ROWS))
    path, existing = checkpoint.latest(recipe.run), recipe.run / "recipe.toml"
    if path is not None and not resume:
        raise ConfigError(f"run folder '{recipe.run}' already has {path.name}; choose another with run=FOLDER, or resume")
    if path is not None and existing.exists():
        _check_same(checkpoint.read_recipe(recipe.run), recipe)
    if mesh.is_main:
        try:
            recipe.run.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"'run' is '{recipe.run}', but there is a file in its place; choose another folder with run=FOLDER") from None
    mesh.wait()


def _check_same(before: TrainRecipe, now: TrainRecipe) -> None:
    """A resumed run keeps its model and seed; the rest may be changed on purpose."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    filled = {name: getattr(before.model, name) for name in ids if getattr(now.model, name) is None}
    old, new = toml.to_dict(before.model), toml.to_dict(replace(now.model, **filled))
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    changed = [f"model.{name}: {old.get(name)!r} → {new.get(name)!r}" for name in names]
    if before.seed != now.seed:
        changed.append(f"seed: {before.seed} → {now.seed}")
    if changed:
        raise ConfigError(f"run folder '{now.run}' was trained with another model ({'; '.join(changed)}); "
                          "undo the change, or start a new run with run=FOLDER")


def _start_from(model: Transformer, eye: Multimodal | None, run: Path) -> None:
    path = checkpoint.latest(run)
    if path is None:
        raise CheckpointError(f"'start_from' names {run}, which has no checkpoint")
    saved = checkpoint.load(path)
    checkpoint.restore_model(model, saved.tensors["model"], path)
    if eyes.EYE in saved.tensors:  # a run on text alone may be the start of one that learns to see
        eyes.restore(eye, saved, path)


def _write_recipe(recipe: TrainRecipe) -> None:
    whole.write(recipe.run / "recipe.toml", toml.to_toml(recipe, docs=True))
