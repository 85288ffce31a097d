"""RUN.toml is read, or refused with line, field and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.templates import template, with_settings
from optim.config import METHODS, DilocoConfig, EagerConfig
from peer.errors import ConfigError
from swarm.run.config import parse_run_config, read_run_config
from swarm.run.sections import PipelineConfig, schedule_caution

GOOD = """\
[run]
name = "a run"
rounds = 3

[model]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
intermediate_size = 64
max_seq_len = 64

[data]
seq_len = 64

[inner]
lr = 1e-3
batch_size = 4
total_steps = 100
betas = [0.9, 0.95]

[outer]
steps = 10
"""
STRETCH = "factor = 0.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_seq_len = 64"


def test_defaults_fill_what_is_left_out() -> None:
    config = parse_run_config(GOOD)
    assert not config.run.open and config.run.rounds == 3
    assert isinstance(config.outer, DilocoConfig)
    assert (config.outer.lr, config.outer.momentum, config.outer.nesterov) == (0.7, 0.9, True)
    assert (config.codec.up, config.codec.down, config.tokenizer.source) == ("int8", "int8", "auto")


def test_steps_follow_the_method_and_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    for method, steps in (("diloco", 100), ("sparseloco", 30), ("gossip", 50), ("demo", 1)):
        path = tmp_path / f"{method}.toml"
        path.write_text(GOOD.replace("steps = 10\n", f'method = "{method}"\n'), encoding="utf-8-sig")
        assert read_run_config(path).outer.steps == steps


@pytest.mark.parametrize(
    ("rounds", "total_steps", "schedule", "said"),
    [
        (10, 100, "cosine", ""),
        (10, 120, "cosine", ""),
        (0, 5, "cosine", ""),
        (10, 1000, "constant", ""),
        (10, 1000, "cosine", "10 x 10 = 100 inner steps .* is still high as it ends: .* total_steps = 100"),
        (100, 100, "cosine", "100 x 10 = 1000 inner steps .* falls no further long before"),
    ],
)
def test_a_schedule_that_does_not_end_with_the_run_is_warned_of(
    rounds: int, total_steps: int, schedule: str, said: str
) -> None:
    text = with_settings(GOOD, "run", {"rounds": rounds})
    text = with_settings(text, "inner", {"total_steps": total_steps, "schedule": schedule})
    config = parse_run_config(text)
    caution = schedule_caution(config.run, config.inner, config.outer)
    assert re.search(said, caution) if said else not caution


def test_settings_beside_init_must_be_those_of_the_checkpoint() -> None:
    text = GOOD.replace("[model]", '[model]\ninit = "some/folder"')
    pretrained, model = parse_run_config(text).pretrained, parse_run_config(GOOD).model
    assert pretrained is not None and model is not None
    pretrained.check(model)
    with pytest.raises(ConfigError, match=r"layers is 1 and the checkpoint in some/folder has 3: leave layers out"):
        pretrained.check(msgspec.structs.replace(model, layers=3))
    with pytest.raises(ConfigError, match=r"line \d+: \[model\] layer: unknown field: write layers"):
        parse_run_config(text.replace("layers", "layer"))


def test_a_model_may_come_from_a_folder() -> None:
    head, _, rest = GOOD.partition("hidden_size")
    config = parse_run_config(head + 'init = "some/folder"\n' + rest[rest.index("\n[data]") :])
    assert config.model is None and config.pretrained is not None
    assert config.pretrained.init == "some/folder"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("lr = 1e-3", 'lr = "fast"', 17, ["[inner] lr", "expected float, got str"]),
        ("lr = 1e-3", "lr = nan", 17, ["[inner] lr", "nan"]),
        ("lr = 1e-3", "lr = -1.0", 17, ["[inner] lr", "above 0"]),
        ("lr = 1e-3\n", "", 16, ["[inner]", "lr is missing"]),
        ("lr = 1e-3", "lr = 1e-3\nlerning_rate = 1", 18, ["[inner] lerning_rate", "unknown field"]),
        ("batch_size", "batchsize", 18, ["[inner] batchsize", "write batch_size"]),
        ("betas = [0.9, 0.95]", "betas = [0.9]", 20, ["[inner] betas", "length 2"]),
        ("kv_heads = 1", "kv_heads = 3", 9, ["[model] kv_heads", "divide"]),
        ("[data]\nseq_len = 64", "[data]\nseq_len = 128", 14, ["[data] seq_len", "max_seq_len"]),
        ("hidden_size = 32", "hidden_size = 32\nvocab_size = 100", 7, ["[model] vocab_size", "256"]),
        ("\nsteps = 10", "\nsteps = 0", 23, ["[outer] steps", "between 1 and"]),
        ("\nsteps = 10", "\nsteps = 10\ncheck_by_loss = 2.0", 24, ["[outer] check_by_loss", "between 0 and 1"]),
        (
            "\nsteps = 10",
            "\nsteps = 10\ncheck_by_loss = 0.1\n[codec]\nup = 'topk'",
            24,
            ["[outer] check_by_loss", "with the codec topk one message alone says little", "leave it out"],
        ),
        (
            "\nsteps = 10",
            "\nsteps = 10\nmomentum = 0.5\n[codec]\nup = 'powersgd'",
            24,
            ["[outer] momentum", "0.5", "powersgd", "set momentum = 0"],
        ),
        ("\nsteps = 10", "\nsteps = 10\n[codec]\nup = 'int7'", 25, ["[codec] up", "int7", "one of fp32, fp16"]),
        ("lr = 1e-3", "lr = 1e-3\nwarmup_steps = 101", 18, ["[inner] warmup_steps", "between 0 and total_steps, 100"]),
        ("lr = 1e-3", "lr = 1e-3\nschedule = 'linear'", 18, ["[inner] schedule", "one of cosine, constant"]),
        ("layers = 1", f"layers = 1\nrope_scaling = {{{STRETCH}}}", 8, ["[model] rope_scaling", "factor is 0.0"]),
        ("rounds = 3", "rounds = -3", 3, ["[run] rounds"]),
        (
            "rounds = 3",
            'coordinator = "majority"',
            3,
            ["[run] coordinator", "majority", "one of auto, witness, required"],
        ),
        (
            "rounds = 3",
            "faults_tolerated = 1",
            3,
            ["[run] faults_tolerated", "leave it out", 'coordinator = "required"'],
        ),
        ("rounds = 3", "rounds = ", 3, ["not valid TOML"]),
        ("[data]", "[dta]", 13, ["[dta]", "write data"]),
        ("[outer]\nsteps = 10", "", None, ["section outer is missing"]),
        ("[outer]", "[outer", 22, ["not valid TOML"]),
        ("[outer]", '[outer]\nmethod = ["diloco"]', 23, ["[outer] method", "choose one of"]),
        ("rounds = 3", "rounds = 99999999999999999999999", 3, ["[run] rounds", "too large"]),
        ("lr = 1e-3", f"lr = -{1 << 53}", 17, ["[inner] lr", "too large"]),
        ("rounds = 3", f"rounds = {'9' * 5000}", None, ["too long"]),
        ("rounds = 3", f"seed = {1 << 63}", 3, ["[run] seed", "2**63"]),
        ("rounds = 3", f"rounds = {'[' * 2000}{']' * 2000}", None, ["too deeply"]),
        ("layers = 1", "layers = 1000000000000", 7, ["[model] layers", "between 1 and 16384"]),
        ("hidden_size = 32", "hidden_size = 30000000000\nhead_dim = 16", 6, ["[model] hidden_size", "1048576"]),
        ("hidden_size = 32", "hidden_size = 1048576\nvocab_size = 16777216", 6, ["[model] hidden_size", "parameters"]),
        ("lr = 1e-3", "lr = 1e-3\ncompile = true", 18, ["[inner] compile", "peer join --compile"]),
        ("[data]\nseq_len = 64", "[data]\npath = 'text'\nseq_len = 64", 14, ["[data] path", "peer join --data"]),
    ],
)
def test_an_error_names_line_and_field(old: str, new: str, line: int | None, words: list[str]) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        parse_run_config(GOOD.replace(old, new))
    message = str(caught.value)
    assert (f"line {line}" in message) if line else ("line" not in message), message
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_seed_has_63_bits() -> None:
    assert parse_run_config(GOOD.replace("rounds = 3", f"seed = {(1 << 63) - 1}")).run.seed == (1 << 63) - 1


def test_keys_nested_deeper_than_the_stack_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown field|too deeply"):
        parse_run_config(f"{'.'.join('a' * 5000)} = 1\n{GOOD}")


def test_a_missing_model_and_unreadable_files_have_remedies(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no section \[model\]"):
        parse_run_config("[run]\nname = 'x'")
    with pytest.raises(ConfigError, match="does not exist: write one with `peer coordinate --init"):
        read_run_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_run_config(tmp_path / "latin.toml")


@settings(deadline=None)
@given(position=st.integers(0, len(GOOD) - 1), replacement=st.text(max_size=3))
def test_any_edit_is_read_or_refused(position: int, replacement: str) -> None:
    try:
        parse_run_config(GOOD[:position] + replacement + GOOD[position + 1 :])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


# -- pipelines --------------------------------------------------------------------------------------------------------

DEEP = GOOD.replace("layers = 1", "layers = 4\ntie_embeddings = false")


def test_one_stage_is_the_default_in_the_template_too() -> None:
    assert parse_run_config(GOOD).pipeline == PipelineConfig()
    lines = template().partition("\n# [pipeline]\n")[2].splitlines()[:4]
    section = "[pipeline]\n" + "\n".join(line.removeprefix("# ") for line in lines)
    assert {line.split(" =")[0].removeprefix("# ") for line in lines} == set(PipelineConfig.__struct_fields__)
    assert parse_run_config(f"{template()}\n{section}").pipeline == PipelineConfig()


def test_a_pipeline_is_read() -> None:
    config = parse_run_config(f'{DEEP}\n[pipeline]\nstages = 4\nmicro_batch = 2\nactivations = "int4"')
    assert config.pipeline == PipelineConfig(stages=4, micro_batch=2, activations="int4")


@pytest.mark.parametrize(
    ("text", "section", "said"),
    [
        (DEEP, "stages = 5", r"line 27: \[pipeline\] stages: stages is 5: the model's 4 blocks make at most 4 stages"),
        (DEEP, "stages = 0", r"line 27: \[pipeline\] stages: stages is 0: choose a number between 1"),
        (DEEP, "stages = 2\nmicro_batch = 3", r"line 28: \[pipeline\] micro_batch: .* divide \[inner\] batch_size"),
        (DEEP, "stages = 2\nmicro_batch = -1", r"line 28: \[pipeline\] micro_batch: micro_batch is -1"),
        (
            DEEP,
            'stages = 2\nactivations = "int2"',
            r"line 28: .*activations is 'int2': choose one of int8, int4, fp16, none",
        ),
        (DEEP, "stages = 2\nstage = 2", r"line 28: \[pipeline\] stage: unknown field: write stages"),
        (DEEP.replace("tie_embeddings = false", ""), "stages = 2", r"\[model\] tie_embeddings: .* set it to false"),
        (
            DEEP.replace("[outer]", "[outer]\ncheck_by_loss = 0.1"),
            "stages = 2",
            r"\[outer\] check_by_loss: .* a replica of a stage cannot measure the loss alone; leave it out",
        ),
        (DEEP.replace("[outer]", '[outer]\nmethod = "eager"'), "stages = 2", r"\[outer\] method: .*sparseloco"),
        (
            DEEP.replace("[outer]\nsteps = 10", '[outer]\nmethod = "allreduce"\nbatch = 6'),
            "stages = 2",
            r"\[pipeline\] micro_batch: micro_batch is 0 \(as \[inner\] batch_size, 4\): it must divide \[outer\]",
        ),
        (
            DEEP.replace("[outer]\nsteps = 10", '[outer]\nmethod = "allreduce"\nbatch = 40000'),
            "stages = 2\nmicro_batch = 1",
            r"\[pipeline\] micro_batch: micro_batch is 1: .* 40000 of them.*; raise it, or lower \[outer\] batch",
        ),
    ],
)
def test_an_error_in_a_pipeline_names_line_field_and_remedy(text: str, section: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_run_config(f"{text}\n[pipeline]\n{section}\n")


# -- methods ----------------------------------------------------------------------------------------------------------


def with_method(name: str) -> str:
    """The template with the commented lines of that method written out in place of DiLoCo's."""
    head, _, rest = template().partition("\n[outer]\n")
    block = next(part for part in rest.split("\n\n") if f'# method = "{name}"' in part)
    written = [line.removeprefix("# ") for line in block.splitlines()]
    return f"{head}\n[outer]\n" + "\n".join(line.replace("# method", "method") for line in written)


