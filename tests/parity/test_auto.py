"""transformers' Auto classes over our checkpoints: what they give is what the network gives, and lm-eval runs on it unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import exported
import pytest
import torch

from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError
from gnomon.model.weights import load_pretrained, save_pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
auto = pytest.importorskip("gnomon.model.auto")
pytestmark = pytest.mark.filterwarnings("ignore")  # the peers' own deprecations

FIELDS = {"bos_token_id": 288, "eos_token_id": 290, "pad_token_id": 319}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 320)
    save_pretrained(exported.build("kimi_k3", **FIELDS), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    auto.register()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_classes_find_the_checkpoint(folder, model):
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (320, 64, 9)
    text = "def naïve(x): return x  # 東京"
    assert transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == Tokenizer.load(folder).encode(text)
    assert isinstance(model, auto.KimiK3ForCausalLM)


@torch.no_grad()
@pytest.mark.parametrize("pad", [slice(0, 7), slice(16, 20)], ids=["left", "right"])
def test_padding_does_not_reach_the_network(folder, model, pad):
    """A padded row is the row alone; the seven pads on the left would otherwise stand in the state."""
    ours, ids = load_pretrained(folder, dtype=torch.float32), torch.randint(288, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, pad] = 0
    out = model(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(out.logits[1], ours(ids[1:])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.logits[0][mask[0].bool()], ours(ids[:1, mask[0].bool()])[0], rtol=1e-5, atol=1e-5)
    assert not out.logits[0][~mask[0].bool()].any()
    assert out.loss.isfinite()


@torch.no_grad()
def test_generation_goes_on_from_states(folder, model):
    """Greedy text of a padded batch is that of our own loop, and beams follow their states."""
    ids, mask = torch.randint(288, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": 319}
    whole = model.generate(ids, **options)[:, 20:].tolist()
    ours = load_pretrained(folder, dtype=torch.float32)
    for row, prompt in zip(whole, (ids[0, 5:], ids[1]), strict=True):
        assert row == exported.greedy(ours, prompt.tolist())[1][:5]
    beams = [model.generate(ids, num_beams=2, use_cache=cached, **options).tolist() for cached in (True, False)]
    assert beams[0] == beams[1]


def test_what_cannot_be_honoured_is_said(folder):
    auto.register()
    with pytest.raises(ConfigError, match="quantization_config"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config={"quant_method": "bitsandbytes"})


TASK = """
task: digits
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_lm_eval_runs_unchanged(folder, tmp_path):
    """A local task through lm-eval's own command: each choice's log-likelihood is the one that the network gives."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which lm-eval's transformers models need, is not installed")
    questions = [{"question": f"def f{i}(", "choices": [" x", " self, y"], "answer": i % 2} for i in range(3)]
    (tmp_path / "data.json").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "digits.yaml").write_text(TASK.format(data=tmp_path / "data.json"))
    command = [sys.executable, "-m", "gnomon.model.auto", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "2",
               "--model_args", f"pretrained={folder},dtype=float32", "--tasks", "digits", "--include_path", str(tmp_path),
               "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    model, tokenizer = load_pretrained(folder, dtype=torch.float32), Tokenizer.load(folder)
    for line in lines:
        sample = json.loads(line)
        for choice, (likelihood, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            assert float(likelihood) == pytest.approx(log_likelihood(model, tokenizer, sample["doc"]["question"], choice), abs=2e-4)
    assert len(lines) == len(questions)


@torch.no_grad()
def log_likelihood(model, tokenizer, context, continuation):
    """Sum of the log-probabilities of the continuation's tokens."""
    ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    scores = torch.log_softmax(model(torch.tensor([ids]))[0].double(), -1)
    return float(sum(scores[i - 1, ids[i]] for i in range(start, len(ids))))
