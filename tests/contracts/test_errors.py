"""The exception tree is what its drawing says, and each class knows its exit status."""

import inspect
import re

from gnomon import errors
from gnomon.errors import ConfigError, GnomonError


def classes() -> dict[str, type[GnomonError]]:
    """The exceptions by name."""
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, GnomonError)}


def test_each_exception_is_in_the_drawing() -> None:
    drawn = set(re.findall(r"\w+", errors.__doc__ or ""))
    assert set(classes()) <= drawn


def test_each_drawn_branch_exists() -> None:
    branches = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert branches
    for name in branches:
        assert classes()[name].__bases__ == (GnomonError,)


def test_exit_statuses() -> None:
    assert ConfigError.exit_status == 2
    assert {name for name, cls in classes().items() if cls.exit_status == 2} == {"ConfigError"}
    assert all(cls.exit_status in (1, 2) for cls in classes().values())
