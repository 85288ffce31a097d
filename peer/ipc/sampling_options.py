"""How the tokens of a session are chosen: what a client asks for, and `peer.inference.sampling` does.

Imports no torch and no numpy.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final

import msgspec

from peer.config import check_range

SEED_MAX: Final = (1 << 64) - 1
LIKELIEST_MAX: Final = 20
"""The most tokens that are reported with their log-probabilities."""
BIASES_MAX: Final = 300
PENALTIES: Final = "penalties"
"""The option by which a server's record says that it knows `frequency_penalty`, `presence_penalty` and `logit_bias`."""
MASKS: Final = "masks"
"""The same of `masked`."""
PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""The same of `prompt_logprobs`."""
OPTIONS: Final = (PENALTIES, MASKS, PROMPT_LOGPROBS)
"""What servers of this version know, and earlier ones would ignore."""
SETTINGS_OF: Final = {
    PENALTIES: "frequency_penalty, presence_penalty and logit_bias",
    MASKS: "response_format",
    PROMPT_LOGPROBS: "echo with logprobs",
}
"""The parameters of a request that need each."""
TOKENS_MAX: Final = 1 << 24
_SEED_BITS: Final = 53  # so that JSON readers that hold numbers as floats get it right


TokenBias = tuple[Annotated[int, msgspec.Meta(ge=0, lt=TOKENS_MAX)], Annotated[float, msgspec.Meta(ge=-100, le=100)]]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0
    """0: the likeliest token."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Only the likeliest tokens that together have this probability (1904.09751)."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Only tokens with this share of the likeliest one's probability (2407.01082)."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    """Logits of tokens seen before are divided by this where positive, multiplied where not (1909.05858)."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # msgspec reads no number of more than 64 bits
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LIKELIEST_MAX)] = 0
    """How many of the likeliest tokens are reported with their log-probabilities."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    """A token's logit is lowered by this for each time that the answer has it."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    """A token's logit is lowered by this if the answer has it."""
    logit_bias: Annotated[tuple[TokenBias, ...], msgspec.Meta(max_length=BIASES_MAX)] = ()
    """Tokens, each once, and what is added to their logits."""
    counted_from: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    """The position at which the answer begins: earlier tokens do not count for the two penalties."""
    masked: bool = False
    """Whether the client sends a mask for each position: a token is drawn once it is there, from what it allows."""
    prompt_logprobs: bool = False
    """Whether the log-probabilities of the prompt's tokens are reported, too, with `logprobs` likeliest ones each."""

    def __post_init__(self) -> None:
        """Check what a caller gives, as its types check what another peer sends."""
        check_range(self, 0.0, 1e4, "temperature")
        check_range(self, 0, 1 << 24, "top_k")
        check_range(self, 0.0, 1.0, "top_p", "min_p")
        check_range(self, 1e-3, 1e3, "repetition_penalty")
        check_range(self, 0, SEED_MAX, "seed")
        check_range(self, 0, LIKELIEST_MAX, "logprobs")
        check_range(self, -2.0, 2.0, "frequency_penalty", "presence_penalty")
        check_range(self, 0, TOKENS_MAX, "counted_from")
        if self.prompt_logprobs and not self.logprobs:
            raise ValueError("prompt_logprobs needs logprobs: set it to 1 at least")
        if len(self.logit_bias) > BIASES_MAX:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens: name at most {BIASES_MAX}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias has a token twice: name each once")
        for token, bias in self.logit_bias:
            if not (0 <= token < TOKENS_MAX and -100 <= bias <= 100):
                raise ValueError(f"logit_bias has {bias} for token {token}: set it between -100 and 100")

    @property
    def counts(self) -> bool:
        """Whether the tokens of the answer count."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_back(self) -> bool:
        """Whether tokens before the drawn one count."""
        return self.counts or self.repetition_penalty != 1.0

    @property
    def options(self) -> tuple[str, ...]:
        """The options that a server must know to draw tokens like this."""
        asked = {
            PENALTIES: self.counts or bool(self.logit_bias),
            MASKS: self.masked,
            PROMPT_LOGPROBS: self.prompt_logprobs,
        }
        return tuple(option for option, is_asked in asked.items() if is_asked)

    @property
    def largest_bias(self) -> int:
        """The largest token id that has a bias; -1 for none."""
        return max((token for token, _ in self.logit_bias), default=-1)

    def of_answer(self, position: int) -> Sampling:
        """Return the settings of an answer that begins at a position."""
        return msgspec.structs.replace(self, counted_from=position) if self.counts or self.prompt_logprobs else self


def new_seed() -> int:
    """Return a seed by chance, for sampling that need not be repeated."""
    return secrets.randbits(_SEED_BITS)
