"""Would the tests notice? Applies the wrong variants of the model one at a time and prints which tests fail.

    python benchmarks/mutations.py [--only WORDS] [--json]

Each variant runs `tests/contracts/test_variants.py` in its own process. A variant is caught when the test that is named for it fails;
beside it stands the relative error of the logits against the oracle, which for some variants is below what end-to-end tests can see.
Exit status 1 when a variant passes its named test, or when the unchanged model fails.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["GNOMON_KERNELS"] = "reference"
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "parity"), str(ROOT / "benchmarks")]

import exported  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
import oracle_k3  # noqa: E402
import pytest  # noqa: E402
import released  # noqa: E402
import torch  # noqa: E402
from wrong_variants import MUTATIONS, Mutation  # noqa: E402

TESTS = ROOT / "tests" / "contracts" / "test_variants.py"
# The model is imported before pytest starts, so that it can be changed; pytest warns about that.
ARGUMENTS = [str(TESTS), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--tb=no",
             "-W", "ignore::pytest.PytestAssertRewriteWarning"]
ARCHITECTURES = ("kimi_k3", "kimi_linear")
TOKENS = np.random.default_rng(5).integers(0, 300, 40)
EXPECTED = {arch: oracle_k3.logits(released.config(arch), released.tensors(released.config(arch)), TOKENS)[0] for arch in ARCHITECTURES}


class Failures:
    """A pytest plugin that keeps the names of failed tests."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after each phase of each test."""
        if report.failed:
            self.names.add(report.nodeid.split("::")[1].split("[")[0])


def logit_error(arch: str) -> float:
    """Relative error of the logits against the oracle."""
    try:
        with torch.no_grad():
            logits = exported.build(arch)(torch.tensor(TOKENS)[None])[0]
    except (RuntimeError, ValueError, AttributeError):
        return float("nan")
    return exported.relative(logits.numpy(), EXPECTED[arch])


def run(mutation: Mutation | None, pipe: Connection) -> None:
    """In a process of its own: change the model, run the tests, send what failed."""
    torch.set_num_threads(1)
    failures, patch = Failures(), pytest.MonkeyPatch()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if mutation is not None:
            mutation.apply(patch)
        status = pytest.main(ARGUMENTS, plugins=[failures])
        errors = {arch: logit_error(arch) for arch in ARCHITECTURES}
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        failures.names.add(f"pytest ended with {status!r}")
    pipe.send((sorted(failures.names), errors))
    pipe.close()


def result(mutation: Mutation | None) -> dict[str, Any]:
    """One row of the table."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(mutation, theirs))
    process.start()
    theirs.close()
    try:
        failed, errors = ours.recv()
    except EOFError:
        failed, errors = ["the process died"], dict.fromkeys(ARCHITECTURES, float("nan"))
    process.join()
    title, named = (mutation.title, mutation.named) if mutation else ("none", "")
    return {"title": title, "named": named, "failed": failed, "caught": named in failed, "logit_error": errors}


def main() -> int:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose title contains these words")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    baseline = result(None)
    rows = []
    if baseline["failed"]:
        print(f"the unchanged model fails: {', '.join(baseline['failed'])}")
        return 1
    if not options.json:
        print("unchanged model: no test fails, logit error "
              f"{baseline['logit_error']['kimi_k3']:.1e} (K3) {baseline['logit_error']['kimi_linear']:.1e} (Kimi-Linear)\n")
        print(f"{'wrong variant':<66} {'K3 error':>9} {'KL error':>9}  {'tests':>5}  caught by")
    for mutation in (m for m in MUTATIONS if options.only in m.title):
        row = result(mutation)
        rows.append(row)
        if not options.json:
            k3, linear = row["logit_error"].values()
            verdict = row["named"] if row["caught"] else "MISSED"
            print(f"{row['title']:<66} {k3:>9.1e} {linear:>9.1e}  {len(row['failed']):>5}  {verdict}", flush=True)
    missed = [row["title"] for row in rows if not row["caught"]]
    summary = {"baseline": baseline, "mutations": rows, "missed": missed}
    if options.json:
        print(json.dumps(summary))
    else:
        print(f"\n{len(rows) - len(missed)} of {len(rows)} wrong variants caught")
        if not options.only:
            machine.save("mutations", summary)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
