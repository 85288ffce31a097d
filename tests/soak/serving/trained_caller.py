"""A small Llama that is trained to call three tools, from a fixed seed, in about a minute of one core.

It learns from conversations in the Hermes form. Each question has words and numbers by which it is learnt, or held out
for the tests. `Talk` is what a model without a mistake says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Message = dict[str, Any]
SEED: Final = 1
STEPS, BATCH, RATE, WARM_STEPS = 600, 8, 3e-3, 50
TALKS: Final = 2500
CONTEXT: Final = 512
EOS: Final = "<|im_end|>"
SPECIAL: Final = ("<|im_start|>", EOS)
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ANSWER: Final = "<|im_start|>assistant\n"
NOT_LEARNT: Final = -100
TEMPLATE: Final = """{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- ' ' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' }}
    {%- endfor %}
    {{- ' </tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""In the Hermes form, but short: it writes the name and the arguments of a tool alone."""
CITIES: Final = (
    *("Paris", "Rome", "Berlin", "Madrid", "Oslo", "Vienna", "Lisbon", "Dublin", "Prague", "Warsaw", "Athens"),
    *("Cairo", "Lima", "Quito", "Tokyo", "Seoul", "Delhi", "Hanoi", "Nairobi", "Boston", "Chicago", "Denver"),
)
UNITS: Final = {"miles": ("kilometers", 1.609), "pounds": ("kilograms", 0.454), "feet": ("meters", 0.305)}
SKIES: Final = ("sunny", "cloudy", "rainy", "windy")
GREETINGS: Final = (("Hello!", "Hello! How can I help?"), ("Thank you!", "You are welcome."))


# -- tools -------------------------------------------------------------------------------------------------------------


def get_weather(city: str) -> str:
    """Return the weather of a city, the same each time."""
    return _weather(random.Random(city))


def add(a: int, b: int) -> str:
    """Return the sum."""
    return f'{{"sum": {a + b}}}'


def convert(amount: int, unit: str) -> str:
    """Return an amount in its metric unit."""
    name, factor = UNITS[unit]
    return f"It is {round(amount * factor)} {name}"


def _weather(chance: random.Random) -> str:
    return f"It is {chance.choice(SKIES)}, {chance.randint(10, 39)} degrees"


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


FUNCTIONS: Final[dict[str, Callable[..., str]]] = {"get_weather": get_weather, "add": add, "convert": convert}
TOOLS: Final = [
    _tool("get_weather", "The weather of a city", city="string"),
    _tool("add", "The sum of two numbers", a="integer", b="integer"),
    _tool("convert", "An amount in its metric unit", amount="integer", unit="string"),
]


# -- conversations -----------------------------------------------------------------------------------------------------


class Talk:
    """A conversation with a model that makes no mistake. `held_out`: whether of questions that are not learnt, where
    the weather is what the tool says; it is drawn elsewhere, so that it is learnt from no city's name."""

    def __init__(self, chance: random.Random, held_out: bool) -> None:
        self.messages: list[Message] = []
        self._chance, self._held_out = chance, held_out

    def add_question(self, kind: str) -> None:
        """Add a question of one of `KINDS`, the calls that it needs and the answer."""
        while True:
            cities = self._chance.sample(CITIES, 2)
            a, b, unit = self._chance.randint(10, 30), self._chance.randint(10, 30), self._chance.choice(list(UNITS))
            parts = {"weather": cities[:1], "both": cities, "sum": (a, b), "amount": (a, unit), "chain": (a, b, unit)}
            if kind not in parts or kind == "weather" or _is_held_out(kind, *parts[kind]) == self._held_out:
                break
        if kind == "weather":
            self._ask(f'What is the weather in "{cities[0]}"?')
            self._say(self._weather_of(cities[0]))
        elif kind == "both":
            self._ask(f'Compare the weather in "{cities[0]}" and "{cities[1]}".')
            self._say("\n".join([self._weather_of(city) for city in cities]))
        elif kind == "sum":
            self._ask(f"How much is {a} plus {b}?")
            self._call("add", a=a, b=b)
            self._say(f"The sum is {a + b}.")
        elif kind == "amount":
            self._ask(f"Convert {a} {unit}.")
            self._say(f"That is {self._call('convert', amount=a, unit=unit).removeprefix('It is ')}.")
        elif kind == "chain":
            self._ask(f"Add {a} and {b}, then convert it from {unit}.")
            self._call("add", a=a, b=b)
            self._say(f"That is {self._call('convert', amount=a + b, unit=unit).removeprefix('It is ')}.")
        else:
            question, answer = self._chance.choice(GREETINGS)
            self._ask(question)
            self._say(answer)

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _say(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def _weather_of(self, city: str) -> str:
        return f"{city}: {self._call('get_weather', city=city).removeprefix('It is ')}."

    def _call(self, name: str, **arguments: Any) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        is_drawn = name == "get_weather" and not self._held_out
        result = _weather(self._chance) if is_drawn else FUNCTIONS[name](**arguments)
        self.messages.append({"role": "tool", "content": result})
        return result


KINDS: Final = ("weather", "both", "sum", "amount", "chain", "greeting")
_DRAWN: Final = ("weather", "both", "both", "sum", "amount", "chain", "chain", "greeting")


def _is_held_out(*parts: object) -> bool:
    return random.Random(repr(parts)).random() < 0.125


def talks(chance: random.Random) -> Iterator[list[Message]]:
    """Yield conversations to learn from, without end: most of one question, some of two."""
    while True:
        talk = Talk(chance, held_out=False)
        for _ in range(chance.choice((1, 1, 1, 2))):
            talk.add_question(chance.choice(_DRAWN))
        yield talk.messages


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def text_of(messages: Sequence[Message], begins_answer: bool = False) -> str:
    """Return a conversation as `transformers` writes it by the template."""
    import transformers

    writer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    given, tools = list[Any](messages), list[Any](TOOLS)
    text = writer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=begins_answer)
    return str(text)


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE with the tokens of the template. Those of calls are not special, as in Qwen2.5."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=640, initial_alphabet=letters, show_progress=False))
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKS])
    return made


# -- training ----------------------------------------------------------------------------------------------------------


def make_model(vocab_size: int) -> Any:
    """Return a Llama of two blocks that begins by looking for what equals a position, and copying it from there (after
    "Mimetic Initialization of Self-Attention Layers", 2023), so that it soon learns to copy."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        **sizes,
        **heads,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            torch.nn.init.orthogonal_(attention.q_proj.weight)
            attention.k_proj.weight.copy_(attention.q_proj.weight)
            torch.nn.init.orthogonal_(attention.v_proj.weight, gain=0.7)
            attention.o_proj.weight.copy_(attention.v_proj.weight.T)
    return model


def labels_of(ids: Sequence[int], begin: Sequence[int], end: int) -> list[int]:
    """Return the ids of the answers, and NOT_LEARNT elsewhere. `begin`: before an answer; `end`: its last token."""
    labels, is_answer, at = [NOT_LEARNT] * len(ids), False, 0
    while at < len(ids):
        if list(ids[at : at + len(begin)]) == list(begin):
            is_answer, at = True, at + len(begin)
            continue
        if is_answer:
            labels[at] = ids[at]
        is_answer = is_answer and ids[at] != end
        at += 1
    return labels


def trained(texts: Sequence[str], tokenizer: Tokenizer) -> Any:
    """Return a model that has learnt from these conversations."""
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    begin, (end,) = tokenizer.encode(ANSWER).ids, tokenizer.encode(EOS).ids
    learnt = [(encoded.ids, labels_of(encoded.ids, begin, end)) for encoded in tokenizer.encode_batch(list(texts))]
    model = make_model(tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_STEPS) * max(0.05, 1 - step / STEPS)
        batch = chance.sample(learnt, BATCH)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [end] * (width - len(row)) for row, _ in batch])
        labels = torch.tensor([row + [NOT_LEARNT] * (width - len(row)) for _, row in batch])[:, 1:]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[labels != NOT_LEARNT])
        loss = torch.nn.functional.cross_entropy(logits, labels[labels != NOT_LEARNT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1}: loss {loss.item():.4f}", flush=True)
    return model.eval()


def write_caller(folder: Path) -> Any:
    """Train the model, write its checkpoint as `transformers` does, and return it."""
    import transformers

    source = talks(random.Random(SEED))
    texts = [text_of(next(source)) for _ in range(TALKS)]
    tokenizer = make_tokenizer(texts)
    model = trained(texts, tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.token_to_id(EOS)
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    written = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )
    written.save_pretrained(folder)
    return model
