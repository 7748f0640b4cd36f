"""Wheel and source archive: they hold the package and nothing else; the wheel needs no extras."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import partita
from partita.runtime.launcher import KNOWN_TRITONS

pytest.importorskip("hatchling", reason="builds the wheel")
ROOT = Path(__file__).parents[2]


def test_supported_versions_are_those_that_the_package_knows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pairs = [pair.split("+") for pair in project["tool"]["partita"]["versions"]]
    oldest = pairs[0][0].rpartition(".")[0]
    assert project["project"]["dependencies"] == [f"torch>={oldest}"]
    assert {triton.rpartition(".")[0] for _, triton in pairs} == set(KNOWN_TRITONS)


def test_the_version_is_that_of_the_changelog_and_of_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == partita.__version__
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r'"Partita (\S+),', readme) == [partita.__version__]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, and the wheel from it as installers do."""
    folder = tmp_path_factory.mktemp("dist")

    def build(target: str, source: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)

    build("sdist", ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    build("wheel", folder / archive.name.removesuffix(".tar.gz"))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    assert built.name.startswith(f"partita-{partita.__version__}-")
    return built


def sources() -> set[str]:
    return {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/partita").rglob("*")
        if path.suffix in (".py", ".c", ".typed")
    }


def test_what_the_source_archive_holds(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert names == {f"src/{name}" for name in sources()} | beside


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert packaged == sources()
    assert "partita/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_imports_without_extras(wheel: Path) -> None:
    extras = ("triton", "numba", "matplotlib", "numpy")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))
sys.path.insert(0, {str(wheel)!r})
import torch, partita
assert {wheel.name!r} in partita.__file__
x = torch.zeros(2, 1, 2, requires_grad=True)
loss = partita.ctc_loss(x, torch.tensor([[1]]), [2], [1], from_logits=True)
partita.cross_entropy(x[:, 0], torch.tensor([0, 1])).backward()
print(partita.logsumexp(torch.zeros(2), 0).item(), loss.item(), *x.grad.flatten().tolist())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=wheel.parent,
    )
    assert done.returncode == 0, done.stderr
    found = [round(float(number), 4) for number in done.stdout.split()]
    assert found == [0.6931, 0.2877, -0.25, 0.25, 0.25, -0.25]
