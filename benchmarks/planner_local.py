"""After `gnomon plan --calibrate`, how near are predictions for models that were not measured on this machine?

Calibrates into a folder of its own, then trains and samples three other shapes and compares. The machine should have nothing else to do.
"""

import tempfile
from pathlib import Path

from machine import described, save

from gnomon.plan.local import calibrate, measured, predicted, shapes

TARGET = 0.20
TIME_LIMIT = 30.0


def main() -> None:
    """Print predictions beside measurements, and save them."""
    with tempfile.TemporaryDirectory() as folder:
        made = calibrate(Path(folder))
    checks = {name: shape for name, shape in shapes().items() if not shape.calibrates}
    found = measured(list(checks))
    rows, worst = [], 0.0
    for (name, shape), step, pace in zip(checks.items(), found["training"], found["sampling"], strict=True):
        training, sampling = predicted(made.device, made.made, shape)
        for what, estimate, value in (("training", training, shape.batch_tokens / step), ("sampling", sampling, 1 / pace)):
            error = estimate.value / value - 1
            worst = max(worst, abs(error))
            rows.append({"shape": name, "what": what, "measured": value, "predicted": estimate.value, "low": estimate.low,
                         "high": estimate.high, "error": error})
            print(f"{name:8s} {what:9s} measured {value:8.0f} token/s, predicted {estimate.value:8.0f} ({estimate.low:.0f} to "
                  f"{estimate.high:.0f})  {error:+.0%}")
    print(f"worst {worst:.0%} (target {TARGET:.0%}); calibration took {made.seconds:.1f} s (at most {TIME_LIMIT:.0f} s)")
    save("planner_local", {"rows": rows, "worst": worst, "calibration_seconds": made.seconds, "targets": {"error": TARGET,
                           "seconds": TIME_LIMIT}})


if __name__ == "__main__":
    described(__doc__)
    main()
