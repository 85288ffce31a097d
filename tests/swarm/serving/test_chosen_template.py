"""Which chat template a served model has: by rule, by its founder's --template, or by that of a user."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest

from peer.errors import ConfigError
from peer.identity import Identity
from peer.model.text.chat_templates import NamedTemplate, Templates
from peer.model.text.rules import TextRules, read_text_rules, write_text_rules
from swarm.gateway.template import open_template
from swarm.run.home import Home
from swarm.run.manifest import MANIFEST_BYTES_MAX, ServedModelManifest, fit_templates, open_any_manifest, sign_manifest
from swarm.serving.create_model import CreatedModel, PreparedModel
from swarm.serving.peer import ServeConfig, _reopen_or_prepare
from tests.swarm.gateway.served_model import TEMPLATE, write_checkpoint
from tests.swarm.run.test_bounds import MODEL
from tests.swarm.serving.both_readers import created

OTHERS: Final = (NamedTemplate("rag", "{{ documents }}"), NamedTemplate("tool_use", "{{ tools }}"))
SEVERAL: Final = TextRules(chat_template="{{ 'chat' }}", templates=Templates(name="chatml", others=OTHERS))
IDENTITY: Final = Identity.generate()


def manifest(text: TextRules) -> ServedModelManifest:
    return ServedModelManifest(
        protocol=8, authority=IDENTITY.peer_id, created_at=1, model=MODEL, tokenizer="bytes", name="m",
        cuts=tuple((n, n + 1) for n in range(MODEL.layers)), checkpoint=(b"a" * 32,) * MODEL.layers, text=text,
    )  # fmt: skip


def test_rules_without_named_templates_are_encoded_as_they_always_were() -> None:
    """So manifests and run ids stay as they are; the recorded ones are read by `tests/swarm/recorded`."""
    rules = TextRules(stops=(3,), chat_template="{{ messages }}")
    fields = ["stops", "bos_id", "pad_id", "bos", "eos", "pad", "unk", "chat_template", "generation"]
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(rules))) == fields
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SEVERAL), type=TextRules) == SEVERAL


@pytest.mark.parametrize(
    ("rules", "word", "source", "sentence"),
    [
        (SEVERAL, None, "{{ 'chat' }}", '"chatml" of 3 (chatml, rag, tool_use), as none is called default; --template'),
        (SEVERAL, "chatml", "{{ 'chat' }}", '"chatml" of 3 (chatml, rag, tool_use), as --template names it.'),
        (SEVERAL, "rag", "{{ documents }}", '"rag" of 3 (chatml, rag, tool_use), as --template names it.'),
        (SEVERAL, "plain", "", 'none, as --template plain asks for "user: ..." lines.'),
        (SEVERAL, "own.jinja", "mine", "the file own.jinja."),
        (TextRules(chat_template="x"), "default", "x", '"default" of 1 (default), as --template names it.'),
        (TextRules(chat_template="x"), None, "x", "the checkpoint's own."),
        (TextRules(), None, "", 'none in the checkpoint, so "user: ..." lines.'),
        (SEVERAL.founded_with("tool_use"), None, "{{ tools }}", '"tool_use" of 3 (tool_use, chatml, rag), as the f'),
        (SEVERAL.founded_with("tool_use"), "chatml", "{{ 'chat' }}", '"chatml" of 3'),
        (SEVERAL.founded_with("plain"), None, "", '"user: ..." lines, as the founder of the model chose, in place of'),
        (SEVERAL.founded_with("plain"), "chatml", "{{ 'chat' }}", '"chatml" of 3'),
        (TextRules(chat_template="x").founded_with("plain"), "default", "x", '"default" of 1'),
        (TextRules().founded_with("plain"), None, "", '"user: ..." lines, as the founder of the model chose.'),
    ],
)
async def test_a_word_names_a_template_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: TextRules, word: str | None, source: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own.jinja", "rag"):  # the name of a template comes before that of a file
        Path(name).write_text("mine")
    choice = rules.choice(word)
    assert choice.source == source and choice.sentence.startswith(f"Chat template: {sentence}")
    async with open_template(rules, word) as template:
        assert template.sentence == choice.sentence and template.is_plain is (not source)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            SEVERAL,
            r"names no chat template of this model \(it has 3 \(chatml, rag, tool_use\)\), and no file: give one",
        ),
        (TextRules(), r"\(it has none\), and no file: give the path of a file, or plain"),
    ],
)
@pytest.mark.parametrize("word", ["other", "", "x" * 5000, "a\0b", "no/such/file"])
def test_an_unknown_word_is_refused_with_the_names_that_there_are(rules: TextRules, words: str, word: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rules.choice(word)


def test_templates_that_a_manifest_has_no_room_for_are_left_out_and_told() -> None:
    big = tuple(NamedTemplate(f"t{number}", "x" * 20_000) for number in range(6))
    rules = TextRules(chat_template="y", templates=Templates(name="talk", others=big))
    fitted = fit_templates(manifest(rules))
    assert len(msgspec.msgpack.encode(fitted)) <= MANIFEST_BYTES_MAX
    assert open_any_manifest(sign_manifest(IDENTITY, fitted)).text == fitted.text
    assert '"talk" of 4 (talk, t0, t1, t2)' in fitted.text.choice().sentence
    assert "Left out: t5, t4, t3, longer than" in fitted.text.choice().sentence
    with pytest.raises(ConfigError, match="too long to travel with the model"):
        fitted.text.choice("t5")
    wide = fit_templates(manifest(TextRules(chat_template="\U0001f642" * 20_000)))
    assert not wide.text.chat_template and "Left out: default" in wide.text.choice().sentence
    assert fit_templates(manifest(SEVERAL)).text == SEVERAL


def test_a_founder_chooses_once(tmp_path: Path) -> None:
    folder, home = tmp_path / "model", tmp_path / "home"
    write_checkpoint(folder)
    identity = Identity.load_or_create(Home(home).path / "key")
    with pytest.raises(ConfigError, match=r"it has 1 \(default\)"):
        _reopen_or_prepare(ServeConfig(home=home, folder=folder, template="chatml"), identity)
    prepared = _reopen_or_prepare(ServeConfig(home=home, folder=folder, template="plain"), identity)
    assert isinstance(prepared, PreparedModel)
    made = created(prepared, home, identity)
    assert made.manifest.text.chat_template == ""
    assert made.manifest.text.choice("default").source == TEMPLATE
    again = _reopen_or_prepare(ServeConfig(home=home, folder=folder, template="plain"), identity)
    assert isinstance(again, CreatedModel) and again.signed == made.signed
    with pytest.raises(ConfigError, match="another chat template: drop --template, or give another --home"):
        _reopen_or_prepare(ServeConfig(home=home, folder=folder, template="default"), identity)


def test_an_export_writes_all_named_templates_and_nothing_of_another_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    (tmp_path / "chat_template.jinja").write_text("old")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "old.jinja").write_text("old")
    write_text_rules(tmp_path, msgspec.structs.replace(SEVERAL, eos="<|im_end|>", stops=(262,)))
    again = read_text_rules(tmp_path)
    assert (again.templates, again.chat_template, again.stops) == (SEVERAL.templates, SEVERAL.chat_template, (262,))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert list(tokenizer.chat_template) == ["chatml", "rag", "tool_use"] and tokenizer.eos_token == "<|im_end|>"
