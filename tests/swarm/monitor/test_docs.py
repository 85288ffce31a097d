"""docs/run/monitor.md: its sample of a configuration fits the monitor, and it names what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.commands.monitor import monitor
from swarm.monitor.metrics import metrics_text
from swarm.monitor.told_counts import ToldCounts
from tests.swarm.status.scenes import NOW, chain_of, finite, heads_of, model_shown, peer, server, shown
from tests.swarm.status.test_data_set import shown as shown_of_pages

PAGE = (Path(__file__).parents[3] / "docs" / "run" / "monitor.md").read_text()
PROMTOOL = shutil.which("promtool")


def sample() -> str:
    """The configuration with a token."""
    first, second = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return str(first + second)


def test_the_sample_names_the_address_that_is_listened_at() -> None:
    [listen] = [option.default for option in monitor.params if option.name == "listen"]
    assert f'targets: ["{listen}"]' in sample()


def test_every_option_is_explained() -> None:
    names = [name for option in monitor.params for name in option.opts if name.startswith("--")]
    assert [name for name in names if name not in PAGE and name not in ("--json", "--tied", "--listen")] == []


@pytest.mark.soak
@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_prometheus_takes_the_sample(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    text = sample().replace("/etc/prometheus/barnraise_token", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(text)
    subprocess.run([str(PROMTOOL), "check", "config", str(tmp_path / "prometheus.yml")], check=True, timeout=60)


def test_every_metric_is_explained() -> None:
    manifest, records = finite(), {name: peer(name=name, loss=2.0) for name in "abc"}
    chain = chain_of(heads_of(manifest, "abc", 3))
    texts = [
        metrics_text(state, [chain], ToldCounts(NOW))
        for state in (
            shown(manifest, records, [chain], "abc"),
            shown_of_pages({}, {}),
            model_shown({"a": server(0, 2)}),
        )
    ]
    names = {name for text in texts for name in re.findall(rb"^# TYPE (\w+) ", text, re.MULTILINE)}
    assert len(names) > 15
    assert sorted(name.decode() for name in names if f"`{name.decode()}" not in PAGE.replace("{", "`")) == []
