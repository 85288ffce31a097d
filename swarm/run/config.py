"""Reading and checking RUN.toml. Errors name line and field.

A file is decoded in two steps, TOML to plain values and these to typed sections: msgspec knows the path of a wrong
field, and only the text shows its line.
"""

from __future__ import annotations

import difflib
import errno
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec

from optim.config import DENSE, MEAN_ONLY, METHODS, CodecConfig, OuterConfig, check_merge, check_momentum
from peer.config import TARGETS, AdapterConfig, DataConfig, InnerConfig, ModelConfig, Quantization
from peer.errors import ConfigError
from peer.files import read_bounded
from swarm.run.hub_models import hub_id
from swarm.run.sections import PipelineConfig, RunRules, TokenizerConfig, check_adapter, check_fit, check_pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_BYTES_MAX: Final = 1 << 20
INTEGER_MAX: Final = 1 << 53  # what messages and double-precision arithmetic hold exactly
_TEMPLATE_HINT: Final = "`peer coordinate --init` writes a template with every field"
_SEED: Final = ("run", "seed")  # has 63 bits and its own check
# Settings of one machine, which a run must not make for another, and one that is no more.
_REFUSED: Final[dict[tuple[str, ...], str]] = {
    ("data", "path"): "each peer names its own folder, with `peer join --data DIR`",
    ("data", "pages"): 'set source = "pages", and name the data set with `peer coordinate --data DIR`',
    ("model", "adapter"): "write the section [adapter], and [model] base = the checkpoint to tune",
    ("inner", "compile"): "each peer decides for itself, with `peer join --compile`",
    ("run", "faults_tolerated"): 'leave it out; coordinator = "required" lets no number of members make two histories',
}
_PAGES: Final = "pages"
_OF_CHATS: Final = ("chats", "chat_template")
"""Fields of [data] that name files of the coordinator's machine: no manifest has them."""
_SECTIONS: Final = {
    "seq_len": "data", "stages": "pipeline", "micro_batch": "pipeline", "method": "outer", "merge": "outer",
    "check_by_loss": "outer", "momentum": "outer",
}  # fmt: skip


class Pretrained(msgspec.Struct, frozen=True, kw_only=True):
    """`[model] init = FOLDER`: sizes, weights and (unless set otherwise) the tokenizer of a Hugging Face checkpoint.
    With `[model] base = FOLDER` its weights stay as they are, and an adapter is trained beside them."""

    init: str
    quantize: Quantization | None = None
    """Of a base: the form of its matrices. None: as they are in the checkpoint."""
    said: dict[str, Any] = {}
    """Other settings of [model] beside it, which must be those of the checkpoint."""

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError if RUN.toml says something else of the model than the checkpoint."""
        found = msgspec.to_builtins(model) | {"head_dim": model.head_size}
        for field, value in self.said.items():
            if value != found[field]:
                raise ConfigError(
                    f"[model] {field} is {value!r} and the checkpoint in {self.init} has {found[field]!r}: leave"
                    f" {field} out, as init alone is enough"
                )


class ChatsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`[data] chats = PATH`: conversations on the coordinator's machine, of which it builds the run's data set."""

    path: str
    template: str = ""
    """A file with their chat template; "" for the one beside the tokenizer."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One RUN.toml. Exactly one of `model` and `pretrained` is set; both are written as the section [model]."""

    run: RunRules
    data: DataConfig
    inner: InnerConfig
    outer: OuterConfig
    model: ModelConfig | None = None
    pretrained: Pretrained | None = None
    adapter: AdapterConfig | None = None
    """Trained beside the weights of `pretrained`; None: those themselves are trained."""
    chats: ChatsConfig | None = None
    """Written in the section [data]."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    codec: CodecConfig = CodecConfig()
    pipeline: PipelineConfig = PipelineConfig()


def read_run_config(path: Path) -> RunConfig:
    """Read and check a file. Raises ConfigError that names file, line, field and remedy."""
    try:
        text = read_bounded(path, CONFIG_BYTES_MAX).decode("utf-8-sig")
    except FileNotFoundError as error:
        if path.suffix != ".toml" and hub_id(str(path)):
            raise ConfigError(
                f"{path} is no RUN.toml: write one with `peer coordinate --init run.toml`, with"
                f' [pretrained] init = "{path}" in it to start from that checkpoint'
            ) from error
        raise ConfigError(
            f"{path} does not exist: write one with `peer coordinate --init {shlex.quote(str(path))}`"
        ) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ConfigError(f"{path} is larger than 1 MiB, so it is no RUN.toml: {_TEMPLATE_HINT}") from error
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    return parse_run_config(text, str(path))


def parse_run_config(text: str, name: str = "RUN.toml") -> RunConfig:
    """Decode and check. `name` is the name of the file in errors. Raises ConfigError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {_toml_position(str(error))}; correct that line") from error
    except RecursionError as error:
        raise ConfigError(f"{name} nests values too deeply: {_TEMPLATE_HINT}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{name} has a number that is too long: {_TEMPLATE_HINT}") from error
    for path, value in _leaves(raw):
        if isinstance(value, float) and not math.isfinite(value):
            raise _fault(name, text, path, f"{value} is no usable number")
        if isinstance(value, int) and abs(value) >= INTEGER_MAX and path != _SEED:
            raise _fault(name, text, path, "the number is too large: give less than 2**53")
    model = raw.get("model")
    tunes = isinstance(model, dict) and "base" in model
    if isinstance(model, dict) and (tunes or "init" in model):
        _take_pretrained(raw, name, text)
    elif "pretrained" in raw:
        raise _fault(name, text, ("pretrained",), "unknown section; write [model] init = ...")
    elif model is None:
        raise ConfigError(f"{name} has no section [model]: {_TEMPLATE_HINT}")
    if "adapter" in raw and not tunes:
        raise _fault(name, text, ("adapter",), "an adapter is beside a checkpoint: write [model] base = ...")
    method = _method(raw, name, text)
    chats = _take_chats(raw, name, text)
    if "pages" in (data if isinstance(data := raw.get("data"), dict) else ()):  # which only a manifest has
        raise _fault(name, text, ("data", "pages"), _why_unknown(("data",), "pages", method))
    if path := _unknown_field(raw, _sections(method)):
        raise _fault(name, text, path, _why_unknown(path[:-1], path[-1], method))
    try:
        config = msgspec.structs.replace(msgspec.convert(raw, RunConfig), chats=chats)
    except msgspec.ValidationError as error:
        path, what = _explain(str(error), method)
        raise _fault(name, text, path, what) from error
    try:
        check_merge(config.outer, config.codec, config.run.max_peers)
        check_momentum(config.outer, config.codec)
        if config.adapter is not None:
            check_adapter(config.outer)
        if config.model is not None:
            check_fit(config.model, config.data, config.tokenizer.source)
            check_pipeline(config.pipeline, config.model, config.inner, config.outer)
    except ValueError as error:
        field = str(error).split(" is ", 1)[0]
        raise _fault(name, text, (_SECTIONS.get(field, "model"), field), str(error)) from error
    return config


