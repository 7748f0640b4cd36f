"""The wheel: it holds the package and nothing else, and imports without the extras."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from partita.runtime.launcher import KNOWN_TRITONS

pytest.importorskip("hatchling", reason="builds the wheel")
ROOT = Path(__file__).parents[2]


def test_supported_versions_are_those_that_the_package_knows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pairs = [pair.split("+") for pair in project["tool"]["partita"]["versions"]]
    oldest = pairs[0][0].rpartition(".")[0]
    assert project["project"]["dependencies"] == [f"torch>={oldest}"]
    assert {triton.rpartition(".")[0] for _, triton in pairs} == set(KNOWN_TRITONS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/partita").rglob("*")
        if path.suffix in (".py", ".c", ".typed")
    }
    packaged = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert packaged == source
    assert "partita/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_imports_without_extras(wheel: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['triton', 'numba', 'matplotlib']));"
    code = f"""
{blocked}
sys.path.insert(0, {str(wheel)!r})
import partita, torch
assert {wheel.name!r} in partita.__file__
loss = partita.ctc_loss(torch.zeros(2, 1, 2), torch.tensor([[1]]), [2], [1], from_logits=True)
print(partita.logsumexp(torch.zeros(2), 0).item(), loss.item())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=wheel.parent,
    )
    assert done.returncode == 0, done.stderr
    assert [round(float(number), 4) for number in done.stdout.split()] == [0.6931, 0.2877]
