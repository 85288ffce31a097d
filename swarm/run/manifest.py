"""The manifest: what the authority signs about a training run or a served model, and what every peer must agree on.

The hash of a manifest names it, so no rule can change without a new run. It names nothing of a peer's machine: no path,
host or command. Gate, invites and the transfer of manifests take either kind.
"""

from __future__ import annotations

from base64 import b32encode
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final, TypeVar, cast

import msgspec
from blake3 import blake3

from optim.config import AllReduceConfig, CodecConfig, OuterConfig, check_merge
from peer.bounds import HASH_BYTES, Name
from peer.config import (
    TOKENS_MAX,
    AdapterConfig,
    DataConfig,
    HiddenType,
    InnerConfig,
    ModelConfig,
    Quantization,
    StorageConfig,
    WeightType,
    check_range,
)
from peer.errors import ConfigError, NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, is_peer_id, open_body, sign_body
from peer.model.text.rules import TextRules
from swarm.protocol.agreement.config import Mode
from swarm.protocol.head import Head, genesis
from swarm.run.features import (
    adapter_features,
    check_features,
    features_of,
    inner_features,
    message_features,
    model_features,
    weight_features,
)
from swarm.run.hub_models import is_hub_id
from swarm.run.sections import (
    PipelineConfig,
    RunRules,
    check_fit,
    check_model,
    check_name,
    check_pipeline,
    check_tokenizer_name,
    micro_batch_of,
)

PROTOCOL_VERSION: Final = 8
OLDEST_SPOKEN: Final = max(8, PROTOCOL_VERSION - 1)  # the number before; 7 cannot be spoken any more
MANIFEST_BYTES_MAX: Final = 64 << 10
TIME_MAX_S: Final = 1 << 40
VERSION_MAX: Final = 1 << 16
RUN_ID_BYTES: Final = 20
ADAPTERS_MAX: Final = 64
_TAG_BYTES: Final = 16

FEATURES_MAX: Final = 16
_KIND: Final = "manifest"
_TAG_FIELD: Final = "kind"

BlockRange = tuple[int, int]
"""Blocks (first, past the last)."""


class CommonManifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Fields common to the manifests of a training run and of a served model."""

    protocol: int
    """Version of the wire protocol, which the run keeps for as long as it lives."""
    authority: str
    """The peer id that signs."""
    created_at: int
    """Seconds since the Unix epoch."""
    model: ModelConfig
    tokenizer: str
    """"bytes", or the hex blake3 of the tokenizer.json."""
    requires: Annotated[tuple[Name, ...], msgspec.Meta(max_length=FEATURES_MAX)] = ()
    """Features without which a peer would compute something else. A field that is not known is ignored; a feature that
    is not known is refused."""

    def __post_init__(self) -> None:
        if not is_peer_id(self.authority):
            raise ValueError("authority is not the id of an Ed25519 peer")
        check_range(self, 0, TIME_MAX_S, "created_at")
        check_range(self, 0, VERSION_MAX, "protocol")
        check_tokenizer_name(self.tokenizer)
        if not set(model_features(self.model)) <= set(self.requires):
            raise ValueError("requires lacks a feature that the model needs")

    @cached_property
    def run_id(self) -> str:
        """32 characters that name the run or served model: base32 of a 160-bit hash of the manifest's bytes.

        `open_any_manifest` sets it from the bytes that came, which may hold fields that this version does not know."""
        return _named(msgspec.msgpack.encode(self))


class FrozenBase(StorageConfig, frozen=True, kw_only=True):
    """The weights that a run with an adapter leaves as they are, in parts."""

    cuts: tuple[BlockRange, ...]
    """The blocks of each part."""
    checkpoint: tuple[bytes, ...]
    """The state hash of each part (`peer.checkpoint.hash_tree`)."""


class Manifest(CommonManifest, frozen=True, kw_only=True, tag_field=_TAG_FIELD, tag="training_run"):
    """The agreed rules of a training run.

    The replicas of one stage are a *group*. A group has its own rounds, heads and state, under the group's id.
    """

    run: RunRules
    data: DataConfig
    inner: InnerConfig
    outer: OuterConfig
    codec: CodecConfig
    pipeline: PipelineConfig
    cuts: tuple[BlockRange, ...]
    """The blocks of each stage."""
    genesis: tuple[bytes, ...]
    """The state hash of round 0 of each stage."""
    text: TextRules = TextRules()
    """Of the checkpoint that the run starts from; an export writes it back."""
    export_dtype: WeightType = "fp32"
    """That checkpoint's, and so that of an export if nothing else is asked for."""
    base_model: str = ""
    """That checkpoint's id on the Hugging Face Hub, which an export names; "" for a folder or a new model."""
    base: FrozenBase | None = None
    """Of a model with an adapter: what the adapter is beside."""

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {*features_of(self.run, self.data, self.pipeline.stages), *message_features(self.outer, self.codec)}
        needed |= {*inner_features(self.inner), *weight_features(None if self.base is None else self.base.quantization)}
        if not needed <= set(self.requires):
            raise ValueError("requires lacks a feature that the rules need")
        if (self.base is None) != (self.model.adapter is None):
            raise ValueError("a base is named without an adapter, or an adapter without its base")
        if self.base is not None:
            _check_parts(self.base.checkpoint, self.base.cuts, self.model)
        if (self.data.source == "pages") != (self.data.pages is not None):
            raise ValueError("pages are not named where the source is pages, or where it is not")
        if self.base_model and not is_hub_id(self.base_model):
            raise ValueError("base_model is no id of the Hugging Face Hub")
        if len(self.genesis) != self.pipeline.stages or any(len(root) != HASH_BYTES for root in self.genesis):
            raise ValueError("genesis is not a hash of 32 bytes for each stage")
        check_fit(self.model, self.data, self.tokenizer)
        check_pipeline(self.pipeline, self.model, self.inner, self.outer)
        check_merge(self.outer, self.codec, self.run.max_peers)
        if len(self.cuts) != self.pipeline.stages:
            raise ValueError("cuts are not the blocks of each stage")
        _check_cuts(self.cuts, self.model)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def open(self) -> bool:
        """Whether any peer may join; else only with a token."""
        return self.run.open

    @property
    def stages(self) -> int:
        """How many stages, and so groups, there are; 1 if every peer holds the whole model."""
        return len(self.cuts)

    @property
    def groups(self) -> tuple[str, ...]:
        """The group id of each stage, which the heads of its replicas carry. Of a single stage it is the run's id."""
        run_id = self.run_id
        if self.stages == 1:
            return (run_id,)
        named = (blake3(f"{run_id}/{stage}".encode()).digest(RUN_ID_BYTES) for stage in range(self.stages))
        return tuple(map(run_id_text, named))

    def group_id(self, stage: int) -> str:
        """Return the id of the group of `stage`."""
        return self.groups[stage]

    def first_head(self, stage: int = 0) -> Head:
        """Return round 0 of the group of `stage`."""
        return genesis(self.group_id(stage), self.genesis[stage])

    @property
    def agreement_mode(self) -> Mode:
        """The votes that make a certificate in its groups."""
        if self.run.coordinator == "auto":
            return "required" if self.open or self.stages > 1 else "witness"
        return self.run.coordinator

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch."""
        return micro_batch_of(self.pipeline, self.inner)

    @property
    def synchronous(self) -> bool:
        """Whether weights change at commits only: all replicas of a stage make each step together."""
        return isinstance(self.outer, AllReduceConfig)


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a served model, which a request may choose by name."""

    name: str
    adapter: AdapterConfig
    root: bytes
    """The state hash of its one part, in fp32."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if len(self.root) != HASH_BYTES:
            raise ValueError("root is not a hash of 32 bytes")

    @property
    def tag(self) -> bytes:
        """The name by which a session chooses it (`swarm.inference.messages.StartSession.commit`)."""
        return self.root[:_TAG_BYTES]


class ServedModelManifest(CommonManifest, frozen=True, kw_only=True, tag_field=_TAG_FIELD, tag="served_model"):
    """The agreed rules of a served model: which weights, in which parts, and who may take part."""

    name: str
    open: bool = True
    """Whether any peer may join; else only with a token."""
    cuts: tuple[BlockRange, ...]
    """The blocks of each part of the checkpoint."""
    checkpoint: tuple[bytes, ...]
    """The state hash of the weights of each part (`peer.checkpoint.hash_tree`)."""
    dtype: HiddenType = "fp32"
    """Of the weights, and of what is computed with them."""
    window: int | None = None
    """How many tokens a token sees, itself included; None for all."""
    text: TextRules = TextRules()
    quantization: Quantization | None = None
    """Of the matrices inside of the blocks (`peer.footprint.stored`); None: they are in `dtype`."""
    adapters: Annotated[tuple[ServedAdapter, ...], msgspec.Meta(max_length=ADAPTERS_MAX)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.name)
        if len({self.name, *(one.name for one in self.adapters)}) <= len(self.adapters):
            raise ValueError("two adapters, or one and the model, have the same name")
        if self.window is not None:
            check_range(self, 1, TOKENS_MAX, "window")
        if not {*weight_features(self.quantization), *adapter_features(self.adapters)} <= set(self.requires):
            raise ValueError("requires lacks a feature that the weights need")
        check_model(self.model, self.tokenizer)
        if self.model.adapter is not None:
            raise ValueError("a served model has an adapter")
        _check_parts(self.checkpoint, self.cuts, self.model)


FittedManifest = TypeVar("FittedManifest", Manifest, ServedModelManifest)


def open_served_manifest(signed: Signed, run_id: str | None = None) -> ServedModelManifest:
    """Check and return the manifest of a served model. Also raises ConfigError if it is that of a training run."""
    return served_manifest(open_any_manifest(signed, run_id))


def served_manifest(manifest: AnyManifest) -> ServedModelManifest:
    """Return `manifest` if it is that of a served model; else raise ConfigError."""
    if not isinstance(manifest, ServedModelManifest):
        raise ConfigError(
            f"{manifest.name!r} is a training run, not a served model: ask for an invite that `peer serve` has printed"
        )
    return manifest


def fit_templates(manifest: FittedManifest) -> FittedManifest:
    """Return the manifest with as many of the checkpoint's chat templates as it has room for, the first ones. The rest
    is named in its text rules as left out."""
    while len(msgspec.msgpack.encode(manifest)) > MANIFEST_BYTES_MAX:
        fewer = manifest.text.without_a_template()
        if fewer is None:
            return manifest
        manifest = msgspec.structs.replace(manifest, text=fewer)
    return manifest


AnyManifest = Manifest | ServedModelManifest
"""Either kind. On the wire and on disk the field `kind` distinguishes them."""


def sign_manifest(identity: Identity, manifest: AnyManifest) -> Signed:
    """Return the manifest with the authority's signature; ValueError if `identity` is not that authority."""
    if identity.peer_id != manifest.authority:
        raise ValueError("the manifest names another authority than the signer")
    return sign_body(identity, _KIND, manifest)


