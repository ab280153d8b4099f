"""The digest of the files that a receipt is of, and what a receipt says of a tree."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import receipt


def known_to_git():
    """Return the tracked files and those that could be, or skip the test."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *receipt.FOLDERS]
    known = subprocess.run(command, cwd=receipt.ROOT, capture_output=True, text=True, check=False)
    if known.returncode or not known.stdout:
        pytest.skip("no checkout of git")
    return sorted(name for name in known.stdout.splitlines() if Path(receipt.ROOT, name).is_file())


def test_the_digest_is_of_the_tracked_files():
    """As the issue states it, once all files are added."""
    whole = hashlib.sha256()
    for f in known_to_git():
        whole.update(
            f.encode() + b"\0" + hashlib.sha256(Path(receipt.ROOT, f).read_bytes()).hexdigest().encode() + b"\n"
        )
    assert receipt.digest() == whole.hexdigest()


def test_what_is_walked_is_what_git_knows():
    assert receipt.walked(receipt.ROOT) == known_to_git()


def test_files_count_that_the_index_does_not_know_yet(tmp_path):
    """The index of a machine that was sent a tree may be that of an older commit."""
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "fp8core").mkdir()
    for name in ("a.py", "gone.py"):
        (tmp_path / "fp8core" / name).write_text("A = 1")
    subprocess.run([*git, "add", "."], check=True)
    (tmp_path / "fp8core/gone.py").unlink()
    for name in ("new.py", "run.log"):
        (tmp_path / "fp8core" / name).write_text("B = 2")
    assert receipt.listed(tmp_path) == ["fp8core/a.py", "fp8core/new.py"]


def test_without_git_the_tree_is_walked(tmp_path):
    for name in ("fp8core/a.py", "tests/b.py", "cuda_src/c.cu", "docs/d.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = receipt.digest(tmp_path)
    for name in (
        "fp8core/__pycache__/a.pyc",
        "tests/.hypothesis/x",
        "tests/x.egg-info/y",
        "docs/e.md",
        "cuda_src/f.pyc",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert receipt.digest(tmp_path) == before
    (tmp_path / "tests" / "b.py").write_text("changed")
    assert receipt.digest(tmp_path) != before


WHOLE = {
    "passed": 3,
    "failed": 0,
    "errors": 0,
    "skipped": [],
    "slowest": [],
    "seconds": 1.5,
    "gpu": "a GPU",
    "driver": "1",
    "versions": {},
    "date": "2026-11-22T00:00:00+00:00",
    "order": "file",
    "argv": [],
    "sources": "abc",
}


@pytest.mark.parametrize(
    ("change", "sources", "told", "fine"),
    [
        ({}, "abc", "this tree", True),
        ({}, "abd", "another tree (sources differ: abc, here abd)", True),
        ({"failed": 1}, "abc", "1 failed", False),
        ({"errors": 1}, "abc", "1 errors", False),
        ({"passed": 0}, "abc", "0 passed", False),
        ({"failed": 1}, "abd", "1 failed", True),
        ({"partial": True}, "abc", "a part of it only", True),
        ({"passed": "3"}, "abc", "malformed: passed is '3'", False),
        ({"passed": True}, "abc", "malformed: passed is True", False),
        ({"skipped": [{"reason": "x"}]}, "abc", "malformed: skipped holds", False),
    ],
    ids=str,
)
def test_what_a_receipt_says_of_a_tree(tmp_path, change, sources, told, fine):
    path = tmp_path / "gpu-suite.json"
    path.write_text(json.dumps(WHOLE | change))
    line, good = receipt.said("gpu", path, sources)
    assert told in line
    assert good is fine


def test_what_is_no_receipt_is_malformed_and_none_is_none(tmp_path):
    path = tmp_path / "gpu-suite.json"
    assert receipt.said("gpu", path, "abc") == ("gpu suite: no receipt", True)
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        line, good = receipt.said("gpu", path, "abc")
        assert "malformed" in line
        assert not good


def test_the_check_of_this_tree_runs():
    done = subprocess.run(
        [sys.executable, "tests/support/receipt.py", "--check"],
        cwd=receipt.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(" suite: ")[0] for line in done.stdout.splitlines()] == ["gpu", "models", "multigpu"]
