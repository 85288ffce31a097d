"""The "grammar" program: which tokens a schema allows, and hostile schemas in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from peer.errors import ConfigError, WorkerError
from peer.ipc.grammar_messages import ANY_OBJECT, MASK_BYTES_MAX, SCHEMA_CHARS_MAX, Grammar, GrammarBounds, TokenMask
from peer.net.flow.frames import SMALL_BYTES_MAX
from peer.worker.grammar import client
from peer.worker.grammar.client import PATIENT, QUICK, AnswerGrammar, GrammarRefused, ModelGrammars, open_grammars
from peer.worker.grammar.forks import ForkKind
from swarm.inference.masks import mask_payload_max
from tests.support.forking.forked import children
from tests.swarm.gateway.served_model import tokenizer

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
CONTENT = tokenizer().to_str().encode()
END = 262
SMALL = {"type": "object", "properties": {"the": {"enum": [1, 12]}}, "required": ["the"], "additionalProperties": False}


def grammar(schema: Any, **affixes: Any) -> Grammar:
    return Grammar(json.dumps(schema), **affixes)


def allowed(mask: TokenMask) -> list[int]:
    return [id for id in range(8 * len(mask.bits)) if mask.bits[id >> 3] >> (id & 7) & 1]


async def after(answer: AnswerGrammar, text: str) -> list[int]:
    """Return the tokens that may follow a text, one byte a token."""
    return allowed(await answer.mask(list(text.encode())))


async def test_a_mask_has_the_tokens_that_the_schema_allows() -> None:
    async with open_grammars(CONTENT, 300) as grammars:
        answer = grammars.begin(grammar(SMALL), [END])
        assert await after(answer, "") == [ord("{")]
        assert allowed(await answer.mask([*b'{"'])) == [257], "as the tokenizer writes what must come"
        assert allowed(await answer.mask([*b'{"', 257])) == [ord('"')]
        assert await after(answer, '{"the":') == [*b"\t\n\r 1"]
        assert await after(answer, '{"the":1') == [*b"\t\n\r 2}"]
        mask = await answer.mask([*b'{"the":1}'])
        assert allowed(mask) == [END] and mask.is_complete
        answer.close()
        assert allowed(await answer.mask([])) == [ord("{")]
    assert not children()


async def test_an_end_token_is_allowed_only_where_the_text_may_end() -> None:
    async with open_grammars(CONTENT, 263) as grammars:
        for ends in ([END], [ord("1"), END], []):
            answer = grammars.begin(grammar({"type": "integer"}), ends)
            digits = [id for id in b"0123456789" if id not in ends]
            assert allowed(await answer.mask([])) == [ord("-"), *digits]
            more = await answer.mask([*b"2"])
            assert allowed(more) == sorted({*digits, *ends}) and not more.is_complete
            assert (await answer.mask([*b"0"])).is_complete
            if ends:
                assert (await answer.mask([*b"2", END])).is_complete


async def test_bytes_need_no_tokenizer_and_a_vocabulary_may_be_larger() -> None:
    async with open_grammars(b"", 301) as grammars:
        answer = grammars.begin(ANY_OBJECT, [300])
        assert await after(answer, "") == [ord("{")]
        letters = await after(answer, '{"')
        assert {*b'"ab'} <= {*letters} and not {0, 10, 255, 256, 299, 300} & {*letters}
        assert await after(answer, "{}") == [300]


async def test_a_text_may_stand_around_the_json() -> None:
    async with open_grammars(b"", 256) as grammars:
        answer = grammars.begin(grammar(SMALL, prefix='<"tool">', suffix="</é>"), [])
        assert await after(answer, '<"too') == [ord("l")]
        assert await after(answer, '<"tool">{"the":1}') == [ord("<")]
        assert (await answer.mask([*'<"tool">{"the":12}</é>'.encode()])).is_complete


UNSUPPORTED: tuple[tuple[Any, str], ...] = (
    ({"not": {"type": "string"}}, "has not, which"),
    ({"properties": {"a": {"if": {}, "then": {}}}}, "has if, then, which"),
    ({"type": "array", "uniqueItems": True}, "has uniqueItems, which"),
    ({"type": "string", "format": "colour"}, "has the format colour, which"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "has oneOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "http://127.0.0.1/schema"}, "does not fetch"),
    ({"$ref": "#/nowhere"}, "/nowhere"),
    ({"type": "colour"}, "colour"),
    ({"minimum": 3, "maximum": 2, "type": "integer"}, "Unsatisfiable"),
    ([1], "no JSON object"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "has not, which"),
)


async def test_what_is_not_supported_is_refused_by_name() -> None:
    async with open_grammars(b"", 256) as grammars:
        for schema, named in UNSUPPORTED:
            with pytest.raises(GrammarRefused) as refused:
                await grammars.begin(grammar(schema), []).mask([])
            sentence = str(refused.value)
            assert named in sentence and ": " in sentence and len(sentence) < 400 and "\n" not in sentence
            assert await after(grammars.begin(grammar(SMALL), []), "") == [ord("{")], "the process goes on"


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _doubling(kind: str) -> dict[str, Any]:
    parts = {f"a{n}": {kind: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    return {"$defs": {**parts, "a40": {"type": "integer"}}, "$ref": "#/$defs/a0"}


HOSTILE = {
    "no JSON": "{",
    "deep": _nested(10_000),
    "wide": json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(6000)}}),
    "many values": json.dumps({"enum": [f"{n}" * 3 for n in range(12_000)]}),
    "counted": json.dumps({"type": "string", "pattern": "^((((a{1,1000}){1,1000}){1,1000}){1,1000})$"}),
    "states": json.dumps({"type": "string", "pattern": "^(a|b)*a(a|b){2000}$"}),
    "backtracking": json.dumps({"type": "string", "pattern": "^(a+)+$"}),
    "all of all": json.dumps(_doubling("allOf")),
    "any of all": json.dumps(_doubling("anyOf")),
    "loop": json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "numbers": json.dumps({"type": "number", "multipleOf": 1e-300, "maximum": 1e300}),
}


OFTEN = ("no JSON", "deep", "states", "any of all", "loop")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in HOSTILE]
)
async def test_a_hostile_schema_works_or_is_one_sentence_while_another_answer_goes_on(name: str) -> None:
    async with open_grammars(b"", 256) as grammars:
        other = grammars.begin(grammar(SMALL), [])
        assert await after(other, '{"the"') == [*b"\t\n\r :"]
        await _follow(grammars, HOSTILE[name])
        assert await after(other, '{"the":1') == [*b"\t\n\r 2}"]
    assert not children()


async def _follow(grammars: ModelGrammars, schema: str) -> None:
    """Follow a schema for a while: it is refused in one sentence, or gives masks."""
    answer, ids = grammars.begin(Grammar(schema), []), list[int]()
    try:
        for _ in range(40):
            mask = await answer.mask(ids)
            if mask.is_complete:
                return
            ids.append(allowed(mask)[-1])
    except GrammarRefused as error:
        assert len(str(error)) < 500 and "\n" not in str(error) and ": " in str(error)


async def test_answers_continue_after_the_program_was_killed() -> None:
    async with open_grammars(CONTENT, 263) as grammars:
        answers = [grammars.begin(grammar(SMALL), [END]) for _ in range(2)]
        for answer in answers:
            assert await after(answer, '{"') == [257]
        pid = grammars.forks.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for answer in answers:
            assert allowed(await answer.mask([*b'{"', 257])) == [ord('"')]
        while not grammars.forks.has_ended:
            await trio.sleep(0.01)
        assert await after(grammars.begin(grammar(SMALL), [END]), "") == [ord("{")]
        assert grammars.forks.starts == 2
        for answer in answers:
            assert await after(answer, '{"the":1') == [*b"\t\n\r 2}"]
        assert grammars.forks.living(QUICK) == 3 and not grammars.forks.living(PATIENT), "no schema was too much"


CLIENT = """
import psutil, trio
from peer.ipc.grammar_messages import ANY_OBJECT
from peer.worker.grammar.client import open_grammars

