"""A public class name means one thing; configuration is called so."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.house.source import ROOT, modules, parsed

PARTS_OF_A_MODEL = {"RopeScaling", "Pretrained"}
"""Sections of [model] that are named as Hugging Face names them."""


def test_a_public_class_name_is_unique() -> None:
    places = defaultdict(list)
    for path in modules():
        for name in re.findall(r"^class ([A-Za-z]\w*)", (ROOT / path).read_text(), re.MULTILINE):
            places[name].append(str(path))
    assert len(places) > 500
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_config_classes_end_in_config() -> None:
    """A config is a frozen struct in a module called config."""
    wrong = [
        f"{path}: {node.name}"
        for path in modules()
        if path.name == "config.py"
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if any(keyword.arg == "frozen" for keyword in node.keywords)
        if not node.name.endswith("Config") and node.name not in PARTS_OF_A_MODEL
    ]
    assert not wrong
