"""Published figures that follow by arithmetic alone, each beside the planner's own: sizes, caches, pages, smallest deployments.

A figure agrees when it is within 1 %, or equal once rounded as it was published. What does not is listed with the reason. The figures
that need a clock are the cost model's. `benchmarks/planner_static.py` prints the table. Read next: `footprint.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gnomon.model.config import ModelConfig
from gnomon.plan.families import family
from gnomon.plan.footprint import fewest_devices, kv_bytes, kv_bytes_per_token, page_tokens, state_bytes, weights
from gnomon.plan.hardware import device
from gnomon.plan.inventory import inventory
from gnomon.plan.learning import optimiser_bytes
from gnomon.plan.traffic import flops
from gnomon.plan.workload import Layout, Precision
from gnomon.units import parse_bytes

TOLERANCE = 0.01
"""Deviation that still agrees."""

MILLION = 1_048_576
"""Tokens of a context of 1M."""

EIGHT, SIXTEEN = Layout(tensor=8), Layout(tensor=16)

K3REPORT = "arXiv 2607.24653"
LMSYS = "lmsys.org/blog/2026-07-27-kimi-k3-day0-support"
VLLM = "vllm.ai/blog/2026-07-27-k3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One figure as published, to the step `rounded` in which it was stated (0: exact), and how the planner gets it."""

    id: str
    what: str
    value: float
    unit: str
    rounded: float
    source: str
    get: Callable[[], float]
    miss: str = ""

    @property
    def ours(self) -> float:
        """The planner's figure, in the same unit."""
        return self.get()

    @property
    def deviation(self) -> float:
        """Ours over the published one, less one."""
        return self.ours / self.value - 1

    @property
    def agrees(self) -> bool:
        """Whether it is within the tolerance or rounds to what was published."""
        return abs(self.deviation) <= TOLERANCE or abs(self.ours - self.value) <= self.rounded / 2 * (1 + 1e-9)


def _k3(kv: str = "bf16") -> Precision:
    return Precision(experts="mxfp4", rest="bf16", kv=kv)


def _config(name: str = "k3") -> ModelConfig:
    return family(name).config


def _k3_size() -> list[Published]:
    def row(id: str, what: str, value: float, unit: str, rounded: float, source: str, get: Callable[[], float]) -> Published:
        return Published(id=id, what=what, value=value, unit=unit, rounded=rounded, source=source, get=get)

    k3, gigabyte, gibibyte = _config(), 1e9, 2.0**30
    index = "github.com/MoonshotAI/Kimi-K3 (index total_size)"
    infera, pcie = "github.com/AMD-AGI/Infera, examples/kimi_k3", "github.com/local-inference-lab/vllm/issues/239"
    expert = next(p for p, _ in inventory(k3).counted() if p.part == "routed")
    per_expert = 3 * expert.stored_bytes(_k3()) / expert.spec.count
    return [
        row("K01", "parameters of the text model", 2_779_484_476_000, "", 0, f"{K3REPORT}, Table 1", k3.num_parameters),
        row("K02", "activated parameters", 104.2e9, "", 0.1e9, f"{K3REPORT}, Table 1", k3.activated_parameters),
        row("K03", "bytes of the checkpoint", 1_560_860_324_864, "B", 0, index, lambda: weights(k3, _k3()).whole_bytes),
        row("K03", "… in terabytes", 1.561, "TB", 0.001, index, lambda: weights(k3, _k3()).whole_bytes / parse_bytes("1 TB")),
        row("K03", "… in tebibytes, the figure called '1.42 TB'", 1.420, "TiB", 0.001, index,
            lambda: weights(k3, _k3()).whole_bytes / parse_bytes("1 TiB")),
        row("K04", "weights per device, TP8", 195, "GB", 1, infera, lambda: weights(k3, _k3(), EIGHT).bytes / gigabyte),
        row("K04", "… in gibibytes", 181.6, "GiB", 0.1, infera, lambda: weights(k3, _k3(), EIGHT).bytes / gibibyte),
        row("K05", "weights per rank, TP16", 90.96, "GiB", 0.01, pcie, lambda: weights(k3, _k3(), SIXTEEN).bytes / gibibyte),
        row("K08", "weights of latent attention, bf16", 11, "GB", 1, LMSYS, lambda: weights(k3, _k3()).whole["mla"] / gigabyte),
        row("K09", "one routed expert in MXFP4", 17.5, "MB", 0.1, "github.com/JustVugg/colibri/issues/720", lambda: per_expert / 1e6),
    ]


