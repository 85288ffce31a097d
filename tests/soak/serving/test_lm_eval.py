"""lm-eval against `peer api` and against `transformers`: the same figures from the same checkpoint.

lm-eval has an environment of its own, made once in a folder of the cache with the pinned torch and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.gateway.served_model import KEY, NAME, served_model, write_checkpoint

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(1800)]

REPO = Path(__file__).parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "barnraise-tests"
VERSION = "0.4.13"
RUN_S = 1200.0
PROGRAM = """\
import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

model, arguments, folder, out = sys.argv[1:]
tasks = ["choices", "continuations"]
found = simple_evaluate(
    model=model,
    model_args=arguments,
    tasks=tasks,
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
)
samples = {task: [one["resps"] for one in found["samples"][task]] for task in tasks}
with open(out, "w") as file:
    json.dump({"results": found["results"], "samples": samples}, file, default=str)
"""
"""For lm-eval's own environment: MODEL MODEL_ARGS FOLDER OUT."""
CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CONTINUATIONS = """\
task: continuations
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/continuations.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["the", "zq"], max_gen_toks: 24, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = ["Once upon a time", "The swarm of peers", "In the thin air there", "Grüße aus der Ferne:", "2 + 2 ="]
ENDS = [" there was a swarm", " an inn", "the end", " zig zag äöü", " 4"]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of an environment with lm-eval."""
    folder = CACHE / f"lm-eval-{VERSION}"
    found, made = folder / "bin" / "python", folder / "complete"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pins = ["-c", str(REPO / "constraints.txt")]
        wanted = [f"lm-eval[api,hf]=={VERSION}", "torch", "transformers"]
        subprocess.run([str(found), "-m", "pip", "install", "--quiet", *pins, *wanted], check=True)
        made.touch()
    return found


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    for name, text in (("choices", CHOICES), ("continuations", CONTINUATIONS)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
        asked = [
            {"question": question, "choices": ENDS, "answer": at if name == "choices" else "x"}
            for at, question in enumerate(QUESTIONS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))


def evaluate(python: Path, kind: str, tasks: Path, out: Path, **arguments: Any) -> dict[str, Any]:
    """Return the results of lm-eval, and what the model said to each question."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": KEY, "HF_HOME": str(tasks / "hf")}
    command = [str(python), "-c", PROGRAM, kind, given, str(tasks), str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_figures_are_those_of_transformers(tmp_path: Path, python: Path) -> None:
    write_tasks(tmp_path / "tasks")
    local = tmp_path / "local"
    write_checkpoint(local)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (local / "tokenizer_config.json").write_text(json.dumps(ends))
    right = evaluate(
        python, "hf", tmp_path / "tasks", tmp_path / "hf.json", pretrained=local, device="cpu", dtype="float32"
    )
    with served_model(tmp_path / "served") as served:
        told = evaluate(
            python,
            "local-completions",
            tmp_path / "tasks",
            tmp_path / "api.json",
            model=NAME,
            base_url=f"{served.url}/v1/completions",
            tokenizer=local,
            tokenizer_backend="huggingface",
        )
    assert told["samples"]["continuations"] == right["samples"]["continuations"]
    for own, other in zip(told["samples"]["choices"], right["samples"]["choices"], strict=True):
        assert len(own) == len(other) == len(ENDS)
        for ((logprob, is_greedy),), ((expected, was_greedy),) in zip(own, other, strict=True):
            assert float(logprob) == pytest.approx(float(expected), abs=1e-3) and is_greedy == was_greedy
    for task, figures in right["results"].items():
        assert told["results"][task] == pytest.approx(figures, nan_ok=True)
