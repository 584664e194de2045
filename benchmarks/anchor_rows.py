"""Published speeds, times and costs beside what the planner says of the same conditions; `planner_anchors.py` prints and judges them.

Each row names its group: one stack on one fabric, which is what one calibration record is for. Rows marked `calibrates` are what a record
of the group is fitted to in the second pass; they are not judged there. Where a publication leaves a condition open, the row says what is
taken. Acceptance of drafts is an input here, as prompts are: it is a property of texts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from silicon_rows import FAMILIES

from gnomon.model.config import ModelConfig
from gnomon.plan.calibration import Record
from gnomon.plan.cost import Deployment, decode, deployment, message_seconds, read_prompt
from gnomon.plan.exchange import exchanges
from gnomon.plan.families import all_mla, family
from gnomon.plan.hardware import Cluster, device
from gnomon.plan.serving import Throughput, serve
from gnomon.plan.traffic import flops
from gnomon.plan.training import train
from gnomon.plan.workload import Layout, Precision, Serving, Speculation, Training

K3, LINEAR, V3, K2 = (family(name).config for name in ("k3", "kimi-linear", "deepseek-v3", "kimi-k2"))
RELEASED = Precision.released(K3)
FP8KV = replace(RELEASED, kv="fp8")
FP8 = Precision(experts="fp8", rest="fp8", kv="bf16", activations="fp8")
NVFP4 = Precision(experts="nvfp4", rest="bf16", kv="fp8", activations="nvfp4")
EIGHT = Layout(tensor=8)
DEALT = Layout(tensor=8, kv_shards=8)
DSPARK = Speculation(drafts=7)
CHAT = Serving(prompt=8192, output=1024, concurrency=1, waves=1)
ONE = Serving(prompt=1024, output=1024, concurrency=1)


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """One published figure and how the planner gets it from a group's record."""

    id: str
    what: str
    measured: float
    unit: str
    predict: Callable[[Record], float]
    group: str = "none"
    test: str = "C"
    band: tuple[float, float] | None = None   # published as a range: inside it there is no miss
    calibrates: str = ""      # "decode" or "training": what of the group's record this row is fitted to
    taken: str = ""           # conditions that the publication leaves open
    date: str = "2026-07"     # of the measurement: fixed times shrink


def on(cluster: str, layout: Layout, precision: Precision, config: ModelConfig = K3) -> Callable[[Record], Deployment]:
    """A deployment that waits for its record."""
    return lambda record: deployment(config, Cluster.parse(cluster), layout, precision, record)


def milliseconds(plan: Callable[[Record], Deployment], work: Serving) -> Callable[[Record], float]:
    """Time per token of one user, ms."""
    return lambda record: 1e3 * serve(plan(record), work).time_per_token.value


def speed(plan: Callable[[Record], Deployment], work: Serving) -> Callable[[Record], float]:
    """Tokens per second of one user."""
    return lambda record: serve(plan(record), work).speed.value


def first(plan: Callable[[Record], Deployment], work: Serving) -> Callable[[Record], float]:
    """Time to the first token, ms."""
    return lambda record: 1e3 * serve(plan(record), work).first_token.value


def written(plan: Callable[[Record], Deployment], work: Serving) -> Callable[[Record], float]:
    """Tokens written per second by all users, the time to their first tokens included."""
    return lambda record: work.concurrency * work.output_tokens / serve(plan(record), work).request_seconds.value


def ratio(above: Callable[[Record], float], below: Callable[[Record], float]) -> Callable[[Record], float]:
    """A quotient of two predictions: errors of the record itself fall out."""
    return lambda record: above(record) / below(record)


def at_speed(plan: Callable[[Record], Deployment], work: Serving, target: float) -> Callable[[Record], Throughput]:
    """What a deployment delivers at the load that gives each user a speed."""
    def find(record: Record) -> Throughput:
        made, low, high = plan(record), 1.0, 4096.0
        for _ in range(24):
            middle = (low * high) ** 0.5
            found = serve(made, replace(work, concurrency=max(1, round(middle))))
            low, high = (middle, high) if found.speed.value > target and found.running >= 0.98 * middle else (low, middle)
        return serve(made, replace(work, concurrency=max(1, round(low))))
    return find