def _take_pretrained(raw: dict[str, Any], name: str, text: str) -> None:
    """Turn the section [model], which names a checkpoint to start from (init) or to tune (base), into what `RunConfig`
    has of it."""
    model = raw.pop("model")
    key = "base" if "base" in model else "init"
    own = {"base": str, "quantize": Quantization} if key == "base" else {"init": str}
    if key == "base" and "init" in model:
        raise _fault(name, text, ("model", "init"), "init and base exclude each other: base alone tunes an adapter")
    if path := _unknown_field(model, get_type_hints(ModelConfig) | own, ("model",)):
        raise _fault(name, text, path, _why_unknown(path[:-1], path[-1], "diloco"))
    if not isinstance(model[key], str):
        raise _fault(name, text, ("model", key), f"{key} is {model[key]!r}: name the folder of a checkpoint, or its id")
    raw["pretrained"] = {"init": model.pop(key), "quantize": model.pop("quantize", None), "said": model}
    if key == "base":
        adapter = raw.setdefault("adapter", {})
        targets = adapter.get("targets") if isinstance(adapter, dict) else None
        if isinstance(targets, list) and {*targets} <= {*TARGETS}:
            adapter["targets"] = sorted(targets, key=TARGETS.index)


def _take_chats(raw: dict[str, Any], name: str, text: str) -> ChatsConfig | None:
    """Take the conversations out of the section [data], whose source is then the data set built of them."""
    data = raw.get("data")
    if not isinstance(data, dict):
        return None
    given = {field: data.pop(field) for field in _OF_CHATS if field in data}
    for field, value in given.items():
        if not isinstance(value, str) or not value:
            raise _fault(name, text, ("data", field), f"{field} is {value!r}: name a file or folder")
        if "chats" not in given:
            raise _fault(name, text, ("data", field), f"{field} is of conversations: name these in chats, too")
    if not given:
        return None
    if data.setdefault("source", _PAGES) != _PAGES:
        why = f'of chats a data set is built: leave source out, or set it to "{_PAGES}"'
        raise _fault(name, text, ("data", "source"), why)
    return ChatsConfig(path=given["chats"], template=given.get("chat_template", ""))


def _method(raw: dict[str, Any], name: str, text: str) -> str:
    """Return the outer section's method, after filling in the default, DiLoCo."""
    outer = raw.get("outer")
    if not isinstance(outer, dict):
        return "diloco"
    method = outer.setdefault("method", "diloco")
    if not isinstance(method, str) or method not in METHODS:
        raise _fault(name, text, ("outer", "method"), f"method is {method!r}: choose one of {', '.join(METHODS)}")
    if "codec" in raw and METHODS[method] not in DENSE:
        raise _fault(name, text, ("codec",), f"method {method!r} packs its own messages: leave this section out")
    return method


