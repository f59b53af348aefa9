"""A folder of packages that only the contenders need, for machines where nothing can be installed.

`python -m bench.gpu.contenders_folder` makes `.contenders/` (about 50 MB, not in git): DeepSpeed from its sdist, with nothing
compiled (its CPU Adam is built by g++ at first use), what it imports, and torchao. It is put last on the path, so that what
a machine has of its own comes first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".contenders"
DEEPSPEED = "deepspeed==0.19.8"
WHEELS = ["einops", "hjson", "msgpack", "psutil", "py-cpuinfo", "pydantic", "tqdm", "ninja"]  # and what those need
ALONE = ["torchao==0.18.0"]
TARGET = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
TARGET += [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")]


def add_contenders() -> None:
    """Make this process find what is in the folder, if there is one."""
    if FOLDER.exists() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
        os.environ["PATH"] += os.pathsep + str(FOLDER / "bin")  # ninja
        os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))


def make(folder: Path = FOLDER) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        downloaded = Path(scratch)
        _download(downloaded, *TARGET, *WHEELS)
        _download(downloaded, *TARGET, "--no-deps", *ALONE)
        _download(downloaded, "--no-binary=:all:", "--no-deps", "--no-build-isolation", DEEPSPEED)
        for wheel in downloaded.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        with tarfile.open(next(downloaded.glob("deepspeed-*.tar.gz"))) as archive:
            archive.extractall(downloaded, filter="data")
        source = next(downloaded.glob("deepspeed-*/setup.py")).parent
        shutil.copytree(source / "deepspeed", folder / "deepspeed")
        about = folder / f"{source.name}.dist-info"  # so that its version can be asked for
        about.mkdir()
        shutil.copy(source / "PKG-INFO", about / "METADATA")
    ninja = next(folder.glob("ninja-*.data/scripts/ninja"))
    (folder / "bin").mkdir()
    shutil.copy(ninja, folder / "bin" / "ninja")
    (folder / "bin" / "ninja").chmod(0o755)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.1f} MB")


def _download(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *arguments], check=True)


if __name__ == "__main__":
    make()