@pytest.mark.parametrize("name", METHODS)
def test_the_template_shows_every_method_and_its_defaults(name: str) -> None:
    outer = parse_run_config(with_method(name)).outer
    assert isinstance(outer, METHODS[name])
    assert outer == METHODS[name](**({"batch": 64} if name == "allreduce" else {}))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('method = "dilocco"\nsteps = 5', r"line 20: \[outer\] method: method is 'dilocco': choose one of diloco"),
        ('method = "demo"\nfragments = 2', "unknown field"),
        (
            'steps = 5\nmerge = "krum"',
            ".outer. merge: merge is 'krum': choose one of mean, trimmed_mean, median",
        ),
        ('steps = 5\nmerge = "trimmed_mean"\ntrim = 0.5', "trim is 0.5: set it to at least 0.01 and below 0.5"),
        ('steps = 5\nmerge = "median"\ntrim = 0.1', "set merge = .trimmed_mean. or leave it out"),
        ('method = "demo"\nmerge = "median"', "merge is no setting of the method 'demo', because a coefficient"),
        ('method = "eager"\nsteps = 5\nmerge = "flag"', "choose diloco or streaming"),
        (
            'steps = 5\nmerge = "median"\n[codec]\nup = "topk"',
            ".outer. merge: merge is 'median': with the codec",
        ),
        ('method = "streaming"\nsteps = 10\nfragments = 3', "to a multiple of fragments"),
        ('method = "lion"\n[codec]\nup = "int4"', "packs its own messages: leave this section out"),
        ('steps = 5\n[codec]\ndown = "topk"', "topk"),
        ('steps = 5\nschedule = "quadratic"', r"alpha is 0\.0 with schedule"),
    ],
)
def test_an_error_in_a_method_names_line_field_and_remedy(section: str, said: str) -> None:
    head = template().partition("\n[outer]\n")[0]
    with pytest.raises(ConfigError, match=said if "line" not in said else said.replace("line 20", r"line \d+")):
        parse_run_config(f"{head}\n[outer]\n{section}\n")


