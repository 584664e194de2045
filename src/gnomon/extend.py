"""The one plug-in rule: a kind is a file name in the package's folder, or a dotted path `your_pkg.module:Name`.

There is no registration: `"kda"` looked up among mixers means `gnomon/model/mixers/kda.py`, and the class it
defines as `Mixer`. A typo lists the choices. See `docs/extend.md`.
"""

import importlib
import pkgutil
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from gnomon.errors import ConfigError


def suggestion(name: str, choices: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'x'?"` for the closest choice, or an empty string when nothing is close."""
    close = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def kinds(package: str) -> list[str]:
    """The names that `find` accepts for a package such as `"gnomon.model.mixers"`: its modules, sorted."""
    module = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_"))


def find(package: str, name: str, attribute: str) -> Any:
    """The object that a kind stands for.

    `find("gnomon.model.mixers", "kda", "Mixer")` is `gnomon.model.mixers.kda.Mixer`; with a dotted path
    `"your_pkg.hyena:Hyena"` the attribute is the part after the colon. Raises `ConfigError` for an unknown
    kind, a module that cannot be imported, or a module that lacks the attribute.
    """
    if ":" in name:
        path, _, attribute = name.partition(":")
        module = _imported(path, name)
    else:
        if name not in kinds(package):
            choices = kinds(package)
            raise ConfigError(f"unknown kind '{name}' in {package}{suggestion(name, choices)} "
                              f"(choices: {', '.join(choices)}; or a dotted path 'your_pkg.module:Name')")
        module = importlib.import_module(f"{package}.{name}")
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"'{name}': module {module.__name__} defines no '{attribute}'") from None


def _imported(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(f"'{name}': cannot import module '{path}' ({error}); is its package installed?") from error