async def main():
    async with open_grammars(b"", 256) as grammars:
        await grammars.begin(ANY_OBJECT, []).mask([])
        program = psutil.Process(grammars.forks.pid)
        print(program.pid, *(fork.pid for fork in program.children()), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_no_process_outlives_a_client_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as killed:
        assert killed.stdout is not None
        left = [psutil.Process(int(pid)) for pid in killed.stdout.readline().split()]
        killed.kill()
    assert len(left) == 2 and not psutil.wait_procs(left, timeout=60)[1]


async def test_processes_of_answers_may_die() -> None:
    async with open_grammars(CONTENT, 263) as grammars:
        answer = grammars.begin(grammar(SMALL), [END])
        for count in range(1, 3):
            assert await after(answer, '{"the"'[:count])
            [process] = psutil.Process(grammars.forks.pid).children()
            process.kill()
            process.wait()
        with pytest.raises(GrammarRefused, match="send a simpler one"):
            await after(answer, '{"the"')


async def test_an_answer_that_is_given_up_leaves_the_program_to_the_others() -> None:
    async with open_grammars(b"", 256) as grammars:
        answer = grammars.begin(grammar(SMALL), [])
        with trio.move_on_after(0.001):
            await after(answer, "")
        assert await after(answer, "{") == [*b'\t\n\r "'] and grammars.forks.starts == 1


async def test_a_vocabulary_whose_masks_fit_no_message_is_refused() -> None:
    async with open_grammars(b"", 8 * MASK_BYTES_MAX + 1) as grammars:
        with pytest.raises(GrammarRefused, match="vocabulary"):
            grammars.begin(ANY_OBJECT, [])
    assert mask_payload_max(8 * MASK_BYTES_MAX) <= SMALL_BYTES_MAX


async def test_of_too_many_answers_the_one_that_rested_longest_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "QUICK", replace(QUICK, most=3))
    async with open_grammars(b"", 256) as grammars:
        answers = [grammars.begin(grammar(SMALL), []) for _ in range(4)]
        for _ in range(2):
            for answer in answers:
                assert await after(answer, '{"') == [ord("t")]
        assert await after(answers[0], "{") == [*b'\t\n\r "'], "or goes back"