def _k3_caches() -> list[Published]:
    k3, source = _config(), "github.com/SemiAnalysisAI/InferenceX/pull/"
    dealt = Layout(tensor=8, kv_shards=8)

    def share() -> float:
        return kv_bytes_per_token(k3, _k3(), dealt) / kv_bytes_per_token(k3, _k3(), EIGHT)

    return [
        Published(id="K10", what="latents per token, bf16", value=27_648, unit="B", rounded=0, source=LMSYS,
                  get=lambda: kv_bytes_per_token(k3, _k3(), EIGHT)),
        Published(id="K11", what="bytes per token of a pool, fp8 (the engine rounds up)", value=13_955, unit="B", rounded=1,
                  source=source + "2371", get=lambda: kv_bytes_per_token(k3, _k3("fp8"), EIGHT)),
        Published(id="K11", what="tokens in a pool of 42.23 GiB", value=3_249_215, unit="tokens", rounded=1, source=source + "2371",
                  get=lambda: parse_bytes("42.23 GiB") / kv_bytes_per_token(k3, _k3("fp8"), EIGHT)),
        Published(id="K12", what="recurrent matrices per request and TP8 rank", value=54, unit="MB", rounded=1, source=LMSYS,
                  get=lambda: k3.state_bytes() / 8 / 1e6),
        Published(id="K13", what="state per request and rank with 2 drafts", value=54.78, unit="MiB", rounded=0.01,
                  source=source + "2670", get=lambda: state_bytes(k3, _k3("fp8"), EIGHT, draft_tokens=2) / 2**20),
        Published(id="K14", what="tokens of an attention page, TP8, fp8", value=1536, unit="tokens", rounded=0,
                  source="github.com/vllm-project/vllm/issues/50235", get=lambda: page_tokens(k3, _k3("fp8"), EIGHT)),
        Published(id="K15", what="tokens of the largest page", value=6144, unit="tokens", rounded=0, source=f"{K3REPORT}, §5.4.1",
                  get=lambda: page_tokens(k3, _k3())),
        Published(id="K15", what="hash blocks in it (of 512 tokens)", value=12, unit="blocks", rounded=0, source=f"{K3REPORT}, §5.4.1",
                  get=lambda: page_tokens(k3, _k3()) / 512),
        Published(id="K16", what="tokens of context without DCP when DCP8 holds 12.2 M", value=1.5, unit="M tokens", rounded=0.1,
                  source=LMSYS, get=lambda: 12.2 * share()),
        Published(id="K16", what="gain of DCP8", value=7.9, unit="times", rounded=0.1, source=LMSYS, get=lambda: 1 / share(),
                  miss="latents alone give 8; the source's own figures give 12.2 / 1.5 = 8.1 and its text 7.9, less what its buffers take"),
    ]


def _deployments() -> list[Published]:
    k3, k2 = _config(), _config("kimi-k2")
    fp8 = Precision(experts="fp8", rest="fp8")
    guide = "github.com/MoonshotAI/Kimi-K2, docs/deploy_guidance.md"
    rows = [Published(id="K19", what=f"fewest {device(name).title}", value=count, unit="devices", rounded=0, source=VLLM,
                      get=lambda name=name: fewest_devices(k3, _k3(), device(name))[0])  # type: ignore[misc]
            for name, count in (("b300", 8), ("gb300", 8), ("mi355x", 8), ("b200", 16))]
    rows += [Published(id="S12", what=f"fewest {device(name).title} for Kimi-K2 in fp8 at 128K", value=16, unit="devices", rounded=0,
                       source=guide, get=lambda name=name: fewest_devices(k2, fp8, device(name), context=131_072)[0])  # type: ignore[misc]
             for name in ("h200", "h20")]
    return rows


