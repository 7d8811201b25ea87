"""Numbers and names that cannot be, as a person types them: one sentence each, and soon."""

from pathlib import Path

import pytest

from tangram.cli import main
from tests.planner.commands import refused

HERE = ("llama-3-8b", "--cluster", "h100-8x8")
CLUSTER = Path(__file__).parents[2] / "src/tangram/hardware/clusters/h100-8x8.toml"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rate = 50e9", "rate = " + 400 * "9"), "links.1.rate is 99999999... (400 digits); write a number above 0"),
        (("rate = 50e9", "rate = 1e-300"), "links.1.rate is 1e-300; write a number above 0, not below 1e-30"),
        (("rate = 50e9", "rate = 1e308"), "links.1.rate is 1e+308; write a number above 0, not beyond 1e+30"),
        (("latency = 6.6e-6", "latency = 1e300"), "links.1.latency is 1e+300; write a number from 0, not beyond 1e+30"),
        (("ranks = 64", "ranks = 100_000_000", 2), "ranks is 100000000; write a whole number from 1 to 10000000"),
        (('name = "h100"', 'name = "quantum9"'), "there is no device 'quantum9'; there are "),
        (('name = "h100"', 'name = "nvidia"'), "there is no device 'nvidia'"),
        (('name = "h100"', 'name = "h10"'), "there is no device 'h10' (did you mean 'h100'"),
    ],
)
def test_a_clusters_file(
    change: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(CLUSTER.read_text().replace(*change))
    assert said in refused(capsys, "llama-3-8b", "--cluster", str(path))


def test_a_device_is_found_in_capitals_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for name in ("h100", "H100"):
        path = tmp_path / "mine.toml"
        path.write_text(CLUSTER.read_text().replace('name = "h100"', f'name = "{name}"'))
        assert main(["plan", "llama-3-8b", "--cluster", str(path), "--gpus", "8", "--explain", "dp=8"]) == 1
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seq", "0"), "a step of 4194304 tokens has no sample of 0"),
        (("--tokens-per-batch", ""), '"" is no number of tokens'),
        (("--tokens-per-batch", "1e40"), "a step has at most 1,099,511,627,776 tokens"),
        (("--top", "1000000"), "Invalid value for '--top'"),
        (("--hours", "72"), "--hours is the deadline of --train-tokens: give both"),
    ],
)
def test_options(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *HERE, *arguments)