async def test_an_answer_waits_for_room_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(QUICK, most=1)
    monkeypatch.setattr(client, "QUICK", one)
    async with open_grammars(b"", 256) as grammars:
        busy = await grammars.forks.fork(one)
        with monkeypatch.context() as context:
            context.setattr("peer.worker.grammar.forks.COMMAND_S", 0.05)
            with pytest.raises(WorkerError, match=r"1 answers compile schemas .*: try again later"):
                await grammars.begin(grammar(SMALL), []).mask([])
        busy.end()
        assert await after(grammars.begin(grammar(SMALL), []), "") == [ord("{")]


async def test_a_schema_that_takes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUICK", "PATIENT"):  # nothing can be allocated
        monkeypatch.setattr(client, name, ForkKind(GrammarBounds(1.0, 0.0, 1 << 20), 4))
    async with open_grammars(b"", 256) as grammars:
        with pytest.raises(ConfigError, match=r"more than 1 s of the processor, 1 MiB or .*: send a simpler one"):
            await grammars.begin(grammar({"enum": [f"{n}" * 9 for n in range(5_000)]}), []).mask([])


@pytest.mark.parametrize(("cpu_s", "earned_s"), [(0.02, 0.0), (0.2, 1.0)])
async def test_an_answer_that_takes_more_than_its_tokens_earn_gives_way(
    cpu_s: float, earned_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "QUICK", ForkKind(GrammarBounds(cpu_s, earned_s, 64 << 20), 4))
    async with open_grammars(b"", 256) as grammars:
        answer, ids = grammars.begin(grammar({"type": "string"}), []), [ord('"')]
        first = allowed(await answer.mask(ids))
        for _ in range(2_000):
            ids.append(ord("a"))
            mask = await answer.mask(ids)
            if grammars.forks.living(client.PATIENT):
                break
        assert allowed(mask) == first and grammars.forks.living(client.PATIENT) == (earned_s == 0)


async def test_masks_come_while_schemas_take_all_that_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENT", ForkKind(GrammarBounds(0.3, 0.0, 256 << 20, niceness=19), 2))
    refused = list[str]()

    async def follow() -> None:
        with pytest.raises(GrammarRefused) as found:
            await grammars.begin(Grammar(HOSTILE["wide"]), []).mask([])
        refused.append(str(found.value))

    async with open_grammars(b"", 256) as grammars, trio.open_nursery() as nursery:
        other = grammars.begin(grammar({"type": "string"}), [])
        for _ in range(3):
            nursery.start_soon(follow)
        count = 0
        while not refused:
            assert ord("a") in await after(other, '"' + count % 100 * "a")
            count += 1
        assert count > 4, "it waited for the schemas of others"
    assert len(refused) == 3 and len(set(refused)) == 1 and ": " in refused[0]


async def test_a_process_that_does_not_end_takes_the_program_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.worker.grammar.forks._END_S", 0.1)
    async with open_grammars(b"", 256) as grammars:
        answer, other = (grammars.begin(grammar(SMALL), []) for _ in range(2))
        assert await after(answer, "{") == await after(other, "{")
        pid = grammars.forks.pid
        for process in psutil.Process(pid).children():
            process.suspend()
        answer.close()
        while grammars.forks.pid == pid:
            await trio.sleep(0.01)
        assert await after(other, "{") == [*b'\t\n\r "'] and not grammars.forks.living(PATIENT)


async def test_a_schema_that_is_too_long_is_refused() -> None:
    async with open_grammars(b"", 256) as grammars:
        with pytest.raises(GrammarRefused, match="more than"):
            grammars.begin(Grammar(" " * (SCHEMA_CHARS_MAX + 1)), [])
        with pytest.raises(GrammarRefused, match="shorten it"):
            grammars.begin(Grammar("{}", prefix="a" * 2000), [])


async def test_a_tokenizer_that_the_library_does_not_take_is_one_sentence() -> None:
    async with open_grammars(b"{}", 256) as grammars:
        with pytest.raises(ConfigError, match=": "):
            await grammars.begin(ANY_OBJECT, []).mask([])