def k3_serving() -> list[Anchor]:
    """K3 under SGLang and vLLM on NVLink 5."""
    b300, gb300 = on("b300:8", EIGHT, FP8KV), on("gb300:8", EIGHT, FP8KV)
    burst = "one burst: the times to first tokens are those of half of all prompts"
    rows = [Anchor(id="K26", what=f"time per token, {c} in flight", measured=value, unit="ms", group="sglang NVLink", taken=burst,
                   predict=milliseconds(b300, replace(CHAT, concurrency=c)), calibrates="decode" if c != 16 else "")
            for c, value in ((1, 8.51), (16, 19.47), (64, 40.19))]
    rows += [Anchor(id="K27", what=f"first token, {c} in flight", measured=value, unit="ms", group="sglang NVLink", taken=burst,
                    predict=first(b300, replace(CHAT, concurrency=c)), calibrates="first" if c == 64 else "")
             for c, value in ((1, 378.0), (16, 3539.0), (64, 11635.0))]
    rows += [Anchor(id="K29", what=f"time per token with drafts, {c} in flight", measured=value, unit="ms", group="sglang NVLink",
                    predict=milliseconds(b300, replace(CHAT, concurrency=c, speculation=DSPARK)), taken="7 drafts, acceptance by table")
             for c, value in ((1, 2.84), (16, 9.88), (64, 24.47))]
    drafted = replace(ONE, speculation=replace(DSPARK, acceptance=4.73))
    rows += [Anchor(id="K22", what=f"one user with drafts, TP{n}", measured=value, unit="token/s", group="vllm NVLink",
                    predict=speed(on(f"gb300:{n}", Layout(tensor=n), FP8KV), drafted), calibrates="drafted" if n == 8 else "",
                    taken="1k/1k")
             for n, value in ((8, 331.0), (16, 370.0))]
    rows += [
        Anchor(id="K25", test="X", what="one user with drafts", measured=423.0, unit="token/s", group="sglang NVLink",
               taken="neither machine nor text is given: 8 GB300, 4.73 accepted",
               predict=speed(gb300, drafted)),
        Anchor(id="K35", test="X", what="one user, graphs", measured=85.0, unit="token/s", group="vllm NVLink",
               taken="no machine is given: 8 GB300",
               predict=speed(gb300, ONE)),
        Anchor(id="K39", test="X", what="read and written per device, prefill apart", measured=2633.0, unit="token/s",
               group="sglang NVLink",
               taken="no load is given: 8k/1k, 256 in flight, DCP8; mixed, not apart",
               predict=lambda record: serve(on("gb300:8", DEALT, FP8KV)(record),
                                            Serving(prompt=8192, output=1024, concurrency=256)).read_and_written_per_device.value),
        Anchor(id="K41", test="X", what="one agent with drafts, latents dealt", measured=86.0, unit="token/s", group="sglang NVLink",
               taken="no context is given: 64k, 8 agents",
               predict=speed(on("gb300:8", DEALT, FP8KV),
                             Serving(prompt=65_536, output=512, concurrency=8, cached_share=0.95, speculation=DSPARK))),
    ]
    agents = Serving(prompt=174_000, output=512, concurrency=16, cached_share=0.97)
    rows += [
        Anchor(id="K43", test="X", what="16 agents, caches in DRAM", measured=245.0, unit="token/s", group="vllm NVLink",
               taken="traces are not given: 174k, 97 % cached, 512 written", predict=written(on("b300:8", EIGHT, FP8KV), agents)),
        Anchor(id="K46", what="drafts at 118 to 230k, throughput with over without", measured=0.585, band=(0.37, 0.80), unit="",
               group="vllm NVLink", taken="published as -20 to -63 %; 8 agents of 174k",
               predict=ratio(speed(b300, replace(agents, concurrency=8, speculation=DSPARK)), speed(b300, replace(agents, concurrency=8)))),
    ]
    return rows