def test_eager_updates_warn_where_they_diverge() -> None:
    eager = EagerConfig(steps=10, momentum=0.9)
    assert eager.caution(4) == "" and "use streaming" in eager.caution(8)
    assert EagerConfig(steps=10).caution(64) == ""


TUNED = re.sub(r"\[model\].*?\n\n", '[model]\nbase = "folder"\n\n[adapter]\nrank = 4\n\n', GOOD, flags=re.DOTALL)


def test_a_base_with_an_adapter_is_read() -> None:
    config = parse_run_config(TUNED)
    assert config.model is None and config.pretrained is not None
    assert (config.pretrained.init, config.pretrained.quantize) == ("folder", None)
    assert config.adapter is not None and (config.adapter.rank, len(config.adapter.targets)) == (4, 7)
    few = parse_run_config(TUNED.replace("rank = 4", 'targets = ["v_proj", "q_proj"]')).adapter
    assert few is not None and few.targets == ("q_proj", "v_proj")
    narrow = parse_run_config(TUNED.replace('"folder"', '"folder"\nquantize = "nf4"'))
    assert narrow.pretrained is not None and narrow.pretrained.quantize == "nf4"
    assert parse_run_config(TUNED.replace("[adapter]\nrank = 4\n", "")).adapter is not None
    assert parse_run_config(GOOD).adapter is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rank = 4", "rank = 0", "line 9: [adapter] rank: rank is 0: set it between 1 and 4096"),
        ("rank = 4", "alpha = nan", "line 9: [adapter] alpha: nan is no usable number"),
        ("rank = 4", "targets = []", "[adapter] targets: targets is empty: name some of q_proj, "),
        ("rank = 4", 'targets = ["lm_head"]', "[adapter] targets: targets is 'lm_head': choose one of q_proj, "),
        ("rank = 4", 'targets = ["q_proj", "q_proj"]', "[adapter] targets: targets are not in order, or not once each"),
        ("rank = 4", "rank = 4\ndropout = 1.0", "dropout is 1.0: choose a share of at least 0 and below 1"),
        ("rank = 4", "rnk = 4", "[adapter] rnk: unknown field: write rank"),
        ('base = "folder"', "base = 3", "line 6: [model] base: base is 3: name the folder of a checkpoint, or its id"),
        ('base = "folder"', 'base = "f"\ninit = "f"', "init and base exclude each other"),
        ('base = "folder"', 'base = "f"\nquantize = "int4"', "quantize is 'int4': choose one of int8, nf4"),
        (
            'base = "folder"',
            'init = "folder"',
            "[adapter]: an adapter is beside a checkpoint: write [model] base",
        ),
        ("\nsteps = 10", '\nmethod = "gossip"', "method is 'gossip': an adapter needs a common state; choose diloco"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_with_its_line(old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run_config(TUNED.replace(old, new))
    assert words in str(refused.value)
