"""Sections of RUN.toml that no other package defines, and the checks across sections."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from optim.config import AllReduceConfig, DilocoConfig, OuterConfig, SparseLocoConfig
from peer.config import SEQUENCES_MAX, DataConfig, InnerConfig, ModelConfig
from swarm.protocol.plan import RANGES_MAX

BYTES_TOKENIZER: Final = "bytes"
AUTO_TOKENIZER: Final = "auto"
PEERS_MAX: Final = 1024
STAGES_MAX: Final = 1024
ROUNDS_MAX: Final = 1 << 40
COMPUTE_S: Final = 3600.0
COMPUTE_S_LEAST: Final = 1.0
COMPUTE_S_MOST: Final = 7 * 86400.0
NAME_CHARACTERS_MAX: Final = 64
SCHEDULE_TOLERANCE: Final = 0.8  # of the longer of the run and its schedule
_LICENSE: Final = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_HASH: Final = re.compile("[0-9a-f]{64}")


class RunRules(msgspec.Struct, frozen=True, kw_only=True):
    """The section [run]: who takes part, and for how long."""

    name: str
    open: bool = False
    """Whether any peer may join; else only with a token from the authority."""
    min_peers: int = 2
    """The run starts once this many peers wait."""
    max_peers: int = 64
    """Members of one group at most."""
    members_per_prefix: int = 8
    """Members of one group at most whose addresses share a /24 (IPv6: a /64), so that a machine with many identities
    is no majority: an invite admits several, too. Peers seen only through a relay share one prefix."""
    rounds: int = 0
    """The run is complete after this many; 0: it has no end."""
    seed: int = 0
    """Of the initial weights and the order of the samples."""
    timeout_floor_s: float = 0.0
    """0: deadlines adapt to what is measured. Above 0: no deadline is shorter. The only deadline that a user sets."""
    compute_s_max: float = COMPUTE_S
    """Seconds after which the training of any round ends, however much of it is done."""
    coordinator: Literal["auto", "witness", "required"] = "auto"
    """Whether rounds continue without the coordinator ("witness"), or need its vote and it regroups without the
    operator ("required"). "auto": required in an open run, where one operator may be the majority, and in a pipeline,
    whose small groups often lose theirs; else witness."""
    lone_survivor: bool = False
    """Whether a required coordinator continues by itself where of three members or more one is left, or only newcomers
    answer. They may lie."""
    license: str = ""
    """Of the model, as the Hugging Face Hub abbreviates it, such as "apache-2.0": an export names it."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.license and not _LICENSE.fullmatch(self.license):
            raise ValueError(f"license is {self.license!r}: give the Hub's abbreviation of it, such as apache-2.0")
        _check_between(self, "min_peers", 1, self.max_peers, f"1 and max_peers ({self.max_peers})")
        if self.max_peers > PEERS_MAX:
            raise ValueError(f"max_peers is {self.max_peers}: choose at most {PEERS_MAX}, the limit of one group")
        _check_between(self, "members_per_prefix", 1, PEERS_MAX, f"1 and {PEERS_MAX}")
        _check_between(self, "rounds", 0, ROUNDS_MAX, f"0 (no end) and {ROUNDS_MAX}")
        _check_between(self, "seed", 0, (1 << 63) - 1, "0 and 2**63 - 1")
        _check_between(self, "timeout_floor_s", 0, 3600, "0 (adaptive) and 3600")
        if not COMPUTE_S_LEAST <= self.compute_s_max <= COMPUTE_S_MOST:
            raise ValueError(
                f"compute_s_max is {self.compute_s_max}: choose a number of seconds between {COMPUTE_S_LEAST:g} and"
                f" {COMPUTE_S_MOST:g}"
            )

    def cautions(self) -> list[str]:
        """Return what the owner should know about these rules, a sentence each."""
        found = []
        if self.open and self.coordinator == "witness":
            found.append(
                "in an open run one person with enough identities becomes the majority, and with coordinator ="
                ' "witness" a majority of keys is the run: leave it out, choose "required", or set open = false'
            )
        if self.lone_survivor:
            found.append(
                "with lone_survivor = true the run continues by itself with the last of three members or more, or"
                " with newcomers, which may lie: leave it out where you do not know all members"
            )
        return found


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section [tokenizer]."""

    source: str = AUTO_TOKENIZER
    """"auto": that of the checkpoint which the run starts from, bytes for a new model. Or "bytes", or the path of a
    `tokenizer.json` or of a folder that holds one, or the id of a model on the Hugging Face Hub."""


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section [pipeline]: how the model is cut into stages."""

    stages: int = 1
    """If 1, every peer holds the whole model, and the other fields have no meaning."""
    micro_batch: int = 0
    """Sequences that travel together; 0: as many as [inner] batch_size."""
    activations: Literal["int8", "int4", "fp16", "none"] = "int8"
    """How hidden states and their gradients cross the wire ("none": fp32)."""
    recompute: bool = False
    """A stage keeps only the input of a micro-batch that waits for its gradient, and computes the rest again: less
    memory, a third more work."""

    def __post_init__(self) -> None:
        _check_between(self, "stages", 1, STAGES_MAX, f"1 (no pipeline) and {STAGES_MAX}")
        if not 0 <= self.micro_batch <= SEQUENCES_MAX:
            raise ValueError(f"micro_batch is {self.micro_batch}: give a number of sequences, or 0")