def k3_elsewhere() -> list[Anchor]:
    """K3 on other fabrics."""
    mi355x = on("mi355x:8", EIGHT, FP8KV)
    short = Serving(prompt=1024, output=128, concurrency=64)
    apart = Serving(prompt=1024, output=128, concurrency=64, cached_share=0.999)

    def dealing(ranks: int) -> Callable[[Record], float]:
        def predict(record: Record) -> float:
            made = deployment(K3, Cluster.parse(f"rtx-pro-6000:{ranks}"), Layout(tensor=ranks, kv_shards=ranks), FP8KV, record)
            calls = [item for item in exchanges(K3, FP8KV, made.layout, tokens=1) if item.axis == "kv"]
            return 1e6 * message_seconds(made, calls) / K3.layers.count("mla")
        return predict

    rows = [Anchor(id="K32", what=f"dealing latents over {n} ranks, per MLA layer", measured=value, unit="us", group="vllm PCIe",
                   predict=dealing(n), calibrates="collective" if n == 8 else "") for n, value in ((8, 25.6), (16, 57.2))]
    rows += [Anchor(id="K33", what=what, measured=value, unit=unit, group="Infera Infinity", predict=predict, calibrates=calibrates)
             for what, value, unit, predict, calibrates in (
        ("time per token, 64 in flight", 48.8, "ms", milliseconds(mi355x, short), "decode"),
        ("written, 64 in flight", 972.0, "token/s", written(mi355x, short), ""),
        ("written, 4 in flight", 56.8, "token/s", written(mi355x, replace(short, concurrency=4)), ""),
        ("time per token, 64 in flight, prefill apart", 38.1, "ms", milliseconds(mi355x, apart), "decode"),
        ("time per token, 64 in flight, prefill apart, drafts", 17.4, "ms", milliseconds(mi355x, replace(apart, speculation=DSPARK)), ""))]
    rows += [Anchor(id="K48", what=f"time with drafts over without, {c} in flight", measured=value, unit="", group="tokenspeed Infinity",
                    taken="prompts made of random words: acceptance of writing",
                    predict=ratio(milliseconds(mi355x, replace(ONE, concurrency=c, speculation=replace(DSPARK, acceptance="writing"))),
                                  milliseconds(mi355x, replace(ONE, concurrency=c))))
             for c, value in ((1, 0.55), (4, 0.65), (8, 0.95), (16, 1.07))]
    cold, warm = (Serving(prompt=8192, output=1024, concurrency=16, cached_share=share) for share in (0.0, 0.727))
    rows += [
        Anchor(id="K50", test="X", what="first token without over with prefix cache", measured=2.4, unit="", group="ATOM Infinity",
               taken="no load is given: 8k/1k, 16 in flight, hits 72.7 %", predict=ratio(first(mi355x, cold), first(mi355x, warm))),
        Anchor(id="K50", test="X", what="throughput with over without prefix cache", measured=1.35, unit="", group="ATOM Infinity",
               taken="no load is given: 8k/1k, 16 in flight, hits 72.7 %", predict=ratio(written(mi355x, warm), written(mi355x, cold))),
    ]
    return rows


