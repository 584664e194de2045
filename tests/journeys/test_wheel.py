"""What is installed is what stands in the source: pages, recipes of harnesses, tables of hardware and all other files beside the code."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="the build back end is not installed: pip install 'gnomon[test]'")
BUILD = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path, repository: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=repository, check=True, timeout=600, capture_output=True,
                   env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("gnomon/")}
    source = repository / "src"
    wanted = {path.relative_to(source).as_posix() for path in (source / "gnomon").rglob("*")
              if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")}
    assert not wanted - packed
    assert {"gnomon/serve/page/index.html", "gnomon/serve/page/page.css", "gnomon/serve/page/page.js"} <= packed