def _other_families() -> list[Published]:
    linear, k2 = _config("kimi-linear"), _config("kimi-k2")
    report, v4 = "github.com/MoonshotAI/Kimi-Linear, tech_report.pdf", "vllm.ai/blog/2026-04-24-deepseek-v4"

    def cache(name: str) -> float:
        return kv_bytes(_config(name), _k3(), Layout(), MILLION) / 2**30

    def spared() -> float:
        return 100 * (1 - linear.layers.count("mla") / len(linear.layers))

    def k2_state() -> float:
        layout, bf16 = Layout(pipeline=16, expert=16, data=16, zero=1), Precision(experts="bf16", rest="bf16")
        return (weights(k2, bf16, layout).bytes + optimiser_bytes(k2, layout).parts["gradients"]) / 1e9

    return [
        Published(id="L02", what="Kimi Linear: cache spared by its pattern of layers", value=75, unit="%", rounded=1, source=report,
                  get=lambda: 100 * linear.layer_pattern.count("kda") / len(linear.layer_pattern)),
        Published(id="L02", what="… by the 27 layers released", value=75, unit="%", rounded=1, source=report, get=spared,
                  miss="the last layer is latent attention beyond the pattern: 7 of 27 layers keep a cache, 74.1 % is spared"),
        Published(id="L05", what="Kimi Linear: parameters", value=49.12e9, unit="", rounded=0.01e9, source=report,
                  get=linear.num_parameters),
        Published(id="L05", what="… activated", value=3.11e9, unit="", rounded=0.01e9, source=report,
                  get=linear.activated_parameters),
        Published(id="S06", what="DeepSeek-V3.2: cache at 1M, bf16", value=83.9, unit="GiB", rounded=0.1, source=v4,
                  get=lambda: cache("deepseek-v3.2")),
        Published(id="S06", what="DeepSeek-V4-Pro: cache at 1M, bf16", value=9.62, unit="GiB", rounded=0.01, source=v4,
                  get=lambda: cache("deepseek-v4-pro")),
        *_deepseek(),
        Published(id="T09", what="Kimi-K2: weights and gradients per rank, PP16 EP16 ZeRO-1", value=30, unit="GB", rounded=5,
                  source="arXiv 2507.20534 ('approximately 30 GB')", get=k2_state),
    ]


def _deepseek() -> list[Published]:
    """Sizes that the families' shapes must give, and what the fourth generation is said to spare; none of them is in the study's table."""
    def flop(name: str) -> float:
        return sum(flops(_config(name), tokens=1, context=MILLION, absorbed=True).values())

    sizes = (("deepseek-v3", 671e9, 1e9, 37e9), ("deepseek-v4-pro", 1.6e12, 0.1e12, 49e9), ("deepseek-v4-flash", 284e9, 1e9, 13e9))
    rows = []
    for name, total, step, active in sizes:
        config, source = _config(name), "model card"
        rows += [Published(id="—", what=f"{name}: parameters", value=total, unit="", rounded=step, source=source,
                           get=config.num_parameters),
                 Published(id="—", what="… activated", value=active, unit="", rounded=1e9, source=source, get=config.activated_parameters)]
    rows.append(Published(
        id="—", what="deepseek-v4-pro: FLOPs per token at 1M, share of V3.2's", value=27, unit="%", rounded=1, source="DeepSeek-V4 report",
        get=lambda: 100 * flop("deepseek-v4-pro") / flop("deepseek-v3.2"),
        miss="the source weighs FLOPs by their format and does not say how in full; here each counts once"))
    return rows


def static() -> list[Published]:
    """Every published figure that needs no clock."""
    return [*_k3_size(), *_k3_caches(), *_deployments(), *_other_families()]


def table(rows: list[Published]) -> str:
    """The rows as text: id, what, published, ours, deviation, and what disagrees."""
    lines = [f"{'id':<4} {'what':<62} {'published':>22} {'ours':>22} {'deviation':>10}"]
    for row in rows:
        mark = "" if row.agrees else "  miss: " + row.miss
        lines.append(f"{row.id:<4} {row.what:<62} {_number(row.value)} {row.unit or '':<6} {_number(row.ours)} {row.unit or '':<6} "
                     f"{100 * row.deviation:>+8.2f} %{mark}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:>15,.0f}" if value >= 10_000 or value == round(value) else f"{value:>15.3f}"