def others() -> list[Anchor]:
    """Kimi Linear, and DeepSeek under its own and others' stacks."""
    spark = Precision(experts="q4", rest="q4")
    h800 = on("h100:8x18", Layout(expert=128, data=128), replace(FP8, kv="bf16"), V3)
    day = Serving(prompt=4989, output=1000, concurrency=1, cached_share=0.999)
    r1 = on("gb300:2", Layout(expert=2, data=2), NVFP4, V3)
    b200 = on("b200:8", EIGHT, NVFP4, V3)
    return [
        Anchor(id="L01", date="2025-10", what="seconds per token at 1M, all-MLA over Kimi Linear", measured=6.3, unit="",
               taken="8 H100, batch that fits",
               predict=lambda record: _full(LINEAR, record) / _full(all_mla(LINEAR), record)),
        Anchor(id="L07", date="2026-03", what="Kimi Linear, Q4, one user", measured=70.25, unit="token/s", group="llama.cpp", taken="1k/1k",
               predict=speed(on("gb10", Layout(), spark, LINEAR), ONE)),
        Anchor(id="S02", date="2025-02", what="written per node at 21 token/s per user", measured=14_800.0, unit="token/s",
               group="DeepSeek InfiniBand",
               taken="decode nodes alone, H100 for H800, EP128 for EP144",
               predict=lambda record: 8 * at_speed(h800, day, 21.0)(record).throughput_per_device.value),
        Anchor(id="S05", date="2026-02", what="prefill per device, EP2", measured=22_476.0, unit="token/s", group="vllm NVLink",
               taken="2k prompts",
               predict=lambda record: 2048 / read_prompt(r1(record), 2048).total.value),
        Anchor(id="S08", date="2026-02", what="cost per million written at 50 token/s", measured=0.56, unit="$", group="trtllm NVLink",
               taken="B200, 1k/1k, owned",
               predict=lambda record: _owned(at_speed(b200, replace(ONE, concurrency=1), 50.0)(record), "b200", 8)),
        Anchor(id="S09", date="2025-09", what="written per device, offline", measured=5842.5, unit="token/s", group="trtllm NVLink",
               taken="GB300, EP8, 0.8k/3.9k, 256 in flight per device",
               predict=lambda record: serve(on("gb300:8", Layout(expert=8, data=8), NVFP4, V3)(record),
                                            Serving(prompt=800, output=3880, concurrency=256)).throughput_per_device.value),
    ]


def _full(config: ModelConfig, record: Record) -> float:
    """Tokens per second at 1M context with as many sequences as fit."""
    made = deployment(config, Cluster.parse("h100:8"), EIGHT, Precision(experts="bf16", rest="bf16"), record)
    sequences = max(1.0, made.room.sequences(1_048_576))
    return sequences / decode(made, sequences, 1_048_576).total.value


def _owned(found: Throughput, name: str, devices: int) -> float:
    low = (device(name).price_per_hour or (0.0,))[0]
    return low * devices / 3600 / found.throughput.value * 1e6


def trainings() -> list[Anchor]:
    """Tokens per second and device of whole training steps."""
    mega, auto = "Megatron-Bridge NVLink", "AutoModel NVLink"

    def rate(config: ModelConfig, cluster: str, precision: Precision, devices: int) -> Callable[[Record], float]:
        layout = Layout(expert=64, data=devices, zero=3)
        work = Training(tokens=1e12, global_batch_tokens=4096 * devices * 4, context=4096, recompute="none")

        def predict(record: Record) -> float:
            share = record.training[cluster_arithmetic(cluster, precision)]
            made = deployment(config, Cluster.parse(cluster), layout, precision, record)
            parts = flops(config, tokens=1, context=work.context / 2)
            return share * made.cluster.device.peak(precision.rest_arithmetic) / (3 * sum(parts.values()))
        return predict

    bf16 = Precision(experts="bf16", rest="bf16")
    qwen = FAMILIES["qwen3-235b"]
    experts = qwen.experts
    active = qwen.attention + qwen.vocabulary * qwen.hidden + 3 * qwen.hidden * experts.inner * experts.chosen * experts.layers
    return [
        Anchor(id="T01", what="DeepSeek-V3, GB300, MXFP8", measured=6288.0, unit="token/s", group=mega, calibrates="training",
               predict=rate(V3, "gb300:64x4", FP8, 256)),
        Anchor(id="T01", what="DeepSeek-V3, GB200, MXFP8", measured=4912.0, unit="token/s", group=mega,
               predict=rate(V3, "gb200:64x4", FP8, 256)),
        Anchor(id="T02", what="Kimi-K2, GB300, MXFP8, Muon", measured=5372.0, unit="token/s", group=mega,
               predict=rate(K2, "gb300:64x4", FP8, 256), calibrates="training"),
        Anchor(id="T03", what="Qwen3-235B, GB300, MXFP8", measured=8816.0, unit="token/s", group=mega,
               predict=lambda record: record.training["fp8"] * device("gb300").peak("fp8") / (3 * (2 * active + qwen.pair * 2048))),
        Anchor(id="T05", what="DeepSeek-V3, H100 x 256, BF16", measured=1002.0, unit="token/s", group=auto, calibrates="training",
               predict=rate(V3, "h100:8x32", bf16, 256)),
        Anchor(id="T05", what="DeepSeek-V3, H100 x 1024, BF16", measured=865.0, unit="token/s", group=auto,
               predict=rate(V3, "h100:8x128", bf16, 1024)),
        Anchor(id="T08", what="Kimi-K2, TPU7x x 512, share of peak", measured=0.0643, unit="", group="MaxText ICI",
               predict=lambda record: record.training["bf16"]),
        Anchor(id="K58", what="K3 fine-tuning, GB200 x 256, share of peak", measured=0.137, unit="", group=auto, taken="16 micro-batches",
               predict=lambda record: train(
                   deployment(K3, Cluster.parse("gb200:64x4"), Layout(expert=32, pipeline=8, data=32, zero=2), bf16, record),
                   Training(tokens=1e9, global_batch_tokens=16 * 32 * 4096, context=4096, recompute="full",
                            trainable_share=0.5)).utilisation),
    ]


