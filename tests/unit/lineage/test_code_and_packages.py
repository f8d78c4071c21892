"""Which code a run ran."""

import subprocess

import pytest

from rlhf_core.lineage import code_revision, package_versions


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_a_clean_checkout(checkout):
    assert code_revision(checkout) == {"revision": git(checkout, "rev-parse", "HEAD"), "dirty": False}


def test_a_changed_file_makes_it_dirty(checkout):
    (checkout / "code.py").write_text("x = 2\n")

    assert code_revision(checkout)["dirty"] is True


def test_a_file_that_git_does_not_know_does_not(checkout):
    (checkout / "notes.txt").write_text("mine\n")

    assert code_revision(checkout)["dirty"] is False


def test_outside_a_checkout_there_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    assert code_revision(tmp_path) == {}


def test_without_git_there_is_no_revision(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")

    assert code_revision(checkout) == {}


def test_versions_of_what_is_installed():
    versions = package_versions()

    assert versions["python"].startswith("3.")
    assert versions["pyarrow"]
    assert all(isinstance(version, str) for version in versions.values())
