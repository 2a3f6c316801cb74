"""An installed megacompile imports without a warning outside of any checkout, and the README's example runs.

    python -W error tests/smoke.py README.md        (`make smoke` does it, in a fresh environment)
"""
from __future__ import annotations

import re
import sys
import tempfile
import warnings
from importlib import metadata
from os import chdir
from pathlib import Path


def main(readme: Path) -> None:
    checkout = Path(__file__).resolve().parents[1]
    example = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)[0]
    import megacompile

    installed = Path(megacompile.__file__).resolve()
    assert not installed.is_relative_to(checkout / "megacompile"), f"{installed} is the checkout's: install the wheel"
    assert megacompile.__version__ == metadata.version("megacompile")
    assert (installed.parent / "py.typed").exists() and (installed.parent / "runtime/optimizer/csrc/update.cpp").exists()
    assert any(str(file).endswith("LICENSE") for file in metadata.files("megacompile") or ())
    warnings.resetwarnings()  # of the import alone: what other packages warn of at work is theirs
    with tempfile.TemporaryDirectory() as folder:
        chdir(folder)
        exec(compile(example, str(readme), "exec"), {"__name__": "__main__"})
        chdir("/")
    print(f"megacompile {megacompile.__version__} works on Python {sys.version.split()[0]}, installed in {installed.parent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