def cluster_arithmetic(cluster: str, precision: Precision) -> str:
    """The arithmetic that a cluster's devices use for a precision."""
    return Cluster.parse(cluster).device.computes_in(precision.rest_arithmetic)


def roofline_rows() -> list[Anchor]:
    """Figures where the side matters and 30 % is enough."""
    states = []
    for name, values in (("h200", (31.2, 225.8)), ("h100", (41.9, 307.5)), ("b300", (16.9, 151.0)), ("gb300", (19.0, 143.9)),
                         ("rtx-pro-6000", (24.7, 580.0))):
        for sequences, value in zip((64, 512), values, strict=True):
            moved = 2 * 12 * 128 * 128 * 4 * sequences / device(name).bandwidth
            states.append(Anchor(id="D01", what=f"KDA decode kernel, {device(name).title}, {sequences} sequences", measured=value,
                                 unit="us",
                                 test="R", predict=lambda record, moved=moved: 1e6 * moved / record.coefficients.cache_efficiency))
    v3_hours = 3 * sum(flops(V3, tokens=1, context=2048).values()) * 14.8e12 / 3600 / device("h100").peak("fp8")
    return [
        Anchor(id="K20", what="loading 1,453 GiB from local disks", measured=502.0, unit="s", test="R", taken="a disk reads 3.5 GB/s",
               predict=lambda record: 1453 * 2**30 / 3.5e9),
        Anchor(id="K37", what="bytes read per token from disk", measured=18.5e9, unit="B", test="R",
               taken="15 % of the experts found in memory",
               predict=lambda record: 0.85 * 16 * 92 * 3 * 3584 * 3072 * 4.25 / 8),
        Anchor(id="K37", what="seconds per token from disk", measured=5.0, unit="s", test="R", taken="a disk reads 3.5 GB/s",
               predict=lambda record: 0.85 * 16 * 92 * 3 * 3584 * 3072 * 4.25 / 8 / 3.5e9),
        Anchor(id="S01", what="DeepSeek-V3's training", measured=2.664e6, unit="h", test="R",
               taken="pre-training, 4k context, H100 for H800",
               predict=lambda record: v3_hours / record.training["fp8"]),
        Anchor(id="S03", what="dollars a day", measured=87_072.0, unit="$", test="R", taken="226.75 nodes of 8 at $2",
               predict=lambda record: 226.75 * 8 * 2 * 24),
        *states,
    ]


def anchors() -> list[Anchor]:
    """Every row."""
    return [*k3_serving(), *k3_elsewhere(), *others(), *trainings(), *roofline_rows()]