def _fault(name: str, text: str, path: tuple[str, ...], what: str) -> ConfigError:
    """Return the error for a wrong field at `path`, e.g. ("inner", "lr")."""
    path = ("model", *path[1:]) if path[:1] == ("pretrained",) and len(path) > 1 else path
    line = _line_of(text, path)
    where = f"{name}, line {line}" if line else name
    field = f"[{path[0]}]" + (f" {'.'.join(path[1:])}" if len(path) > 1 else "") if path else "the file"
    return ConfigError(f"{where}: {field}: {what}; {_TEMPLATE_HINT}")


def _explain(message: str, method: str) -> tuple[tuple[str, ...], str]:
    """Return msgspec's message as (path of the wrong field, what is wrong with it)."""
    what, _, at = message.partition(" - at `$")
    path = tuple(re.findall(r"[A-Za-z_]\w*", at))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return path, f"the {'field' if path else 'section'} {missing[1]} is missing"
    if wrong := re.fullmatch(r"Invalid enum value (.*)", what):
        return path, f"{path[-1]} is {wrong[1]}: choose one of {', '.join(_choices(path, method))}"
    first_word = what.split(" ", 1)[0]
    if first_word in _fields_at(path, method):  # our own checks begin with the field's name
        return (*path, first_word), what
    return path, what[:1].lower() + what[1:].replace("`", "")


def _unknown_field(raw: dict[str, Any], fields: dict[str, Any], path: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the path of the first field that is not one of `fields` (types by name), nor of the structs in them; ()
    if all are known. The structs themselves ignore such fields, which a later version may put in a manifest."""
    for field, value in raw.items():
        if field not in fields:
            return (*path, field)
        for kind in (fields[field], *get_args(fields[field])):
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                known = {**get_type_hints(kind), str(kind.__struct_config__.tag_field): str}
                if unknown := _unknown_field(value, known, (*path, field)):
                    return unknown
    return ()


def _why_unknown(path: tuple[str, ...], field: str, method: str) -> str:
    """Return what is wrong with a field that the section at `path` does not have."""
    if instead := _REFUSED.get((*path, field)):
        return f"{field} is no setting of a run: {instead}"
    if path == ("outer",) and field in ("merge", "trim") and method in MEAN_ONLY:
        why = f"{field} is no setting of the method {method!r}, because {MEAN_ONLY[method]}"
        return f"{why}: leave it out, or choose diloco or streaming"
    known = _fields_at(path, method)
    near = difflib.get_close_matches(field, known, n=1)
    hint = f"write {near[0]}" if near else f"choose one of {', '.join(known)}"
    return f"unknown field: {hint}"


def _fields_at(path: tuple[str, ...], method: str) -> list[str]:
    """Return the names allowed in the section at `path`, in a run with that method."""
    sections = _sections(method)
    if not path:
        return [name for name in sections if name != "pretrained"]
    section = sections.get(path[0])
    names = (*section.__struct_fields__, *(_OF_CHATS if path == ("data",) else ())) if section is not None else ()
    return [name for name in names if (*path, name) not in _REFUSED]  # which only a manifest has


def _choices(path: tuple[str, ...], method: str) -> list[str]:
    """Return the words that the field at `path` accepts."""
    choices = get_args(get_type_hints(_sections(method)[path[0]])[path[-1]])
    found = [choice for one in choices for choice in (get_args(one) or (one,))]
    return [str(choice) for choice in found if choice not in (..., type(None))]


def _sections(method: str) -> dict[str, Any]:
    return {
        "run": RunRules, "model": ModelConfig, "pretrained": Pretrained, "adapter": AdapterConfig,
        "tokenizer": TokenizerConfig, "data": DataConfig, "inner": InnerConfig, "outer": METHODS[method],
        "codec": CodecConfig, "pipeline": PipelineConfig,
    }  # fmt: skip


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the 1-based line of the deepest part of `path` in the text: `key =` in its [section], else the section."""
    table: tuple[str, ...] = ()
    best: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([\w.\-\" ]+?)\s*\]+", line):
            table = tuple(part.strip(' "') for part in header[1].split("."))
            if table == path[: len(table)]:
                best = number
        elif key := re.match(r"\s*\"?([\w.\-]+?)\"?\s*=", line):
            dotted = (*table, *key[1].split("."))
            if dotted == path[: len(dotted)]:
                return number
    return best


def _toml_position(message: str) -> str:
    """Turn `Invalid value (at line 3, column 5)` into `line 3, column 5: invalid value`."""
    what, _, at = message.partition(" (at ")
    what = what[:1].lower() + what[1:]
    return f"{at.rstrip(')')}: {what}" if at else what


def _leaves(raw: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield every value with its path, in no order. No recursion: dotted keys may nest deeper than Python's stack."""
    pending: list[tuple[tuple[str, ...], object]] = [((), raw)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [((*path, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(path, inner) for inner in value]
        else:
            yield path, value