def open_any_manifest(signed: Signed, run_id: str | None = None) -> AnyManifest:
    """Check and return a manifest of either kind that a peer or a file supplied.

    Raises ProtocolViolation if it is forged or malformed, NotAdmitted if it is sound but of another protocol version
    or (given `run_id`) of another run.
    """
    if len(signed.body) > MANIFEST_BYTES_MAX:
        raise ProtocolViolation(f"the manifest is larger than {MANIFEST_BYTES_MAX} bytes")
    preamble = open_body(signed, _KIND, _Preamble)  # first: another version may have other fields
    check_protocol(preamble.protocol)
    check_features(preamble.requires)
    kinds = cast("type[AnyManifest]", AnyManifest)
    manifest = open_body(signed, _KIND, kinds, signer=preamble.authority)
    vars(manifest)["run_id"] = _named(signed.body)
    if run_id is not None:
        check_run(manifest, run_id)
    return manifest


def open_manifest(signed: Signed, run_id: str | None = None) -> Manifest:
    """Check and return the manifest of a training run. Also raises ConfigError if it is that of a served model."""
    return training_manifest(open_any_manifest(signed, run_id))


def training_manifest(manifest: AnyManifest) -> Manifest:
    """Return `manifest` if it is that of a training run; else raise ConfigError."""
    if not isinstance(manifest, Manifest):
        raise ConfigError(
            f"{manifest.name!r} is a served model, not a training run: ask for an invite to a training run"
        )
    return manifest


def check_protocol(version: int) -> None:
    """Raise NotAdmitted if a run, in a home or of other peers, is of a version of the protocol that is not spoken here.

    All peers of a run speak the version in its manifest, also those whose software knows the next one."""
    if version > PROTOCOL_VERSION:
        raise NotAdmitted(
            f"the run speaks protocol version {version} and this software {_versions_spoken()}:"
            " upgrade barnraise on this machine"
        )
    if version < OLDEST_SPOKEN:
        raise NotAdmitted(
            f"the run speaks protocol version {version}, which this software ({_versions_spoken()}) does not:"
            " finish or export it with the barnraise that made it, or create a new run in another home"
        )


def _versions_spoken() -> str:
    if OLDEST_SPOKEN == PROTOCOL_VERSION:
        return f"version {PROTOCOL_VERSION}"
    return f"versions {OLDEST_SPOKEN} and {PROTOCOL_VERSION}"


def check_run(manifest: CommonManifest, run_id: str) -> None:
    """Raise NotAdmitted if `run_id` is not the manifest's."""
    if manifest.run_id != run_id:
        raise NotAdmitted(
            f"the manifest is of run {manifest.run_id}, not of {run_id}: ask for an invite to the right run"
        )


def _named(encoded: bytes) -> str:
    return run_id_text(blake3(encoded).digest(RUN_ID_BYTES))


def run_id_text(raw: bytes) -> str:
    """Return the 32-character form of a run id."""
    return b32encode(raw).decode().lower()


class _Preamble(msgspec.Struct, frozen=True):
    """Fields of every version of the manifest."""

    protocol: int
    authority: str
    requires: Annotated[tuple[Name, ...], msgspec.Meta(max_length=FEATURES_MAX)] = ()


def _check_parts(checkpoint: tuple[bytes, ...], cuts: tuple[BlockRange, ...], model: ModelConfig) -> None:
    if len(checkpoint) != len(cuts) or any(len(root) != HASH_BYTES for root in checkpoint):
        raise ValueError("checkpoint is not a hash of 32 bytes for each part")
    _check_cuts(cuts, model)


def _check_cuts(cuts: tuple[BlockRange, ...], model: ModelConfig) -> None:
    ends = [0, *(end for _, end in cuts)]
    whole = [*pairwise(ends)] == [*cuts] and all(first < end for first, end in cuts)
    if not whole or ends[-1] != model.layers:
        raise ValueError("cuts are not all blocks of the model, one span after the other")
    if any(end % model.shared_blocks for end in ends):
        raise ValueError("cuts part blocks that share their parameters")