def _check_between(section: msgspec.Struct, field: str, least: float, most: float, bounds: str) -> None:
    """Raise ValueError unless a number lies in these bounds, which the error names in words."""
    value = getattr(section, field)
    if not least <= value <= most:
        raise ValueError(f"{field} is {value}: choose a number between {bounds}")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` may name a run or a served model."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise ValueError(f"name is {name!r}: give 1 to {NAME_CHARACTERS_MAX} printable characters")


def check_tokenizer_name(tokenizer: str) -> None:
    """Raise ValueError unless `tokenizer` is "bytes" or a hash."""
    if tokenizer != BYTES_TOKENIZER and not _HASH.fullmatch(tokenizer):
        raise ValueError("tokenizer is neither bytes nor a hash")


def check_model(model: ModelConfig, tokenizer: str) -> None:
    """Raise ValueError, beginning with the field's name, unless the model has room for the tokenizer's ids."""
    if tokenizer in (AUTO_TOKENIZER, BYTES_TOKENIZER) and model.vocab_size < 256:
        raise ValueError(f"vocab_size is {model.vocab_size}: give the byte tokenizer at least 256")


def check_fit(model: ModelConfig, data: DataConfig, tokenizer: str) -> None:
    """Raise ValueError, beginning with the field's name, unless model, data and tokenizer fit together."""
    if data.seq_len > model.max_seq_len:
        raise ValueError(f"seq_len is {data.seq_len}: choose at most the model's max_seq_len ({model.max_seq_len})")
    check_model(model, tokenizer)


def micro_batch_of(pipeline: PipelineConfig, inner: InnerConfig) -> int:
    """Return the sequences of one micro-batch."""
    return pipeline.micro_batch or inner.batch_size


def check_pipeline(pipeline: PipelineConfig, model: ModelConfig, inner: InnerConfig, outer: OuterConfig) -> None:
    """Raise ValueError, beginning with the field's name, unless the other sections suit the pipeline."""
    if model.adapter is not None:
        check_adapter(outer)
    if pipeline.stages == 1:
        return
    most = model.layers // model.shared_blocks
    if pipeline.stages > most:
        blocks = "blocks" if model.shared_blocks == 1 else f"blocks, {model.shared_blocks} of which share parameters,"
        raise ValueError(
            f"stages is {pipeline.stages}: the model's {model.layers} {blocks} make at most {most}"
            f" stage{'' if most == 1 else 's'}; lower stages, or take a model of more layers"
        )
    if model.tie_embeddings and model.adapter is None:
        raise ValueError("tie_embeddings is true: a pipeline's head is not where its embedding is; set it to false")
    if not isinstance(outer, DilocoConfig | SparseLocoConfig | AllReduceConfig):
        method = outer.__struct_config__.tag
        raise ValueError(f"method is {method!r}: with stages > 1 choose diloco, sparseloco or allreduce")
    if isinstance(outer, DilocoConfig) and outer.check_by_loss:
        raise ValueError(
            f"check_by_loss is {outer.check_by_loss}: a replica of a stage cannot measure the loss alone; leave it out"
        )
    size = micro_batch_of(pipeline, inner)
    whole, samples = "[inner] batch_size", inner.batch_size
    if isinstance(outer, AllReduceConfig):
        whole, samples = "[outer] batch", outer.batch
    meaning = "" if pipeline.micro_batch else f" (as [inner] batch_size, {size})"
    if samples % size:
        raise ValueError(f"micro_batch is {pipeline.micro_batch}{meaning}: it must divide {whole} ({samples})")
    if isinstance(outer, AllReduceConfig) and samples // size > RANGES_MAX:
        raise ValueError(
            f"micro_batch is {pipeline.micro_batch}{meaning}: {whole} ({samples}) has {samples // size} of them, more"
            f" than the {RANGES_MAX} that one message can name; raise it, or lower {whole}"
        )


def check_adapter(outer: OuterConfig) -> None:
    """Raise ValueError, beginning with the field's name, unless an adapter can be trained so."""
    if not outer.has_common_state:
        method = outer.__struct_config__.tag
        raise ValueError(f"method is {method!r}: an adapter needs a common state; choose diloco")


def schedule_caution(rules: RunRules, inner: InnerConfig, outer: OuterConfig) -> str:
    """Return a warning if the learning rate's schedule does not end where the run does, or an empty string."""
    grows = isinstance(outer, DilocoConfig) and outer.schedule == "quadratic"
    if not rules.rounds or inner.schedule == "constant" or grows:
        return ""
    each = 1 if isinstance(outer, AllReduceConfig) else outer.steps
    steps = rules.rounds * each
    if SCHEDULE_TOLERANCE * steps <= inner.total_steps <= steps / SCHEDULE_TOLERANCE:
        return ""
    effect = "falls no further long before the run ends" if inner.total_steps < steps else "is still high as it ends"
    return (
        f"rounds x steps is {rules.rounds} x {each} = {steps} inner steps and the schedule ends at total_steps ="
        f" {inner.total_steps}, so the learning rate {effect}: set [inner] total_steps = {steps}"
    )
