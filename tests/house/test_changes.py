"""The changelog is kept as fragments, which `tools/changelog.py` joins at a release."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tools.changelog import BadFragment, entries, fragments, gather, release, released

DAY = datetime.date(2026, 11, 30)
PAGE = "# Changelog\n\n## [Unreleased]\n\nIn changes/.\n\n## [0.1.0] - 2026-01-01\n\n### Added\n\n- Old.\n"


def tree(folder: Path, **texts: str) -> Path:
    """Write a changelog and fragments; `fixed__a` is changes/fixed/a.md."""
    (folder / "CHANGELOG.md").write_text(PAGE)
    for name, text in texts.items():
        path = folder / "changes" / (name.replace("__", "/") + ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_every_fragment_of_this_tree_can_be_joined() -> None:
    assert "- " in released((ROOT / "CHANGELOG.md").read_text(), ROOT, "1.0.0", DAY)


def test_a_release_joins_the_fragments_by_kind_and_removes_them(tmp_path: Path) -> None:
    root = tree(tmp_path, fixed__b="- B\n  goes on.\n", fixed__a="- A.", added__gathered="- New.\n- Newer.\n")
    release(root, "0.2.0", DAY)
    section = (
        "## [0.2.0] - 2026-11-30\n\n### Added\n\n- New.\n- Newer.\n\n### Fixed\n\n- A.\n- B\n  goes on.\n\n"
    )  # fmt: skip
    assert (root / "CHANGELOG.md").read_text() == PAGE.replace("## [0.1.0]", section + "## [0.1.0]")
    assert fragments(root) == {}


def test_a_first_release_stands_at_the_end(tmp_path: Path) -> None:
    root = tree(tmp_path, security__x="- X.")
    page = released(PAGE.partition("\n## [0.1.0]")[0], root, "0.1.0", DAY)
    assert page.endswith("In changes/.\n\n## [0.1.0] - 2026-11-30\n\n### Security\n\n- X.\n")


def test_gathering_keeps_every_entry_the_gathered_first(tmp_path: Path) -> None:
    root = tree(tmp_path, fixed__a="- A.", fixed__gathered="- Z.\n", added__n="- N.\n")
    before = released(PAGE, root, "1", DAY)
    gather(root)
    assert {kind: [path.name for path in paths] for kind, paths in fragments(root).items()} == {
        "added": ["gathered.md"],
        "fixed": ["gathered.md"],
    }
    assert (root / "changes" / "fixed" / "gathered.md").read_text() == "- Z.\n- A.\n"
    assert released(PAGE, root, "1", DAY) == before


@pytest.mark.parametrize("text", ["", "A.", "- A.\nB.", "- A.\n\n- B.", "- ", "  A.", "### Added\n- A."])
def test_what_is_no_entry_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadFragment, match="no line of an entry"):
        entries(tree(tmp_path, fixed__a=text) / "changes" / "fixed" / "a.md")


@pytest.mark.parametrize("name", ["loose", "broken__a", "fixed__deep__a"])
def test_a_file_in_another_place_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadFragment, match="is no fragment"):
        fragments(tree(tmp_path, **{name: "- A."}))


def test_a_release_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFragment, match="nothing to release"):
        release(tree(tmp_path), "0.2.0", DAY)
    assert (tmp_path / "CHANGELOG.md").read_text() == PAGE
