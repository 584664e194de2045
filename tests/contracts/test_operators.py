"""Each implementation of each operator gives what the reference gives, forward and backward, on the operator's own sample.

A new operator, or a new implementation of one, is found and compared on the day its file appears.
"""

import importlib.util
import inspect
from typing import Any

import jaxtyping
import pytest
import torch

from gnomon.errors import ConfigError
from gnomon.kernels.operator import Operator, all_operators
from gnomon.kernels.survey import devices, sample, survey

OPERATORS = tuple(all_operators())
PAIRS = [(device, operator, module) for device in ("cpu", "cuda") for operator in OPERATORS for module in operator.candidates[device]]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested result or argument list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def gradients(function: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Gradients of a fixed random projection of the results with respect to every input that asks for one."""
    results = [t for t in tensors(function(*arguments)) if t.requires_grad]
    inputs = [t for t in tensors(arguments) if t.requires_grad]
    if not results:  # integers have no gradient
        return [torch.zeros_like(i) for i in inputs]
    torch.manual_seed(1)
    loss = sum((t * torch.randn_like(t)).sum() for t in results)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal within fp32 rounding of a sum, relative to the largest value of each tensor."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = max(1.0, float(b.detach().double().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0.0, atol=2e-5 * scale)


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_reference_runs_on_its_sample_and_is_finite(operator: Operator) -> None:
    results = tensors(operator.reference(*sample(operator, "cpu")))
    assert results
    for result in results:
        assert torch.isfinite(result.float()).all()


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_no_module_hides_the_operator(operator: Operator) -> None:
    """Importing `kernels/kda/chunk.py` would put the module where `kda.chunk` is."""
    assert importlib.util.find_spec(f"gnomon.kernels.{operator.folder}.{operator.name}") is None


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_the_meaning_is_documented(operator: Operator) -> None:
    assert inspect.getdoc(operator.reference)


@pytest.mark.parametrize(("device", "operator", "module"), PAIRS, ids=str)
def test_implementation_equals_the_reference(device: str, operator: Operator, module: str) -> None:
    if device not in devices():
        pytest.skip(f"no {device} device here")
    run = getattr(operator.module(module), operator.name)
    refuse = getattr(operator.module(module), f"refuse_{operator.name}")
    arguments = sample(operator, device)
    with torch.no_grad():
        if (reason := refuse(*arguments)) is not None:
            pytest.skip(f"{operator}, {module}: {reason}")
        same(tensors(run(*arguments)), tensors(operator.reference(*arguments)))
    asking = sample(operator, device, training=True)
    if refuse(*asking) is None and any(t.requires_grad for t in tensors(asking)):
        same(gradients(run, asking), gradients(operator.reference, asking))


@pytest.mark.parametrize(("device", "operator", "module"), PAIRS, ids=str)
def test_implementation_takes_the_arguments_of_the_reference(device: str, operator: Operator, module: str) -> None:
    if module == "fla" and device not in devices():
        pytest.skip("the GPU package is absent here")
    expected = list(inspect.signature(operator.reference).parameters)
    assert list(inspect.signature(getattr(operator.module(module), operator.name)).parameters) == expected
    refuse = inspect.signature(getattr(operator.module(module), f"refuse_{operator.name}"))
    refuse.bind(*expected)
    refuse.bind(**dict.fromkeys(expected))


def test_the_survey_lists_each_operator_and_ends_each_with_its_reference() -> None:
    rows = list(survey())
    assert {row.operator for row in rows} == {f"{o.folder}.{o.name}" for o in OPERATORS}
    assert [row.implementation for row in rows if row.inference is None].count("reference") == len(OPERATORS) * len(devices())


def test_the_meaning_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_KERNELS", "reference")
    rows = [row for row in survey() if row.implementation != "reference" and row.device in devices()]
    assert all(row.inference == "GNOMON_KERNELS=reference is set" for row in rows)
    monkeypatch.setenv("GNOMON_KERNELS", "fastest")
    with pytest.raises(ConfigError, match="GNOMON_KERNELS='fastest'"):
        list(survey())


def test_shapes_are_checked_while_tests_run() -> None:
    """A result or an argument that is not of the shape that its hint says fails; see the hook in tests/conftest.py."""
    from gnomon.kernels.kda import prepare
    from gnomon.model.generate import Sampling, draw

    with pytest.raises(jaxtyping.TypeCheckError):
        draw(torch.zeros(2, 3), Sampling(), torch.Generator())
    with pytest.raises(jaxtyping.TypeCheckError):
        prepare(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
